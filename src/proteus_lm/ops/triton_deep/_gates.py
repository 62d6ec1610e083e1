"""From a chunk's gates to the scales of its dual form, and back: one program a chunk and head (spec/deep.md 2.1, 3.4)."""

from __future__ import annotations

import triton
import triton.language as tl

from proteus_lm.ops.triton_deep._common import (
    CARRY_S,
    CARRY_W,
    END_S,
    END_W,
    ETA,
    LOG_BEFORE,
    LOG_END,
    LOG_READ,
    THETA,
    VECTORS,
)

# A gate of 0 has no logarithm: shares below this count as this. Its square is still a normal fp32 number.
FLOOR = tl.constexpr(2.0611536e-09)


@triton.jit
def _load_gates(theta, alpha, eta, active, row, head, start, T, H, active_row, B: tl.constexpr):
    t = start + tl.arange(0, B)
    here = (tl.load(active + row * active_row + t) > 0).to(tl.float32)
    at = (row.to(tl.int64) * T + t) * H + head
    th = tl.load(theta + at).to(tl.float32) * here
    keep = tl.where(here > 0, 1.0 - tl.load(alpha + at).to(tl.float32), 1.0)
    mo = tl.where(here > 0, tl.load(eta + at).to(tl.float32), 1.0)
    return th, tl.maximum(keep, FLOOR), mo, tl.maximum(mo, FLOOR), here, at


@triton.jit
def _shares(logs_to, logs_from, allowed):
    """exp of a difference where allowed, 0 elsewhere; masked before the exponential, which could overflow."""
    return tl.where(allowed, tl.exp(tl.where(allowed, logs_to - logs_from, 0.0)), 0.0)


@triton.jit
def gates_kernel(
    theta, alpha, eta, active, mix, vec, first, T, H, active_row,
    G: tl.constexpr, B: tl.constexpr, PRE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of the segment, rows * heads). Writes `mix` and `vec`."""
    i, p = tl.program_id(0), tl.program_id(1)
    row, head = p // H, p % H
    th, keep, mo, mo_floor, here, _ = _load_gates(theta, alpha, eta, active, row, head, (first + i) * B, T, H, active_row, B)
    slot = tl.arange(0, B)
    log_keep, log_mo = tl.log(keep), tl.log(mo_floor)
    a, e = tl.cumsum(log_keep, 0), tl.cumsum(log_mo, 0)
    a_read = a - log_keep if PRE else a
    last = slot == B - 1
    a_end, e_end = tl.sum(tl.where(last, a, 0.0), 0), tl.sum(tl.where(last, e, 0.0), 0)
    before = slot[None, :] <= slot[:, None] - PRE
    weights = _shares(a_read[:, None], a[None, :], before) * here[None, :]
    momentum = _shares(e[:, None], e[None, :], slot[None, :] <= slot[:, None])
    mixed = tl.dot(weights, momentum, input_precision=PREC)
    end = tl.exp(a_end - a) * here
    end_w = tl.sum(end[:, None] * momentum, 0)
    end_s = tl.exp(e_end - e)
    at = p.to(tl.int64) * G + i
    tl.store(mix + at * B * B + slot[:, None] * B + slot[None, :], mixed)
    out = vec + at * VECTORS * B + slot
    tl.store(out + LOG_READ * B, a_read)
    tl.store(out + LOG_BEFORE * B, a - log_keep)
    tl.store(out + END_W * B, end_w * th)
    tl.store(out + END_S * B, end_s * th)
    tl.store(out + CARRY_W * B, end_w * mo)
    tl.store(out + CARRY_S * B, end_s * mo)
    tl.store(out + LOG_END * B, tl.zeros_like(a) + a_end)
    tl.store(out + THETA * B, th)
    tl.store(out + ETA * B, mo)


@triton.jit
def gates_backward_kernel(
    theta, alpha, eta, active, d_mix, d_vec, unit, plan, opens, d_theta, d_alpha, d_eta,
    first, T, H, NC, active_row, plan_row, HID: tl.constexpr,
    G: tl.constexpr, B: tl.constexpr, BH: tl.constexpr, PRE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of the segment, rows * heads). From gradients of `mix` and `vec` and of each unit to those of the gates.

    A share is a product of the steps between two slots, so a step's gradient is the sum over the pairs that span it: sums of proper
    terms only, where differences of sums over rows and columns would cancel next to a gate of 0.
    """
    i, p = tl.program_id(0), tl.program_id(1)
    row, head = p // H, p % H
    n = first + i
    th, keep, mo, mo_floor, here, where = _load_gates(theta, alpha, eta, active, row, head, n * B, T, H, active_row, B)
    slot = tl.arange(0, B)
    at = p.to(tl.int64) * G + i
    d_in = d_vec + at * VECTORS * B + slot
    d_log_read, d_end_w, d_end_s = (
        tl.load(d_in + LOG_READ * B),
        tl.load(d_in + END_W * B),
        tl.load(d_in + END_S * B),
    )
    d_th, d_mo = tl.load(d_in + THETA * B), tl.load(d_in + ETA * B)

    # What was summed by hidden unit belongs to the slot at which the unit opened.
    d_log_end = tl.zeros((B,), tl.float32)
    d_carry_w, d_carry_s, d_log_before = d_log_end, d_log_end, d_log_end
    plan_at = plan + (row * plan_row + n) * 2
    width = tl.load(plan_at)
    for j in range(0, tl.cdiv(width, BH)):
        cols = j * BH + tl.arange(0, BH)
        opened = tl.load(opens + (row * plan_row + n) * HID + cols, mask=cols < width, other=B)
        mine = slot[:, None] == opened[None, :]
        from_unit = unit + at * 4 * HID + cols
        d_decay = tl.load(from_unit, mask=cols < width, other=0.0)
        to_w = tl.load(from_unit + HID, mask=cols < width, other=0.0)
        to_s = tl.load(from_unit + 2 * HID, mask=cols < width, other=0.0)
        to_read = tl.load(from_unit + 3 * HID, mask=cols < width, other=0.0)
        d_log_end += tl.sum(d_decay, 0)
        d_log_before -= tl.sum(tl.where(mine, (d_decay + to_read)[None, :], 0.0), 1)
        d_carry_w += tl.sum(tl.where(mine, to_w[None, :], 0.0), 1)
        d_carry_s += tl.sum(tl.where(mine, to_s[None, :], 0.0), 1)

    log_keep, log_mo = tl.log(keep), tl.log(mo_floor)
    a, e = tl.cumsum(log_keep, 0), tl.cumsum(log_mo, 0)
    a_read = a - log_keep if PRE else a
    last = slot == B - 1
    a_end, e_end = tl.sum(tl.where(last, a, 0.0), 0), tl.sum(tl.where(last, e, 0.0), 0)
    down = slot[None, :] <= slot[:, None]
    momentum = _shares(e[:, None], e[None, :], down)
    end, end_s = tl.exp(a_end - a) * here, tl.exp(e_end - e)
    end_w = tl.sum(end[:, None] * momentum, 0)
    d_th += d_end_w * end_w + d_end_s * end_s
    d_mo += d_carry_w * end_w + d_carry_s * end_s
    to_end_w = d_end_w * th + d_carry_w * mo
    to_end_s = d_end_s * th + d_carry_s * mo

    # Of (reads x slots) shares A and (slots x slots) shares P, mix = A P: dA = dmix P^T, dP = A^T dmix, each times its share.
    d_mixed = tl.load(d_mix + at * B * B + slot[:, None] * B + slot[None, :])
    momentum_t = _shares(e[None, :], e[:, None], slot[:, None] <= slot[None, :])
    before = slot[None, :] <= slot[:, None] - PRE
    weights = _shares(a_read[:, None], a[None, :], before) * here[None, :]
    weights_t = _shares(a_read[None, :], a[:, None], slot[:, None] <= slot[None, :] - PRE) * here[:, None]
    to_weights = tl.dot(d_mixed, momentum_t, input_precision=PREC) * weights
    to_momentum = tl.dot(weights_t, d_mixed, input_precision=PREC) + end[:, None] * to_end_w[None, :]
    to_momentum = (to_momentum + tl.where(last[:, None], to_end_s[None, :], 0.0)) * momentum
    to_end = tl.sum(momentum * to_end_w[None, :], 1) * end

    later = (slot[None, :] >= slot[:, None] + PRE).to(tl.float32)  # [l, read]: the read is behind step l
    after = (slot[None, :] >= slot[:, None]).to(tl.float32)
    earlier = slot[None, :] < slot[:, None]
    d_log_keep = tl.sum(tl.where(earlier, tl.dot(later, to_weights, input_precision=PREC), 0.0), 1)
    d_log_keep += tl.sum(tl.where(earlier, to_end[None, :], 0.0), 1)
    d_log_keep += tl.sum(later * d_log_read[None, :], 1) + d_log_end
    d_log_keep += tl.sum(tl.where(slot[None, :] > slot[:, None], d_log_before[None, :], 0.0), 1)
    d_log_mo = tl.sum(tl.where(earlier, tl.dot(after, to_momentum, input_precision=PREC), 0.0), 1)
    tl.store(d_theta + where, tl.where(here > 0, d_th, 0.0))
    tl.store(d_alpha + where, tl.where(here > 0, -d_log_keep / keep, 0.0))
    tl.store(d_eta + where, tl.where(here > 0, d_log_mo / mo_floor + d_mo, 0.0))
