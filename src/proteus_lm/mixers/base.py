"""What every token mixer is, and the parts that several of them share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from proteus_lm.mixers.conv import ConvProjection
from proteus_lm.mixers.norm import RMSNorm, l2_normalize, wide
from proteus_lm.mixers.state import map_state, named_state, named_tensors
from proteus_lm.ops.state import SWLAState
from proteus_lm.schedule import ActivationSchedule
from proteus_lm.sequence import TokenSequence

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig


def set_parameter(parameter: Tensor, value: Tensor) -> None:
    """Write an initial value, unless transformers has just loaded the parameter from a file (its own initialisers do the same)."""
    if not getattr(parameter, "_is_hf_initialized", False):
        parameter.data.copy_(value)


def cast_once(x: Tensor) -> Tensor:
    """x for several linear maps: in autocast's type where autocast is on and would round x to it; else x itself.

    Left to themselves the maps would each cast x, and their gradients would be cast back and added in fp32: here they are added in
    the narrow type, and cast back once. What computes in fp32 whatever the autocast (gates, norms) must be given x itself.

    Args:
        x: (...). fp64, and types no wider than autocast's, come back as they are.
    """
    device = x.device.type
    if x.dtype != torch.float32 or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return x  # devices without autocast (meta) must not be asked whether it is on
    return x.to(torch.get_autocast_dtype(device))


class GateProjection(nn.Linear):
    """A linear map for gates: computed in fp32 or wider whatever the autocast, and returned so; not decayed.

    `start` is what a sigmoid of it gives at initialisation; without it there is no bias.
    """

    no_decay = ("weight", "bias")

    def __init__(self, hidden: int, out: int, start: float | None = None) -> None:
        super().__init__(hidden, out, bias=start is not None)
        self.start = start

    def init_weights(self) -> None:
        """Bias so that the gate starts at `start`."""
        if self.start is not None:
            nn.init.constant_(self.bias, math.log(self.start / (1 - self.start)))

    def forward(self, input: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, out), fp32 or wider."""
        return gate_values(input, self.weight, self.bias)


def gate_values(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear map of a `GateProjection`, or of several under each other: x (.., hidden) -> (.., out), fp32 or wider."""
    with torch.autocast(x.device.type, enabled=False):
        return linear(wide(x), wide(weight), None if bias is None else wide(bias))


class GatedOutput(nn.Module):
    """Per-head RMSNorm of what the memory returned, a gate from the input (None: no gate), and the map to the model's width."""

    def __init__(self, hidden: int, heads: int, dim: int, eps: float, gate: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.norm, self.activation = RMSNorm(dim, eps), gate
        self.gate = None if gate is None else nn.Linear(hidden, heads * dim, bias=False)
        self.out = ResidualLinear(heads * dim, hidden, bias=False)

    @staticmethod
    def parameter_count(hidden: int, heads: int, dim: int, gated: bool = True) -> int:
        """Parameters: gate, map and the norm shared by heads."""
        return (1 + gated) * hidden * heads * dim + dim

    @staticmethod
    def flops(hidden: int, heads: int, dim: int, gated: bool = True) -> int:
        """Floating-point operations for a token."""
        return 2 * (1 + gated) * hidden * heads * dim

    def forward(self, read: Tensor, x: Tensor) -> Tensor:
        """read (B, T, heads, dim), x (B, T, hidden) -> (B, T, hidden)."""
        if self.gate is None or self.activation is None:
            return self.out(self.norm(read).flatten(-2))
        return self.out(self.norm.gated(read, self.gate(x), self.activation))


class ResidualLinear(nn.Linear):
    """The last map of a residual branch: initialised smaller, by 1 / sqrt(2 layers)."""


def mean_open(schedule: ActivationSchedule, dim: int, length: int, power: int = 1) -> float:
    """Mean over the first `length` positions of (open coordinates / dim) ** power."""
    return sum((b - a) * n**power for a, b, n in schedule.segments(dim, 0, length)) / (length * dim**power)


CHUNK = 64
"""Tokens in a chunk of the linear rules; only the counts of operations read it."""


def hebbian_flops(keys: float, values: float) -> float:
    """Floating-point operations for a token and head of a rule that writes values as they are, by chunks (spec/linear.md 3).

    `keys`, `values`: open key rows and value columns.
    """
    return 4 * keys * values + 2 * CHUNK * (keys + values)


def delta_flops(keys: float, values: float) -> float:
    """As `hebbian_flops`, of a rule that writes the error of a read."""
    return 6 * keys * values + 6 * CHUNK * keys + 4 * CHUNK * values + 2 / 3 * CHUNK**2


def block_norms(energy: Tensor, schedule: ActivationSchedule) -> Tensor:
    """Square root of the sum over each block of energy (N, dim) -> (N, E)."""
    parts = [energy[:, a:b].sum(1) for a, b in schedule.block_bounds(energy.shape[1])]
    return torch.stack(parts, 1).sqrt()


class Mixer(nn.Module, ABC):
    """A token mixer: how a layer carries information from earlier tokens to later ones.

    A state is a NamedTuple of tensors, first dimension N (one row a sequence or document), the first tensor in the type of the
    layer's inputs. A mixer never changes a state in place, so that an old state stays what it was: keeping it is rewinding.

    What an engine that serves models asks for (docs/state.md): `state_shapes` and `state_dtypes` of a configuration, `init_state`,
    `step`, `snapshot`, `restore`, `reset`. A subclass defines `init_state` and `forward`; the rest follows from them.
    """

    fields: ClassVar[frozenset[str]]
    """Configuration fields that this mixer reads and others need not; setting one that the chosen mixer lacks raises."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """This mixer's own values of fields left at None."""

    @classmethod
    def validate(cls, config: ProteusConfig) -> None:
        """Raise ValueError for values that this mixer cannot have together."""

    @classmethod
    @abstractmethod
    def memory_dim(cls, config: ProteusConfig) -> int | None:
        """Coordinates of the dimension whose blocks the schedule opens; None without a memory."""

    @classmethod
    @abstractmethod
    def parameter_count(cls, config: ProteusConfig) -> int:
        """Parameters of one layer's mixer."""

    @classmethod
    @abstractmethod
    def flops_per_token(cls, config: ProteusConfig, length: int) -> float:
        """Floating-point operations of one layer's mixer, forward, a token, mean over a document of `length` tokens.

        A multiplication with its addition counts two; normalisations and activations are left out.
        """

    @classmethod
    @abstractmethod
    def state_size(cls, config: ProteusConfig, length: int) -> int:
        """Numbers in the state of one sequence after `length` tokens."""

    @abstractmethod
    def forward(self, x: Tensor, sequence: TokenSequence, state: Any = None, use_state: bool = False) -> tuple[Tensor, Any]:
        """Mix tokens.

        Args:
            x: (B, T, hidden); B = 1 when packed.
            sequence: what stands where.
            state: after the tokens before these, None at the start of every row.
            use_state: give the state after these tokens.

        Returns:
            y (B, T, hidden), and the state, None unless `use_state`.
        """

    @abstractmethod
    def init_state(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> Any:
        """The state before the first token, of `batch` rows; `dtype` is that of the layer's inputs."""

    @abstractmethod
    def memory_norm(self, state: Any, schedule: ActivationSchedule) -> Tensor:
        """Frobenius norm, by block, of what the memory holds beyond its initial value: (N, E), fp32 or wider."""

    def surprise(self, state: Any) -> Tensor | None:
        """Mean norm of the memory's inner gradients at the last few tokens, (N,); None where no gradient writes the memory."""
        return None

    def put_rows(self, state: Any, rows: Tensor, part: Any) -> Any:
        """`state` with `part` in its rows `rows` (int64); a new state."""
        return map_state(lambda old, new: old.to(new.dtype).index_copy(0, rows, new), state, part)

    # The state as an engine sees it.

    @property
    def growing(self) -> frozenset[str]:
        """Tensors of the state whose second dimension is as long as the longest row's text; none where the size is constant."""
        return frozenset()

    @classmethod
    def state_shapes(cls, config: ProteusConfig, batch: int = 1, length: int = 0) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the state of `batch` rows after `length` tokens, by name; nothing is computed or kept."""
        mixer, state = cls._template(config, batch, torch.float32)
        shapes = {name: tuple(x.shape) for name, x in named_tensors(state).items()}
        return {n: (shape[0], length, *shape[2:]) if n in mixer.growing else shape for n, shape in shapes.items()}

    @classmethod
    def state_dtypes(cls, config: ProteusConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Type of each tensor of the state, by name, of a layer whose inputs are of type `dtype`."""
        return {name: x.dtype for name, x in named_tensors(cls._template(config, 1, dtype)[1]).items()}

    @classmethod
    def _template(cls, config: ProteusConfig, batch: int, dtype: torch.dtype) -> tuple[Mixer, Any]:
        """A mixer and a state without values."""
        with torch.device("meta"):
            mixer = cls(config)
            return mixer, mixer.init_state(batch, "meta", dtype)

    def step(self, x: Tensor, state: Any, position: Tensor, schedule: ActivationSchedule) -> tuple[Tensor, Any]:
        """One token a row, rows at their own positions.

        Args:
            x: (N, hidden).
            state: after the tokens before it, or `init_state`.
            position: int64 (N,), tokens that each row has behind it.
            schedule: when blocks of memory open.

        Returns:
            y (N, hidden), and the state after it.
        """
        sequence = TokenSequence(schedule, len(x), 1, offset=position, device=x.device)
        y, state = self(x[:, None], sequence, state, True)
        return y[:, 0], state

    def snapshot(self, state: Any, rows: Tensor | None = None) -> dict[str, Tensor]:
        """A copy of a state, or of its rows `rows` (int64), in memory of its own and out of the graph: tensors by name."""
        part = state if rows is None else map_state(lambda x: x.index_select(0, rows), state)
        return {n: x.detach().clone(memory_format=torch.contiguous_format) for n, x in named_tensors(part).items()}

    def restore(self, snapshot: Mapping[str, Tensor], device: torch.device | str | None = None) -> Any:
        """The state of which `snapshot` is a copy, bit for bit; on `device`, or where the copy lies. The copy stays untouched.

        Raises:
            ValueError: for a copy of another mixer's state, or of one with other sizes.
        """
        batch = len(next(iter(snapshot.values()), ()))
        template = self.init_state(batch, "meta", torch.float32)
        state = named_state(snapshot, template)
        for (name, x), wanted in zip(named_tensors(state).items(), named_tensors(template).values(), strict=True):
            free = slice(2, None) if name in self.growing else slice(1, None)
            if len(x) != batch or x.shape[free] != wanted.shape[free]:
                raise ValueError(
                    f"{name} of the snapshot is of shape {tuple(x.shape)}; this mixer's is {tuple(wanted.shape)}: restore a "
                    "snapshot of the same model"
                )
        return map_state(lambda x: x.clone() if device is None else x.to(device, copy=True), state)

    def reset(self, state: Any, rows: Tensor) -> Any:
        """`state` with its rows `rows` (int64) as they are before a first token: the initial memory put back, not zeros."""
        first = next(iter(named_tensors(state).values()))
        return self.put_rows(state, rows, self.init_state(len(rows), first.device, first.dtype))


class MatrixState(NamedTuple):
    """State of a mixer whose memory is a matrix.

    Args:
        conv: (N, conv_size - 1, channels), the last inputs of the short convolution, in the layer's type; (N, 0, channels) without.
        memory: what the rule carries, fp32 or wider: the matrix (N, H, K, V), or an `SWLAState`.
    """

    conv: Tensor
    memory: Tensor | SWLAState

    @property
    def matrix(self) -> Tensor:
        """The matrix (N, H, K, V)."""
        return self.memory if isinstance(self.memory, Tensor) else self.memory.matrix


class MatrixMixer(Mixer):
    """A mixer with a matrix memory (spec/linear.md 1): convolved q, k, v; a rule of `proteus_lm.ops`; norm, gate, output map.

    A subclass names its rule, that rule's decoding step (`rule_step`) and operations, and makes their arguments in `arguments`.
    """

    fields = frozenset(
        {"conv_size", "value_expansion", "memory_blocks", "memory_policy", "memory_unlocks", "memory_axis", "norm_order", "read"}
    )
    defaults: ClassVar[Mapping[str, Any]] = {"value_expansion": 1}
    rule: ClassVar[Callable[..., tuple[Tensor, Any]]]
    rule_step: ClassVar[Callable[..., tuple[Tensor, Any]]]
    memory_flops: ClassVar[Callable[[float, float], float]]
    """Operations of the rule for a token and head with so many open key rows and value columns."""
    gate: ClassVar[Callable[[Tensor], Tensor] | None] = silu
    """Of the output; None for no gate."""
    gates: GateProjection
    """`gate_maps` values a head from the input."""

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__()
        hidden, heads, keys, values = self._sizes(config)
        self.read, self.axis, self._mask_first = config.read, config.memory_axis, config.norm_order == "mask_then_norm"
        self.projection = ConvProjection(hidden, heads, (keys, keys, values), self.taps(config))
        self.output = GatedOutput(hidden, heads, values, config.norm_eps, type(self).gate)
        if self.gate_maps(config):
            self.gates = GateProjection(hidden, self.gate_maps(config) * heads)
        self._memory_dim = self.memory_dim(config)

    @abstractmethod
    def arguments(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sequence: TokenSequence) -> tuple[Tensor, ...]:
        """The rule's tensors in its own order, from x (B, T, hidden) and the convolved q, k (B, T, H, K), v (B, T, H, V)."""

    def seen(self, sequence: TokenSequence, keys: int) -> Tensor | None:
        """Of `keys` coordinates, how many from the first a norm sees at each token: int64 (N or 1, T); None for all.

        With `norm_order` mask_then_norm the open ones.
        """
        if not self._mask_first:
            return None
        if sequence.is_step:
            active = sequence.active(keys)
            return None if active is None else active[:, None]
        activation = sequence.activation(keys)
        return None if activation is None else activation.active

    def unit(self, x: Tensor, sequence: TokenSequence) -> Tensor:
        """Keys or queries (B, T, H, K) at unit length; with `norm_order` mask_then_norm of their open coordinates alone."""
        return l2_normalize(x, active=self.seen(sequence, x.shape[-1]))

    @classmethod
    def validate(cls, config: ProteusConfig) -> None:
        """Masking before the norm has a meaning for key rows only."""
        if config.norm_order != "norm_then_mask" and config.memory_axis != "key":
            raise ValueError(
                f"norm_order is {config.norm_order!r} with memory_axis {config.memory_axis!r}: only keys and queries are normed; "
                "use memory_axis 'key', or leave norm_order at 'norm_then_mask'"
            )

    @staticmethod
    def _sizes(config: ProteusConfig) -> tuple[int, int, int, int]:
        return config.hidden_size, config.num_heads, config.head_dim, config.head_dim * config.value_expansion

    @classmethod
    def memory_dim(cls, config: ProteusConfig) -> int:
        """Key rows, or value columns with `memory_axis` "value"."""
        return cls._sizes(config)[2 if config.memory_axis == "key" else 3]

    @classmethod
    def taps(cls, config: ProteusConfig) -> int:
        """Taps of the short convolution, 0 for none."""
        return config.conv_size

    @classmethod
    def gate_maps(cls, config: ProteusConfig) -> int:
        """Gates of a head, each a linear map of the input."""
        return 0

    @classmethod
    def head_scalars(cls, config: ProteusConfig) -> int:
        """Parameters of a head beyond maps."""
        return 0

    @classmethod
    def parameter_count(cls, config: ProteusConfig) -> int:
        """Projections with their convolution, gates, what else a head has, output."""
        hidden, heads, keys, values = cls._sizes(config)
        projection = ConvProjection.parameter_count(hidden, heads, (keys, keys, values), cls.taps(config))
        gates = heads * (cls.gate_maps(config) * hidden + cls.head_scalars(config))
        return projection + gates + GatedOutput.parameter_count(hidden, heads, values, cls.gate is not None)

    @classmethod
    def flops_per_token(cls, config: ProteusConfig, length: int) -> float:
        """Dense maps, and the rule on the open part of the memory."""
        hidden, heads, keys, values = cls._sizes(config)
        share = mean_open(config.schedule, cls.memory_dim(config), length)
        opened = (keys * share, values) if config.memory_axis == "key" else (keys, values * share)
        dense = ConvProjection.flops(hidden, heads, (keys, keys, values), cls.taps(config))
        dense += 2 * heads * cls.gate_maps(config) * hidden + GatedOutput.flops(hidden, heads, values, cls.gate is not None)
        return dense + heads * cls.memory_flops(*opened)

    @classmethod
    def state_size(cls, config: ProteusConfig, length: int) -> int:
        """The matrices and the convolution's inputs, whatever the length."""
        _, heads, keys, values = cls._sizes(config)
        return heads * (keys * values + max(cls.taps(config) - 1, 0) * (2 * keys + values))

    def init_memory(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> Tensor | SWLAState:
        """What the rule carries before the first token, in `dtype`, fp32 or wider: zeros."""
        keys, _, values = self.projection.widths
        return torch.zeros(batch, self.projection.heads, keys, values, device=device, dtype=dtype)

    def init_state(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> MatrixState:
        """Zeros."""
        memory = self.init_memory(batch, device, torch.promote_types(dtype, torch.float32))
        return MatrixState(self.projection.init_state(batch, device, dtype), memory)

    def memory_norm(self, state: MatrixState, schedule: ActivationSchedule) -> Tensor:
        """Norm of the matrix over all heads, by block of rows or columns."""
        energy = state.matrix.square().sum((1, 3) if self.axis == "key" else (1, 2))
        return block_norms(energy, schedule)

    def forward(
        self, x: Tensor, sequence: TokenSequence, state: MatrixState | None = None, use_state: bool = False
    ) -> tuple[Tensor, MatrixState | None]:
        """As `Mixer.forward`; one token behind a state runs the decoding step."""
        narrow = cast_once(x)  # for the maps; the gates read x
        (q, k, v), conv = self.projection(narrow, sequence, None if state is None else state.conv)
        inputs = self.arguments(x, q, k, v, sequence)
        if state is not None and sequence.is_step:
            active = sequence.active(self._memory_dim)
            now = (tensor[:, 0] for tensor in inputs)
            read, memory = type(self).rule_step(*now, state.memory, active=active, axis=self.axis, read=self.read)
            read = read[:, None]
        else:
            read, memory = type(self).rule(
                *inputs,
                activation=sequence.activation(self._memory_dim),
                axis=self.axis,
                read=self.read,
                initial_state=None if state is None else state.memory,
                cu_seqlens=sequence.cu_seqlens,
                output_final_state=use_state,
            )
        return self.output(read, narrow), MatrixState(conv, memory) if use_state and memory is not None else None
