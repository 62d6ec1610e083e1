"""Titans' neural memory (spec/deep.md 1.1 - 1.5), a small MLP a head, trained while it reads; alone it is the form LMM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from proteus_lm.mixers.base import GatedOutput, GateProjection, Mixer, block_norms, cast_once, gate_values, mean_open
from proteus_lm.mixers.conv import ConvProjection
from proteus_lm.mixers.norm import l2_normalize
from proteus_lm.ops import TitansState, titans_memory, titans_weights
from proteus_lm.ops.deep_step import titans_step
from proteus_lm.ops.memory_activations import matrix_names, memory_function, places
from proteus_lm.ops.memory_read import titans_surprise
from proteus_lm.ops.triton_mac import step_sizes
from proteus_lm.ops.triton_neighbours import runs
from proteus_lm.schedule import ActivationSchedule
from proteus_lm.sequence import TokenSequence

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig

STEP, FORGETTING, MOMENTUM = 0.5, 0.01, 0.9
"""What the gates of theta, alpha and eta give at the start (spec/deep.md 1.2): alpha at sigmoid(0) would forget in two tokens."""
LAST_LAYER = 0.5
"""Scale of the last matrix of the initial memory, so that its first answers are small beside unit targets."""


class TitansMixerState(NamedTuple):
    """State of the Titans mixer.

    Args:
        conv: (N, conv_size - 1, channels), the last inputs of the short convolution, in the layer's type.
        memory: weights, momentum and open chunk, see `ops.state.TitansState`.
    """

    conv: Tensor
    memory: TitansState


class TitansMemory(Mixer):
    """S_t = eta_t S_{t-1} - theta_t grad ||M(k_t) - v_t||^2 / 2;  M_t = (1 - alpha_t) M_{t-1} + S_t;  `remember` gives M_t(q_t).

    What the forms of Titans share. q, k and v have unit length: what a chunk moves, theta * chunk / (1 - eta), must then stay
    under a bound that falls with depth (`step_bound`); theta = step_bound / chunk * (1 - eta) * sigmoid(.) keeps it there.

    Persistent tokens are learned rows in the model's width. They stand before every document, at positions -n .. -1: the memory
    takes them as one inner chunk of their own, with one open block, and the convolution sees them before the first token.
    """

    fields = frozenset(
        {"conv_size", "memory_blocks", "memory_policy", "memory_unlocks", "memory_depth", "memory_expansion", "memory_activation"}
        | {"chunk_size", "read", "use_momentum", "use_forgetting", "theta_scale", "titans_variant", "persistent_tokens"}
        | {"decay_target", "surprise_clip", "memory_residual_norm"}
    )
    writes_persistent: ClassVar[bool] = True
    """Whether the persistent tokens are written to the memory."""

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__()
        hidden, heads, dim = self.memory_input(config), config.num_heads, config.head_dim
        self.schedule = config.schedule
        self.chunk, self.read, self.function = config.chunk_size, config.read, config.memory_activation
        self.use_momentum, self.use_forgetting, self.scale = config.use_momentum, config.use_forgetting, self.step_bound(config)
        self.clip, self.decay_target = config.surprise_clip, config.decay_target
        self.projection = ConvProjection(hidden, heads, (dim, dim, dim), config.conv_size)
        self.theta = GateProjection(hidden, heads, STEP)
        self.alpha = GateProjection(hidden, heads, FORGETTING) if config.use_forgetting else None
        self.eta = GateProjection(hidden, heads, MOMENTUM) if config.use_momentum else None
        *inner, (i, o) = self._layer_sizes(config)
        arity = memory_function(self.function).arity
        shapes = [*((i, o // arity) for i, o in inner for _ in range(arity)), (i, o)]
        self._matrices = tuple(matrix_names(len(shapes), arity))
        self.places = places(len(shapes), arity)
        for name, shape in zip(self._matrices, shapes):
            self.register_parameter(name, nn.Parameter(torch.empty(heads, *shape)))
        self.persistent = self.gain = self.bias = None
        self.no_decay = self._matrices
        if config.persistent_tokens:
            self.persistent = nn.Parameter(torch.empty(config.persistent_tokens, config.hidden_size))
            self.no_decay = (*self.no_decay, "persistent")
        if config.memory_residual_norm:
            self.gain, self.bias = (nn.Parameter(torch.empty(heads, dim)) for _ in range(2))
            self.no_decay = (*self.no_decay, "gain", "bias")
        self.units = self.memory_dim(config)

    @property
    def initial(self) -> tuple[Tensor, ...]:
        """The learned initial memory W1 .. WL, each (H, in, out); of a gated one W1, U1 .. WL."""
        return tuple(getattr(self, name) for name in self._matrices)

    def weights_now(self, memory: TitansState) -> tuple[Tensor, ...]:
        """The matrices of `initial` (N, H, in, out) behind the last token, the open chunk's tokens written."""
        options = {"surprise_clip": self.clip, "initial": self._target, "residual_norm": self.norm}
        return titans_weights(memory, memory_activation=self.function, **options)[0]

    @property
    def norm(self) -> tuple[Tensor, Tensor] | None:
        """Gain and bias (H, D) of a memory x + LN(f(x)), which it does not write; None for plain f(x)."""
        return None if self.gain is None or self.bias is None else (self.gain, self.bias)

    @property
    def _target(self) -> tuple[Tensor, ...] | None:
        """What the weights decay to, None for zero. Persistent tokens do not change it."""
        return self.initial if self.decay_target == "init" else None

    @classmethod
    def memory_input(cls, config: ProteusConfig) -> int:
        """Width of what the memory is given."""
        return config.hidden_size

    def init_weights(self) -> None:
        """Initial memory of variance 1 / inputs, its last matrix smaller, never zero; persistent rows like normed tokens.

        The values of a gated one have variance 1: keys are of unit length, so that hidden units and slopes are as large as without
        them, and safe steps too. At 1 / inputs a unit would be a product of two small numbers, and the memory hardly learn.
        """
        if self.persistent is not None:
            nn.init.normal_(self.persistent)
        if self.gain is not None and self.bias is not None:
            nn.init.ones_(self.gain)
            nn.init.zeros_(self.bias)
        for name, weight in zip(self._matrices, self.initial):
            scale = LAST_LAYER if weight is self.initial[-1] else 1.0
            nn.init.normal_(weight, std=1.0 if name.startswith("U") else scale * weight.shape[1] ** -0.5)

    @classmethod
    def validate(cls, config: ProteusConfig) -> None:
        """Settings of hidden layers need one; a step size above 1 would overshoot the target; persistent tokens are one chunk."""
        if cls.writes_persistent and config.persistent_tokens > config.chunk_size:
            raise ValueError(
                f"persistent_tokens is {config.persistent_tokens} with chunk_size {config.chunk_size}: they are written as one "
                "inner chunk; use at most chunk_size of them, or a larger chunk_size"
            )
        bound = cls.step_bound(config)
        if bound > config.chunk_size:
            raise ValueError(
                f"theta_scale is {config.theta_scale} with chunk_size {config.chunk_size} and memory_depth {config.memory_depth}: "
                f"a token's step, up to {bound / config.chunk_size:.6g}, must not exceed 1; use a theta_scale of 1, which is safe, "
                "or a larger chunk_size"
            )
        if config.decay_target != "zero" and not config.use_forgetting:
            raise ValueError(
                f"decay_target is {config.decay_target!r} with use_forgetting False, where nothing decays; use use_forgetting "
                "True, or leave decay_target at 'zero'"
            )
        for name in ("memory_expansion", "memory_activation"):
            if config.memory_depth == 1 and getattr(config, name) != config.default(name):
                raise ValueError(
                    f"{name} is {getattr(config, name)!r} with memory_depth 1: a memory of one matrix has no hidden layer; "
                    f"leave {name} at {config.default(name)!r} or use a memory_depth of 2 or more"
                )

    @staticmethod
    def step_bound(config: ProteusConfig) -> float:
        """Largest theta * chunk / (1 - eta): theta_scale, less with more than two layers, so that 1 is as safe there for weights
        about as large as they are drawn; less, too, in small chunks of a memory with a norm.

        A memory is near a product of its matrices' gains, each to a power m. Where all are 1, so that unit keys have unit answers,
        its loss curves by sum m^2, and gradient descent is stable up to 2 over the curvature (spec/deep.md 6). So the bound falls
        with that sum from two layers on. Plain: m = 1, sum L. A gated layer squares what comes in: m doubles with each gated
        layer above, and two matrices have it, sum 1 + 2 (1 + 4 + .. + 4^(L - 2)).

        A norm answers with vectors of length sqrt(d), d being head_dim, whatever it is given. Where those point to v - k, of length
        sqrt(2) for unlike unit vectors, the loss of a pair curves sqrt(2 d) times as much as without it: a token's own step must
        fall by that. A chunk of sqrt(2 d) tokens or more may move as far as without a norm, for its keys differ.
        """

        def curvature(depth: int) -> int:
            return 1 + sum(arity * arity ** (2 * above) for above in range(depth - 1))

        arity = memory_function(config.memory_activation).arity
        bound = config.theta_scale * min(1.0, curvature(2) / curvature(config.memory_depth))
        return bound * min(1.0, config.chunk_size / (2 * config.head_dim) ** 0.5) if config.memory_residual_norm else bound

    @staticmethod
    def _layer_sizes(config: ProteusConfig) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer, all of its matrices together."""
        dim, arity = config.head_dim, memory_function(config.memory_activation).arity
        widths = [dim, *[dim * config.memory_expansion] * (config.memory_depth - 1), dim]
        *hidden, last = zip(widths, widths[1:])
        return [*((i, arity * o) for i, o in hidden), last]

    @classmethod
    def memory_dim(cls, config: ProteusConfig) -> int:
        """Hidden units of the memory, or key rows with one matrix."""
        return config.head_dim * (config.memory_expansion if config.memory_depth > 1 else 1)

    @classmethod
    def _gates(cls, config: ProteusConfig) -> int:
        return config.num_heads * (1 + config.use_forgetting + config.use_momentum)

    @classmethod
    def matrix_numbers(cls, config: ProteusConfig) -> int:
        """Numbers in the matrices of one memory, all heads."""
        return config.num_heads * sum(i * o for i, o in cls._layer_sizes(config))

    @classmethod
    def parameter_count(cls, config: ProteusConfig) -> int:
        """Projections with their convolution, gates with bias, initial memory and its norm, persistent tokens."""
        width, heads, dim = cls.memory_input(config), config.num_heads, config.head_dim
        projection = ConvProjection.parameter_count(width, heads, (dim, dim, dim), config.conv_size)
        gates = cls._gates(config) * (width + 1)
        norm = 2 * heads * dim * config.memory_residual_norm
        return projection + gates + cls.matrix_numbers(config) + norm + config.persistent_tokens * config.hidden_size

    @classmethod
    def flops_per_token(cls, config: ProteusConfig, length: int) -> float:
        """Dense maps, and the exact dual form on the open units (spec/deep.md 2.5: 22 dh + 4b(d + h) a head with two layers).

        Persistent tokens are left out: they are written once a forward, however many documents it holds.
        """
        hidden, heads, dim = cls.memory_input(config), config.num_heads, config.head_dim
        sizes, momentum, towards = cls._layer_sizes(config), config.use_momentum, config.decay_target == "init"
        share = mean_open(config.schedule, cls.memory_dim(config), length)
        square = mean_open(config.schedule, cls.memory_dim(config), length, power=2)
        memory = 0.0
        for i, (rows, columns) in enumerate(sizes):
            rows_gated, columns_gated = i > 0 or len(sizes) == 1, i < len(sizes) - 1
            entries = rows * columns * (square if rows_gated and columns_gated else share)
            # write: forward, and backward to the layer below; read and chunk end: the weights, and the momentum where there is one;
            # read only: what the weights decay to, where it is not zero
            memory += entries * (2 + 2 * (i > 0) + (8 if momentum else 4) + 2 * towards)
            memory += 2 * config.chunk_size * (rows * (share if rows_gated else 1) + columns * (share if columns_gated else 1))
        dense = ConvProjection.flops(hidden, heads, (dim, dim, dim), config.conv_size)
        return dense + 2 * hidden * cls._gates(config) + heads * memory

    @classmethod
    def state_size(cls, config: ProteusConfig, length: int) -> int:
        """Weights and momentum, the open chunk's slots, the convolution's inputs and the position, whatever the length."""
        heads, dim, chunk = config.num_heads, config.head_dim, config.chunk_size
        return 2 * cls.matrix_numbers(config) + chunk * (heads * (2 * dim + 3) + 1) + 1 + (config.conv_size - 1) * 3 * heads * dim

    def _start(self, batch: int) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]] | None:
        """The convolution's state, weights and momentum of `batch` rows behind the persistent tokens; None where there are none."""
        if self.persistent is None or not self.writes_persistent:
            return None
        count = len(self.persistent)
        before = torch.tensor([-count], device=self.persistent.device)
        sequence = TokenSequence(self.schedule, 1, count, offset=before, device=self.persistent.device)
        x = self.persistent[None].to(self.projection.linear.weight.dtype)
        tokens, conv = self.tokens_of(x, sequence, None)
        q, k, v, theta, alpha, eta = tokens
        _, state = titans_memory(
            *(q, k, v, theta, alpha, eta, self.initial),
            chunk=count,
            memory_activation=self.function,
            surprise_clip=self.clip,
            decay_target=self.decay_target,
            residual_norm=self.norm,
            activation=sequence.activation(self.units),
            output_final_state=True,
        )
        assert state is not None
        parts = [tuple(w.expand(batch, *w.shape[1:]) for w in part) for part in (state.weights, state.momentum)]
        return conv.expand(batch, *conv.shape[1:]), parts[0], parts[1]

    def init_memory(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> TitansMixerState:
        """The learned initial memory for every row, no momentum, an empty open chunk; with the persistent tokens written."""
        wide = torch.promote_types(dtype, torch.float32)
        start = None if torch.device(device).type == "meta" else self._start(batch)  # shapes alone: nothing is written
        if start is None:
            conv = self.projection.init_state(batch, device, dtype)
            weights = tuple(w.to(wide).expand(batch, *w.shape) for w in self.initial)
            momentum = tuple(torch.zeros_like(w) for w in weights)
        else:
            conv, weights, momentum = start[0].to(dtype), *(tuple(t.to(wide) for t in part) for part in start[1:])
        heads, dim = self.projection.heads, self.projection.widths[0]
        vectors = torch.zeros(batch, self.chunk, heads, dim, device=device, dtype=wide)
        gates = torch.zeros(batch, self.chunk, heads, device=device, dtype=wide)
        slots = torch.zeros(batch, self.chunk, device=device, dtype=torch.int64)
        memory = TitansState(weights, momentum, vectors, vectors, gates, gates, gates, slots, slots.new_zeros(batch))
        return TitansMixerState(conv, memory)

    def learned_norm(self, state: TitansMixerState, schedule: ActivationSchedule) -> Tensor:
        """Norm of W_t - W_0 over matrices and heads, by block of hidden units; an inner entry belongs to its later unit's block.

        W_0 is the memory before the first token, persistent tokens written.
        """
        weights = self.weights_now(state.memory)
        start = self._start(1)
        initial = self.initial if start is None else start[1]
        energies = [(w - w0).square().sum(1) for w, w0 in zip(weights, initial)]
        units = [_by_unit(energy, place) for energy, place in zip(energies, self.places)]
        return block_norms(torch.stack(units).sum(0), schedule)

    def surprise(self, state: Any) -> Tensor:
        """As `ops.memory_read.titans_surprise`, of the memory wherever this form keeps it."""
        memory = state.memory
        memory = memory if isinstance(memory, TitansState) else memory.memory
        return titans_surprise(memory, memory_activation=self.function, residual_norm=self.norm)

    def gate_map(self) -> tuple[Tensor, Tensor]:
        """Weight (gates, width) and bias of theta's, alpha's and eta's maps under each other, as far as there are any."""
        maps = [gate for gate in (self.theta, self.alpha, self.eta) if gate is not None]
        return torch.cat([gate.weight for gate in maps]), torch.cat([gate.bias for gate in maps])

    def _step_sizes(self, x: Tensor, gate_map: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """theta, alpha, eta (B, T, H), fp32 or wider; `gate_map` where it was made before."""
        return self.sizes_of(gate_values(x, *(gate_map or self.gate_map())))

    def sizes_of(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """theta, alpha, eta (B, T, H) from the values z (B, T, gates) of `gate_map`."""
        if runs(z):
            return step_sizes(z, self.theta.out_features, self.alpha is not None, self.eta is not None, self.scale / self.chunk)
        z, *rest = z.split(self.theta.out_features, -1)
        theta = self.scale / self.chunk * torch.sigmoid(z)
        alpha = torch.zeros_like(z) if self.alpha is None else torch.sigmoid(rest[0])
        if self.eta is None:
            return theta, alpha, torch.zeros_like(z)
        return theta * torch.sigmoid(-rest[-1]), alpha, torch.sigmoid(rest[-1])

    def tokens_of(
        self,
        x: Tensor,
        sequence: TokenSequence,
        conv: Tensor | None,
        gate_map: tuple[Tensor, Tensor] | None = None,
        narrow: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """x (B, T, width) -> q, k, v (B, T, H, D), theta, alpha, eta (B, T, H); and the convolution's state.

        `narrow`: `cast_once` of x, where other maps take it too.
        """
        parts, after = self.projection(x if narrow is None else narrow, sequence, conv)
        return [*(l2_normalize(part) for part in parts), *self._step_sizes(x, gate_map)], after

    def remember(
        self,
        x: Tensor,
        sequence: TokenSequence,
        state: TitansMixerState | None = None,
        use_state: bool = False,
        made: tuple[list[Tensor], Tensor] | None = None,
        narrow: Tensor | None = None,
    ) -> tuple[Tensor, TitansMixerState | None]:
        """Write x (B, T, width) and read it: (B, T, H, D); else as `Mixer.forward`. One token behind a state is a decoding step.

        `made`: what `tokens_of` gives, where it is at hand. `narrow`: as there.
        """
        past, initial = (None, None) if state is None else (state.conv, state.memory)
        if state is None:
            start = self._start(sequence.rows)
            past, initial = (None, None) if start is None else (start[0], start[1:])
        tokens, conv = made or self.tokens_of(x, sequence, past, narrow=narrow)
        if state is not None and sequence.is_step:
            q, k, v, theta, alpha, eta = (t[:, 0] for t in tokens)
            read, memory = titans_step(
                *(q, k, v, theta, alpha, eta, state.memory),
                active=sequence.active(self.units),
                read=self.read,
                memory_activation=self.function,
                surprise_clip=self.clip,
                initial=self._target,
                residual_norm=self.norm,
            )
            read = read[:, None]
        else:
            q, k, v, theta, alpha, eta = tokens
            read, memory = titans_memory(
                *(q, k, v, theta, alpha, eta, self.initial),
                chunk=self.chunk,
                read=self.read,
                memory_activation=self.function,
                surprise_clip=self.clip,
                decay_target=self.decay_target,
                residual_norm=self.norm,
                activation=sequence.placed(self.units),
                initial_state=initial,
                cu_seqlens=sequence.cu_seqlens,
                output_final_state=use_state,
            )
        return read, TitansMixerState(conv, memory) if use_state and memory is not None else None


def _by_unit(energy: Tensor, place: str) -> Tensor:
    """Sums of a matrix's entries (N, in, out) by the hidden unit that owns them, (N, units)."""
    if place == "inner":
        return energy.tril().sum(2) + energy.triu(1).sum(1)
    return energy.sum(1 if place == "first" else 2)


class TitansMixer(TitansMemory):
    """The memory alone (LMM): y = out(norm(M_t(q_t)) gate)."""

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__(config)
        self.output = GatedOutput(config.hidden_size, config.num_heads, config.head_dim, config.norm_eps, silu)

    @classmethod
    def parameter_count(cls, config: ProteusConfig) -> int:
        """The memory's, and the output's."""
        return super().parameter_count(config) + GatedOutput.parameter_count(config.hidden_size, config.num_heads, config.head_dim)

    @classmethod
    def flops_per_token(cls, config: ProteusConfig, length: int) -> float:
        """The memory's, and the output's."""
        return super().flops_per_token(config, length) + GatedOutput.flops(config.hidden_size, config.num_heads, config.head_dim)

    def init_state(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> TitansMixerState:
        """As `init_memory`."""
        return self.init_memory(batch, device, dtype)

    def memory_norm(self, state: TitansMixerState, schedule: ActivationSchedule) -> Tensor:
        """As `learned_norm`."""
        return self.learned_norm(state, schedule)

    def forward(
        self, x: Tensor, sequence: TokenSequence, state: TitansMixerState | None = None, use_state: bool = False
    ) -> tuple[Tensor, TitansMixerState | None]:
        """As `Mixer.forward`; one token behind a state runs the decoding step."""
        narrow = cast_once(x)
        read, state = self.remember(x, sequence, state, use_state, narrow=narrow)
        return self.output(read, narrow), state
