# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false, reportAssignmentType=false
"""What a memory of two layers answers while it stands still: one launch forward, one backward.

It is read out of the state as the memory's kernels keep it, (N * H, cells) fp32: W1, S1, W2, S2 of each row and head. The state is
passed on, so that the gradient that comes back for it from the writes behind is added to here, and no sum of two is made.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from proteus_lm.ops.triton_deep._common import mul, operand, pointwise, sixteens

WARPS = 4


@triton.jit
def _tile(
    cells, row, column, width,
    OPD: tl.constexpr, PREC: tl.constexpr, HID: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """A tile of W1 (FIRST: of dims by units) or of W2 (units by dims), 0 in what is not open."""
    units = column if FIRST else row
    at = row[:, None] * HID + column[None, :] if FIRST else row[:, None] * D + column[None, :]
    end = sixteens(width)
    kept = (units < end)[None, :] if FIRST else (units < end)[:, None]
    opened = (units < width)[None, :] if FIRST else (units < width)[:, None]
    return operand(tl.where(opened, tl.load(cells + at, mask=kept, other=0.0), 0.0), OPD, PREC)


@triton.jit
def _tile_t(
    cells, row, column, width,
    OPD: tl.constexpr, PREC: tl.constexpr, HID: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The same, transposed: W1 as (units, dims), W2 as (dims, units)."""
    units = row if FIRST else column
    at = column[None, :] * HID + row[:, None] if FIRST else column[None, :] * D + row[:, None]
    end = sixteens(width)
    kept = (units < end)[:, None] if FIRST else (units < end)[None, :]
    opened = (units < width)[:, None] if FIRST else (units < width)[None, :]
    return operand(tl.where(opened, tl.load(cells + at, mask=kept, other=0.0), 0.0), OPD, PREC)


@triton.jit(do_not_specialize=["T"])
def still_kernel(
    q, cells, active, y, T, H, active_row,
    BT: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    ACT: tl.constexpr, PREC: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (tiles of tokens, rows * heads): y = f(q) of BT tokens, each through the units open to it."""
    p = tl.program_id(1).to(tl.int64)
    row, head = p // H, p % H
    OPD: tl.constexpr = q.dtype.element_ty
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    token = (row * T + t) * H + head
    opened = tl.load(active + row * active_row + t)
    width = tl.load(active + row * active_row + T - 1)
    w1 = cells + p * (2 * DK + 2 * DV) * HID
    w2 = w1 + 2 * DK * HID
    queries = operand(tl.load(q + token[:, None] * DK + dk[None, :]), OPD, PREC)
    out = tl.zeros((BT, DV), tl.float32)
    for j in range(tl.cdiv(width, BH)):
        units = j * BH + tl.arange(0, BH)
        x, _, _ = pointwise(mul(queries, _tile(w1, dk, units, width, OPD, PREC, HID, DV, True), PREC), ACT)
        x = tl.where(units[None, :] < opened[:, None], x, 0.0)
        out = tl.dot(operand(x, OPD, PREC), _tile(w2, units, dv, width, OPD, PREC, HID, DV, False), out, input_precision=PREC)
    tl.store(y + token[:, None] * DV + dv[None, :], out.to(y.dtype.element_ty))


@triton.jit(do_not_specialize=["T"])
def still_backward_kernel(
    q, cells, active, dy, d_end, dq, d_cells, T, H, active_row,
    BT: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    ACT: tl.constexpr, PASSED: tl.constexpr, PREC: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (tiles of units + tiles of tokens, rows * heads): the first make the gradient of the state, the others that of q.

    With PASSED d_end is the gradient that came for the state passed on, and is added.
    """
    p = tl.program_id(1).to(tl.int64)
    row, head = p // H, p % H
    OPD: tl.constexpr = q.dtype.element_ty
    tiles: tl.constexpr = (HID + BH - 1) // BH
    number = tl.program_id(0)
    width = tl.load(active + row * active_row + T - 1)
    slot = p * (2 * DK + 2 * DV) * HID
    if number < tiles:
        units = number * BH + tl.arange(0, BH)
        _units_backward(
            q, cells + slot, active + row * active_row, dy, d_end + slot, d_cells + slot, units, width, row, head, T, H,
            BT, DK, DV, HID, BH, ACT, PASSED, OPD, PREC,
        )  # fmt: skip
    else:
        t = (number - tiles) * BT + tl.arange(0, BT)
        _queries_backward(
            q, cells + slot, active + row * active_row, dy, dq, t, width, row, head, T, H,
            BT, DK, DV, HID, BH, ACT, OPD, PREC,
        )  # fmt: skip


@triton.jit
def _units_backward(
    q, w1, active, dy, d_end, d_cells, units, width, row, head, T, H,
    BT: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    ACT: tl.constexpr, PASSED: tl.constexpr, OPD: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Columns of W1 and rows of W2; the momentum's gradient is passed through. Units are rows here: nothing is transposed."""
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    d_1, d_2 = tl.zeros((BH, DK), tl.float32), tl.zeros((BH, DV), tl.float32)
    if tl.min(units, 0) < width:
        w1_t = _tile_t(w1, units, dk, width, OPD, PREC, HID, DV, True)
        w2 = _tile(w1 + 2 * DK * HID, units, dv, width, OPD, PREC, HID, DV, False)
        for i in range(tl.cdiv(T, BT)):
            t = i * BT + tl.arange(0, BT)
            token = (row * T + t) * H + head
            mine = units[:, None] < tl.load(active + t)[None, :]
            q_t = operand(tl.load(q + token[None, :] * DK + dk[:, None]), OPD, PREC)
            x, slope, _ = pointwise(mul(w1_t, q_t, PREC), ACT)
            to_x = mul(w2, operand(tl.load(dy + token[None, :] * DV + dv[:, None]), OPD, PREC), PREC)
            x, to_z = tl.where(mine, x, 0.0), tl.where(mine, to_x * slope, 0.0)
            d_y = operand(tl.load(dy + token[:, None] * DV + dv[None, :]), OPD, PREC)
            d_2 = tl.dot(operand(x, OPD, PREC), d_y, d_2, input_precision=PREC)
            queries = operand(tl.load(q + token[:, None] * DK + dk[None, :]), OPD, PREC)
            d_1 = tl.dot(operand(to_z, OPD, PREC), queries, d_1, input_precision=PREC)
    there = (units < HID)[:, None]
    first = dk[None, :] * HID + units[:, None]
    second = 2 * DK * HID + units[:, None] * DV + dv[None, :]
    s_1, s_2 = tl.zeros((BH, DK), tl.float32), tl.zeros((BH, DV), tl.float32)
    if PASSED:
        d_1 += tl.load(d_end + first, mask=there, other=0.0)
        d_2 += tl.load(d_end + second, mask=there, other=0.0)
        s_1 += tl.load(d_end + DK * HID + first, mask=there, other=0.0)
        s_2 += tl.load(d_end + DV * HID + second, mask=there, other=0.0)
    tl.store(d_cells + first, d_1, mask=there)
    tl.store(d_cells + second, d_2, mask=there)
    tl.store(d_cells + DK * HID + first, s_1, mask=there)
    tl.store(d_cells + DV * HID + second, s_2, mask=there)


@triton.jit
def _queries_backward(
    q, w1, active, dy, dq, t, width, row, head, T, H,
    BT: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HID: tl.constexpr, BH: tl.constexpr,
    ACT: tl.constexpr, OPD: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    token = (row * T + t) * H + head
    opened = tl.load(active + t)
    queries = operand(tl.load(q + token[:, None] * DK + dk[None, :]), OPD, PREC)
    d_y = operand(tl.load(dy + token[:, None] * DV + dv[None, :]), OPD, PREC)
    d_q = tl.zeros((BT, DK), tl.float32)
    for j in range(tl.cdiv(width, BH)):
        units = j * BH + tl.arange(0, BH)
        _, slope, _ = pointwise(mul(queries, _tile(w1, dk, units, width, OPD, PREC, HID, DV, True), PREC), ACT)
        to_x = mul(d_y, _tile_t(w1 + 2 * DK * HID, dv, units, width, OPD, PREC, HID, DV, False), PREC)
        to_z = operand(tl.where(units[None, :] < opened[:, None], to_x * slope, 0.0), OPD, PREC)
        d_q = tl.dot(to_z, _tile_t(w1, units, dk, width, OPD, PREC, HID, DV, True), d_q, input_precision=PREC)
    tl.store(dq + token[:, None] * DK + dk[None, :], d_q.to(dq.dtype.element_ty))


class StillRead(torch.autograd.Function):
    """As `proteus_lm.ops.triton_mac.still_read`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, cells: Tensor, active: Tensor, hidden: int, dv: int, chunk: int, function: str
    ) -> tuple[Tensor, Tensor]:
        q = q.contiguous()
        rows, length, heads, dk = q.shape
        precision = "tf32" if q.dtype == torch.float32 and q.device.type == "cuda" else "ieee"
        ctx.options = {
            "BT": min(64, chunk), "DK": dk, "DV": dv, "HID": hidden, "BH": min(64, triton.next_power_of_2(hidden)),
            "ACT": function, "PREC": precision, "num_warps": WARPS, "num_stages": 2,
        }  # fmt: skip
        ctx.sizes = length, heads, 0 if len(active) == 1 else length
        y = q.new_empty(rows, length, heads, dv)
        still_kernel[(length // ctx.options["BT"], rows * heads)](q, cells, active, y, *ctx.sizes, **ctx.options)
        ctx.save_for_backward(q, cells, active)
        ctx.set_materialize_grads(False)
        return y, cells

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_end: Tensor | None) -> tuple[Tensor | None, ...]:
        q, cells, active = ctx.saved_tensors
        if dy is None:
            return None, d_end, *[None] * 5
        dq, d_cells = torch.empty_like(q), torch.empty_like(cells)
        grid = (triton.cdiv(ctx.options["HID"], ctx.options["BH"]) + q.shape[1] // ctx.options["BT"], len(cells))
        passed = d_cells if d_end is None else d_end.contiguous()
        still_backward_kernel[grid](
            q, cells, active, dy.contiguous(), passed, dq, d_cells, *ctx.sizes, PASSED=d_end is not None, **ctx.options
        )
        return dq, d_cells, *[None] * 5
