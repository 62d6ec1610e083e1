# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAssignmentType=false
"""Backward kernels (spec/deep.md 2.4): the reads' share of every gradient, one program a chunk and head; then the walk back over
the chunks, one program a (row, head), which carries the gradient of the state and adds the writes' share, second order terms
included; then what follows from that, again one program a chunk and head.

Buffers beside those of the forward, in the operands' type: `to_act`, `to_grad`, `to_z` (P, g, b, hidden), gradients of act(Z),
G1, Z; `to_state`, `d_shadow` (P, g, 2 * depth, d * hidden), the reads' gradient of a chunk's start state, and the whole
gradient of its end state. In fp32: `to_err` (P, g, b, dv), `to_k` (P, g, b, dk), the reads' gradients of G2 and k; `unit` (P,
g, 4, hidden), gradients by unit of the log share of W at the end, of S in W, of S in S, and of the log share of W at the reads
in mixed chunks. `turned` (P, g, 4, b, b) is scratch through which a product is turned: one fresh from the tensor cores must not
be turned in registers (miscompiled on Hopper by triton 3.6), and one that is needed in every tile would fill them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from proteus_lm.ops.triton_deep._common import (
    END_S,
    END_W,
    ETA,
    LOG_READ,
    THETA,
    VECTORS,
    mul,
    open_slots,
    operand,
    pointwise,
    read_scales,
    sixteens,
)
from proteus_lm.ops.triton_deep._forward import end_scales, start_shadow


@triton.jit(do_not_specialize=["first", "count", "G"])
def read_backward_kernel(
    q, k, dy, mix, vec, plan, opens, shadow, act, grad, err,
    dq, to_act, to_grad, to_state, to_err, to_k, d_mix, d_vec, unit, turned, to_z,
    first, T, H, G, plan_row,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    ACT: tl.constexpr, DEEP: tl.constexpr, PRE: tl.constexpr, MIXED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of the segment, rows * heads). Writes dq and the reads' share of all other gradients, of the chunks that are or
    are not mixed."""
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
    square, square_t = t[:, None] * B + t[None, :], t[None, :] * B + t[:, None]
    theta = tl.load(vec_at + THETA * B + t)
    share = tl.load(mix_at + square) * theta[None, :]

    d_out = operand(tl.load(dy + (token + t[:, None] * H) * DV + dv[None, :]), OPD, PREC)
    error_t = tl.load(err + at * B * DV + t[None, :] * DV + dv[:, None])
    turn = turned + at * 4 * B * B
    tl.store(turn + square, operand(share * mul(d_out, error_t, PREC), OPD, PREC))
    queries = operand(tl.load(rows_q + dk[None, :]), OPD, PREC)
    if DEEP:
        keys_t = operand(tl.load(k + (token + t[None, :] * H) * DK + dk[:, None]), OPD, PREC)
        tl.store(turn + B * B + square, operand(share * mul(queries, keys_t, PREC), OPD, PREC))
    tl.debug_barrier()

    # First pass over the open tiles: the read once more, and its gradient down to q. Leaves act(Zq) and dZq for the second pass.
    far = tl.load(turn + square)
    if DEEP:
        near = tl.load(turn + B * B + square)
    d_query = tl.zeros((B, DK), tl.float32)
    d_log_read, d_carry_read = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    for j in range(tl.cdiv(end, BH)):
        cols = j * BH + tl.arange(0, BH)
        kept = (cols < end)[None, :]
        opened = open_slots(opens_at, cols, width, B)
        mine = t[:, None] >= opened[None, :]
        decay, carry = read_scales(vec_at, mix_at, opened, MIXED, PRE, B, BH)
        cells = at * B * HID + t[:, None] * HID + cols[None, :]
        second = cols[None, :] * DV + dv[:, None]  # W2 as (dv, tile)
        if DEEP:
            first_cells = dk[:, None] * HID + cols[None, :]
            w = tl.load(now + first_cells, mask=kept, other=0.0)
            s = tl.load(now + DK * HID + first_cells, mask=kept, other=0.0)
            g = tl.load(grad + cells, mask=kept, other=0.0)
            by_w, by_s = mul(queries, w, PREC), mul(queries, s, PREC)
            x, x_slope, _ = pointwise(decay * by_w + carry * by_s - mul(near, g, PREC), ACT)
        else:
            x = tl.load(rows_q + cols[None, :], mask=kept, other=0.0).to(tl.float32)
        x = tl.where(mine, x, 0.0)
        tl.store(to_act + cells, operand(x, OPD, PREC), mask=kept)
        a = tl.load(act + cells, mask=kept, other=0.0)
        back = mul(d_out, tl.load(now + W2 + second, mask=kept, other=0.0), PREC)
        d_decay, d_x = x * back, decay * back
        back = mul(d_out, tl.load(now + W2 + DV * HID + second, mask=kept, other=0.0), PREC)
        d_carry = x * back
        d_x = tl.where(mine, d_x + carry * back - mul(far, a, PREC), 0.0)
        if DEEP:
            d_z = d_x * x_slope
            d_decay += d_z * by_w
            d_carry += d_z * by_s
            tl.store(to_grad + cells, operand(d_z, OPD, PREC), mask=kept)
            d_query = tl.dot(operand(decay * d_z, OPD, PREC), tl.trans(w), d_query, input_precision=PREC)
            d_query = tl.dot(operand(carry * d_z, OPD, PREC), tl.trans(s), d_query, input_precision=PREC)
        else:
            tl.store(dq + (token + t[:, None] * H) * DK + cols[None, :], d_x.to(dq.dtype.element_ty), mask=kept)
        d_decay *= decay
        if MIXED:
            d_decay = tl.where(t[:, None] - PRE >= opened[None, :], d_decay, 0.0)
            tl.store(unit + at * 4 * HID + 3 * HID + cols, tl.sum(d_decay, 0), mask=cols < width)
            tl.store(to_z + cells, operand(d_carry, OPD, PREC), mask=kept)
        else:
            d_carry_read += tl.sum(d_carry, 1)
        d_log_read += tl.sum(d_decay, 1)
    d_out_vec = d_vec + at * VECTORS * B + t
    tl.store(d_out_vec + LOG_READ * B, d_log_read)
    tl.debug_barrier()

    # Second pass: the reads' share of the gradients of act(Z), G1 and the start state.
    far_t = tl.load(turn + square_t)
    d_out_t = operand(tl.load(dy + (token + t[None, :] * H) * DV + dv[:, None]), OPD, PREC)
    alike = tl.zeros((B, B), tl.float32)
    if DEEP:
        near_t = tl.load(turn + B * B + square_t)
        queries_t = operand(tl.load(q + (token + t[None, :] * H) * DK + dk[:, None]), OPD, PREC)
        pair_1 = tl.zeros((B, B), tl.float32)
    for j in range(tl.cdiv(end, BH)):
        cols = j * BH + tl.arange(0, BH)
        kept = (cols < end)[None, :]
        opened = open_slots(opens_at, cols, width, B)
        decay, carry = read_scales(vec_at, mix_at, opened, MIXED, PRE, B, BH)
        cells = at * B * HID + t[:, None] * HID + cols[None, :]
        second = cols[None, :] * DV + dv[:, None]
        x = tl.load(to_act + cells, mask=kept, other=0.0)
        a = tl.load(act + cells, mask=kept, other=0.0)
        alike = tl.dot(x, tl.trans(a), alike, input_precision=PREC)
        tl.store(to_act + cells, (-mul(far_t, x, PREC)).to(OPD), mask=kept)
        x_w, x_s = operand(decay * x, OPD, PREC), operand(carry * x, OPD, PREC)
        tl.store(to_state + at * SLOT + W2 + second, mul(d_out_t, x_w, PREC).to(OPD), mask=kept)
        tl.store(to_state + at * SLOT + W2 + DV * HID + second, mul(d_out_t, x_s, PREC).to(OPD), mask=kept)
        if DEEP:
            first_cells = dk[:, None] * HID + cols[None, :]
            d_z = tl.load(to_grad + cells, mask=kept, other=0.0)
            g = tl.load(grad + cells, mask=kept, other=0.0)
            pair_1 = tl.dot(d_z, tl.trans(g), pair_1, input_precision=PREC)
            tl.store(to_grad + cells, (-mul(near_t, d_z, PREC)).to(OPD), mask=kept)
            d_z_w, d_z_s = operand(decay * d_z, OPD, PREC), operand(carry * d_z, OPD, PREC)
            tl.store(to_state + at * SLOT + first_cells, mul(queries_t, d_z_w, PREC).to(OPD), mask=kept)
            tl.store(to_state + at * SLOT + DK * HID + first_cells, mul(queries_t, d_z_s, PREC).to(OPD), mask=kept)

    eta = tl.load(vec_at + ETA * B + t)
    raw = tl.load(mix_at + square)
    share = raw * theta[None, :]
    d_share = -(alike * mul(d_out, error_t, PREC))
    if DEEP:
        keys_t = operand(tl.load(k + (token + t[None, :] * H) * DK + dk[:, None]), OPD, PREC)
        d_share -= pair_1 * mul(queries, keys_t, PREC)
    if MIXED:  # what a unit's start momentum counts for belongs to the slot at which the unit opened
        d_opened = tl.zeros((B, B), tl.float32)
        for j in range(tl.cdiv(end, BH)):
            cols = j * BH + tl.arange(0, BH)
            chosen = (open_slots(opens_at, cols, width, B)[:, None] == t[None, :]).to(OPD)
            d_carry = tl.load(to_z + at * B * HID + t[:, None] * HID + cols[None, :], mask=(cols < end)[None, :], other=0.0)
            d_opened = tl.dot(d_carry, chosen, d_opened, input_precision=PREC)
    else:
        d_opened = tl.where(t[None, :] == 0, d_carry_read[:, None], 0.0)
    tl.store(d_mix + at * B * B + square, d_share * theta[None, :] + d_opened * eta[None, :])
    tl.store(d_out_vec + THETA * B, tl.sum(d_share * raw, 0))
    tl.store(d_out_vec + ETA * B, tl.sum(d_opened * raw, 0))

    turn += 2 * B * B
    tl.store(turn + square, operand(share * alike, OPD, PREC))
    if DEEP:
        far_1 = operand(share * pair_1, OPD, PREC)
        tl.store(turn + B * B + square, far_1)
    tl.debug_barrier()
    tl.store(to_err + at * B * DV + t[:, None] * DV + dv[None, :], -mul(tl.load(turn + square_t), d_out, PREC))
    if DEEP:
        keys = operand(tl.load(k + (token + t[:, None] * H) * DK + dk[None, :]), OPD, PREC)
        d_query -= mul(far_1, keys, PREC)
        tl.store(dq + (token + t[:, None] * H) * DK + dk[None, :], d_query.to(dq.dtype.element_ty))
        tl.store(to_k + at * B * DK + t[:, None] * DK + dk[None, :], -mul(tl.load(turn + B * B + square_t), queries, PREC))


@triton.jit(do_not_specialize=["first", "count", "G"])
def write_backward_kernel(
    k, vec, plan, opens, full, shadow, act, slope, bend, err,
    to_act, to_grad, to_state, to_err, d_state, d_shadow, dk_out, dv_out, d_vec, to_z, d_back, d_err,
    first, count, T, H, G, plan_row,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    DEEP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (rows * heads). Brings the state's gradient (fp32, in place) back through the segment's chunks; writes dv, for depth 1
    dk, and for `rest_backward_kernel` the state's gradient at each chunk's end (`d_shadow`) and that of Z (`to_z`).
    `d_back` (P, b, hidden) and `d_err` (P, b, dv), operands' type: scratch of one chunk. Products meet in memory, as in
    the forward.
    """
    p = tl.program_id(0)
    row, head = p // H, p % H
    OPD: tl.constexpr = shadow.dtype.element_ty
    t, dk, dv = tl.arange(0, B), tl.arange(0, DK), tl.arange(0, DV)
    SLOT: tl.constexpr = (2 * DK + 2 * DV) * HID if DEEP else 2 * DV * HID
    W2: tl.constexpr = 2 * DK * HID if DEEP else 0
    wide = p.to(tl.int64)
    d_state += wide * SLOT
    d_back += wide * B * HID
    d_err += wide * B * DV
    rows_full = tl.load(full + row)
    start_shadow(d_state, d_shadow + (wide * G + count - 1) * SLOT, 0, HID, DK, DV, HID, BH, DEEP, PREC)
    tl.debug_barrier()
    for back in range(count):
        i = count - 1 - back
        n = first + i
        at = wide * G + i
        token = (row.to(tl.int64) * T + n * B) * H + head
        vec_at = vec + at * VECTORS * B
        opens_at = opens + (row * plan_row + n) * HID
        width = tl.load(plan + (row * plan_row + n) * 2)
        end = sixteens(width)
        tiles = tl.cdiv(end, BH)
        advances = n < rows_full
        now, to_now, d_now = shadow + at * SLOT, to_state + at * SLOT, d_shadow + at * SLOT
        end_w = tl.where(advances, tl.load(vec_at + END_W * B + t), 0.0)[:, None]
        end_s = tl.where(advances, tl.load(vec_at + END_S * B + t), 0.0)[:, None]
        error = tl.load(err + at * B * DV + t[:, None] * DV + dv[None, :])
        if DEEP:
            keys = operand(tl.load(k + (token + t[:, None] * H) * DK + dk[None, :]), OPD, PREC)

        # Gradients of the activations and of the hidden layer's inner gradients, from the state's.
        for j in range(tiles):
            cols = j * BH + tl.arange(0, BH)
            kept = (cols < end)[None, :]
            cells = t[:, None] * HID + cols[None, :]
            there = at * B * HID + cells
            second = cols[None, :] * DV + dv[:, None]  # W2 as (dv, tile)
            d_w = tl.load(d_now + W2 + second, mask=kept, other=0.0)
            d_s = tl.load(d_now + W2 + DV * HID + second, mask=kept, other=0.0)
            d_a = tl.load(to_act + there, mask=kept, other=0.0).to(tl.float32)
            d_a -= end_w * mul(error, d_w, PREC) + end_s * mul(error, d_s, PREC)
            if DEEP:
                first_cells = dk[:, None] * HID + cols[None, :]
                d_w = tl.load(d_now + first_cells, mask=kept, other=0.0)
                d_s = tl.load(d_now + DK * HID + first_cells, mask=kept, other=0.0)
                d_g = tl.load(to_grad + there, mask=kept, other=0.0).to(tl.float32)
                d_g -= end_w * mul(keys, d_w, PREC) + end_s * mul(keys, d_s, PREC)
                rise = tl.load(slope + there, mask=kept, other=0.0).to(tl.float32)
                curve = tl.load(bend + there, mask=kept, other=0.0).to(tl.float32)
                tl.store(to_z + there, (d_g * curve + d_a * rise).to(OPD), mask=kept)
                tl.store(d_back + cells, operand(d_g * rise, OPD, PREC), mask=kept)
            else:
                tl.store(to_z + there, d_a.to(OPD), mask=kept)
        tl.debug_barrier()

        # The gradient of the error.
        by_w, by_s = tl.zeros((B, DV), tl.float32), tl.zeros((B, DV), tl.float32)
        d_error = tl.zeros((B, DV), tl.float32)
        for j in range(tiles):
            cols = j * BH + tl.arange(0, BH)
            kept, kept_t = (cols < end)[None, :], (cols < end)[:, None]
            cells = t[:, None] * HID + cols[None, :]
            second = cols[:, None] * DV + dv[None, :]
            a = tl.load(act + at * B * HID + cells, mask=kept, other=0.0)
            by_w = tl.dot(a, tl.load(d_now + W2 + second, mask=kept_t, other=0.0), by_w, input_precision=PREC)
            by_s = tl.dot(a, tl.load(d_now + W2 + DV * HID + second, mask=kept_t, other=0.0), by_s, input_precision=PREC)
            if DEEP:
                d_h = tl.load(d_back + cells, mask=kept, other=0.0)
                w = tl.load(now + W2 + second, mask=kept_t, other=0.0)
                d_error = tl.dot(d_h, w, d_error, input_precision=PREC)
        wide_error = error.to(tl.float32)
        d_vec_at = d_vec + at * VECTORS * B + t
        tl.store(d_vec_at + END_W * B, -tl.sum(wide_error * by_w, 1))
        tl.store(d_vec_at + END_S * B, -tl.sum(wide_error * by_s, 1))
        d_error += tl.load(to_err + at * B * DV + t[:, None] * DV + dv[None, :]) - end_w * by_w - end_s * by_s
        tl.store(dv_out + (token + t[:, None] * H) * DV + dv[None, :], (-d_error).to(dv_out.dtype.element_ty))
        tl.store(d_err + t[:, None] * DV + dv[None, :], operand(d_error, OPD, PREC))
        tl.debug_barrier()

        # The error's gradient back through the write side.
        d_error = tl.load(d_err + t[:, None] * DV + dv[None, :])
        for j in range(tiles):
            cols = j * BH + tl.arange(0, BH)
            kept = (cols < end)[None, :]
            there = at * B * HID + t[:, None] * HID + cols[None, :]
            w = tl.load(now + W2 + cols[None, :] * DV + dv[:, None], mask=kept, other=0.0)
            so_far = tl.load(to_z + there, mask=kept, other=0.0).to(tl.float32)
            d_a = mul(d_error, w, PREC)
            if DEEP:
                rise = tl.load(slope + there, mask=kept, other=0.0).to(tl.float32)
                tl.store(to_z + there, operand(so_far + d_a * rise, OPD, PREC), mask=kept)
            else:
                mine = t[:, None] >= open_slots(opens_at, cols, width, B)[None, :]
                d_k = tl.where(mine, so_far + d_a, 0.0).to(dk_out.dtype.element_ty)
                tl.store(dk_out + (token + t[:, None] * H) * DK + cols[None, :], d_k, mask=kept)
        tl.debug_barrier()

        # The state's gradient to the chunk's start.
        d_error_t = tl.load(d_err + t[None, :] * DV + dv[:, None])
        if DEEP:
            error_t = tl.load(err + at * B * DV + t[None, :] * DV + dv[:, None])
            keys_t = operand(tl.load(k + (token + t[None, :] * H) * DK + dk[:, None]), OPD, PREC)
        to_shadow = tl.where(i > 0, end, 0)
        for j in range(tiles):
            cols = j * BH + tl.arange(0, BH)
            kept, open_, shadowed = (cols < end)[None, :], (cols < width)[None, :], (cols < to_shadow)[None, :]
            scales = end_scales(vec_at, open_slots(opens_at, cols, width, B), advances, B)
            cells = t[:, None] * HID + cols[None, :]
            change = mul(d_error_t, tl.load(act + at * B * HID + cells, mask=kept, other=0.0), PREC)
            if DEEP:
                change = tl.dot(error_t, tl.load(d_back + cells, mask=kept, other=0.0), change, input_precision=PREC)
                d_z = tl.load(to_z + at * B * HID + cells, mask=kept, other=0.0)
                first_cells = dk[:, None] * HID + cols[None, :]
                back_1 = mul(keys_t, d_z, PREC)
                _back(d_state, to_now, d_now - SLOT, DK * HID, first_cells, kept, open_, shadowed, scales, back_1, PREC)
            second = W2 + cols[None, :] * DV + dv[:, None]
            _back(d_state, to_now, d_now - SLOT, DV * HID, second, kept, open_, shadowed, scales, change, PREC)
        tl.debug_barrier()
        if i > 0:  # a row that has ended in this chunk, but not in the one before
            before = tl.load(plan + (row * plan_row + n - 1) * 2)
            start_shadow(d_state, d_now - SLOT, width, before, DK, DV, HID, BH, DEEP, PREC)
        tl.debug_barrier()


@triton.jit
def _back(d_state, to_state, d_shadow, half, cells, kept, opened, shadowed, scales, change, PREC: tl.constexpr):
    """One tile of the gradients of W and S from a chunk's end to its start, and their copies for the chunk before."""
    decay, carry_w, carry_s = scales
    w = tl.load(d_state + cells, mask=kept, other=0.0)
    s = tl.load(d_state + half + cells, mask=kept, other=0.0)
    new_w = decay[None, :] * w + change + tl.load(to_state + cells, mask=kept, other=0.0).to(tl.float32)
    new_s = carry_w[None, :] * w + carry_s[None, :] * s
    new_s += tl.load(to_state + half + cells, mask=kept, other=0.0).to(tl.float32)
    tl.store(d_state + cells, tl.where(opened, new_w, w), mask=kept)
    tl.store(d_state + half + cells, tl.where(opened, new_s, s), mask=kept)
    tl.store(d_shadow + cells, operand(tl.where(opened, new_w, 0.0), d_shadow.dtype.element_ty, PREC), mask=shadowed)
    tl.store(d_shadow + half + cells, operand(tl.where(opened, new_s, 0.0), d_shadow.dtype.element_ty, PREC), mask=shadowed)


@triton.jit(do_not_specialize=["first", "count", "G"])
def rest_backward_kernel(
    k, vec, plan, opens, full, shadow, d_shadow, grad, to_z, to_k, dk_out, d_vec, unit,
    first, T, H, G, plan_row,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    DEEP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of the segment, rows * heads). What follows from the state's gradient and on which nothing else depends: dk, and
    the writes' share of the gates' gradients.
    """
    i, p = tl.program_id(0), tl.program_id(1)
    row, head = p // H, p % H
    n = first + i
    t, dk, dv = tl.arange(0, B), tl.arange(0, DK), tl.arange(0, DV)
    SLOT: tl.constexpr = (2 * DK + 2 * DV) * HID if DEEP else 2 * DV * HID
    W2: tl.constexpr = 2 * DK * HID if DEEP else 0
    at = p.to(tl.int64) * G + i
    token = (row.to(tl.int64) * T + n * B) * H + head
    vec_at = vec + at * VECTORS * B
    opens_at = opens + (row * plan_row + n) * HID
    width = tl.load(plan + (row * plan_row + n) * 2)
    end = sixteens(width)
    advances = n < tl.load(full + row)
    now, d_now = shadow + at * SLOT, d_shadow + at * SLOT
    unit += at * 4 * HID
    if DEEP:
        d_key = tl.zeros((B, DK), tl.float32)
        by_w1, by_s1 = tl.zeros((B, DK), tl.float32), tl.zeros((B, DK), tl.float32)
    for j in range(tl.cdiv(end, BH)):
        cols = j * BH + tl.arange(0, BH)
        kept = (cols < end)[None, :]
        opened = open_slots(opens_at, cols, width, B)
        decay, _, _ = end_scales(vec_at, opened, advances, B)
        second = cols[None, :] * DV + dv[:, None]
        w, s = _pair(now + W2 + second, DV * HID, kept)
        d_w, d_s = _pair(d_now + W2 + second, DV * HID, kept)
        d_decay, d_carry_w, d_carry_s = _sums(w, s, d_w, d_s)
        if DEEP:
            first_cells = dk[:, None] * HID + cols[None, :]
            w, s = _pair(now + first_cells, DK * HID, kept)
            d_w, d_s = _pair(d_now + first_cells, DK * HID, kept)
            more = _sums(w, s, d_w, d_s)
            d_decay += more[0]
            d_carry_w += more[1]
            d_carry_s += more[2]
            there = at * B * HID + t[:, None] * HID + cols[None, :]
            g = tl.load(grad + there, mask=kept, other=0.0)
            by_w1 = tl.dot(g, tl.trans(d_w), by_w1, input_precision=PREC)
            by_s1 = tl.dot(g, tl.trans(d_s), by_s1, input_precision=PREC)
            d_z = tl.load(to_z + there, mask=kept, other=0.0)
            d_key = tl.dot(d_z, tl.trans(w), d_key, input_precision=PREC)
        tl.store(unit + cols, tl.where(advances, d_decay * decay, 0.0), mask=cols < width)
        tl.store(unit + HID + cols, tl.where(advances, d_carry_w, 0.0), mask=cols < width)
        tl.store(unit + 2 * HID + cols, tl.where(advances, d_carry_s, 0.0), mask=cols < width)
    d_vec += at * VECTORS * B + t
    d_end_w, d_end_s = tl.load(d_vec + END_W * B), tl.load(d_vec + END_S * B)
    if DEEP:
        keys = tl.load(k + (token + t[:, None] * H) * DK + dk[None, :]).to(tl.float32)
        d_end_w -= tl.sum(keys * by_w1, 1)
        d_end_s -= tl.sum(keys * by_s1, 1)
        end_w = tl.where(advances, tl.load(vec_at + END_W * B + t), 0.0)[:, None]
        end_s = tl.where(advances, tl.load(vec_at + END_S * B + t), 0.0)[:, None]
        d_key += tl.load(to_k + at * B * DK + t[:, None] * DK + dk[None, :]) - end_w * by_w1 - end_s * by_s1
        tl.store(dk_out + (token + t[:, None] * H) * DK + dk[None, :], d_key.to(dk_out.dtype.element_ty))
    tl.store(d_vec + END_W * B, tl.where(advances, d_end_w, 0.0))
    tl.store(d_vec + END_S * B, tl.where(advances, d_end_s, 0.0))


@triton.jit
def _pair(cells, half, kept):
    """A tile of W and of S."""
    return tl.load(cells, mask=kept, other=0.0), tl.load(cells + half, mask=kept, other=0.0)


@triton.jit
def _sums(w, s, d_w, d_s):
    """By unit (columns): <W, dW>, <S, dW>, <S, dS>."""
    w, s, d_w, d_s = w.to(tl.float32), s.to(tl.float32), d_w.to(tl.float32), d_s.to(tl.float32)
    return tl.sum(w * d_w, 0), tl.sum(s * d_w, 0), tl.sum(s * d_s, 0)
