"""The pointwise function inside an MLP memory, with the two derivatives that its exact training needs."""

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
        value: f(z).
        first: (g, z) -> g f'(z), the gradient the memory learns by.
        second: (g, z) -> g f''(z), which the gradient of that gradient needs.
    """

    value: Callable[[Tensor], Tensor]
    first: Callable[[Tensor, Tensor], Tensor]
    second: Callable[[Tensor, Tensor], Tensor]


def _gelu_second(g: Tensor, z: Tensor) -> Tensor:
    """f = z (1 + t) / 2, t = tanh u, u = c (z + a z^3):  f'' = (1 - t^2) (u' + z u'' / 2 - z t u'^2)."""
    square = z * z
    t = torch.addcmul(z, square, z, value=_CUBIC).mul_(_SCALE).tanh_()
    slope = square.mul(3 * _CUBIC).add_(1).mul_(_SCALE)
    bend = square.mul_(3 * _SCALE * _CUBIC).add_(slope)
    bend.addcmul_(slope.mul_(slope), z * t, value=-1)
    return bend.mul_(t.mul_(t).neg_().add_(1)).mul_(g)


def _silu_second(g: Tensor, z: Tensor) -> Tensor:
    """f = z s, s = sigmoid z:  f'' = s (1 - s) (2 + z (1 - 2 s))."""
    s = z.sigmoid()
    return (2 + z * (1 - 2 * s)).mul_(s).mul_(1 - s).mul_(g)


POINTWISE = {
    "gelu_tanh": Pointwise(
        lambda z: gelu(z, approximate="tanh"),
        lambda g, z: torch.ops.aten.gelu_backward(g, z, approximate="tanh"),
        _gelu_second,
    ),
    "silu": Pointwise(silu, lambda g, z: torch.ops.aten.silu_backward(g, z), _silu_second),
}
