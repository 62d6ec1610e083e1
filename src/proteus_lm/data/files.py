"""Files that are there whole or not at all, and errors that say which write failed and why."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class WriteError(OSError):
    """A write that failed; the message names the path, the bytes needed and the bytes free."""


@contextmanager
def writing(path: Path, needed: int) -> Iterator[None]:
    """Say which write failed: `OSError`s inside get the path, the bytes needed and the bytes free.

    Raises:
        WriteError: with the same errno.
    """
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        free = shutil.disk_usage(folder).free
        remedy = "free some space or choose another disk" if is_full(error) else "check the disk and the rights"
        message = f"could not write {path}: {error.strerror or error}; {needed} bytes needed, {free} bytes free; {remedy}"
        raise WriteError(error.errno or errno.EIO, message) from error


def is_full(error: OSError) -> bool:
    """Whether the system refused a write for want of space on a disk, or in a quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def make_folder(path: Path) -> None:
    """Make a folder and those above it; one that is there is left as it is.

    Raises:
        FileExistsError: where a file stands at its place, or above it.
        WriteError: when the system refuses.
    """
    try:
        with writing(path, 0):
            path.mkdir(parents=True, exist_ok=True)
    except WriteError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTDIR):
            raise
        raise FileExistsError(
            f"{path} cannot be a folder: a file stands at its place or above it; choose another folder"
        ) from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all: a temporary name, fsync, rename.

    Raises:
        WriteError: naming the path, the bytes needed and the bytes free; the temporary file is gone then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path, len(data)):
            with temporary.open("wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`write_whole` of UTF-8 text."""
    write_whole(path, text.encode())


def write_json(path: Path, data: Any) -> None:
    """`write_whole` of JSON, indented, with a newline at the end."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
