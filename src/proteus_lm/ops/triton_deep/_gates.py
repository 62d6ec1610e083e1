# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAssignmentType=false
"""From a chunk's gates to the scales of its dual form, and back: one warp a chunk and head (spec/deep.md 2.1, 3.4).

Everything follows from one recurrence over the slots on rows of b numbers: how much of each token's gradient is in the momentum and
in the weights. It has no quotients, so gates of 0 and 1 are exact. Only the share of the start weights goes by logarithms.
"""

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

# What a share of 0 counts as where its logarithm is taken.
FLOOR = tl.constexpr(2.0611536e-09)


@triton.jit
def _gates(theta, alpha, eta, active, at, active_at):
    """theta, 1 - alpha, eta and 1 (0 for an empty slot), at one slot or several; an empty slot changes nothing."""
    here = tl.load(active_at) > 0
    th = tl.where(here, tl.load(theta + at).to(tl.float32), 0.0)
    keep = tl.where(here, 1.0 - tl.load(alpha + at).to(tl.float32), 1.0)
    mo = tl.where(here, tl.load(eta + at).to(tl.float32), 1.0)
    return th, keep, mo, tl.where(here, 1.0, 0.0)


@triton.jit(do_not_specialize=["first", "count", "G"])
def gates_kernel(
    theta, alpha, eta, active, mix, passed, vec, first, T, H, G, active_row,
    B: tl.constexpr, PRE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of the segment, rows * heads). Writes `mix`, `vec`, and with KEEP `passed` (P, g, b, b): the momentum's rows."""
    i, p = tl.program_id(0), tl.program_id(1)
    row, head = p // H, p % H
    slot = tl.arange(0, B)
    start = (first + i) * B
    tokens = (row.to(tl.int64) * T + start) * H + head
    active += row * active_row + start
    at = p.to(tl.int64) * G + i
    mix += at * B * B
    passed += at * B * B
    weights, momentum = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    for t in range(B):
        _, keep, mo, here = _gates(theta, alpha, eta, active, tokens + t * H, active + t)
        if PRE:
            tl.store(mix + t * B + slot, weights)
        momentum = tl.where(slot == t, 1.0, momentum * mo)
        weights = weights * keep + momentum * here
        if not PRE:
            tl.store(mix + t * B + slot, weights)
        if KEEP:
            tl.store(passed + t * B + slot, momentum)
    th, keep, mo, _ = _gates(theta, alpha, eta, active, tokens + slot * H, active + slot)
    log_keep = tl.log(tl.maximum(keep, FLOOR))
    logs = tl.cumsum(log_keep, 0)
    out = vec + at * VECTORS * B + slot
    tl.store(out + LOG_READ * B, logs - log_keep if PRE else logs)
    tl.store(out + LOG_BEFORE * B, logs - log_keep)
    tl.store(out + END_W * B, weights * th)
    tl.store(out + END_S * B, momentum * th)
    tl.store(out + CARRY_W * B, weights * mo)
    tl.store(out + CARRY_S * B, momentum * mo)
    tl.store(out + LOG_END * B, tl.zeros_like(logs) + tl.sum(log_keep, 0))
    tl.store(out + THETA * B, th)
    tl.store(out + ETA * B, mo)


@triton.jit(do_not_specialize=["first", "count", "G"])
def gates_backward_kernel(
    theta, alpha, eta, active, mix, passed, d_mix, d_vec, unit, plan, opens, d_theta, d_alpha, d_eta,
    first, T, H, G, active_row, plan_row,
    HID: tl.constexpr, B: tl.constexpr, BH: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of the segment, rows * heads). From gradients of `mix`, `vec` and of each unit to those of the gates (fp32)."""
    i, p = tl.program_id(0), tl.program_id(1)
    row, head = p // H, p % H
    n = first + i
    slot = tl.arange(0, B)
    tokens = (row.to(tl.int64) * T + n * B) * H + head
    active += row * active_row + n * B
    at = p.to(tl.int64) * G + i
    mix += at * B * B
    passed += at * B * B
    d_mix += at * B * B
    d_vec += at * VECTORS * B + slot

    # What was summed by hidden unit belongs to the slot at which the unit opened.
    d_log_end = tl.zeros((BH,), tl.float32)
    d_first_w, d_first_s = tl.zeros((BH,), tl.float32), tl.zeros((BH,), tl.float32)
    d_carry_w, d_carry_s, d_before = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    width = tl.load(plan + (row * plan_row + n) * 2)
    mixed = tl.load(plan + (row * plan_row + n) * 2 + 1) != 0
    unit += at * 4 * HID
    for j in range(tl.cdiv(width, BH)):
        cols = j * BH + tl.arange(0, BH)
        open_ = cols < width
        d_decay = tl.load(unit + cols, mask=open_, other=0.0)
        to_w = tl.load(unit + HID + cols, mask=open_, other=0.0)
        to_s = tl.load(unit + 2 * HID + cols, mask=open_, other=0.0)
        d_log_end += d_decay
        if mixed:
            opened = tl.load(opens + (row * plan_row + n) * HID + cols, mask=open_, other=B)
            mine = slot[:, None] == opened[None, :]
            to_read = tl.load(unit + 3 * HID + cols, mask=open_, other=0.0)
            d_before -= tl.sum(tl.where(mine, (d_decay + to_read)[None, :], 0.0), 1)
            d_carry_w += tl.sum(tl.where(mine, to_w[None, :], 0.0), 1)
            d_carry_s += tl.sum(tl.where(mine, to_s[None, :], 0.0), 1)
        else:
            d_first_w += to_w
            d_first_s += to_s
    d_carry_w += tl.where(slot == 0, tl.sum(d_first_w, 0), 0.0)
    d_carry_s += tl.where(slot == 0, tl.sum(d_first_s, 0), 0.0)

    th, keep, mo, here = _gates(theta, alpha, eta, active, tokens + slot * H, active + slot)
    last = B - 1
    end_s, end_w = tl.load(passed + last * B + slot), tl.load(mix + last * B + slot)
    if PRE:  # the last row of `mix` is that before the last slot
        _, keep_last, _, here_last = _gates(theta, alpha, eta, active, tokens + last * H, active + last)
        end_w = end_w * keep_last + end_s * here_last
    d_end_w, d_end_s = tl.load(d_vec + END_W * B), tl.load(d_vec + END_S * B)
    d_th = tl.load(d_vec + THETA * B) + d_end_w * end_w + d_end_s * end_s
    d_mo = tl.load(d_vec + ETA * B) + d_carry_w * end_w + d_carry_s * end_s
    to_weights = d_end_w * th + d_carry_w * mo
    to_momentum = d_end_s * th + d_carry_s * mo

    d_keep = tl.zeros((B,), tl.float32)
    for back in range(B):
        t = last - back
        _, keep_t, mo_t, here_t = _gates(theta, alpha, eta, active, tokens + t * H, active + t)
        row_mix = tl.load(d_mix + t * B + slot)
        if not PRE:
            to_weights += row_mix
        earlier = t - 1 + PRE  # the row of `mix` that holds what was there before this slot
        before = tl.load(mix + earlier * B + slot, mask=slot < (t + PRE) * B, other=0.0)
        passed_before = tl.load(passed + (t - 1) * B + slot, mask=slot < t * B, other=0.0)
        to_momentum += to_weights * here_t
        d_keep = tl.where(slot == t, tl.sum(to_weights * before, 0), d_keep)
        d_mo = tl.where(slot == t, d_mo + tl.sum(tl.where(slot < t, to_momentum * passed_before, 0.0), 0), d_mo)
        to_momentum = tl.where(slot == t, 0.0, to_momentum * mo_t)
        to_weights *= keep_t
        if PRE:
            to_weights += row_mix

    # The share of the start weights: a step's logarithm counts in all reads behind it, and for units that opened before it.
    d_read = tl.load(d_vec + LOG_READ * B)
    d_logs = tl.cumsum(d_read, 0, reverse=True) + tl.cumsum(d_before, 0, reverse=True) - d_before + tl.sum(d_log_end, 0)
    if PRE:
        d_logs -= d_read
    d_keep += d_logs / tl.maximum(keep, FLOOR)
    out = tokens + slot * H
    tl.store(d_theta + out, tl.where(here > 0, d_th, 0.0))
    tl.store(d_alpha + out, tl.where(here > 0, -d_keep, 0.0))
    tl.store(d_eta + out, tl.where(here > 0, d_mo, 0.0))
