# ruff: noqa: ANN001 -- Triton's constants have no annotation that a reader needs
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
"""The product inside a SwiGLU MLP: one pass forward, one backward, which takes the sigmoid again from its input."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from proteus_lm.ops.triton_neighbours.norms import ready

BLOCK = 2048
"""Numbers of a tensor that a program of four warps holds: two loads of 16 bytes a thread in half precision."""


# `n` stays specialised: whether 16 divides it decides whether the masked loads are wide.
@triton.jit
def swiglu_forward(a, b, y, n, BLOCK: tl.constexpr) -> None:
    """y = a sigmoid(a) b."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    b_a = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    b_b = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (b_a * tl.sigmoid(b_a) * b_b).to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(a, b, dy, da, db, n, BLOCK: tl.constexpr) -> None:
    """da = dy b s (1 + a (1 - s)), db = dy a s, s = sigmoid(a)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    b_a = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    b_b = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(b_a)
    tl.store(da + at, (d * b_b * s * (1 + b_a * (1 - s))).to(da.dtype.element_ty), mask=inside)
    tl.store(db + at, (d * b_a * s).to(db.dtype.element_ty), mask=inside)


class SwiGLU(torch.autograd.Function):
    """As `proteus_lm.ops.triton_neighbours.swiglu_product`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = ready(a), ready(b)
        ctx.save_for_backward(a, b)
        y = torch.empty_like(a)
        swiglu_forward[(triton.cdiv(a.numel(), BLOCK),)](a, b, y, a.numel(), BLOCK=BLOCK)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        da, db = torch.empty_like(a), torch.empty_like(b)
        swiglu_backward[(triton.cdiv(a.numel(), BLOCK),)](a, b, ready(dy), da, db, a.numel(), BLOCK=BLOCK)
        return da, db
