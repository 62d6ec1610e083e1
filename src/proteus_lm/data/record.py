"""What a folder says of its own files, in a JSON file among them: sizes and SHA-256, so that damage is seen when it is opened."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from proteus_lm.data.files import file_sha256


def record_of(folder: Path) -> dict[str, Any]:
    """Bytes and SHA-256 (hex) of every file below a folder, by name: {"files": {...}, "sha256": {...}}."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        "files": {name: path.stat().st_size for name, path in files.items()},
        "sha256": {name: file_sha256(path) for name, path in files.items()},
    }


def damage(folder: Path, record: str, *, contents: bool = False) -> str | None:
    """What is wrong with a folder (a file missing or of another size than was written), or None when it is whole.

    Args:
        record: the JSON file of the folder that holds what `record_of` gave.
        contents: also read the files and compare their SHA-256; older records have none, and are trusted.
    """
    try:
        content = json.loads((folder / record).read_text(encoding="utf-8"))
        files, digests = content["files"], content.get("sha256", {})
    except FileNotFoundError:
        return f"{record} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{record} is not readable ({error})"
    for name, size in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        found = (folder / name).stat().st_size
        if found != size:
            return f"{name} has {found} bytes of {size}"
    for name, digest in digests.items() if contents else ():
        path = folder / name
        try:
            found = sha256_once(path)
        except OSError as error:
            return f"{name} is not readable ({error})"
        if found != digest:
            return f"{name} is not what was written (its SHA-256 differs)"
    return None


def sha256_once(path: Path) -> str:
    """SHA-256 (hex) of a file's content, read again by this process only when its time or size has changed since."""
    return _sha256(path.absolute(), path.stat().st_mtime_ns, path.stat().st_size)


@lru_cache(maxsize=1024)
def _sha256(path: Path, _modified: int, _size: int) -> str:
    return file_sha256(path)
