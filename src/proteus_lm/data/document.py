"""What every source of text gives: documents that know where they came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol


class Document(NamedTuple):
    """One text and where it came from (a file, a line), for error messages."""

    text: str
    where: str


class Source(Protocol):
    """Documents in a fixed order. `size` and `consumed` are bytes on the disk, for a progress bar; size None: not known.
    `ignored` counts what was left out, by kind."""

    size: int | None
    consumed: int
    ignored: dict[str, int]

    def identity(self) -> dict[str, object]:
        """What the documents depend on, as JSON values: equal identities give equal documents."""
        ...

    def documents(self) -> Iterator[Document]:
        """The documents, from the first one, at each call."""
        ...


def decode(data: bytes, errors: str, where: str, base: int = 0) -> str:
    """UTF-8 bytes that start at byte `base` of their file, as text.

    Raises:
        ValueError: naming the place, the byte and its offset.
    """
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        byte, offset = data[error.start], base + error.start
        hint = " (UTF-16?)" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise ValueError(
            f"{where}: byte 0x{byte:02x} at offset {offset} is not UTF-8{hint}; convert the file, "
            "or choose errors='replace' (--errors replace)"
        ) from error


def text_field(row: Any, field: str, where: str, errors: str) -> str:
    """The text of a row of JSON lines, Parquet or a hub data set.

    Raises:
        ValueError: for a row without the field, a value that is not text, or text that is not Unicode (a lone surrogate).
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be an object with the field {field!r}, found {type(row).__name__}")
    if field not in row:
        raise ValueError(f"{where}: no field {field!r}; fields seen: {', '.join(map(str, row)) or 'none'}; choose one with --field")
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: the field {field!r} holds {type(text).__name__}, not text; fields seen: {', '.join(row)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if errors == "strict":
            raise ValueError(
                f"{where}: character {error.start} is half a surrogate pair; mend it, or choose errors='replace' (--errors replace)"
            ) from error
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
