"""Shards into batches. A batch is a function of (seed, step) alone: one integer is the whole position of a run."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proteus_lm.data.dataset import TokenDataset


class Batch(NamedTuple):
    """Windows of a stream of documents.

    tokens: int64 (B, context + 1); inputs are [:, :-1], targets [:, 1:].
    starts: bool (B, context + 1), True at the first token of a document, and in column 0, where a window enters one.
    """

    tokens: Tensor
    starts: Tensor


class Loader:
    """Batches of windows of a split, permuted in each epoch.

    Window i of the stream is its tokens i * context .. (i + 1) * context, both ends included: every token but the first is the
    target of one window, up to a rest at the end shorter than a window. Windows are dealt in an order that has all of them once
    in each epoch, without a gap at its end: the batch there takes its last windows from the next epoch. A global batch is the
    next batch_size * world_size windows; rank r takes the r-th part. So what is trained on at a step depends on that product
    only, not on how many ranks share it.

    Args:
        dataset: the split.
        batch_size: windows for each rank.
        context: tokens that the model sees.
        seed: 0 .. 2^64 - 1, another order for each.
        rank, world_size: which part of the global batch.
        allow_short_documents: accept documents that are all shorter than the context (windows then hold several).

    Raises:
        ValueError: for numbers outside their range, a context longer than any document, fewer windows than one global batch.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        batch_size: int,
        context: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        allow_short_documents: bool = False,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("context", context), ("world_size", world_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; with world_size {world_size} it must be 0 to {world_size - 1}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}; it must be 0 to 2**64 - 1")
        where = f"{dataset.path}, split {dataset.split}"
        if context > dataset.longest_document and not allow_short_documents:
            raise ValueError(
                f"the context of {context} tokens is longer than any document of {where}: the longest has "
                f"{dataset.longest_document}; use a shorter context, longer documents, or "
                "set allow_short_documents (data.allow_short_documents: true in a recipe)"
            )
        self.dataset, self.context, self.seed = dataset, context, seed
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.windows = max(0, (dataset.tokens - 1) // context)
        if self.windows < self.global_batch:
            raise ValueError(
                f"{where} has {self.windows} windows of {context} tokens, fewer than one global batch of {self.global_batch}; "
                "use a smaller batch, a shorter context or more data"
            )
        self._order = lru_cache(maxsize=2)(self._permutation)

    @property
    def global_batch(self) -> int:
        """Windows of a step over all ranks."""
        return self.batch_size * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every window has been dealt."""
        return -(-self.windows // self.global_batch)

    def window_indices(self, step: int) -> list[int]:
        """Which windows this rank gets at a step, `batch_size` numbers below `windows`.

        Raises:
            ValueError: for a negative step.
        """
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        first = step * self.global_batch + self.rank * self.batch_size
        dealt = (divmod(place, self.windows) for place in range(first, first + self.batch_size))
        return [int(self._order(epoch)[place]) for epoch, place in dealt]

    def batch(self, step: int) -> Batch:
        """The batch of this rank at a step, on the CPU: a function of (seed, step), whatever was asked for before.

        Raises:
            ValueError: for a negative step.
        """
        length, bounds = self.context + 1, self.dataset.document_starts
        firsts = [window * self.context for window in self.window_indices(step)]
        tokens = np.stack([self.dataset.read(first, first + length) for first in firsts])
        starts = np.zeros(tokens.shape, bool)
        for row, first in zip(starts, firsts):
            inside = slice(*np.searchsorted(bounds, (first, first + length)))
            row[bounds[inside] - first] = True
        starts[:, 0] = True
        return Batch(torch.from_numpy(tokens), torch.from_numpy(starts))

    def _permutation(self, epoch: int) -> np.ndarray:
        """Order of the windows in an epoch, int64 (windows,): sorted by raw Philox numbers, a stream that numpy never changes."""
        numbers = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(self.windows)
        return np.argsort(numbers, kind="stable")


def cu_seqlens(starts: Tensor) -> Tensor:
    """Boundaries of the documents in a batch whose inputs are laid in one row of B * context tokens.

    Args:
        starts: bool (B, context + 1), `Batch.starts`; the last column belongs to a target and is left out.

    Returns:
        int64 (pieces + 1,), from 0 to B * context: for `cu_seqlens` of the model, with tokens[:, :-1].reshape(1, -1).
    """
    flat = starts[:, :-1].reshape(-1)
    return torch.cat([flat.nonzero().view(-1), torch.tensor([flat.numel()], device=starts.device)])
