"""The training loop: recipe in, run directory out.

A run is a function of its recipe and of the data: step n reads batch n - 1, and a checkpoint holds everything else that moves
(weights, moments, random states, the step). So a run killed at any moment and resumed gives the losses of one never stopped.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import cast

import torch

from proteus_lm.config import ProteusConfig
from proteus_lm.model import ProteusForCausalLM
from proteus_lm.run import PARAMETERS, RECIPE, SESSIONS, Run
from proteus_lm.train import setup
from proteus_lm.train.checkpoint import check_space, full_disk, load_checkpoint, newest_complete
from proteus_lm.train.graph import GraphedPiece
from proteus_lm.train.metrics import Metrics, Screen, said_once
from proteus_lm.train.optimizer import decay_groups, make_optimizer
from proteus_lm.train.ranks import Ranks
from proteus_lm.train.recipe import Recipe
from proteus_lm.train.step import Piece
from proteus_lm.train.trainer import Trainer


def train(recipe: Recipe, out: str | Path, *, resume: str = "auto", stop_at: int | None = None) -> Run:
    """Train a model as a recipe says, into the run directory `out`.

    Args:
        recipe: from `load_recipe`.
        out: the run directory; made when it is not there.
        resume: "auto" = continue the run in `out` from its newest complete checkpoint, or begin one where there is none; "never" =
            begin, and refuse to touch a run that is there; "restart" = remove the run that is there and begin.
        stop_at: stop and save after this step although the recipe has more (its schedule stays); None = go to the end.

    Returns:
        The run, opened.

    Raises:
        RecipeError, FileExistsError, CheckpointError, ValueError: before the first step, for anything that cannot work.
        NonFiniteError: when a loss or gradient is not finite (unless the recipe skips those); the weights before it are saved.
        CheckpointError: when a checkpoint cannot be written, or the disk is full; the checkpoints before are whole.
        TrainingInterrupted: (a SystemExit) after SIGTERM or SIGINT, with the step finished and saved.
    """
    if stop_at is not None and stop_at < 1:
        raise ValueError(f"stop_at is {stop_at}; it must be at least 1, or left out to train to the recipe's end")
    device = setup.check_machine(recipe)
    out = Path(out)
    with setup.ambient(recipe.train, device), full_disk(out), said_once(), contextlib.ExitStack() as stack:
        trainer = _prepare(recipe, out, resume, device, stack)
        if trainer.ranks.first and trainer.progress.step < trainer.end(stop_at):  # without a step to do, a run stays as it is
            _open_run(trainer, stack)
        trainer.go(stop_at)
    return Run.open(out)


def _prepare(recipe: Recipe, out: Path, resume: str, device: torch.device, stack: contextlib.ExitStack) -> Trainer:
    """Everything that can fail before the first step; the run directory is touched last."""
    ranks = Ranks.start(device)
    stack.callback(ranks.leave)
    inputs = setup.open_inputs(recipe, ranks.rank, ranks.world_size)
    recipe, options = inputs.recipe, inputs.recipe.train
    torch.manual_seed(options.seed)
    model = ProteusForCausalLM(ProteusConfig(**recipe.model))
    model.to(ranks.device)  # pyright: ignore[reportArgumentType] - transformers wraps `to`, and its type with it
    if options.gradient_checkpointing:
        # Its name from transformers 5.2x on, and the one before.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.wave = options.wave
    ranks.check_same(model)
    groups = decay_groups(model)
    forward = torch.compile(model) if options.compile else model
    piece = Piece(forward, options.precision, ranks.device)
    if options.cuda_graph:
        piece = GraphedPiece(forward, options.precision, ranks.device, list(model.parameters()))
    trainer = Trainer(
        recipe=recipe,
        out=out,
        ranks=ranks,
        model=model,
        piece=piece,
        optimizer=make_optimizer(model, groups, options),
        groups=groups,
        loader=inputs.loader,
        micro=inputs.micro,
        probe=inputs.loader.batch(0).tokens[:1, :-1].to(ranks.device),
        validation=inputs.validation,
        validation_context=inputs.validation_context,
        tokenizer=inputs.tokenizer,
        about=inputs.about,
        screen=Screen(options.steps, quiet=not ranks.first),
    )
    stack.callback(trainer.screen.close)
    _begin(trainer, resume, stack)
    return trainer


def _begin(trainer: Trainer, resume: str, stack: contextlib.ExitStack) -> None:
    """Open the run directory and, where it holds a checkpoint, continue from it."""
    out, ranks, screen = trainer.out, trainer.ranks, trainer.screen
    if ranks.first:  # it makes the folder ready; the others look when it is
        stack.enter_context(setup.locked(out))
        setup.make_ready(out, resume)
    ranks.wait()
    start, damaged = newest_complete(out)
    for complaint in damaged:
        screen.say(f"left out a damaged checkpoint: {complaint}")
    if start is None and (out / RECIPE).is_file():
        screen.say(f"{out} has no checkpoint: beginning anew")
    if start is not None:
        for line in setup.check_same(start, trainer.recipe, trainer.about):
            screen.say(f"changed since the run began: {line}")
        trainer.progress = load_checkpoint(start, trainer.model, trainer.optimizer, trainer.groups)
        screen.say(f"continuing {out} from step {trainer.progress.step} of {trainer.recipe.train.steps}")


def _open_run(trainer: Trainer, stack: contextlib.ExitStack) -> None:
    """Write what a run says of itself, and open its metrics."""
    out, options, progress = trainer.out, trainer.recipe.train, trainer.progress
    saves = -(-(options.steps - progress.step) // (options.save_every or options.steps))
    check_space(out, trainer.model, min(saves, options.keep + 1 if progress.step == 0 else 1), trainer.optimizer)
    trainer.recipe.save(out / RECIPE)
    (out / PARAMETERS).write_text(json.dumps(trainer.groups.to_dict(), indent=1), encoding="utf-8")
    with open(out / SESSIONS, "a", encoding="utf-8") as file:
        file.write(json.dumps(setup.session(trainer.ranks.device, progress.step)) + "\n")
    trainer.metrics = Metrics(out, progress.step, tensorboard=options.tensorboard, wandb=options.wandb)
    stack.callback(trainer.metrics.close)
    count = sum(p.numel() for p in trainer.model.parameters())
    trainer.screen.say(f"{out}: {count:,} parameters on {trainer.ranks.device}, {options.precision}")
    config = cast(ProteusConfig, trainer.model.config)
    notes = [*setup.never_open(config.schedule, trainer.recipe.data.context), *setup.update_blocks(config, options)]
    for line in [*trainer.groups.lines(), *notes]:
        trainer.screen.say(line)
