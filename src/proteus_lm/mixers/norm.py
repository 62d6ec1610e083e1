"""Normalisations in fp32 (or wider), whatever the autocast; on a GPU by a kernel that passes once over the memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from proteus_lm.ops.triton_neighbours import MAX_WIDTH, l2_norm, rms_norm, runs

L2_EPS = 1e-6
"""Under the root of the norm of keys and queries."""
_GATES: dict[Callable[[Tensor], Tensor], str] = {silu: "silu", torch.sigmoid: "sigmoid"}
"""Names of gates in the kernel."""


def wide(x: Tensor) -> Tensor:
    """x in fp32, or as it is when wider."""
    return x if x.dtype == torch.float64 else x.float()


def l2_normalize(x: Tensor, eps: float = L2_EPS, active: Tensor | None = None) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension, computed in fp32 or wider, returned in x's type.

    `eps` stands inside the root, so that a zero vector gives zero and a zero gradient (spec/deep.md 6, spec/linear.md 5.6).

    Args:
        x: (..., D); (B, T, H, D) with `active`.
        active: int (B or 1, T), open coordinates of each token; the others count as zero, and are zero in the result.
    """
    if x.shape[-1] <= MAX_WIDTH and runs(x):
        return l2_norm(x, eps, active)
    if active is not None:
        visible = torch.arange(x.shape[-1], device=x.device) < active[..., None, None]
        x = torch.where(visible, x, x.new_zeros(()))
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
        if x.shape[-1] <= MAX_WIDTH and runs(x, self.weight):
            return rms_norm(x, self.weight, self.eps)
        h = wide(x)
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps) * wide(self.weight)).to(x.dtype)

    def gated(self, x: Tensor, gate: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """The norm of x (..., heads, dim) times activation(gate), gate (..., heads * dim): as the gate, in its type."""
        kind = _GATES.get(activation)
        if kind is not None and x.shape[-1] <= MAX_WIDTH and runs(x, self.weight, gate):
            return rms_norm(x, self.weight, self.eps, gate, kind, dtype=gate.dtype).flatten(-2)
        return (self(x).flatten(-2) * activation(gate)).to(gate.dtype)
