"""Random inputs for Titans' memory, and what its tests compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from proteus_lm import ActivationSchedule
from proteus_lm.ops import TitansState
from proteus_lm.ops.memory_activations import memory_function, places

HEAD, HIDDEN, VALUE, HEADS = 6, 13, 5, 2  # no multiple of anything


@dataclass
class Case:
    """Tokens q, k, v, theta, alpha, eta; learned weights; a bare state of `rows` that is zero nowhere, locked units included."""

    tokens: list[Tensor]
    weights: list[Tensor]
    state: tuple[list[Tensor], list[Tensor]]

    @property
    def units(self) -> int:
        return self.weights[-1].shape[-2]

    def piece(self, start: int, stop: int) -> list[Tensor]:
        return [t[:, start:stop] for t in self.tokens]


def make(
    batch: int,
    tokens: int,
    *,
    depth: int = 2,
    rows: int | None = None,
    heads: int = HEADS,
    value: int = VALUE,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    grad: bool = False,
    function: str = "gelu_tanh",
) -> Case:
    """Unit q and k, gates from near 0 to strong; the matrices that a memory with this function has."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(high: float) -> Tensor:
        return high * torch.rand(batch, tokens, heads, generator=generator, dtype=torch.float64)

    rows = batch if rows is None else rows
    sides, arity = [HEAD, *[HIDDEN] * (depth - 1), value], memory_function(function).arity
    *hidden, last = [(heads, a, b) for a, b in zip(sides, sides[1:])]
    shapes = [*(shape for shape in hidden for _ in range(arity)), last]
    q, k = (normalize(normal(batch, tokens, heads, HEAD), dim=-1) for _ in range(2))
    inputs = [q, k, 0.5 * normal(batch, tokens, heads, value), uniform(0.3), uniform(0.3), uniform(0.8)]
    weights = [normal(*shape) * shape[1] ** -0.5 for shape in shapes]
    state = [normal(rows, *shape) * shape[1] ** -0.5 for shape in shapes], [0.05 * normal(rows, *shape) for shape in shapes]
    made: list[Any] = [[t.to(dtype).requires_grad_(grad) for t in part] for part in (inputs, weights, *state)]
    return Case(made[0], made[1], (made[2], made[3]))


def locked(case: Case, width: int, function: str = "gelu_tanh") -> list[Tensor]:
    """Entries outside the first `width` units of each matrix of a case, bool (in, out)."""
    masks = []
    for place, weight in zip(places(len(case.weights), memory_function(function).arity), case.weights, strict=True):
        mask = torch.zeros(weight.shape[1:], dtype=torch.bool)
        if place != "first":
            mask[width:] = True
        if place != "last":
            mask[:, width:] = True
        masks.append(mask)
    return masks


def schedule(blocks: int, context: int) -> ActivationSchedule:
    return ActivationSchedule(blocks, context)


def floats(state: TitansState) -> list[Tensor]:
    """The floating tensors of a state."""
    return [*state.weights, *state.momentum, *state[2:7]]


def with_floats(state: TitansState, tensors: list[Tensor]) -> TitansState:
    """The state with other floating tensors."""
    depth = len(state.weights)
    boundary = tuple(tensors[:depth]), tuple(tensors[depth : 2 * depth])
    return TitansState._make([*boundary, *tensors[2 * depth :], state.active, state.position])


def assert_same_state(ours: TitansState, right: TitansState, tolerance: float = 1e-12) -> None:
    assert torch.equal(ours.active, right.active) and torch.equal(ours.position, right.position)
    for a, b in zip(floats(ours), floats(right)):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def gradients(y: Tensor, state: TitansState | None, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random sum of y and the state with respect to the leaves, zeros where there is none."""
    parts = [y, *([] if state is None else floats(state))]
    generator = torch.Generator().manual_seed(9)
    total = sum((t.double() * torch.randn(t.shape, generator=generator, dtype=torch.float64)).sum() for t in parts)
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, leaves, materialize_grads=True))


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor, so that NaN equals itself and -0.0 is not 0.0."""
    return tensor.detach().contiguous().view(torch.int64 if tensor.dtype == torch.float64 else torch.int32)
