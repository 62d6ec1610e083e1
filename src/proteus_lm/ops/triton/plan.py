"""Chunk tables: where each chunk of tokens starts, how long it is and how many coordinates are open in it.

A chunk never crosses a document's boundary nor an unlock, so one open length holds for all its tokens. That makes the gate exact,
locked coordinates of an initial state included, at the price of a short chunk where an unlock is not a multiple of the chunk.
Rows of a batch are documents of one packed row: the kernels know nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 16  # coordinates; the grain in which `documents` tells when a tile opens


class Plan(NamedTuple):
    """The tables the kernels read.

    Args:
        chunks: int64 (capacity,), from the low bits up: first token (32), tokens (8; 0 = no chunk here), open coordinates (12), and
            open coordinates of the document's next chunk (12; 0 if it has none). One word, so that one load brings it.
        documents: int32 (N, 2 + tiles): first chunk, past the last chunk, then for each tile of 16 coordinates
            the first chunk in which one of its coordinates is open (past the last chunk if never).
    """

    chunks: Tensor
    documents: Tensor


def capacity(tokens: int, documents: int, blocks: int, segments: Sequence[int] | None, chunk: int) -> int:
    """Rows of the chunk table: exact where the host knows the segments (flat: first, past the last, open), else an upper bound."""
    if segments is not None:
        ends = zip(segments[::3], segments[1::3])
        return documents * sum(-(-(last - first) // chunk) for first, last in ends)
    return tokens // chunk + documents * blocks


def build(bounds: Tensor, active: Tensor | None, tokens: int, dim: int, chunk: int, rows: int) -> Plan:
    """Tables for documents at `bounds` (N + 1,) and open lengths `active` (tokens,); tensor operations only, no transfer.

    Args:
        dim: coordinates of the scheduled dimension; all open where `active` is None.
        rows: size of the chunk table, see `capacity`.
    """
    device, bounds = bounds.device, bounds.long()
    time, count = torch.arange(tokens, device=device), len(bounds) - 1
    document = torch.searchsorted(bounds[1:].contiguous(), time, right=True)
    fresh = document != torch.cat((document.new_full((1,), -1), document[:-1]))
    if active is None:
        active = time.new_full((tokens,), dim)
    active = active.long()
    fresh = fresh | (active != active.roll(1))
    first = torch.where(fresh, time, 0).cummax(0).values
    starts = (time - first) % chunk == 0
    before = torch.cat((time.new_zeros(1), starts.cumsum(0)))  # chunks that start before each token
    slot = torch.where(starts, before[:-1], rows)  # the last, dropped row takes what starts no chunk
    begin, opened, owner = (time.new_zeros(rows + 1).scatter(0, slot, x) for x in (time, active, document))
    size = time.new_zeros(rows + 1).scatter_add(0, before[1:] - 1, torch.ones_like(time))
    goes_on = (size.roll(-1) > 0) & (owner.roll(-1) == owner)
    chunks = (begin | size << 32 | opened << 40 | torch.where(goes_on, opened.roll(-1), 0) << 52)[:rows]
    shut = active[:, None] <= TILE * torch.arange(-(-dim // TILE), device=device)
    shut = (shut & starts[:, None]).long()
    opens = before[bounds[:-1]][:, None] + time.new_zeros(count, shut.shape[1]).index_add(0, document, shut)
    ends = torch.stack((before[bounds[:-1]], before[bounds[1:]]), 1)
    return Plan(chunks, torch.cat((ends, opens), 1).int().contiguous())


@lru_cache(maxsize=64)
def regular(rows: int, length: int, segments: tuple[int, ...], dim: int, chunk: int, device: torch.device) -> Plan:
    """Tables for `rows` equal rows that agree, from ints on the host. Kept, so that training copies nothing to the device."""
    active = torch.cat([torch.full((b - a,), n) for a, b, n in zip(segments[::3], segments[1::3], segments[2::3])])
    bounds = torch.arange(rows + 1) * length
    size = capacity(rows * length, rows, 0, segments, chunk)
    plan = build(bounds, active.repeat(rows), rows * length, dim, chunk, size)
    return Plan(plan.chunks.to(device), plan.documents.to(device))
