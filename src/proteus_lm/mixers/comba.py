"""Comba (spec/linear.md 1.3): a gated delta rule whose error is taken against the undecayed memory, with an output correction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from proteus_lm.mixers.base import delta_flops
from proteus_lm.mixers.decay import DecayMixer
from proteus_lm.mixers.norm import L2_EPS, wide
from proteus_lm.ops import comba
from proteus_lm.ops.recurrent import comba_step
from proteus_lm.ops.triton_neighbours import MAX_WIDTH, comba_vectors, runs
from proteus_lm.sequence import TokenSequence

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig


class CombaMixer(DecayMixer):
    """S_t = alpha_t S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T;  o_t = K^-1/2 S_t^T q'_t;  y = out(RMSNorm(o) * sigmoid(gate)).

    p = sigmoid(decay) k after (`inner_decay` "after_norm") or before the norm of k, where it cancels in the memory ("before_norm",
    as flash-linear-attention); q' = q - D p before the norms (trap C2), D starting at `output_correction`, no D where that is 0.
    """

    fields = DecayMixer.fields | {"inner_decay", "output_correction"}
    no_decay = (*DecayMixer.no_decay, "inner", "D")
    rule, rule_step = staticmethod(comba), staticmethod(comba_step)
    memory_flops = staticmethod(delta_flops)
    gate = staticmethod(torch.sigmoid)

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__(config)
        heads = config.num_heads
        self.decay_first, self.correction = config.inner_decay == "before_norm", config.output_correction
        self.inner = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads)) if self.correction else None

    def init_weights(self) -> None:
        """As `DecayMixer`; inner decay sigmoid(1), D as configured."""
        super().init_weights()
        nn.init.ones_(self.inner)
        if self.D is not None:
            nn.init.constant_(self.D, self.correction)

    @classmethod
    def head_scalars(cls, config: ProteusConfig) -> int:
        """A_log, dt_bias, inner decay and D."""
        return super().head_scalars(config) + (2 if config.output_correction else 1)

    def arguments(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sequence: TokenSequence) -> tuple[Tensor, ...]:
        """q', k, v, p, g, beta."""
        beta, g = self.strength_and_decay(x)
        decay = torch.sigmoid(wide(self.inner))
        if k.shape[-1] <= MAX_WIDTH and runs(q, k, decay):
            seen = self.seen(sequence, k.shape[-1])
            q, k, p = comba_vectors(q, k, decay, self.D, L2_EPS, self.decay_first, seen)
            return q, k, v, p, g, beta
        decay = decay[:, None]
        p = (decay * k).to(k.dtype)
        if self.D is not None:
            q = (q - wide(self.D)[:, None] * p).to(q.dtype)
        unit = self.unit(k, sequence)
        p = self.unit(p, sequence) if self.decay_first else (decay * unit).to(k.dtype)
        return self.unit(q, sequence), unit, v, p, g, beta
