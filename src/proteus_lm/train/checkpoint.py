"""Writing a checkpoint so that a kill or a full disk at any moment leaves the one before it whole, and reading it back bit for bit.

A checkpoint is written into a hidden folder beside the others, synced to the disk and renamed; older ones go only after that.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn
from transformers.utils import logging

from proteus_lm.data.files import is_full
from proteus_lm.data.record import record_of
from proteus_lm.optim import GatedAdamW
from proteus_lm.run import CHECKPOINTS, MODEL, OPTIMIZER, TRAINER, checkpoint_path, checkpoint_steps, damage
from proteus_lm.train.optimizer import Groups, load_moments, moments

_HIDDEN = (".writing-", ".old-")


class CheckpointError(OSError):
    """A checkpoint that could not be written: the ones before it are untouched."""


@dataclass
class Progress:
    """Where a run stands beside its weights: optimiser steps done, tokens learnt from, updates left out as not finite."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0


def save_checkpoint(
    run: Path,
    progress: Progress,
    model: Any,
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    tokenizer: Any,
    *,
    keep: int | None,
    about: dict[str, Any],
) -> Path:
    """Write RUN/checkpoints/step-XXXXXXXX, then remove all but the newest `keep` (None = remove none).

    Args:
        model: has `save_pretrained`; tokenizer: has `save(folder)`.
        about: goes into trainer.json as it is (what a resume must agree with).

    Raises:
        CheckpointError: when the disk is full or a write fails; what was written of it is removed.
    """
    final = checkpoint_path(run, progress.step)
    folder = final.parent / f"{_HIDDEN[0]}{final.name}"
    try:
        remove_leftovers(run)
        folder.mkdir(parents=True)
        _write(folder, progress, model, optimizer, groups, tokenizer, about)
        _sync(folder)
        if final.exists():  # a damaged one of the same step
            final.rename(final.with_name(f"{_HIDDEN[1]}{final.name}"))
        folder.rename(final)
        _sync_entry(final.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(_failure(final, error)) from error
    if keep is not None:
        _remove_older(run, keep, progress.step)
    return final


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, groups: Groups) -> Progress:
    """Put a checkpoint's weights, moments and random states back, in place.

    Raises:
        ValueError: when the checkpoint is damaged or is that of another model.
    """
    try:
        load_model(model, folder / MODEL, strict=True)
        state = load_file(folder / OPTIMIZER)
        trainer = json.loads((folder / TRAINER).read_text(encoding="utf-8"))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"checkpoint {folder} cannot be continued from: {error}") from error
    rng = {name: state.pop(name) for name in list(state) if name.startswith("rng.")}
    load_moments(optimizer, groups, state)
    _restore_random(rng, trainer["random"])
    return Progress(trainer["step"], trainer["tokens"], trainer["skipped"])


def about_checkpoint(folder: Path) -> dict[str, Any]:
    """What `save_checkpoint` was given as `about`."""
    return json.loads((folder / TRAINER).read_text(encoding="utf-8"))["about"]


def newest_complete(run: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run (None when there is none), its contents checked; what is wrong with each newer one."""
    complaints = []
    for step in checkpoint_steps(run)[::-1]:
        folder = checkpoint_path(run, step)
        wrong = damage(folder, contents=True)
        if wrong is None:
            return folder, complaints
        complaints.append(f"{folder}: {wrong}")
    return None, complaints


def remove_leftovers(run: Path) -> None:
    """Remove what a killed process left half written or half removed."""
    for prefix in _HIDDEN:
        for folder in (run / CHECKPOINTS).glob(f"{prefix}*"):
            shutil.rmtree(folder)


def checkpoint_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Size of one checkpoint: weights, two moments of the trainable parameters, the gradient sums of a gated optimiser."""
    sums = optimizer.periods if isinstance(optimizer, GatedAdamW) else {}
    sizes = [p.numel() * p.element_size() * ((3 if p.requires_grad else 1) + (sums.get(p, 1) > 1)) for p in model.parameters()]
    return sum(sizes) + (1 << 20)


def check_space(run: Path, model: nn.Module, checkpoints: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Raise CheckpointError, before any work, when the disk cannot hold that many checkpoints."""
    need, free = checkpoints * checkpoint_bytes(model, optimizer), shutil.disk_usage(run).free
    if free < need:
        raise CheckpointError(
            f"{run} has {free / 1e6:.0f} MB free and {checkpoints} checkpoints of this run take {need / 1e6:.0f} MB; "
            "free some space, choose another folder, or keep fewer (train.keep)"
        )


@contextlib.contextmanager
def full_disk(run: Path) -> Iterator[None]:
    """Say what a disk that fills during a run loses, whatever was being written.

    Raises:
        CheckpointError: for an OSError of that kind inside.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        steps = checkpoint_steps(run)
        kept = f"nothing is lost but what came after step {steps[-1]}" if steps else "no checkpoint of it was written yet"
        raise CheckpointError(
            f"the disk of {run} is full ({error}); {kept}: free some space and run the same command again to continue"
        ) from error


def _write(
    folder: Path,
    progress: Progress,
    model: Any,
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    tokenizer: Any,
    about: dict[str, Any],
) -> None:
    with _quiet():
        model.save_pretrained(folder)
    tokenizer.save(folder)
    rng, numbers = _random_states()
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in moments(optimizer, groups).items()}
    save_file(state | rng, folder / OPTIMIZER)
    trainer = {
        "step": progress.step,
        "tokens": progress.tokens,
        "skipped": progress.skipped,
        "random": numbers,
        "about": about,
    } | record_of(folder)
    (folder / TRAINER).write_text(json.dumps(trainer, indent=1), encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the bar that transformers draws for each checkpoint."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _random_states() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Random states of PyTorch as tensors (uint8), of Python and NumPy as plain numbers."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, second = random.getstate()
    numpy_state = [kind, np.asarray(keys).tolist(), int(place), int(has_gauss), float(gauss)]
    return tensors, {"numpy": numpy_state, "python": [version, list(words), second]}


def _restore_random(tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng.cuda"])
    kind, keys, place, has_gauss, gauss = numbers["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, gauss))
    version, words, second = numbers["python"]
    random.setstate((version, tuple(words), second))


def _remove_older(run: Path, keep: int, newest: int) -> None:
    """Rename first: a folder half removed must not look like a checkpoint. What is past `newest` was left out as damaged."""
    whole = [step for step in checkpoint_steps(run) if step <= newest and damage(checkpoint_path(run, step)) is None]
    for step in whole[:-keep]:
        folder = checkpoint_path(run, step)
        shutil.rmtree(folder.rename(folder.with_name(f"{_HIDDEN[1]}{folder.name}")))


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    _sync_entry(folder)


def _sync_entry(folder: Path) -> None:
    """Make the names in a folder last; systems whose folders cannot be opened do without."""
    with _folder(folder) as descriptor:
        if descriptor is not None:
            os.fsync(descriptor)


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int | None]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _failure(final: Path, error: Exception) -> str:
    free = shutil.disk_usage(final.parent if final.parent.exists() else final.parent.parent).free
    return (
        f"could not write checkpoint {final} ({error}); {free / 1e6:.1f} MB are free there. The checkpoints before it are whole: "
        "make space and run the same command again to continue"
    )
