"""Sliding-window linear attention with c = 2 as one decayed write a token (spec/linear.md 1.4 and 2.8).

With N_t = S_t - lambda_t k_t v_t^T, all but the token's own write:
    N_t = alpha_t N_{t-1} + kappa_t v_{t-1}^T,  kappa_t = (alpha_t lambda_{t-1} P_{t-1} + beta_t P_t) k_{t-1},
    o_t = scale (N_t^T q_t + lambda_t (q_t . P_t k_t) v_t)
P_t keeps the rows open at t (with columns the same factors stand at v_{t-1} instead). So it costs what retention costs, and a few
elementwise passes, which PyTorch does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops.state import SWLAState
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
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    starts = None if cu_seqlens is None else cu_seqlens[:-1].long()
    count = len(q) if starts is None else len(starts)
    if isinstance(initial_state, SWLAState):
        matrix, first_k, first_v = initial_state.matrix, initial_state.keys[:, -1], initial_state.values[:, -1]
    else:
        matrix = initial_state
        first_k, first_v = k.new_zeros(count, *k.shape[2:]), v.new_zeros(count, *v.shape[2:])
    own, other = gamma[..., 0].float(), gamma[..., 1].float()
    # What the token before wrote as its own is already in a state that was handed in: nothing of it is left to add.
    matured = g.float().exp() * _before(own, own.new_zeros(count, own.shape[-1]), starts)
    past_k, past_v = _before(k, first_k, starts), _before(v, first_v, starts)
    gated = activation is not None and activation.schedule.blocks > 1
    mask = before = None
    if gated:
        mask = activation.mask()
        none = mask.new_zeros(len(mask) if starts is None else count, mask.shape[-1])
        before = _before(mask, none, starts)[:, :, None]
        mask = mask[:, :, None]
    weight = (matured + other)[..., None]
    if gated:  # rows that open at this very token take only the second write of the token before
        weight = matured[..., None] * before + other[..., None]
    if axis == "key":
        past_k = (past_k * weight).to(k.dtype)
        near = ((q * k) * mask if gated else q * k).sum(-1, dtype=torch.float32)
    else:
        past_v = (past_v * weight).to(v.dtype)
        near = (q * k).sum(-1, dtype=torch.float32)
    out, final = run("retention", q, past_k, past_v, None, g, None, activation, axis, scale, matrix, cu_seqlens, output_final_state)
    local = v * (near * own * scale)[..., None]
    if gated and axis == "value":
        local = local * mask
    out = (out + local).to(v.dtype)
    if final is None:
        return out, None
    ends = slice(-1, None) if cu_seqlens is None else cu_seqlens[1:].long() - 1
    last = [x[:, ends] if starts is None else x[0, ends][:, None] for x in (k, v)]
    weight_k = last[0][:, 0].float() * (own[:, -1] if starts is None else own[0, ends])[..., None]
    last_v = last[1][:, 0].float()
    if gated:
        open_last = mask[:, -1] if starts is None else mask[0, ends]
        weight_k, last_v = (weight_k * open_last, last_v) if axis == "key" else (weight_k, last_v * open_last)
    return out, SWLAState(final + weight_k[..., :, None] * last_v[..., None, :], *last)
