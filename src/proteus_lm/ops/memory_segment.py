"""Whole inner chunks of a memory, segment by segment, by the Triton kernels: for callers that read and write it in turn.

Between two segments the state stays as the kernels keep it (`triton_deep.pack`), and segments that open alike share one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops import triton_deep, triton_mac
from proteus_lm.ops.backend import choose
from proteus_lm.ops.deep import refusals
from proteus_lm.ops.memory_read import titans_read
from proteus_lm.ops.triton_deep import ChunkPlan


def kernels_run(q: Tensor, weights: Sequence[Tensor], chunk: int, **options: Any) -> bool:
    """Whether `titans_memory` would take its Triton kernels for tokens like q (N, T, H, D) with gates in fp32.

    Args:
        weights: its initial memory.  options: its `memory_activation`, `surprise_clip`, `decay_target` and `residual_norm`.
    """
    gates = [q.new_empty(0, dtype=torch.float32)] * 3
    refused = refusals((q, q, q, *gates), weights, chunk, **options)
    return choose("titans_memory", "auto", q, *weights, refused=refused) == "triton"


def plan(activation: Activation | None, rows: int, length: int, units: int, chunk: int, device: Any) -> ChunkPlan:
    """What opens where in rows of `length` tokens that start on the grid; None: all `units`."""
    if activation is None:
        return triton_deep.chunk_plan(torch.full((1, length), units, device=device), rows, chunk, units, kinds=1)
    stretches, kinds = activation.segments, 3
    if stretches is not None:
        mixed = {end // chunk for _, end, _ in stretches[:-1] if end % chunk}
        kinds = (len(mixed) < length // chunk) + 2 * bool(mixed)
    return triton_deep.chunk_plan(activation.active, rows, chunk, units, kinds)


def recall(
    q: Tensor, cells: Tensor, like: Sequence[Tensor], plan: ChunkPlan, chunk: int, memory_activation: str
) -> tuple[Tensor, Tensor]:
    """As `titans_read` of queries (N, T, H, D), each through the units open to it, and the state to go on from.

    Args:
        cells: the state, `triton_deep.pack` of `like`, weights and then momentum.
    """
    depth = len(like) // 2
    if depth == 2:
        hidden, width = like[1].shape[2:]
        return triton_mac.still_read(q, cells, plan.tables[0], hidden, width, chunk, memory_activation)
    weights = triton_deep.unpack(cells, like)[:depth]
    return titans_read(weights, q, plan.tables[0], memory_activation=memory_activation), cells
