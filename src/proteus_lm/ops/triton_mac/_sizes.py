# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false, reportAssignmentType=false
"""Step, forgetting and momentum from the values of their maps, one launch forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 512
"""Tokens and heads of a program."""


@triton.jit
def _values(z, i, n, H: tl.constexpr, ALPHA: tl.constexpr, ETA: tl.constexpr):
    """sigmoid of theta's and alpha's values, sigmoid and its complement of eta's; where the first of a token's values stands."""
    at = i // H * (H * (1 + ALPHA + ETA)) + i % H
    theta = tl.sigmoid(tl.load(z + at, mask=i < n, other=0.0))
    alpha, eta, rest = tl.zeros_like(theta), tl.zeros_like(theta), tl.zeros_like(theta) + 1.0
    if ALPHA:
        alpha = tl.sigmoid(tl.load(z + at + H, mask=i < n, other=0.0))
    if ETA:
        value = tl.load(z + at + H * (1 + ALPHA), mask=i < n, other=0.0)
        eta, rest = tl.sigmoid(value), tl.sigmoid(-value)
    return at, theta, alpha, eta, rest


@triton.jit(do_not_specialize=["n"])
def sizes_kernel(
    z, theta_out, alpha_out, eta_out, n, scale, H: tl.constexpr, ALPHA: tl.constexpr, ETA: tl.constexpr, BM: tl.constexpr
) -> None:
    """theta = scale sigmoid(z) sigmoid(-z_eta), alpha = sigmoid(z_alpha), eta = sigmoid(z_eta); 0 for what is not there."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    _, theta, alpha, eta, rest = _values(z, i, n, H, ALPHA, ETA)
    tl.store(theta_out + i, scale * theta * rest, mask=i < n)
    tl.store(alpha_out + i, alpha, mask=i < n)
    tl.store(eta_out + i, eta, mask=i < n)


@triton.jit(do_not_specialize=["n"])
def sizes_backward_kernel(
    z, d_theta, d_alpha, d_eta, dz, n, scale, H: tl.constexpr, ALPHA: tl.constexpr, ETA: tl.constexpr, BM: tl.constexpr
) -> None:
    """Gradient to z."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    at, theta, alpha, eta, rest = _values(z, i, n, H, ALPHA, ETA)
    to_theta = tl.load(d_theta + i, mask=i < n, other=0.0) * scale * theta * rest
    tl.store(dz + at, to_theta * (1.0 - theta), mask=i < n)
    if ALPHA:
        tl.store(dz + at + H, tl.load(d_alpha + i, mask=i < n, other=0.0) * alpha * (1.0 - alpha), mask=i < n)
    if ETA:
        to_eta = tl.load(d_eta + i, mask=i < n, other=0.0) * eta * rest - to_theta * eta
        tl.store(dz + at + H * (1 + ALPHA), to_eta, mask=i < n)


class StepSizes(torch.autograd.Function):
    """As `proteus_lm.ops.triton_mac.step_sizes`."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, heads: int, alpha: bool, eta: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        z = z.contiguous()
        ctx.save_for_backward(z)
        theta, alphas, etas = (z.new_empty(*z.shape[:-1], heads) for _ in range(3))
        count = theta.numel()
        ctx.given = count, scale
        ctx.options = {"H": heads, "ALPHA": int(alpha), "ETA": int(eta), "BM": TILE, "num_warps": 4}
        sizes_kernel[(triton.cdiv(count, TILE),)](z, theta, alphas, etas, *ctx.given, **ctx.options)
        return theta, alphas, etas

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (z,) = ctx.saved_tensors
        dz = torch.empty_like(z)
        sizes_backward_kernel[(triton.cdiv(ctx.given[0], TILE),)](
            z, *(g.contiguous() for g in grads), dz, *ctx.given, **ctx.options
        )
        return dz, None, None, None, None
