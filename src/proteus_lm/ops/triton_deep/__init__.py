"""Triton kernels of Titans' memory, depth 1 and 2: `scan` takes the place of the chunkwise PyTorch scan. See docs/titans-kernel.md.

Importing this needs no Triton; running it does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proteus_lm.ops.state import TitansState
from proteus_lm.ops.triton import installed

CHUNKS = (16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)


def refuse(tokens: Sequence[Tensor], weights: Sequence[Tensor], chunk: int) -> str | None:
    """Why the kernels cannot run these inputs, or None.

    Args:
        tokens: q, k, v, theta, alpha, eta of a call.  weights: its memory.  chunk: tokens between two boundaries.
    """
    q, k, v = tokens[:3]
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if q.device.type != "cuda" and not interpreted:
        return f"tensors on {q.device.type}; the kernels need a CUDA device (or TRITON_INTERPRET=1)"
    if not installed():
        return "triton is not installed"
    if any(t.dtype == torch.float64 for t in (*tokens, *weights)):
        return "fp64 tensors; the kernels compute in bf16 or tf32 with fp32 sums"
    kinds = {t.dtype for t in (q, k, v)}
    if len(kinds) > 1 or not kinds <= {torch.bfloat16, torch.float32}:
        return f"q, k, v of types {sorted(str(t) for t in kinds)}; they must be all bf16 or all fp32"
    if interpreted and torch.bfloat16 in kinds:
        return "bf16 in Triton's interpreter, which has no bf16"
    if len(weights) not in (1, 2):
        return f"{len(weights)} layers; the kernels have memories of 1 or 2"
    if chunk not in CHUNKS:
        return f"chunk of {chunk}; it must be one of {', '.join(map(str, CHUNKS))}"
    dims = q.shape[-1], v.shape[-1]
    if dims[0] not in HEAD_DIMS or dims[1] not in HEAD_DIMS:
        return f"heads of {dims[0]} and {dims[1]}; they must be of {', '.join(map(str, HEAD_DIMS))}"
    if (q.dtype == torch.float32 and max(chunk, *dims) > 64) or min(chunk, max(dims)) > 64:
        return f"a chunk of {chunk} with heads of {max(dims)} in {q.dtype}, which takes more shared memory than there is"
    hidden = weights[0].shape[-1]
    most = max(4 * dims[0], 256)
    if len(weights) == 2 and (hidden % 16 or hidden > most):
        return f"{hidden} hidden units; they must be a multiple of 16, at most {most} for heads of {dims[0]}"
    return None


def scan(
    tokens: Sequence[Tensor],
    open_rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    momentum: Sequence[Tensor],
    active: Tensor,
    open_active: Tensor | None,
    offset: int | Tensor,
    cu_seqlens: Tensor | None,
    *,
    chunk: int,
    read: str,
    memory_activation: str,
    final: bool = True,
) -> list[Tensor]:
    """Read and write an MLP memory along rows of tokens; inputs that `refuse` does not name.

    Args:
        tokens: q, k (B, T, H, D), v (B, T, H, Dv), theta, alpha, eta (B, T, H).
        open_rows: k, v, theta, alpha, eta (N, chunk, H, ...): tokens of earlier calls since the last boundary; or nothing.
        weights, momentum: the state at the last boundary, fp32 (N, H, in, out) each.
        active: int64 (B or 1, T), open units at each token.  open_active: int64 (N, chunk), at each open row.
        offset: int64 (N or 1), position of each row's first token; a number for all, which costs no transfer.
        cu_seqlens: int (N + 1), where B = 1 row holds N documents.
        final: return the state too.

    Returns:
        y (B, T, H, Dv) in the type of v; weights and momentum (N, H, in, out) at each row's last boundary.
    """
    from proteus_lm.ops.triton_deep._align import Grid, align
    from proteus_lm.ops.triton_deep._operator import titans_plan

    grid = Grid(weights[0].shape[0], tokens[0].shape[1], offset, cu_seqlens, chunk, tokens[0].device)
    tokens_, active_, full = align(grid, tokens, open_rows, active, open_active)
    plan = ChunkPlan((*titans_plan(active_, chunk, weights[-1].shape[-2]), full))
    options = {"chunk": chunk, "read": read, "memory_activation": memory_activation}
    y, end = walk(tokens_, pack(weights, momentum), plan, depth=len(weights), **options)
    parts = unpack(end, [*weights, *momentum]) if final else []
    return [grid.back(y), *(part.contiguous() for part in parts)]


class ChunkPlan(NamedTuple):
    """What opens where in a call whose rows start on the grid and are whole chunks: `_launch.Plan`, and `_operator`'s kinds."""

    tables: tuple[Tensor, ...]
    kinds: int = 3


def chunk_plan(active: Tensor, rows: int, chunk: int, hidden: int, kinds: int = 3) -> ChunkPlan:
    """The plan of `rows` rows of whole chunks, from open units int64 (rows or 1, T) at each token."""
    from proteus_lm.ops.triton_deep._operator import titans_plan

    full = torch.full((rows,), active.shape[1] // chunk, device=active.device, dtype=torch.int32)
    return ChunkPlan((*titans_plan(active, chunk, hidden), full), kinds)


def walk(
    tokens: Sequence[Tensor], cells: Tensor, plan: ChunkPlan, *, depth: int, chunk: int, read: str, memory_activation: str
) -> tuple[Tensor, Tensor]:
    """`scan` of rows that start on the grid and are whole chunks, with the state as `pack` gives it.

    Returns:
        y (N, T, H, Dv); the state at the end (N * H, cells), see `unpack`.
    """
    from proteus_lm.ops.triton_deep._operator import titans_kernels

    save = torch.is_grad_enabled() and any(t.requires_grad for t in (*tokens, cells))
    out = titans_kernels(list(tokens), cells, list(plan.tables), depth, chunk, read, memory_activation, plan.kinds, save)
    return out[0], out[1]


def pack(weights: Sequence[Tensor], momentum: Sequence[Tensor]) -> Tensor:
    """fp32 (N, H, in, out) each, as the kernels keep them: (N * H, cells), W1, S1, W2, S2 of each row and head."""
    pairs = [t for pair in zip(weights, momentum) for t in pair]
    return torch.cat([t.flatten(0, 1).flatten(1).float() for t in pairs], 1)


def packed(weights: Sequence[Tensor], momentum: Sequence[Tensor]) -> Tensor:
    """As `pack`, without a copy where they are what `unpack` made of such a tensor."""
    given = [*weights, *momentum]
    base = given[0]._base
    if base is None or base.dtype != torch.float32 or base.dim() != 2 or not base.is_contiguous():
        return pack(weights, momentum)
    rows, heads = given[0].shape[:2]
    at, cells, same = base.storage_offset(), base.shape[1], len(base) == rows * heads
    for t in (t for pair in zip(weights, momentum) for t in pair):
        strides = heads * cells, cells, t.shape[3], 1
        same = same and t._base is base and t.storage_offset() == at and t.stride() == strides
        at += t[0, 0].numel()
    return base if same and at == base.storage_offset() + cells else pack(weights, momentum)


def unpack(cells: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `pack`: weights, then momentum, as views; `like` has their shapes."""
    depth = len(like) // 2
    order = [t for pair in zip(like[:depth], like[depth:]) for t in pair]
    parts = cells.split([t[0, 0].numel() for t in order], 1)
    parts = [part.unflatten(0, t.shape[:2]).unflatten(-1, t.shape[2:]) for part, t in zip(parts, order)]
    return [*parts[::2], *parts[1::2]]


def refuse_step(tokens: Sequence[Tensor], weights: Sequence[Tensor], momentum: Sequence[Tensor], chunk: int) -> str | None:
    """As `refuse`, of one decoding step: tokens q, k, v (N, H, D), theta, alpha, eta (N, H), and a state's matrices."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*tokens, *weights, *momentum)):
        return "a gradient is wanted; the decoding kernel has none"
    if any(t.dtype != torch.float32 for t in (*weights, *momentum)):
        return "a state that is not fp32"
    sides = tokens[0].shape[-1], tokens[2].shape[-1]
    if tokens[0].dtype == torch.bfloat16 and (chunk * max(sides) > 64 * 64 or weights[-1].shape[-2] <= 32):
        return "bf16 tokens with fewer than 32 hidden units at a time by wgmma, of which triton 3.6 made wrong kernels on Hopper"
    return refuse(tokens, weights, chunk)


def unchecked_step(tokens: Sequence[Tensor], weights: Sequence[Tensor], chunk: int) -> str | None:
    """Why `auto` leaves a step on a GPU to PyTorch: no run there has checked the kernels at its sizes. None where one has."""
    q, v = tokens[0], tokens[2]
    if not q.is_cuda or (len(weights) == 2 and chunk == q.shape[-1] == v.shape[-1] == 64):
        return None
    return "decoding kernels are checked on a GPU with two layers, heads of 64 and chunks of 64 alone; backend='triton' runs them"


def step(
    tokens: Sequence[Tensor], state: TitansState, active: Tensor | None, read: str, memory_activation: str, inplace: bool
) -> tuple[Tensor, TitansState]:
    """One decoding step; inputs that `refuse_step` does not name. With `inplace` the given state moves on itself.

    Raises:
        ValueError: for a state that cannot move in place, not being contiguous.
    """
    from proteus_lm.ops.triton_deep._step import titans_step_in_place, titans_step_new

    flat = [*state.weights, *state.momentum, *state[2:]]
    if inplace:
        if not all(t.is_contiguous() for t in flat):
            raise ValueError("the state is not contiguous; use inplace=False once and go on with what it returns")
        return titans_step_in_place(list(tokens), flat, active, read, memory_activation), state
    y, *new = titans_step_new(list(tokens), flat, active, read, memory_activation)
    depth = len(state.weights)
    return y, TitansState._make([tuple(new[:depth]), tuple(new[depth : 2 * depth]), *new[2 * depth :]])
