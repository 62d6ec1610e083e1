"""The channel mixer: a SwiGLU MLP."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from proteus_lm.mixers.base import ResidualLinear, cast_once
from proteus_lm.ops.triton_neighbours import runs, swiglu_product


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), (..., hidden) -> (..., hidden)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = ResidualLinear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        x = cast_once(x)
        gate, up = self.gate(x), self.up(x)
        fused = gate.dtype == up.dtype and runs(gate, up)
        return self.down(swiglu_product(gate, up) if fused else silu(gate) * up)

    @staticmethod
    def parameter_count(hidden: int, inner: int) -> int:
        """The three maps."""
        return 3 * hidden * inner

    @staticmethod
    def flops(hidden: int, inner: int) -> int:
        """Floating-point operations for a token."""
        return 6 * hidden * inner
