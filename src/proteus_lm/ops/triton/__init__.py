"""GPU kernels of the linear memories (Triton), same signatures as `proteus_lm.ops` less `backend`.

Importing this package does not need Triton; calling an operation does. `refuse` says beforehand what cannot run, and why.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops.rows import check_packed
from proteus_lm.ops.state import SWLAState

OPERATIONS = ("retention", "delta_rule", "gated_delta_rule", "comba")
MAX_KEYS, MAX_VALUES = 256, 512


def refuse(operation: str, tensors: tuple[Tensor, ...]) -> str | None:
    """Why these kernels cannot run `operation` on its tensors in their order (q, k, v first), or None.

    Args:
        tensors: the operation's tensors, in the order of its signature; none to ask about the machine alone.
    """
    if operation not in OPERATIONS:
        return f"no Triton kernel for {operation}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not tensors:
        return None if torch.cuda.is_available() or interpreted else "no CUDA device"
    q, v = tensors[0], tensors[2]
    if q.device.type != "cuda" and not interpreted:
        return f"tensors are on {q.device.type}; the kernels need CUDA"
    if any(x.dtype == torch.float64 for x in tensors):
        return "float64 inputs; the kernels compute in float32"
    if q.shape[-1] > MAX_KEYS or v.shape[-1] > MAX_VALUES:
        return f"K = {q.shape[-1]}, V = {v.shape[-1]}; the kernels hold at most {MAX_KEYS} key rows and {MAX_VALUES} value columns"
    return None


def _run(
    rule: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    activation: Activation | None,
    axis: str,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    from proteus_lm.ops.triton.linear import linear

    if axis not in ("key", "value"):
        raise ValueError(f"axis is {axis!r}; it must be 'key' or 'value'")
    check_packed(len(q), cu_seqlens)
    dtype = v.dtype
    # The kernels take one type: that of q, k, v, p where they agree, else fp32.
    together = {x.dtype for x in (q, k, v, p) if x is not None}
    if len(together) > 1:
        q, k, v, p = (x if x is None else x.float() for x in (q, k, v, p))
    q, k, v, p, g, beta = (x if x is None else x.contiguous() for x in (q, k, v, p, g, beta))
    blocks, active, segments = 1, None, None
    if activation is not None and activation.schedule.blocks > 1:
        blocks = activation.schedule.blocks
        if activation.segments is None:
            active = activation.active
        else:
            segments = [x for segment in activation.segments for x in segment]
    needed = (q, k, v, p, g, beta, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in needed)
    state = None if initial_state is None else initial_state.float().contiguous()
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    with torch.autocast(q.device.type, enabled=False):
        out, final, *_ = linear(
            *(q, k, v, p, g, beta, state, active, cu_seqlens, segments, blocks, rule, axis, scale, output_final_state, save)
        )
    return out.to(dtype), final if output_final_state else None


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
