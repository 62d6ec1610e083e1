"""Titans' memory as a context (MAC, Titans eq 21-25; spec/deep.md 1.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from proteus_lm.mixers.attention import AttentionMixer, AttentionState, softmax_read
from proteus_lm.mixers.base import mean_open
from proteus_lm.mixers.combine import Combine
from proteus_lm.mixers.conv import ConvProjection
from proteus_lm.mixers.norm import RMSNorm, l2_normalize
from proteus_lm.mixers.rotary import rotate, turn_at
from proteus_lm.mixers.segment import Segment, Slots, Step, segments
from proteus_lm.mixers.state import map_state
from proteus_lm.mixers.titans import TitansMemory, TitansMixerState
from proteus_lm.ops.memory_read import titans_read
from proteus_lm.schedule import ActivationSchedule
from proteus_lm.sequence import TokenSequence

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig

SEGMENT = 512
"""The papers print no segment length; 512 to 1024 are usual (spec/deep.md 1.9)."""


class MACState(NamedTuple):
    """State of MAC. A slot i of the segment holds the token at position i of it, zeros where there is none yet.

    Args:
        query: (N, conv_size - 1, H D), of the convolution of the memory's queries.
        weights: W1 .. WL (N, H, in, out), the memory before the current segment.
        recalled, tokens: keys and values (N, segment, H, D) of what the segment's tokens recalled, and of themselves.
        memory: the memory that is written.
    """

    query: Tensor
    weights: tuple[Tensor, ...]
    recalled: AttentionState
    tokens: AttentionState
    memory: TitansMixerState


class MACMixer(TitansMemory):
    """Of each segment S, with M the memory before it:

        h = M(q(S)), not written;  y = attention over [P | h | S], a token seeing h and S up to its own place;
        the memory is written from y token by token;  o = out(RMSNorm_a(y) sigmoid(RMSNorm_b(M_t(q'(y_t)))))

    No token sees what a later one recalled, nor reads a memory that a later one wrote.
    """

    fields = TitansMemory.fields | {"segment_length"}
    defaults: ClassVar[Mapping[str, Any]] = {"segment_length": SEGMENT}
    writes_persistent = False

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__(config)
        hidden, heads, dim, width = config.hidden_size, config.num_heads, config.head_dim, self.memory_input(config)
        self.segment = config.segment_length
        self.query = ConvProjection(hidden, heads, (dim,), config.conv_size)
        self.recall = nn.Linear(width, hidden, bias=False)
        self.recall_norm = RMSNorm(hidden, config.norm_eps)
        self.attention = AttentionMixer(config)
        self.combine = Combine(width, config.norm_eps, "sigmoid_gate")

    @classmethod
    def memory_input(cls, config: ProteusConfig) -> int:
        """The heads of the attention side by side: the memory's own maps stand where its output map would."""
        return config.num_heads * config.head_dim

    @classmethod
    def validate(cls, config: ProteusConfig) -> None:
        """Segments are whole inner chunks, so that a segment starts at a boundary of the memory."""
        super().validate(config)
        AttentionMixer.validate(config)
        if config.segment_length % config.chunk_size:
            raise ValueError(
                f"segment_length is {config.segment_length} with chunk_size {config.chunk_size}: a segment must be whole chunks; "
                f"use {max(1, config.segment_length // config.chunk_size) * config.chunk_size}, or another chunk_size"
            )

    @classmethod
    def parameter_count(cls, config: ProteusConfig) -> int:
        """The memory's and the attention's, the maps of what is recalled, and the norms."""
        hidden, width = config.hidden_size, cls.memory_input(config)
        query = ConvProjection.parameter_count(hidden, config.num_heads, (config.head_dim,), config.conv_size)
        recall = width * hidden + hidden
        attention = AttentionMixer.parameter_count(config)
        return super().parameter_count(config) + query + recall + attention + Combine.parameter_count(width)

    @classmethod
    def flops_per_token(cls, config: ProteusConfig, length: int) -> float:
        """The memory's and the attention's, where a token sees P, and its segment twice; the read of the still memory.

        An inner matrix is read where both its units are open.
        """
        hidden, width = config.hidden_size, cls.memory_input(config)
        whole, rest = divmod(length, config.segment_length)
        seen = (whole * config.segment_length * (config.segment_length + 1) + rest * (rest + 1)) / 2 / length
        maps = 2 * (AttentionMixer.parameter_count(config) + 2 * hidden * width + width * hidden)
        maps += ConvProjection.flops(hidden, config.num_heads, (config.head_dim,), config.conv_size)
        share, square = (mean_open(config.schedule, cls.memory_dim(config), length, power=power) for power in (1, 2))
        sizes = cls._layer_sizes(config)
        outer = sum(i * o for i, o in (sizes[:1] if len(sizes) == 1 else (sizes[0], sizes[-1])))
        read = 2 * config.num_heads * (outer * share + sum(i * o for i, o in sizes[1:-1]) * square)
        return super().flops_per_token(config, length) + maps + 4 * width * (config.persistent_tokens + 2 * seen) + read

    @classmethod
    def state_size(cls, config: ProteusConfig, length: int) -> int:
        """The memory twice, now and before the segment, and the slots of the segment, whatever the length."""
        width = cls.memory_input(config)
        slots = 4 * config.segment_length * width + (config.conv_size - 1) * width
        return super().state_size(config, length) + cls.matrix_numbers(config) + slots

    def init_state(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> MACState:
        """An untouched memory and an empty segment."""
        memory = self.init_memory(batch, device, dtype)
        empty = torch.zeros(batch, self.segment, self.attention.heads, self.attention.dim, device=device, dtype=dtype)
        slots = AttentionState(empty, empty)
        return MACState(self.query.init_state(batch, device, dtype), memory.memory.weights, slots, slots, memory)

    def memory_norm(self, state: MACState, schedule: ActivationSchedule) -> Tensor:
        """As `learned_norm`."""
        return self.learned_norm(state.memory, schedule)

    def forward(
        self, x: Tensor, sequence: TokenSequence, state: MACState | None = None, use_state: bool = False
    ) -> tuple[Tensor, MACState | None]:
        """As `Mixer.forward`, segment by segment."""
        if state is None:
            state = self.init_state(sequence.rows, x.device, x.dtype)
        if sequence.is_step:
            y, state = self._within(x, Step(sequence, self.segment), state)
            return y, state if use_state else None
        parts, flat = segments(sequence, self.segment), x.flatten(0, 1)
        outputs = []
        for part in parts:
            y, state = self._rows(flat[part.index], part, state)
            outputs.append(y.flatten(0, 1))
        joined = torch.cat(outputs)
        order = torch.cat([part.index.flatten() for part in parts])
        return torch.empty_like(joined).index_copy(0, order, joined).view(*x.shape[:2], -1), state if use_state else None

    def _rows(self, x: Tensor, part: Segment, state: MACState) -> tuple[Tensor, MACState]:
        """A segment of the rows that take part in it; the others keep their state."""
        rows = part.rows
        if rows is None:
            return self._within(x, part, state)
        y, new = self._within(x, part, map_state(lambda s: s.index_select(0, rows), state))
        return y, self.put_rows(state, rows, new)

    def _within(self, x: Tensor, slots: Slots, state: MACState) -> tuple[Tensor, MACState]:
        """Tokens of one segment a row: x (B, T, hidden) -> y (B, T, hidden), and the state behind them."""
        sequence, state = slots.sequence, _begin(state, slots.begins)
        context, query = self._recall(x, slots, state)
        plain, q, k, v = self.attention.project(x, sequence)
        keys, values = self.attention.keys_values(context)
        keys = rotate(keys, turn_at(sequence, keys))
        recalled = AttentionState(slots.keep(state.recalled.keys, keys), slots.keep(state.recalled.values, values))
        tokens = AttentionState(slots.keep(state.tokens.keys, k), slots.keep(state.tokens.values, v))
        seen = [torch.cat((h[:, : slots.width], s[:, : slots.width]), 1) for h, s in zip(recalled, tokens)]
        mask = sequence.once(("segment", self.segment), lambda: slots.visible.repeat(1, 1, 2)[:, None])
        prefix = None if self.persistent is None else self.attention.keys_values(self.persistent)
        read = softmax_read(slots.spread(q), seen[0], seen[1], mask, prefix, slots.spread(plain))
        attended = slots.gather(read).flatten(-2)
        remembered, memory = self.remember(attended, sequence, state.memory, True)
        assert memory is not None
        y = self.attention.out(self.combine(attended, remembered.flatten(-2)))
        return y, MACState(query, state.weights, recalled, tokens, memory)

    def _recall(self, x: Tensor, slots: Slots, state: MACState) -> tuple[Tensor, Tensor]:
        """h (B, T, hidden) that the tokens recall from the memory before their segment, and the convolution's state."""
        sequence = slots.sequence
        (query,), after = self.query(x, sequence, state.query)
        active = None if sequence.schedule.blocks == 1 else sequence.schedule.active(self.units, slots.positions)
        rows = slots.spread(l2_normalize(query))
        read = slots.gather(titans_read(state.weights, rows, active, memory_activation=self.function, residual_norm=self.norm))
        return self.recall_norm(self.recall(read.flatten(-2))), after


def _begin(state: MACState, begins: Tensor | bool) -> MACState:
    """Where a segment begins: the memory as it now stands (a segment is whole chunks), and empty slots."""
    if begins is False:
        return state

    def fresh(new: Tensor, old: Tensor) -> Tensor:
        if isinstance(begins, bool):
            return new.expand_as(old).clone()  # tensors of a state share no memory
        return torch.where(begins.view(-1, *[1] * (old.dim() - 1)), new, old)

    weights = tuple(fresh(new, old) for new, old in zip(state.memory.memory.weights, state.weights))
    recalled, tokens = (map_state(lambda s: fresh(s.new_zeros(()), s), side) for side in (state.recalled, state.tokens))
    return state._replace(weights=weights, recalled=recalled, tokens=tokens)
