# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAssignmentType=false
"""One token of decoding in one kernel, a program a row and head: put the token into its slot, read, and at a boundary commit.

Slot, open units and boundary are read on the device: rows stand at their own positions, nothing waits for the host, and a CUDA
graph replays the step at any position. The weights are read once from memory and once from the cache; products over the open
chunk's rows are matrix products, those with the one query are sums in fp32.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from proteus_lm.ops.triton_deep._common import mul, operand, pointwise, sixteens

LAUNCH = {"num_warps": 8, "BH": 32}  # of the step with a hidden layer: warps, and hidden units worked on at once


@triton.jit
def _passed(weights, momentum, share, t, j, keep, eta, here):
    """Slot j's gates on what each slot's gradient left in weights and momentum, and on the start weights' share by slot."""
    momentum = tl.where(t < j, momentum * eta, tl.where(t == j, 1.0, 0.0))
    weights = weights * keep + momentum * here
    share = tl.where(t <= j, share * keep, share)
    return weights, momentum, share


@triton.jit
def _of_unit(values, t, opened, otherwise):
    """values (b,) at the slot where each unit opens (tile,); `otherwise` for a unit that is shut."""
    hit = opened[:, None] == t[None, :]
    found = tl.sum(tl.where(hit, values[None, :], 0.0), 1)
    return tl.where(tl.sum(tl.where(hit, 1, 0), 1) > 0, found, otherwise)


@triton.jit
def _with_token(rows, token, at, t, slot, valid):
    """A gate's open rows (b,) with the token's in its slot, 0 where no token is."""
    old = tl.load(rows + at, mask=valid & (t != slot), other=0.0).to(tl.float32)
    return tl.where((t == slot) & valid, tl.load(token).to(tl.float32), old)


@triton.jit
def _keep_rows(rows, token, out, at, t, slot, valid, ends, INPLACE: tl.constexpr):
    """To `out` the rows as they are behind the token: none where the chunk ends."""
    if INPLACE:
        x = tl.where(ends, 0.0, tl.load(token).to(tl.float32))
        tl.store(out + at, tl.zeros_like(at).to(tl.float32) + x, mask=(t >= tl.where(ends, 0, slot)) & (t <= slot))
    else:
        tl.store(out + at, tl.where(ends, 0.0, _with_token(rows, token, at, t, slot, valid)))


@triton.jit
def _keep_vectors(rows, token, out, at, t, d, slot, valid, ends, D: tl.constexpr, INPLACE: tl.constexpr):
    """As `_keep_rows`, of vectors (b, D)."""
    x = tl.load(token + d).to(tl.float32)[None, :] + tl.zeros_like(t).to(tl.float32)[:, None]
    cells = at[:, None] * D + d[None, :]
    if INPLACE:
        here = (t >= tl.where(ends, 0, slot)) & (t <= slot)
        tl.store(out + cells, tl.where(ends, 0.0, x), mask=here[:, None])
    else:
        old = tl.load(rows + cells, mask=(valid & (t != slot))[:, None], other=0.0).to(tl.float32)
        x = tl.where(((t == slot) & valid)[:, None], x, old)
        tl.store(out + cells, tl.where(ends, 0.0, x))


@triton.jit
def _copy(x, out, start, size, STEP: tl.constexpr):
    for first in range(start, size, STEP):
        cells = first + tl.arange(0, STEP)
        tl.store(out + cells, tl.load(x + cells, mask=cells < size, other=0.0), mask=cells < size)


@triton.jit
def move_kernel(active, position, now, out_active, out_position, HID: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr):
    """Grid (rows): the row's open units by slot and its position. After `step_kernel`, whose programs all read them."""
    n = tl.program_id(0)
    t = tl.arange(0, B)
    place = tl.load(position + n)
    slot = (place % B).to(tl.int32)
    width = HID
    if GATED:
        width = tl.minimum(tl.load(now + n).to(tl.int32), HID)
    held = tl.where(t == slot, width, tl.load(active + n * B + t).to(tl.int32))
    tl.store(out_active + n * B + t, tl.where(slot < B - 1, held, 0).to(out_active.dtype.element_ty))
    tl.store(out_position + n, place + 1)


@triton.jit
def step_kernel(
    q, k, v, theta, alpha, eta, rows_k, rows_v, rows_theta, rows_alpha, rows_eta, rows_active, position, now, w1, s1, w2, s2,
    y, out_k, out_v, out_theta, out_alpha, out_eta, out_w1, out_s1, out_w2, out_s2, H,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr, ACT: tl.constexpr,
    DEEP: tl.constexpr, PRE: tl.constexpr, GATED: tl.constexpr, INPLACE: tl.constexpr, TYPE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (rows * heads). Tensors as in `TitansState`; `out_*` are the same tensors with INPLACE, else new ones, all written."""
    p = tl.program_id(0).to(tl.int64)
    n, h = p // H, p % H
    t, dk, dv = tl.arange(0, B), tl.arange(0, DK), tl.arange(0, DV)
    place = tl.load(position + n)
    slot = (place % B).to(tl.int32)
    ends = slot == B - 1  # the chunk: the weights move to its end, and its slots are emptied
    width = HID
    if GATED:
        width = tl.minimum(tl.load(now + n).to(tl.int32), HID)
    active = tl.where(t == slot, width, tl.load(rows_active + n * B + t).to(tl.int32))
    valid = active > 0
    at = (n * B + t) * H + h
    others = valid & (t != slot)
    own = ((t == slot) & valid)[:, None]
    b_k = tl.load(rows_k + at[:, None] * DK + dk[None, :], mask=others[:, None], other=0.0).to(tl.float32)
    b_k = tl.where(own, tl.load(k + p * DK + dk).to(tl.float32)[None, :], b_k)
    b_theta = _with_token(rows_theta, theta + p, at, t, slot, valid)
    mo = tl.where(valid, _with_token(rows_eta, eta + p, at, t, slot, valid), 1.0)

    mix, left, share = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32), tl.full((B,), 1.0, tl.float32)
    for j in range(slot):
        one = (n * B + j) * H + h
        here = tl.load(rows_active + n * B + j) > 0
        keep_j = tl.where(here, 1.0 - tl.load(rows_alpha + one).to(tl.float32), 1.0)
        eta_j = tl.where(here, tl.load(rows_eta + one).to(tl.float32), 1.0)
        mix, left, share = _passed(mix, left, share, t, j, keep_j, eta_j, tl.where(here, 1.0, 0.0))
    seen, seen_share = mix, share
    keep_j, eta_j = 1.0 - tl.load(alpha + p).to(tl.float32), tl.load(eta + p).to(tl.float32)
    mix, left, share = _passed(mix, left, share, t, slot, keep_j, eta_j, 1.0)
    if not PRE:
        seen, seen_share = mix, share
    to_read, to_w, to_s = seen * b_theta, mix * b_theta, left * b_theta

    matrix = p * DK * HID
    second = p * HID * DV
    tiles = tl.cdiv(sixteens(width), BH)
    keys = operand(b_k, TYPE, PREC)
    err = tl.zeros((B, DV), tl.float32)
    for i in range(tiles):
        cols = i * BH + tl.arange(0, BH)
        open_ = cols < width
        mine = active[:, None] > cols[None, :]
        if DEEP:
            w = tl.load(w1 + matrix + dk[:, None] * HID + cols[None, :], mask=open_[None, :], other=0.0)
            a, _, _ = pointwise(mul(keys, operand(w, TYPE, PREC), PREC), ACT)
        else:
            a = b_k
        a = tl.where(mine, a, 0.0)
        w = tl.load(w2 + second + cols[:, None] * DV + dv[None, :], mask=open_[:, None], other=0.0)
        err = tl.dot(operand(a, TYPE, PREC), operand(w, TYPE, PREC), err, input_precision=PREC)
    b_v = tl.load(rows_v + at[:, None] * DV + dv[None, :], mask=others[:, None], other=0.0).to(tl.float32)
    b_v = tl.where(own, tl.load(v + p * DV + dv).to(tl.float32)[None, :], b_v)
    err = tl.where(valid[:, None], err - b_v, 0.0)
    b_err = operand(err, TYPE, PREC)

    b_q = tl.load(q + p * DK + dk).to(tl.float32)
    near = to_read * tl.sum(b_k * b_q[None, :], 1)
    alike = tl.zeros((B,), tl.float32)
    found = tl.zeros((DV,), tl.float32)
    for i in range(tiles):
        cols = i * BH + tl.arange(0, BH)
        open_ = cols < width
        mine = active[:, None] > cols[None, :]
        opened = tl.min(tl.where(mine, t[:, None], B), 0)
        decay, carry = _of_unit(seen_share, t, opened, 1.0), _of_unit(mo * seen, t, opened, 0.0)
        if PRE:  # a unit that opens at this very token has met no gate yet
            decay = tl.where(opened == slot, 1.0, decay)
            carry = tl.where(opened == slot, 0.0, carry)
        cells2 = second + cols[:, None] * DV + dv[None, :]
        f_w2 = tl.load(w2 + cells2, mask=open_[:, None], other=0.0)
        f_s2 = tl.load(s2 + cells2, mask=open_[:, None], other=0.0)
        if DEEP:
            cells1 = matrix + dk[:, None] * HID + cols[None, :]
            f_w1 = tl.load(w1 + cells1, mask=open_[None, :], other=0.0)
            f_s1 = tl.load(s1 + cells1, mask=open_[None, :], other=0.0)
            a, slope, _ = pointwise(mul(keys, operand(f_w1, TYPE, PREC), PREC), ACT)
            turned = tl.load(w2 + second + cols[None, :] * DV + dv[:, None], mask=open_[None, :], other=0.0)
            g = tl.where(mine, mul(b_err, operand(turned, TYPE, PREC), PREC) * slope, 0.0)
            z = decay * tl.sum(f_w1 * b_q[:, None], 0) + carry * tl.sum(f_s1 * b_q[:, None], 0) - tl.sum(near[:, None] * g, 0)
            x, _, _ = pointwise(z, ACT)
        else:
            a, x = b_k, b_q
        a = tl.where(mine, a, 0.0)
        x = tl.where(open_, x, 0.0)
        alike += tl.sum(a * x[None, :], 1)
        found += tl.sum((decay * x)[:, None] * f_w2 + (carry * x)[:, None] * f_s2, 0)
        if ends:
            decay, carry = _of_unit(share, t, opened, 1.0), _of_unit(mo * mix, t, opened, 0.0)
            held = _of_unit(mo * left, t, opened, 1.0)
            # Transposed operands are loaded or worked out so: Triton 3.4 to 3.7.0 miscompiles a transposed accumulator on Hopper.
            k_t = tl.load(rows_k + at[None, :] * DK + dk[:, None], mask=others[None, :], other=0.0).to(tl.float32)
            k_t = tl.where(((t == slot) & valid)[None, :], tl.load(k + p * DK + dk).to(tl.float32)[:, None], k_t)
            a_t = k_t
            if DEEP:
                w_t = tl.load(w1 + matrix + dk[None, :] * HID + cols[:, None], mask=open_[:, None], other=0.0)
                a_t, _slope_t, _bend_t = pointwise(mul(operand(w_t, TYPE, PREC), operand(k_t, TYPE, PREC), PREC), ACT)
                b_g = operand(g, TYPE, PREC)
                new = decay[None, :] * f_w1 + carry[None, :] * f_s1 - mul(operand(k_t * to_w[None, :], TYPE, PREC), b_g, PREC)
                tl.store(out_w1 + cells1, new, mask=open_[None, :])
                new = held[None, :] * f_s1 - mul(operand(k_t * to_s[None, :], TYPE, PREC), b_g, PREC)
                tl.store(out_s1 + cells1, new, mask=open_[None, :])
            a_t = operand(tl.where(active[None, :] > cols[:, None], a_t, 0.0), TYPE, PREC)
            new = decay[:, None] * f_w2 + carry[:, None] * f_s2 - mul(a_t, operand(err * to_w[:, None], TYPE, PREC), PREC)
            tl.store(out_w2 + cells2, new, mask=open_[:, None])
            new = held[:, None] * f_s2 - mul(a_t, operand(err * to_s[:, None], TYPE, PREC), PREC)
            tl.store(out_s2 + cells2, new, mask=open_[:, None])
        elif not INPLACE:
            tl.store(out_w2 + cells2, f_w2, mask=open_[:, None])
            tl.store(out_s2 + cells2, f_s2, mask=open_[:, None])
            if DEEP:
                tl.store(out_w1 + cells1, f_w1, mask=open_[None, :])
                tl.store(out_s1 + cells1, f_s1, mask=open_[None, :])
    if GATED and not INPLACE:  # what is shut goes over as it is
        _copy(w2 + second, out_w2 + second, width * DV, HID * DV, 1024)
        _copy(s2 + second, out_s2 + second, width * DV, HID * DV, 1024)
        if DEEP:
            for i in range(width // BH, tl.cdiv(HID, BH)):
                cols = i * BH + tl.arange(0, BH)
                shut = ((cols >= width) & (cols < HID))[None, :]
                cells1 = matrix + dk[:, None] * HID + cols[None, :]
                tl.store(out_w1 + cells1, tl.load(w1 + cells1, mask=shut, other=0.0), mask=shut)
                tl.store(out_s1 + cells1, tl.load(s1 + cells1, mask=shut, other=0.0), mask=shut)
    found -= tl.sum((to_read * alike)[:, None] * err, 0)
    tl.store(y + p * DV + dv, found.to(y.dtype.element_ty))
    _keep_vectors(rows_k, k + p * DK, out_k, at, t, dk, slot, valid, ends, DK, INPLACE)
    _keep_vectors(rows_v, v + p * DV, out_v, at, t, dv, slot, valid, ends, DV, INPLACE)
    _keep_rows(rows_theta, theta + p, out_theta, at, t, slot, valid, ends, INPLACE)
    _keep_rows(rows_alpha, alpha + p, out_alpha, at, t, slot, valid, ends, INPLACE)
    _keep_rows(rows_eta, eta + p, out_eta, at, t, slot, valid, ends, INPLACE)


def _launch(
    tokens: list[Tensor], state: list[Tensor], active: Tensor | None, out: list[Tensor], read: str, memory_activation: str
) -> Tensor:
    """y. `state` and `out`: weights, momentum, then k, v, theta, alpha, eta, active, position of a `TitansState`, contiguous."""
    tokens = [t.contiguous() for t in tokens]
    q, v = tokens[0], tokens[2]
    depth = (len(state) - 7) // 2
    y = torch.empty_like(v)

    def matrices(part: list[Tensor]) -> list[Tensor]:
        weights, momentum = part[:depth], part[depth : 2 * depth]
        return [weights[0], momentum[0], weights[-1], momentum[-1]]

    half = q.dtype == torch.bfloat16
    hidden, chunk = state[depth - 1].shape[-2], state[2 * depth].shape[1]
    now = {"HID": hidden, "B": chunk, "GATED": active is not None}
    cast("Any", step_kernel)[(q.shape[0] * q.shape[1],)](
        *tokens, *state[2 * depth :], active, *matrices(state), y, *out[2 * depth : -2], *matrices(out), q.shape[1],
        DK=q.shape[2], DV=v.shape[2], BH=min(LAUNCH["BH"], triton.next_power_of_2(hidden)) if depth == 2 else hidden,
        ACT=memory_activation, DEEP=depth == 2, PRE=read == "pre", INPLACE=out is state,
        TYPE=tl.bfloat16 if half else tl.float32, PREC="tf32x3" if q.is_cuda and not half else "ieee",
        num_warps=LAUNCH["num_warps"] if depth == 2 else 8, **now,
    )  # fmt: skip
    cast("Any", move_kernel)[(q.shape[0],)](*state[-2:], active, *out[-2:], num_warps=1, **now)
    return y


def _parts(tokens: list[Tensor], state: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens in the products' type, gates in fp32; the state's tensors as the kernel wants them."""
    return [*tokens[:3], *(t.float() for t in tokens[3:])], [t.contiguous() for t in state]


@torch.library.custom_op("proteus_lm::titans_step", mutates_args=())
def titans_step_new(
    tokens: list[Tensor], state: list[Tensor], active: Tensor | None, read: str, memory_activation: str
) -> list[Tensor]:
    """y (N, H, Dv) and the new state, in the order of `TitansState`; the given one stays.

    Args:
        tokens: q, k (N, H, D), v (N, H, Dv), theta, alpha, eta (N, H).
        state: the tensors of a `TitansState` in its order, fp32 but for `active` and `position`.
        active: int (N,), open units at the token; None: all, always.
    """
    tokens, state = _parts(tokens, state)
    out = [torch.empty_like(t) for t in state]
    return [_launch(tokens, state, active, out, read, memory_activation), *out]


@titans_step_new.register_fake
def _(tokens, state, active, read, memory_activation):
    return [torch.empty_like(tokens[2]), *(torch.empty_like(t, memory_format=torch.contiguous_format) for t in state)]


@torch.library.custom_op("proteus_lm::titans_step_in_place", mutates_args=("state",))
def titans_step_in_place(
    tokens: list[Tensor], state: list[Tensor], active: Tensor | None, read: str, memory_activation: str
) -> Tensor:
    """As `titans_step_new`, on the state itself (contiguous tensors): open units alone are read, and written once a chunk."""
    return _launch(_parts(tokens, [])[0], state, active, state, read, memory_activation)


@titans_step_in_place.register_fake
def _(tokens, state, active, read, memory_activation):
    return torch.empty_like(tokens[2])
