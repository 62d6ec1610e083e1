# ruff: noqa: ANN001 -- Triton's constants have no annotation that a reader needs
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
"""Comba's vectors from convolved queries and keys: output correction, unit length, inner decay, in one pass each way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from proteus_lm.ops.triton_neighbours.norms import load_open, open_at, ready, tile_at, tile_of


@triton.jit
def _scale(b, eps):
    """What brings rows to unit length."""
    return tl.rsqrt(tl.sum(b * b, 1) + eps)[:, None]


@triton.jit
def _scale_backward(d, unit, scale):
    """The gradient to rows that were brought to unit length."""
    return (d - unit * tl.sum(d * unit, 1)[:, None]) * scale


@triton.jit
def _of_heads(values, rows, BR: tl.constexpr, H: tl.constexpr):
    """A number a head for BR rows of heads: (BR, 1), fp32."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    return tl.load(values + row % H, mask=row < rows, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["rows"])
def comba_forward(
    q, k, decay, correction, active, q_out, k_out, p_out, rows, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, H: tl.constexpr,
    MASKED: tl.constexpr, FIRST: tl.constexpr, CORRECTED: tl.constexpr,
) -> None:  # fmt: skip
    """Unit q - correction decay k; unit k; decay unit k, or with FIRST unit decay k."""
    at, inside = tile_at(tl.program_id(0), rows, D, BD, BR)
    opened = open_at(active, tl.program_id(0), rows, BD, BR, H) if MASKED else inside
    a = _of_heads(decay, rows, BR, H)
    b_q = load_open(q, at, inside, opened)
    b_k = load_open(k, at, inside, opened)
    if CORRECTED:
        b_q -= _of_heads(correction, rows, BR, H) * a * b_k
    unit = b_k * _scale(b_k, eps)
    p = a * unit
    if FIRST:
        p = a * b_k * _scale(a * b_k, eps)
    tl.store(q_out + at, (b_q * _scale(b_q, eps)).to(q_out.dtype.element_ty), mask=inside)
    tl.store(k_out + at, unit.to(k_out.dtype.element_ty), mask=inside)
    tl.store(p_out + at, p.to(p_out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def comba_backward(
    q, k, decay, correction, active, dq_out, dk_out, dp_out, dq, dk, d_decay, d_correction, rows, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, H: tl.constexpr,
    MASKED: tl.constexpr, FIRST: tl.constexpr, CORRECTED: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients to q and k, and each row's share of those to its head's decay and correction."""
    at, inside = tile_at(tl.program_id(0), rows, D, BD, BR)
    opened = open_at(active, tl.program_id(0), rows, BD, BR, H) if MASKED else inside
    a = _of_heads(decay, rows, BR, H)
    b_q = load_open(q, at, inside, opened)
    b_k = load_open(k, at, inside, opened)
    to_q = load_open(dq_out, at, inside, opened)
    to_k = load_open(dk_out, at, inside, opened)
    to_p = load_open(dp_out, at, inside, opened)
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    scale = _scale(b_k, eps)
    unit = b_k * scale
    if FIRST:
        again = _scale(a * b_k, eps)
        to_p = _scale_backward(to_p, a * b_k * again, again)
        to_a = tl.sum(to_p * b_k, 1)
        b_dk = _scale_backward(to_k, unit, scale) + a * to_p
    else:
        to_a = tl.sum(to_p * unit, 1)
        b_dk = _scale_backward(to_k + a * to_p, unit, scale)
    if CORRECTED:
        c = _of_heads(correction, rows, BR, H)
        b_q -= c * a * b_k
    turn = _scale(b_q, eps)
    b_dq = _scale_backward(to_q, b_q * turn, turn)
    if CORRECTED:
        along = tl.sum(b_dq * b_k, 1)[:, None]
        tl.store(d_correction + row[:, None], -a * along, mask=(row < rows)[:, None])
        to_a -= tl.sum(c * along, 1)
        b_dk -= c * a * b_dq
    tl.store(d_decay + row, to_a, mask=row < rows)
    tl.store(dq + at, b_dq.to(dq.dtype.element_ty), mask=inside)
    tl.store(dk + at, b_dk.to(dk.dtype.element_ty), mask=inside)


class CombaVectors(torch.autograd.Function):
    """As `proteus_lm.ops.triton_neighbours.comba_vectors`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        decay: Tensor,
        correction: Tensor | None,
        active: Tensor | None,
        eps: float,
        decay_first: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, decay = ready(q), ready(k), decay.contiguous()
        correction = None if correction is None else correction.contiguous()
        active = None if active is None else active.expand(q.shape[:2]).contiguous()
        ctx.save_for_backward(q, k, decay, correction, active)
        ctx.eps, ctx.rows = eps, q.numel() // q.shape[-1]
        ctx.options = {**tile_of(q.shape[-1]), "H": q.shape[2], "MASKED": active is not None, "FIRST": decay_first}
        ctx.options["CORRECTED"] = correction is not None
        outs = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
        given = [decay if t is None else t for t in (correction, active)]
        grid = (triton.cdiv(ctx.rows, ctx.options["BR"]),)
        comba_forward[grid](q, k, decay, *given, *outs, ctx.rows, eps, **ctx.options)
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, decay, correction, active = ctx.saved_tensors
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        d_decay = torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
        d_correction = d_decay if correction is None else torch.empty_like(d_decay)
        given = [decay if t is None else t for t in (correction, active)]
        grid = (triton.cdiv(ctx.rows, ctx.options["BR"]),)
        comba_backward[grid](
            q, k, decay, *given, *(ready(g) for g in grads), dq, dk, d_decay, d_correction, ctx.rows, ctx.eps, **ctx.options
        )
        to_correction = None if correction is None else d_correction.sum((0, 1)).to(correction.dtype)
        return dq, dk, d_decay.sum((0, 1)).to(decay.dtype), to_correction, None, None, None
