# ruff: noqa: ANN001, ANN201 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""The elementwise half of sliding-window linear attention (window.py) in one pass over memory each way.

For each token t and head: the write that has matured, key'_t = (matured_t P_{t-1} + other_t P_t) k_{t-1} and value'_t = v_{t-1}
(with columns the factor stands at the value), and near_t = own_t (q_t . P_t k_t), the weight of the token's own value.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def tile(x, at, first, first_at, mask, start):
    """Rows of x, or of `first` where a document starts."""
    here = tl.load(x + at, mask=mask & (start < 0)[:, None], other=0.0).to(tl.float32)
    return here + tl.load(first + first_at, mask=mask & (start >= 0)[:, None], other=0.0).to(tl.float32)


@triton.jit
def blend_forward(
    q, k, v, matured, other, own, first_k, first_v, starts, now, key, value, near, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """BT tokens of one head. starts: int32 (T,), the document a token starts, else -1. now: int32 (2, T), open at t, at t - 1."""
    h = tl.program_id(0) % H
    t = (tl.program_id(0) // H) * BT + tl.arange(0, BT)
    live = t < T
    t = t.to(tl.int64)
    start = tl.load(starts + t, mask=live, other=-1)
    lane = t * H + h
    door = tl.maximum(start, 0).to(tl.int64) * H + h
    w1 = tl.load(matured + lane, mask=live, other=0.0)
    w2 = tl.load(other + lane, mask=live, other=0.0)
    weight = (w1 + w2)[:, None]
    row = tl.arange(0, BK)[None, :]
    column = tl.arange(0, BV)[None, :]
    mask = live[:, None] & (row < K)
    b_q = tl.load(q + lane[:, None] * K + row, mask=mask, other=0.0).to(tl.float32)
    b_k = tl.load(k + lane[:, None] * K + row, mask=mask, other=0.0).to(tl.float32)
    past_k = tile(k, (lane - H)[:, None] * K + row, first_k, door[:, None] * K + row, mask, start)
    wide = live[:, None] & (column < V)
    past_v = tile(v, (lane - H)[:, None] * V + column, first_v, door[:, None] * V + column, wide, start)
    if KEY or VALUE:
        opened = tl.load(now + t, mask=live, other=0)[:, None]
        before = tl.load(now + T + t, mask=live, other=0)[:, None]
    if KEY:
        b_k = tl.where(row < opened, b_k, 0.0)
        past_k *= tl.where(row < before, w1[:, None], 0.0) + tl.where(row < opened, w2[:, None], 0.0)
    elif VALUE:
        past_v *= tl.where(column < before, w1[:, None], 0.0) + tl.where(column < opened, w2[:, None], 0.0)
    else:
        past_k *= weight
    tl.store(key + lane[:, None] * K + row, past_k.to(key.dtype.element_ty), mask=mask)
    tl.store(value + lane[:, None] * V + column, past_v.to(value.dtype.element_ty), mask=wide)
    tl.store(near + lane, tl.sum(b_q * b_k, 1) * tl.load(own + lane, mask=live, other=0.0), mask=live)


@triton.jit
def blend_backward(
    q, k, v, matured, other, own, first_k, first_v, starts, now, dkey, dvalue, dnear, dq, dk, dv, dmatured, dother, down, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """As `blend_forward`; a token's k and v receive from the token after, whose predecessor they were."""
    h = tl.program_id(0) % H
    t = (tl.program_id(0) // H) * BT + tl.arange(0, BT)
    live = t < T
    t = t.to(tl.int64)
    start = tl.load(starts + t, mask=live, other=-1)
    after = (t + 1 < T) & (tl.load(starts + t + 1, mask=t + 1 < T, other=0) < 0)
    lane = t * H + h
    door = tl.maximum(start, 0).to(tl.int64) * H + h
    row = tl.arange(0, BK)[None, :]
    column = tl.arange(0, BV)[None, :]
    mask = live[:, None] & (row < K)
    wide = live[:, None] & (column < V)
    w1 = tl.load(matured + lane + H, mask=after, other=0.0)[:, None]
    w2 = tl.load(other + lane + H, mask=after, other=0.0)[:, None]
    b_q = tl.load(q + lane[:, None] * K + row, mask=mask, other=0.0).to(tl.float32)
    b_k = tl.load(k + lane[:, None] * K + row, mask=mask, other=0.0).to(tl.float32)
    next_k = tl.load(dkey + (lane + H)[:, None] * K + row, mask=mask & after[:, None], other=0.0).to(tl.float32)
    next_v = tl.load(dvalue + (lane + H)[:, None] * V + column, mask=wide & after[:, None], other=0.0).to(tl.float32)
    same_k = tl.load(dkey + lane[:, None] * K + row, mask=mask, other=0.0).to(tl.float32)
    if KEY or VALUE:
        opened = tl.load(now + t, mask=live, other=0)[:, None]
        before = tl.load(now + T + t, mask=live, other=0)[:, None]
        next_opened = tl.load(now + t + 1, mask=after, other=0)[:, None]
    if VALUE:
        same_v = tl.load(dvalue + lane[:, None] * V + column, mask=wide, other=0.0).to(tl.float32)
        same_v *= tile(v, (lane - H)[:, None] * V + column, first_v, door[:, None] * V + column, wide, start)
        g1 = tl.sum(tl.where(column < before, same_v, 0.0), 1)
        g2 = tl.sum(tl.where(column < opened, same_v, 0.0), 1)
        next_v *= tl.where(column < opened, w1, 0.0) + tl.where(column < next_opened, w2, 0.0)
    else:
        same_k *= tile(k, (lane - H)[:, None] * K + row, first_k, door[:, None] * K + row, mask, start)
        if KEY:
            g1 = tl.sum(tl.where(row < before, same_k, 0.0), 1)
            g2 = tl.sum(tl.where(row < opened, same_k, 0.0), 1)
            next_k *= tl.where(row < opened, w1, 0.0) + tl.where(row < next_opened, w2, 0.0)
        else:
            g1 = tl.sum(same_k, 1)
            g2 = g1
            next_k *= w1 + w2
    if KEY:
        b_q = tl.where(row < opened, b_q, 0.0)
        b_k = tl.where(row < opened, b_k, 0.0)
    upstream = tl.load(dnear + lane, mask=live, other=0.0)
    near = (upstream * tl.load(own + lane, mask=live, other=0.0))[:, None]
    tl.store(dq + lane[:, None] * K + row, (near * b_k).to(dq.dtype.element_ty), mask=mask)
    tl.store(dk + lane[:, None] * K + row, (near * b_q + next_k).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + lane[:, None] * V + column, next_v.to(dv.dtype.element_ty), mask=wide)
    tl.store(dmatured + lane, g1, mask=live)
    tl.store(dother + lane, g2, mask=live)
    tl.store(down + lane, upstream * tl.sum(b_q * b_k, 1), mask=live)


def _sizes(q: Tensor, v: Tensor, now: Tensor | None, axis: str) -> tuple[int, dict[str, Any]]:
    rows, length, heads, keys = q.shape
    wide, broad = triton.next_power_of_2(keys), triton.next_power_of_2(v.shape[-1])
    block = max(1, 4096 // max(wide, broad))
    flags = {"KEY": now is not None and axis == "key", "VALUE": now is not None and axis == "value"}
    sizes = {"H": heads, "K": keys, "V": v.shape[-1], "BT": block, "BK": wide, "BV": broad, "num_warps": 4}
    return triton.cdiv(rows * length, block) * heads, sizes | flags


@torch.library.custom_op("proteus_triton::blend", mutates_args=())
def blend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matured: Tensor,
    other: Tensor,
    own: Tensor,
    first_k: Tensor,
    first_v: Tensor,
    starts: Tensor,
    now: Tensor | None,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """key' (B, T, H, K), value' (B, T, H, V) in the type of k and v, near fp32 (B, T, H); all inputs contiguous, weights fp32.

    Args:
        first_k, first_v: (N, H, K), (N, H, V), what stands before each document's first token.
        starts: int32 (B T,), the document that starts at a token, -1 elsewhere.
        now: int32 (2, B T), coordinates open at each token and at the one before it; None for all.
    """
    key, value = torch.empty_like(k), torch.empty_like(v)
    near = torch.empty(q.shape[:-1], device=q.device, dtype=torch.float32)
    grid, sizes = _sizes(q, v, now, axis)
    cast("Any", blend_forward)[(grid,)](
        *(q, k, v, matured, other, own, first_k, first_v, starts, now, key, value, near, len(starts)), **sizes
    )
    return key, value, near


@blend.register_fake
def _(q, k, v, matured, other, own, first_k, first_v, starts, now, axis):
    return torch.empty_like(k), torch.empty_like(v), torch.empty_like(matured)


@torch.library.custom_op("proteus_triton::blend_backward", mutates_args=())
def blend_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matured: Tensor,
    other: Tensor,
    own: Tensor,
    first_k: Tensor,
    first_v: Tensor,
    starts: Tensor,
    now: Tensor | None,
    axis: str,
    dkey: Tensor,
    dvalue: Tensor,
    dnear: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, matured, other, own."""
    out = [torch.empty_like(x) for x in (q, k, v, matured, other, own)]
    grid, sizes = _sizes(q, v, now, axis)
    cast("Any", blend_backward)[(grid,)](
        *(q, k, v, matured, other, own, first_k, first_v, starts, now, dkey, dvalue, dnear, *out, len(starts)), **sizes
    )
    return out[0], out[1], out[2], out[3], out[4], out[5]


@blend_gradients.register_fake
def _(q, k, v, matured, other, own, first_k, first_v, starts, now, axis, dkey, dvalue, dnear):
    return tuple(torch.empty_like(x) for x in (q, k, v, matured, other, own))


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.axis = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dkey: Tensor, dvalue: Tensor, dnear: Tensor) -> tuple:
    q, k, v, matured, other, own, first_k, first_v, starts, now = ctx.saved_tensors
    dkey, dvalue, dnear = (x.contiguous() for x in (dkey, dvalue, dnear))
    grads = blend_gradients(q, k, v, matured, other, own, first_k, first_v, starts, now, ctx.axis, dkey, dvalue, dnear)
    d_first = [None, None]
    if ctx.needs_input_grad[6] or ctx.needs_input_grad[7]:
        # A document's first token reads its predecessor with `other` alone: it matured in the call before.
        at = torch.zeros(len(first_k), device=q.device, dtype=torch.int64)
        at = at.scatter_(0, starts.clamp(min=0).long(), torch.where(starts >= 0, torch.arange(len(starts), device=q.device), 0))
        d_k, d_v = dkey.flatten(0, 1)[at].float(), dvalue.flatten(0, 1)[at].float()
        weight = other.flatten(0, 1)[at][..., None]
        d_k, d_v = (d_k * weight, d_v) if ctx.axis == "key" or now is None else (d_k, d_v * weight)
        if now is not None:
            dim = (k if ctx.axis == "key" else v).shape[-1]
            seen = (torch.arange(dim, device=q.device) < now[0, at][:, None])[:, None]
            d_k, d_v = (d_k * seen, d_v) if ctx.axis == "key" else (d_k, d_v * seen)
        d_first = [d_k.to(first_k.dtype), d_v.to(first_v.dtype)]
    return *grads, *d_first, None, None, None


blend.register_autograd(_backward, setup_context=_setup)
