"""Reading an MLP memory that stands still: no write, no decay, no step of the momentum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proteus_lm.ops._deep_chunk import entries, places
from proteus_lm.ops._linear_operator import compute_dtype
from proteus_lm.ops.memory_activations import memory_function


def titans_read(
    weights: Sequence[Tensor], q: Tensor, active: Tensor | None = None, *, memory_activation: str = "gelu_tanh"
) -> Tensor:
    """f(q) of the memory f(x) = act(.. act(x W1) ..) WL, each query seeing the units open to it (Titans' M*; spec/deep.md 1.6).

    Computed in fp32, or fp64 if an input is, whatever the autocast. What a row has open to none of its queries is not touched: NaN
    there reaches neither result nor gradient.

    Args:
        weights: W1 (N, H, D, F), .., WL (N, H, F, Dv); L >= 1, one matrix is (N, H, D, Dv).
        q: (N, L, H, D).
        active: int (N or 1, L), open hidden units (rows of one matrix) of each query; None: all.
        memory_activation: "gelu_tanh" or "silu".

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
        return (x @ layers[-1]).transpose(1, 2).to(q.dtype)


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
