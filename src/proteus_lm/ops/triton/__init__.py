"""GPU kernels of the linear memories (Triton), same signatures as `proteus_lm.ops` less `backend`.

Importing this package does not need Triton; calling an operation does. `refuse` says beforehand what cannot run, and why.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, cast

import torch
from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops.state import SWLAState

OPERATIONS = ("retention", "swla", "delta_rule", "gated_delta_rule", "comba")
MAX_KEYS, MAX_VALUES = 256, 512
MAX_KEYS_FLOAT = 128  # beyond, fp32 spills so much that compiling alone takes minutes


_INSTALLED = importlib.util.find_spec("triton") is not None  # once, for a decoding step asks each time


def installed() -> bool:
    """Whether the package triton is there."""
    return _INSTALLED


def shared_memory(device: torch.device) -> int:
    """Bytes of a GPU's shared memory that one program can have."""
    import triton

    index = torch.cuda.current_device() if device.index is None else device.index
    return cast("Any", triton.runtime.driver.active).utils.get_device_properties(index)["max_shared_mem"]


def refuse(operation: str, tensors: tuple[Tensor, ...]) -> str | None:
    """Why these kernels cannot run `operation` on its tensors in their order (q, k, v first), or None.

    Args:
        tensors: the operation's tensors, in the order of its signature; none to ask about the machine alone.
    """
    if operation not in OPERATIONS:
        return f"no Triton kernel for {operation}"
    if not installed():
        return "the package triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not tensors:
        return None if torch.cuda.is_available() or interpreted else "no CUDA device"
    q, v = tensors[0], tensors[2]
    if q.device.type != "cuda" and not interpreted:
        return f"tensors are on {q.device.type}; the kernels need CUDA"
    if any(x.dtype == torch.float64 for x in tensors):
        return "float64 inputs; the kernels compute in float32"
    half = {x.dtype for x in tensors[: 4 if operation == "comba" else 3]} in ({torch.bfloat16}, {torch.float16})
    if not half and q.shape[-1] > MAX_KEYS_FLOAT:
        return f"K = {q.shape[-1]} in float32; the kernels hold at most {MAX_KEYS_FLOAT} key rows of that type, use bfloat16"
    if operation == "swla" and tensors[4].shape[-1] != 2:
        return f"a window of {tensors[4].shape[-1]} tokens; the kernel is for 2"
    if q.shape[-1] > MAX_KEYS or v.shape[-1] > MAX_VALUES:
        return f"K = {q.shape[-1]}, V = {v.shape[-1]}; the kernels hold at most {MAX_KEYS} key rows and {MAX_VALUES} value columns"
    return None


def refuse_step(operation: str, tensors: tuple[Tensor, ...], state: Tensor, read: str) -> str | None:
    """Why the decoding kernel does not take a step of `operation`, or None.

    Args:
        tensors: those of the step, in the order of its signature.  state: (N, H, K, V).  read: "post" or "pre".
    """
    if operation not in OPERATIONS or read != "post":
        return f"no decoding kernel for {operation} with read {read!r}"
    if operation == "swla" and tensors[3].shape[-1] != 2:
        return f"a window of {tensors[3].shape[-1]} tokens; the decoding kernel is for 2"
    if not state.is_cuda or not installed():
        return "the decoding kernels need CUDA and the package triton"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, state)):
        return "a gradient is wanted; the decoding kernels have none"
    if state.dtype != torch.float32 or any(x.dtype == torch.float64 for x in tensors):
        return "the decoding kernels keep the state in float32"
    if state.shape[-2] > MAX_KEYS:
        return f"K = {state.shape[-2]}; the decoding kernels hold at most {MAX_KEYS} key rows"
    return None


def _run(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    from proteus_lm.ops.triton.front import run  # imports triton

    return run(*arguments)


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """S_t = e^g S_{t-1} + k v^T (spec/linear.md 1.1). As `proteus_lm.ops.retention`."""
    return _run("retention", q, k, v, None, g, None, activation, axis, scale, initial_state, cu_seqlens, output_final_state)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """S_t = S_{t-1} + beta k (v - S_{t-1}^T k)^T (spec/linear.md 1.2). As `proteus_lm.ops.delta_rule`."""
    return _run("delta_rule", q, k, v, None, None, beta, activation, axis, scale, initial_state, cu_seqlens, output_final_state)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """S_t = e^g S_{t-1} + beta k (v - e^g S_{t-1}^T k)^T (spec/linear.md 1.5). As `proteus_lm.ops.gated_delta_rule`."""
    return _run("gated_delta_rule", q, k, v, None, g, beta, activation, axis, scale, initial_state, cu_seqlens, output_final_state)


def comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """S_t = e^g S_{t-1} + beta k (v - S_{t-1}^T p)^T (spec/linear.md 1.3). As `proteus_lm.ops.comba`."""
    return _run("comba", q, k, v, p, g, beta, activation, axis, scale, initial_state, cu_seqlens, output_final_state)


def swla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    gamma: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    initial_state: Tensor | SWLAState | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, SWLAState | None]:
    """S_t = e^g S_{t-1} + sum_{j<2} gamma[..., j] k_{t-j} v_{t-j}^T (spec/linear.md 1.4). As `proteus_lm.ops.swla`."""
    from proteus_lm.ops.triton import window

    return window.swla(
        *(q, k, v, g, gamma),
        activation=activation,
        axis=axis,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
    )


def _step(*arguments: Any) -> tuple[Tensor, Tensor]:
    from proteus_lm.ops.triton.step import run_step  # imports triton

    return run_step(*arguments)


def retention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    *,
    active: Tensor | None = None,
    axis: str = "key",
    scale: float | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of `retention` for inference. As `proteus_lm.ops.retention_step`; `inplace` moves the given state on itself."""
    return _step("retention", q, k, v, None, g, None, state, active, axis, scale, inplace)


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    active: Tensor | None = None,
    axis: str = "key",
    scale: float | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of `delta_rule` for inference; see `retention_step`."""
    return _step("delta_rule", q, k, v, None, None, beta, state, active, axis, scale, inplace)


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    active: Tensor | None = None,
    axis: str = "key",
    scale: float | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of `gated_delta_rule` for inference; see `retention_step`."""
    return _step("gated_delta_rule", q, k, v, None, g, beta, state, active, axis, scale, inplace)


def comba_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    active: Tensor | None = None,
    axis: str = "key",
    scale: float | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of `comba` for inference; see `retention_step`."""
    return _step("comba", q, k, v, p, g, beta, state, active, axis, scale, inplace)


def swla_step(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    gamma: Tensor,
    keys: Tensor,
    values: Tensor,
    state: Tensor,
    *,
    active: Tensor | None = None,
    axis: str = "key",
    scale: float | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of `swla` with c = 2 for inference, on the matrix alone; see `retention_step`.

    Args:
        v: (N, H, V), only its type is used: that of the output.
        gamma: (N, H, 2).  keys, values: (N, 2, H, D), the token before first.  state: fp32 (N, H, K, V), an `SWLAState`'s matrix.
    """
    out, state = _step("swla", q, keys, values, None, g, gamma, state, active, axis, scale, inplace)
    return out.to(v.dtype), state
