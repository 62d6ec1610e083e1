"""Titans' memory as a context (MAC, Titans eq 21-25; spec/deep.md 1.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from proteus_lm.mixers.attention import AttentionMixer, AttentionState, Prefix, softmax_read
from proteus_lm.mixers.base import cast_once, gate_values, mean_open
from proteus_lm.mixers.combine import Combine
from proteus_lm.mixers.conv import ConvProjection
from proteus_lm.mixers.norm import RMSNorm, l2_normalize
from proteus_lm.mixers.rotary import rotate, turn_at
from proteus_lm.mixers.segment import Segment, Slots, Step, cut, join, segments
from proteus_lm.mixers.state import map_state
from proteus_lm.mixers.titans import TitansMemory, TitansMixerState
from proteus_lm.ops import triton_deep
from proteus_lm.ops._deep_scan import check_position
from proteus_lm.ops.late_linear import LateLinear, LateSum
from proteus_lm.ops.memory_read import titans_read
from proteus_lm.ops.memory_segment import kernels_run, plan, recall
from proteus_lm.ops.triton_deep import ChunkPlan
from proteus_lm.ops.triton_mac import MAX_DIM, attend
from proteus_lm.ops.triton_neighbours import runs
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


class Given(NamedTuple):
    """What tokens bring that waits for no memory, each (B, T, ...): the query to the memory (H, D); of attention the query, turned
    and before it was turned, key and value (H, D), and cosine and sine of the turn (1, D)."""

    query: Tensor
    q: Tensor
    plain: Tensor
    k: Tensor
    v: Tensor
    cosine: Tensor
    sine: Tensor


class Pieces(NamedTuple):
    """The work on a segment before and behind attention, as functions of tensors that can be compiled."""

    recalled: Callable[..., Tensor]
    tokens_of: Callable[..., tuple[list[Tensor], Tensor]]


class Maps(NamedTuple):
    """The linear maps of a segment, each as its weights (weight; weight and bias) or made to get its gradient once a forward."""

    recall: Tensor | LateLinear
    keys_values: Tensor | LateLinear
    projection: Tensor | LateLinear
    gates: tuple[Tensor, Tensor] | LateLinear


class Once(NamedTuple):
    """What all segments of a forward share: keys and values (n, 2, H, D) of the persistent places, and the same for kernels, maps,
    code, whether whole segments run by the kernels of `ops.memory_segment`, and the segment behind which the state is wanted."""

    front: Tensor | None
    late: LateSum | None
    maps: Maps
    pieces: Pieces
    kernels: bool
    last: Segment | None

    @property
    def places(self) -> int:
        """How many persistent places there are."""
        return 0 if self.front is None else len(self.front)


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
        """As `Mixer.forward`: segment by segment what waits for the memory, all at once what does not."""
        if torch.compiler.is_compiling() and not sequence.is_step:
            return _run_compiled(self, x, sequence, state, use_state)
        return self.run(x, sequence, state, use_state, EAGER)

    def run(
        self, x: Tensor, sequence: TokenSequence, state: MACState | None, use_state: bool, pieces: Pieces
    ) -> tuple[Tensor, MACState | None]:
        """The forward, by the given code for the work on a segment."""
        fresh = state is None
        state = self.init_state(sequence.rows, x.device, x.dtype) if state is None else state
        given, query = self._given(x, sequence, state.query)
        weight = self.attention.keys_values_map
        front = None
        if self.persistent is not None:
            front = linear(self.persistent.to(weight.dtype), weight).unflatten(-1, (2, *given.k.shape[2:]))
        kernels = not sequence.is_step and self._kernels_run(given.query)
        parts = [] if sequence.is_step else segments(sequence, self.segment)
        last = parts[-1] if parts and use_state else None
        late = None if front is None or sequence.is_step else LateSum(front)
        once = Once(front, late, self._maps(weight, pieces is EAGER and not sequence.is_step), pieces, kernels, last)
        if sequence.is_step:
            attended, remembered, state = self._within(given, once, Step(sequence, self.segment), state)
        else:
            if once.kernels and not fresh:
                at = sequence.offset if sequence.start is None else sequence.start
                check_position(0 if at is None else at, state.memory.memory.position)
            attended, remembered = [], []
            for part, *tokens in zip(parts, *(cut(tokens, parts) for tokens in given)):
                y, m, state = self._rows(Given(*tokens), once, part, state)
                attended.append(y)
                remembered.append(m)
            attended, remembered = (join(pieces, parts, len(x)) for pieces in (attended, remembered))
        y = self.attention.out(self.combine(attended, remembered.flatten(-2)))
        state = state._replace(query=query)
        return y, (state if sequence.is_step else _owned(state)) if use_state else None

    def _maps(self, keys_values: Tensor, late: bool) -> Maps:
        """The maps, with the weight (2 H D, hidden) of that to keys and values. `late`: with gradients once a forward."""
        gates, projection, recall = self.gate_map(), self.projection.linear.weight, self.recall.weight
        if not late:
            return Maps(recall, keys_values, projection, gates)
        device, kind = recall.device.type, recall.dtype
        if torch.is_autocast_enabled(device) and kind != torch.float64:
            kind = torch.get_autocast_dtype(device)
        first, second, third = (LateLinear(weight, None, kind) for weight in (recall, keys_values, projection))
        return Maps(first, second, third, LateLinear(*gates, torch.promote_types(gates[0].dtype, torch.float32)))

    def _given(self, x: Tensor, sequence: TokenSequence, conv: Tensor) -> tuple[Given, Tensor]:
        """What tokens x (B, T, hidden) bring along, and the state of the queries' convolution."""
        narrow = cast_once(x)
        (query,), after = self.query(narrow, sequence, conv)
        plain, q, k, v = self.attention.project(narrow, sequence)
        turn = (t.expand(len(x), *t.shape[1:]) for t in turn_at(sequence, plain))
        return Given(l2_normalize(query), q, plain, k, v, *turn), after

    def _rows(self, given: Given, once: Once, part: Segment, state: MACState) -> tuple[Tensor, Tensor, MACState]:
        """A segment of the rows that take part in it; the others keep their state."""
        rows = part.rows
        if rows is None:
            return self._within(given, once, part, state)
        y, m, new = self._within(given, once, part, map_state(lambda s: s.index_select(0, rows), state))
        return y, m, self.put_rows(state, rows, new)

    def _within(self, given: Given, once: Once, slots: Slots, state: MACState) -> tuple[Tensor, Tensor, MACState]:
        """Tokens of one segment a row -> the answers of attention (B, T, H D) and of the memory (B, T, H, D), the state behind."""
        if slots.whole and once.kernels and isinstance(slots, Segment):
            return self._whole(given, once, slots, state)
        state, schedule = _begin(state, slots), slots.sequence.schedule
        active = None if schedule.blocks == 1 else schedule.active(self.units, slots.positions)
        if slots.whole:
            made = once.pieces.recalled(self, self.read_still(state.weights, given.query, active), once.maps)
            attended, recalled, tokens = _attended(given, made, once, slots, state)
        else:
            mask, front = slots.visible(once.places), _prefix(once.front)
            read = self.read_still(state.weights, slots.spread(given.query), active)
            keys, values = (slots.gather(t) for t in recalled_of(self, read, once.maps).unbind(2))
            keys = rotate(keys, (given.cosine, given.sine))
            recalled = AttentionState(slots.keep(state.recalled.keys, keys), slots.keep(state.recalled.values, values))
            tokens = AttentionState(slots.keep(state.tokens.keys, given.k), slots.keep(state.tokens.values, given.v))
            seen = [torch.cat((h[:, : slots.width], s[:, : slots.width]), 1) for h, s in zip(recalled, tokens)]
            attended = slots.gather(softmax_read(slots.spread(_queries(given, front)), seen[0], seen[1], mask, front)).flatten(-2)
        made = once.pieces.tokens_of(self, attended, slots.sequence, state.memory.conv, once.maps)
        remembered, memory = self.remember(attended, slots.sequence, state.memory, True, made)
        assert memory is not None
        return attended, remembered, MACState(state.query, state.weights, recalled, tokens, memory)

    def _whole(self, given: Given, once: Once, part: Segment, state: MACState) -> tuple[Tensor, Tensor, MACState]:
        """As `_within`, of a whole segment of every row by the Triton kernels: the memory stays as they keep it, and the state has
        views of that."""
        memory, sequence = state.memory.memory, part.sequence
        like, depth, plan = [*memory.weights, *memory.momentum], len(memory.weights), self._plan(part)
        start = triton_deep.packed(memory.weights, memory.momentum)
        read, cells = recall(given.query, start, like, plan, self.chunk, self.function)
        attended, recalled, seen = _attended(given, once.pieces.recalled(self, read, once.maps), once, part, state)
        tokens, conv = once.pieces.tokens_of(self, attended, sequence, state.memory.conv, once.maps)
        options = {"chunk": self.chunk, "read": self.read, "memory_activation": self.function}
        remembered, end = triton_deep.walk(tokens, cells, plan, depth=depth, **options)
        weights, parts = triton_deep.unpack(start, like)[:depth], triton_deep.unpack(end, like)
        memory = memory._replace(weights=tuple(parts[:depth]), momentum=tuple(parts[depth:]), position=_behind(sequence))
        return attended, remembered, MACState(state.query, tuple(weights), recalled, seen, TitansMixerState(conv, memory))

    def _plan(self, part: Segment) -> ChunkPlan:
        """What opens where in a whole segment: one plan for all layers, and for all segments that the host knows to open alike."""
        sequence = part.sequence
        activation = sequence.placed(self.units)
        make = lambda: plan(activation, sequence.rows, sequence.length, self.units, self.chunk, sequence.device)  # noqa: E731
        key = ("memory plan", self.units, self.chunk, sequence.rows, sequence.length)
        if sequence.schedule.blocks == 1:
            return part.shared(key, make)
        assert activation is not None, "several blocks open by position"
        stretches = activation.segments
        return sequence.once(key, make) if stretches is None else part.shared((*key, stretches), make)

    def _kernels_run(self, q: Tensor) -> bool:
        """Whether whole segments run by the Triton kernels, of queries q (N, T, H, D)."""
        options = {"surprise_clip": self.clip, "decay_target": self.decay_target, "residual_norm": self.norm}
        return kernels_run(q, self.initial, self.chunk, memory_activation=self.function, **options)

    def read_still(self, weights: tuple[Tensor, ...], query: Tensor, active: Tensor | None) -> Tensor:
        """What queries (N, W, H, D) find in the memory before their segment."""
        return titans_read(weights, query, active, memory_activation=self.function, residual_norm=self.norm)


def recalled_of(mixer: MACMixer, read: Tensor, maps: Maps) -> Tensor:
    """Keys, not turned, and values of what was read (N, W, H, D): (N, W, 2, H, D)."""
    x = mixer.recall_norm(_mapped(read.flatten(-2), maps.recall))
    return _mapped(x, maps.keys_values).unflatten(-1, (2, *read.shape[2:]))


def tokens_of(mixer: MACMixer, x: Tensor, sequence: TokenSequence, conv: Tensor, maps: Maps) -> tuple[list[Tensor], Tensor]:
    """As `TitansMemory.tokens_of`, by the given maps."""
    y, gates, projection = _mapped(x, maps.projection), maps.gates, mixer.projection
    z = gates(x) if isinstance(gates, LateLinear) else gate_values(x, *gates)
    widths = [projection.heads * width for width in projection.widths]
    if projection.conv is None:
        parts, after = y.split(widths, -1), conv.to(y.dtype)
    else:
        parts, after = projection.conv.parts(y, sequence, conv, widths)
    return [*(l2_normalize(part.unflatten(-1, (projection.heads, -1))) for part in parts), *mixer.sizes_of(z)], after


def _attended(
    given: Given, made: Tensor, once: Once, slots: Slots, state: MACState
) -> tuple[Tensor, AttentionState, AttentionState]:
    """Of a whole segment that recalled `made`: attention's answer (B, T, H D), and the slots behind it, recalled and tokens.

    The next token begins a segment and empties them, so they are those of before unless the state is handed out.
    """
    turn, (keys, values) = (given.cosine, given.sine), made.unbind(2)
    kernel, wanted = given.q.shape[-1] <= MAX_DIM and runs(made, given.q, given.k, given.v), slots is once.last
    if wanted or not kernel:
        keys = rotate(keys, turn)
    if kernel:
        found = attend(given.q, given.plain, made, *turn, given.k, given.v, once.late)
    else:
        seen = torch.cat((keys, given.k), 1), torch.cat((values, given.v), 1)
        front = _prefix(once.front)
        found = softmax_read(_queries(given, front), *seen, slots.visible(once.places), front)
    behind = (AttentionState(keys, values), AttentionState(given.k, given.v)) if wanted else (state.recalled, state.tokens)
    return found.flatten(-2), *behind


def _queries(given: Given, prefix: Prefix | None) -> Tensor:
    """As `softmax_read` takes them."""
    return given.q if prefix is None else torch.cat((given.q, given.plain), -1)


def _prefix(front: Tensor | None) -> Prefix | None:
    return None if front is None else Prefix(*front.unbind(1))


def _mapped(x: Tensor, by: Tensor | LateLinear) -> Tensor:
    return by(x) if isinstance(by, LateLinear) else linear(x.to(by.dtype), by)


EAGER = Pieces(recalled_of, tokens_of)


@cache
def _compiled() -> Pieces:
    return Pieces(torch.compile(EAGER.recalled), torch.compile(EAGER.tokens_of))


def _run_pieces(
    mixer: MACMixer, x: Tensor, sequence: TokenSequence, state: MACState | None, use_state: bool
) -> tuple[Tensor, MACState | None]:
    return mixer.run(x, sequence, state, use_state, _compiled())


_run_compiled: Callable[..., tuple[Tensor, MACState | None]] = cast(Any, torch.compiler.disable(_run_pieces))
"""A forward under `torch.compile`: its loop stays in Python, for a graph of all segments grows with their number."""


def _begin(state: MACState, slots: Slots) -> MACState:
    """Where a segment begins: the memory as it now stands (a segment is whole chunks), and empty slots where some stay free."""
    begins = slots.begins
    if begins is False:
        return state

    def fresh(new: Tensor, old: Tensor) -> Tensor:
        return new.expand_as(old) if begins is True else torch.where(begins.view(-1, *[1] * (old.dim() - 1)), new, old)

    weights = tuple(fresh(new, old) for new, old in zip(state.memory.memory.weights, state.weights))
    if slots.whole:
        return state._replace(weights=weights)
    recalled, tokens = (map_state(lambda s: fresh(s.new_zeros(()), s), side) for side in (state.recalled, state.tokens))
    return state._replace(weights=weights, recalled=recalled, tokens=tokens)


def _behind(sequence: TokenSequence) -> Tensor:
    """Position behind the tokens of each row, int64 (N,)."""
    begin, length, rows = sequence.offset, sequence.length, sequence.rows
    make = lambda: torch.full((rows,), length, device=sequence.device) if begin is None else begin + length  # noqa: E731
    return sequence.once("position behind", make)


def _owned(state: MACState) -> MACState:
    """The state with tensors of their own: within a forward they may be those of the memory, views, or all layers'."""
    return map_state(lambda t: t.clone(memory_format=torch.contiguous_format), state)
