"""Rotary position embedding: pairs of coordinates turn by an angle that grows with the position.

Half-split: coordinate i turns with coordinate i + dim / 2. Interleaved: 2i with 2i + 1, so that a prefix holds whole pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proteus_lm.ops.triton_neighbours import runs, turned
from proteus_lm.sequence import TokenSequence

BASE = 10_000.0


def check_rotary(dim: int) -> None:
    """Raise ValueError for a head_dim that is not made of pairs."""
    if dim % 2:
        raise ValueError(f"head_dim is {dim}; rotary positions turn pairs of coordinates: use an even head_dim")


def rotary_angles(positions: Tensor, dim: int, dtype: torch.dtype, *, interleaved: bool = False) -> Tensor:
    """The angle by which each coordinate turns at each position.

    Args:
        positions: int (..., T).  dim: even.  dtype: fp32 or fp64.

    Returns:
        (..., T, dim) in `dtype`, both coordinates of a pair alike.
    """
    inverse = BASE ** (-torch.arange(0, dim, 2, device=positions.device, dtype=dtype) / dim)
    angles = positions[..., None].to(dtype) * inverse
    return angles.repeat_interleave(2, -1) if interleaved else angles.repeat(*[1] * positions.dim(), 2)


def turn_at(sequence: TokenSequence, x: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Cosine and sine that turn x (B, T, .., H, dim) to its tokens' positions, each (B or 1, T, 1, dim), fp32 or wider.

    Computed once for all layers.
    """
    dim, dtype = x.shape[-1], torch.promote_types(x.dtype, torch.float32)

    def make() -> tuple[Tensor, Tensor]:
        angles = rotary_angles(sequence.positions, dim, dtype, interleaved=interleaved)[:, :, None]
        return angles.cos(), angles.sin()

    return sequence.once(("rotary", dim, dtype, interleaved), make)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor], *, interleaved: bool = False) -> Tensor:
    """Turn x (B, T, H, dim) by (cosine, sine), each (B or 1, T, 1, dim); in their type, returned in x's."""
    cosine, sine = turn
    if runs(x, cosine, sine):
        return turned(x, cosine, sine, interleaved)
    wide = x.to(cosine.dtype)
    if interleaved:
        partner = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    else:
        first, second = wide.chunk(2, -1)
        partner = torch.cat((-second, first), -1)
    return (wide * cosine + partner * sine).to(x.dtype)
