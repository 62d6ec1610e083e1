"""Rows of tokens moved to the chunk grid: slot s of a row holds position s of its chunk. Differentiable tensor operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from proteus_lm.ops.rows import Rows


class Aligned(NamedTuple):
    """Tokens in slots: tensors (N, T', H, ...), open units (N or 1, T') with 0 for an empty slot, full chunks a row, int32 (N)."""

    tokens: list[Tensor]
    active: Tensor
    full: Tensor


class Grid:
    """Where each token of a call goes.

    Args:
        rows: N.  length: T of each row, or of the packed row.
        offset: position of each row's first token, int64 (N or 1), or a number for all.
        cu_seqlens: int (N + 1), where one row holds N documents.
    """

    def __init__(
        self, rows: int, length: int, offset: int | Tensor, cu_seqlens: Tensor | None, chunk: int, device: torch.device
    ) -> None:
        self.rows, self.length, self.chunk = rows, length, chunk
        self._packed = None if cu_seqlens is None else Rows(cu_seqlens, length)
        self.even = cu_seqlens is None and isinstance(offset, int)
        if cu_seqlens is None and isinstance(offset, int):
            self.phase = offset % chunk
            self.slots = -(-(self.phase + length) // chunk) * chunk
            self.full = torch.full((rows,), (self.phase + length) // chunk, device=device, dtype=torch.int32)
            return
        longest = length if self._packed is None else self._packed.length
        self.slots = -(-(chunk - 1 + longest) // chunk) * chunk
        offset = torch.full((1,), offset, device=device) if isinstance(offset, int) else offset.to(device)
        phase = (offset % chunk).expand(rows)
        lengths = torch.full((rows,), length, device=device) if self._packed is None else self._packed.lengths.to(device)
        self.full = ((phase + lengths) // chunk).int()
        place = torch.arange(self.slots, device=device) - phase[:, None]
        self._place = place.clamp(min=0, max=longest - 1)
        self._before, self._here = place < 0, (place >= 0) & (place < lengths[:, None])
        self._back = phase[:, None] + torch.arange(longest, device=device)

    def tokens(self, tokens: Tensor, earlier: Tensor | None) -> Tensor:
        """(B, T, H, ...) behind the open chunk's tokens (N, chunk, H, ...) -> (N, T', H, ...), zeros in empty slots."""
        if self.even:
            if earlier is not None and self.phase:
                tokens = torch.cat([earlier[:, : self.phase].to(tokens.dtype), tokens], 1)
            missing = self.slots - tokens.shape[1]
            before = self.phase if earlier is None else 0
            return pad(tokens, (*[0, 0] * (tokens.dim() - 2), before, missing - before)) if missing else tokens
        rows = tokens if self._packed is None else self._packed.split(tokens)
        rows = rows.expand(self.rows, *rows.shape[1:])
        tail = [1] * (tokens.dim() - 2)
        index = self._place.view(*self._place.shape, *tail).expand(-1, -1, *rows.shape[2:])
        out = torch.where(self._here.view(*index.shape[:2], *tail), rows.gather(1, index), rows.new_zeros(()))
        if earlier is None:
            return out
        old = pad(earlier.to(out.dtype), (*[0, 0] * (earlier.dim() - 2), 0, self.slots - self.chunk))
        return torch.where(self._before.view(*index.shape[:2], *tail), old, out)

    def active(self, active: Tensor, earlier: Tensor | None) -> Tensor:
        """The same of open units: (B or 1, T) and (N, chunk) -> (N or 1, T')."""
        if self.even and earlier is not None and self.phase:
            active = active.expand(self.rows, -1)
        return self.tokens(active, earlier)

    def back(self, slots: Tensor) -> Tensor:
        """(N, T', H, D) -> (B, T, H, D)."""
        if self.even:
            whole = self.length == self.slots  # a slice of all has a backward of its own
            return slots if whole else slots[:, self.phase : self.phase + self.length]
        index = self._back.view(*self._back.shape, 1, 1).expand(-1, -1, *slots.shape[2:])
        rows = slots.gather(1, index)
        return rows if self._packed is None else self._packed.join(rows)


def align(grid: Grid, tokens: Sequence[Tensor], open_rows: Sequence[Tensor], active: Tensor, open_active: Tensor | None) -> Aligned:
    """Tokens q, k, v, theta, alpha, eta behind open rows k, v, theta, alpha, eta (or none), for which no query is asked."""
    earlier: list[Tensor | None] = [None] * 6
    if open_rows and not (grid.even and not grid.phase):  # on the grid, known to the host: no row is open
        earlier = [torch.zeros_like(open_rows[0]), *open_rows]
    placed = [grid.tokens(t, e) for t, e in zip(tokens, earlier)]
    return Aligned(placed, grid.active(active.to(tokens[0].device), open_active), grid.full)
