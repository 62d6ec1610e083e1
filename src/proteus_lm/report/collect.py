"""Everything a report says about one run: what was trained, how it scores, what its memory holds, what it writes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from proteus_lm.evals import Estimate, PerplexityResult
from proteus_lm.report.memory import MemoryTrace

if TYPE_CHECKING:
    from proteus_lm.data.dataset import TokenDataset
    from proteus_lm.run import Run

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """What is asked of every run alike, so that their numbers can be compared.

    Args:
        contexts: lengths of the windows, in training contexts; the first gives the table's main numbers.
        max_tokens: predictions for each context; None = the whole split.
        batch_size: windows at once.
        bins: stretches of positions within the training context.
        split: "validation" or "train".
        sample_tokens: length of the text sample, 0 for none.
        prompt_tokens: tokens of the longest document of the split that the sample continues.
        temperature, top_k, seed: how it is drawn.
        device: where the models run.
    """

    contexts: tuple[int, ...] = (1, 2)
    max_tokens: int | None = 65536
    batch_size: int = 16
    bins: int = 16
    split: str = "validation"
    sample_tokens: int = 200
    prompt_tokens: int = 64
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class RunReport:
    """One run, measured.

    Args:
        evaluations: by multiple of the training context; a multiple that no document can hold is absent.
        skipped: reasons for what is absent.
        commands: what makes each number, by name.
    """

    name: str
    path: Path
    step: int
    parameters: int
    recipe: Mapping[str, Any]
    model: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    data: Mapping[str, Any]
    evaluations: Mapping[int, PerplexityResult]
    memory: MemoryTrace | None
    prompt: str
    sample: str
    commands: Mapping[str, str]
    skipped: tuple[str, ...] = field(default=())

    @property
    def mixer(self) -> str:
        """Name of the token mixer."""
        return str(self.model["mixer"])

    @property
    def blocks(self) -> int:
        """E."""
        return int(self.model["memory_blocks"])

    @property
    def training_context(self) -> int:
        """Tokens of a training window."""
        return int(self.recipe["data"]["context"])

    @property
    def unlocks(self) -> tuple[int, ...]:
        """Positions at which blocks open, the first at 0; one block opens once."""
        return self.memory.unlocks if self.memory else (0,)

    @property
    def main(self) -> PerplexityResult:
        """The evaluation at the shortest context asked for."""
        return self.evaluations[min(self.evaluations)]

    @property
    def longest(self) -> PerplexityResult:
        """The evaluation at the longest context that the documents could give."""
        return self.evaluations[max(self.evaluations)]

    @property
    def tokens_per_second(self) -> float | None:
        """Median training speed over the steps; None where the run did not write it."""
        speeds = [m["tokens_per_second"] for m in self.metrics if m.get("tokens_per_second")]
        return median(speeds) if speeds else None

    def to_dict(self) -> dict[str, Any]:
        """Every number of the run, ready for JSON."""
        return {
            "name": self.name,
            "path": str(self.path),
            "step": self.step,
            "mixer": self.mixer,
            "memory_blocks": self.blocks,
            "unlock_positions": list(self.unlocks),
            "parameters": self.parameters,
            "tokens_per_second": self.tokens_per_second,
            "recipe": self.recipe,
            "data": self.data,
            "evaluations": {f"{multiple}x": result.to_dict() for multiple, result in self.evaluations.items()},
            "memory": self.memory and self.memory.to_dict(),
            "prompt": self.prompt,
            "sample": self.sample,
            "skipped": list(self.skipped),
            "commands": dict(self.commands),
        }


def quarters(result: PerplexityResult) -> tuple[Estimate, Estimate]:
    """Loss over the first and the last quarter of the positions within the training context (or the window, if shorter)."""
    end = min(result.training_context or result.edges[-1], result.edges[-1])
    inside = result.edges[: result.edges.index(end) + 1]
    part = max(1, (len(inside) - 1) // 4)
    return result.between(0, inside[part]), result.between(inside[-1 - part], inside[-1])


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of nested sections."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(a: RunReport, b: RunReport) -> list[tuple[str, Any, Any]]:
    """Fields of model, data and training in which two runs differ: (name, value in a, value in b), by name.

    The model's fields are the resolved ones. `memory_context` says nothing where there is a single block, and is left out there.
    """
    mine, theirs = (dict(flatten({"model": r.model, "data": r.recipe["data"], "train": r.recipe["train"]})) for r in (a, b))
    names = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
    if 1 in (a.blocks, b.blocks):
        names = [n for n in names if n != "model.memory_context"]
    return [(n, mine.get(n), theirs.get(n)) for n in names]


def same_data(a: RunReport, b: RunReport) -> bool:
    """Were the two evaluated on the same tokens, made by the same tokenizer from the same source?"""
    return a.data == b.data


def data_identity(run: Run, split: str) -> dict[str, Any]:
    """What tells one prepared split from another: source, tokenizer, and the digest of every shard."""
    manifest = run.dataset(split).manifest.to_dict()
    shards = [shard["sha256"] for shard in manifest["splits"][split]["shards"]]
    return {"source": manifest["source"], "tokenizer": manifest["tokenizer"], "split": split, "shards": shards}


def bytes_per_token(dataset: TokenDataset) -> float | None:
    """Bytes of UTF-8 text behind a token of a prepared split, end tokens among the tokens; None for a split without text."""
    return dataset.bytes / dataset.tokens if dataset.bytes else None


def command(*words: object) -> str:
    """A command line that a shell reads back as these words."""
    return shlex.join(str(w) for w in words)
