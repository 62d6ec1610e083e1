"""Data sets on the Hugging Face hub, streamed. `datasets` is imported only here; without network it fails at once and clearly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from proteus_lm.data.document import Document, text_field

_TIMEOUT = 10.0  # seconds to answer: long enough for a slow hub, short enough not to look hung
_LOCAL = "give a local file or folder instead (text, .jsonl, .parquet), or pydoc"


class HubDataset:
    """One split of a data set on the hub, pinned to the revision that the hub names now.

    Raises:
        FileNotFoundError: if the hub cannot be reached, is switched off, or has no such data set.
    """

    def __init__(self, name: str, *, config: str | None, split: str, field: str, errors: str) -> None:
        self._name, self._config, self._split, self._field, self._errors = name, config, split, field, errors
        self.size: int | None = None
        self.consumed, self.ignored = 0, dict[str, int]()
        self._revision = _revision(name)

    def identity(self) -> dict[str, object]:
        """Name, part and revision (commit) of the data set."""
        return {"kind": "hub", "name": self._name, "config": self._config, "split": self._split, "revision": self._revision}

    def documents(self) -> Iterator[Document]:
        """All rows of the split.

        Raises:
            ValueError: for a config or split that is not there, or a row without the field.
        """
        import datasets

        try:
            rows: Any = datasets.load_dataset(self._name, self._config, split=self._split, streaming=True, revision=self._revision)
        except Exception as error:  # many kinds: no such config, no such split, network
            raise ValueError(f"hub data set {self._name}, split {self._split!r}: {error}; or {_LOCAL}") from error
        for number, row in enumerate(rows):
            where = f"{self._name} row {number}"
            yield Document(text_field(row, self._field, where, self._errors), where)


def _revision(name: str) -> str:
    """Commit hash of a data set on the hub."""
    from huggingface_hub import HfApi, constants

    missing = f"no file or folder {name} here, and the hub"
    if constants.HF_HUB_OFFLINE or os.environ.get("HF_DATASETS_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}:
        raise FileNotFoundError(f"{missing} is switched off (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set); {_LOCAL}")
    try:
        info = HfApi().dataset_info(name, timeout=_TIMEOUT)
    except Exception as error:  # many kinds: no network, no such data set, no access
        raise FileNotFoundError(f"{missing} gave no data set of that name ({type(error).__name__}: {error}); {_LOCAL}") from error
    if info.sha is None:
        raise FileNotFoundError(f"{missing} names no revision of it; {_LOCAL}")
    return info.sha
