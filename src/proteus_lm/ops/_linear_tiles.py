"""Tokens cut into tiles on which the open part of the memory is one and the same slice for every row and token.

A tile never crosses an unlock, so a chunkwise operation works on plain slices: no mask, no coordinate read or written while
locked. Tiles of one size and width that follow each other form a group, whose independent work is done in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proteus_lm.ops.rows import Rows

# Matrices worked on at once: few enough for a processor's cache, and enough to fill a device without filling its memory.
_HOST_MATRICES, _DEVICE_MATRICES = 32, 4096


class Group(NamedTuple):
    """`count` tiles of `length` tokens from token `start`: `width` coordinates are open; only the first `rows` rows reach here."""

    start: int
    length: int
    count: int
    width: int
    rows: int

    @property
    def end(self) -> int:
        """The first token behind the group."""
        return self.start + self.count * self.length


class Bucket(NamedTuple):
    """Rows that open their blocks at the same tokens, longest first, and their tiles. `rows` is None for all rows in order."""

    rows: list[int] | None
    groups: list[Group]


def cut(stretches: Sequence[tuple[int, int]], lengths: Sequence[int], size: int, batch: int) -> list[Group]:
    """Tiles of at most `size` tokens for rows of `lengths` tokens (longest first).

    Args:
        stretches: (tokens, open coordinates) of the longest row, in order. Tiles are counted from a stretch's first token.
        batch: rows times tiles in a group, at most, unless one tile has more rows.
    """
    groups: list[Group] = []
    first = 0
    for tokens, width in stretches:
        last = first + tokens
        while first < last:
            length = min(size, last - first)
            rows = sum(n > first for n in lengths)
            before = groups[-1] if groups else None
            alike = before is not None and before[1:] == (length, before.count, width, rows)
            if before is not None and alike and (before.count + 1) * rows <= batch:
                groups[-1] = before._replace(count=before.count + 1)
            else:
                groups.append(Group(first, length, 1, width, rows))
            first += length
    return groups


def plan(active: Tensor | None, lengths: Sequence[int], dim: int, size: int, batch: int) -> list[Bucket]:
    """Sort rows by when their blocks open, and cut each kind into tiles. Costs one transfer if `active` lies on a device.

    Args:
        active: int (N, L) or (1, L) where all rows agree: open coordinates of each token; None: all `dim` are open.
        lengths: tokens of each of the N rows; what stands in `active` behind a row's end is not looked at.
        size, batch: tokens in a tile, and rows times tiles in a group, at most.
    """
    order = sorted(range(len(lengths)), key=lambda r: -lengths[r])
    active = torch.full((1, max(lengths)), dim) if active is None else active.cpu()
    members: list[list[int]] = [] if len(active) > 1 else [order]
    for row in order if len(active) > 1 else ():
        alike = (m for m in members if torch.equal(active[m[0], : lengths[row]], active[row, : lengths[row]]))
        bucket = next(alike, None)
        members.append([row]) if bucket is None else bucket.append(row)
    buckets = []
    for rows in members:
        line = active[rows[0] if len(active) > 1 else 0, : lengths[rows[0]]]
        widths, counts = torch.unique_consecutive(line, return_counts=True)
        stretches = list(zip(counts.tolist(), widths.tolist()))
        groups = cut(stretches, [lengths[r] for r in rows], size, batch)
        buckets.append(Bucket(None if rows == list(range(len(lengths))) else rows, groups))
    return buckets


class Layout:
    """How a call's tensors (B, T, ...) become rows (N, L, ...), the rows' buckets, and the way back.

    Args:
        x: a tensor (B, T, H, ...) of the call.
        active: int (B, T) or (1, T), open coordinates at each token; None: all.
        cu_seqlens: boundaries of the documents when they are packed in one row.
        dim: coordinates of the scheduled axis.  size: tokens in a tile, at most.
    """

    def __init__(self, x: Tensor, active: Tensor | None, cu_seqlens: Tensor | None, dim: int, size: int) -> None:
        self.count, self.length = x.shape[:2]
        self._packed = None if cu_seqlens is None else Rows(cu_seqlens, self.length)
        lengths = [self.length] * self.count
        if self._packed is not None:
            self.count, self.length = self._packed.count, self._packed.length
            lengths = self._packed.lengths.tolist()
            if active is not None:
                active = self._packed.split(active.to(self._packed.lengths.device))
        matrices = _HOST_MATRICES if x.device.type == "cpu" else _DEVICE_MATRICES
        self.buckets = plan(active, lengths, dim, size, matrices // x.shape[2])

    def rows(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (N, L, ...); zeros behind a document's end."""
        return x if self._packed is None else self._packed.split(x)

    def tokens(self, rows: Tensor) -> Tensor:
        """(N, L, ...) -> (B, T, ...)."""
        return rows if self._packed is None else self._packed.join(rows)


def split_tiles(x: Tensor, group: Group, dtype: torch.dtype, lead: int = 0) -> Tensor:
    """(N, lead + L, H, ...) -> (count, rows * H, lead + length, ...): a group's tiles, each with the `lead` tokens before it."""
    span = x[: group.rows, group.start : group.end + lead]
    tiles = span.unfold(1, group.length + lead, group.length).movedim(-1, 3).transpose(0, 1)
    shape = (group.count, group.rows * x.shape[2], *tiles.shape[3:])
    return tiles.to(dtype=dtype, memory_format=torch.contiguous_format).reshape(shape)


def add_tiles(x: Tensor, tiles: Tensor, group: Group, lead: int = 0) -> None:
    """Add tiles to where `split_tiles` took them from; tokens that stand in two tiles get both."""
    parts = tiles.unflatten(1, (group.rows, -1)).transpose(0, 1)  # (rows, count, H, lead + length, ...)
    span = x[: group.rows, group.start + lead : group.end + lead].unflatten(1, (group.count, group.length))
    span.add_(parts[:, :, :, lead:].transpose(2, 3))
    for i in range(lead):
        x[: group.rows, group.start + i : group.start + i + (group.count - 1) * group.length + 1 : group.length].add_(
            parts[:, :, :, i]
        )
