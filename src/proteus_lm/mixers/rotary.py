"""Rotary position embedding, half-split: coordinate i turns with coordinate i + dim / 2."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000.0


def rotary_angles(positions: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The angle by which each coordinate turns at each position.

    Args:
        positions: int (..., T).  dim: even.  dtype: fp32 or fp64.

    Returns:
        (..., T, dim) in `dtype`, both halves alike.
    """
    inverse = BASE ** (-torch.arange(0, dim, 2, device=positions.device, dtype=dtype) / dim)
    return (positions[..., None].to(dtype) * inverse).repeat(*[1] * positions.dim(), 2)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x (B, T, H, dim) by angles (cosine, sine), each (B or 1, T, 1, dim); in their type, returned in x's."""
    cosine, sine = angles
    wide = x.to(cosine.dtype)
    first, second = wide.chunk(2, -1)
    return (wide * cosine + torch.cat((-second, first), -1) * sine).to(x.dtype)
