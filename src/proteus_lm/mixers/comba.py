"""Comba (spec/linear.md 1.3): a gated delta rule whose error is taken against the undecayed memory, with an output correction."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from proteus_lm.mixers.base import GateProjection, MatrixMixer, set_parameter
from proteus_lm.mixers.norm import wide
from proteus_lm.ops import comba
from proteus_lm.ops.recurrent import comba_step
from proteus_lm.sequence import TokenSequence

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig


class CombaMixer(MatrixMixer):
    """S_t = alpha_t S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T;  o_t = K^-1/2 S_t^T q'_t;  y = out(RMSNorm(o) * sigmoid(gate)).

    p = sigmoid(decay) k after (`inner_decay` "after_norm") or before the norm of k, where it cancels in the memory ("before_norm",
    as flash-linear-attention); q' = q - D p before the norms (trap C2), D starting at `output_correction`, no D where that is 0.
    """

    fields = MatrixMixer.fields | {"inner_decay", "output_correction"}
    no_decay = ("A_log", "dt_bias", "inner", "D")
    rule, step = staticmethod(comba), staticmethod(comba_step)
    gate = staticmethod(torch.sigmoid)

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__(config)
        heads = config.num_heads
        self.decay_first, self.correction = config.inner_decay == "before_norm", config.output_correction
        self.gates = GateProjection(config.hidden_size, 2 * heads)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.inner = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads)) if self.correction else None

    def init_weights(self) -> None:
        """As Mamba-2: A uniform in (0, 16), time step log-uniform in [1e-3, 1e-1]. Inner decay sigmoid(1), D as configured."""
        uniform = torch.empty_like(self.A_log).uniform_
        set_parameter(self.A_log, uniform(1e-3, 16).log())  # not from 0: its log would be -inf
        step = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        set_parameter(self.dt_bias, step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        nn.init.ones_(self.inner)
        if self.D is not None:
            nn.init.constant_(self.D, self.correction)

    @classmethod
    def gate_count(cls, config: ProteusConfig) -> tuple[int, int]:
        """Maps of beta and g; A_log, dt_bias, inner decay and D."""
        heads = config.num_heads
        return 2 * heads * config.hidden_size, (4 if config.output_correction else 3) * heads

    @classmethod
    def memory_flops(cls, keys: float, values: float) -> float:
        """The chunk form of the delta family (spec/linear.md 3)."""
        chunk = cls.chunk
        return 6 * keys * values + 6 * chunk * keys + 4 * chunk * values + 2 / 3 * chunk**2

    def arguments(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sequence: TokenSequence) -> tuple[Tensor, ...]:
        """q', k, v, p, g, beta."""
        beta, rate = self.gates(x).chunk(2, -1)
        g = -wide(self.A_log).exp() * softplus(rate + wide(self.dt_bias))
        decay = torch.sigmoid(wide(self.inner))[:, None]
        p = (decay * k).to(k.dtype)
        if self.D is not None:
            q = (q - wide(self.D)[:, None] * p).to(q.dtype)
        unit = self.unit(k, sequence)
        p = self.unit(p, sequence) if self.decay_first else (decay * unit).to(k.dtype)
        return self.unit(q, sequence), unit, v, p, g, torch.sigmoid(beta)
