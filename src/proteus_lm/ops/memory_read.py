"""An MLP memory that stands still: what it answers without any write, and how much the last tokens surprise it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proteus_lm.ops._deep_chunk import entries
from proteus_lm.ops._deep_loss import norm_gradient
from proteus_lm.ops._linear_operator import compute_dtype
from proteus_lm.ops.deep import Norm, answer, check_depth
from proteus_lm.ops.memory_activations import layers, matrix_names, memory_function, places
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

    Computed in fp32, or fp64 if an input is, whatever the autocast; on a GPU the products of queries in bf16 take their factors in
    bf16, as the kernels that write do. What a row has open to none of its queries is not touched: NaN
    there reaches neither result nor gradient.

    Args:
        weights: W1 (N, H, D, F), .., WL (N, H, F, Dv); L >= 1, one matrix is (N, H, D, Dv). Of "swiglu" as in `titans_memory`.
        q: (N, L, H, D).
        active: int (N or 1, L), open hidden units (rows of one matrix) of each query; None: all.
        memory_activation: "gelu_tanh", "silu" or "swiglu".
        residual_norm: gain and bias (H, D) of a memory x + LN(f(x)), as in `titans_memory`.

    Returns:
        (N, L, H, Dv) in q's type.

    Raises:
        ValueError: for shapes that do not fit each other, or an unknown activation.
    """
    function = memory_function(memory_activation)
    _check(weights, q, active, memory_activation)
    dtype, order = compute_dtype(q, *weights), layers(len(weights), function.arity)
    if q.is_cuda and q.dtype == torch.bfloat16:
        dtype = q.dtype
    with torch.autocast(q.device.type, enabled=False):
        x, matrices, opened = q.to(dtype).transpose(1, 2), [w.to(dtype) for w in weights], None
        if active is not None:
            opened = torch.arange(matrices[-1].shape[-2], device=q.device) < active[..., None]
            matrices, opened = _blanked(matrices, opened.any(1), function.arity), opened[:, None]
        if opened is not None and len(matrices) == 1:
            x = torch.where(opened, x, 0)
        for layer in order[:-1]:
            x = function.join([x @ w for w in matrices[layer]])
            x = x if opened is None else torch.where(opened, x, 0)
        return answer((x @ matrices[-1]).transpose(1, 2), q, q.dtype, residual_norm).to(q.dtype)


def titans_surprise(state: TitansState, *, memory_activation: str = "gelu_tanh", residual_norm: Norm | None = None) -> Tensor:
    """Mean norm of the inner gradients, over heads and the tokens of the open chunk: what the loss wants changed, before theta.

    The gradient of a token is a product of one row and one column in each matrix, so its norm needs none of its entries
    (spec/deep.md 2.6). It is that before any clipping.

    Args:
        state: as `titans_memory` returns it.
        memory_activation: "gelu_tanh", "silu" or "swiglu".
        residual_norm: as in `titans_memory`, of the calls that made the state.

    Returns:
        (N,), fp32 or wider; 0 for a row whose open chunk is empty.
    """
    function = memory_function(memory_activation)
    check_depth(state.weights, memory_activation)
    open_units = torch.arange(state.weights[-1].shape[-2], device=state.k.device) < state.active[..., None]
    mask = open_units[:, None]  # (N, 1, chunk, units)
    with torch.no_grad(), torch.autocast(state.k.device.type, enabled=False):
        weights, order = _blanked(state.weights, open_units.any(1), function.arity), layers(len(state.weights), function.arity)
        x = state.k.to(weights[0].dtype).transpose(1, 2)
        inputs, before = [torch.where(mask, x, 0) if len(weights) == 1 else x], []
        for layer in order[:-1]:
            before.append([inputs[-1] @ w for w in weights[layer]])
            inputs.append(torch.where(mask, function.join(before[-1]), 0))
        out, wanted = inputs[-1] @ weights[-1], state.v.to(x.dtype).transpose(1, 2)
        errors = [out - wanted]
        if residual_norm is not None:
            errors = [norm_gradient(out, wanted, *(t.to(x.dtype)[:, None] for t in residual_norm))[0]]
        energy = inputs[-1].square().sum(-1) * errors[0].square().sum(-1)
        for number in range(len(order) - 2, -1, -1):
            above = torch.stack([error @ w.mT for error, w in zip(errors, weights[order[number + 1]])]).sum(0)
            errors = [torch.where(mask, above * slope, 0) for slope in function.slopes(before[number])]
            energy = energy + inputs[number].square().sum(-1) * sum(error.square().sum(-1) for error in errors)
        there = state.active > 0
        norms = torch.where(there[:, None], energy.sqrt(), 0).mean(1).sum(1)
        return norms / there.sum(1).clamp(min=1)


def _blanked(weights: Sequence[Tensor], opened: Tensor, arity: int) -> list[Tensor]:
    """Matrices (N, H, in, out), zero where a row has opened nothing, by open units, bool (N, w)."""
    sides = places(len(weights), arity)
    return [torch.where(entries(opened, place)[:, None], w, 0) for w, place in zip(weights, sides)]


def _check(weights: Sequence[Tensor], q: Tensor, active: Tensor | None, memory_activation: str) -> None:
    if not weights or q.dim() != 4 or any(w.dim() != 4 for w in weights):
        raise ValueError(
            f"q has shape {tuple(q.shape)} and the weights {[tuple(w.shape) for w in weights]}; they must be (N, L, H, D) and at "
            "least one (N, H, in, out)"
        )
    check_depth(weights, memory_activation)
    rows, length, heads, width = q.shape
    arity = memory_function(memory_activation).arity
    names = matrix_names(len(weights), arity)
    for layer in layers(len(weights), arity):
        for name, w in zip(names[layer], weights[layer]):
            if w.shape[:3] != (rows, heads, width) or w.shape != weights[layer][0].shape:
                raise ValueError(
                    f"{name} has shape {tuple(w.shape)}; behind what comes before it must be {(rows, heads, width)}, out, and all "
                    "of a layer alike"
                )
        width = weights[layer][0].shape[3]
    if active is not None and (active.dim() != 2 or active.shape[0] not in (1, rows) or active.shape[1] != length):
        raise ValueError(f"active has shape {tuple(active.shape)}; it must be ({rows} or 1, {length})")
