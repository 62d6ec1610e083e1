"""flash-linear-attention's kernels as a backend of our rules: the ungated ones as they are, scheduled ones by masks.

From a state of zeros, masking k (key rows) or v (value columns) is exact: what was never written stays zero, so its decay and its
read do nothing (spec/linear.md 2.3, 2.4). Any other state is taken stage by stage, with its locked part set aside (2.6).
Nothing of that package is imported before `refuse` has found that everything else fits. Tested with fla-core 0.6.0.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from proteus_lm.activation import Activation

KERNELS = {
    "retention": "simple_gla.chunk_simple_gla",
    "delta_rule": "delta_rule.chunk_delta_rule",
    "gated_delta_rule": "gated_delta_rule.chunk_gated_delta_rule",
    "comba": "comba.chunk_comba",
}
"""Where each rule is, in `fla.ops`. Comba's p and our order of arguments go by name (spec/linear.md 1.3, trap C4)."""
LEFT_OUT: dict[str, str] = {
    "gated_delta_rule": "its gradient of g missed the limit in one check of five (docs/kernels.md); ask for it by name"
}
"""Rules that `auto` leaves to others: benchmarks/ops_right.py has not found them right through this backend."""
MAX_KEYS = 256  # of the rules that write an error (fla/ops/common/chunk_delta_h.py)


@cache
def installed() -> bool:
    """Whether the package fla is there; looked up once, without importing it."""
    return importlib.util.find_spec("fla") is not None


def _load(module: str) -> ModuleType:
    return importlib.import_module(f"fla.ops.{module}")


def kernel(operation: str) -> Callable[..., tuple[Tensor, Any]]:
    """fla's function for a rule. Imports fla, which takes seconds the first time."""
    module, name = KERNELS[operation].rsplit(".", 1)
    return getattr(_load(module), name)


def refuse(operation: str, tensors: tuple[Tensor, ...]) -> str | None:
    """Why fla cannot run `operation` on its tensors in their order (q, k, v first), or None.

    Args:
        tensors: the operation's tensors, in the order of its signature; none to ask about the machine alone.
    """
    if operation not in KERNELS:
        return f"flash-linear-attention has no {operation}"
    if not installed():
        return "the package flash-linear-attention is not installed"
    if not tensors:
        return None if torch.cuda.is_available() else "no CUDA device"
    if not tensors[0].is_cuda:
        return f"tensors are on {tensors[0].device.type}; its kernels need CUDA"
    return refuse_shapes(operation, tensors) or _guard(operation, tensors)


def refuse_shapes(operation: str, tensors: tuple[Tensor, ...]) -> str | None:
    """As `refuse`, of types and sizes alone: what its kernels assert, or would compute wrongly without a word."""
    data = tensors[: 4 if operation == "comba" else 3]
    q, v = tensors[0], tensors[2]
    kinds = {x.dtype for x in data}
    if any(x.dtype == torch.float64 for x in tensors):
        return "float64 inputs; its kernels compute in float32"
    if len(kinds) > 1:
        return f"q, k, v are of several types ({', '.join(sorted(map(str, kinds)))}); its kernels take one"
    half = q.dtype in (torch.float16, torch.bfloat16)
    if operation == "delta_rule" and not half:
        return "its delta rule takes float16 and bfloat16 alone"
    if operation != "retention" and q.shape[-1] > MAX_KEYS:
        return f"K = {q.shape[-1]}; its delta rules hold at most {MAX_KEYS} key rows"
    if operation == "retention" and half and (q.shape[-1] % 2 or v.shape[-1] % 2) and _wanted(tensors):
        return f"K = {q.shape[-1]}, V = {v.shape[-1]}; its backward wants both even in 16 bits"
    return None


def held(operation: str, tensors: tuple[Tensor, ...]) -> str | None:
    """Why `auto` leaves inputs that fla can run to another backend, or None."""
    if tensors and tensors[0].dtype == torch.float32:
        return "float32 inputs, and its kernels multiply in tf32 one product after another; ask for it by name"
    if torch.compiler.is_compiling():
        return "torch.compile breaks its graph at them"
    return LEFT_OUT.get(operation)


def refuse_state(operation: str, tensors: tuple[Tensor, ...], state: Any, activation: Activation | None) -> str | None:
    """Why fla cannot start from `state` under `activation`, or None."""
    if not isinstance(state, Tensor):
        return None
    if state.dtype == torch.float64:
        return "the initial state is float64; its kernels keep it in float32"
    if activation is not None and activation.schedule.blocks > 1 and activation.segments is None:
        return (
            "an initial state under a schedule goes stage by stage, and with packed documents or an offset a row "
            "the host does not know the stages"
        )
    return _guard(operation, (*tensors, state)) if tensors[0].is_cuda and installed() else None


def run(
    operation: str,
    tensors: Mapping[str, Tensor],
    *,
    activation: Activation | None,
    axis: str,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """A rule by fla's kernel; arguments and results as `proteus_lm.ops.retention` has them.

    Args:
        tensors: by the names of the rule's signature.
    """
    call, given = kernel(operation), _arguments(operation, tensors)
    device = tensors["q"].device
    keywords = {"scale": scale, "cu_seqlens": None if cu_seqlens is None else cu_seqlens.to(device).long()}
    state = None if initial_state is None else initial_state.float()
    masked = "k" if axis == "key" else "v"
    with torch.autocast(device.type, enabled=False):
        if activation is None or _all_open(activation):
            return call(**given, **keywords, initial_state=state, output_final_state=output_final_state)
        if state is None:
            opened = activation.mask().to(device)[:, :, None]
            given[masked] = torch.where(opened, given[masked], 0)
            return call(**given, **keywords, initial_state=None, output_final_state=output_final_state)
        out, state = _stages(call, given, keywords, state, activation, masked)
        return out, state if output_final_state else None


def _stages(
    call: Callable[..., tuple[Tensor, Any]],
    given: dict[str, Tensor],
    keywords: dict[str, Any],
    state: Tensor,
    activation: Activation,
    masked: str,
) -> tuple[Tensor, Tensor]:
    """One call a stage: locked coordinates of the state stand aside as they are, and come back behind it."""
    outputs = []
    for first, last, count in activation.segments or ():
        opened = torch.arange(activation.dim, device=state.device) < count
        part = {n: x if n == "g_gamma" else x[:, first:last] for n, x in given.items()}
        part[masked] = torch.where(opened, part[masked], 0)
        here = opened[:, None] if masked == "k" else opened
        out, after = call(**part, **keywords, initial_state=torch.where(here, state, 0), output_final_state=True)
        outputs.append(out)
        state = torch.where(here, after, state)
    return torch.cat(outputs, 1), state


def _arguments(operation: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as fla names them. Decays in float32; one that is constant by its strides goes as one number a head."""
    given = dict(tensors)
    if "g" in given:
        given["g"] = given["g"].float()
    if operation == "retention" and _constant(tensors["g"]):
        given["g_gamma"] = given.pop("g")[0, 0]
    return given


def _constant(g: Tensor) -> bool:
    """Whether (B, T, H) is one value a head, expanded, that wants no gradient: RetNet's, for which fla has an own path."""
    return not g.requires_grad and all(size == 1 or stride == 0 for size, stride in zip(g.shape[:2], g.stride()[:2]))


def _all_open(activation: Activation) -> bool:
    if activation.schedule.blocks == 1:
        return True
    return activation.segments is not None and all(count == activation.dim for *_, count in activation.segments)


def _wanted(tensors: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _guard(operation: str, tensors: tuple[Tensor, ...]) -> str | None:
    """fla's own guard, found before work is lost: on Hopper, Triton 3.4.0 to 3.7.0 miscompiles its gated backward.

    It raises in the backward unless tilelang stands in, which does so for the rules that write an error only
    (fla/ops/common/chunk_o.py, fla/ops/common/backends/tilelang).
    """
    if operation == "delta_rule" or not _wanted(tensors) or (operation == "retention" and _constant(tensors[3])):
        return None  # not gated
    try:
        guarded = _load("common.chunk_o")
    except Exception as reason:  # a package that does not import is one that does not run
        return f"flash-linear-attention does not import: {type(reason).__name__}: {reason}"
    flags = ("IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1")
    hopper, since, mended = (bool(getattr(guarded, name, False)) for name in flags)
    if not (hopper and since and not mended) or (operation != "retention" and _tilelang()):
        return None
    remedy = "" if operation == "retention" else " or install tilelang"
    return (
        "Triton 3.4.0 to 3.7.0 on Hopper computes fla's gated backward wrongly, and fla raises there "
        f"(fla-org/flash-linear-attention#640); upgrade Triton to 3.7.1{remedy}"
    )


def _tilelang() -> bool:
    """Whether fla's replacement for the guarded kernel would run."""
    try:
        backend = _load("common.backends.tilelang").CommonTileLangBackend()
        return bool(backend.is_available() and backend.is_enabled())
    except Exception:  # another version of fla: without its word, the guard holds
        return False
