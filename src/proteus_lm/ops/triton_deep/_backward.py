"""Backward kernels (spec/deep.md 2.4): the reads' share of every gradient, one program a chunk and head; then the walk back over the
chunks, one program a (row, head), which carries the gradient of the state and adds the writes' share, second order terms included.

Buffers beside those of the forward: `to_act`, `to_grad` (P, g, b, hidden) and `to_state` (P, g, 2 * depth, d * hidden), operands'
type: the reads' gradients of act(Z), G1 and of the chunk's start state. `to_err` (P, g, b, dv), `to_k` (P, g, b, dk) fp32: likewise of
G2 and k. `unit` (P, g, 4, hidden): gradients by unit of the log share of W at the end, of S in W, of S in S; and of the log share of W
at the reads, in mixed chunks. `turned` (P, g, 2, b, b): scratch through which a product is turned; a product fresh from the tensor
cores must not be turned in registers (miscompiled on Hopper by triton 3.6).
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
    pointwise,
    read_scales,
)
from proteus_lm.ops.triton_deep._forward import end_scales


@triton.jit
def read_backward_kernel(
    q, k, dy, mix, vec, plan, opens, shadow, act, grad, err,
    dq, to_act, to_grad, to_state, to_err, to_k, d_mix, d_vec, unit, turned,
    first, T, H, NC, plan_row,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr, G: tl.constexpr,
    ACT: tl.constexpr, DEEP: tl.constexpr, PRE: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of the segment, rows * heads). Writes dq and the reads' share of all other gradients."""
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
    mixed = tl.load(plan + (row * plan_row + n) * 2 + 1) != 0
    square, square_t = t[:, None] * B + t[None, :], t[None, :] * B + t[:, None]
    theta = tl.load(vec_at + THETA * B + t)
    raw = tl.load(mix_at + square)
    share, share_t = raw * theta[None, :], tl.load(mix_at + square_t) * theta[:, None]

    d_out = tl.load(dy + (token + t[:, None] * H) * DV + dv[None, :]).to(OPD)
    d_out_t = tl.load(dy + (token + t[None, :] * H) * DV + dv[:, None]).to(OPD)
    error = tl.load(err + at * B * DV + t[:, None] * DV + dv[None, :])
    error_t = tl.load(err + at * B * DV + t[None, :] * DV + dv[:, None])
    pair = mul(d_out, error_t, PREC)
    far = (share * pair).to(OPD)
    far_t = (share_t * mul(error, d_out_t, PREC)).to(OPD)
    queries = tl.load(rows_q + dk[None, :]).to(OPD)
    if DEEP:
        queries_t = tl.load(q + (token + t[None, :] * H) * DK + dk[:, None]).to(OPD)
        keys = tl.load(k + (token + t[:, None] * H) * DK + dk[None, :]).to(OPD)
        keys_t = tl.load(k + (token + t[None, :] * H) * DK + dk[:, None]).to(OPD)
        alike_1 = mul(queries, keys_t, PREC)
        near = (share * alike_1).to(OPD)
        near_t = (share_t * mul(keys, queries_t, PREC)).to(OPD)
    if mixed:
        tl.store(d_mix + at * B * B + square, tl.zeros((B, B), tl.float32))
        tl.debug_barrier()

    alike = tl.zeros((B, B), tl.float32)
    pair_1 = tl.zeros((B, B), tl.float32)
    d_query = tl.zeros((B, DK), tl.float32)
    d_log_read, d_carry_read = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    for j in range(0, tl.cdiv(width, BH)):
        cols = j * BH + tl.arange(0, BH)
        kept = (cols < width)[None, :]
        opened = open_slots(opens_at, cols, width, B)
        mine = t[:, None] >= opened[None, :]
        decay, carry = read_scales(vec_at, mix_at, opened, mixed, PRE, B, BH)
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
        x_op = x.to(OPD)
        a = tl.load(act + cells, mask=kept, other=0.0)
        alike = tl.dot(x_op, tl.trans(a), alike, input_precision=PREC)
        w_t = tl.load(now + W2 + second, mask=kept, other=0.0)
        s_t = tl.load(now + W2 + DV * HID + second, mask=kept, other=0.0)
        back_w, back_s = mul(d_out, w_t, PREC), mul(d_out, s_t, PREC)
        d_x = tl.where(mine, decay * back_w + carry * back_s - mul(far, a, PREC), 0.0)
        d_decay, d_carry = x * back_w, x * back_s
        if DEEP:
            d_z = d_x * x_slope
            d_decay += d_z * by_w
            d_carry += d_z * by_s
            d_z_op, d_z_w, d_z_s = d_z.to(OPD), (decay * d_z).to(OPD), (carry * d_z).to(OPD)
            pair_1 = tl.dot(d_z_op, tl.trans(g), pair_1, input_precision=PREC)
            d_query = tl.dot(d_z_w, tl.trans(w), d_query, input_precision=PREC)
            d_query = tl.dot(d_z_s, tl.trans(s), d_query, input_precision=PREC)
            tl.store(to_grad + cells, (-mul(near_t, d_z_op, PREC)).to(OPD), mask=kept)
            tl.store(to_state + at * SLOT + first_cells, mul(queries_t, d_z_w, PREC).to(OPD), mask=kept)
            tl.store(to_state + at * SLOT + DK * HID + first_cells, mul(queries_t, d_z_s, PREC).to(OPD), mask=kept)
        else:
            tl.store(dq + (token + t[:, None] * H) * DK + cols[None, :], d_x.to(dq.dtype.element_ty), mask=kept)
        tl.store(to_act + cells, (-mul(far_t, x_op, PREC)).to(OPD), mask=kept)
        tl.store(to_state + at * SLOT + W2 + second, mul(d_out_t, (decay * x).to(OPD), PREC).to(OPD), mask=kept)
        tl.store(to_state + at * SLOT + W2 + DV * HID + second, mul(d_out_t, (carry * x).to(OPD), PREC).to(OPD), mask=kept)
        d_decay *= decay
        if mixed:
            d_decay = tl.where(t[:, None] - PRE >= opened[None, :], d_decay, 0.0)
            tl.store(unit + at * 4 * HID + 3 * HID + cols, tl.sum(d_decay, 0), mask=cols < width)
            chosen = (opened[:, None] == t[None, :]).to(tl.float32)
            so_far = tl.load(d_mix + at * B * B + square)
            tl.store(d_mix + at * B * B + square, so_far + tl.dot(d_carry, chosen, input_precision=EXACT))
            tl.debug_barrier()
        else:
            d_carry_read += tl.sum(d_carry, 1)
        d_log_read += tl.sum(d_decay, 1)

    eta = tl.load(vec_at + ETA * B + t)
    d_share = -(alike * pair)
    if DEEP:
        d_share -= pair_1 * alike_1
    if mixed:
        d_opened = tl.load(d_mix + at * B * B + square)
    else:
        d_opened = tl.where(t[None, :] == 0, d_carry_read[:, None], 0.0)
    tl.store(d_mix + at * B * B + square, d_share * theta[None, :] + d_opened * eta[None, :])
    d_out_vec = d_vec + at * VECTORS * B + t
    tl.store(d_out_vec + LOG_READ * B, d_log_read)
    tl.store(d_out_vec + THETA * B, tl.sum(d_share * raw, 0))
    tl.store(d_out_vec + ETA * B, tl.sum(d_opened * raw, 0))

    turn = turned + at * 2 * B * B
    tl.store(turn + square, (share * alike).to(OPD))
    if DEEP:
        far_1 = (share * pair_1).to(OPD)
        tl.store(turn + B * B + square, far_1)
    tl.debug_barrier()
    tl.store(to_err + at * B * DV + t[:, None] * DV + dv[None, :], -mul(tl.load(turn + square_t), d_out, PREC))
    if DEEP:
        d_query -= mul(far_1, keys, PREC)
        tl.store(dq + (token + t[:, None] * H) * DK + dk[None, :], d_query.to(dq.dtype.element_ty))
        tl.store(to_k + at * B * DK + t[:, None] * DK + dk[None, :], -mul(tl.load(turn + B * B + square_t), queries, PREC))


@triton.jit
def write_backward_kernel(
    k, vec, plan, opens, full, shadow, act, slope, grad, bend, err,
    to_act, to_grad, to_state, to_err, to_k, dw1, ds1, dw2, ds2, dk_out, dv_out, d_vec, unit, to_z, d_err,
    first, count, T, H, NC, plan_row,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr, G: tl.constexpr,
    DEEP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (rows * heads). Brings the state's gradient (fp32, in place) back through the segment's chunks; writes dk, dv and the
    writes' share of the gates' gradients. `to_z` (P, b, hidden) and `d_err` (P, b, dv), fp32 and operands' type: scratch of one chunk.
    """
    p = tl.program_id(0)
    row, head = p // H, p % H
    OPD: tl.constexpr = shadow.dtype.element_ty
    t, dk, dv = tl.arange(0, B), tl.arange(0, DK), tl.arange(0, DV)
    SLOT: tl.constexpr = (2 * DK + 2 * DV) * HID if DEEP else 2 * DV * HID
    W2: tl.constexpr = 2 * DK * HID if DEEP else 0
    wide = p.to(tl.int64)
    dw1, ds1, dw2, ds2 = dw1 + wide * DK * HID, ds1 + wide * DK * HID, dw2 + wide * DV * HID, ds2 + wide * DV * HID
    to_z += wide * B * HID
    d_err += wide * B * DV
    rows_full = tl.load(full + row)
    for back in range(0, count):
        i = count - 1 - back
        n = first + i
        at = wide * G + i
        token = (row.to(tl.int64) * T + n * B) * H + head
        vec_at = vec + at * VECTORS * B
        opens_at = opens + (row * plan_row + n) * HID
        width = tl.load(plan + (row * plan_row + n) * 2)
        advances = n < rows_full
        now, to_now = shadow + at * SLOT, to_state + at * SLOT
        end_w = tl.where(advances, tl.load(vec_at + END_W * B + t), 0.0)[:, None]
        end_s = tl.where(advances, tl.load(vec_at + END_S * B + t), 0.0)[:, None]
        keys = tl.load(k + (token + t[:, None] * H) * DK + dk[None, :]).to(OPD)
        error = tl.load(err + at * B * DV + t[:, None] * DV + dv[None, :])
        error_t = tl.load(err + at * B * DV + t[None, :] * DV + dv[:, None])
        d_error = tl.load(to_err + at * B * DV + t[:, None] * DV + dv[None, :])
        d_end_w, d_end_s = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
        if DEEP:
            d_key = tl.load(to_k + at * B * DK + t[:, None] * DK + dk[None, :])

        # First pass over the open tiles: all but what needs the whole gradient of the error.
        for j in range(0, tl.cdiv(width, BH)):
            cols = j * BH + tl.arange(0, BH)
            kept = (cols < width)[None, :]
            opened = open_slots(opens_at, cols, width, B)
            decay, carry_w, carry_s = end_scales(vec_at, opened, advances, B)
            cells = t[:, None] * HID + cols[None, :]
            there = at * B * HID + cells
            second = cols[None, :] * DV + dv[:, None]  # W2 as (dv, tile)
            a = tl.load(act + there, mask=kept, other=0.0).to(tl.float32)
            d_w = tl.load(dw2 + second, mask=kept, other=0.0)
            d_s = tl.load(ds2 + second, mask=kept, other=0.0)
            d_w_op, d_s_op = d_w.to(OPD), d_s.to(OPD)
            back_w, back_s = mul(error, d_w_op, PREC), mul(error, d_s_op, PREC)
            d_a = tl.load(to_act + there, mask=kept, other=0.0).to(tl.float32) - end_w * back_w - end_s * back_s
            by_end_w, by_end_s = a * back_w, a * back_s
            d_error = tl.dot((-end_w * a).to(OPD), tl.trans(d_w_op), d_error, input_precision=PREC)
            d_error = tl.dot((-end_s * a).to(OPD), tl.trans(d_s_op), d_error, input_precision=PREC)
            w = tl.load(now + W2 + second, mask=kept, other=0.0)
            s = tl.load(now + W2 + DV * HID + second, mask=kept, other=0.0).to(tl.float32)
            d_decay = tl.sum(w.to(tl.float32) * d_w, 0)
            d_carry_w, d_carry_s = tl.sum(s * d_w, 0), tl.sum(s * d_s, 0)
            new_w = decay[None, :] * d_w + tl.load(to_now + W2 + second, mask=kept, other=0.0).to(tl.float32)
            new_s = carry_w[None, :] * d_w + carry_s[None, :] * d_s
            new_s += tl.load(to_now + W2 + DV * HID + second, mask=kept, other=0.0).to(tl.float32)
            if DEEP:
                first_cells = dk[:, None] * HID + cols[None, :]
                d_w1 = tl.load(dw1 + first_cells, mask=kept, other=0.0)
                d_s1 = tl.load(ds1 + first_cells, mask=kept, other=0.0)
                d_w1_op, d_s1_op = d_w1.to(OPD), d_s1.to(OPD)
                g = tl.load(grad + there, mask=kept, other=0.0).to(tl.float32)
                by_w, by_s = mul(keys, d_w1_op, PREC), mul(keys, d_s1_op, PREC)
                by_end_w += g * by_w
                by_end_s += g * by_s
                d_g = tl.load(to_grad + there, mask=kept, other=0.0).to(tl.float32) - end_w * by_w - end_s * by_s
                rise = tl.load(slope + there, mask=kept, other=0.0).to(tl.float32)
                d_back = (d_g * rise).to(OPD)
                d_z = d_g * tl.load(bend + there, mask=kept, other=0.0).to(tl.float32) + d_a * rise
                tl.store(to_z + cells, d_z, mask=kept)
                d_error = tl.dot(d_back, tl.trans(w), d_error, input_precision=PREC)
                new_w += mul(error_t, d_back, PREC)
                d_key = tl.dot((-end_w * g).to(OPD), tl.trans(d_w1_op), d_key, input_precision=PREC)
                d_key = tl.dot((-end_s * g).to(OPD), tl.trans(d_s1_op), d_key, input_precision=PREC)
                w1 = tl.load(now + first_cells, mask=kept, other=0.0).to(tl.float32)
                s1 = tl.load(now + DK * HID + first_cells, mask=kept, other=0.0).to(tl.float32)
                d_decay += tl.sum(w1 * d_w1, 0)
                d_carry_w += tl.sum(s1 * d_w1, 0)
                d_carry_s += tl.sum(s1 * d_s1, 0)
                new_w1 = decay[None, :] * d_w1 + tl.load(to_now + first_cells, mask=kept, other=0.0).to(tl.float32)
                new_s1 = carry_w[None, :] * d_w1 + carry_s[None, :] * d_s1
                new_s1 += tl.load(to_now + DK * HID + first_cells, mask=kept, other=0.0).to(tl.float32)
                tl.store(dw1 + first_cells, new_w1, mask=kept)
                tl.store(ds1 + first_cells, new_s1, mask=kept)
            else:
                tl.store(to_z + cells, d_a, mask=kept)
            tl.store(dw2 + second, new_w, mask=kept)
            tl.store(ds2 + second, new_s, mask=kept)
            to_unit = unit + at * 4 * HID + cols
            real = (cols < width) & advances
            tl.store(to_unit, tl.where(real, d_decay * decay, 0.0), mask=cols < width)
            tl.store(to_unit + HID, tl.where(real, d_carry_w, 0.0), mask=cols < width)
            tl.store(to_unit + 2 * HID, tl.where(real, d_carry_s, 0.0), mask=cols < width)
            d_end_w -= tl.sum(by_end_w, 1)
            d_end_s -= tl.sum(by_end_s, 1)
        d_vec_at = d_vec + at * VECTORS * B + t
        tl.store(d_vec_at + END_W * B, tl.where(advances, d_end_w, 0.0))
        tl.store(d_vec_at + END_S * B, tl.where(advances, d_end_s, 0.0))
        tl.store(dv_out + (token + t[:, None] * H) * DV + dv[None, :], (-d_error).to(dv_out.dtype.element_ty))
        d_error_op = d_error.to(OPD)
        tl.store(d_err + t[:, None] * DV + dv[None, :], d_error_op)
        tl.debug_barrier()

        # Second pass: the error's gradient goes back through the write side.
        d_error_t = tl.load(d_err + t[None, :] * DV + dv[:, None])
        keys_t = tl.load(k + (token + t[None, :] * H) * DK + dk[:, None]).to(OPD)
        for j in range(0, tl.cdiv(width, BH)):
            cols = j * BH + tl.arange(0, BH)
            kept = (cols < width)[None, :]
            cells = t[:, None] * HID + cols[None, :]
            there = at * B * HID + cells
            second = cols[None, :] * DV + dv[:, None]
            w = tl.load(now + W2 + second, mask=kept, other=0.0)
            a = tl.load(act + there, mask=kept, other=0.0)
            d_a = mul(d_error_op, w, PREC)
            d_w = tl.load(dw2 + second, mask=kept, other=0.0)
            tl.store(dw2 + second, tl.dot(d_error_t, a, d_w, input_precision=PREC), mask=kept)
            so_far = tl.load(to_z + cells, mask=kept, other=0.0)
            if DEEP:
                rise = tl.load(slope + there, mask=kept, other=0.0).to(tl.float32)
                d_z = (so_far + d_a * rise).to(OPD)
                first_cells = dk[:, None] * HID + cols[None, :]
                w1 = tl.load(now + first_cells, mask=kept, other=0.0)
                d_key = tl.dot(d_z, tl.trans(w1), d_key, input_precision=PREC)
                d_w1 = tl.load(dw1 + first_cells, mask=kept, other=0.0)
                tl.store(dw1 + first_cells, tl.dot(keys_t, d_z, d_w1, input_precision=PREC), mask=kept)
            else:
                opened = open_slots(opens_at, cols, width, B)
                d_k = tl.where(t[:, None] >= opened[None, :], so_far + d_a, 0.0)
                tl.store(dk_out + (token + t[:, None] * H) * DK + cols[None, :], d_k.to(dk_out.dtype.element_ty), mask=kept)
        if DEEP:
            tl.store(dk_out + (token + t[:, None] * H) * DK + dk[None, :], d_key.to(dk_out.dtype.element_ty))
        tl.debug_barrier()
