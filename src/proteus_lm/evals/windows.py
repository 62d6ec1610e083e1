"""Which tokens an evaluation predicts: whole documents, or windows of one length cut from them. Nothing is left out in silence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Documents(Protocol):
    """What an evaluation reads: `proteus_lm.data.dataset.TokenDataset`, or anything with its two members."""

    @property
    def documents(self) -> int:
        """Number of documents."""
        ...

    def document(self, index: int, /) -> np.ndarray:
        """Token ids of a document, integers (length,)."""
        ...


@dataclass(frozen=True)
class Window:
    """Tokens [start, start + length] of a document: `length` predictions, the first from the token at `start`, at position 0."""

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class LeftOut:
    """Tokens of a split that an evaluation does not predict, by reason.

    Args:
        first: a document's first token, which nothing stands before.
        tails: the end of a document, shorter than a window; whole documents shorter than one are in it.
        limit: windows beyond `max_tokens`.
        short_documents: documents too short for a single window (their tokens are counted above).
    """

    first: int
    tails: int
    limit: int
    short_documents: int


def choose_windows(
    dataset: Documents, context: int | None, max_tokens: int | None = None, *, longest: int | None = None
) -> tuple[tuple[Window, ...], LeftOut]:
    """All windows of `context` predictions, cut from each document's start; whole documents when `context` is None.

    With `longest`, a whole document is read up to so many predictions, and the rest of it is counted among the tails.

    With `max_tokens`, windows are taken at even distances over the whole split, at least one; the choice depends on nothing
    else, so two models asked the same question get the same windows.

    Returns:
        The windows in the order of the documents, and what they leave out. Windows and left-out tokens add up to the split.

    Raises:
        ValueError: when `context`, `max_tokens` or `longest` is below 1, or no document holds a window.
    """
    for name, value in (("context", context), ("max_tokens", max_tokens), ("longest", longest)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1 token")
    windows: list[Window] = []
    total = first = short = most = 0
    for index in range(dataset.documents):
        size = len(dataset.document(index))
        most, total, first = max(most, size), total + size, first + min(size, 1)
        width = min(size - 1, longest or size) if context is None else context
        starts = range(0, size - width, width) if width >= 1 else ()
        starts = starts[:1] if context is None else starts
        short += not len(starts)
        windows += [Window(index, start, width) for start in starts]
    if not windows:
        raise ValueError(
            f"no document holds {(context or 1) + 1} tokens (the longest of {dataset.documents} has {most}); "
            "evaluate at a shorter context, or prepare data with longer documents"
        )
    kept = windows if max_tokens is None else _spread(windows, max_tokens)
    predicted, within = sum(w.length for w in kept), sum(w.length for w in windows)
    return tuple(kept), LeftOut(first, total - first - within, within - predicted, short)


def _spread(windows: Sequence[Window], max_tokens: int) -> list[Window]:
    """Windows at even distances whose predictions add up to at most `max_tokens`, but at least one window."""
    count = min(len(windows), max(1, max_tokens * len(windows) // sum(w.length for w in windows)))
    kept = [windows[i * len(windows) // count] for i in range(count)]
    while len(kept) > 1 and sum(w.length for w in kept) > max_tokens:
        kept.pop()
    return kept
