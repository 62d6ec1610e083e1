"""Rows of tokens on their chunk grids: which token of which row sits in which slot.

A unit is one chunk of one row. Units are ordered by chunk, and within a chunk by row, the row with most slots first: so the
units of a chunk are the first rows, those that fill the chunk come before those that end in it, and a short document costs
nothing more once it has ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """The units [start, stop) of one chunk, of the first stop - start rows; the first `full` of them fill the chunk."""

    start: int
    stop: int
    full: int


class Layout:
    """Where each token sits.

    Args:
        phases: for each row, the slot of its first token in its first chunk.
        firsts: for each row, index of its first token among all tokens.
        lengths: for each row, its tokens.
        chunk: slots of a chunk.
        held: bool (N, chunk), which slots before `phases` hold tokens of earlier calls, numbered behind all tokens; None: none do.
        device: of the index tensors.
    """

    def __init__(
        self,
        phases: Sequence[int],
        firsts: Sequence[int],
        lengths: Sequence[int],
        chunk: int,
        *,
        held: Tensor | None,
        device: torch.device,
    ) -> None:
        rows, tokens = len(phases), sum(lengths)
        # Whole rows of whole chunks: tokens move by a change of axes, which is several times faster than by an index.
        self._whole = rows if held is None and {*phases} == {0} and {*lengths} == {lengths[0]} and not lengths[0] % chunk else 0
        ends = [p + n for p, n in zip(phases, lengths)]
        self.order = sorted(range(rows), key=lambda row: -ends[row])
        self.slots = min(chunk, ends[self.order[0]])
        self.spans, rank = _spans([ends[row] for row in self.order], chunk)
        row_of = torch.tensor([self.order[r] for r in rank], device=device)
        chunk_of = [number for number, span in enumerate(self.spans) for _ in range(span.start, span.stop)]
        first_slot = torch.tensor(chunk_of, device=device) * chunk
        phase, first, length = (torch.tensor(list(t), device=device)[row_of, None] for t in (phases, firsts, lengths))
        slot = first_slot[:, None] + torch.arange(self.slots, device=device)
        place = slot - phase
        token = (place >= 0) & (place < length)
        earlier = torch.zeros_like(token)
        if held is not None:
            earlier = (place < 0) & held[row_of[:, None], slot % chunk]
        self.valid = token | earlier
        self._source = torch.where(token, first + place, torch.where(earlier, tokens + row_of[:, None] * chunk + slot, 0))
        self._full = bool(self.valid.all()) if device.type == "cpu" else False
        index = torch.full((tokens + (0 if held is None else held.numel()),), -1, device=device)
        slots = torch.arange(self.valid.numel(), device=device).view(self.valid.shape)
        self._slot_of = index.scatter_(0, self._source[self.valid], slots[self.valid])
        self._tokens = tokens

    def gather(self, tokens: Tensor, open_rows: Tensor | None, dtype: torch.dtype) -> Tensor:
        """(B, T, H, ...) and (N, chunk, H, ...) -> (units * H, slots, ...), zeros in empty slots."""
        heads = tokens.shape[2]
        if self._whole:
            chunks = tokens.reshape(self._whole, -1, self.slots, *tokens.shape[2:]).transpose(0, 1).transpose(2, 3)
            return chunks.to(dtype).reshape(-1, self.slots, *tokens.shape[3:])
        source = tokens.flatten(0, 1)
        if open_rows is not None:
            source = torch.cat([source.to(dtype), open_rows.to(dtype).flatten(0, 1)])
        index = self._source[:, None] * heads + torch.arange(heads, device=tokens.device)[:, None]
        out = source.flatten(0, 1).index_select(0, index.flatten()).to(dtype)
        out = out.view(-1, self.slots, *tokens.shape[3:])
        if self._full:
            return out
        valid = self.valid.repeat_interleave(heads, 0)
        return out.where(valid.view(*valid.shape, *[1] * (out.dim() - 2)), 0)

    def scatter(self, slots: Tensor, tokens: Tensor, open_rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The other way: (units * H, slots, ...) to the shapes and types of `tokens` and `open_rows`, zeros where none was."""
        heads = tokens.shape[2]
        if self._whole:
            chunks = slots.view(-1, self._whole, heads, *slots.shape[1:]).transpose(2, 3).transpose(0, 1)
            return chunks.to(tokens.dtype).reshape(tokens.shape), None
        unit, slot = self._slot_of.div(self.slots, rounding_mode="floor"), self._slot_of % self.slots
        index = (unit * heads * self.slots + slot)[:, None] + torch.arange(heads, device=slots.device) * self.slots
        flat = slots.reshape(-1, *slots.shape[2:])
        out = flat.index_select(0, index[: self._tokens].flatten()).view(tokens.shape).to(tokens.dtype)
        if open_rows is None:
            return out, None
        rest, taken = index[self._tokens :].flatten(), self._slot_of[self._tokens :] >= 0
        earlier = flat.index_select(0, rest.clamp(min=0)).view(open_rows.shape)
        taken = taken.view(*open_rows.shape[:2], *[1] * (open_rows.dim() - 2))
        return out, earlier.where(taken, 0).to(open_rows.dtype)


def _spans(ends: Sequence[int], chunk: int) -> tuple[list[Span], list[int]]:
    """Spans of rows that end at `ends` (falling), and the rank of each unit's row."""
    spans, ranks, start = [], [], 0
    rising = [-end for end in ends]
    for chunk_start in range(0, ends[0], chunk):
        live = bisect_left(rising, -chunk_start)
        full = bisect_left(rising, -(chunk_start + chunk) + 1)
        spans.append(Span(start, start + live, full))
        ranks.extend(range(live))
        start += live
    return spans, ranks
