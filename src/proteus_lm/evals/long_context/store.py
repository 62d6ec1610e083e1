"""Generated samples on the disk, found by all that they depend on; written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proteus_lm.data.files import make_folder, write_whole


class Store:
    """A folder of JSON lines, one file for each set of settings. Without a folder nothing is kept.

    Args:
        folder: where; made when needed.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get(self, name: str, settings: dict[str, Any], make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The samples made with these settings: from the folder, or made now and kept there.

        Args:
            name: first part of the file's name.
            settings: everything that the samples depend on, as JSON values.
            make: makes them, as JSON values.
        """
        if self.folder is None:
            return make()
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]
        path = self.folder / f"{name}-{key}.jsonl"
        found = _read(path, settings)
        if found is None:
            make_folder(self.folder)  # first, so that a folder that cannot be made is known before the work
            found = make()
            lines = [json.dumps(line, ensure_ascii=False) for line in [{"settings": settings}, *found, {"samples": len(found)}]]
            write_whole(path, ("\n".join(lines) + "\n").encode())
        return found


def _read(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The samples of a file; None where it is absent, damaged or of other settings: then they are made again."""
    try:
        first, *samples, last = [json.loads(line) for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    whole = first == {"settings": json.loads(json.dumps(settings))} and last == {"samples": len(samples)}
    return samples if whole else None
