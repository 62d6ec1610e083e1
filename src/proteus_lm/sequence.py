"""What one forward tells its mixers about the tokens: rows or packed documents, positions, open coordinates.

Made once by the model and read by every layer, so that all layers agree on the position and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops.rows import Rows
from proteus_lm.schedule import ActivationSchedule


class Gaps(NamedTuple):
    """A packed row with `width` free slots before each document: where its tokens, those slots and its last slots stand.

    Args:
        tokens: int64 (T,).  free, last: int64 (N, width).  length: of the widened row, T + N * width.
    """

    tokens: Tensor
    free: Tensor
    last: Tensor
    length: int


class TokenSequence:
    """The tokens of one forward: N rows of T tokens, or N documents packed in one row of T tokens.

    Args:
        schedule: when blocks of memory open.
        rows: N, rows of the batch, or documents when packed.
        length: T, tokens in a row; in the packed row with `cu_seqlens`.
        offset: int64 (N,), tokens that each row or document has behind it; None when all start at position 0.
        cu_seqlens: int (N + 1,), boundaries of the documents packed in one row.
        device: of the tensors made here.
        start: `offset` as a number, where all rows agree and the host knows it: what follows from it is planned without the device.
    """

    def __init__(
        self,
        schedule: ActivationSchedule,
        rows: int,
        length: int,
        *,
        offset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        device: torch.device | str | None = None,
        start: int | None = None,
    ) -> None:
        self.schedule, self.rows, self.length, self.start = schedule, rows, length, start
        self.offset, self.cu_seqlens, self.device = offset, cu_seqlens, device
        self._shared: dict[Hashable, Any] = {}

    @property
    def is_step(self) -> bool:
        """One token a row behind a known position: the case of the recurrent decoding step."""
        return self.length == 1 and self.cu_seqlens is None and self.offset is not None

    def _activation(self, dim: int) -> Activation:
        offset = self.offset if self.start is None else self.start
        return self.once(
            ("activation", dim),
            lambda: self.schedule.activation(dim, self.length, offset=offset, cu_seqlens=self.cu_seqlens, device=self.device),
        )

    def placed(self, dim: int) -> Activation | None:
        """As `activation`, but never None where the host knows the position: for what goes on from a state on the device."""
        return self.activation(dim) if self.start is None else self._activation(dim)

    def activation(self, dim: int) -> Activation | None:
        """The schedule applied to `dim` coordinates at these tokens; None for one block, which is open always."""
        return None if self.schedule.blocks == 1 else self._activation(dim)

    def active(self, dim: int) -> Tensor | None:
        """Open coordinates at the one token of a decoding step, int64 (N,); None for one block. By tensors alone."""
        return None if self.schedule.blocks == 1 else self.schedule.active(dim, self._step_position)

    @property
    def positions(self) -> Tensor:
        """Position of each token in its document: int64 (N, T), or (1, T) where rows agree or documents are packed."""
        if self.cu_seqlens is not None:
            return self._activation(self.schedule.blocks).positions
        steps = torch.arange(self.length, device=self.device)[None]
        if self.offset is None or self.start is not None:
            return steps + self.start if self.start else steps
        return self.offset[:, None] + steps

    @property
    def _step_position(self) -> Tensor:
        assert self.is_step and self.offset is not None, "only a decoding step stands at one position a row"
        return self.offset

    @cached_property
    def documents(self) -> Rows:
        """The packed documents as rows padded on the right. Costs one transfer to the host."""
        assert self.cu_seqlens is not None, "rows that are not packed need no splitting"
        return Rows(self.cu_seqlens, self.length)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of `make()`, computed by the first layer that asks for `key` and read by the others."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def gaps(self, width: int) -> Gaps:
        """The packed row widened by `width` free slots before each document (for what a convolution saw before it)."""
        return self.once(("gaps", width), lambda: self._gaps(width))

    def _gaps(self, width: int) -> Gaps:
        assert self.cu_seqlens is not None, "only packed rows are widened"
        bounds = self.cu_seqlens.long()
        steps = torch.arange(self.length, device=bounds.device)
        document = torch.searchsorted(bounds[1:].contiguous(), steps, right=True)
        slots = torch.arange(width, device=bounds.device)
        shift = width * torch.arange(self.rows + 1, device=bounds.device)
        starts, ends = (bounds + shift)[:-1], bounds[1:] + shift[1:]
        return Gaps(
            steps + width * (document + 1),
            starts[:, None] + slots,
            ends[:, None] - width + slots,
            self.length + self.rows * width,
        )


class Unpadding:
    """A batch without its masked tokens: rows of one length where all that hold a token agree, else packed documents.

    Costs one transfer to the host.

    Args:
        mask: bool (B, T), True for tokens that count, anywhere in a row.
    """

    def __init__(self, mask: Tensor) -> None:
        lengths = mask.sum(1)
        sizes = lengths.tolist()
        kept = [row for row, size in enumerate(sizes) if size]
        self.shape = tuple(mask.shape)
        self.lengths = lengths
        """int64 (B,): tokens of each row that count."""
        self.count, self.tokens = len(kept), sum(sizes)
        self.rows = None if len(kept) == len(sizes) else torch.tensor(kept, dtype=torch.int64, device=mask.device)
        """int64 (N,): the rows that hold a token, None when all do."""
        self._index = None if self.tokens == mask.numel() else mask.flatten().nonzero()[:, 0]
        even = len({sizes[row] for row in kept}) <= 1
        self.length = self.tokens // max(self.count, 1) if even else self.tokens
        self.cu_seqlens = None
        if not even:
            bounds = torch.zeros(self.count + 1, dtype=torch.int64, device=mask.device)
            bounds[1:] = (lengths if self.rows is None else lengths[self.rows]).cumsum(0)
            self.cu_seqlens = bounds

    def take(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (N, L, ...), or (1, tokens, ...) where the lengths differ."""
        if self._index is None:
            return x
        batch = self.count if self.cu_seqlens is None else 1
        return x.flatten(0, 1)[self._index].view(batch, self.length, *x.shape[2:])

    def put(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """The inverse of `take`, with `fill` at the masked places."""
        if self._index is None:
            return x
        flat = x.new_full((self.shape[0] * self.shape[1], *x.shape[2:]), fill)
        return flat.index_copy(0, self._index, x.flatten(0, 1)).view(*self.shape, *x.shape[2:])
