"""What is used many times in a forward and gets its gradient once, when all uses have had theirs: a linear map, or a tensor.

A loop over segments would else make a small product and a sum as large as the weight for each, and round each sum to the type of
the products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


class _Parts:
    """What uses bring to an end, each backward's apart: what one that failed has left is no other's."""

    def __init__(self) -> None:
        self._of: dict[int, list[Any]] = {}

    def add(self, part: Any) -> None:
        """Within the backward of a use."""
        self._of.setdefault(torch._C._current_graph_task_id(), []).append(part)

    def take(self) -> list[Any]:
        """Within the backward of the end."""
        return self._of.pop(torch._C._current_graph_task_id(), [])


class LateLinear:
    """x (..., in) -> (..., out) by a weight (out, in) and a bias (out,) or none, in a given type, whatever the autocast.

    To be made in the forward that uses it. First derivatives only.

    Args:
        dtype: of the product; x is brought to it. The gradient of x in a narrower type is multiplied in that type, to which it is
            rounded anyway; those of weight and bias are not.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight, self._bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
        self._narrow: dict[torch.dtype, Tensor] = {}
        self._uses = _Parts()
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (weight, bias))
        self._end = _End.apply(weight, bias, self._uses) if wanted else None

    def __call__(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if not torch.is_grad_enabled() or (self._end is None and not x.requires_grad):
            return _product(x.to(self._weight.dtype), self._weight, self._bias)
        return _Use.apply(x, self._end, self._weight, self._bias, self._uses, self._back(x.dtype))

    def _back(self, dtype: torch.dtype) -> Tensor:
        """The weight that gives the gradient of an input in `dtype`."""
        if dtype.itemsize >= self._weight.dtype.itemsize:
            return self._weight
        if dtype not in self._narrow:
            self._narrow[dtype] = self._weight.to(dtype)
        return self._narrow[dtype]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return linear(x, weight, bias)


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, end: Tensor | None, weight: Tensor, bias: Tensor | None, uses: _Parts, back: Tensor) -> Tensor:
        given = x.to(weight.dtype)
        # Of x and what is made of it, the one with fewer bytes.
        ctx.save_for_backward(x if x.dtype.itemsize < given.dtype.itemsize else given, back)
        ctx.uses, ctx.end, ctx.kind = *((None, None) if end is None else (uses, end.grad_fn)), x.dtype
        return _product(given, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, back = ctx.saved_tensors
        if _executed(ctx.end):
            ctx.uses.add((x.flatten(0, -2), dy.flatten(0, -2)))
        dx = (dy.to(back.dtype) @ back).to(ctx.kind) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


class _End(torch.autograd.Function):
    """A number that every use takes: so this backward runs behind theirs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, uses: _Parts) -> Tensor:
        ctx.uses, ctx.types = uses, (weight.dtype, None if bias is None else bias.dtype)
        ctx.set_materialize_grads(False)
        return weight.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        uses = ctx.uses.take()
        if not uses:
            return None, None, None
        x, dy = (torch.cat(part) for part in zip(*uses))
        d_bias = dy.sum(0, dtype=ctx.types[1]) if ctx.types[1] is not None else None
        return (dy.mT @ x.to(dy.dtype)).to(ctx.types[0]), d_bias, None


class LateSum:
    """A tensor for operations that work out its gradient themselves, each for many rows: all parts are summed at once.

    To be made in the forward that uses it. An operation takes `value`, and `end` as an input that it gives no gradient; its
    backward calls `add`. First derivatives only.

    Args:
        x: any shape.

    Attributes:
        value: x without a gradient.
        end: a number that makes the sum wait for the operations; None where x needs no gradient.
    """

    def __init__(self, x: Tensor) -> None:
        self.value, self._parts = x.detach(), _Parts()
        self.end = _Sum.apply(x, self._parts) if torch.is_grad_enabled() and x.requires_grad else None

    def add(self, part: Tensor, node: Any) -> None:
        """A part (rows, *shape) of the gradient; `node`: `end.grad_fn`, kept by the operation."""
        if _executed(node):
            self._parts.add(part)


class _Sum(torch.autograd.Function):
    """As `_End`, of a `LateSum`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: _Parts) -> Tensor:
        ctx.parts, ctx.kind = parts, x.dtype
        ctx.set_materialize_grads(False)
        return x.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, None]:
        parts = ctx.parts.take()
        return (torch.cat(parts).sum(0).to(ctx.kind) if parts else None), None


def _executed(node: Any) -> bool:
    """Whether this backward reaches an end: one to inputs alone does not, and must leave nothing to the next one."""
    return node is not None and torch._C._will_engine_execute_node(node)
