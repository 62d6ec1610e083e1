# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false, reportAssignmentType=false
"""The places that a segment's tokens attend to, put together: the prefix, what was recalled (turned), and the tokens themselves.

With a prefix keys are twice as wide: its own stand in the second half, which meets the query before it was turned.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def _turned(at, other, cosine, sine, x, D: tl.constexpr, BACK: tl.constexpr):
    """x cos + partner sin of a head's coordinates, `at` and `other` where they and their partners stand; BACK: the transpose."""
    d = tl.arange(0, D)
    sign = tl.where(d < D // 2, -1.0, 1.0)
    turn = d
    if BACK:
        sign, turn = -sign, (d + D // 2) % D
    own = tl.load(x + at).to(tl.float32) * tl.load(cosine + d[None, :]).to(tl.float32)
    return own + sign[None, :] * tl.load(x + other).to(tl.float32) * tl.load(sine + turn[None, :]).to(tl.float32)


@triton.jit(do_not_specialize=["N", "T"])
def places_kernel(
    made, cosine, sine, k, v, front, keys, values,
    N, T, k_row, k_token, k_head, v_row, v_token, v_head, turn_row, turn_token,
    FRONT: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (FRONT + 2 T, rows): all heads of one place. `made` (N, T, 2, H, D), keys (N, M, H, D or 2 D), values are contiguous."""
    m, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    h, d = tl.arange(0, BH), tl.arange(0, D)
    here = (h < H)[:, None]
    h = tl.where(h < H, h, 0)
    own = (h * D)[:, None] + d[None, :]
    if m < FRONT:
        key = tl.load(front + 2 * m * H * D + own).to(tl.float32)
        value = tl.load(front + (2 * m + 1) * H * D + own).to(tl.float32)
    elif m < FRONT + T:
        t = m - FRONT
        base = made + (row * T + t) * 2 * H * D
        other = (h * D)[:, None] + ((d + D // 2) % D)[None, :]
        turn = row * turn_row + t * turn_token
        key = _turned(own, other, cosine + turn, sine + turn, base, D, False)
        value = tl.load(base + H * D + own).to(tl.float32)
    else:
        t = m - FRONT - T
        key = tl.load(k + row * k_row + t * k_token + h[:, None] * k_head + d[None, :]).to(tl.float32)
        value = tl.load(v + row * v_row + t * v_token + h[:, None] * v_head + d[None, :]).to(tl.float32)
    place = row * (FRONT + 2 * T) + m
    kind = keys.dtype.element_ty
    tl.store(values + place * H * D + own, value.to(values.dtype.element_ty), mask=here)
    at = keys + place * H * D * WIDE + (h * D * WIDE)[:, None] + d[None, :]
    if WIDE == 2:
        first = m < FRONT
        tl.store(at, tl.where(first, 0.0, key).to(kind), mask=here)
        tl.store(at + D, tl.where(first, key, 0.0).to(kind), mask=here)
    else:
        tl.store(at, key.to(kind), mask=here)


@triton.jit(do_not_specialize=["N", "T"])
def places_backward_kernel(
    d_keys, d_values, cosine, sine, d_made, d_k, d_v, d_front,
    N, T, k_row, k_place, k_head, v_row, v_place, v_head, turn_row, turn_token,
    FRONT: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (FRONT + 2 T, rows); what is made is contiguous. The prefix's programs of row 0 sum over the rows."""
    m, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    h, d = tl.arange(0, BH), tl.arange(0, D)
    here = (h < H)[:, None]
    h = tl.where(h < H, h, 0)
    own = (h * D)[:, None] + d[None, :]
    at_k = d_keys + row * k_row + m * k_place
    at_v = d_values + row * v_row + m * v_place
    from_k, from_v = h[:, None] * k_head + d[None, :], h[:, None] * v_head + d[None, :]
    if m < FRONT:
        if row == 0:
            key, value = tl.zeros((BH, D), tl.float32), tl.zeros((BH, D), tl.float32)
            for _ in range(N):
                key += tl.load(at_k + from_k + D * (WIDE - 1)).to(tl.float32)
                value += tl.load(at_v + from_v).to(tl.float32)
                at_k += k_row
                at_v += v_row
            tl.store(d_front + 2 * m * H * D + own, key.to(d_front.dtype.element_ty), mask=here)
            tl.store(d_front + (2 * m + 1) * H * D + own, value.to(d_front.dtype.element_ty), mask=here)
    elif m < FRONT + T:
        t = m - FRONT
        base = d_made + (row * T + t) * 2 * H * D
        other = h[:, None] * k_head + ((d + D // 2) % D)[None, :]
        turn = row * turn_row + t * turn_token
        key = _turned(from_k, other, cosine + turn, sine + turn, at_k, D, True)
        tl.store(base + own, key.to(d_made.dtype.element_ty), mask=here)
        tl.store(base + H * D + own, tl.load(at_v + from_v).to(d_made.dtype.element_ty), mask=here)
    else:
        place = (row * T + m - FRONT - T) * H * D
        tl.store(d_k + place + own, tl.load(at_k + from_k).to(d_k.dtype.element_ty), mask=here)
        tl.store(d_v + place + own, tl.load(at_v + from_v).to(d_v.dtype.element_ty), mask=here)


class Places(torch.autograd.Function):
    """As `proteus_lm.ops.triton_mac.places`."""

    @staticmethod
    def forward(
        ctx: Any, made: Tensor, cosine: Tensor, sine: Tensor, k: Tensor, v: Tensor, front: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        made, k, v, cosine, sine = made.contiguous(), _inner(k), _inner(v), _inner(cosine), _inner(sine)
        rows, length, _, heads, dim = made.shape
        first = 0 if front is None else len(front)
        wide = 2 if first else 1
        keys = made.new_empty(rows, first + 2 * length, heads, wide * dim)
        values = made.new_empty(rows, first + 2 * length, heads, dim)
        ctx.turn = [cosine.stride(0) if len(cosine) > 1 else 0, cosine.stride(1)]
        ctx.options = {"FRONT": first, "H": heads, "BH": triton.next_power_of_2(heads), "D": dim, "WIDE": wide, "num_warps": 4}
        given = made if front is None else front.contiguous()
        places_kernel[(first + 2 * length, rows)](
            made,
            cosine,
            sine,
            k,
            v,
            given,
            keys,
            values,
            rows,
            length,
            *k.stride()[:3],
            *v.stride()[:3],
            *ctx.turn,
            **ctx.options,
        )
        ctx.save_for_backward(cosine, sine)
        ctx.like = made.shape, [t.dtype for t in (made, k, v)], made.dtype if front is None else front.dtype
        return keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        d_keys, d_values = (_inner(g) for g in grads)
        shape, types, front_type = ctx.like
        rows, length, _, heads, dim = shape
        d_made = d_keys.new_empty(shape, dtype=types[0])
        d_k, d_v = (d_keys.new_empty(rows, length, heads, dim, dtype=kind) for kind in types[1:])
        count = ctx.options["FRONT"]
        d_front = d_keys.new_empty(count, 2, heads, dim, dtype=front_type) if count else None
        places_backward_kernel[(d_keys.shape[1], rows)](
            d_keys, d_values, cosine, sine, d_made, d_k, d_v, d_made if d_front is None else d_front,
            rows, length, *d_keys.stride()[:3], *d_values.stride()[:3], *ctx.turn, **ctx.options,
        )  # fmt: skip
        return d_made, None, None, d_k, d_v, d_front


def _inner(x: Tensor) -> Tensor:
    """x, its last dimension dense."""
    return x if x.stride(-1) == 1 else x.contiguous()
