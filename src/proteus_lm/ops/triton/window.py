"""Sliding-window linear attention with c = 2 as one decayed write a token (spec/linear.md 1.4 and 2.8).

With N_t = S_t - lambda_t k_t v_t^T, all but the token's own write:
    N_t = alpha_t N_{t-1} + kappa_t v_{t-1}^T,  kappa_t = (alpha_t lambda_{t-1} P_{t-1} + beta_t P_t) k_{t-1},
    o_t = scale (N_t^T q_t + lambda_t (q_t . P_t k_t) v_t)
P_t keeps the rows open at t (with columns the same factors stand at v_{t-1} instead). So it costs what retention costs, and one
elementwise pass before and after (blend.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops.state import SWLAState
from proteus_lm.ops.triton.blend import blend
from proteus_lm.ops.triton.front import run


def _before(x: Tensor, first: Tensor, starts: Tensor | None) -> Tensor:
    """Each token's predecessor in x (B, T, ...); a document's first token gets its row of `first` (N, ...)."""
    if starts is None:
        return torch.cat((first[:, None].to(x.dtype), x[:, :-1]), 1)
    moved = torch.cat((x[:, :1], x[:, :-1]), 1)
    return moved.index_copy(1, starts, first[None].to(x.dtype))


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
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(q.device)
    starts = None if cu_seqlens is None else cu_seqlens[:-1].long()
    rows, length, heads = q.shape[:3]
    count = rows if starts is None else len(starts)
    if isinstance(initial_state, SWLAState):
        matrix, first_k, first_v = initial_state.matrix, initial_state.keys[:, -1], initial_state.values[:, -1]
    else:
        matrix = initial_state
        first_k, first_v = k.new_zeros(count, *k.shape[2:]), v.new_zeros(count, *v.shape[2:])
    own, other = gamma[..., 0].float(), gamma[..., 1].float().contiguous()
    # What the token before wrote as its own is already in a state that was handed in: nothing of it is left to add.
    matured = (g.float().exp() * _before(own, own.new_zeros(count, heads), starts)).contiguous()
    flat = torch.arange(rows, device=q.device) * length if starts is None else starts
    documents = torch.full((rows * length,), -1, device=q.device, dtype=torch.int32)
    documents = documents.index_copy(0, flat, torch.arange(count, device=q.device, dtype=torch.int32))
    if activation is not None and activation.schedule.blocks == 1:
        activation = None
    now = None
    if activation is not None:
        active = activation.active.to(q.device).int().expand(rows, length)
        before = _before(active, active.new_zeros(count), starts)
        now = torch.stack((active.reshape(-1), before.reshape(-1))).contiguous()
    q, k, v = (x.contiguous() for x in (q, k, v))
    keys, values, near = blend(
        *(q, k, v, matured, other, (own * factor).contiguous()),
        *(first_k.contiguous(), first_v.contiguous(), documents, now, axis),
    )
    out, final = run("retention", q, keys, values, None, g, None, activation, axis, factor, matrix, cu_seqlens, output_final_state)
    near = near[..., None]
    if activation is not None and axis == "value":
        near = near * activation.mask().to(v.device)[:, :, None]
    out = torch.addcmul(out, v, near.to(v.dtype)).to(v.dtype)
    if final is None:
        return out, None
    ends = torch.arange(1, rows + 1, device=q.device) * length - 1
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].long() - 1
    last_k, last_v = k.flatten(0, 1)[ends], v.flatten(0, 1)[ends]
    written_k, written_v = last_k.float() * own.flatten(0, 1)[ends][..., None], last_v.float()
    if now is not None:
        dim = (k if axis == "key" else v).shape[-1]
        seen = (torch.arange(dim, device=k.device) < now[0, ends][:, None])[:, None]
        written_k, written_v = (written_k * seen, written_v) if axis == "key" else (written_k, written_v * seen)
    return out, SWLAState(final + written_k[..., :, None] * written_v[..., None, :], last_k[:, None], last_v[:, None])
