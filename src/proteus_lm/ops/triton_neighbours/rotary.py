# ruff: noqa: ANN001 -- Triton's constants have no annotation that a reader needs
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
"""Rotary positions: heads of a projection are turned where they lie, one launch each way.

The turn is orthogonal, so that the way back is the turn by the negated sine, and nothing but cosine and sine is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

PAIRS = 1024
"""Pairs of a tensor that a program of four warps holds at once: 16 bytes a thread and load in half precision."""


@triton.jit
def _load(x, at, inside, D: tl.constexpr, BP: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second coordinates (rows, BP) of the pairs of rows that start at `at`, fp32."""
    if INTERLEAVED:  # whole rows, so that the loads stay wide
        column = tl.arange(0, 2 * BP)
        mask = inside[:, None] & (column < D)[None, :]
        whole = tl.load(x + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(whole, [at.shape[0], BP, 2]))
    else:
        column = tl.arange(0, BP)
        mask = inside[:, None] & (column < D // 2)[None, :]
        first = x + at[:, None] + column[None, :]
        a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(first + D // 2, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store(y, at, a, b, inside, D: tl.constexpr, BP: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The way back of `_load`, in y's type."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * BP)
        mask = inside[:, None] & (column < D)[None, :]
        tl.store(y + at[:, None] + column[None, :], tl.interleave(a, b).to(y.dtype.element_ty), mask=mask)
    else:
        column = tl.arange(0, BP)
        mask = inside[:, None] & (column < D // 2)[None, :]
        first = y + at[:, None] + column[None, :]
        tl.store(first, a.to(y.dtype.element_ty), mask=mask)
        tl.store(first + D // 2, b.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "blocks"])
def turn(
    q, k, v, plain, cosine, sine, q_out, k_out, v_out,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, plain_b, plain_t, plain_h, turn_b, turn_t, T, blocks,
    H: tl.constexpr, D: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    SLOTS: tl.constexpr, APART: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PLAIN: tl.constexpr,
) -> None:  # fmt: skip
    """q_out = turned q + plain, k_out = turned k, v_out = v, as many of the three as SLOTS; zeros for what is not given.

    A program has BR heads of one row of tokens. Tensors that are read have strides of their own for row, token and head; in those
    that are written a token's heads are APART heads from the next token's.
    """
    b = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * BR + tl.arange(0, BR)
    t, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    inside = t < T
    cos, _ = _load(cosine, b * turn_b + t * turn_t, inside, D, BP, INTERLEAVED)  # a pair's two are alike
    sin, _ = _load(sine, b * turn_b + t * turn_t, inside, D, BP, INTERLEAVED)
    if BACK:
        sin = -sin
    out = ((b * T + t) * APART + h) * D
    y0 = tl.zeros([BR, BP], tl.float32)
    y1 = tl.zeros([BR, BP], tl.float32)
    if Q:
        x0, x1 = _load(q, b * q_b + t * q_t + h * q_h, inside, D, BP, INTERLEAVED)
        y0, y1 = x0 * cos - x1 * sin, x1 * cos + x0 * sin
    if PLAIN:
        x0, x1 = _load(plain, b * plain_b + t * plain_t + h * plain_h, inside, D, BP, INTERLEAVED)
        y0, y1 = y0 + x0, y1 + x1
    _store(q_out, out, y0, y1, inside, D, BP, INTERLEAVED)
    if SLOTS > 1:
        y0 = tl.zeros([BR, BP], tl.float32)
        y1 = tl.zeros([BR, BP], tl.float32)
        if K:
            x0, x1 = _load(k, b * k_b + t * k_t + h * k_h, inside, D, BP, INTERLEAVED)
            y0, y1 = x0 * cos - x1 * sin, x1 * cos + x0 * sin
        _store(k_out, out, y0, y1, inside, D, BP, INTERLEAVED)
    if SLOTS > 2:
        y0 = tl.zeros([BR, BP], tl.float32)
        y1 = tl.zeros([BR, BP], tl.float32)
        if V:
            y0, y1 = _load(v, b * v_b + t * v_t + h * v_h, inside, D, BP, INTERLEAVED)
        _store(v_out, out, y0, y1, inside, D, BP, INTERLEAVED)


def _launch(
    given: Sequence[Tensor | None], turned: Sequence[Tensor], outs: Sequence[Tensor], interleaved: bool, back: bool
) -> None:
    """q, k, v, plain (B, T, H, D) or none of each, by cosine and sine as `as_rows` gives them, to at most three tensors `outs`
    (B, T, H, D) of equal strides, whose heads lie side by side."""
    rows, length, heads, dim = outs[0].shape
    filled = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in given]
    strides = [s for x in filled for s in ((0, 0, 0) if x is None else x.stride()[:3])]
    pairs = triton.next_power_of_2(dim // 2)
    tile = max(1, PAIRS // pairs)
    blocks = triton.cdiv(length * heads, tile)
    turn[(rows * blocks,)](
        *(outs[0] if x is None else x for x in filled), *turned, *outs, *[outs[0]] * (3 - len(outs)),
        *strides, *turned[0].stride()[:2], length, blocks,
        H=heads, D=dim, BP=pairs, BR=tile, INTERLEAVED=interleaved, BACK=back,
        SLOTS=len(outs), APART=outs[0].stride(1) // dim, **{n: x is not None for n, x in zip(("Q", "K", "V", "PLAIN"), filled)},
    )  # fmt: skip


def as_rows(cosine: Tensor, sine: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Cosine and sine (B or 1, T, 1, D) as views (B, T, 1, D) of equal strides for heads (B, T, H, D) of this shape."""
    if cosine.stride() != sine.stride() or cosine.stride(-1) != 1:
        cosine, sine = cosine.contiguous(), sine.contiguous()
    return [t.expand(*shape[:2], 1, shape[-1]) for t in (cosine, sine)]


class Turn(torch.autograd.Function):
    """As `proteus_lm.ops.triton_neighbours.turned`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
        given = as_rows(cosine, sine, x.shape)
        ctx.save_for_backward(*given)
        ctx.interleaved = interleaved
        y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        _launch([x, None, None, None], given, [y], interleaved, False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = torch.empty(dy.shape, device=dy.device, dtype=dy.dtype)
        _launch([dy, None, None, None], ctx.saved_tensors, [dx], ctx.interleaved, True)
        return dx, None, None, None


class TurnParts(torch.autograd.Function):
    """As `proteus_lm.ops.triton_neighbours.turned_parts`."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
        plain, k, v = parts.unbind(2)
        given = as_rows(cosine, sine, plain.shape)
        ctx.save_for_backward(*given)
        ctx.interleaved, ctx.shape, ctx.dtype = interleaved, parts.shape, parts.dtype
        ctx.set_materialize_grads(False)
        turned = [torch.empty(k.shape, device=k.device, dtype=k.dtype) for _ in range(2)]
        _launch([plain, k, None, None], given, turned, interleaved, False)
        return *turned, v, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        d_parts = torch.empty(ctx.shape, device=cosine.device, dtype=ctx.dtype)
        _launch(grads, (cosine, sine), d_parts.unbind(2), ctx.interleaved, True)
        return d_parts, None, None, None
