"""DeltaNet and Gated DeltaNet (spec/linear.md 1.2, 1.5): a write corrects what the memory holds at its key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proteus_lm.mixers.base import MatrixMixer, delta_flops
from proteus_lm.mixers.decay import DecayMixer
from proteus_lm.ops import delta_rule, gated_delta_rule
from proteus_lm.ops.recurrent import delta_rule_step, gated_delta_rule_step
from proteus_lm.sequence import TokenSequence

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig


class DeltaNetMixer(MatrixMixer):
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T;  o_t = K^-1/2 S_t^T q_t;  y = out(RMSNorm(o)), with no gate.

    beta = sigmoid(W x) of each head; q and k have unit length.
    """

    rule, rule_step = staticmethod(delta_rule), staticmethod(delta_rule_step)
    memory_flops = staticmethod(delta_flops)
    gate = None

    @classmethod
    def gate_maps(cls, config: ProteusConfig) -> int:
        """Beta."""
        return 1

    def arguments(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sequence: TokenSequence) -> tuple[Tensor, ...]:
        """q, k, v, beta."""
        return self.unit(q, sequence), self.unit(k, sequence), v, torch.sigmoid(self.gates(x))


class GatedDeltaNetMixer(DecayMixer):
    """S_t = a_t S_{t-1} + beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T;  o_t = K^-1/2 S_t^T q_t;  y = out(RMSNorm(o) * silu(gate)).

    The error is against the decayed memory a S, a = e^g of `DecayMixer`; q and k have unit length.
    """

    rule, rule_step = staticmethod(gated_delta_rule), staticmethod(gated_delta_rule_step)
    memory_flops = staticmethod(delta_flops)

    def arguments(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sequence: TokenSequence) -> tuple[Tensor, ...]:
        """q, k, v, g, beta."""
        beta, g = self.strength_and_decay(x)
        return self.unit(q, sequence), self.unit(k, sequence), v, g, beta
