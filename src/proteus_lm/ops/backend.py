"""Which implementation of an operation runs: chosen at each call, with a reason that can be printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from proteus_lm.ops import triton

OPERATIONS = ("retention", "swla", "delta_rule", "gated_delta_rule", "comba", "titans_memory")


class Backend(NamedTuple):
    """One implementation: its name, and `refuse(operation, tensors)`, which says why it cannot run these inputs or None.

    `why` is the reason `auto` gives for taking it. `cuda`: `auto` takes it for tensors on a GPU only.
    """

    name: str
    refuse: Callable[[str, tuple[Tensor, ...]], str | None]
    why: str
    cuda: bool = False

    def declines(self, operation: str, tensors: tuple[Tensor, ...], refused: Mapping[str, str | None]) -> str | None:
        """Why `auto` does not take it, or None."""
        on_gpu = tensors[0].is_cuda if tensors else torch.cuda.is_available()
        if self.cuda and not on_gpu:
            return f"tensors are on {tensors[0].device.type}; the kernels need CUDA" if tensors else "no CUDA device"
        held = triton.UNCHECKED.get(operation) if self.cuda else None
        return self.refuse(operation, tensors) or refused.get(self.name) or held


class Choice(NamedTuple):
    """What `auto` takes for an operation, why, and why the ones before it were refused."""

    operation: str
    backend: str
    reason: str


# In the order in which `auto` tries them. Titans' kernels ask for more than tensors: its op adds their refusal.
_BACKENDS = (
    Backend(
        "triton",
        lambda operation, tensors: None if operation == "titans_memory" else triton.refuse(operation, tensors),
        "Triton kernels",
        cuda=True,
    ),
    Backend("chunk", lambda operation, tensors: None, "chunkwise PyTorch, runs on every device and floating type"),
    Backend("reference", lambda operation, tensors: None, "token by token, the oracle"),
)
NAMES = ("auto", *(b.name for b in _BACKENDS))


def explain(operation: str, *tensors: Tensor, refused: Mapping[str, str | None] | None = None) -> Choice:
    """What `auto` would run for these inputs, and why.

    Args:
        refused: what the operation itself knows against a backend, by name; None under a name: nothing.
    """
    refusals = []
    for backend in _BACKENDS:
        refusal = backend.declines(operation, tensors, refused or {})
        if refusal is None:
            return Choice(operation, backend.name, "; ".join([backend.why, *refusals]))
        refusals.append(f"not {backend.name}: {refusal}")
    raise RuntimeError(f"no backend runs {operation}: {'; '.join(refusals)}")


def choose(operation: str, backend: str, *tensors: Tensor, refused: Mapping[str, str | None] | None = None) -> str:
    """The backend to run: the one asked for, or what `auto` takes; `refused` as in `explain`.

    Raises:
        ValueError: for a name that is not a backend, or one that cannot run these inputs, with its reason.
    """
    if backend == "auto":
        return explain(operation, *tensors, refused=refused).backend
    for candidate in _BACKENDS:
        if candidate.name == backend:
            refusal = candidate.refuse(operation, tensors) or (refused or {}).get(backend)
            if refusal is not None:
                raise ValueError(f"backend {backend!r} cannot run {operation}: {refusal}; use backend='auto'")
            return backend
    raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(NAMES)}")
