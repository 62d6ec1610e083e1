"""The functions between the layers of an MLP memory, each with its first derivative.

The oracle and plain reads use these. The chunk form has faster ones (`_deep_activation`), which a test holds equal to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

_C = math.sqrt(2 / math.pi)
_A = 0.044715


class MemoryFunction(NamedTuple):
    """act(z) and act'(z), elementwise on tensors of any shape and floating type.

    A hidden layer puts `arity` pre-activations of a unit in, each by a matrix of its own.
    """

    act: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]

    @property
    def arity(self) -> int:
        """Matrices of a hidden layer."""
        return 1

    def join(self, z: Sequence[Tensor]) -> Tensor:
        """What a hidden layer puts out, of its pre-activations."""
        return self.act(z[0])

    def slopes(self, z: Sequence[Tensor]) -> list[Tensor]:
        """The derivatives of `join` with respect to each of them."""
        return [self.slope(z[0])]


class GatedFunction(MemoryFunction):
    """act(a) b of two pre-activations, the gate a and the value b (spec/deep.md 2.2; Shazeer 2020, arXiv 2002.05202)."""

    @property
    def arity(self) -> int:
        """Matrices of a hidden layer: that of the gates, that of the values."""
        return 2

    def join(self, z: Sequence[Tensor]) -> Tensor:
        """act(a) b."""
        return self.act(z[0]) * z[1]

    def slopes(self, z: Sequence[Tensor]) -> list[Tensor]:
        """act'(a) b and act(a)."""
        return [self.slope(z[0]) * z[1], self.act(z[0])]


def _gelu(z: Tensor) -> Tensor:
    return gelu(z, approximate="tanh")


def _gelu_slope(z: Tensor) -> Tensor:
    t = torch.tanh(_C * (z + _A * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * _C * (1 + 3 * _A * z * z)


def _silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


_FUNCTIONS = {
    "gelu_tanh": MemoryFunction(_gelu, _gelu_slope),
    "silu": MemoryFunction(silu, _silu_slope),
    "swiglu": GatedFunction(silu, _silu_slope),
}


def memory_function(name: str) -> MemoryFunction:
    """The function called `name` and its derivative.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in _FUNCTIONS:
        raise ValueError(f"memory_activation is {name!r}; it must be one of {', '.join(_FUNCTIONS)}")
    return _FUNCTIONS[name]


def layers(matrices: int, arity: int) -> list[slice]:
    """The matrices of each layer: `arity` of a hidden one, whose function takes what they put out together, and the last alone."""
    return [slice(i, i + arity) for i in range(0, matrices, arity)]


def places(matrices: int, arity: int) -> list[str]:
    """Which sides of each matrix are hidden units: its columns ("first"), its rows ("last"), or both ("inner").

    A single one is "last": its rows are what the schedule opens.
    """
    return ["last" if i == matrices - 1 else "first" if i < arity else "inner" for i in range(matrices)]


def matrix_names(matrices: int, arity: int) -> list[str]:
    """What the matrices of a memory are called, in order: W1 .. WL; of a gated one W1, U1, W2, U2 .. WL, U being of the values."""
    return [f"{'WU'[i % arity]}{i // arity + 1}" for i in range(matrices)]
