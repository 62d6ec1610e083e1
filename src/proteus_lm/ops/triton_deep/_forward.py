"""Forward kernels: the walk over the chunks that writes, one program a (row, head), and the reads, one program a chunk and head.

Only writes depend on the chunk before. So the walk does no more than they need and leaves each chunk's start state behind in the
operands' type, from which all reads of a segment are worked out at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from proteus_lm.ops.triton_deep._common import (
    CARRY_S,
    CARRY_W,
    END_S,
    END_W,
    LOG_BEFORE,
    LOG_END,
    THETA,
    VECTORS,
    mul,
    open_slots,
    pointwise,
    read_scales,
    sixteens,
)


@triton.jit
def end_scales(vec, opened, advances, B: tl.constexpr):
    """Of W in W, of S in W, of S in S at the chunk's end, by unit (tile); 1, 0, 1 where the chunk does not end."""
    at = tl.minimum(opened, B - 1)
    decay = tl.exp(tl.load(vec + LOG_END * B) - tl.load(vec + LOG_BEFORE * B + at))
    carry_w, carry_s = tl.load(vec + CARRY_W * B + at), tl.load(vec + CARRY_S * B + at)
    return tl.where(advances, decay, 1.0), tl.where(advances, carry_w, 0.0), tl.where(advances, carry_s, 1.0)


@triton.jit
def _copy_tile(state, shadow, cells, mask, opened):
    x = tl.where(opened, tl.load(state + cells, mask=mask, other=0.0), 0.0)
    tl.store(shadow + cells, x.to(shadow.dtype.element_ty), mask=mask)


@triton.jit
def start_shadow(
    w1, s1, w2, s2, shadow, low, high,
    DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Copy the state of the units [low, high) to the shadow of a chunk that opens them, with 0 up to the next 16."""
    low, end = low // 16 * 16, sixteens(high)
    for j in range(low // BH, tl.cdiv(end, BH)):
        cols = j * BH + tl.arange(0, BH)
        mine, opened = (cols >= low) & (cols < end), cols < high
        if DEEP:
            cells = tl.arange(0, DK)[:, None] * HID + cols[None, :]
            _copy_tile(w1, shadow, cells, mine[None, :], opened[None, :])
            _copy_tile(s1, shadow + DK * HID, cells, mine[None, :], opened[None, :])
        second = cols[:, None] * DV + tl.arange(0, DV)[None, :]
        to = shadow + (2 * DK * HID if DEEP else 0)
        _copy_tile(w2, to, second, mine[:, None], opened[:, None])
        _copy_tile(s2, to + DV * HID, second, mine[:, None], opened[:, None])


@triton.jit
def _update(state_w, state_s, shadow, next_w, next_s, cells, kept, opened, shadowed, decay, carry_w, carry_s, to_w, to_s, x,
            PREC: tl.constexpr):  # fmt: skip
    """One tile of W and S to the chunk's end: shares of themselves, less the tokens' gradients (to_w x, to_s x)."""
    w = tl.load(state_w + cells, mask=kept, other=0.0)
    s = tl.load(state_s + cells, mask=kept, other=0.0)
    new_w = decay * w + carry_w * s - mul(to_w, x, PREC)
    new_s = carry_s * s - mul(to_s, x, PREC)
    tl.store(state_w + cells, tl.where(opened, new_w, w), mask=kept)
    tl.store(state_s + cells, tl.where(opened, new_s, s), mask=kept)
    tl.store(shadow + next_w + cells, tl.where(opened, new_w, 0.0).to(shadow.dtype.element_ty), mask=shadowed)
    tl.store(shadow + next_s + cells, tl.where(opened, new_s, 0.0).to(shadow.dtype.element_ty), mask=shadowed)


@triton.jit(do_not_specialize=["first", "count", "G"])
def write_kernel(
    k, v, vec, plan, opens, full, w1, s1, w2, s2, shadow, act, slope, grad, bend, err,
    first, count, T, H, G, plan_row,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    ACT: tl.constexpr, DEEP: tl.constexpr, KEEP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (rows * heads). Brings W, S (fp32, in place) through the `count` chunks from `first` on; fills `shadow`, `act`, `grad`,
    `err`, and with KEEP `slope` and `bend`, which the backward needs (without it they are scratch of one chunk).
    """
    p = tl.program_id(0)
    row, head = p // H, p % H
    OPD: tl.constexpr = shadow.dtype.element_ty
    t, dk, dv = tl.arange(0, B), tl.arange(0, DK), tl.arange(0, DV)
    SLOT: tl.constexpr = (2 * DK + 2 * DV) * HID if DEEP else 2 * DV * HID
    W2: tl.constexpr = 2 * DK * HID if DEEP else 0
    wide = p.to(tl.int64)
    w1, s1, w2, s2 = w1 + wide * DK * HID, s1 + wide * DK * HID, w2 + wide * DV * HID, s2 + wide * DV * HID
    shadow += wide * G * SLOT
    rows_full = tl.load(full + row)
    plan_at = plan + (row * plan_row + first) * 2
    width = tl.load(plan_at)
    start_shadow(w1, s1, w2, s2, shadow, 0, width, DK, DV, HID, BH, DEEP)
    tl.debug_barrier()
    for i in range(count):
        n = first + i
        at = wide * G + i
        keep_at = at if KEEP else wide
        token = (row.to(tl.int64) * T + n * B) * H + head
        rows_k = k + (token + t[:, None] * H) * DK
        vec_at = vec + at * VECTORS * B
        opens_at = opens + (row * plan_row + n) * HID
        width = tl.load(plan_at + 2 * i)
        end = sixteens(width)
        advances = n < rows_full
        now = shadow + i * SLOT
        act_at, grad_at = act + at * B * HID, grad + at * B * HID
        slope_at, bend_at = slope + keep_at * B * HID, bend + keep_at * B * HID

        # First pass over the open tiles: activations, and the error of what they add up to.
        found = tl.zeros((B, DV), tl.float32)
        keys = tl.load(rows_k + dk[None, :]).to(OPD)
        for j in range(tl.cdiv(end, BH)):
            cols = j * BH + tl.arange(0, BH)
            open_ = cols < end
            opened = open_slots(opens_at, cols, width, B)
            mine = t[:, None] >= opened[None, :]
            cells = t[:, None] * HID + cols[None, :]
            if DEEP:
                w = tl.load(now + dk[:, None] * HID + cols[None, :], mask=open_[None, :], other=0.0)
                a, s, c = pointwise(mul(keys, w, PREC), ACT)
                tl.store(slope_at + cells, tl.where(mine, s, 0.0).to(OPD), mask=open_[None, :])
                if KEEP:
                    tl.store(bend_at + cells, tl.where(mine, c, 0.0).to(OPD), mask=open_[None, :])
            else:
                a = tl.load(rows_k + cols[None, :], mask=open_[None, :], other=0.0).to(tl.float32)
            a = tl.where(mine, a, 0.0).to(OPD)
            tl.store(act_at + cells, a, mask=open_[None, :])
            w = tl.load(now + W2 + cols[:, None] * DV + dv[None, :], mask=open_[:, None], other=0.0)
            found = tl.dot(a, w, found, input_precision=PREC)
        values = tl.load(v + (token + t[:, None] * H) * DV + dv[None, :]).to(tl.float32)
        error = (found - values).to(OPD)
        err_at = err + at * B * DV
        tl.store(err_at + t[:, None] * DV + dv[None, :], error)
        tl.debug_barrier()

        # Second pass: gradients of the hidden layer, and both matrices to the chunk's end.
        end_w, end_s = tl.load(vec_at + END_W * B + t), tl.load(vec_at + END_S * B + t)
        end_w, end_s = tl.where(advances, end_w, 0.0), tl.where(advances, end_s, 0.0)
        error_t = tl.load(err_at + t[None, :] * DV + dv[:, None]).to(tl.float32)
        error_w, error_s = (error_t * end_w[None, :]).to(OPD), (error_t * end_s[None, :]).to(OPD)
        if DEEP:
            keys_t = tl.load(k + (token + t[None, :] * H) * DK + dk[:, None]).to(tl.float32)
            keys_w, keys_s = (keys_t * end_w[None, :]).to(OPD), (keys_t * end_s[None, :]).to(OPD)
        to_shadow = tl.where(i + 1 < count, end, 0)
        for j in range(tl.cdiv(end, BH)):
            cols = j * BH + tl.arange(0, BH)
            open_ = cols < end
            opened = open_slots(opens_at, cols, width, B)
            decay, carry_w, carry_s = end_scales(vec_at, opened, advances, B)
            cells = t[:, None] * HID + cols[None, :]
            second = cols[None, :] * DV + dv[:, None]  # W2 as (dv, tile)
            kept, opened_end, shadowed = open_[None, :], (cols < width)[None, :], (cols < to_shadow)[None, :]
            if DEEP:
                w = tl.load(now + W2 + second, mask=kept, other=0.0)
                back = mul(error, w, PREC)
                g = (back * tl.load(slope_at + cells, mask=kept, other=0.0).to(tl.float32)).to(OPD)
                tl.store(grad_at + cells, g, mask=kept)
                if KEEP:
                    c = tl.load(bend_at + cells, mask=kept, other=0.0).to(tl.float32)
                    tl.store(bend_at + cells, (back * c).to(OPD), mask=kept)
                _update(
                    w1, s1, now, SLOT, SLOT + DK * HID, dk[:, None] * HID + cols[None, :], kept, opened_end, shadowed,
                    decay[None, :], carry_w[None, :], carry_s[None, :], keys_w, keys_s, g, PREC,
                )  # fmt: skip
            a = tl.load(act_at + cells, mask=kept, other=0.0)
            _update(
                w2, s2, now, SLOT + W2, SLOT + W2 + DV * HID, second, kept, opened_end, shadowed,
                decay[None, :], carry_w[None, :], carry_s[None, :], error_w, error_s, a, PREC,
            )  # fmt: skip
        if i + 1 < count:
            tl.debug_barrier()
            start_shadow(w1, s1, w2, s2, now + SLOT, width, tl.load(plan_at + 2 * i + 2), DK, DV, HID, BH, DEEP)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["first", "count", "G"])
def read_kernel(
    q, k, mix, vec, plan, opens, shadow, act, grad, err, y,
    first, T, H, G, plan_row,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    ACT: tl.constexpr, DEEP: tl.constexpr, PRE: tl.constexpr, MIXED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of the segment, rows * heads): y of the chunks that are or are not mixed, with each token's own weights (spec/deep.md 2.2, 3.4)."""
    i, p = tl.program_id(0), tl.program_id(1)
    row, head = p // H, p % H
    n = first + i
    OPD: tl.constexpr = shadow.dtype.element_ty
    t, dk, dv = tl.arange(0, B), tl.arange(0, DK), tl.arange(0, DV)
    SLOT: tl.constexpr = (2 * DK + 2 * DV) * HID if DEEP else 2 * DV * HID
    W2: tl.constexpr = 2 * DK * HID if DEEP else 0
    at = p.to(tl.int64) * G + i
    token = (row.to(tl.int64) * T + n * B) * H + head
    rows_q = q + (token + t[:, None] * H) * DK
    vec_at, mix_at, now = vec + at * VECTORS * B, mix + at * B * B, shadow + at * SLOT
    opens_at = opens + (row * plan_row + n) * HID
    width = tl.load(plan + (row * plan_row + n) * 2)
    end = sixteens(width)
    if tl.load(plan + (row * plan_row + n) * 2 + 1) != MIXED:
        return
    share = tl.load(mix_at + t[:, None] * B + t[None, :]) * tl.load(vec_at + THETA * B + t)[None, :]
    queries = tl.load(rows_q + dk[None, :]).to(OPD)
    if DEEP:
        keys_t = tl.load(k + (token + t[None, :] * H) * DK + dk[:, None]).to(OPD)
        near = (share * mul(queries, keys_t, PREC)).to(OPD)
    alike = tl.zeros((B, B), tl.float32)
    out = tl.zeros((B, DV), tl.float32)
    for j in range(tl.cdiv(end, BH)):
        cols = j * BH + tl.arange(0, BH)
        open_ = cols < end
        opened = open_slots(opens_at, cols, width, B)
        mine = t[:, None] >= opened[None, :]
        decay, carry = read_scales(vec_at, mix_at, opened, MIXED, PRE, B, BH)
        if DEEP:
            first_cells = dk[:, None] * HID + cols[None, :]
            w = tl.load(now + first_cells, mask=open_[None, :], other=0.0)
            s = tl.load(now + DK * HID + first_cells, mask=open_[None, :], other=0.0)
            g = tl.load(grad + at * B * HID + t[:, None] * HID + cols[None, :], mask=open_[None, :], other=0.0)
            z = decay * mul(queries, w, PREC) + carry * mul(queries, s, PREC) - mul(near, g, PREC)
            x, _, _ = pointwise(z, ACT)
        else:
            x = tl.load(rows_q + cols[None, :], mask=open_[None, :], other=0.0).to(tl.float32)
        x = tl.where(mine, x, 0.0)
        a_t = tl.load(act + at * B * HID + t[None, :] * HID + cols[:, None], mask=open_[:, None], other=0.0)
        alike = tl.dot(x.to(OPD), a_t, alike, input_precision=PREC)
        second = cols[:, None] * DV + dv[None, :]
        w = tl.load(now + W2 + second, mask=open_[:, None], other=0.0)
        s = tl.load(now + W2 + DV * HID + second, mask=open_[:, None], other=0.0)
        out = tl.dot((decay * x).to(OPD), w, out, input_precision=PREC)
        out = tl.dot((carry * x).to(OPD), s, out, input_precision=PREC)
    error = tl.load(err + at * B * DV + t[:, None] * DV + dv[None, :])
    out -= mul((share * alike).to(OPD), error, PREC)
    tl.store(y + (token + t[:, None] * H) * DV + dv[None, :], out.to(y.dtype.element_ty))
