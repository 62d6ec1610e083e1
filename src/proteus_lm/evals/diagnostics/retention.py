"""How long a pair is kept: recall of key value pairs by when they were written and how much came after, for any checkpoint of ours.

Pairs of random tokens are put into running text. At some places the memory as it is then is asked for every pair written so far: a
copy of the state reads the key, and the value's probability is compared with that after a key that was never written. A language
model that was not trained to recall shows little; what it shows is the memory's, since the state is all it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proteus_lm.cache import ProteusCache
from proteus_lm.evals.perplexity import evaluation_mode
from proteus_lm.evals.windows import Documents, choose_windows

_ROWS = 64  # states asked at once: they are copies, a memory each


@dataclass(frozen=True)
class Retention:
    """Recall by when a pair was written and when it was asked for.

    Args:
        written: int (pairs,), position behind each pair's last token.
        asked: int (looks,), tokens read when the memory was asked.
        gain: float64 (rows, pairs, looks), log p(value | its key) - log p(value | a key never written), nats; NaN before writing.
        right: float64 likewise, 1 where the value is likeliest among the values written so far, else 0; NaN before writing.
    """

    written: tuple[int, ...]
    asked: tuple[int, ...]
    gain: np.ndarray
    right: np.ndarray

    @property
    def chance(self) -> np.ndarray:
        """float64 (looks,): share that would be right by chance, 1 / pairs written so far."""
        return np.array([1 / max(1, sum(w <= a for w in self.written)) for a in self.asked])

    def mean_gain(self) -> np.ndarray:
        """float64 (pairs, looks), mean over rows; NaN before writing."""
        return self.gain.mean(0)

    def by_age(self, edges: Sequence[int]) -> list[tuple[int, int, float, float | None, float, int]]:
        """For each bin of tokens read since the writing: (from, to, mean gain, its error over rows, share right, pairs)."""
        age = np.array(self.asked)[None] - np.array(self.written)[:, None]
        found = []
        for a, b in zip(edges, edges[1:]):
            inside = (age >= a) & (age < b) & ~np.isnan(self.gain[0])
            if not inside.any():
                continue
            rows = self.gain[:, inside].mean(1)
            error = float(rows.std(ddof=1) / math.sqrt(len(rows))) if len(rows) > 1 else None
            found.append((a, b, float(rows.mean()), error, float(self.right[:, inside].mean()), int(inside.sum()) * len(rows)))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; null before a pair is written."""

        def plain(values: np.ndarray) -> Any:
            return [plain(part) for part in values] if values.ndim else None if np.isnan(values) else round(float(values), 6)

        return {
            "written": list(self.written),
            "asked": list(self.asked),
            "chance_by_look": self.chance.tolist(),
            "gain_nats_by_row_pair_look": plain(self.gain),
            "right_by_row_pair_look": plain(self.right),
        }


def measure_retention(
    model: Any,
    dataset: Documents,
    *,
    length: int,
    pairs: int = 16,
    looks: int = 8,
    rows: int = 4,
    key_tokens: int = 4,
    seed: int = 0,
    chunk: int = 2048,
    names: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Retention:
    """Measure what a memory retains of `pairs` pairs written at even distances into `length` tokens of text.

    Args:
        model: causal model with a `ProteusCache`.
        dataset: the text around the pairs.
        length: tokens read in all, pairs among them.
        pairs: pairs a row, each of `key_tokens` random tokens and one value token; tokens are drawn among those the text uses.
        looks: places at which the memory is asked, evenly over the length.
        rows: windows of text.
        seed: of the pairs.
        chunk: tokens in one forward.
        names: tokens that keys and values are drawn from instead, for a task with ids of its own: keys are of one token, that the
            row's text does not use.

    Raises:
        ValueError: for sizes that do not go together, text too short, or with too few different tokens.
    """
    key_tokens = key_tokens if names is None else 1
    used = pairs * (key_tokens + 1)
    if min(pairs, looks, rows, key_tokens) < 1 or length < 2 * used or looks > length:
        raise ValueError(
            f"length is {length} with {pairs} pairs of {key_tokens} + 1 tokens, {looks} looks and {rows} rows: at most half of the "
            f"tokens may be pairs (here {used}), and each number must be at least 1; use a longer length or fewer pairs"
        )
    chosen, _ = choose_windows(dataset, length, rows * length)
    text = np.stack([dataset.document(w.document)[w.start : w.start + length] for w in chosen[:rows]]).astype(np.int64)
    keys, values = _drawn(text, names, pairs, key_tokens, np.random.default_rng(seed))
    tokens, written = _woven(text, keys[:, :-1], values, length)
    asked = tuple(length * (i + 1) // looks for i in range(looks))
    gain = np.full((len(text), pairs, looks), math.nan)
    right = gain.copy()
    device = next(model.parameters()).device
    stream = torch.from_numpy(tokens).to(device)
    cache, done = ProteusCache(), 0
    with evaluation_mode(model):
        for look, end in enumerate(asked):
            for start in range(done, end, chunk):
                model(input_ids=stream[:, start : min(start + chunk, end)], past_key_values=cache, use_cache=True, logits_to_keep=1)
            done = end
            there = sum(w <= end for w in written)
            if not there:
                continue
            chosen_keys = np.concatenate((keys[:, :there], keys[:, -1:]), 1)
            scores = _answers(model, cache, torch.from_numpy(chosen_keys).to(device))  # (rows, there + 1, vocabulary)
            for row in range(len(text)):
                own = scores[row][:, torch.from_numpy(values[row, :there])]  # (there + 1, there): key asked, value scored
                diagonal = own[:there].diagonal()
                gain[row, :there, look] = (diagonal - own[there]).numpy()
                right[row, :there, look] = (own[:there].argmax(1) == torch.arange(there)).double().numpy()
    return Retention(written, asked, gain, right)


def _drawn(
    text: np.ndarray, names: tuple[Sequence[int], Sequence[int]] | None, pairs: int, size: int, draw: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Keys int64 (rows, pairs + 1, size), the last of them never to be written, and values (rows, pairs), different in a row."""
    known = np.unique(text)
    if names is None:
        if len(known) < pairs + size:
            raise ValueError(f"the text has {len(known)} different tokens, too few for {pairs} pairs; use fewer, or other text")
        return draw.choice(known, (len(text), pairs + 1, size)), np.stack([draw.permutation(known)[:pairs] for _ in text])
    free = [np.setdiff1d(names[0], row) for row in text]
    least = max(0, min(len(names[1]), *(len(row) - 1 for row in free)))
    if least < pairs:
        raise ValueError(f"{pairs} pairs need as many values, and one key more that the text does not use; there are {least}")
    keys = np.stack([draw.permutation(row)[: pairs + 1, None] for row in free])
    return keys, np.stack([draw.permutation(np.asarray(names[1]))[:pairs] for _ in text])


def _woven(text: np.ndarray, keys: np.ndarray, values: np.ndarray, length: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Text (rows, length) in which pairs stand at even distances in the text's place, and where each ends.

    The pairs stand in the first tokens of `pairs` equal stretches, so that the last one too has text behind it.
    """
    _, pairs, size = keys.shape
    woven, ends = text.copy(), []
    for pair in range(pairs):
        start = length * pair // pairs
        woven[:, start : start + size] = keys[:, pair]
        woven[:, start + size] = values[:, pair]
        ends.append(start + size + 1)
    return woven[:, :length], tuple(ends)


def _answers(model: Any, cache: ProteusCache, keys: Tensor) -> Tensor:
    """log p of every token after each key (rows, asked, size), read by copies of the state: float64 (rows, asked, vocabulary)."""
    rows, asked, _ = keys.shape
    flat = keys.flatten(0, 1)
    parts = []
    for first in range(0, len(flat), _ROWS):
        part = flat[first : first + _ROWS]
        index = torch.arange(first, first + len(part), device=flat.device) // asked
        logits = model(input_ids=part, past_key_values=cache.reorder(index), use_cache=True, logits_to_keep=1).logits[:, -1]
        parts.append(logits.double().log_softmax(-1).cpu())
    return torch.cat(parts).unflatten(0, (rows, asked))
