"""Segments of documents: a forward cut at multiples of a size in each document's own positions, and the slots of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from proteus_lm.sequence import TokenSequence


class Slots(Protocol):
    """Where tokens of one segment a row stand in it: slot i is position `start` + i of the row's document.

    `spread` lays tokens (B, T, ...) out as rows of queries (N, W, ...), `gather` is its inverse; `keep` puts them in their slots
    among those of the segment's earlier tokens (N, size, ...). `width`: slots, from the first, that queries may see.
    """

    sequence: TokenSequence
    width: int
    whole: bool
    """Every row has a token in each slot of the segment: `spread`, `gather` and `keep` change nothing."""

    def spread(self, x: Tensor, /) -> Tensor:
        """(B, T, ...) -> (N, W, ...)."""
        ...

    def gather(self, x: Tensor, /) -> Tensor:
        """(N, W, ...) -> (B, T, ...)."""
        ...

    def keep(self, old: Tensor, new: Tensor, /) -> Tensor:
        """old (N, size, ...), new (B, T, ...) -> (N, size, ...) in the type of `new`."""
        ...

    def visible(self, front: int, /) -> Tensor:
        """Of `front` places and twice the slots, which each query sees: the front and the slots up to its own, both times.

        bool (N or 1, 1, W, front + 2 width).
        """
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

    whole = False

    def __init__(self, sequence: TokenSequence, size: int) -> None:
        assert sequence.offset is not None, "a step stands at a position"
        self.sequence, self.width, self._position = sequence, size, sequence.offset
        self._slot = sequence.offset.remainder(size)

    def visible(self, front: int) -> Tensor:
        """As `Slots`."""
        seen = torch.arange(self.width, device=self._slot.device) <= self._slot[:, None]
        return self.sequence.once(("segment", self.width, front), lambda: _twice(seen[:, None], front))

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
    """Tokens of a forward that lie in one segment each row. What `even` segments need is on the host alone.

    Args:
        whole: the forward.  sequence: of these tokens.
        size: of a segment.
        starts: position of the first token of each row.
        lengths: tokens of each row, all within one segment.
        firsts: number of each row's first token among those of the whole forward, row by row.
        rows: int64 (N,), these rows among those of the whole forward; None where all take part.
        even: rows are of one length and cut at the same places, (N, lengths[0]); else all tokens are packed, (1, sum of lengths).
    """

    def __init__(
        self,
        whole: TokenSequence,
        sequence: TokenSequence,
        size: int,
        starts: list[int],
        lengths: list[int],
        firsts: list[int],
        rows: Tensor | None,
        even: bool,
    ) -> None:
        self.sequence, self.rows, self.even, self._whole, self._size = sequence, rows, even, whole, size
        self._lengths, self._firsts, self._slots = lengths, firsts, [start % size for start in starts]
        self.shape = (len(starts), lengths[0]) if even else (1, sum(lengths))
        self.width = max(slot + length for slot, length in zip(self._slots, lengths))
        self._plain = not any(self._slots) and {*lengths} == {self.width}  # tokens lie as their slots do
        self.whole = even and self._plain and self.width == size
        self._start = [start - slot for start, slot in zip(starts, self._slots)]
        begins = [slot == 0 for slot in self._slots]
        self.begins = begins[0] if len({*begins}) == 1 else torch.tensor(begins, device=whole.device)

    @cached_property
    def index(self) -> Tensor:
        """int64, `shape`: these tokens among those of the whole forward."""
        tokens = [torch.arange(a, a + n, device=self._whole.device) for a, n in zip(self._firsts, self._lengths)]
        return torch.cat(tokens).view(self.shape)

    @cached_property
    def _slot(self) -> Tensor:
        """int64 (tokens,), the slot of each token among those of all rows, `width` a row."""
        starts = [row * self.width + slot for row, slot in enumerate(self._slots)]
        return torch.cat([torch.arange(a, a + n, device=self._whole.device) for a, n in zip(starts, self._lengths)])

    @cached_property
    def _kept(self) -> Tensor:
        """As `_slot`, `size` slots a row."""
        starts = [row * self._size + slot for row, slot in enumerate(self._slots)]
        return torch.cat([torch.arange(a, a + n, device=self._whole.device) for a, n in zip(starts, self._lengths)])

    def visible(self, front: int) -> Tensor:
        """As `Slots`; one for all segments of a forward that are as wide."""
        shape, device = (1, self.width, self.width), self._whole.device
        make = lambda: _twice(torch.ones(shape, dtype=torch.bool, device=device).tril(), front)  # noqa: E731
        return self._whole.once(("segment", self.width, front), make)

    def shared(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """As `TokenSequence.once`, for all layers and for all segments that give the same key."""
        return self._whole.once(key, make)

    @property
    def positions(self) -> Tensor:
        """As `Slots`."""
        steps = torch.arange(self.width, device=self._whole.device)[None]
        if len({*self._start}) == 1:
            return self._start[0] + steps
        return torch.tensor(self._start, device=self._whole.device)[:, None] + steps

    def spread(self, x: Tensor) -> Tensor:
        """As `Slots`; zeros where no token is."""
        rows = len(self._slots)
        if self._plain:
            return x.reshape(rows, self.width, *x.shape[2:])
        empty = x.new_zeros(rows * self.width, *x.shape[2:])
        return empty.index_copy(0, self._slot, x.flatten(0, 1)).unflatten(0, (rows, self.width))

    def gather(self, x: Tensor) -> Tensor:
        """As `Slots`."""
        if self._plain:
            return x.reshape(*self.shape, *x.shape[2:])
        return x.flatten(0, 1)[self._slot].view(*self.shape, *x.shape[2:])

    def keep(self, old: Tensor, new: Tensor) -> Tensor:
        """As `Slots`."""
        if self._plain and self.width == self._size:
            return new.reshape(old.shape)
        flat = old.to(new.dtype).flatten(0, 1)
        return flat.index_copy(0, self._kept, new.flatten(0, 1)).view(old.shape)


def _twice(seen: Tensor, front: int) -> Tensor:
    return pad(seen.repeat(1, 1, 2), (front, 0), value=True)[:, None]


def cut(x: Tensor, parts: list[Segment]) -> list[Tensor]:
    """x (B, T, ...) of a whole forward -> the tokens of each segment, of its `shape`."""
    if all(part.even for part in parts):
        return list(x.split([part.shape[1] for part in parts], 1))
    order = torch.cat([part.index.flatten() for part in parts])
    taken = x.flatten(0, 1).index_select(0, order).split([part.index.numel() for part in parts])
    return [tokens.view(*part.shape, *x.shape[2:]) for tokens, part in zip(taken, parts)]


def join(pieces: list[Tensor], parts: list[Segment], batch: int) -> Tensor:
    """The inverse of `cut`, of `batch` rows."""
    if all(part.even for part in parts):
        return torch.cat(pieces, 1)
    flat, order = torch.cat([piece.flatten(0, 1) for piece in pieces]), torch.cat([part.index.flatten() for part in parts])
    return torch.empty_like(flat).index_copy(0, order, flat).unflatten(0, (batch, -1))


def segments(sequence: TokenSequence, size: int) -> list[Segment]:
    """A forward cut into segments of `size` positions, in order. A transfer to the host where rows have tokens behind them."""
    return sequence.once(("segments", size), lambda: _segments(sequence, size))


def _segments(sequence: TokenSequence, size: int) -> list[Segment]:
    length, packed = sequence.length, sequence.cu_seqlens is not None
    if sequence.offset is None or sequence.start is not None:
        starts = [sequence.start or 0] * sequence.rows
    else:
        starts = sequence.offset.tolist()
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
    device, start = sequence.device, starts[0] if even and len({*starts}) == 1 else None
    bounds = None if even else torch.tensor([0, *counts], device=device).cumsum(0)
    offset = None
    if any(starts):  # of a known start without a transfer
        offset = torch.tensor(starts, device=device) if start is None else torch.full((len(rows),), start, device=device)
    length = counts[0] if even else sum(counts)
    part = TokenSequence(sequence.schedule, len(rows), length, offset=offset, cu_seqlens=bounds, device=device, start=start)
    chosen = None if len(rows) == sequence.rows else torch.tensor(rows, device=device)
    return Segment(sequence, part, size, starts, counts, firsts, chosen, even)
