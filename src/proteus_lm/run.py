"""A run directory: what `proteus train` leaves behind, and how the other commands read it.

RUN/recipe.yaml                 the resolved recipe
RUN/sessions.jsonl              one line a start or a resume: command, versions, git commit, device, threads
RUN/parameters.json             which parameters decay, and why the others do not
RUN/metrics.jsonl               one line a step
RUN/tensorboard/                the same as scalars
RUN/checkpoints/step-00000350/  a Hugging Face model folder (config.json, model.safetensors, tokenizer files), plus
                                optimizer.safetensors (moments, random states) and trainer.json (step, size and SHA-256 of files)
RUN/nonfinite/                  batches that gave a loss or gradient that is not finite
RUN/evals/                      results of `proteus eval --suite`, and the loss that `proteus ablate` measured
RUN/inspect/                    what `proteus inspect` wrote
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from proteus_lm.data import record
from proteus_lm.train.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from proteus_lm.data.dataset import TokenDataset
    from proteus_lm.data.tokenizer import Tokenizer
    from proteus_lm.model import ProteusForCausalLM

RECIPE, SESSIONS, PARAMETERS, METRICS = "recipe.yaml", "sessions.jsonl", "parameters.json", "metrics.jsonl"
TENSORBOARD, CHECKPOINTS, NONFINITE = "tensorboard", "checkpoints", "nonfinite"
EVALS, INSPECT = "evals", "inspect"
# In the order of their removal: what speaks of checkpoints before these, and the recipe, by which a run is known, last.
CONTENTS = (EVALS, INSPECT, SESSIONS, PARAMETERS, METRICS, TENSORBOARD, CHECKPOINTS, NONFINITE, RECIPE)
MODEL, OPTIMIZER, TRAINER = "model.safetensors", "optimizer.safetensors", "trainer.json"


class Run:
    """A run directory, read only. Make one with `Run.open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._said: set[str] = set()

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run at `path`.

        Raises:
            FileNotFoundError: when there is no folder, or it is not a run.
        """
        path = Path(path)
        if not path.is_dir():
            raise FileNotFoundError(f"no folder {path}; give the folder that `proteus train` wrote")
        if not (path / RECIPE).is_file():
            raise FileNotFoundError(f"{path} is not a run: it holds no {RECIPE}; give the folder that `proteus train` wrote")
        return cls(path)

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe. Raises RecipeError when it was spoilt."""
        return load_recipe(self.path / RECIPE)

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return [step for step in checkpoint_steps(self.path) if damage(checkpoint_path(self.path, step)) is None]

    def checkpoint(self, step: int | None = None) -> Path:
        """The folder of a complete checkpoint: that of `step`, or the newest. A damaged newer one is left out with a warning.

        Reads every file of it once, to compare it with its SHA-256.

        Raises:
            FileNotFoundError: when the run has no checkpoint, or none of that step.
            ValueError: when the checkpoint asked for, or every one, is damaged.
        """
        known = checkpoint_steps(self.path)
        if not known:
            raise FileNotFoundError(f"{self.path} has no checkpoint yet; wait for the first one, or train on (train.save_every)")
        if step is not None and step not in known:
            raise FileNotFoundError(f"{self.path} has no checkpoint of step {step}; it has {', '.join(map(str, known))}")
        wanted = [step] if step is not None else known[::-1]
        for candidate in wanted:
            complaint = damage(checkpoint_path(self.path, candidate), contents=True)
            if complaint is None:
                return checkpoint_path(self.path, candidate)
            if step is None and len(wanted) > 1:
                self._warn(f"checkpoint {checkpoint_path(self.path, candidate)} is damaged ({complaint}); an older one is used")
        folder = checkpoint_path(self.path, wanted[0])
        whole = [str(step) for step in known if damage(checkpoint_path(self.path, step), contents=True) is None]
        raise ValueError(
            f"checkpoint {folder} is damaged: {damage(folder, contents=True)}; complete checkpoints: {', '.join(whole) or 'none'}. "
            "Use one of those, or copy this one again"
        )

    def _warn(self, text: str) -> None:
        """Say something once for this object."""
        if text not in self._said:
            self._said.add(text)
            logging.getLogger(__name__).warning(text)

    def load_model(
        self, step: int | None = None, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> ProteusForCausalLM:
        """The model of a checkpoint (the newest, or that of `step`) in evaluation mode; `dtype` None keeps fp32.

        Raises:
            FileNotFoundError, ValueError: as `checkpoint`, and when the weights are not those of the configuration beside them.
        """
        from safetensors import SafetensorError

        from proteus_lm.model import ProteusForCausalLM

        folder = self.checkpoint(step)
        try:
            with _without_loading_report():
                model, report = ProteusForCausalLM.from_pretrained(
                    folder, dtype=dtype or torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
                )
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise ValueError(f"checkpoint {folder} cannot be loaded: {error}") from error
        wrong = "; ".join(_difference(kind, names) for kind, names in report.items() if names)
        if wrong:
            raise ValueError(
                f"the weights in {folder} are not those of its config.json: {wrong}. Put the config.json they were saved with "
                f"beside them, or choose another step (there are {', '.join(map(str, self.steps))})"
            )
        return model.to(device).eval()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the newest checkpoint. Raises as `checkpoint`."""
        from proteus_lm.data.tokenizer import load_tokenizer

        return load_tokenizer(str(self.checkpoint()))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, in order of step; a last line that a kill cut short is left out.

        Raises:
            ValueError: for any other line that is not JSON.
        """
        return read_metrics(self.path / METRICS)

    def dataset(self, split: str) -> TokenDataset:
        """The prepared data the run was trained on: split "train" or "validation".

        Raises:
            FileNotFoundError: when it has gone.
            ValueError: when there are data of another tokenizer at its place, as `TokenDataset.check_tokenizer`.
        """
        from proteus_lm.data.dataset import TokenDataset

        path = Path(self.recipe.data.path)
        if not path.is_dir():
            raise FileNotFoundError(f"the data of {self.path} is not at {path} any more; prepare it there again")
        dataset = TokenDataset(path, split)
        if self.steps:
            dataset.check_tokenizer(self.tokenizer)
        return dataset


@contextlib.contextmanager
def _without_loading_report() -> Iterator[None]:
    """transformers prints a table of weights that do not fit; here they are an error of one line."""
    from transformers.utils import logging as hub_logging

    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity(hub_logging.CRITICAL)
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)


def _difference(kind: str, names: Any) -> str:
    """The first of the weights that do not fit (or its name, shape in the file, shape in the model), and how many there are."""
    first = min(names, key=str)
    text = first if isinstance(first, str) else " ".join(str(list(p)) if isinstance(p, tuple | list) else str(p) for p in first)
    return f"{len(names)} {kind.replace('_', ' ')}, such as {text}"


def checkpoint_path(run: Path, step: int) -> Path:
    """The folder of the checkpoint of one step."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of every checkpoint folder of a run, complete or not, oldest first."""
    names = (folder.name.removeprefix("step-") for folder in (run / CHECKPOINTS).glob("step-*"))
    return sorted(int(name) for name in names if name.isdigit())


def damage(folder: Path, *, contents: bool = False) -> str | None:
    """What is wrong with a checkpoint folder, or None when it is whole; `contents` as `proteus_lm.data.record.damage`."""
    return record.damage(folder, TRAINER, contents=contents)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, as `Run.metrics`; none when there is no file."""
    if not path.is_file():
        return []
    *whole, _cut = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(whole, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is not JSON ({error}); the file was changed after it was written") from error
    return records
