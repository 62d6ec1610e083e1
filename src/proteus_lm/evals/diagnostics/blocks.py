"""A memory by position and block: norm, effective rank, how strongly it is written and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proteus_lm.cache import ProteusCache
from proteus_lm.evals.perplexity import evaluation_mode
from proteus_lm.evals.windows import Documents, choose_windows
from proteus_lm.mixers.base import MatrixMixer, MatrixState, Mixer
from proteus_lm.mixers.titans import TitansMemory
from proteus_lm.ops import TitansState
from proteus_lm.schedule import ActivationSchedule

STEPS = 8
"""Single tokens before each point over which the strength of writing is a mean."""
QUANTITIES = ("norm", "rank", "write", "read")


@dataclass(frozen=True)
class MemoryProfile:
    """What each block of each layer's memory holds and does after some numbers of tokens; means over windows.

    Args:
        tokens: how many tokens had been read at each point.
        open: blocks open to the last of them.
        unlocks: position at which each block opens.
        norm: float64 (points, layers, blocks), Frobenius norm of what the block holds beyond its initial value.
        rank: likewise, effective rank of that (exp of the entropy of its singular values' shares), mean over heads.
        write: likewise, norm of the block's change by one token, mean over the last `STEPS` tokens.
        read: likewise, change of the mixer's output at the next token if the block held nothing, as a part of the output's norm.
        layers: which layers have a memory in blocks; the others' entries are 0.
        windows: sequences behind the means.
    """

    tokens: tuple[int, ...]
    open: tuple[int, ...]
    unlocks: tuple[int, ...]
    norm: np.ndarray
    rank: np.ndarray
    write: np.ndarray
    read: np.ndarray
    layers: tuple[int, ...]
    windows: int

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        values = {name: getattr(self, name).round(7).tolist() for name in QUANTITIES}
        return {
            "tokens": list(self.tokens),
            "open_blocks": list(self.open),
            "unlock_positions": list(self.unlocks),
            "layers_with_memory": list(self.layers),
            "windows": self.windows,
            **{f"{name}_by_point_layer_block": value for name, value in values.items()},
        }


def unit_rows(mixer: Mixer, state: Any) -> Tensor | None:
    """What a memory holds beyond its initial value, one row a coordinate that the schedule opens: (N, H, dim, width); None without.

    Of a matrix memory: its key rows, or value columns. Of Titans' MLP: for each hidden unit the weights into it and out of it; a
    weight between two hidden layers belongs to the later unit. Rows of a block are what `Mixer.memory_norm` sums over.
    """
    if isinstance(mixer, MatrixMixer):
        matrix = state.matrix
        return matrix if mixer.axis == "key" else matrix.transpose(-1, -2)
    if not isinstance(mixer, TitansMemory):
        return None
    memory = _titans(state)
    weights = mixer.weights_now(memory)
    deltas = [w - w0 for w, w0 in zip(weights, _initial(mixer))]
    rows = []
    for place, delta in zip(mixer.places, deltas):
        outward, inward = (delta.tril(), delta.triu(1)) if place == "inner" else (delta, delta)
        rows += [outward] if place != "first" else []
        rows += [inward.transpose(-1, -2)] if place != "last" else []
    return torch.cat(rows, -1)


def effective_rank(matrix: Tensor) -> Tensor:
    """exp of the entropy of the singular values' shares (Roy and Vetterli 2007), of (..., rows, columns) -> (...); 0 of nothing.

    Between 1 (one direction) and min(rows, columns) (all alike).
    """
    values = torch.linalg.svdvals(matrix.double())
    total = values.sum(-1, keepdim=True)
    share = values / total.clamp(min=torch.finfo(torch.float64).tiny)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    return torch.where(total[..., 0] > 0, entropy.exp(), torch.zeros_like(entropy))


def profile_memory(
    model: Any, dataset: Documents, schedule: ActivationSchedule, points: Sequence[int], *, windows: int = 4
) -> MemoryProfile:
    """Read windows of a split with the state carried, and look at the memory at each of `points`.

    Args:
        model: a `ProteusForCausalLM`.
        points: rising token counts, each at least `STEPS` after the one before; documents must hold one token more than the last.
        windows: sequences to read, spread over the split.

    Raises:
        ValueError: when points are too close together, or no document holds that many tokens.
    """
    if any(b - a < STEPS for a, b in zip((0, *points), points)) or not points:
        raise ValueError(f"points {tuple(points)} must be at least {STEPS} tokens apart, the first at {STEPS} or more")
    length = points[-1] + 1
    chosen, _ = choose_windows(dataset, length, windows * length)
    rows = np.stack([dataset.document(w.document)[w.start : w.start + length] for w in chosen]).astype(np.int64)
    tokens = torch.from_numpy(rows).to(next(model.parameters()).device)
    mixers: list[Mixer] = [layer.mixer for layer in model.layers]
    found: dict[str, list[Tensor]] = {name: [] for name in QUANTITIES}
    cache, done = ProteusCache(), 0
    with evaluation_mode(model):
        for point in points:
            if point - STEPS > done:
                model(input_ids=tokens[:, done : point - STEPS], past_key_values=cache, use_cache=True)
            found["write"].append(_write(model, mixers, tokens[:, max(done, point - STEPS) : point], cache, schedule))
            found["norm"].append(model.memory_norms(cache).double().mean(1))
            found["rank"].append(_by_block(mixers, cache.states, schedule, lambda part: effective_rank(part).mean((0, 1))))
            found["read"].append(_read(model, mixers, tokens[:, point : point + 1], cache, schedule))
            done = point
    arrays = {name: torch.stack(values).double().cpu().numpy() for name, values in found.items()}
    return MemoryProfile(
        tuple(points),
        tuple(schedule.active_blocks(point - 1) for point in points),
        tuple(schedule.unlock_position(block) for block in range(schedule.blocks)),
        **arrays,
        layers=tuple(i for i, mixer in enumerate(mixers) if isinstance(mixer, MatrixMixer | TitansMemory)),
        windows=len(chosen),
    )


def _by_block(mixers: Sequence[Mixer], states: Any, schedule: ActivationSchedule, measure: Any) -> Tensor:
    """`measure` of each block's rows (N, H, rows, width) -> scalar, in every layer: (layers, E); zeros without a memory."""
    layers = []
    for mixer, state in zip(mixers, states):
        rows = unit_rows(mixer, state)
        if rows is None:
            layers.append(torch.zeros(schedule.blocks, dtype=torch.float64))
            continue
        parts = [rows[:, :, a:b] for a, b in schedule.block_bounds(rows.shape[2])]
        layers.append(torch.stack([measure(part).double().cpu() for part in parts]))
    return torch.stack(layers)


def _write(model: Any, mixers: Sequence[Mixer], tokens: Tensor, cache: ProteusCache, schedule: ActivationSchedule) -> Tensor:
    """Read tokens (N, t) one by one; mean over them of the norm of each block's change: (layers, E). The cache moves on."""
    total = torch.zeros(len(mixers), schedule.blocks, dtype=torch.float64)
    before = None if cache.states is None else [unit_rows(m, s) for m, s in zip(mixers, cache.states)]
    for i in range(tokens.shape[1]):
        model(input_ids=tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
        assert cache.states is not None
        now = [unit_rows(m, s) for m, s in zip(mixers, cache.states)]
        for layer, rows in enumerate(now):
            if rows is not None:
                past = None if before is None else before[layer]
                energy = (rows if past is None else rows - past).double().square().sum((1, 3))  # (N, dim)
                for block, (a, b) in enumerate(schedule.block_bounds(energy.shape[1])):
                    total[layer, block] += energy[:, a:b].sum(1).sqrt().mean().cpu()
        before = now
    return total / tokens.shape[1]


def _read(model: Any, mixers: Sequence[Mixer], token: Tensor, cache: ProteusCache, schedule: ActivationSchedule) -> Tensor:
    """How much each layer's mixer gives something else at the next token (N, 1) when a block is emptied: (layers, E)."""
    seen: dict[int, tuple[Any, ...]] = {}

    def watch(layer: int) -> Callable[[Any, tuple[Any, ...]], None]:
        def note(_module: Any, inputs: tuple[Any, ...]) -> None:
            seen[layer] = inputs

        return note

    hooks = [mixer.register_forward_pre_hook(watch(layer)) for layer, mixer in enumerate(mixers)]
    try:
        model(input_ids=token, past_key_values=cache.copy(), use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    found = torch.zeros(len(mixers), schedule.blocks, dtype=torch.float64)
    for layer, mixer in enumerate(mixers):
        if not isinstance(mixer, MatrixMixer | TitansMemory):
            continue
        x, sequence, state, *_ = seen[layer]
        whole = mixer(x, sequence, state, False)[0].double()
        for block in range(schedule.active_blocks(int(cache.position.max()) if cache.position is not None else 0)):
            less = mixer(x, sequence, without_block(mixer, state, schedule, block), False)[0].double()
            change = (whole - less).flatten(1).norm(dim=1) / whole.flatten(1).norm(dim=1).clamp(min=1e-30)
            found[layer, block] = change.mean().cpu()
    return found


def without_block(mixer: Mixer, state: Any, schedule: ActivationSchedule, block: int) -> Any:
    """A state whose block holds its initial value. In Titans' memory this is so at the last chunk boundary: the open chunk stays.

    Raises:
        ValueError: for a mixer without a memory in blocks.
    """
    if isinstance(mixer, MatrixMixer):
        matrix = state.matrix.clone()
        first, last = schedule.block_bounds(matrix.shape[2 if mixer.axis == "key" else 3])[block]
        (matrix[:, :, first:last] if mixer.axis == "key" else matrix[..., first:last]).zero_()
        memory = matrix if isinstance(state.memory, Tensor) else state.memory._replace(matrix=matrix)
        return MatrixState(state.conv, memory)
    if isinstance(mixer, TitansMemory):
        return _with_titans(state, _emptied(mixer, _titans(state), schedule, block))
    raise ValueError(f"{type(mixer).__name__} keeps no memory in blocks")


def _emptied(mixer: TitansMemory, memory: TitansState, schedule: ActivationSchedule, block: int) -> TitansState:
    """Weights of the block's units back to their initial values, their momentum 0."""
    first, last = schedule.block_bounds(mixer.units)[block]
    unit = torch.arange(mixer.units, device=memory.weights[0].device)
    weights, momentum = [], []
    for place, w, w0, m in zip(mixer.places, memory.weights, _initial(mixer), memory.momentum):
        if place == "inner":  # the later of the two units owns the entry
            owner = torch.maximum(unit[:, None], unit[None])
        else:
            owner = (unit[:, None] if place == "last" else unit[None]).expand(*w.shape[-2:])
        inside = (owner >= first) & (owner < last)
        weights.append(torch.where(inside, w0.to(w.dtype), w))
        momentum.append(torch.where(inside, torch.zeros_like(m), m))
    return memory._replace(weights=tuple(weights), momentum=tuple(momentum))


def _titans(state: Any) -> TitansState:
    """The memory inside the state of any form of Titans."""
    while not isinstance(state, TitansState):
        state = state.memory
    return state


def _with_titans(state: Any, memory: TitansState) -> Any:
    """The state of any form of Titans with another memory inside."""
    return memory if isinstance(state, TitansState) else state._replace(memory=_with_titans(state.memory, memory))


def _initial(mixer: TitansMemory) -> tuple[Tensor, ...]:
    """The memory before the first token, persistent tokens written; each (1 or H, ...) to go with (N, H, ...)."""
    start = mixer._start(1)
    return mixer.initial if start is None else start[1]
