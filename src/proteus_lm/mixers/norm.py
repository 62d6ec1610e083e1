"""Normalisations in fp32 (or wider), whatever the autocast."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    """x in fp32, or as it is when wider."""
    return x if x.dtype == torch.float64 else x.float()


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension, computed in fp32 or wider, returned in x's type.

    `eps` stands inside the root, so that a zero vector gives zero and a zero gradient (spec/deep.md 6, spec/linear.md 5.6).
    """
    h = wide(x)
    return (h * torch.rsqrt(h.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) times a learned weight, over the last dimension (..., dim); fp32 or wider inside, x's type out."""

    no_decay = ("weight",)

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def init_weights(self) -> None:
        """Weight one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        h = wide(x)
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps) * wide(self.weight)).to(x.dtype)
