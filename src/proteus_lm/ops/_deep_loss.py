"""What stands between the loss of an MLP memory and the gradients that are written: surprise clipping, and the residual form.

The residual form is f(x) = x + LN(mlp(x)), LN(z) = (z - mean z) / sqrt(var z + EPS) gain + bias over the last dimension. Gain and
bias are learned outside of the memory, which writes its matrices only (spec/deep.md 1.3, 2.2). As f(k) - v = LN(mlp(k)) - (v - k),
the memory is given v - k to learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-6


def clip_factors(limit: float, x: Sequence[Tensor], g: Sequence[Tensor]) -> Tensor:
    """min(1, limit / ||u||) of each token's gradient u, whose part in layer l is the product of the row x_l and the column g_l.

    A constant to the outer gradient. No entry of u is built: ||u||^2 is the sum of |x_l|^2 |g_l|^2 (spec/deep.md 2.6).

    Args:
        x, g: (U, b, .) of each layer, what it takes in and the loss's gradient to what it puts out; zero where locked.

    Returns:
        (U, b, 1).
    """
    norms = [torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1) for a, b in zip(x, g)]
    total = torch.linalg.vector_norm(torch.stack(norms, -1), dim=-1, keepdim=True)
    return limit / total.clamp(min=limit)


class Normed(NamedTuple):
    """What the backward of `norm_gradient` needs: z normalised (.., n), 1 / its deviation (.., 1), and the error (.., n)."""

    unit: Tensor
    rise: Tensor
    error: Tensor


def normalize(z: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """LN(z) for z (.., n); gain and bias broadcast."""
    centred = z - _mean(z)
    return centred * torch.rsqrt(_mean(centred.square()) + EPS) * gain + bias


def norm_gradient(z: Tensor, wanted: Tensor, gain: Tensor, bias: Tensor) -> tuple[Tensor, Normed]:
    """Gradient of 1/2 ||LN(z) - wanted||^2 with respect to z, (.., n) like z and wanted."""
    centred = z - _mean(z)
    rise = torch.rsqrt(_mean(centred.square()) + EPS)
    unit = centred * rise
    error = unit * gain + bias - wanted
    return _through(error * gain, unit, rise), Normed(unit, rise, error)


def norm_gradient_backward(grad: Tensor, kept: Normed, gain: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Adjoint of `norm_gradient`: gradients to z and wanted, and to gain and bias before any sum, all (.., n)."""
    unit, rise, error = kept
    p = error * gain
    to_p = _through(grad, unit, rise)
    to_error = to_p * gain
    to_unit = to_error * gain - rise * (grad * _mean(unit * p) + p * _mean(unit * grad))
    to_z = _through(to_unit, unit, rise) - rise * unit * _mean(_through(p, unit, rise) * grad)
    return to_z, -to_error, to_p * error + to_error * unit, to_error


class Loss(NamedTuple):
    """Of a chunk's write side, what the way back out of its last gradient needs.

    Args:
        clipped: (U, b, 1) once, the factors of `clip_factors`; or nothing.
        normed: of a residual memory, its `Normed`, (U, b, .); or nothing.
        norm: gain and bias (U, 1, n); or nothing.
        to_norm: likewise, where their gradients collect.
        to_v: (U, b, n) once, where the gradient to v goes; or nothing, where it is that to the last layer's output, negative.
    """

    clipped: Sequence[Tensor]
    normed: Sequence[Tensor]
    norm: Sequence[Tensor]
    to_norm: Sequence[Tensor]
    to_v: Sequence[Tensor]

    def leave(self, grad: Tensor) -> Tensor:
        """From the gradient (U, b, n) to the last layer's own, which is used up, that to what the layer puts out."""
        for factors in self.clipped:
            grad.mul_(factors)
        if not self.norm:
            return grad
        to_z, to_v, *to_norm = norm_gradient_backward(grad, Normed(*self.normed), self.norm[0])
        self.to_v[0].copy_(to_v)
        for total, rows in zip(self.to_norm, to_norm):
            total.add_(rows.sum(1, keepdim=True))
        return to_z


def _through(rows: Tensor, unit: Tensor, rise: Tensor) -> Tensor:
    """The derivative of the normalisation, which is its own transpose, times rows."""
    return (rows - _mean(rows) - unit * _mean(unit * rows)) * rise


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(-1, keepdim=True)
