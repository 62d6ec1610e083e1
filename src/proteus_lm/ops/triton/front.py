"""From an operation's arguments to the kernels' one call."""

from __future__ import annotations

import torch
from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops.rows import check_packed
from proteus_lm.ops.triton.linear import linear


def run(
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
    """Any rule of `linear.RULES` on (B, T, H, D) tensors; results as `proteus_lm.ops.retention` gives them.

    Raises:
        ValueError: for an unknown axis, or `cu_seqlens` with several rows.
    """
    if axis not in ("key", "value"):
        raise ValueError(f"axis is {axis!r}; it must be 'key' or 'value'")
    check_packed(len(q), cu_seqlens)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(q.device)
    dtype = v.dtype
    # The kernels take one type: that of q, k, v, p where they agree, else fp32.
    together = {x.dtype for x in (q, k, v, p) if x is not None}
    if len(together) > 1:
        q, k, v = (x.float() for x in (q, k, v))
        p = None if p is None else p.float()
    q, k, v = (x.contiguous() for x in (q, k, v))
    p, g, beta = (x if x is None else x.contiguous() for x in (p, g, beta))
    blocks, active, segments = 1, None, None
    if activation is not None and activation.schedule.blocks > 1:
        blocks = activation.schedule.blocks
        if activation.segments is None:
            active = activation.active.to(q.device)
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
