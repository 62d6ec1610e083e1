# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAssignmentType=false
"""From a chunk's gates to the scales of its dual form, and back: a program a chunk and head (spec/deep.md 2.1, 3.4). And a plan.

Everything follows from one recurrence over the slots on rows of b numbers: how much of each token's gradient is in the momentum and
in the weights. It is worked out by scans over all rows at once, for b steps one after the other would each wait for memory. It has
no quotients, so gates of 0 and 1 are exact. Only the share of the start weights goes by logarithms.
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
def plan_kernel(active, narrow, plan, opens, T, HID: tl.constexpr, B: tl.constexpr, BH: tl.constexpr) -> None:
    """Grid (chunks, rows). The tables of a row's chunk from the open units of its slots, int64 (rows, T); 0 where no token is:
    before the row's first token or behind its last, where nothing opens."""
    n = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    t = tl.arange(0, B)
    at = row * T + n * B + t
    now = tl.load(active + at).to(tl.int32)
    tl.store(narrow + at, now)
    width = tl.max(now, 0)
    there = now > 0
    begin = tl.min(tl.where(there, t, B), 0)
    filled = tl.where(there, now, tl.where(t < begin, tl.min(tl.where(there, now, HID), 0), width))
    mixed = 0
    chunk = row * tl.num_programs(0) + n
    for first in range(0, HID, BH):
        unit = first + tl.arange(0, BH)
        slot = tl.sum((filled[:, None] <= unit[None, :]).to(tl.int32), 0)
        slot = tl.where(width > 0, slot, B)
        tl.store(opens + chunk * HID + unit, slot, mask=unit < HID)
        mixed = tl.maximum(mixed, tl.max(((slot > 0) & (slot < B) & (unit < HID)).to(tl.int32), 0))
    tl.store(plan + chunk * 2, width)
    tl.store(plan + chunk * 2 + 1, mixed)


@triton.jit
def then(a1, b1, a2, b2):
    """x -> a1 x + b1, and then x -> a2 x + b2."""
    return a1 * a2, a2 * b1 + b2


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
    th, keep, mo, here = _gates(theta, alpha, eta, active, tokens + slot * H, active + slot)
    row_at, column = slot[:, None], slot[None, :]  # of slot t: what of the gradient of slot s there is
    every = tl.zeros((B, B), tl.float32)
    _, momentum = tl.associative_scan((mo[:, None] + every, tl.where(row_at == column, 1.0, every)), 0, then)
    _, weights = tl.associative_scan((keep[:, None] + every, momentum * here[:, None]), 0, then)
    cells = row_at * B + column
    if PRE:  # before each slot
        tl.store(mix + cells, every, mask=row_at == 0)
        tl.store(mix + cells + B, weights, mask=row_at < B - 1)
    else:
        tl.store(mix + cells, weights)
    if KEEP:
        tl.store(passed + cells, momentum)
    last = row_at == B - 1
    end_w, end_s = tl.sum(tl.where(last, weights, 0.0), 0), tl.sum(tl.where(last, momentum, 0.0), 0)
    log_keep = tl.log(tl.maximum(keep, FLOOR))
    logs = tl.cumsum(log_keep, 0)
    out = vec + at * VECTORS * B + slot
    tl.store(out + LOG_READ * B, logs - log_keep if PRE else logs)
    tl.store(out + LOG_BEFORE * B, logs - log_keep)
    tl.store(out + END_W * B, end_w * th)
    tl.store(out + END_S * B, end_s * th)
    tl.store(out + CARRY_W * B, end_w * mo)
    tl.store(out + CARRY_S * B, end_s * mo)
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

    # Of slot t: the gradients to each slot's share in the weights and in the momentum, from the last slot backwards.
    row_at, column = slot[:, None], slot[None, :]
    every = tl.zeros((B, B), tl.float32)
    cells, ends = row_at * B + column, row_at == B - 1
    behind = tl.minimum(slot + 1, B - 1)
    _, keep_next, mo_next, _ = _gates(theta, alpha, eta, active, tokens + behind * H, active + behind)
    given = tl.load(d_mix + cells + PRE * B, mask=row_at < B - PRE, other=0.0)  # PRE: a row is read before its slot
    given += tl.where(ends, to_weights[None, :], 0.0)
    _, in_weights = tl.associative_scan((keep_next[:, None] + every, given), 0, then, reverse=True)
    from_weights = in_weights * here[:, None] + tl.where(ends, to_momentum[None, :], 0.0)
    share = tl.where(column == row_at + 1, 0.0, mo_next[:, None])
    _, in_momentum = tl.associative_scan((share, from_weights), 0, then, reverse=True)
    before = tl.load(mix + cells - (1 - PRE) * B, mask=row_at >= 1 - PRE, other=0.0)
    d_keep = tl.sum(in_weights * before, 1)
    before = tl.load(passed + cells - B, mask=row_at >= 1, other=0.0)
    d_mo += tl.sum(tl.where(column < row_at, in_momentum * before, 0.0), 1)

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
