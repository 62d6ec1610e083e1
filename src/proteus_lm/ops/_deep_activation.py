"""The functions of `memory_activations` as the chunk form needs them, in few passes over memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

_CUBIC = 0.044715
_SCALE = 2 * math.sqrt(2 / math.pi)


class Pointwise(NamedTuple):
    """A function f of pre-activations z, any shape: f = z p, p = sigmoid u, u = z (scale + scale cubic z^2).

    So gelu_tanh, as (1 + tanh t) / 2 = sigmoid 2t, and silu. One sigmoid gives value and derivatives.
    """

    scale: float
    cubic: float

    @property
    def arity(self) -> int:
        """Pre-activations of a hidden unit."""
        return 1

    def join(self, z: Sequence[Tensor]) -> Tensor:
        """What a hidden layer puts out, of its pre-activations."""
        return self.value(z[0])

    def slopes(self, z: Sequence[Tensor]) -> list[Tensor]:
        """The derivatives of `join` with respect to each of them."""
        return [self.slope(z[0].new_ones(()).expand_as(z[0]), z[0])]

    def bends(self, grads: Sequence[Tensor], z: Sequence[Tensor]) -> list[Tensor]:
        """Adjoint of `slopes`: from gradients to the slopes, those to the pre-activations."""
        return [self.bend(grads[0], z[0])]

    def value(self, z: Tensor) -> Tensor:
        """f(z)."""
        return gelu(z, approximate="tanh") if self.cubic else silu(z)

    def slope(self, g: Tensor, z: Tensor) -> Tensor:
        """g f'(z), by which the memory learns; g broadcasts."""
        if self.cubic:
            return torch.ops.aten.gelu_backward(g, z, approximate="tanh")
        return torch.ops.aten.silu_backward(g, z)

    def bend(self, g: Tensor, z: Tensor) -> Tensor:
        """g f''(z), which the gradient of that gradient needs."""
        slope, bend = torch.empty_like(z), torch.empty_like(z)
        self.expand(z.clone(), torch.empty_like(z), slope, bend)
        return bend.mul_(g)

    def expand(self, z: Tensor, value: Tensor, slope: Tensor | None = None, bend: Tensor | None = None) -> None:
        """Put f(z) into `value`, f'(z) into `slope` and f''(z) into `bend` where given (bend with slope only), in few passes over
        memory and little of it: z is used up.

            f' = p + p (1 - p) z u'
            f'' = p (1 - p) (u' (4 + (1 - 2p) z u') - 2 scale),    as 2 u' + z u'' = 4 u' - 2 scale
        """
        rise = scale = z.new_full((), self.scale)
        if self.cubic:
            square = z * z
            p = torch.add(scale, square, alpha=self.scale * self.cubic).mul_(z).sigmoid_()
            rise = square if slope is None else torch.add(scale, square, alpha=3 * self.scale * self.cubic, out=square)
        else:
            p = z.sigmoid()
        torch.mul(z, p, out=value)
        if slope is None:
            return
        run = z.mul_(rise)
        torch.ops.aten.sigmoid_backward.grad_input(run, p, grad_input=slope).add_(p)
        if bend is not None:
            torch.add(z.new_ones(()), p, alpha=-2, out=bend).mul_(run).add_(4).mul_(rise).sub_(2 * self.scale)
            torch.ops.aten.sigmoid_backward.grad_input(bend, p, grad_input=bend)


class Gated(Pointwise):
    """f(a) b of two pre-activations, f the function of the gate a: `join`, `slopes` and `bends` are of both, the others of f."""

    @property
    def arity(self) -> int:
        """Pre-activations of a hidden unit: gate and value."""
        return 2

    def join(self, z: Sequence[Tensor]) -> Tensor:
        """f(a) b."""
        return self.value(z[0]).mul_(z[1])

    def slopes(self, z: Sequence[Tensor]) -> list[Tensor]:
        """f'(a) b and f(a)."""
        return [self.slope(z[1], z[0]), self.value(z[0])]

    def bends(self, grads: Sequence[Tensor], z: Sequence[Tensor]) -> list[Tensor]:
        """The mixed derivative f'(a) makes each slope's gradient reach the other's pre-activation."""
        (gate, value), (to_gate, to_value) = z, grads
        return [self.bend(to_gate * value, gate).add_(self.slope(to_value, gate)), self.slope(to_gate, gate)]


POINTWISE = {"gelu_tanh": Pointwise(_SCALE, _CUBIC), "silu": Pointwise(1.0, 0.0), "swiglu": Gated(1.0, 0.0)}
