"""Text of a user's evaluation files, packed or not."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, without a byte order mark; one named .gz is unpacked.

    Raises:
        ValueError: naming the file, for what is damaged or no UTF-8.
        OSError: where there is none, or it cannot be read.
    """
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text ({error}); convert it, or give it again") from error


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1 on; errors as `read_text`.

    Ends of lines are those of JSON lines: `str.splitlines` would also cut at U+2028 and its like, which stand in JSON's texts.
    """
    for number, line in enumerate(read_text(path).replace("\r\n", "\n").split("\n"), 1):
        if line.strip():
            yield number, line
