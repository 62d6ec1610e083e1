# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAssignmentType=false
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
    operand,
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
def _pairs(cols, D: tl.constexpr, BASE: tl.constexpr, HID: tl.constexpr, ROWS: tl.constexpr):
    """Cells of a tile of W and S, one under the other, in a state: (2 D, tile), from BASE on; ROWS where hidden units are rows."""
    r = tl.arange(0, 2 * D)
    if ROWS:
        return BASE + (r // D)[:, None] * (D * HID) + cols[None, :] * D + (r % D)[:, None]
    return BASE + r[:, None] * HID + cols[None, :]


@triton.jit
def _copy(state, shadow, cells, mine, opened, PREC: tl.constexpr):
    x = tl.where(opened, tl.load(state + cells, mask=mine, other=0.0), 0.0)
    tl.store(shadow + cells, operand(x, shadow.dtype.element_ty, PREC), mask=mine)


@triton.jit
def start_shadow(
    state, shadow, low, high,
    DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr, DEEP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Copy the state of the units [low, high) to the shadow of a chunk that opens them, with 0 up to the next 16."""
    low, end = low // 16 * 16, sixteens(high)
    for j in range(low // BH, tl.cdiv(end, BH)):
        cols = j * BH + tl.arange(0, BH)
        mine, opened = ((cols >= low) & (cols < end))[None, :], (cols < high)[None, :]
        if DEEP:
            _copy(state, shadow, _pairs(cols, DK, 0, HID, False), mine, opened, PREC)
            _copy(state, shadow, _pairs(cols, DV, 2 * DK * HID, HID, True), mine, opened, PREC)
        else:
            _copy(state, shadow, _pairs(cols, DV, 0, HID, True), mine, opened, PREC)


@triton.jit
def _update(
    state, shadow, x, pair, scales, cols, width, end, to_shadow,
    D: tl.constexpr, BASE: tl.constexpr, HID: tl.constexpr, ROWS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """A tile of W and S to the chunk's end: shares of themselves, less the tokens' gradients `pair` x, (2 D, b) by (b, tile)."""
    decay, carry_w, carry_s = scales
    top = tl.arange(0, 2 * D)[:, None] < D
    cells = _pairs(cols, D, BASE, HID, ROWS)
    kept = (cols < end)[None, :]
    own = tl.load(state + cells, mask=kept, other=0.0)
    below = tl.load(state + D * HID + cells, mask=kept & top, other=0.0)
    new = tl.where(top, decay[None, :], carry_s[None, :]) * own + carry_w[None, :] * below - mul(pair, x, PREC)
    opened = (cols < width)[None, :]
    tl.store(state + cells, tl.where(opened, new, own), mask=kept)
    small = operand(tl.where(opened, new, 0.0), shadow.dtype.element_ty, PREC)
    tl.store(shadow + cells, small, mask=(cols < to_shadow)[None, :])


@triton.jit
def _scaled_pair(x, end_w, end_s, D: tl.constexpr, TYPE: tl.constexpr, PREC: tl.constexpr):
    """(2 D, b): x (2 D, b, the same rows twice) by what of each token is in W and in S at the end."""
    top = tl.arange(0, 2 * D)[:, None] < D
    return operand(x.to(tl.float32) * tl.where(top, end_w[None, :], end_s[None, :]), TYPE, PREC)


@triton.jit
def _chunk_rows(
    rows_k, rows_v, now, opens_at, act_at, slope_at, grad_at, bend_at, err_at, width, H,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    ACT: tl.constexpr, DEEP: tl.constexpr, KEEP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What a chunk's tokens make of its start weights `now`: act, err, grad, and slope and bend (with KEEP, else slope as scratch).

    rows_k, rows_v: at the chunk's first token; H: rows from a token to the next.
    """
    OPD: tl.constexpr = now.dtype.element_ty
    W2: tl.constexpr = 2 * DK * HID if DEEP else 0
    t, dk, dv = tl.arange(0, B), tl.arange(0, DK), tl.arange(0, DV)
    rows_k += t[:, None] * H * DK
    end = sixteens(width)
    tiles = tl.cdiv(end, BH)

    # Activations of the open tiles.
    if DEEP:
        keys = operand(tl.load(rows_k + dk[None, :]), OPD, PREC)
    for j in range(tiles):
        cols = j * BH + tl.arange(0, BH)
        open_ = (cols < end)[None, :]
        mine = t[:, None] >= open_slots(opens_at, cols, width, B)[None, :]
        cells = t[:, None] * HID + cols[None, :]
        if DEEP:
            w = tl.load(now + dk[:, None] * HID + cols[None, :], mask=open_, other=0.0)
            a, s, c = pointwise(mul(keys, w, PREC), ACT)
            tl.store(slope_at + cells, tl.where(mine, s, 0.0).to(OPD), mask=open_)
            if KEEP:
                tl.store(bend_at + cells, tl.where(mine, c, 0.0).to(OPD), mask=open_)
        else:
            a = tl.load(rows_k + cols[None, :], mask=open_, other=0.0).to(tl.float32)
        tl.store(act_at + cells, operand(tl.where(mine, a, 0.0), OPD, PREC), mask=open_)
    tl.debug_barrier()

    # The error of what they add up to.
    found = tl.zeros((B, DV), tl.float32)
    for j in range(tiles):
        cols = j * BH + tl.arange(0, BH)
        a = tl.load(act_at + t[:, None] * HID + cols[None, :], mask=(cols < end)[None, :], other=0.0)
        w = tl.load(now + W2 + cols[:, None] * DV + dv[None, :], mask=(cols < end)[:, None], other=0.0)
        found = tl.dot(a, w, found, input_precision=PREC)
    values = tl.load(rows_v + t[:, None] * H * DV + dv[None, :]).to(tl.float32)
    tl.store(err_at + t[:, None] * DV + dv[None, :], operand(found - values, OPD, PREC))
    tl.debug_barrier()

    # Gradients of the hidden layer.
    if DEEP:
        error = tl.load(err_at + t[:, None] * DV + dv[None, :])
        for j in range(tiles):
            cols = j * BH + tl.arange(0, BH)
            open_ = (cols < end)[None, :]
            cells = t[:, None] * HID + cols[None, :]
            w = tl.load(now + W2 + cols[None, :] * DV + dv[:, None], mask=open_, other=0.0)
            s = tl.load(slope_at + cells, mask=open_, other=0.0).to(tl.float32)
            back = mul(error, w, PREC)
            tl.store(grad_at + cells, operand(back * s, OPD, PREC), mask=open_)
            if KEEP:
                c = tl.load(bend_at + cells, mask=open_, other=0.0).to(tl.float32)
                tl.store(bend_at + cells, (back * c).to(OPD), mask=open_)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["first", "count", "G"])
def write_kernel(
    k, v, vec, plan, opens, full, state, shadow, act, slope, grad, bend, err,
    first, count, T, H, G, plan_row,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    ACT: tl.constexpr, DEEP: tl.constexpr, KEEP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (rows * heads). Brings `state` (fp32, as one slot of `shadow`) through the `count` chunks from `first` on, in place;
    fills `shadow`, `act`, `grad`, `err`, and with KEEP `slope` and `bend` for the backward (without it: scratch of one chunk).

    Between two products everything passes through memory: a product whose result is an operand of another in registers would be
    given to one row of warps, and half of 8 warps would repeat the other half's work.
    """
    p = tl.program_id(0)
    row, head = p // H, p % H
    OPD: tl.constexpr = shadow.dtype.element_ty
    t = tl.arange(0, B)
    SLOT: tl.constexpr = (2 * DK + 2 * DV) * HID if DEEP else 2 * DV * HID
    W2: tl.constexpr = 2 * DK * HID if DEEP else 0
    wide = p.to(tl.int64)
    state += wide * SLOT
    shadow += wide * G * SLOT
    rows_full = tl.load(full + row)
    plan_at = plan + (row * plan_row + first) * 2
    start_shadow(state, shadow, 0, tl.load(plan_at), DK, DV, HID, BH, DEEP, PREC)
    tl.debug_barrier()
    for i in range(count):
        n = first + i
        at = wide * G + i
        token = (row.to(tl.int64) * T + n * B) * H + head
        vec_at = vec + at * VECTORS * B
        opens_at = opens + (row * plan_row + n) * HID
        width = tl.load(plan_at + 2 * i)
        end = sixteens(width)
        tiles = tl.cdiv(end, BH)
        advances = n < rows_full
        now = shadow + i * SLOT
        act_at, grad_at, err_at = act + at * B * HID, grad + at * B * HID, err + at * B * DV
        kept_at = at if KEEP else wide
        slope_at, bend_at = slope + kept_at * B * HID, bend + kept_at * B * HID

        _chunk_rows(
            k + token * DK, v + token * DV, now, opens_at, act_at, slope_at, grad_at, bend_at, err_at, width, H,
            B, DK, DV, HID, BH, ACT, DEEP, KEEP, PREC,
        )  # fmt: skip

        # Both matrices to the chunk's end.
        end_w, end_s = tl.load(vec_at + END_W * B + t), tl.load(vec_at + END_S * B + t)
        end_w, end_s = tl.where(advances, end_w, 0.0), tl.where(advances, end_s, 0.0)
        to_shadow = tl.where(i + 1 < count, end, 0)
        twice_v = (tl.arange(0, 2 * DV) % DV)[:, None]
        errors = _scaled_pair(tl.load(err_at + t[None, :] * DV + twice_v), end_w, end_s, DV, OPD, PREC)
        if DEEP:
            twice_k = (tl.arange(0, 2 * DK) % DK)[:, None]
            keys_2 = _scaled_pair(tl.load(k + (token + t[None, :] * H) * DK + twice_k), end_w, end_s, DK, OPD, PREC)
        for j in range(tiles):
            cols = j * BH + tl.arange(0, BH)
            open_ = (cols < end)[None, :]
            cells = t[:, None] * HID + cols[None, :]
            scales = end_scales(vec_at, open_slots(opens_at, cols, width, B), advances, B)
            if DEEP:
                g = tl.load(grad_at + cells, mask=open_, other=0.0)
                _update(state, now + SLOT, g, keys_2, scales, cols, width, end, to_shadow, DK, 0, HID, False, PREC)
            a = tl.load(act_at + cells, mask=open_, other=0.0)
            _update(state, now + SLOT, a, errors, scales, cols, width, end, to_shadow, DV, W2, HID, True, PREC)
        tl.debug_barrier()
        if i + 1 < count:
            start_shadow(state, now + SLOT, width, tl.load(plan_at + 2 * i + 2), DK, DV, HID, BH, DEEP, PREC)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["first", "count", "G"])
def rows_kernel(
    k, v, plan, opens, shadow, act, slope, grad, bend, err, first, T, H, G, plan_row,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    ACT: tl.constexpr, DEEP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of the segment, rows * heads): what `write_kernel` leaves behind for the backward, from start states that were
    kept, all chunks at once."""
    i, p = tl.program_id(0), tl.program_id(1)
    row, head = p // H, p % H
    n = first + i
    SLOT: tl.constexpr = (2 * DK + 2 * DV) * HID if DEEP else 2 * DV * HID
    at = p.to(tl.int64) * G + i
    token = (row.to(tl.int64) * T + n * B) * H + head
    width = tl.load(plan + (row * plan_row + n) * 2)
    cells = at * B * HID
    _chunk_rows(
        k + token * DK, v + token * DV, shadow + at * SLOT, opens + (row * plan_row + n) * HID,
        act + cells, slope + cells, grad + cells, bend + cells, err + at * B * DV, width, H,
        B, DK, DV, HID, BH, ACT, DEEP, True, PREC,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "count", "G"])
def read_kernel(
    q, k, mix, vec, plan, opens, shadow, act, grad, err, y,
    first, T, H, G, plan_row,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    ACT: tl.constexpr, DEEP: tl.constexpr, PRE: tl.constexpr, MIXED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of the segment, rows * heads): y of the chunks that are or are not mixed, with each token's own
    weights (spec/deep.md 2.2, 3.4)."""
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
    queries = operand(tl.load(rows_q + dk[None, :]), OPD, PREC)
    if DEEP:
        keys_t = operand(tl.load(k + (token + t[None, :] * H) * DK + dk[:, None]), OPD, PREC)
        near = operand(share * mul(queries, keys_t, PREC), OPD, PREC)
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
        alike = tl.dot(operand(x, OPD, PREC), a_t, alike, input_precision=PREC)
        second = cols[:, None] * DV + dv[None, :]
        w = tl.load(now + W2 + second, mask=open_[:, None], other=0.0)
        s = tl.load(now + W2 + DV * HID + second, mask=open_[:, None], other=0.0)
        out = tl.dot(operand(decay * x, OPD, PREC), w, out, input_precision=PREC)
        out = tl.dot(operand(carry * x, OPD, PREC), s, out, input_precision=PREC)
    error = tl.load(err + at * B * DV + t[:, None] * DV + dv[None, :])
    out -= mul(operand(share * alike, OPD, PREC), error, PREC)
    tl.store(y + (token + t[:, None] * H) * DV + dv[None, :], out.to(y.dtype.element_ty))
