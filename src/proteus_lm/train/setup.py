"""What must be right before the first step: device and precision, data against recipe, the folder of the run.

Every check that can fail does so here, before any work is done that could be lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proteus_lm.config import ProteusConfig
from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.files import make_folder
from proteus_lm.data.loader import Loader
from proteus_lm.data.tokenizer import Tokenizer
from proteus_lm.hope import update_schedule
from proteus_lm.run import CONTENTS, RECIPE
from proteus_lm.schedule import ActivationSchedule
from proteus_lm.train.checkpoint import about_checkpoint, newest_complete, remove_leftovers
from proteus_lm.train.metrics import require_wandb
from proteus_lm.train.optimizer import learning_rate
from proteus_lm.train.recipe import Recipe, RecipeError, TrainRecipe, make_recipe, model_fields

RESUME = ("auto", "never", "restart")
# A run continues only where these are as they were; the rest of a recipe may change between sessions.
_FIXED = ("train.seed", "train.batch_size")


@dataclass(frozen=True)
class Inputs:
    """What a run reads, opened and checked against its recipe.

    Args:
        recipe: with what the data decide (`resolve`).
        loader: of this process. micro: rows of one of its micro-batches.
        validation: None for a recipe that never validates; validation_context: predictions in a window of it.
        about: what a checkpoint keeps of them, with which a resume must agree.
    """

    recipe: Recipe
    tokenizer: Tokenizer
    loader: Loader
    micro: int
    validation: TokenDataset | None
    validation_context: int
    about: dict[str, Any]


def check_machine(recipe: Recipe) -> torch.device:
    """The device of a run. Raises RecipeError or ValueError for what this machine lacks of what the recipe asks for."""
    device = choose_device(recipe.train)
    check_graph(recipe, device)
    if recipe.train.wandb is not None:
        require_wandb()
    return device


def open_inputs(recipe: Recipe, rank: int = 0, world_size: int = 1) -> Inputs:
    """Open the data of a recipe for one process of `world_size`; every check that needs only the two is made.

    Raises:
        RecipeError, ValueError, FileNotFoundError: for data that are not there, damaged, too short, or not the recipe's.
    """
    options = recipe.train
    rows, micro = _rows(options, world_size)
    dataset = TokenDataset(recipe.data.path, "train")
    tokenizer = dataset.tokenizer
    recipe = resolve(recipe, tokenizer)
    loader = Loader(
        dataset,
        batch_size=rows,
        context=recipe.data.context,
        seed=options.seed,
        rank=rank,
        world_size=world_size,
        allow_short_documents=recipe.data.allow_short_documents,
    )
    validation = TokenDataset(recipe.data.path, "validation") if options.validate_tokens else None
    return Inputs(
        recipe=recipe,
        tokenizer=tokenizer,
        loader=loader,
        micro=micro,
        validation=validation,
        validation_context=0 if validation is None else validation_context(recipe, validation),
        about={"recipe": recipe.to_dict(), "tokenizer": tokenizer.hash, "data": fingerprint(dataset)},
    )


def _rows(options: TrainRecipe, world_size: int) -> tuple[int, int]:
    """Rows of one process in an optimiser step, and in one of its micro-batches. Raises RecipeError when they do not go up."""
    rows, rest = divmod(options.batch_size, world_size)
    micro = options.micro_batch_size or rows
    if rest or rows % micro:
        raise RecipeError(
            f"train.batch_size {options.batch_size} over {world_size} processes is {rows} rows each (rest {rest}), which must be "
            f"whole micro-batches of {micro}; change train.batch_size or train.micro_batch_size"
        )
    return rows, micro


def choose_device(recipe: TrainRecipe) -> torch.device:
    """The device a recipe asks for. Raises RecipeError when it is not here or cannot do the precision."""
    cuda = torch.cuda.is_available()
    if recipe.device == "cuda" and not cuda:
        raise RecipeError("train.device is 'cuda', but PyTorch sees no CUDA device; use auto or cpu, or install PyTorch with CUDA")
    device = torch.device("cuda" if cuda and recipe.device != "cpu" else "cpu")
    if recipe.precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise RecipeError(f"train.precision is 'bf16', which {name} does not support; use train.precision=fp32")
    return device


def check_graph(recipe: Recipe, device: torch.device) -> None:
    """Raise RecipeError for `train.cuda_graph` where no graph can be captured."""
    if not recipe.train.cuda_graph:
        return
    reason = None
    if device.type != "cuda":
        reason = f"the run is on {device.type}"
    elif ProteusConfig(**recipe.model).positions == "document":
        reason = "model.positions is 'document', and packed documents change shape from batch to batch"
    elif recipe.train.gradient_checkpointing:
        reason = "train.gradient_checkpointing is true, which saves random states a capture does not allow"
    if reason:
        raise RecipeError(f"train.cuda_graph is true, but {reason}; use train.cuda_graph=false")


@contextlib.contextmanager
def ambient(recipe: TrainRecipe, device: torch.device) -> Iterator[None]:
    """Threads and deterministic algorithms as the recipe says, and as they were afterwards; random generators seeded."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill: Any = torch.utils.deterministic  # a module whose setting is made on the fly, unknown to type checkers
    filled = fill.fill_uninitialized_memory
    wanted = device.type == "cpu" if recipe.deterministic is None else recipe.deterministic
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    if wanted and not deterministic:
        # Filling fresh memory finds bugs and costs time; it changes no result.
        fill.fill_uninitialized_memory = False
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    torch.manual_seed(recipe.seed)
    np.random.seed(recipe.seed % 2**32)
    random.seed(recipe.seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        fill.fill_uninitialized_memory = filled


def resolve(recipe: Recipe, tokenizer: Tokenizer) -> Recipe:
    """The recipe with what the data decide: an absolute path, the vocabulary and the end token where the recipe leaves them out.

    Args:
        tokenizer: the one the data were made with.

    Raises:
        RecipeError: when the recipe's vocabulary is smaller than that, or another token ends its documents.
    """
    vocabulary = tokenizer.vocab_size
    asked = recipe.model.get("vocab_size", vocabulary)
    if asked < vocabulary:
        raise RecipeError(
            f"model.vocab_size is {asked}, but the tokenizer of {recipe.data.path} has {vocabulary} tokens; use at least that, "
            "or leave it out"
        )
    end = recipe.model.get("eos_token_id", tokenizer.eos_id)
    if tokenizer.eos_id not in (end if isinstance(end, list) else [end]):
        raise RecipeError(
            f"model.eos_token_id is {end}, but documents of {recipe.data.path} end with token {tokenizer.eos_id}; use that, or "
            "leave it out"
        )
    sections = recipe.to_dict()
    sections["model"] |= {"eos_token_id": end, "vocab_size": asked}
    sections["data"]["path"] = str(Path(recipe.data.path).resolve())
    return make_recipe(sections)


def validation_context(recipe: Recipe, dataset: TokenDataset) -> int:
    """Predictions in a window of validation: the training context, or what the longest document holds where the recipe allows that.

    Raises:
        RecipeError: when no document holds such a window.
    """
    longest, context = dataset.longest_document, recipe.data.context
    if longest <= context and not recipe.data.allow_short_documents:
        raise RecipeError(
            f"data.context is {context}, but the longest document of the validation split of {recipe.data.path} has {longest} "
            f"tokens, and a window there takes {context + 1}; use a shorter context, longer documents, train.validate_tokens=0, or "
            "data.allow_short_documents=true"
        )
    return min(context, longest - 1)


def never_open(schedule: ActivationSchedule, context: int) -> list[str]:
    """A warning, as one line, when some blocks of memory open past the last position of a training window; else none."""
    closed = schedule.blocks - schedule.active_blocks(context - 1)
    if closed == 0:
        return []
    return [
        f"warning: {closed} of {schedule.blocks} blocks of memory open at position {context} or later, past the training context: "
        "they are never trained; use fewer blocks or a longer context"
    ]


def update_blocks(config: ProteusConfig, options: TrainRecipe) -> list[str]:
    """How far the updates open over training, as one line, where they open by blocks; else none."""
    if config.update_blocks == 1:
        return []
    schedule = update_schedule(config, options.steps)
    opens = schedule.unlock_position(schedule.blocks - 1)
    if opens >= options.steps:
        count = schedule.active_blocks(options.steps - 1)
        return [f"warning: only {count} of {schedule.blocks} update blocks open within the {options.steps} steps of the run"]
    rate = learning_rate(options, opens + 1) / options.lr
    return [
        f"update blocks: {schedule.blocks}; the last opens at step {opens + 1} of {options.steps}, at {rate:.0%} of the peak "
        "learning rate (model.schedule_frac opens them earlier)"
    ]


def fingerprint(dataset: TokenDataset) -> str:
    """SHA-256 of the manifest's content, in which are those of the shards: the same data anywhere have the same one."""
    return hashlib.sha256(json.dumps(dataset.manifest.to_dict(), sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run directory for one process; it is made when it is not there. Where the system has no flock there is no lock.

    Raises:
        FileExistsError: when there is a file at its place, or above it.
        BlockingIOError: when another process trains in it.
    """
    make_folder(run)
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(run, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = f"another process is training in {run}; wait for it, stop it, or choose another folder"
            raise BlockingIOError(busy) from None
        yield
    finally:
        os.close(descriptor)


def make_ready(run: Path, resume: str) -> None:
    """Look whether a run may begin or go on in a folder that is there, and tidy it.

    Args:
        resume: "auto" = continue where there is a complete checkpoint, else begin; "never" = begin, and refuse where a run is;
            "restart" = remove the run that is there, and begin.

    Raises:
        FileExistsError: when the folder holds something that would be lost.
        ValueError: when every checkpoint of the run is damaged.
    """
    if resume not in RESUME:
        raise ValueError(f"resume is {resume!r}; it must be one of {', '.join(RESUME)}")
    is_run = (run / RECIPE).is_file()
    if not is_run and any(run.iterdir()):
        raise FileExistsError(f"{run} exists and is not a run; choose another folder")
    if is_run and resume == "never":
        raise FileExistsError(
            f"{run} holds a run already; continue it, choose another folder, or ask for a restart, which removes it"
        )
    if is_run and resume == "restart":
        _remove_run(run)
    remove_leftovers(run)
    folder, complaints = newest_complete(run)
    if folder is None and complaints:
        raise ValueError(
            f"no checkpoint of {run} is whole ({'; '.join(complaints)}); copy one again, or ask for a restart to begin anew"
        )


def check_same(folder: Path, recipe: Recipe, about: dict[str, Any]) -> list[str]:
    """Compare a recipe with the one a checkpoint was made by, and its model with the config.json there.

    Returns:
        The differences that are allowed, one line each.

    Raises:
        RecipeError: naming every difference in model, context, seed or batch, and other data or another tokenizer.
    """
    saved = about_checkpoint(folder)
    before = _flat(saved["recipe"] | {"model": _model(ProteusConfig.from_pretrained(folder))})
    now = _flat(about["recipe"] | {"model": _model(ProteusConfig(**recipe.model))})
    differ = [key for key in sorted(before | now) if before.get(key) != now.get(key) and key != "data.path"]
    lines = {key: f"{key}: {before.get(key)!r} in the run, {now.get(key)!r} in the recipe" for key in differ}
    # The steps of a run place the unlocks of update blocks: a run half way through would find itself on another schedule.
    fixed = (*_FIXED, "train.steps") if recipe.model.get("update_blocks", 1) > 1 else _FIXED
    fatal = [line for key, line in lines.items() if key in fixed or key.startswith(("model.", "data."))]
    fatal += other_data(saved, about, recipe.data.path)
    if fatal:
        raise RecipeError(
            f"{folder.parent.parent} was begun with another recipe: {'; '.join(fatal)}. Give the run's own recipe "
            f"({folder.parent.parent / RECIPE}; its model is that of {folder / 'config.json'}), choose another folder, or ask for "
            "a restart, which removes the run"
        )
    return list(lines.values())


def other_data(saved: dict[str, Any], about: dict[str, Any], path: str) -> list[str]:
    """How the data of a checkpoint (`about_checkpoint`) are not those at `path` (`Inputs.about`), one line each."""
    names = {"tokenizer": "the tokenizer of the data (hash)", "data": "the data (hash of the manifest)"}
    return [
        f"{name}: {saved[key][:12]} in the run, {about[key][:12]} at {path}"
        for key, name in names.items()
        if saved[key] != about[key]
    ]


def _model(config: Any) -> dict[str, Any]:
    """Every field of a model as JSON holds it, those that a recipe leaves out too."""
    return {name: json.loads(json.dumps(getattr(config, name))) for name in model_fields()}


def _remove_run(run: Path) -> None:
    """Remove what a run consists of and nothing else; a run half removed is still known as one."""
    for name in CONTENTS:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def session(device: torch.device, step: int) -> dict[str, Any]:
    """What RUN/sessions.jsonl says of a start or a resume: when, command, versions, git commit, device, threads."""
    names = ("proteus-lm", "torch", "transformers", "safetensors", "tokenizers", "numpy")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "from_step": step,
        "command": sys.argv,
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in names},
        "git_commit": git_commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def git_commit() -> str | None:
    """The commit of the source tree this package runs from, "+" behind it when files differ; None outside a repository."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # no git, or a repository around an installed package
    commit = _git("rev-parse", "HEAD")
    return commit and commit + ("+" if _git("status", "--porcelain", "-uno") else "")


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _flat(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
