"""Which implementation of an operation runs: chosen at each call, with a reason that can be printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from proteus_lm.ops import fla, triton

OPERATIONS = ("retention", "swla", "delta_rule", "gated_delta_rule", "comba", "titans_memory")


Refusal = Callable[[str, tuple[Tensor, ...]], str | None]
Known = Mapping[str, str | Callable[[], str | None] | None]
"""What an operation knows against backends, by name: a reason, None, or a function to ask when it matters."""


def _nothing(operation: str, tensors: tuple[Tensor, ...]) -> str | None:
    return None


class Backend(NamedTuple):
    """One implementation: its name, and `refuse(operation, tensors)`, which says why it cannot run these inputs or None.

    `why` is the reason `auto` gives for taking it. `cuda`: `auto` takes it for tensors on a GPU only. `held(operation, tensors)`
    says why `auto` leaves to others what it could run; asked for by name, it runs.
    """

    name: str
    refuse: Refusal
    why: str
    cuda: bool = False
    held: Refusal = _nothing

    def cannot(self, operation: str, tensors: tuple[Tensor, ...], refused: Known | None) -> str | None:
        """Why it cannot run, or None; the operation's own knowledge is asked last."""
        known = (refused or {}).get(self.name)
        return self.refuse(operation, tensors) or (known() if callable(known) else known)

    def declines(self, operation: str, tensors: tuple[Tensor, ...], refused: Known | None) -> str | None:
        """Why `auto` does not take it, or None."""
        on_gpu = tensors[0].is_cuda if tensors else torch.cuda.is_available()
        if self.cuda and not on_gpu:
            return f"tensors are on {tensors[0].device.type}; the kernels need CUDA" if tensors else "no CUDA device"
        return self.held(operation, tensors) or self.cannot(operation, tensors, refused)  # to ask the latter may import a package


class Choice(NamedTuple):
    """What `auto` takes for an operation, why, and why the ones before it were refused."""

    operation: str
    backend: str
    reason: str


# In the order in which `auto` tries them: by speed, as measured on an H200 (benchmarks/results/ops-NVIDIA-H200.md), and "native" on
# a CPU (benchmarks/results/cpu.md). Titans' kernels ask for more than tensors: its op adds their refusal.
_BACKENDS = (
    Backend(
        "triton",
        lambda operation, tensors: None if operation == "titans_memory" else triton.refuse(operation, tensors),
        "our Triton kernels, the fastest measured",
        cuda=True,
    ),
    Backend("fla", fla.refuse, "flash-linear-attention's kernels, the next in speed", cuda=True, held=fla.held),
    Backend(
        "native",
        lambda operation, tensors: None if operation == "titans_memory" else "the C kernel is of titans_memory alone",
        "our C kernel, the fastest measured on a CPU",
    ),
    Backend("chunk", _nothing, "chunkwise PyTorch, runs on every device and floating type"),
    Backend("reference", _nothing, "token by token, the oracle"),
)
NAMES = ("auto", *(b.name for b in _BACKENDS))


def verdicts(operation: str, *tensors: Tensor, refused: Known | None = None) -> dict[str, str | None]:
    """Why `auto` passes over each backend, in its order; None under those it would take, were none before them.

    Args:
        refused: as in `explain`.
    """
    return {backend.name: backend.declines(operation, tensors, refused) for backend in _BACKENDS}


def explain(operation: str, *tensors: Tensor, refused: Known | None = None) -> Choice:
    """What `auto` would run for these inputs, and why.

    Args:
        refused: what the operation itself knows against a backend, by name; None under a name: nothing.
    """
    refusals = []
    for backend in _BACKENDS:
        refusal = backend.declines(operation, tensors, refused)
        if refusal is None:
            return Choice(operation, backend.name, "; ".join([backend.why, *refusals]))
        refusals.append(f"not {backend.name}: {refusal}")
    raise RuntimeError(f"no backend runs {operation}: {'; '.join(refusals)}")


def choose(operation: str, backend: str, *tensors: Tensor, refused: Known | None = None) -> str:
    """The backend to run: the one asked for, or what `auto` takes; `refused` as in `explain`.

    Raises:
        ValueError: for a name that is not a backend, or one that cannot run these inputs, with its reason.
    """
    if backend == "auto":
        return explain(operation, *tensors, refused=refused).backend
    for candidate in _BACKENDS:
        if candidate.name == backend:
            refusal = candidate.cannot(operation, tensors, refused)
            if refusal is not None:
                raise ValueError(f"backend {backend!r} cannot run {operation}: {refusal}; use backend='auto'")
            return backend
    raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(NAMES)}")
