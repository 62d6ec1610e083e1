# ruff: noqa: ANN001 -- the fake implementations repeat the signature above them
"""The C kernel as one operator that torch.compile does not look into, and its gradient as another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from proteus_lm.ops._deep_scan import check_position
from proteus_lm.ops.native._call import Inputs, backward, forward, most_room, walk


@torch.library.custom_op("proteus_lm::titans_native", mutates_args=())
def titans_native(
    tokens: list[Tensor],
    open_rows: list[Tensor],
    weights: list[Tensor],
    momentum: list[Tensor],
    active: Tensor,
    open_active: Tensor | None,
    offset: Tensor,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int,
    read: str,
    memory_activation: str,
    save: bool,
) -> list[Tensor]:
    """Read and write an MLP memory of two layers along rows of tokens, all fp32 on the CPU.

    Args:
        tokens: q, k (B, T, H, D), v (B, T, H, Dv), theta, alpha, eta (B, T, H).
        open_rows: k, v (N, chunk, H, .), theta, alpha, eta (N, chunk, H), tokens of earlier calls since the boundary; or nothing.
        weights, momentum: W1, W2, S1, S2 at the last boundary, (N, H, in, out) each.
        active: int64 (B or 1, T), open units at each token.  open_active: int64 (N, chunk), at each open row.
        offset: int64 (N or 1), position of each row's first token.  position: int64 (N), what it must be, where known.
        cu_seqlens: int (N + 1), where B = 1 row holds N documents.
        save: keep what the backward needs, in a tensor whose size does not depend on positions and documents.

    Returns:
        y (B, T, H, Dv); W1, W2, S1, S2 at each row's last boundary; with `save`, one flat tensor for the backward.

    Raises:
        ValueError: for boundaries that do not fit the tokens, or an offset that is not the position.
        MemoryError: where the kernel finds none.
    """
    check_position(offset, position)
    way = walk(tokens[0], len(weights[0]), offset, cu_seqlens, chunk, read, memory_activation)
    room = most_room(len(weights[0]), tokens[0], tokens[2], weights[0].shape[-1], chunk)
    return forward(Inputs(tokens, open_rows, [*weights, *momentum], active, open_active, way), final=True, save=save, room=room)


@torch.library.custom_op("proteus_lm::titans_native_backward", mutates_args=())
def titans_native_backward(
    grads: list[Tensor],
    tokens: list[Tensor],
    open_rows: list[Tensor],
    weights: list[Tensor],
    momentum: list[Tensor],
    saved: Tensor,
    active: Tensor,
    open_active: Tensor | None,
    offset: Tensor,
    cu_seqlens: Tensor | None,
    chunk: int,
    read: str,
    memory_activation: str,
) -> list[Tensor]:
    """Gradients to tokens, open_rows, weights and momentum, in this order, from those to y and the state at the end, of which an
    empty tensor stands for zeros."""
    way = walk(tokens[0], len(weights[0]), offset, cu_seqlens, chunk, read, memory_activation)
    start = [*weights, *momentum]
    out = backward(Inputs(tokens, open_rows, start, active, open_active, way), saved, grads, [True] * len(start))
    return [t for t in out if t is not None]


@titans_native.register_fake
def _(tokens, open_rows, weights, momentum, active, open_active, offset, position, cu_seqlens, chunk, read, function, save):
    state = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*weights, *momentum)]
    room = most_room(weights[0].shape[0], tokens[0], tokens[2], weights[0].shape[-1], chunk)
    saved = [tokens[0].new_empty(room)] if save else []
    return [torch.empty_like(tokens[2], memory_format=torch.contiguous_format), *state, *saved]


@titans_native_backward.register_fake
def _(grads, tokens, open_rows, weights, momentum, *rest):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*tokens, *open_rows, *weights, *momentum)]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    *lists, active, open_active, offset, _, cu_seqlens, chunk, read, memory_activation, _ = inputs
    ctx.counts, ctx.options = [len(part) for part in lists], (chunk, read, memory_activation)
    ctx.save_for_backward(*(t for part in lists for t in part), output[-1], active, open_active, offset, cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple:
    flat = list(ctx.saved_tensors)
    lists = [[flat.pop(0) for _ in range(count)] for count in ctx.counts]
    tokens, _, weights, momentum = lists
    to_y = torch.zeros_like(tokens[2]) if grads[0] is None else grads[0]
    given = [to_y, *(to_y.new_empty(0) if g is None else g for g in grads[1 : 1 + len(weights) + len(momentum)])]
    out = iter(titans_native_backward(given, *lists, *flat, *ctx.options))
    return (*([next(out) for _ in range(count)] for count in ctx.counts), *[None] * 9)


titans_native.register_autograd(_gradients, setup_context=_setup)
