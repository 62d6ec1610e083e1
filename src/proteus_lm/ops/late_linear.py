"""A linear map used many times in a forward, whose weight gets its gradient in one product when all uses have had theirs.

A loop over segments would else make a small product and a sum as large as the weight for each, and round each sum to the type of
the products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

Uses = list[tuple[Tensor, Tensor]]
"""Input (tokens, in) and gradient of the output (tokens, out) of each use."""


class LateLinear:
    """x (..., in) -> (..., out) by a weight (out, in) and a bias (out,) or none, in a given type, whatever the autocast.

    To be made in the forward that uses it. First derivatives only.

    Args:
        dtype: of the product; x is brought to it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight, self._bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
        self._uses: Uses = []
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (weight, bias))
        self._end = _End.apply(weight, bias, self._uses) if wanted else None

    def __call__(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        x = x.to(self._weight.dtype)
        if not torch.is_grad_enabled() or (self._end is None and not x.requires_grad):
            return _product(x, self._weight, self._bias)
        return _Use.apply(x, self._end, self._weight, self._bias, self._uses)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return linear(x, weight, bias)


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, end: Tensor | None, weight: Tensor, bias: Tensor | None, uses: Uses) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.uses, ctx.end = (None, None) if end is None else (uses, end.grad_fn)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # A backward of inputs alone has no end, and must leave nothing to the next one.
        if ctx.uses is not None and torch._C._will_engine_execute_node(ctx.end):
            ctx.uses.append((x.flatten(0, -2), dy.flatten(0, -2)))
        return dy @ weight if ctx.needs_input_grad[0] else None, None, None, None, None


class _End(torch.autograd.Function):
    """A number that every use takes: so this backward runs behind theirs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, uses: Uses) -> Tensor:
        ctx.uses, ctx.types = uses, (weight.dtype, None if bias is None else bias.dtype)
        ctx.set_materialize_grads(False)
        return weight.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if not ctx.uses:
            return None, None, None
        x, dy = (torch.cat(part) for part in zip(*ctx.uses))
        ctx.uses.clear()
        d_bias = dy.sum(0, dtype=ctx.types[1]) if ctx.types[1] is not None else None
        return (dy.mT @ x).to(ctx.types[0]), d_bias, None
