"""What every source of text gives: documents that know where they came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol


class Document(NamedTuple):
    """One text and where it came from (a file, a line), for error messages."""

    text: str
    where: str


class Source(Protocol):
    """Documents in a fixed order. `size` and `consumed` are bytes on the disk, for a progress bar; size None: not known."""

    size: int | None
    consumed: int

    def identity(self) -> dict[str, object]:
        """What the documents depend on, as JSON values: equal identities give equal documents."""
        ...

    def documents(self) -> Iterator[Document]:
        """The documents, from the first one, at each call."""
        ...
