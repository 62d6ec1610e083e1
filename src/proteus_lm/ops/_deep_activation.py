"""The functions of `memory_activations` as the chunk form needs them, in few passes over memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

_CUBIC = 0.044715
_SCALE = math.sqrt(2 / math.pi)


class Pointwise(NamedTuple):
    """A function f of pre-activations z, any shape.

    Args:
        value: z -> f(z).
        slope: (g, z) -> g f'(z), by which the memory learns; g broadcasts.
        bend: (g, z) -> g f''(z), which the gradient of that gradient needs.
    """

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    bend: Callable[[Tensor, Tensor], Tensor]


def _gelu_bend(g: Tensor, z: Tensor) -> Tensor:
    """f = z (1 + t) / 2, t = tanh u, u = c (z + a z^3):  f'' = (1 - t^2) (c + 6 c a z^2 - z t u'^2)."""
    square, c = z * z, z.new_full((), _SCALE)
    t = torch.addcmul(z, square, z, value=_CUBIC).mul_(_SCALE).tanh_()
    rise = torch.add(c, square, alpha=3 * _CUBIC * _SCALE)
    bend = torch.add(c, square, alpha=6 * _CUBIC * _SCALE)
    bend.addcmul_(rise.mul_(rise), t * z, value=-1)
    return torch.ops.aten.tanh_backward(bend, t).mul_(g)


def _silu_bend(g: Tensor, z: Tensor) -> Tensor:
    """f = z s, s = sigmoid z:  f'' = s (1 - s) (2 + z (1 - 2 s))."""
    s = z.sigmoid()
    bend = s.mul(-2).add_(1).mul_(z).add_(2)
    return torch.ops.aten.sigmoid_backward(bend, s).mul_(g)


POINTWISE = {
    "gelu_tanh": Pointwise(
        lambda z: gelu(z, approximate="tanh"),
        lambda g, z: torch.ops.aten.gelu_backward(g, z, approximate="tanh"),
        _gelu_bend,
    ),
    "silu": Pointwise(silu, lambda g, z: torch.ops.aten.silu_backward(g, z), _silu_bend),
}
