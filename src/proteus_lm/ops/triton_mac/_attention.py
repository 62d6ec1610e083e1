# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false, reportAssignmentType=false
"""Attention of a whole segment of MAC over the prefix, what was recalled, and its tokens: one launch forward, one backward.

Nothing is put together before: the kernels turn the recalled keys as they load them, and the prefix meets the queries that were
not turned. A head's coordinates are two halves, for rotary turns a coordinate of the first with one of the second; scores are the
sum of two products. Backward, programs of keys work on transposed scores, so that no result of a product is transposed (Triton 3.4
to 3.7 compile some of those wrongly on Hopper). They work out the row sums of dy * y again for each tile of queries.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from proteus_lm.ops.late_linear import LateSum
from proteus_lm.ops.triton import shared_memory
from proteus_lm.ops.triton_deep._common import operand

# Of each kernel: launch options; queries (BM) and places (BN) of a tile, at most, as checked on a GPU. Never one stage: Triton 3.6
# then lets wgmma read what other threads have stored without a fence before the barrier between, and dq is wrong (in bf16).
LAUNCH = {
    "forward": {"num_warps": 4, "num_stages": 2, "BM": 64, "BN": 64},
    "backward": {"num_warps": 4, "num_stages": 2, "BM": 64, "BN": 64},
}
LOG2_E = 1.4426950408889634


@triton.jit
def _tile(x, at, stride, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers 0 .. WIDTH of the places `at` (n,), as a tile (n, BLOCK): 0 beyond them, and from place `end` on."""
    d = tl.arange(0, BLOCK)
    there = (at < end)[:, None]
    if WIDTH != BLOCK:
        there = there & (d < WIDTH)[None, :]
    return tl.load(x + at[:, None] * stride + d[None, :], mask=there, other=0.0)


@triton.jit
def _put(x, at, stride, end, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store a tile, as `_tile` loads it."""
    d = tl.arange(0, BLOCK)
    there = (at < end)[:, None]
    if WIDTH != BLOCK:
        there = there & (d < WIDTH)[None, :]
    tl.store(x + at[:, None] * stride + d[None, :], value.to(x.dtype.element_ty), mask=there)


@triton.jit
def _halves(x, at, stride, end, HALF: tl.constexpr, BH: tl.constexpr, OPD: tl.constexpr, PREC: tl.constexpr):
    """Both halves of the places' vectors, as operands."""
    first, second = _tile(x, at, stride, end, HALF, BH), _tile(x + HALF, at, stride, end, HALF, BH)
    return operand(first, OPD, PREC), operand(second, OPD, PREC)


@triton.jit
def _turned(
    x, cosine, sine, at, stride, turn, end, HALF: tl.constexpr, BH: tl.constexpr, OPD: tl.constexpr, PREC: tl.constexpr
):  # fmt: skip
    """As `_halves`, of vectors turned."""
    first = _tile(x, at, stride, end, HALF, BH).to(tl.float32)
    second = _tile(x + HALF, at, stride, end, HALF, BH).to(tl.float32)
    cos = _tile(cosine, at, turn, end, HALF, BH).to(tl.float32)
    sin = _tile(sine, at, turn, end, HALF, BH).to(tl.float32)
    return operand(first * cos - second * sin, OPD, PREC), operand(second * cos + first * sin, OPD, PREC)


@triton.jit
def _scores(a1, a2, b1, b2, PREC: tl.constexpr):
    """a b' of vectors in halves."""
    return tl.dot(a2, tl.trans(b2), tl.dot(a1, tl.trans(b1), input_precision=PREC), input_precision=PREC)


@triton.jit
def _folded(top, total, acc, s, value, OPD: tl.constexpr, PREC: tl.constexpr):
    """A softmax so far (greatest score, sum, sum of values) and more scores (n, m), -inf where unseen, with values (m, BV)."""
    best = tl.maximum(top, tl.max(s, 1))
    shrink, p = tl.exp2(top - best), tl.exp2(s - best[:, None])
    acc = tl.dot(operand(p, OPD, PREC), value, acc * shrink[:, None], input_precision=PREC)
    return best, total * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["T", "H"])
def attend_kernel(
    q, plain, made, cosine, sine, k, v, front, y, log,
    T, H, q_row, q_token, q_head, p_row, p_token, p_head, k_row, k_token, k_head, v_row, v_token, v_head, turn_row, turn_token,
    FRONT: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, PREC: tl.constexpr,
    BH: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows * heads, tiles of queries). `made` (N, T, 2, H, D), front (FRONT, 2, H, D), y (N, T, H, D) are contiguous.

    log fp32 (N, H, T): base 2 logarithm of each query's sum of 2 ** score; SCALE brings products to such scores.
    """
    p = tl.program_id(0).to(tl.int64)
    row, head = p // H, p % H
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # long ones first
    OPD: tl.constexpr = y.dtype.element_ty
    HALF: tl.constexpr = D // 2
    t = tile * BM + tl.arange(0, BM)
    q1, q2 = _halves(q + row * q_row + head * q_head, t, q_token, T, HALF, BH, OPD, PREC)
    top, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BV), tl.float32)
    if FRONT:
        p1, p2 = _halves(plain + row * p_row + head * p_head, t, p_token, T, HALF, BH, OPD, PREC)
        at_front = front + head * D
        for first in range(0, FRONT, BF):
            place = first + tl.arange(0, BF)
            f1, f2 = _halves(at_front, place, 2 * H * D, FRONT, HALF, BH, OPD, PREC)
            value = operand(_tile(at_front + H * D, place, 2 * H * D, FRONT, D, BV), OPD, PREC)
            s = tl.where((place < FRONT)[None, :], SCALE * _scores(p1, p2, f1, f2, PREC), float("-inf"))
            top, total, acc = _folded(top, total, acc, s, value, OPD, PREC)
    made += (row * T * 2 * H + head) * D
    cosine, sine = cosine + row * turn_row, sine + row * turn_row
    k, v = k + row * k_row + head * k_head, v + row * v_row + head * v_head
    for first in range(0, tl.minimum(T, (tile + 1) * BM), BN):
        u = first + tl.arange(0, BN)
        seen = (u[None, :] <= t[:, None]) & (u < T)[None, :]
        k1, k2 = _turned(made, cosine, sine, u, 2 * H * D, turn_token, T, HALF, BH, OPD, PREC)
        value = operand(_tile(made + H * D, u, 2 * H * D, T, D, BV), OPD, PREC)
        s = tl.where(seen, SCALE * _scores(q1, q2, k1, k2, PREC), float("-inf"))
        top, total, acc = _folded(top, total, acc, s, value, OPD, PREC)
        k1, k2 = _halves(k, u, k_token, T, HALF, BH, OPD, PREC)
        value = operand(_tile(v, u, v_token, T, D, BV), OPD, PREC)
        s = tl.where(seen, SCALE * _scores(q1, q2, k1, k2, PREC), float("-inf"))
        top, total, acc = _folded(top, total, acc, s, value, OPD, PREC)
    _put(y + (row * T * H + head) * D, t, H * D, T, acc / total[:, None], D, BV)
    tl.store(log + p * T + t, top + tl.log2(total), mask=t < T)


@triton.jit
def _to_scores(s, log, value, dy, delta, OPD: tl.constexpr, PREC: tl.constexpr):
    """The gradient, as an operand, of scores s, queries by places, -inf where unseen."""
    to_share = tl.dot(dy, tl.trans(value), input_precision=PREC) - delta[:, None]
    return operand(tl.exp2(s - log[:, None]) * to_share, OPD, PREC)


@triton.jit
def _queries_backward(
    q, plain, made, cosine, sine, k, v, front, y, log, dy, dq, d_plain, tile, T, H,
    q_token, p_token, k_token, v_token, turn_token,
    FRONT: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, PREC: tl.constexpr, OPD: tl.constexpr,
    BH: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of queries, turned and not. All pointers stand at the row and head."""
    HALF: tl.constexpr = D // 2
    t = tile * BM + tl.arange(0, BM)
    q1, q2 = _halves(q, t, q_token, T, HALF, BH, OPD, PREC)
    to_y = _tile(dy, t, H * D, T, D, BV)
    delta = tl.sum(to_y.to(tl.float32) * _tile(y, t, H * D, T, D, BV).to(tl.float32), 1)
    to_y, rest = operand(to_y, OPD, PREC), tl.load(log + t, mask=t < T, other=0.0)
    back: tl.constexpr = SCALE / 1.4426950408889634
    if FRONT:
        p1, p2 = _halves(plain, t, p_token, T, HALF, BH, OPD, PREC)
        d1, d2 = tl.zeros((BM, BH), tl.float32), tl.zeros((BM, BH), tl.float32)
        for first in range(0, FRONT, BF):
            place = first + tl.arange(0, BF)
            f1, f2 = _halves(front, place, 2 * H * D, FRONT, HALF, BH, OPD, PREC)
            value = operand(_tile(front + H * D, place, 2 * H * D, FRONT, D, BV), OPD, PREC)
            s = tl.where((place < FRONT)[None, :], SCALE * _scores(p1, p2, f1, f2, PREC), float("-inf"))
            s = _to_scores(s, rest, value, to_y, delta, OPD, PREC)
            d1 = tl.dot(s, f1, d1, input_precision=PREC)
            d2 = tl.dot(s, f2, d2, input_precision=PREC)
        _put(d_plain, t, H * D, T, d1 * back, HALF, BH)
        _put(d_plain + HALF, t, H * D, T, d2 * back, HALF, BH)
    d1, d2 = tl.zeros((BM, BH), tl.float32), tl.zeros((BM, BH), tl.float32)
    for first in range(0, tl.minimum(T, (tile + 1) * BM), BN):
        u = first + tl.arange(0, BN)
        seen = (u[None, :] <= t[:, None]) & (u < T)[None, :]
        k1, k2 = _turned(made, cosine, sine, u, 2 * H * D, turn_token, T, HALF, BH, OPD, PREC)
        value = operand(_tile(made + H * D, u, 2 * H * D, T, D, BV), OPD, PREC)
        s = tl.where(seen, SCALE * _scores(q1, q2, k1, k2, PREC), float("-inf"))
        s = _to_scores(s, rest, value, to_y, delta, OPD, PREC)
        d1 = tl.dot(s, k1, d1, input_precision=PREC)
        d2 = tl.dot(s, k2, d2, input_precision=PREC)
        k1, k2 = _halves(k, u, k_token, T, HALF, BH, OPD, PREC)
        value = operand(_tile(v, u, v_token, T, D, BV), OPD, PREC)
        s = tl.where(seen, SCALE * _scores(q1, q2, k1, k2, PREC), float("-inf"))
        s = _to_scores(s, rest, value, to_y, delta, OPD, PREC)
        d1 = tl.dot(s, k1, d1, input_precision=PREC)
        d2 = tl.dot(s, k2, d2, input_precision=PREC)
    _put(dq, t, H * D, T, d1 * back, HALF, BH)
    _put(dq + HALF, t, H * D, T, d2 * back, HALF, BH)


@triton.jit
def _places_backward(
    q, q_token, k1, k2, value, y, log, dy, place, end, first, T, H,
    CAUSAL: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, PREC: tl.constexpr, OPD: tl.constexpr,
    BH: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of places (before `end`), keys in halves and values, fp32, from the queries `first` .. T."""
    HALF: tl.constexpr = D // 2
    d1, d2, d_value = tl.zeros((BN, BH), tl.float32), tl.zeros((BN, BH), tl.float32), tl.zeros((BN, BV), tl.float32)
    for start in range(first, T, BM):
        t = start + tl.arange(0, BM)
        q1, q2 = _halves(q, t, q_token, T, HALF, BH, OPD, PREC)
        to_y = _tile(dy, t, H * D, T, D, BV)
        delta = tl.sum(to_y.to(tl.float32) * _tile(y, t, H * D, T, D, BV).to(tl.float32), 1)
        to_y, rest = operand(to_y, OPD, PREC), tl.load(log + t, mask=t < T, other=0.0)
        seen = place[:, None] <= t[None, :] if CAUSAL else (place < end)[:, None]
        share = tl.exp2(tl.where(seen, SCALE * _scores(k1, k2, q1, q2, PREC), float("-inf")) - rest[None, :])
        d_value = tl.dot(operand(share, OPD, PREC), to_y, d_value, input_precision=PREC)
        s = share * (tl.dot(value, tl.trans(to_y), input_precision=PREC) - delta[None, :])
        s = operand(s, OPD, PREC)
        d1 = tl.dot(s, q1, d1, input_precision=PREC)
        d2 = tl.dot(s, q2, d2, input_precision=PREC)
    back: tl.constexpr = SCALE / 1.4426950408889634
    return d1 * back, d2 * back, d_value


@triton.jit
def _tokens_backward(
    q, made, cosine, sine, k, v, y, log, dy, d_made, d_k, d_v, tile, recalled, T, H,
    q_token, k_token, v_token, turn_token,
    D: tl.constexpr, SCALE: tl.constexpr, PREC: tl.constexpr, OPD: tl.constexpr,
    BH: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of what was recalled, or of the tokens. All pointers stand at the row and head."""
    HALF: tl.constexpr = D // 2
    place = tile * BN + tl.arange(0, BN)
    if recalled:
        k1, k2 = _turned(made, cosine, sine, place, 2 * H * D, turn_token, T, HALF, BH, OPD, PREC)
        value = operand(_tile(made + H * D, place, 2 * H * D, T, D, BV), OPD, PREC)
    else:
        k1, k2 = _halves(k, place, k_token, T, HALF, BH, OPD, PREC)
        value = operand(_tile(v, place, v_token, T, D, BV), OPD, PREC)
    first = tile * BN // BM * BM
    d1, d2, d_value = _places_backward(
        q, q_token, k1, k2, value, y, log, dy, place, T, first, T, H, True, D, SCALE, PREC, OPD, BH, BV, BM, BN
    )
    if recalled:
        cos = _tile(cosine, place, turn_token, T, HALF, BH).to(tl.float32)
        sin = _tile(sine, place, turn_token, T, HALF, BH).to(tl.float32)
        _put(d_made, place, 2 * H * D, T, d1 * cos + d2 * sin, HALF, BH)
        _put(d_made + HALF, place, 2 * H * D, T, d2 * cos - d1 * sin, HALF, BH)
        _put(d_made + H * D, place, 2 * H * D, T, d_value, D, BV)
    else:
        _put(d_k, place, H * D, T, d1, HALF, BH)
        _put(d_k + HALF, place, H * D, T, d2, HALF, BH)
        _put(d_v, place, H * D, T, d_value, D, BV)


@triton.jit
def _front_backward(
    plain, front, y, log, dy, d_front, tile, T, H, p_token,
    FRONT: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, PREC: tl.constexpr, OPD: tl.constexpr,
    BH: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """A row's part of the gradients of a tile of the prefix. All pointers stand at the row and head."""
    HALF: tl.constexpr = D // 2
    place = tile * BF + tl.arange(0, BF)
    k1, k2 = _halves(front, place, 2 * H * D, FRONT, HALF, BH, OPD, PREC)
    value = operand(_tile(front + H * D, place, 2 * H * D, FRONT, D, BV), OPD, PREC)
    d1, d2, d_value = _places_backward(
        plain, p_token, k1, k2, value, y, log, dy, place, FRONT, 0, T, H, False, D, SCALE, PREC, OPD, BH, BV, BM, BF
    )
    _put(d_front, place, 2 * H * D, FRONT, d1, HALF, BH)
    _put(d_front + HALF, place, 2 * H * D, FRONT, d2, HALF, BH)
    _put(d_front + H * D, place, 2 * H * D, FRONT, d_value, D, BV)


@triton.jit(do_not_specialize=["T", "H"])
def attend_backward_kernel(
    q, plain, made, cosine, sine, k, v, front, y, log, dy, dq, d_plain, d_made, d_k, d_v, d_front,
    T, H, q_row, q_token, q_head, p_row, p_token, p_head, k_row, k_token, k_head, v_row, v_token, v_head, turn_row, turn_token,
    FRONT: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, PREC: tl.constexpr,
    BH: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows * heads, tiles of queries + 2 tiles of tokens + tiles of the prefix). The first make the gradients of queries;
    then a tile of what was recalled and one of the tokens take turns; the last make the prefix's part of a row.

    As `attend_kernel`; the gradients are contiguous, of tokens (N, T, H, D), d_made as `made`, d_front fp32 (N, FRONT, 2, H, D).
    """
    p = tl.program_id(0).to(tl.int64)
    row, head = p // H, p % H
    number = tl.program_id(1)
    OPD: tl.constexpr = y.dtype.element_ty
    here = (row * T * H + head) * D
    q, plain = q + row * q_row + head * q_head, plain + row * p_row + head * p_head
    k, v = k + row * k_row + head * k_head, v + row * v_row + head * v_head
    cosine, sine = cosine + row * turn_row, sine + row * turn_row
    made += (row * T * 2 * H + head) * D
    y, dy, log = y + here, dy + here, log + p * T
    front += head * D
    queries, tokens = tl.cdiv(T, BM), tl.cdiv(T, BN)
    if number < queries:
        _queries_backward(
            q, plain, made, cosine, sine, k, v, front, y, log, dy, dq + here, d_plain + here, queries - 1 - number, T, H,
            q_token, p_token, k_token, v_token, turn_token, FRONT, D, SCALE, PREC, OPD, BH, BV, BF, BM, BN,
        )  # fmt: skip
    elif number < queries + 2 * tokens:
        _tokens_backward(
            q, made, cosine, sine, k, v, y, log, dy, d_made + (row * T * 2 * H + head) * D, d_k + here, d_v + here,
            (number - queries) // 2, (number - queries) % 2 == 0, T, H,
            q_token, k_token, v_token, turn_token, D, SCALE, PREC, OPD, BH, BV, BM, BN,
        )  # fmt: skip
    elif FRONT:
        _front_backward(
            plain, front, y, log, dy, d_front + (row * FRONT * 2 * H + head) * D, number - queries - 2 * tokens, T, H,
            p_token, FRONT, D, SCALE, PREC, OPD, BH, BV, BF, BM,
        )  # fmt: skip


@cache
def _side(width: int, device: torch.device) -> int:
    """Of tiles of `width` bytes a place: how many places the device's shared memory has room for. Two stages take 12 tiles."""
    room, side = shared_memory(device) if device.type == "cuda" else 227 * 1024, 128
    while side > 16 and 13 * side * width > room:
        side //= 2
    return side


def _options(direction: str, like: Tensor, front: int) -> dict[str, Any]:
    """Constants and launch options for queries like `like` (N, T, H, D) with `front` places of a prefix."""
    dim, block = like.shape[-1], lambda n: max(16, triton.next_power_of_2(n))
    precision = "ieee"
    if like.dtype == torch.float32 and like.device.type == "cuda":
        precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    launch = dict(LAUNCH[direction])
    most = _side(block(dim) * like.element_size(), like.device)
    launch |= {side: min(launch[side], most) for side in ("BM", "BN")}
    sizes = {"BH": block(dim // 2), "BV": block(dim), "BF": min(launch["BN"], block(front))}
    return {"FRONT": front, "D": dim, "SCALE": LOG2_E * dim**-0.5, "PREC": precision, **sizes, **launch}


class Attend(torch.autograd.Function):
    """As `proteus_lm.ops.triton_mac.attend`; `end` is that of `front`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        plain: Tensor,
        made: Tensor,
        cosine: Tensor,
        sine: Tensor,
        k: Tensor,
        v: Tensor,
        front: LateSum | None,
        end: Tensor | None,
    ) -> Tensor:
        q, plain, k, v, cosine, sine = (_inner(x) for x in (q, plain, k, v, cosine, sine))
        made = made.contiguous()
        if cosine.stride() != sine.stride():
            cosine, sine = cosine.contiguous(), sine.contiguous()
        rows, length, heads, _ = q.shape
        places = q if front is None else front.value.contiguous()
        turn = [cosine.stride(0) if len(cosine) > 1 else 0, cosine.stride(1)]
        ctx.sizes = length, heads, *(n for x in (q, plain, k, v) for n in x.stride()[:3]), *turn
        ctx.front, ctx.end = (None, None) if end is None else (front, end.grad_fn)
        ctx.count = 0 if front is None else len(places)
        y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        log = torch.empty(rows, heads, length, dtype=torch.float32, device=q.device)
        options = _options("forward", q, ctx.count)
        grid = (rows * heads, triton.cdiv(length, options["BM"]))
        attend_kernel[grid](q, plain, made, cosine, sine, k, v, places, y, log, *ctx.sizes, **options)
        ctx.save_for_backward(q, plain, made, cosine, sine, k, v, places, y, log)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, plain, made, cosine, sine, k, v, places, y, log = ctx.saved_tensors
        count, (rows, length, heads, dim) = ctx.count, q.shape
        fresh = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)  # noqa: E731
        dq, d_made, d_k, d_v = (fresh(x) for x in (q, made, k, v))
        d_plain = fresh(plain) if count else dq
        d_front = torch.empty(rows, count, 2, heads, dim, dtype=torch.float32, device=q.device) if count else log
        options = _options("backward", q, count)
        tiles = triton.cdiv(length, options["BM"]) + 2 * triton.cdiv(length, options["BN"]) + triton.cdiv(count, options["BF"])
        attend_backward_kernel[(rows * heads, tiles)](
            q, plain, made, cosine, sine, k, v, places, y, log, dy.contiguous(), dq, d_plain, d_made, d_k, d_v, d_front,
            *ctx.sizes, **options,
        )  # fmt: skip
        if ctx.end is not None:
            ctx.front.add(d_front, ctx.end)
        return dq, d_plain if count else None, d_made, None, None, d_k, d_v, None, None


def _inner(x: Tensor) -> Tensor:
    """x, its last dimension dense."""
    return x if x.stride(-1) == 1 else x.contiguous()
