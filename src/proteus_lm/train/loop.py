"""The training loop: recipe in, run directory out.

A run is a function of its recipe and of the data: step n reads batch n - 1, and a checkpoint holds everything else that moves
(weights, moments, random states, the step). So a run killed at any moment and resumed gives the losses of one never stopped.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proteus_lm.config import ProteusConfig
from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.loader import Loader
from proteus_lm.data.tokenizer import Tokenizer
from proteus_lm.evals.perplexity import evaluate
from proteus_lm.model import ProteusForCausalLM
from proteus_lm.run import PARAMETERS, RECIPE, SESSIONS, Run
from proteus_lm.train import setup
from proteus_lm.train.checkpoint import Progress, check_space, load_checkpoint, save_checkpoint
from proteus_lm.train.metrics import Metrics, Screen, perplexity
from proteus_lm.train.optimizer import Groups, decay_groups, learning_rate, make_adamw, set_learning_rate
from proteus_lm.train.ranks import Ranks
from proteus_lm.train.recipe import Recipe
from proteus_lm.train.signals import TrainingInterrupted, watch
from proteus_lm.train.step import NonFiniteError, forward_backward, report_nonfinite


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
        CheckpointError: when a checkpoint cannot be written; those before it are whole.
        TrainingInterrupted: (a SystemExit) after SIGTERM or SIGINT, with the step finished and saved.
    """
    device = setup.choose_device(recipe.train)
    with setup.ambient(recipe.train, device), contextlib.ExitStack() as stack:
        trainer = _prepare(recipe, Path(out), resume, device, stack)
        trainer.go(stop_at)
    return Run.open(out)


def _prepare(recipe: Recipe, out: Path, resume: str, device: torch.device, stack: contextlib.ExitStack) -> Trainer:
    """Everything that can fail before the first step, in the order that loses least."""
    ranks = Ranks.start(device)
    options = recipe.train
    rows, rest = divmod(options.batch_size, ranks.world_size)
    micro = options.micro_batch_size or rows
    if rest or rows % micro:
        raise setup.RecipeError(
            f"train.batch_size {options.batch_size} over {ranks.world_size} processes is {rows} rows each (rest {rest}), which must be "
            f"whole micro-batches of {micro}; change train.batch_size or train.micro_batch_size"
        )
    dataset = TokenDataset(recipe.data.path, "train")
    tokenizer = setup.open_tokenizer(dataset, recipe.data.path)
    recipe = setup.resolve(recipe, tokenizer.vocab_size)
    setup.check_documents(recipe, dataset, "train")
    validation = _validation(recipe)
    torch.manual_seed(options.seed)
    model = ProteusForCausalLM(ProteusConfig(**recipe.model)).to(ranks.device)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    ranks.check_same(model)
    groups = decay_groups(model)
    optimizer = make_adamw(groups, options)
    about = {"recipe": recipe.to_dict(), "tokenizer": tokenizer.hash, "data": setup.fingerprint(dataset)}

    start = _agree_on_start(ranks, out, resume, stack)
    screen = Screen(options.steps, quiet=not ranks.first)
    stack.callback(screen.close)
    progress = Progress()
    if start is not None:
        for line in setup.check_same(start, recipe, about):
            screen.say(f"changed since the run began: {line}")
        progress = load_checkpoint(start, model, optimizer, groups)
        screen.say(f"continuing {out} from step {progress.step} of {options.steps}")
    loader = Loader(
        dataset, batch_size=rows, context=recipe.data.context, seed=options.seed, rank=ranks.rank, world_size=ranks.world_size
    )
    trainer = Trainer(
        recipe=recipe,
        out=out,
        ranks=ranks,
        model=model,
        forward=torch.compile(model) if options.compile else model,
        optimizer=optimizer,
        groups=groups,
        loader=loader,
        micro=micro,
        probe=loader.batch(0).tokens[:1, :-1].to(ranks.device),
        validation=validation,
        tokenizer=tokenizer,
        about=about,
        progress=progress,
        screen=screen,
        metrics=None,
    )
    if ranks.first:
        _open_run(trainer, stack)
    return trainer


def _agree_on_start(ranks: Ranks, out: Path, resume: str, stack: contextlib.ExitStack) -> Path | None:
    """The checkpoint to continue from; the first process makes the folder ready, the others look when it is."""
    if ranks.first:
        stack.enter_context(setup.locked(out))
        setup.choose_start(out, resume)
    ranks.wait()
    return setup.newest_complete(out)[0]


def _validation(recipe: Recipe) -> TokenDataset | None:
    if recipe.train.validate_tokens == 0:
        return None
    dataset = TokenDataset(recipe.data.path, "validation")
    setup.check_documents(recipe, dataset, "validation")
    return dataset


def _open_run(trainer: Trainer, stack: contextlib.ExitStack) -> None:
    """Write what a run says of itself, and open its metrics."""
    out, options, progress = trainer.out, trainer.recipe.train, trainer.progress
    saves = -(-(options.steps - progress.step) // (options.save_every or options.steps))
    check_space(out, trainer.model, min(saves, options.keep + 1 if progress.step == 0 else 1))
    trainer.recipe.save(out / RECIPE)
    (out / PARAMETERS).write_text(json.dumps(trainer.groups.to_dict(), indent=1), encoding="utf-8")
    with open(out / SESSIONS, "a", encoding="utf-8") as file:
        file.write(json.dumps(setup.session(trainer.ranks.device, progress.step)) + "\n")
    trainer.metrics = Metrics(out, progress.step, tensorboard=options.tensorboard)
    stack.callback(trainer.metrics.close)
    count = sum(p.numel() for p in trainer.model.parameters())
    trainer.screen.say(f"{out}: {count:,} parameters on {trainer.ranks.device}, {options.precision}")
    for line in trainer.groups.lines():
        trainer.screen.say(line)


@dataclass
class Trainer:
    """A run in progress: what `_prepare` put together."""

    recipe: Recipe
    out: Path
    ranks: Ranks
    model: ProteusForCausalLM
    forward: Callable[..., Any]
    optimizer: torch.optim.AdamW
    groups: Groups
    loader: Loader
    micro: int
    probe: Tensor
    validation: TokenDataset | None
    tokenizer: Tokenizer
    about: dict[str, Any]
    progress: Progress
    screen: Screen
    metrics: Metrics | None

    def go(self, stop_at: int | None) -> None:
        """Steps until the recipe's end, `stop_at` or a signal; the last one is saved whatever `save_every` says."""
        options, progress = self.recipe.train, self.progress
        end = options.steps if stop_at is None else min(stop_at, options.steps)
        if progress.step >= end:
            self.screen.say(f"nothing to do: the run is at step {progress.step} of {options.steps}")
        self.model.train()
        self._since, self._tokens_since = time.perf_counter(), 0
        with watch() as signals:
            while progress.step < end:
                record = self._step()
                signal_number = int(self.ranks.total(signals.received if self.ranks.first else 0))
                last = progress.step == end or signal_number != 0
                self._after_step(record, last=last)
                if signal_number and progress.step < options.steps:
                    message = f"stopped by signal {signal_number} after step {progress.step}, which is saved; the same command continues"
                    self.screen.say(message)
                    raise TrainingInterrupted(signal_number, message)
        if progress.skipped:
            self.screen.say(f"{progress.skipped} updates were left out because their loss or gradient was not finite")

    def _step(self) -> dict[str, Any]:
        """One optimiser step; its record. Raises NonFiniteError before the update."""
        options, progress = self.recipe.train, self.progress
        step = progress.step + 1
        batch = self.loader.batch(step - 1)
        rate = learning_rate(options, step)
        set_learning_rate(self.optimizer, rate)
        loss, predictions = forward_backward(
            self.model,
            batch,
            forward=self.forward,
            positions=self.model.config.positions,
            rows=self.micro,
            precision=options.precision,
            ranks=self.ranks,
        )
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        loss_value, norm_value = torch.stack([loss, norm.to(loss)]).tolist()
        finite = torch.isfinite(torch.tensor([loss_value, norm_value])).all().item()
        if finite:
            if options.clip is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, options.clip, norm)
            self.optimizer.step()
        else:
            self._nonfinite(step, batch, loss_value, norm_value)
        self.optimizer.zero_grad(set_to_none=True)
        progress.step, progress.tokens = step, progress.tokens + predictions
        self._tokens_since += predictions
        record = {"step": step, "loss": loss_value, "perplexity": perplexity(loss_value), "lr": rate, "gradient_norm": norm_value}
        record |= {"tokens": progress.tokens}
        return record | ({"skipped": progress.skipped} if progress.skipped else {})

    def _nonfinite(self, step: int, batch: Any, loss: float, norm: float) -> None:
        """Save the batch; then count the update as left out, or save the run as it stands and stop."""
        said = report_nonfinite(self.out, step, batch, self.model, loss, norm, self.ranks.rank)
        self.ranks.wait()
        if self.recipe.train.skip_nonfinite:
            self.progress.skipped += 1
            self.screen.say(f"left out an update: {said}")
            return
        self._save(keep=None)
        raise NonFiniteError(
            f"stopped before the update. {said}. The weights of step {self.progress.step} are saved; lower train.lr, lengthen "
            "train.warmup, or set train.skip_nonfinite=true to leave such updates out"
        )

    def _after_step(self, record: dict[str, Any], *, last: bool) -> None:
        """Measure, validate, report and save, each when it is due."""
        options, step = self.recipe.train, self.progress.step
        due = {name: last or (every is not None and step % every == 0) for name, every in self._periods().items()}
        try:
            if due["log"]:
                record |= self._measure()
            if due["validate"] and self.validation is not None:
                record |= self._validate()
            if self.metrics is not None:
                self.metrics.write(record)
        except Exception:
            self._save(keep=options.keep)  # the step is done: a failure to look at it must not lose it
            raise
        self.screen.step(record, line=due["log"])
        if due["save"]:
            self._save(keep=options.keep)
        if due["log"] or due["validate"] or due["save"]:
            self._since, self._tokens_since = time.perf_counter(), 0

    def _periods(self) -> dict[str, int | None]:
        options = self.recipe.train
        return {"log": options.log_every, "validate": options.validate_every, "save": options.save_every}

    def _measure(self) -> dict[str, Any]:
        """Speed since the last measurement, memory norms by block on one fixed window, peak memory on CUDA."""
        seconds = time.perf_counter() - self._since
        found: dict[str, Any] = {"tokens_per_second": self._tokens_since / seconds}
        if self.ranks.device.type == "cuda":
            found["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.ranks.device)
        self.model.eval()
        with torch.no_grad(), self._autocast():
            cache = self.model(input_ids=self.probe, use_cache=True).past_key_values
            found["memory_norm"] = self.model.memory_norms(cache).mean(1).tolist()
        self.model.train()
        return found

    def _validate(self) -> dict[str, Any]:
        """Loss on the validation split; the first process looks, the others wait."""
        found: dict[str, Any] = {}
        if self.ranks.first and self.validation is not None:
            context = min(self.recipe.data.context, self.validation.longest_document - 1)
            with self._autocast():
                result = evaluate(
                    self.model,
                    self.validation,
                    context=context,
                    batch_size=self.micro,
                    max_tokens=self.recipe.train.validate_tokens,
                )
            loss = result.whole.mean
            found = {"validation_loss": loss, "validation_perplexity": result.perplexity, "validation_tokens": result.whole.tokens}
        self.ranks.wait()
        return found

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.ranks.device.type, dtype=torch.bfloat16, enabled=self.recipe.train.precision == "bf16")

    def _save(self, *, keep: int | None) -> None:
        if self.metrics is not None:
            self.metrics.sync()
            save_checkpoint(
                self.out, self.progress, self.model, self.optimizer, self.groups, self.tokenizer, keep=keep, about=self.about
            )
        self.ranks.wait()
