"""Titans' memory as a gate (MAG, Titans eq 26-28; spec/deep.md 1.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from proteus_lm.mixers.base import cast_once
from proteus_lm.mixers.combine import Combine
from proteus_lm.mixers.titans_window import WindowedState, WindowedTitans
from proteus_lm.sequence import TokenSequence

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig


class MAGMixer(WindowedTitans):
    """y = sliding attention over [P | x],  m = memory over [P | x],  o = out(RMSNorm_a(y) sigmoid(RMSNorm_b(m)))."""

    fields = WindowedTitans.fields | {"mag_combine"}

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__(config)
        self.combine = Combine(config.num_heads * config.head_dim, config.norm_eps, config.mag_combine)

    @classmethod
    def parameter_count(cls, config: ProteusConfig) -> int:
        """Both branches and their norms; the output map is the attention's."""
        return super().parameter_count(config) + Combine.parameter_count(config.num_heads * config.head_dim)

    def forward(
        self, x: Tensor, sequence: TokenSequence, state: WindowedState | None = None, use_state: bool = False
    ) -> tuple[Tensor, WindowedState | None]:
        """As `Mixer.forward`."""
        before, window = (None, None) if state is None else state
        narrow = cast_once(x)
        remembered, memory = self.remember(x, sequence, before, use_state, narrow=narrow)
        attended, window = self.attention.attend(narrow, sequence, window, use_state, self.persistent)
        y = self.attention.out(self.combine(attended, remembered.flatten(-2)))
        return y, WindowedState(memory, window) if memory is not None and window is not None else None
