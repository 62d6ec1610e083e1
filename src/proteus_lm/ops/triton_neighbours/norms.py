# ruff: noqa: ANN001, ANN201 -- Triton's constants have no annotation that a reader needs
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
"""L2 norm and gated RMS norm: one pass over the rows forward, one backward, which takes the norm again from its input."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 2048
"""Numbers of a tensor that a program of four warps holds at once."""
WAVES = 4
"""Programs a multiprocessor of the backward pass, each of which sums a gradient of the weights."""


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 2 elsewhere, so that the interpreter sees programs with several steps."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def tile_of(width: int) -> dict[str, int]:
    """Rows and columns of a program's tile and its warps: of the width alone, so that a row's sum has one order always."""
    columns = max(16, triton.next_power_of_2(width))
    return {"D": width, "BD": columns, "BR": max(1, TILE // columns), "num_warps": max(4, columns // 512)}


def ready(x: Tensor) -> Tensor:
    """x contiguous and on a boundary of 16 bytes: kernels for other addresses could sum in another order."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@triton.jit
def tile_at(first, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """Places of BR rows from `first` in a contiguous (rows, D), and which of them exist."""
    row = first.to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BD)
    return row[:, None] * D + column[None, :], (row < rows)[:, None] & (column < D)[None, :]


@triton.jit
def open_at(active, first, rows, BD: tl.constexpr, BR: tl.constexpr, H: tl.constexpr):
    """Which coordinates of BR rows from `first` are open at their token, H rows a token."""
    row = first.to(tl.int64) * BR + tl.arange(0, BR)
    held = tl.load(active + row // H, mask=row < rows, other=0)
    return tl.arange(0, BD)[None, :] < held[:, None]


@triton.jit
def load_open(x, at, inside, opened):
    """Values in fp32, zeros where they are not open. Loaded whole, so that the loads stay wide."""
    return tl.where(opened, tl.load(x + at, mask=inside, other=0.0).to(tl.float32), 0.0)


@triton.jit(do_not_specialize=["rows"])
def l2_forward(
    x, y, active, rows, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, H: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    """y = x / sqrt(sum x^2 + eps)."""
    at, inside = tile_at(tl.program_id(0), rows, D, BD, BR)
    opened = open_at(active, tl.program_id(0), rows, BD, BR, H) if MASKED else inside
    b_x = load_open(x, at, inside, opened)
    scale = tl.rsqrt(tl.sum(b_x * b_x, 1) + eps)
    tl.store(y + at, (b_x * scale[:, None]).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def l2_backward(
    x, dy, dx, active, rows, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, H: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    """dx = (dy - y sum(dy y)) / sqrt(sum x^2 + eps)."""
    at, inside = tile_at(tl.program_id(0), rows, D, BD, BR)
    opened = open_at(active, tl.program_id(0), rows, BD, BR, H) if MASKED else inside
    b_x = load_open(x, at, inside, opened)
    b_dy = load_open(dy, at, inside, opened)
    scale = tl.rsqrt(tl.sum(b_x * b_x, 1) + eps)
    b_y = b_x * scale[:, None]
    along = tl.sum(b_y * b_dy, 1)
    tl.store(dx + at, ((b_dy - b_y * along[:, None]) * scale[:, None]).to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _gate(h, KIND: tl.constexpr):
    """What a gate multiplies by, and its slope."""
    s = tl.sigmoid(h)
    value, slope = s, s * (1 - s)
    if KIND == "silu":
        value, slope = h * s, s + h * slope
    return value, slope


@triton.jit
def _unit(b, eps, D: tl.constexpr):
    """Rows at root mean square one, and what they were multiplied by."""
    scale = tl.rsqrt(tl.sum(b * b, 1) / D + eps)[:, None]
    return b * scale, scale


@triton.jit
def _unit_backward(db, unit, scale, D: tl.constexpr):
    """The gradient to what `_unit` was given."""
    return scale * (db - unit * (tl.sum(db * unit, 1) / D)[:, None])


@triton.jit(do_not_specialize=["rows"])
def rms_forward(
    x, weight, gate, gate_weight, y, rows, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, KIND: tl.constexpr, NORMED: tl.constexpr,
) -> None:  # fmt: skip
    """y = n f(h) or n + h, n = weight x / rms(x), h = gate or gate_weight gate / rms(gate)."""
    at, inside = tile_at(tl.program_id(0), rows, D, BD, BR)
    column = tl.arange(0, BD)
    unit, _ = _unit(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), eps, D)
    out = unit * tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    if KIND != "none":
        h = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            h, _ = _unit(h, eps, D)
            h = h * tl.load(gate_weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        if KIND == "add":
            out += h
        else:
            value, _ = _gate(h, KIND)
            out *= value
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "steps"])
def rms_backward(
    x, weight, gate, gate_weight, dy, dx, d_gate, sums, gate_sums, rows, steps, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, KIND: tl.constexpr, NORMED: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients to x and gate; a program's share of those to the weights, fp32 (programs, D), to `sums`, `gate_sums`."""
    program, column = tl.program_id(0), tl.arange(0, BD)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    wg = w
    if NORMED:
        wg = tl.load(gate_weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BR, BD], tl.float32)
    gate_total = tl.zeros([BR, BD], tl.float32)
    for step in range(steps):
        at, inside = tile_at(step * tl.num_programs(0) + program, rows, D, BD, BR)
        unit, scale = _unit(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), eps, D)
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if KIND != "none":
            h = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
            gate_unit, gate_scale = h, scale
            if NORMED:
                gate_unit, gate_scale = _unit(h, eps, D)
                h = gate_unit * wg
            dh = d
            if KIND != "add":
                value, slope = _gate(h, KIND)
                dh = d * unit * w * slope
                d = d * value
            if NORMED:
                gate_total += dh * gate_unit
                dh = _unit_backward(dh * wg, gate_unit, gate_scale, D)
            tl.store(d_gate + at, dh.to(d_gate.dtype.element_ty), mask=inside)
        total += d * unit
        tl.store(dx + at, _unit_backward(d * w, unit, scale, D).to(dx.dtype.element_ty), mask=inside)
    tl.store(sums + program * D + column, tl.sum(total, 0), mask=column < D)
    if NORMED:
        tl.store(gate_sums + program * D + column, tl.sum(gate_total, 0), mask=column < D)


class L2Norm(torch.autograd.Function):
    """As `proteus_lm.ops.triton_neighbours.l2_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, active: Tensor | None) -> Tensor:
        x, heads = ready(x), 1
        if active is not None:
            heads = x.shape[2]
            active = active.expand(x.shape[:2]).contiguous()
        ctx.save_for_backward(x, active)
        ctx.eps, ctx.heads = eps, heads
        y, tile = torch.empty_like(x), tile_of(x.shape[-1])
        rows = x.numel() // x.shape[-1]
        grid = (triton.cdiv(rows, tile["BR"]),)
        l2_forward[grid](x, y, x if active is None else active, rows, eps, H=heads, MASKED=active is not None, **tile)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, active = ctx.saved_tensors
        dx, tile = torch.empty_like(x), tile_of(x.shape[-1])
        rows = x.numel() // x.shape[-1]
        grid = (triton.cdiv(rows, tile["BR"]),)
        given = x if active is None else active
        l2_backward[grid](x, ready(dy), dx, given, rows, ctx.eps, H=ctx.heads, MASKED=active is not None, **tile)
        return dx, None, None


class RMSNorm(torch.autograd.Function):
    """As `proteus_lm.ops.triton_neighbours.rms_norm`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gate: Tensor | None,
        gate_weight: Tensor | None,
        eps: float,
        kind: str,
        dtype: torch.dtype,
    ) -> Tensor:
        x, weight = ready(x), weight.contiguous()
        gate = None if gate is None else ready(gate)
        gate_weight = None if gate_weight is None else gate_weight.contiguous()
        ctx.save_for_backward(x, weight, gate, gate_weight)
        ctx.eps, ctx.options = eps, {**tile_of(x.shape[-1]), "KIND": kind, "NORMED": gate_weight is not None}
        y, rows = torch.empty_like(x, dtype=dtype), x.numel() // x.shape[-1]
        grid = (triton.cdiv(rows, ctx.options["BR"]),)
        given = [x if gate is None else gate, weight if gate_weight is None else gate_weight]
        rms_forward[grid](x, weight, *given, y, rows, eps, **ctx.options)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate, gate_weight = ctx.saved_tensors
        dx, d_gate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
        width = x.shape[-1]
        rows = x.numel() // width
        blocks = triton.cdiv(rows, ctx.options["BR"])
        steps = triton.cdiv(blocks, WAVES * processors(x.device))
        programs = triton.cdiv(blocks, steps)
        sums = torch.empty(programs, width, device=x.device, dtype=torch.float32)
        gate_sums = sums if gate_weight is None else torch.empty_like(sums)
        given = [x if gate is None else gate, weight if gate_weight is None else gate_weight]
        rms_backward[(programs,)](
            x, weight, *given, ready(dy), dx, dx if d_gate is None else d_gate, sums, gate_sums,
            rows, steps, ctx.eps, **ctx.options,
        )  # fmt: skip
        d_gate_weight = None if gate_weight is None else gate_sums.sum(0).to(gate_weight.dtype)
        return dx, sums.sum(0).to(weight.dtype), d_gate, d_gate_weight, None, None, None
