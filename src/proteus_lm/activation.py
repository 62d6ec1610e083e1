"""The schedule applied to one dimension of a memory and to some positions: how many coordinates are open at each token.

An operation takes an `Activation` and never learns of the schedule behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proteus_lm.schedule import ActivationSchedule


class Activation:
    """Open coordinates of a dimension at each token: always a prefix, so one length a token says it all.

    Args:
        schedule: when blocks open.
        dim: coordinates of the scheduled dimension (K for key rows, V for value columns, hidden units of an MLP memory).
        length: T, tokens in a row; with `cu_seqlens`, tokens in the packed row.
        offset: position of a row's first token: an int for all rows, or one a row (B,), or one a document with `cu_seqlens`.
        cu_seqlens: int (N + 1,), boundaries of the documents packed in one row; position restarts at each.
        device: of the tensors made; that of `offset` or `cu_seqlens` when they are tensors.

    Raises:
        ValueError: for a dimension smaller than the number of blocks, or offsets that do not fit the documents.
    """

    def __init__(
        self,
        schedule: ActivationSchedule,
        dim: int,
        length: int,
        *,
        offset: int | Sequence[int] | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        schedule.active(dim, 0)  # raises when the dimension cannot be cut
        if isinstance(offset, Sequence):
            offset = torch.tensor(list(offset), device=device)
        if isinstance(offset, Tensor) and (offset.dim() != 1 or offset.is_floating_point()):
            raise ValueError(f"offset is {offset.dtype} of shape {tuple(offset.shape)}; it must be an int or integers (B,)")
        if cu_seqlens is not None and isinstance(offset, Tensor) and len(offset) != len(cu_seqlens) - 1:
            raise ValueError(f"{len(offset)} offsets for {len(cu_seqlens) - 1} documents; give one a document")
        for tensor in (offset, cu_seqlens):
            device = tensor.device if isinstance(tensor, Tensor) else device
        self.schedule, self.dim, self.length = schedule, dim, length
        self.offset: int | Tensor = 0 if offset is None else offset
        self.cu_seqlens, self.device = cu_seqlens, device
        self._positions: Tensor | None = None  # filled by hand: torch.compile cannot look into functools.cached_property
        self._active: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """Position of each token in its document: int64 (B, T), or (1, T) where all rows agree."""
        if self._positions is None:
            self._positions = self._count()
        return self._positions

    @property
    def active(self) -> Tensor:
        """Open coordinates at each token: int64 (B, T), or (1, T) where all rows agree; from 1 to `dim`."""
        if self._active is None:
            self._active = self.schedule.active(self.dim, self.positions)
        return self._active

    def _count(self) -> Tensor:
        if self.cu_seqlens is None and not isinstance(self.offset, Tensor):
            return torch.arange(self.offset, self.offset + self.length, device=self.device)[None]
        steps = torch.arange(self.length, device=self.device)
        start = torch.as_tensor(self.offset, device=self.device).long().view(-1)
        if self.cu_seqlens is None:
            return start[:, None] + steps
        first = self.cu_seqlens[:-1].long()
        document = torch.searchsorted(self.cu_seqlens[1:].long().contiguous(), steps, right=True)
        return (steps - first[document] + start.expand(len(first))[document])[None]

    @property
    def segments(self) -> tuple[tuple[int, int, int], ...] | None:
        """On the host: stretches of tokens (first, past the last, open coordinates); None where rows differ or are packed."""
        if isinstance(self.offset, Tensor) or self.cu_seqlens is not None:
            return None
        stretches = self.schedule.segments(self.dim, self.offset, self.offset + self.length)
        return tuple((a - self.offset, b - self.offset, n) for a, b, n in stretches)

    def mask(self) -> Tensor:
        """Open coordinates as bool (B, T, dim), or (1, T, dim) where all rows agree."""
        return torch.arange(self.dim, device=self.active.device) < self.active[..., None]
