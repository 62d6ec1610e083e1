"""The functions between the layers of an MLP memory, each with its first derivative.

The oracle and plain reads use these. The chunk form has faster ones (`_deep_activation`), which a test holds equal to them.
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


def _silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


_FUNCTIONS = {"gelu_tanh": MemoryFunction(_gelu, _gelu_slope), "silu": MemoryFunction(silu, _silu_slope)}


def memory_function(name: str) -> MemoryFunction:
    """The function called `name` and its derivative.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in _FUNCTIONS:
        raise ValueError(f"memory_activation is {name!r}; it must be one of {', '.join(_FUNCTIONS)}")
    return _FUNCTIONS[name]
