"""Recall in the synthetic tasks by how long ago a pair was given: what a model trained on them can still say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from proteus_lm.cache import ProteusCache
from proteus_lm.data.synthetic import IGNORED, Task
from proteus_lm.evals.perplexity import evaluation_mode
from proteus_lm.evals.statistics import Estimate, ratio_estimate

AGES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Edges of the bins of ages in tokens."""


@dataclass(frozen=True)
class Recall:
    """Answers of a model to the questions of a task.

    Args:
        rows, written, asked: int64 (questions,): row of the batch, where its key stood last before, where it was asked.
        right: bool (questions,), the value was the likeliest token.
        loss: float64 (questions,), nats of the value.
    """

    rows: np.ndarray
    written: np.ndarray
    asked: np.ndarray
    right: np.ndarray
    loss: np.ndarray

    @property
    def accuracy(self) -> Estimate:
        """Share of right answers, its error over rows."""
        return self._mean(np.ones(len(self.rows), dtype=bool))

    def by_age(self, edges: Sequence[int] = AGES) -> list[tuple[int, int, Estimate]]:
        """(from, to, share right) for each bin of tokens between writing and asking that has questions."""
        age = self.asked - self.written
        bins = [(a, b, (age >= a) & (age < b)) for a, b in zip(edges, (*edges[1:], max(edges[-1], int(age.max(initial=0))) + 1))]
        return [(a, b, self._mean(inside)) for a, b, inside in bins if inside.any()]

    def by_written(self, parts: int = 8) -> list[tuple[int, int, Estimate]]:
        """Likewise by where the pair was written, in equal parts of the positions."""
        last = int(self.written.max(initial=0)) + 1
        edges = [last * i // parts for i in range(parts + 1)]
        bins = [(a, b, (self.written >= a) & (self.written < b)) for a, b in zip(edges, edges[1:])]
        return [(a, b, self._mean(inside)) for a, b, inside in bins if inside.any()]

    def _mean(self, chosen: np.ndarray) -> Estimate:
        rows = self.rows[chosen]
        names, index = np.unique(rows, return_inverse=True)
        sums, counts = np.bincount(index, self.right[chosen].astype(float)), np.bincount(index)
        return ratio_estimate(sums, counts, names.tolist())

    def to_dict(self) -> dict[str, Any]:
        """Every question and answer, ready for JSON."""
        return {
            "rows": self.rows.tolist(),
            "written": self.written.tolist(),
            "asked": self.asked.tolist(),
            "right": self.right.astype(int).tolist(),
            "loss_nats": self.loss.round(6).tolist(),
        }


def last_written(task: Task) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, places asked, and the last place before at which the same key stood with its value behind it: int64 each."""
    rows, asked, written = [], [], []
    for row, (tokens, targets) in enumerate(zip(task.tokens.tolist(), task.targets.tolist())):
        seen: dict[int, int] = {}
        for place, (token, target) in enumerate(zip(tokens, targets)):
            if target != IGNORED:
                rows.append(row)
                asked.append(place)
                written.append(seen[token])
            seen[token] = place
    return tuple(np.array(x, dtype=np.int64) for x in (rows, asked, written))  # type: ignore[return-value]


def task_recall(model: Any, task: Task, *, batch_size: int = 8, chunk: int = 2048) -> Recall:
    """Ask a model all questions of a task, rows read once with the state carried.

    Args:
        model: causal model with a `ProteusCache`.
        task: rows whose questions repeat a key that stood before (`mqar_text`, `key_value_stream`).

    Raises:
        ValueError: for a task without questions, or tokens the model does not know.
    """
    rows, asked, written = last_written(task)
    if not len(rows):
        raise ValueError("the task asks nothing; use rows with targets")
    if int(task.tokens.max()) >= model.config.vocab_size:
        raise ValueError(f"token {int(task.tokens.max())} is outside the model's vocabulary of {model.config.vocab_size}")
    device = next(model.parameters()).device
    right = torch.zeros(task.tokens.shape, dtype=torch.bool)
    loss = torch.full(task.tokens.shape, math.nan, dtype=torch.float64)
    with evaluation_mode(model):
        for first in range(0, len(task.tokens), batch_size):
            tokens, cache = task.tokens[first : first + batch_size], ProteusCache()
            for start in range(0, tokens.shape[1], chunk):
                piece = tokens[:, start : start + chunk].to(device)
                targets = task.targets[first : first + batch_size, start : start + chunk].to(device)
                logits = model(input_ids=piece, past_key_values=cache, use_cache=True).logits.float()
                here = (slice(first, first + len(tokens)), slice(start, start + piece.shape[1]))
                right[here] = (logits.argmax(-1) == targets).cpu()
                chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
                loss[here] = -chosen.double().cpu()
    places = (torch.from_numpy(rows), torch.from_numpy(asked))
    return Recall(rows, written, asked, right[places].numpy(), loss[places].numpy())
