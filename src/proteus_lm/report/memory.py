"""Which blocks of a memory are open and how full they are, along one validation window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from proteus_lm.cache import ProteusCache
from proteus_lm.evals.perplexity import evaluation_mode
from proteus_lm.evals.windows import Documents, choose_windows
from proteus_lm.schedule import ActivationSchedule


@dataclass(frozen=True)
class MemoryTrace:
    """What the memory holds after some numbers of tokens.

    Args:
        tokens: how many tokens had been read at each point; the last of them stood at position tokens - 1.
        norms: float64 (points, layers, blocks): Frobenius norm of what a block holds beyond its initial value, mean over windows.
        open: int (points,), blocks open to the last token read.
        unlocks: position at which each block opens.
        windows: sequences behind the mean.
    """

    tokens: tuple[int, ...]
    norms: np.ndarray
    open: tuple[int, ...]
    unlocks: tuple[int, ...]
    windows: int

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "tokens": list(self.tokens),
            "open_blocks": list(self.open),
            "unlock_positions": list(self.unlocks),
            "windows": self.windows,
            "norm_by_point_layer_block": self.norms.round(6).tolist(),
        }


def look_points(schedules: Sequence[ActivationSchedule], length: int, most: int = 16) -> tuple[int, ...]:
    """Token counts at which to look: the last token of each stage of the finest schedule, then `length`.

    One set for all runs, so that their memories are seen at the same places; at most `most` of them, evenly chosen.
    """
    finest = max(schedules, key=lambda schedule: schedule.blocks)
    ends = {finest.unlock_position(block) for block in range(1, finest.blocks)} | {finest.context, length}
    points = sorted(end for end in ends if 0 < end <= length)
    if len(points) > most:
        points = [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
    return tuple(points)


def trace_memory(
    model: Any, dataset: Documents, schedule: ActivationSchedule, points: Sequence[int], *, windows: int = 4
) -> MemoryTrace:
    """Read windows of a split with the state carried, and look at the memory at each of `points`.

    Args:
        model: causal model with `memory_norms(cache) -> (layers, N, blocks)`.
        points: rising token counts; documents must hold the last of them.
        windows: sequences to read, spread over the split.

    Raises:
        ValueError: when no document holds that many tokens.
    """
    chosen, _ = choose_windows(dataset, points[-1], windows * points[-1])
    rows = np.stack([dataset.document(w.document)[w.start : w.start + w.length] for w in chosen]).astype(np.int64)
    tokens = torch.from_numpy(rows).to(next(model.parameters()).device)
    norms, cache = [], ProteusCache()
    with evaluation_mode(model):
        for start, end in zip((0, *points), points):
            model(input_ids=tokens[:, start:end], past_key_values=cache, use_cache=True)
            norms.append(model.memory_norms(cache).double().mean(1).cpu().numpy())
    return MemoryTrace(
        tuple(points),
        np.stack(norms),
        tuple(schedule.active_blocks(end - 1) for end in points),
        tuple(schedule.unlock_position(block) for block in range(schedule.blocks)),
        len(chosen),
    )
