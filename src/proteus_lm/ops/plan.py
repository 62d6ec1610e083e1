"""Which slice of the memory each chunk of tokens works on. Locked coordinates are left out, not multiplied by zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad


class Chunk(NamedTuple):
    """Tokens [start, end); `width` coordinates are open to some of them; `mixed` when not to all of them in every row."""

    start: int
    end: int
    width: int
    mixed: bool


def plan_chunks(
    length: int, chunk: int, dim: int, *, segments: Sequence[tuple[int, int, int]] | None = None, active: Tensor | None = None
) -> list[Chunk]:
    """Cut `length` tokens into chunks of `chunk` (the last may be shorter), each with its open width.

    Args:
        segments: stretches (first, past the last, open coordinates) where all rows agree; costs nothing on a device.
        active: open coordinates, int (B, T), where rows differ (0 = no token there); costs one transfer to the host.
            With neither, all `dim` coordinates are open.
    """
    starts = range(0, length, chunk)
    if segments is not None:
        low, high = [dim] * len(starts), [0] * len(starts)
        for first, last, width in segments:
            for c in range(first // chunk, -(-last // chunk)):
                low[c], high[c] = min(low[c], width), max(high[c], width)
    elif active is not None:
        tail = -length % chunk
        least = pad(active.where(active > 0, dim), (0, tail), value=dim).view(len(active), -1, chunk)
        low = least.amin((0, 2)).tolist()
        high = pad(active, (0, tail)).view(len(active), -1, chunk).amax((0, 2)).tolist()
    else:
        low = high = [dim] * len(starts)
    return [Chunk(s, min(s + chunk, length), max(h, 1), lo != h) for s, lo, h in zip(starts, low, high)]
