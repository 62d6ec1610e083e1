"""Sliding-window linear attention (Atlas eq 20 and 52 - 55; spec/linear.md 1.4): each token writes the last c pairs again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proteus_lm.mixers.base import hebbian_flops
from proteus_lm.mixers.decay import DecayMixer
from proteus_lm.ops import SWLAState, swla
from proteus_lm.ops.recurrent import swla_step
from proteus_lm.sequence import TokenSequence

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig


class SWLAMixer(DecayMixer):
    """S_t = a_t S_{t-1} + sum_{j < c} gamma_{t,j} k_{t-j} v_{t-j}^T;  o_t = K^-1/2 S_t^T q_t;  y = out(RMSNorm(o) * silu(gate)).

    c is `swla_window`; 2 gives the paper's lambda_t = gamma_{t,0} and beta_t = gamma_{t,1}, 1 plain gated linear attention. How
    the papers make these weights is unpublished: here each is sigmoid(W x) of its head, and a = e^g of `DecayMixer`. q and k have
    unit length.
    """

    fields = DecayMixer.fields | {"swla_window"}
    rule, rule_step = staticmethod(swla), staticmethod(swla_step)
    # The one-pass form (spec/linear.md 1.4); the window's own part, c / 64 of the second term, is left out.
    memory_flops = staticmethod(hebbian_flops)

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__(config)
        self.window = config.swla_window

    @classmethod
    def gate_maps(cls, config: ProteusConfig) -> int:
        """The c weights and the decay."""
        return config.swla_window + 1

    @classmethod
    def state_size(cls, config: ProteusConfig, length: int) -> int:
        """As every matrix memory, and the last c - 1 pairs."""
        _, heads, keys, values = cls._sizes(config)
        return super().state_size(config, length) + (config.swla_window - 1) * heads * (keys + values)

    def init_memory(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> SWLAState:
        """Zeros, and an empty window."""
        matrix = super().init_memory(batch, device, dtype)
        assert isinstance(matrix, Tensor)
        heads, keys, values = matrix.shape[1:]
        return SWLAState(matrix, *(matrix.new_zeros(batch, self.window - 1, heads, width) for width in (keys, values)))

    def arguments(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sequence: TokenSequence) -> tuple[Tensor, ...]:
        """q, k, v, g, gamma."""
        strengths, g = self.strength_and_decay(x)
        return self.unit(q, sequence), self.unit(k, sequence), v, g, strengths.unflatten(-1, (-1, self.window))
