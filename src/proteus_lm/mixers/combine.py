"""How the answers of attention and of a memory become one (Titans eq 25 and 28; spec/deep.md 1.6, 1.7)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from proteus_lm.mixers.norm import RMSNorm
from proteus_lm.ops.triton_neighbours import MAX_WIDTH, rms_norm, runs

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid_gate": lambda a, b: a * torch.sigmoid(b),
    "silu": lambda a, b: a * silu(b),
    "add": torch.add,
}
"""Of attention's answer and the memory's, both normed with a learned weight."""
_KINDS = {"sigmoid_gate": "sigmoid", "silu": "silu", "add": "add"}
"""Names of the same functions in the kernel."""


class Combine(nn.Module):
    """RMSNorm_a(attended) combined with RMSNorm_b(remembered)."""

    def __init__(self, width: int, eps: float, kind: str) -> None:
        super().__init__()
        self.attended, self.remembered = RMSNorm(width, eps), RMSNorm(width, eps)
        self.function, self._kind = COMBINE[kind], _KINDS[kind]

    @staticmethod
    def parameter_count(width: int) -> int:
        """Parameters: the two norms'."""
        return 2 * width

    def forward(self, attended: Tensor, remembered: Tensor) -> Tensor:
        """Both (B, T, width) -> (B, T, width), in the type of `attended`."""
        a, b = self.attended, self.remembered
        if attended.shape[-1] <= MAX_WIDTH and runs(attended, remembered, a.weight, b.weight):
            return rms_norm(attended, a.weight, a.eps, remembered, self._kind, b.weight)
        return self.function(self.attended(attended), self.remembered(remembered).to(attended.dtype))
