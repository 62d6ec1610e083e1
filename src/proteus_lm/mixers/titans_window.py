"""What the forms of Titans with a memory beside sliding-window attention share (MAG and MAL)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from proteus_lm.mixers.attention import AttentionMixer, AttentionState
from proteus_lm.mixers.titans import TitansMemory, TitansMixerState
from proteus_lm.schedule import ActivationSchedule

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig

WINDOW = 512
"""The papers print no window; users of these models take 512 to 2048 (spec/deep.md 1.9)."""


class WindowedState(NamedTuple):
    """State of a memory and of the attention beside it."""

    memory: TitansMixerState
    attention: AttentionState


class WindowedTitans(TitansMemory):
    """A memory and sliding-window attention, both with the block's persistent tokens in front."""

    fields = TitansMemory.fields | {"window"}
    defaults: ClassVar[Mapping[str, Any]] = {"window": WINDOW}

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__(config)
        self.attention = AttentionMixer(config)

    @classmethod
    def validate(cls, config: ProteusConfig) -> None:
        """As the memory and the attention."""
        super().validate(config)
        AttentionMixer.validate(config)

    @classmethod
    def parameter_count(cls, config: ProteusConfig) -> int:
        """The memory's and the attention's."""
        return super().parameter_count(config) + AttentionMixer.parameter_count(config)

    @classmethod
    def flops_per_token(cls, config: ProteusConfig, length: int) -> float:
        """The memory's, the attention's, and its reads of the persistent tokens."""
        prefix = 4 * config.num_heads * config.head_dim * config.persistent_tokens
        return super().flops_per_token(config, length) + AttentionMixer.flops_per_token(config, length) + prefix

    @classmethod
    def state_size(cls, config: ProteusConfig, length: int) -> int:
        """The memory's and the window's, whatever the length."""
        return super().state_size(config, length) + AttentionMixer.state_size(config, length)

    def init_state(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> WindowedState:
        """An untouched memory and an empty window."""
        return WindowedState(self.init_memory(batch, device, dtype), self.attention.init_state(batch, device, dtype))

    def memory_norm(self, state: WindowedState, schedule: ActivationSchedule) -> Tensor:
        """As `learned_norm`; what the window holds is no memory of this kind."""
        return self.learned_norm(state.memory, schedule)
