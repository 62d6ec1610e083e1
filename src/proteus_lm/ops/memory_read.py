"""An MLP memory that stands still: what it answers without any write, and how much the last tokens surprise it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proteus_lm.ops._deep_chunk import entries, places
from proteus_lm.ops._deep_loss import norm_gradient
from proteus_lm.ops._linear_operator import compute_dtype
from proteus_lm.ops.deep import Norm, answer
from proteus_lm.ops.memory_activations import memory_function
from proteus_lm.ops.state import TitansState


def titans_read(
    weights: Sequence[Tensor],
    q: Tensor,
    active: Tensor | None = None,
    *,
    memory_activation: str = "gelu_tanh",
    residual_norm: Norm | None = None,
) -> Tensor:
    """f(q) of the memory f(x) = act(.. act(x W1) ..) WL, each query seeing the units open to it (Titans' M*; spec/deep.md 1.6).

    Computed in fp32, or fp64 if an input is, whatever the autocast. What a row has open to none of its queries is not touched: NaN
    there reaches neither result nor gradient.

    Args:
        weights: W1 (N, H, D, F), .., WL (N, H, F, Dv); L >= 1, one matrix is (N, H, D, Dv).
        q: (N, L, H, D).
        active: int (N or 1, L), open hidden units (rows of one matrix) of each query; None: all.
        memory_activation: "gelu_tanh" or "silu".
        residual_norm: gain and bias (H, D) of a memory x + LN(f(x)), as in `titans_memory`.

    Returns:
        (N, L, H, Dv) in q's type.

    Raises:
        ValueError: for shapes that do not fit each other, or an unknown activation.
    """
    act = memory_function(memory_activation).act
    _check(weights, q, active)
    dtype, depth = compute_dtype(q, *weights), len(weights)
    with torch.autocast(q.device.type, enabled=False):
        x, layers, opened = q.to(dtype).transpose(1, 2), [w.to(dtype) for w in weights], None
        if active is not None:
            opened = torch.arange(layers[-1].shape[-2], device=q.device) < active[..., None]
            ever = opened.any(1)
            layers = [torch.where(entries(ever, place)[:, None], w, 0) for w, place in zip(layers, places(depth))]
            opened = opened[:, None]
        if opened is not None and depth == 1:
            x = torch.where(opened, x, 0)
        for layer in layers[:-1]:
            x = act(x @ layer)
            x = x if opened is None else torch.where(opened, x, 0)
        return answer((x @ layers[-1]).transpose(1, 2), q, q.dtype, residual_norm).to(q.dtype)


def titans_surprise(state: TitansState, *, memory_activation: str = "gelu_tanh", residual_norm: Norm | None = None) -> Tensor:
    """Mean norm of the inner gradients, over heads and the tokens of the open chunk: what the loss wants changed, before theta.

    The gradient of a token is a product of one row and one column in each matrix, so its norm needs none of its entries
    (spec/deep.md 2.6). It is that before any clipping.

    Args:
        state: as `titans_memory` returns it.
        memory_activation: "gelu_tanh" or "silu".
        residual_norm: as in `titans_memory`, of the calls that made the state.

    Returns:
        (N,), fp32 or wider; 0 for a row whose open chunk is empty.
    """
    act, slope = memory_function(memory_activation)
    open_units = torch.arange(state.weights[-1].shape[-2], device=state.k.device) < state.active[..., None]
    mask = open_units[:, None]  # (N, 1, chunk, units)
    with torch.no_grad(), torch.autocast(state.k.device.type, enabled=False):
        ever, layout = open_units.any(1), places(len(state.weights))
        weights = [torch.where(entries(ever, place)[:, None], w, 0) for w, place in zip(state.weights, layout)]
        dtype = weights[0].dtype
        x = state.k.to(dtype).transpose(1, 2)
        inputs, before = [torch.where(mask, x, 0) if len(weights) == 1 else x], []
        for weight in weights[:-1]:
            before.append(inputs[-1] @ weight)
            inputs.append(torch.where(mask, act(before[-1]), 0))
        out, wanted = inputs[-1] @ weights[-1], state.v.to(dtype).transpose(1, 2)
        error = out - wanted
        if residual_norm is not None:
            error, _ = norm_gradient(out, wanted, *(t.to(dtype)[:, None] for t in residual_norm))
        energy = inputs[-1].square().sum(-1) * error.square().sum(-1)
        for layer in range(len(weights) - 2, -1, -1):
            error = torch.where(mask, error @ weights[layer + 1].mT * slope(before[layer]), 0)
            energy = energy + inputs[layer].square().sum(-1) * error.square().sum(-1)
        there = state.active > 0
        norms = torch.where(there[:, None], energy.sqrt(), 0).mean(1).sum(1)
        return norms / there.sum(1).clamp(min=1)


def _check(weights: Sequence[Tensor], q: Tensor, active: Tensor | None) -> None:
    if not weights or q.dim() != 4 or any(w.dim() != 4 for w in weights):
        raise ValueError(
            f"q has shape {tuple(q.shape)} and the weights {[tuple(w.shape) for w in weights]}; they must be (N, L, H, D) and at "
            "least one (N, H, in, out)"
        )
    rows, length, heads, width = q.shape
    for i, w in enumerate(weights):
        if w.shape[:3] != (rows, heads, width):
            raise ValueError(
                f"W{i + 1} has shape {tuple(w.shape)}; behind what comes before it must be {(rows, heads, width)}, out"
            )
        width = w.shape[3]
    if active is not None and (active.dim() != 2 or active.shape[0] not in (1, rows) or active.shape[1] != length):
        raise ValueError(f"active has shape {tuple(active.shape)}; it must be ({rows} or 1, {length})")
