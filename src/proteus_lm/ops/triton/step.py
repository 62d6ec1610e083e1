# ruff: noqa: ANN001 -- the fake implementations repeat the signature above them
"""One token of decoding in one kernel: gate, update and read; locked coordinates are neither loaded nor stored.

The open length is read on the device, so that rows of a batch stand at their own positions, nothing waits for the host, and a CUDA
graph replays it at any position.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from proteus_lm.ops.triton.linear import RULES


@triton.jit
def advance(
    q, k, p, v, g, beta, state, active, out, after, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, HAS_G: tl.constexpr, DECAYED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    COPY: tl.constexpr, WINDOW: tl.constexpr,
) -> None:  # fmt: skip
    """BV columns of one head's state (N, H, K, V), fp32, to `after`: the state itself, or with COPY another, shut rows included.

    With WINDOW k and v are (N, 2, H, D), the token before first, and beta is gamma (N, H, 2).
    """
    lane = (tl.program_id(0) % (tl.num_programs(0) // ((V + BV - 1) // BV))).to(tl.int64)
    tile = tl.program_id(0) // (tl.num_programs(0) // ((V + BV - 1) // BV))
    now = lane
    if WINDOW:
        now = lane + (lane // H + 1) * H
    row = tl.arange(0, BK)
    column = tile * BV + tl.arange(0, BV)
    keys = K
    values = V
    if KEY:
        keys = tl.load(active + lane // H).to(tl.int32)
    if VALUE:
        values = tl.load(active + lane // H).to(tl.int32)
    at = lane * K * V + row[:, None] * V + column[None, :]
    whole = (row < K)[:, None] & (column < V)[None, :]
    if tile * BV >= values:  # a shut tile
        tl.store(out + lane * V + column, tl.zeros([BV], out.dtype.element_ty), mask=column < V)
        if COPY:
            tl.store(after + at, tl.load(state + at, mask=whole, other=0.0), mask=whole)
        return
    inside = row < keys
    mask = inside[:, None] & (column < values)[None, :]
    held = tl.load(state + at, mask=whole if COPY else mask, other=0.0)
    s = tl.where(mask, held, 0.0)
    b_k = tl.load(k + now * K + row, mask=inside, other=0.0).to(tl.float32)
    b_q = tl.load(q + lane * K + row, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(v + now * V + column, mask=column < values, other=0.0).to(tl.float32)
    decay = 1.0
    if HAS_G:
        decay = tl.exp(tl.load(g + lane).to(tl.float32))
    if DELTA:
        b_p = tl.load(p + lane * K + row, mask=inside, other=0.0).to(tl.float32)
        guess = tl.sum(s * b_p[:, None], 0)
        if DECAYED:
            guess *= decay
        u = (u - guess) * tl.load(beta + lane).to(tl.float32)
    if WINDOW:
        u *= tl.load(beta + lane * 2).to(tl.float32)
        again = tl.load(v + (now - H) * V + column, mask=column < values, other=0.0).to(tl.float32)
        again *= tl.load(beta + lane * 2 + 1).to(tl.float32)
        past = tl.load(k + (now - H) * K + row, mask=inside, other=0.0).to(tl.float32)
        s = s * decay + past[:, None] * again[None, :] + b_k[:, None] * u[None, :]
    else:
        s = s * decay + b_k[:, None] * u[None, :]
    if COPY:
        tl.store(after + at, tl.where(mask, s, held), mask=whole)
    else:
        tl.store(after + at, s, mask=mask)
    y = tl.sum(s * b_q[:, None], 0) * scale
    tl.store(out + lane * V + column, y.to(out.dtype.element_ty), mask=column < V)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    active: Tensor | None,
    after: Tensor,
    rule: str,
    axis: str,
    scale: float,
) -> Tensor:
    """o (N, H, V) for q, k, p (N, H, K), v (N, H, V), g, beta (N, H); `after` gets `state` (N, H, K, V) moved on, and may be it.

    For swla k and v are the pairs before and now, (N, 2, H, D), and beta is gamma (N, H, 2).

    Args:
        active: int (N,), open coordinates of each row; None for all.
    """
    rows, heads, keys = q.shape
    values = v.shape[-1]
    tile = min(32, max(4, triton.next_power_of_2(values)))
    delta, decayed = RULES[rule]
    out = v.new_empty(rows, heads, values)
    cast("Any", advance)[(rows * heads * triton.cdiv(values, tile),)](
        *(q, k, k if p is None else p, v, g, beta, state, active, out, after, scale),
        H=heads,
        K=keys,
        V=values,
        BK=triton.next_power_of_2(keys),
        BV=tile,
        DELTA=delta,
        HAS_G=g is not None,
        DECAYED=decayed,
        KEY=active is not None and axis == "key",
        VALUE=active is not None and axis == "value",
        COPY=after is not state,
        WINDOW=rule == "swla",
        num_warps=4,
    )
    return out


@torch.library.custom_op("proteus_triton::step", mutates_args=())
def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    active: Tensor | None,
    rule: str,
    axis: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As `_launch`: o, and the new state; the given one stays."""
    after = torch.empty_like(state)
    return _launch(q, k, v, p, g, beta, state, active, after, rule, axis, scale), after


@step.register_fake
def _(q, k, v, p, g, beta, state, active, rule, axis, scale):
    return v.new_empty(*q.shape[:2], v.shape[-1]), torch.empty_like(state)


@torch.library.custom_op("proteus_triton::step_in_place", mutates_args=("state",))
def step_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    active: Tensor | None,
    rule: str,
    axis: str,
    scale: float,
) -> Tensor:
    """As `_launch`, on the state itself."""
    return _launch(q, k, v, p, g, beta, state, active, state, rule, axis, scale)


@step_in_place.register_fake
def _(q, k, v, p, g, beta, state, active, rule, axis, scale):
    return v.new_empty(*q.shape[:2], v.shape[-1])


def run_step(
    rule: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    active: Tensor | None,
    axis: str,
    scale: float | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """`step`, or with `inplace` the same on the state itself; inference only, no gradient.

    Raises:
        ValueError: for a state that is not fp32, or not contiguous where it must move in place.
    """
    if state.dtype != torch.float32:
        raise ValueError(f"the state is {state.dtype}; the decoding kernel keeps it in float32")
    if inplace and not state.is_contiguous():
        raise ValueError("the state is not contiguous; call .contiguous() once and keep the result, or use inplace=False")
    q, k, v = (x.contiguous() for x in (q, k, v))
    p, g, beta = (x if x is None else x.contiguous() for x in (p, g, beta))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if inplace:
        return step_in_place(q, k, v, p, g, beta, state, active, rule, axis, scale), state
    return step(q, k, v, p, g, beta, state.contiguous(), active, rule, axis, scale)
