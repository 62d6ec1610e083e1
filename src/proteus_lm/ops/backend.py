"""Which implementation of an operation runs: chosen at each call, with a reason that can be printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from proteus_lm.ops import triton

OPERATIONS = ("retention", "swla", "delta_rule", "gated_delta_rule", "comba", "titans_memory")


class Backend(NamedTuple):
    """One implementation: its name, and `refuse(operation, tensors)`, which says why it cannot run these inputs or None.

    `why` is the reason `auto` gives for taking it. `held` says why `auto` does not take it, though it can be asked for by name.
    """

    name: str
    refuse: Callable[[str, tuple[Tensor, ...]], str | None]
    why: str
    held: str | None = None


class Choice(NamedTuple):
    """What `auto` takes for an operation, why, and why the ones before it were refused."""

    operation: str
    backend: str
    reason: str


# In the order in which `auto` tries them. Titans' kernels ask for more than tensors: `deep` has them refuse.
_BACKENDS = (
    Backend(
        "triton",
        lambda operation, tensors: None if operation == "titans_memory" else triton.refuse(operation, tensors),
        "Triton kernels",
        held="its last changes have not run on a GPU yet; ask for it by name",
    ),
    Backend("chunk", lambda operation, tensors: None, "chunkwise PyTorch, runs on every device and floating type"),
    Backend("reference", lambda operation, tensors: None, "token by token, the oracle"),
)
NAMES = ("auto", *(b.name for b in _BACKENDS))


def explain(operation: str, *tensors: Tensor) -> Choice:
    """What `auto` would run for these inputs, and why."""
    refusals = []
    for backend in _BACKENDS:
        refusal = backend.refuse(operation, tensors) or backend.held
        if refusal is None:
            return Choice(operation, backend.name, "; ".join([backend.why, *refusals]))
        refusals.append(f"not {backend.name}: {refusal}")
    raise RuntimeError(f"no backend runs {operation}: {'; '.join(refusals)}")


def choose(operation: str, backend: str, *tensors: Tensor) -> str:
    """The backend to run: the one asked for, or what `auto` takes.

    Raises:
        ValueError: for a name that is not a backend, or one that cannot run these inputs, with its reason.
    """
    if backend == "auto":
        return explain(operation, *tensors).backend
    for candidate in _BACKENDS:
        if candidate.name == backend:
            refusal = candidate.refuse(operation, tensors)
            if refusal is not None:
                raise ValueError(f"backend {backend!r} cannot run {operation}: {refusal}; use backend='auto'")
            return backend
    raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(NAMES)}")
