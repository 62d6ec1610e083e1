"""Titans' memory as a layer (MAL, Titans eq 29-31; spec/deep.md 1.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import silu

from proteus_lm.mixers.base import GatedOutput, cast_once
from proteus_lm.mixers.norm import RMSNorm
from proteus_lm.mixers.titans_window import WindowedState, WindowedTitans
from proteus_lm.sequence import TokenSequence

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig


class MALMixer(WindowedTitans):
    """m = LMM over [P | x],  then sliding attention over what it made: y = m + attention([P | RMSNorm(x + m)]).

    x is the block's normed input; y is added to the residual stream as any mixer's.
    """

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__(config)
        self.output = GatedOutput(config.hidden_size, config.num_heads, config.head_dim, config.norm_eps, silu)
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)

    @classmethod
    def parameter_count(cls, config: ProteusConfig) -> int:
        """Both layers, the memory's output and the norm between."""
        output = GatedOutput.parameter_count(config.hidden_size, config.num_heads, config.head_dim)
        return super().parameter_count(config) + output + config.hidden_size

    @classmethod
    def flops_per_token(cls, config: ProteusConfig, length: int) -> float:
        """Both layers and the memory's output."""
        return super().flops_per_token(config, length) + GatedOutput.flops(config.hidden_size, config.num_heads, config.head_dim)

    def forward(
        self, x: Tensor, sequence: TokenSequence, state: WindowedState | None = None, use_state: bool = False
    ) -> tuple[Tensor, WindowedState | None]:
        """As `Mixer.forward`."""
        before, window = (None, None) if state is None else state
        narrow = cast_once(x)
        read, memory = self.remember(x, sequence, before, use_state, narrow=narrow)
        remembered = self.output(read, narrow)
        z = self.attention_norm(x + remembered)
        attended, window = self.attention.attend(z, sequence, window, use_state, self.persistent)
        y = remembered + self.attention.out(attended)
        return y, WindowedState(memory, window) if memory is not None and window is not None else None
