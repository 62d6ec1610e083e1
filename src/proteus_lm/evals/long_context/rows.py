"""Rows of evaluation sets: local files first (JSON lines or JSON, packed or not), then the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proteus_lm.evals.files import read_lines, read_text
from proteus_lm.evals.hub import MissingData, require_hub, without_hub

_ENDINGS = (".jsonl.gz", ".jsonl", ".json.gz", ".json")


@dataclass(frozen=True)
class Rows:
    """Rows of a set, and where they came from."""

    rows: list[dict[str, Any]]
    source: str


def find_file(data: Path | None, *names: str) -> Path | None:
    """The first of NAME.jsonl.gz, NAME.jsonl, NAME.json.gz and NAME.json in a folder, for the names in their order."""
    paths = (data / f"{name}{ending}" for name in names for ending in _ENDINGS) if data is not None else iter(())
    return next((path for path in paths if path.is_file()), None)


def read_rows(path: Path, fields: Iterable[str] = ()) -> Rows:
    """All rows of a file: JSON lines, one JSON list, or one JSON object as the only row.

    Args:
        path: .jsonl or .json, .gz or not.
        fields: that each row must have.

    Raises:
        ValueError: naming the file and the row, for what is not JSON, not an object, or lacks a field.
    """
    if ".json" in path.suffixes:
        rows = _json(read_text(path), str(path))
    else:
        rows = [_json(line, f"{path} line {n}") for n, line in read_lines(path)]
    rows = [rows] if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path} holds no rows; give JSON lines, or a JSON list of objects")
    check_rows(rows, fields, str(path))
    return Rows(rows, path.name)


def check_rows(rows: Sequence[Any], fields: Iterable[str], where: str) -> None:
    """Every row is an object with these fields.

    Raises:
        ValueError: naming the row and the field.
    """
    wanted = list(fields)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{where} row {number} is no JSON object; give rows of fields{': ' * bool(wanted)}{', '.join(wanted)}")
        missing = [name for name in wanted if name not in row]
        if missing:
            raise ValueError(f"{where} row {number} has no field {', '.join(missing)}; it needs {', '.join(wanted)}")


def hub_rows(
    name: str, config: str | None, split: str, *, fields: Iterable[str], remedy: str, offline: bool, limit: int | None = None
) -> Rows:
    """Rows of a set on the hub, its first `limit`; of its cache on this machine where the hub is not to be asked or not there.

    Args:
        name, config, split: of the set.
        fields: that each row must have.
        remedy: how to give the same data by hand, for the message.
        offline: the user wants no hub.

    Raises:
        MissingData: when neither has such rows.
    """
    source = f"{name} ({config})" if config else name
    try:
        require_hub(source, remedy, offline=offline)
    except MissingData:
        rows = _cached(name, config, split, limit)
        if rows is None:
            raise
    else:
        rows = _streamed(name, config, split, limit, remedy)
    check_rows(rows, fields, name)
    return Rows(rows, f"hub {source}")


def _streamed(name: str, config: str | None, split: str, limit: int | None, remedy: str) -> list[dict[str, Any]]:
    import datasets

    try:
        stream: Any = datasets.load_dataset(name, config, split=split, streaming=True)
        return [dict(row) for row in (stream if limit is None else stream.take(limit))]
    except Exception as error:  # many kinds: network, no such set, no access, no such split
        raise MissingData(f"the hub gave no {name}, split {split} ({type(error).__name__}: {error}). {remedy}") from error


def _cached(name: str, config: str | None, split: str, limit: int | None) -> list[dict[str, Any]] | None:
    """Rows that an earlier `datasets.load_dataset` left on this machine; None where there are none. No network is used."""
    import datasets

    try:
        with without_hub():
            loaded: Any = datasets.load_dataset(name, config, split=split)
        return [dict(loaded[i]) for i in range(min(len(loaded), limit or len(loaded)))]
    except Exception:  # many kinds, all of which mean that it is not there
        return None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
