"""Random inputs for Titans' memory, and what its tests compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import normalize

from proteus_lm import ActivationSchedule
from proteus_lm.ops import TitansState, reference, titans_memory
from proteus_lm.ops.deep_step import titans_step
from proteus_lm.ops.memory_activations import memory_function, places

HEAD, HIDDEN, VALUE, HEADS = 6, 13, 5, 2  # no multiple of anything
EXACT = 1e-12  # sums of some thousand fp64 products of size one


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


def assert_same_gradients(ours: Iterable[Tensor], right: Iterable[Tensor], looser: float = 1) -> None:
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9 * looser, atol=1e-10 * looser)  # gradients reach 1e2


def compare(case: Case, leaves: list[Tensor], *, looser: float = 1, **options: Any) -> tuple[Tensor, TitansState]:
    """Output, final state and every gradient equal the oracle's; returns the first two."""
    ours = titans_memory(*case.tokens, case.weights, output_final_state=True, **options)
    right = reference.titans_memory(*case.tokens, case.weights, output_final_state=True, **options)
    torch.testing.assert_close(ours[0], right[0], rtol=0, atol=looser * EXACT)
    assert_same_state(ours[1], right[1], looser * EXACT)
    assert_same_gradients(gradients(*ours, leaves), gradients(*right, leaves), looser)
    return ours


def in_calls(
    case: Case, bounds: Sequence[int], plan: ActivationSchedule, position: Tensor, **options: Any
) -> tuple[Tensor, TitansState]:
    """Output and final state of calls that end at `bounds`, each beginning where the one before it ended."""
    parts, state, start = [], None, 0
    for stop in bounds:
        activation = plan.activation(case.units, stop - start, offset=position)
        options |= {"activation": activation, "initial_state": state, "output_final_state": True}
        y, state = titans_memory(*case.piece(start, stop), case.weights, **options)
        parts.append(y)
        start, position = stop, state.position
    assert state is not None
    return torch.cat(parts, 1), state


def decode(
    case: Case, state: TitansState, plan: ActivationSchedule, start: int, stop: int, **options: Any
) -> tuple[Tensor, TitansState]:
    """Steps over tokens [start, stop), and the state behind them."""
    outputs = []
    for token in range(start, stop):
        now = [t[:, token] for t in case.tokens]
        y, state = titans_step(*now, state, active=plan.active(case.units, state.position), **options)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def plant(case: Case, masks: list[Tensor]) -> None:
    """NaN and -0.0 in the entries of the state that `masks` (of `locked`) name; the state then asks for gradients."""
    for part in case.state:
        for tensor, mask in zip(part, masks, strict=True):
            tensor[:, :, mask] = torch.tensor([float("nan"), -0.0]).repeat(1000)[: int(mask.sum())].double()
            tensor.requires_grad_()


def assert_kept(case: Case, state: TitansState, masks: list[Tensor]) -> None:
    """What `masks` name has the bits that it had in the case's state; the rest has moved, and is finite."""
    before, after = [*case.state[0], *case.state[1]], [*state.weights, *state.momentum]
    for old, new, mask in zip(before, after, [*masks, *masks], strict=True):
        assert torch.equal(bits(old[:, :, mask]), bits(new[:, :, mask]))
        assert new[:, :, ~mask].isfinite().all() and not torch.equal(old[:, :, ~mask], new[:, :, ~mask])


def assert_compiled_once(
    forward: Callable[..., tuple[Tensor, TitansState]], calls: Iterable[tuple[tuple[Any, ...], list[Tensor]]]
) -> None:
    """Of each call (arguments, leaves) the compiled function gives output, state and gradients to the bit, by one compilation."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(forward, fullgraph=True, backend=counter)
    for arguments, leaves in calls:
        (right, right_state), (y, state) = forward(*arguments), compiled(*arguments)
        ours = [y, *floats(state), *gradients(y, state, leaves)]
        wanted = [right, *floats(right_state), *gradients(right, right_state, leaves)]
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
    assert counter.frame_count == 1


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor, so that NaN equals itself and -0.0 is not 0.0."""
    return tensor.detach().contiguous().view(torch.int64 if tensor.dtype == torch.float64 else torch.int32)
