"""Segments of documents: a forward cut at multiples of a size in each document's own positions, and the slots of its tokens."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from proteus_lm.sequence import TokenSequence


class Slots(Protocol):
    """Where tokens of one segment a row stand in it: slot i is position `start` + i of the row's document.

    `spread` lays tokens (B, T, ...) out as rows of queries (N, W, ...), `gather` is its inverse; `keep` puts them in their slots
    among those of the segment's earlier tokens (N, size, ...). `width`: slots, from the first, that queries may see.
    """

    sequence: TokenSequence
    width: int

    def spread(self, x: Tensor, /) -> Tensor:
        """(B, T, ...) -> (N, W, ...)."""
        ...

    def gather(self, x: Tensor, /) -> Tensor:
        """(N, W, ...) -> (B, T, ...)."""
        ...

    def keep(self, old: Tensor, new: Tensor, /) -> Tensor:
        """old (N, size, ...), new (B, T, ...) -> (N, size, ...) in the type of `new`."""
        ...

    @property
    def visible(self) -> Tensor:
        """Slots that each query sees, those up to its own: bool (N or 1, W, width)."""
        ...

    @property
    def positions(self) -> Tensor:
        """Of the queries: int64 (N or 1, W)."""
        ...

    @property
    def begins(self) -> Tensor | bool:
        """Rows that stand at the start of a segment: bool (N,), or one value for all that the host knows."""
        ...


class Step:
    """One token a row behind a state, at positions known to the device alone."""

    def __init__(self, sequence: TokenSequence, size: int) -> None:
        assert sequence.offset is not None, "a step stands at a position"
        self.sequence, self.width, self._position = sequence, size, sequence.offset
        self._slot = sequence.offset.remainder(size)

    @property
    def visible(self) -> Tensor:
        """As `Slots`."""
        return (torch.arange(self.width, device=self._slot.device) <= self._slot[:, None])[:, None]

    @property
    def positions(self) -> Tensor:
        """As `Slots`."""
        return self._position[:, None]

    @property
    def begins(self) -> Tensor:
        """As `Slots`."""
        return self._slot == 0

    def spread(self, x: Tensor) -> Tensor:
        """As `Slots`."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """As `Slots`."""
        return x

    def keep(self, old: Tensor, new: Tensor) -> Tensor:
        """As `Slots`."""
        here = torch.arange(self.width, device=self._slot.device) == self._slot[:, None]
        return torch.where(here.view(*here.shape, *[1] * (new.dim() - 2)), new, old.to(new.dtype))


class Segment:
    """Tokens of a forward that lie in one segment each row.

    Args:
        sequence: of these tokens.
        size: of a segment.
        starts: position of the first token of each row.
        lengths: tokens of each row, all within one segment.
        index: int64 (B, T), these tokens among those of the whole forward.
        rows: int64 (N,), these rows among those of the whole forward; None where all take part.
    """

    def __init__(
        self, sequence: TokenSequence, size: int, starts: list[int], lengths: list[int], index: Tensor, rows: Tensor | None
    ) -> None:
        self.sequence, self.index, self.rows, self._size, self._count = sequence, index, rows, size, len(starts)
        slots = [start % size for start in starts]
        self.width = max(slot + length for slot, length in zip(slots, lengths))
        self._plain = not any(slots) and {*lengths} == {self.width}  # tokens lie as their slots do
        self._slot = torch.cat([torch.arange(slot, slot + n, device=index.device) for slot, n in zip(slots, lengths)])
        self._row = torch.arange(len(slots), device=index.device).repeat_interleave(torch.tensor(lengths, device=index.device))
        self._start = torch.tensor([start - slot for start, slot in zip(starts, slots)], device=index.device)
        begins = [slot == 0 for slot in slots]
        self.begins = begins[0] if len({*begins}) == 1 else torch.tensor(begins, device=index.device)

    @property
    def visible(self) -> Tensor:
        """As `Slots`."""
        return torch.ones(1, self.width, self.width, dtype=torch.bool, device=self.index.device).tril()

    @property
    def positions(self) -> Tensor:
        """As `Slots`."""
        return self._start[:, None] + torch.arange(self.width, device=self._start.device)

    def spread(self, x: Tensor) -> Tensor:
        """As `Slots`; zeros where no token is."""
        if self._plain:
            return x.reshape(self._count, self.width, *x.shape[2:])
        empty = x.new_zeros(self._count * self.width, *x.shape[2:])
        return empty.index_copy(0, self._row * self.width + self._slot, x.flatten(0, 1)).unflatten(0, (-1, self.width))

    def gather(self, x: Tensor) -> Tensor:
        """As `Slots`."""
        if self._plain:
            return x.reshape(*self.index.shape, *x.shape[2:])
        return x.flatten(0, 1)[(self._row * self.width + self._slot).view(self.index.shape)]

    def keep(self, old: Tensor, new: Tensor) -> Tensor:
        """As `Slots`."""
        if self._plain and self.width == self._size:
            return new.reshape(old.shape)
        flat = old.to(new.dtype).flatten(0, 1)
        return flat.index_copy(0, self._row * self._size + self._slot, new.flatten(0, 1)).view(old.shape)


def segments(sequence: TokenSequence, size: int) -> list[Segment]:
    """A forward cut into segments of `size` positions, in order. A transfer to the host where rows have tokens behind them."""
    return sequence.once(("segments", size), lambda: _segments(sequence, size))


def _segments(sequence: TokenSequence, size: int) -> list[Segment]:
    length, packed = sequence.length, sequence.cu_seqlens is not None
    starts = [0] * sequence.rows if sequence.offset is None else sequence.offset.tolist()
    lengths = sequence.documents.lengths.tolist() if packed else [length] * sequence.rows
    firsts = [sum(lengths[:row]) for row in range(sequence.rows)] if packed else [row * length for row in range(sequence.rows)]
    even = not packed and len({start % size for start in starts}) == 1
    found, done = [], [0] * sequence.rows
    while any(d < n for d, n in zip(done, lengths)):
        rows = [row for row, n in enumerate(lengths) if done[row] < n]
        begin = [starts[row] + done[row] for row in rows]
        counts = [min(size - at % size, lengths[row] - done[row]) for row, at in zip(rows, begin)]
        found.append(_segment(sequence, size, rows, begin, counts, [firsts[row] + done[row] for row in rows], even))
        for row, count in zip(rows, counts):
            done[row] += count
    return found


def _segment(
    sequence: TokenSequence, size: int, rows: list[int], starts: list[int], counts: list[int], firsts: list[int], even: bool
) -> Segment:
    """The piece of `counts` tokens from position `starts`, number `firsts` of the forward, of the rows `rows`."""
    device = sequence.device
    tokens = [torch.arange(first, first + count, device=device) for first, count in zip(firsts, counts)]
    index = torch.stack(tokens) if even else torch.cat(tokens)[None]
    bounds = None if even else torch.tensor([0, *counts], device=device).cumsum(0)
    offset = torch.tensor(starts, device=device) if any(starts) else None
    start = starts[0] if even and len({*starts}) == 1 else None
    part = TokenSequence(sequence.schedule, len(rows), index.shape[1], offset=offset, cu_seqlens=bounds, device=device, start=start)
    chosen = None if len(rows) == sequence.rows else torch.tensor(rows, device=device)
    return Segment(part, size, starts, counts, index, chosen)
