"""Packed documents as rows padded on the right, and back. The chunkwise PyTorch operations work on rows."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_floating(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError for a type that the operations do not compute with: integers, and floats of 8 bits and less."""
    if dtype not in FLOATING:
        kinds = ", ".join(str(kind).removeprefix("torch.") for kind in FLOATING)
        raise TypeError(f"{name} is {dtype}; it must be a floating type: {kinds}")


class Rows:
    """Documents packed in one row of T tokens, seen as N rows of the longest document's length L.

    Args:
        cu_seqlens: int (N + 1,), boundaries from 0 to T; every document holds a token.
        tokens: T, what the boundaries must add up to.

    Raises:
        ValueError: for boundaries that do not start at 0, do not rise, or do not end at T.
    """

    def __init__(self, cu_seqlens: Tensor, tokens: int) -> None:
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != tokens or any(b <= a for a, b in zip(bounds, bounds[1:])):
            raise ValueError(f"cu_seqlens {bounds} must rise from 0 to the {tokens} tokens given")
        self.lengths = cu_seqlens.diff().long()
        self.count, self.length = len(bounds) - 1, max(b - a for a, b in zip(bounds, bounds[1:]))
        steps = torch.arange(self.length, device=cu_seqlens.device)
        self.valid = steps < self.lengths[:, None]
        self._index = (cu_seqlens[:-1, None].long() + steps).clamp(max=tokens - 1)

    def split(self, packed: Tensor) -> Tensor:
        """(1, T, ...) -> (N, L, ...), zeros behind a document's end."""
        rows = packed[0][self._index]
        return torch.where(self.valid.view(*self.valid.shape, *[1] * (rows.dim() - 2)), rows, rows.new_zeros(()))

    def join(self, rows: Tensor) -> Tensor:
        """(N, L, ...) -> (1, T, ...), what stands behind a document's end dropped."""
        return rows[self.valid][None]


def check_packed(batch: int, cu_seqlens: Tensor | None) -> None:
    """Documents are packed in one row: a batch of several rows with boundaries has no meaning.

    Raises:
        ValueError: for `cu_seqlens` with more than one row.
    """
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"cu_seqlens with a batch of {batch} rows; pack the documents into one row, (1, tokens, ...)")
