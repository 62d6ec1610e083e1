# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAssignmentType=false
"""One token of decoding (spec/deep.md 3.5) in three launches, a program a row and head in each.

`put_kernel` puts the token into its slot and works out the gates' shares, `read_kernel` reads, `close_kernel` brings the weights
to the chunk's end where it is reached. The state keeps of the open chunk its tokens alone, so a step works out again what they
wrote: one walk over the open hidden units for the error of each token, and one for what the query meets. Weights and momentum are
read once from memory, the weights once more from the cache; they meet the one query in fp32 sums, and what the chunk's tokens
wrote meets it in matrix products. A launch changes only what none of its programs reads, but for what a program
keeps to itself, with a barrier between. Slot, open units and boundary are read on the device: rows stand at their own positions,
nothing waits for the host, and a CUDA graph replays the step at any position.

Buffers of a step; P = rows * heads, b = slots of a chunk:
    plan int32 (rows, HEAD + b): slot, open width, the least width and the first slot of the open chunk's tokens; the open units
    at each slot, 0 where no token is.
    shares fp32 (P, SHARES, b): see below.      err fp32 (P, b, dv): error of each token at the chunk's start weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from proteus_lm.ops.triton_deep._common import mul, operand, sixteens

# Of each kernel: launch options, and hidden units worked on at once (BH), as checked on a GPU. "read" has two warps: with four,
# Triton takes wgmma, and of that, in bf16, with tiles of 32 or 16, 3.6 makes a wrong kernel (docs/titans-kernel.md).
LAUNCH = {
    "put": {"num_warps": 1},
    "read": {"num_warps": 2, "num_stages": 2, "BH": 16, "maxnreg": 168},
    "read fp32": {"num_warps": 4, "num_stages": 3, "BH": 32},
    "close": {"num_warps": 4, "num_stages": 2, "BH": 32},
}
CLOSING = 264  # programs of `close_kernel`, each for several heads: most steps end no chunk

# Rows of `shares`. Of each token's gradient: in the weights at the read (times theta), at the end (times theta), in the momentum at
# the end (times theta). By the slot at which a unit opens: of the start weights and of the start momentum in the weights at the
# read, the same at the end, of the start momentum in the momentum at the end.
READ, END, LEFT, READ_DECAY, READ_CARRY, END_DECAY, END_CARRY, END_HELD = (tl.constexpr(i) for i in range(8))
SHARES = tl.constexpr(8)
SLOT, WIDTH, LEAST, FIRST = (tl.constexpr(i) for i in range(4))  # in a row of `plan`
HEAD = tl.constexpr(4)
SHUT = tl.constexpr(-200.0)  # in the place of a locked unit's input: its activation and slope are 0


@triton.jit
def _sigmoid(u, FAST: tl.constexpr):
    """1 / (1 + 2^-u) in fp32; FAST: without the instructions that keep denormal numbers."""
    if FAST:
        e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [-u], tl.float32, True, 1)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], tl.float32, True, 1)
    return 1.0 / (1.0 + tl.exp2(tl.minimum(-u, 126.0)))


@triton.jit
def _activation(z, ACT: tl.constexpr, FAST: tl.constexpr):
    """f(z) and f'(z) of tanh-GELU or SiLU, as `_common.pointwise` has them."""
    if ACT == "silu":
        s = _sigmoid(1.4426950408889634 * z, FAST)
        value = z * s
        slope = s + value - value * s
    else:
        square = z * z
        s = _sigmoid(z * (2.302208198144325 + 0.1029432395800235 * square), FAST)
        value = z * s
        slope = s + (value - value * s) * (1.5957691216057308 + 0.21406444881780073 * square)
    return value, slope


@triton.jit
def _then(a1, b1, a2, b2):
    """x -> a1 x + b1, and then x -> a2 x + b2."""
    return a1 * a2, a2 * b1 + b2


@triton.jit
def _passed(keep, eta, keep_next, eta_next, counts):
    """What is left in the weights, slots counted backwards: of the start weights behind each slot, of each slot's gradient."""
    after = tl.cumprod(keep_next, 0)
    _, mix = tl.associative_scan((eta_next, tl.where(counts, after, 0.0)), 0, _then)
    return keep * after, eta * mix, mix


@triton.jit
def _gate(rows, token, at, back, there, neutral):
    """A gate at slots counted backwards from the token's (b,); `neutral` where no token is."""
    x = tl.load(rows + at, mask=there & (back > 0), other=0.0).to(tl.float32)
    return tl.where(there, tl.where(back == 0, tl.load(token).to(tl.float32), x), neutral)


@triton.jit
def _shares(
    theta, alpha, eta, rows_theta, rows_alpha, rows_eta, rows_active, shares, n, h, H, slot,
    B: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    """Work out a row and head's `shares`. Slots are counted backwards from the token's: products run from the last to the first."""
    back = tl.arange(0, B)
    t, later = slot - back, slot - back + 1
    there = t >= 0
    there = there & ((back == 0) | (tl.load(rows_active + n * B + t, mask=there & (back > 0), other=0) > 0))
    at = (n * B + t) * H + h
    keep = 1.0 - _gate(rows_alpha, alpha, at, back, there, 0.0)
    mo = _gate(rows_eta, eta, at, back, there, 1.0)
    step = _gate(rows_theta, theta, at, back, there, 0.0)
    behind = (back > 0) & (later >= 0)
    behind = behind & ((back == 1) | (tl.load(rows_active + n * B + later, mask=behind & (back > 1), other=0) > 0))
    at = (n * B + later) * H + h
    keep_next = 1.0 - _gate(rows_alpha, alpha, at, back - 1, behind, 0.0)
    mo_next = _gate(rows_eta, eta, at, back - 1, behind, 1.0)
    held = tl.cumprod(mo_next, 0)
    decay, carry, mix = _passed(keep, mo, keep_next, mo_next, there)
    real = t >= 0
    tl.store(shares + END * B + t, mix * step, mask=real)
    tl.store(shares + LEFT * B + t, tl.where(there, held * step, 0.0), mask=real)
    tl.store(shares + END_DECAY * B + t, decay, mask=real)
    tl.store(shares + END_CARRY * B + t, carry, mask=real)
    tl.store(shares + END_HELD * B + t, mo * held, mask=real)
    if PRE:  # the read is before the token: its gates are neutral, its gradient is not there
        here, first = back == 0, back == 1
        keep, mo = tl.where(here, 1.0, keep), tl.where(here, 1.0, mo)
        keep_next, mo_next = tl.where(first, 1.0, keep_next), tl.where(first, 1.0, mo_next)
        decay, carry, mix = _passed(keep, mo, keep_next, mo_next, there & (back > 0))
    tl.store(shares + READ * B + t, mix * step, mask=real)
    tl.store(shares + READ_DECAY * B + t, decay, mask=real)
    tl.store(shares + READ_CARRY * B + t, carry, mask=real)


@triton.jit
def _tile(matrix, rows, cols, limit, width, locked, ROW: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr):
    """A tile of a matrix in fp32 whose rows lie ROW apart; if some of it is `locked`, `limit` >= `width`, that is 0.

    What is locked is loaded, as a mask would cost more, and taken out before anything is worked out with it.
    """
    if HID % BH == 0:
        x = tl.load(matrix + rows * ROW + cols)
    else:
        x = tl.load(matrix + rows * ROW + cols, mask=limit < HID, other=0.0)
    if locked:
        x = tl.where(limit < width, x, 0.0)
    return x


@triton.jit
def put_kernel(
    k, v, theta, alpha, eta, rows_k, rows_v, rows_theta, rows_alpha, rows_eta, rows_active, position, now, plan, shares, H,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, PRE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Grid (rows * heads): the token in its slot of `rows_*`, `plan` and `shares`. Tensors as in `TitansState`."""
    p = tl.program_id(0).to(tl.int64)
    n, h = p // H, p % H
    t, dk, dv = tl.arange(0, B), tl.arange(0, DK), tl.arange(0, DV)
    slot = (tl.load(position + n) % B).to(tl.int32)
    width = HID
    if GATED:
        width = tl.minimum(tl.load(now + n).to(tl.int32), HID)
    if h == 0:
        active = tl.where(t == slot, width, tl.load(rows_active + n * B + t, mask=t < slot, other=0).to(tl.int32))
        row = plan + n * (HEAD + B)
        tl.store(row + SLOT, slot)
        tl.store(row + WIDTH, width)
        tl.store(row + LEAST, tl.min(tl.where(active > 0, active, HID), 0))
        tl.store(row + FIRST, tl.min(tl.where(active > 0, t, B), 0))
        tl.store(row + HEAD + t, active)
    _shares(
        theta + p, alpha + p, eta + p, rows_theta, rows_alpha, rows_eta, rows_active, shares + p * SHARES * B, n, h, H, slot, B, PRE
    )
    mine = (n * B + slot) * H + h  # nobody reads this slot in this launch
    tl.store(rows_k + mine * DK + dk, tl.load(k + p * DK + dk).to(tl.float32))
    tl.store(rows_v + mine * DV + dv, tl.load(v + p * DV + dv).to(tl.float32))
    tl.store(rows_theta + mine, tl.load(theta + p).to(tl.float32))
    tl.store(rows_alpha + mine, tl.load(alpha + p).to(tl.float32))
    tl.store(rows_eta + mine, tl.load(eta + p).to(tl.float32))


@triton.jit
def _opened(active, cols, t, B: tl.constexpr):
    """The slot at which each unit of a tile opens, b where it does not."""
    return tl.min(tl.where(active[:, None] > cols[None, :], t[:, None], B), 0)


@triton.jit
def _by_unit(shares, opened, otherwise, B: tl.constexpr):
    """A share by the slot at which each unit opens."""
    return tl.load(shares + opened, mask=opened < B, other=otherwise)


@triton.jit
def _read(
    q, rows_k, rows_v, plan, shares, err, w1, s1, w2, s2, y, H, p,
    R: tl.constexpr, B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr, ACT: tl.constexpr,
    DEEP: tl.constexpr, TYPE: tl.constexpr, PREC: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """y and `err` of row and head p, whose tokens stand in the first R of B slots."""
    n, h = p // H, p % H
    t, dk, dv = tl.arange(0, R), tl.arange(0, DK), tl.arange(0, DV)
    row = plan + n * (HEAD + B)
    width, least, first, active = tl.load(row + WIDTH), tl.load(row + LEAST), tl.load(row + FIRST), tl.load(row + HEAD + t)
    shares += p * SHARES * B
    valid = active > 0
    at = (n * B + t) * H + h
    w1, s1, w2, s2 = w1 + p * DK * HID, s1 + p * DK * HID, w2 + p * HID * DV, s2 + p * HID * DV
    b_q = tl.load(q + p * DK + dk).to(tl.float32)
    b_k = tl.load(rows_k + at[:, None] * DK + dk[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    weight = tl.load(shares + READ * B + t, mask=valid, other=0.0)
    near = weight * tl.sum(b_k * b_q[None, :], 1)
    keys = operand(b_k, TYPE, PREC)

    b_err = tl.zeros((R, DV), tl.float32)
    for i in range(tl.cdiv(width, BH)):
        cols = i * BH + tl.arange(0, BH)
        locked, mixed = (i + 1) * BH > width, (i + 1) * BH > least
        if DEEP:
            f_w1 = _tile(w1, dk[:, None], cols[None, :], cols[None, :], width, locked, HID, HID, BH)
            z = mul(keys, operand(f_w1, TYPE, PREC), PREC)
            if mixed:
                z = tl.where(active[:, None] > cols[None, :], z, SHUT)
            a, _ = _activation(z, ACT, FAST)
        else:
            mine = (active[:, None] > cols[None, :]) & (cols < DK)[None, :]
            a = tl.load(rows_k + at[:, None] * DK + cols[None, :], mask=mine, other=0.0).to(tl.float32)
        f_w2 = _tile(w2, cols[:, None], dv[None, :], cols[:, None], width, locked, DV, HID, BH)
        b_err = tl.dot(operand(a, TYPE, PREC), operand(f_w2, TYPE, PREC), b_err, input_precision=PREC)
    b_v = tl.load(rows_v + at[:, None] * DV + dv[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    b_err = tl.where(valid[:, None], b_err - b_v, 0.0)
    tl.store(err + (p * B + t)[:, None] * DV + dv[None, :], b_err)
    pull = operand(near[:, None] * b_err, TYPE, PREC)

    decay0, carry0 = tl.load(shares + READ_DECAY * B + first), tl.load(shares + READ_CARRY * B + first)
    alike, found = tl.zeros((R,), tl.float32), tl.zeros((BH, DV), tl.float32)
    for i in range(tl.cdiv(width, BH)):
        cols = i * BH + tl.arange(0, BH)
        locked, mixed = (i + 1) * BH > width, (i + 1) * BH > least
        decay, carry = tl.zeros((BH,), tl.float32) + decay0, tl.zeros((BH,), tl.float32) + carry0
        if mixed:
            opened = _opened(active, cols, t, B)
            decay = _by_unit(shares + READ_DECAY * B, opened, 1.0, B)
            carry = _by_unit(shares + READ_CARRY * B, opened, 0.0, B)
        f_w2 = _tile(w2, cols[:, None], dv[None, :], cols[:, None], width, locked, DV, HID, BH)
        f_s2 = _tile(s2, cols[:, None], dv[None, :], cols[:, None], width, locked, DV, HID, BH)
        m2 = decay[:, None] * f_w2 + carry[:, None] * f_s2
        if DEEP:
            f_w1 = _tile(w1, dk[:, None], cols[None, :], cols[None, :], width, locked, HID, HID, BH)
            f_s1 = _tile(s1, dk[:, None], cols[None, :], cols[None, :], width, locked, HID, HID, BH)
            met = tl.sum((decay[None, :] * f_w1 + carry[None, :] * f_s1) * b_q[:, None], 0)
            back = mul(pull, tl.trans(operand(f_w2, TYPE, PREC)), PREC)
            z = mul(keys, operand(f_w1, TYPE, PREC), PREC)
            if mixed:
                z = tl.where(active[:, None] > cols[None, :], z, SHUT)
            a, slope = _activation(z, ACT, FAST)
            x, _ = _activation(met - tl.sum(back * slope, 0), ACT, FAST)
        else:
            inside = cols < DK
            x = tl.load(q + p * DK + cols, mask=inside, other=0.0).to(tl.float32)
            mine = (active[:, None] > cols[None, :]) & inside[None, :]
            a = tl.load(rows_k + at[:, None] * DK + cols[None, :], mask=mine, other=0.0).to(tl.float32)
        x = tl.where(cols < width, x, 0.0)
        alike += tl.sum(a * x[None, :], 1)
        found += x[:, None] * m2
    tl.debug_barrier()  # err was stored by other threads
    b_err = tl.load(err + (p * B + t)[:, None] * DV + dv[None, :])
    b_y = tl.sum(found, 0) - tl.sum((weight * alike)[:, None] * b_err, 0)
    tl.store(y + p * DV + dv, b_y.to(y.dtype.element_ty))


@triton.jit
def read_kernel(
    q, rows_k, rows_v, plan, shares, err, w1, s1, w2, s2, y, H,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr, ACT: tl.constexpr,
    DEEP: tl.constexpr, TYPE: tl.constexpr, PREC: tl.constexpr, FAST: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Grid (rows * heads): y and `err`. HALVES: while half of the slots suffice, half the work."""
    p = tl.program_id(0).to(tl.int64)
    if not HALVES:
        _read(q, rows_k, rows_v, plan, shares, err, w1, s1, w2, s2, y, H, p, B, B, DK, DV, HID, BH, ACT, DEEP, TYPE, PREC, FAST)
    elif tl.load(plan + p // H * (HEAD + B) + SLOT) < B // 2:
        _read(
            q, rows_k, rows_v, plan, shares, err, w1, s1, w2, s2, y, H, p, B // 2, B, DK, DV, HID, BH, ACT, DEEP, TYPE, PREC, FAST
        )
    else:
        _read(q, rows_k, rows_v, plan, shares, err, w1, s1, w2, s2, y, H, p, B, B, DK, DV, HID, BH, ACT, DEEP, TYPE, PREC, FAST)


@triton.jit
def _commit(
    plan_row, shares, err, rows_k, w1, s1, w2, s2, n, h, p, H,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr, ACT: tl.constexpr,
    DEEP: tl.constexpr, TYPE: tl.constexpr, PREC: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Move a row and head's weights and momentum to the chunk's end, in place.

    All of a tile is loaded before any of it is stored, with a barrier between."""
    width = tl.load(plan_row + WIDTH)
    t, dk, dv = tl.arange(0, B), tl.arange(0, DK), tl.arange(0, DV)
    active = tl.load(plan_row + HEAD + t)
    valid = active > 0
    at = (n * B + t) * H + h
    shares += p * SHARES * B
    to_w = tl.load(shares + END * B + t, mask=valid, other=0.0)
    to_s = tl.load(shares + LEFT * B + t, mask=valid, other=0.0)
    b_err = tl.load(err + (p * B + t)[:, None] * DV + dv[None, :])
    errs = operand(b_err, TYPE, PREC)
    errs_w, errs_s = operand(b_err * to_w[:, None], TYPE, PREC), operand(b_err * to_s[:, None], TYPE, PREC)
    w1, s1, w2, s2 = w1 + p * DK * HID, s1 + p * DK * HID, w2 + p * HID * DV, s2 + p * HID * DV
    for i in range(tl.cdiv(width, BH)):
        cols = i * BH + tl.arange(0, BH)
        mine, opened = active[:, None] > cols[None, :], _opened(active, cols, t, B)
        decay = _by_unit(shares + END_DECAY * B, opened, 1.0, B)
        carry = _by_unit(shares + END_CARRY * B, opened, 0.0, B)
        held = _by_unit(shares + END_HELD * B, opened, 1.0, B)
        rows = cols[:, None] < sixteens(width)
        open2 = cols[:, None] < width
        cells2 = cols[:, None] * DV + dv[None, :]
        f_w2, f_s2 = tl.load(w2 + cells2, mask=rows, other=0.0), tl.load(s2 + cells2, mask=rows, other=0.0)
        # Transposed operands are loaded or worked out so: Triton 3.4 to 3.7.0 miscompiles some transposed accumulators on Hopper.
        if DEEP:
            columns = cols[None, :] < sixteens(width)
            open1 = cols[None, :] < width
            cells1 = dk[:, None] * HID + cols[None, :]
            f_w1, f_s1 = tl.load(w1 + cells1, mask=columns, other=0.0), tl.load(s1 + cells1, mask=columns, other=0.0)
            b_k = tl.load(rows_k + at[:, None] * DK + dk[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
            k_t = tl.load(rows_k + at[None, :] * DK + dk[:, None], mask=valid[None, :], other=0.0).to(tl.float32)
            w_t = _tile(w1, dk[None, :], cols[:, None], cols[:, None], width, True, HID, HID, BH)
            b_w1 = operand(tl.where(open1, f_w1, 0.0), TYPE, PREC)
            b_w2 = operand(tl.where(open2, f_w2, 0.0), TYPE, PREC)
            _, slope = _activation(mul(operand(b_k, TYPE, PREC), b_w1, PREC), ACT, FAST)
            g = operand(tl.where(mine, mul(errs, tl.trans(b_w2), PREC) * slope, 0.0), TYPE, PREC)
            a_t, _ = _activation(mul(operand(w_t, TYPE, PREC), operand(k_t, TYPE, PREC), PREC), ACT, FAST)
            new_w1 = decay[None, :] * f_w1 + carry[None, :] * f_s1 - mul(operand(k_t * to_w[None, :], TYPE, PREC), g, PREC)
            new_s1 = held[None, :] * f_s1 - mul(operand(k_t * to_s[None, :], TYPE, PREC), g, PREC)
        else:
            there = valid[None, :] & (cols < DK)[:, None]
            a_t = tl.load(rows_k + at[None, :] * DK + cols[:, None], mask=there, other=0.0).to(tl.float32)
        a_t = operand(tl.where(active[None, :] > cols[:, None], a_t, 0.0), TYPE, PREC)
        new_w2 = decay[:, None] * f_w2 + carry[:, None] * f_s2 - mul(a_t, errs_w, PREC)
        new_s2 = held[:, None] * f_s2 - mul(a_t, errs_s, PREC)
        tl.debug_barrier()
        if DEEP:  # what is locked is written back as it was
            tl.store(w1 + cells1, tl.where(open1, new_w1, f_w1), mask=columns)
            tl.store(s1 + cells1, tl.where(open1, new_s1, f_s1), mask=columns)
        tl.store(w2 + cells2, tl.where(open2, new_w2, f_w2), mask=rows)
        tl.store(s2 + cells2, tl.where(open2, new_s2, f_s2), mask=rows)


@triton.jit
def close_kernel(
    plan, shares, err, rows_k, rows_v, rows_theta, rows_alpha, rows_eta, rows_active, position, w1, s1, w2, s2, P, H,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr, ACT: tl.constexpr,
    DEEP: tl.constexpr, TYPE: tl.constexpr, PREC: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid (any), P = rows * heads: the rows' open units and positions; at a chunk's end `_commit`, and its slots are emptied."""
    t, dk, dv = tl.arange(0, B), tl.arange(0, DK), tl.arange(0, DV)
    for past in range(0, P - tl.program_id(0), tl.num_programs(0)):
        p = tl.program_id(0).to(tl.int64) + past
        n, h = p // H, p % H
        row = plan + n * (HEAD + B)
        ends = tl.load(row + SLOT) == B - 1
        if h == 0:
            active = tl.where(ends, 0, tl.load(row + HEAD + t))
            tl.store(rows_active + n * B + t, active.to(rows_active.dtype.element_ty))
            tl.store(position + n, tl.load(position + n) + 1)
        if ends:
            _commit(row, shares, err, rows_k, w1, s1, w2, s2, n, h, p, H, B, DK, DV, HID, BH, ACT, DEEP, TYPE, PREC, FAST)
            tl.debug_barrier()
            at = (n * B + t) * H + h
            tl.store(rows_k + at[:, None] * DK + dk[None, :], tl.zeros((B, DK), tl.float32))
            tl.store(rows_v + at[:, None] * DV + dv[None, :], tl.zeros((B, DV), tl.float32))
            none = tl.zeros((B,), tl.float32)
            tl.store(rows_theta + at, none)
            tl.store(rows_alpha + at, none)
            tl.store(rows_eta + at, none)


class Sizes(NamedTuple):
    """Sizes of a step: rows, heads, chunk, D, Dv, hidden units (D for one layer), layers."""

    rows: int
    heads: int
    chunk: int
    dk: int
    dv: int
    hidden: int
    depth: int

    def launch(self, kernel: str) -> dict[str, int]:
        """Launch options; half the tile of `LAUNCH` where the other sides are large."""
        tile = LAUNCH[kernel]["BH"] // (2 if self.chunk * max(self.dk, self.dv) > 4096 else 1)
        return {**LAUNCH[kernel], "BH": max(16, min(tile, triton.next_power_of_2(self.hidden)))}


def _launch(tokens: list[Tensor], state: list[Tensor], active: Tensor | None, read: str, memory_activation: str) -> Tensor:
    """y, of a state that moves on itself: weights, momentum, then the rest of a `TitansState`, contiguous."""
    q, k, v = (t.contiguous() for t in tokens[:3])
    gates = [t.float().contiguous() for t in tokens[3:]]
    depth = (len(state) - 7) // 2
    weights, momentum, rows = state[:depth], state[depth : 2 * depth], state[2 * depth :]
    count, heads, dk = q.shape
    sizes = Sizes(count, heads, rows[0].shape[1], dk, v.shape[2], weights[-1].shape[-2], depth)
    programs = sizes.rows * sizes.heads

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    plan, shares = new(sizes.rows, HEAD.value + sizes.chunk, dtype=torch.int32), new(programs, SHARES.value, sizes.chunk)
    err, y = new(programs, sizes.chunk, sizes.dv), torch.empty_like(v)
    matrices = (weights[0], momentum[0], weights[-1], momentum[-1])
    shape = {"B": sizes.chunk, "DK": sizes.dk, "DV": sizes.dv, "HID": sizes.hidden}
    half = q.dtype == torch.bfloat16
    kinds = {"TYPE": tl.bfloat16 if half else tl.float32, "PREC": "tf32x3" if q.is_cuda and not half else "ieee"}
    common = {**shape, **kinds, "DEEP": depth == 2, "ACT": memory_activation, "FAST": q.is_cuda}
    cast("Any", put_kernel)[(programs,)](
        k, v, *gates, *rows, active, plan, shares, sizes.heads,
        **shape, **LAUNCH["put"], PRE=read == "pre", GATED=active is not None,
    )  # fmt: skip
    cast("Any", read_kernel)[(programs,)](
        q, rows[0], rows[1], plan, shares, err, *matrices, y, sizes.heads, **common,
        HALVES=sizes.chunk >= 32 and (half or not q.is_cuda),  # in fp32 no GPU has checked it
        **sizes.launch("read" if half else "read fp32"),
    )  # fmt: skip
    cast("Any", close_kernel)[(min(programs, CLOSING),)](
        plan, shares, err, *rows, *matrices, programs, sizes.heads, **common, **sizes.launch("close")
    )
    return y


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
    out = [t.clone(memory_format=torch.contiguous_format) for t in state]
    return [_launch(tokens, out, active, read, memory_activation), *out]


@titans_step_new.register_fake
def _(tokens, state, active, read, memory_activation):
    return [torch.empty_like(tokens[2]), *(torch.empty_like(t, memory_format=torch.contiguous_format) for t in state)]


@torch.library.custom_op("proteus_lm::titans_step_in_place", mutates_args=("state",))
def titans_step_in_place(
    tokens: list[Tensor], state: list[Tensor], active: Tensor | None, read: str, memory_activation: str
) -> Tensor:
    """As `titans_step_new`, on the state itself (contiguous tensors): open units alone are read, and written once a chunk."""
    return _launch(tokens, state, active, read, memory_activation)


@titans_step_in_place.register_fake
def _(tokens, state, active, read, memory_activation):
    return torch.empty_like(tokens[2])
