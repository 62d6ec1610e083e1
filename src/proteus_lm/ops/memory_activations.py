"""The functions between the layers of an MLP memory, each with its first derivative (and second, which the backward needs).

One definition for reference, chunk form and decoding: tanh-GELU and its derivatives must be the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

_C = math.sqrt(2 / math.pi)
_A = 0.044715


class MemoryFunction(NamedTuple):
    """act(z) and act'(z), elementwise on tensors of any shape and floating type."""

    act: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _gelu(z: Tensor) -> Tensor:
    return gelu(z, approximate="tanh")


def _gelu_slope(z: Tensor) -> Tensor:
    t = torch.tanh(_C * (z + _A * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * _C * (1 + 3 * _A * z * z)


def gelu_curvature(z: Tensor) -> Tensor:
    """Second derivative of the tanh form of GELU."""
    t = torch.tanh(_C * (z + _A * z**3))
    u1, u2 = _C * (1 + 3 * _A * z * z), _C * 6 * _A * z
    return (1 - t * t) * (u1 + 0.5 * z * u2 - z * t * u1 * u1)


def _silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def silu_curvature(z: Tensor) -> Tensor:
    """Second derivative of SiLU."""
    s = torch.sigmoid(z)
    return s * (1 - s) * (2 + z * (1 - 2 * s))


_FUNCTIONS = {"gelu_tanh": MemoryFunction(_gelu, _gelu_slope), "silu": MemoryFunction(silu, _silu_slope)}
_CURVATURES = {"gelu_tanh": gelu_curvature, "silu": silu_curvature}


def memory_function(name: str) -> MemoryFunction:
    """The function called `name` and its derivative.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in _FUNCTIONS:
        raise ValueError(f"memory_activation is {name!r}; it must be one of {', '.join(_FUNCTIONS)}")
    return _FUNCTIONS[name]


def memory_curvature(name: str) -> Callable[[Tensor], Tensor]:
    """The second derivative of the function called `name`."""
    memory_function(name)
    return _CURVATURES[name]
