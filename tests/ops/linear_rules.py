"""The linear rules as one table, and random inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from proteus_lm import ops
from proteus_lm.ops import _linear, recurrent
from proteus_lm.ops.state import SWLAState

RULES = tuple(_linear.ARGUMENTS)
AXES = _linear.AXES
READS = _linear.READS
KEYS, VALUES, HEADS, WINDOW = 10, 9, 2, 3  # no multiple of anything


def make(
    rule: str, batch: int, tokens: int, *, dtype=torch.float64, seed: int = 0, keys=KEYS, values=VALUES, c=WINDOW
) -> dict[str, Tensor]:
    """Inputs of a rule by name: unit q and k, p a little shorter, decays down to e^-0.5, strengths to 1."""
    torch.manual_seed(seed)
    shape = (batch, tokens, HEADS)
    everything = {
        "q": normalize(torch.randn(*shape, keys, dtype=torch.float64), dim=-1),
        "k": normalize(torch.randn(*shape, keys, dtype=torch.float64), dim=-1),
        "v": torch.randn(*shape, values, dtype=torch.float64),
        "p": 0.7 * normalize(torch.randn(*shape, keys, dtype=torch.float64), dim=-1),
        "g": -0.5 * torch.rand(shape, dtype=torch.float64),
        "beta": torch.rand(shape, dtype=torch.float64),
        "gamma": torch.rand(*shape, c, dtype=torch.float64),
    }
    return {name: everything[name].to(dtype) for name in _linear.ARGUMENTS[rule]}


def make_state(
    rule: str, rows: int, *, dtype=torch.float64, seed: int = 1, keys=KEYS, values=VALUES, c=WINDOW
) -> Tensor | SWLAState:
    """A state that is zero nowhere."""
    torch.manual_seed(1)
    matrix = torch.randn(rows, HEADS, keys, values, dtype=dtype)
    if rule != "swla":
        return matrix
    return SWLAState(matrix, *(torch.randn(rows, c - 1, HEADS, d, dtype=dtype) for d in (keys, values)))


def leaves(state: Tensor | SWLAState | None) -> list[Tensor]:
    """The tensors of a state."""
    return [] if state is None else [state] if isinstance(state, Tensor) else list(state)


def matrix(state: Tensor | SWLAState) -> Tensor:
    """The matrix of a state."""
    return state if isinstance(state, Tensor) else state.matrix


def like(state: Tensor | SWLAState, parts: list[Tensor]) -> Tensor | SWLAState:
    """A state of the same kind from its tensors."""
    return parts[0] if isinstance(state, Tensor) else SWLAState(*parts)


def call(rule: str, inputs: dict[str, Tensor], **keywords: Any) -> tuple[Tensor, Any]:
    """The operation of `proteus_lm.ops`, with its last state."""
    return getattr(ops, rule)(*inputs.values(), **{"output_final_state": True} | keywords)


def step(rule: str, inputs: dict[str, Tensor], state: Tensor | SWLAState, **keywords: Any) -> tuple[Tensor, Any]:
    """One decoding step; inputs (N, H, ...)."""
    return getattr(recurrent, rule + "_step")(*inputs.values(), state, **keywords)


def everything(rule: str, inputs: dict[str, Tensor], state: Tensor | SWLAState | None, **keywords: Any) -> dict[str, Tensor]:
    """Outputs, last state and the gradient of every input and of the initial state, under a fixed random loss."""
    inputs = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    start = [x.detach().clone().requires_grad_() for x in leaves(state)]
    out, final = call(rule, inputs, initial_state=None if state is None else like(state, start), **keywords)
    torch.manual_seed(9)
    loss = sum((x * torch.randn(x.shape, dtype=torch.float64)).sum() for x in (out, *leaves(final)))
    grads = torch.autograd.grad(loss, [*inputs.values(), *start])
    names = [*(f"gradient of {n}" for n in inputs), *(f"gradient of initial state {i}" for i in range(len(start)))]
    return {"out": out.detach()} | {f"state {i}": x.detach() for i, x in enumerate(leaves(final))} | dict(zip(names, grads))


def rms(value: Tensor, right: Tensor) -> float:
    """Root mean square of the difference, relative to that of the right value (or, where that is all but 0, to 1)."""
    assert value.shape == right.shape
    if not value.numel():
        return 0.0
    size, difference = (x.double().square().mean().sqrt().item() for x in (right, value.double() - right.double()))
    return difference / (size if size > 1e-12 else 1)


def assert_close(value: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor within a relative root mean square of the right one."""
    assert value.keys() == right.keys()
    for name, x in value.items():
        assert rms(x, right[name]) < tolerance, f"{name}: {rms(x, right[name])}"
