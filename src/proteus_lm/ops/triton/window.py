"""Sliding-window linear attention with c = 2 (spec/linear.md 1.4 and 2.8): what surrounds the kernels' one call.

The kernels meet each chunk with the decay and the second write of its first token done. Inside a document the chunk before does
that; for a document's first token it is done here, on the state handed in. Without one nothing is left to do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops.state import SWLAState
from proteus_lm.ops.triton.front import run


def _entered(state: SWLAState, g: Tensor, weight: Tensor, opened: Tensor | None, axis: str) -> Tensor:
    """The matrix (N, H, K, V), fp32, behind the first token's decay g and second write `weight` (N, H) in `opened` (N,) places."""
    matrix = state.matrix.float()
    keys = state.keys[:, -1].float() * weight[..., None]
    moved = g.exp()[..., None, None] * matrix + keys[..., :, None] * state.values[:, -1].float()[..., None, :]
    if opened is None:
        return moved
    moves = torch.arange(matrix.shape[-2 if axis == "key" else -1], device=matrix.device) < opened[:, None]
    return torch.where(moves[:, None, :, None] if axis == "key" else moves[:, None, None], moved, matrix)


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
    """S_t = e^g S_{t-1} + sum_{j<2} gamma[..., j] k_{t-j} v_{t-j}^T, by the mask of the write. As `proteus_lm.ops.swla`."""
    rows, length = q.shape[:2]
    if cu_seqlens is None:
        bounds = torch.arange(rows + 1, device=q.device) * length
    else:
        bounds = cu_seqlens = cu_seqlens.to(q.device).long()
    count, matrix = len(bounds) - 1, None
    if isinstance(initial_state, Tensor):
        window = (x.new_zeros(count, 1, *x.shape[2:]) for x in (k, v))
        initial_state = SWLAState(initial_state, *window)
    if initial_state is not None:
        opened = None
        if activation is not None and activation.schedule.blocks > 1:
            opened = activation.active.to(q.device).expand(rows, length).flatten()[bounds[:-1]]
        first_g, first_weight = (x.flatten(0, 1)[bounds[:-1]].float() for x in (g, gamma[..., 1]))
        matrix = _entered(initial_state, first_g, first_weight, opened, axis)
    out, final = run("swla", q, k, v, None, g, gamma, activation, axis, scale, matrix, cu_seqlens, output_final_state)
    if final is None:
        return out, None
    keys, values = (x.flatten(0, 1)[bounds[1:] - 1][:, None] for x in (k, v))
    return out, SWLAState(final, keys, values)
