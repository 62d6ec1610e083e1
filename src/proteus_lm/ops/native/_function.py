"""The C kernel under autograd in eager mode, without what the dispatch of a custom operator costs: 4 ms of a call's 60."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from proteus_lm.ops.native._call import Inputs, Walk, backward, forward


class Scan(Function):
    """`_call.forward` and its gradient. Arguments are those of `Inputs`, the floating tensors last and flat."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, final: bool, walk: Walk, active: Tensor, open_active: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """y; with `final`, W1, W2, S1, S2 at each row's last boundary."""
        *out, saved = forward(_inputs(tensors, active, open_active, walk), final=final, save=True)
        ctx.walk = walk
        ctx.save_for_backward(saved, active, open_active, *tensors)
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """Gradients to the floating tensors."""
        saved, active, open_active, *tensors = ctx.saved_tensors
        given = _inputs(tensors, active, open_active, ctx.walk)
        out = backward(given, saved, grads, ctx.needs_input_grad[-len(given.start) :])
        return None, None, None, None, *(_First.apply(out, *tensors, *grads) if torch.is_grad_enabled() else out)


class _First(Function):
    """Gradients that are functions of other tensors (create_graph=True) and refuse to be differentiated. As constants, which
    `once_differentiable` makes of them where all that came to the backward is constant, second derivatives would be wrong."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor | None], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """The gradients."""
        return tuple(grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:  # pyright: ignore
        """Raises RuntimeError."""
        raise RuntimeError("the C kernel of titans_memory has first derivatives only; with backend='reference' there are others")


def _inputs(tensors: Sequence[Tensor], active: Tensor, open_active: Tensor | None, walk: Walk) -> Inputs:
    start = -2 if len(tensors) == 8 else -4  # 6 tokens; open rows or none; W1, W2 of all rows, or those of each and momentum
    return Inputs(tensors[:6], tensors[6:start], tensors[start:], active, open_active, walk)
