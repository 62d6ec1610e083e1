"""The input-dependent decay of Mamba-2, which Gated DeltaNet, Comba and SWLA put on a matrix memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from proteus_lm.mixers.base import MatrixMixer, set_parameter
from proteus_lm.mixers.norm import wide

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig


class DecayMixer(MatrixMixer):
    """A matrix memory that decays by e^g, g = -exp(A_log) softplus(W x + dt_bias), and whose writes have strengths in (0, 1)."""

    no_decay = ("A_log", "dt_bias")

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__(config)
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads))

    def init_weights(self) -> None:
        """As Mamba-2: A uniform in (0, 16), time step log-uniform in [1e-3, 1e-1]."""
        uniform = torch.empty_like(self.A_log).uniform_
        set_parameter(self.A_log, uniform(1e-3, 16).log())  # not from 0: its log would be -inf
        step = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        set_parameter(self.dt_bias, step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    @classmethod
    def gate_maps(cls, config: ProteusConfig) -> int:
        """Strength and decay."""
        return 2

    @classmethod
    def head_scalars(cls, config: ProteusConfig) -> int:
        """A_log and dt_bias."""
        return 2

    def strength_and_decay(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Strengths (B, T, H (gate_maps - 1)) in (0, 1) and log decay g (B, T, H) of x (B, T, hidden), fp32 or wider."""
        heads = len(self.A_log)
        gates = self.gates(x)
        g = -wide(self.A_log).exp() * softplus(gates[..., -heads:] + wide(self.dt_bias))
        return torch.sigmoid(gates[..., :-heads]), g
