"""Documents with something to complete: the `based` sets of the hub, or local files in their layout and a few others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proteus_lm.evals.long_context import Rows, find_file, hub_rows, read_rows


@dataclass(frozen=True)
class Item:
    """Args:
    document: its name; items of one document do not fill each other's prompts.
    text: the document.
    stem: what stands behind it, to be completed; its white space in front belongs to it.
    answers: any of them in the continuation is right; at least one stands in the text.
    """

    document: str
    text: str
    stem: str
    answers: tuple[str, ...]

    @property
    def answer_at(self) -> tuple[int, int]:
        """Characters of the first answer that stands in the text, whatever its case."""
        text = self.text.lower()
        found = [(text.find(answer.lower()), len(answer)) for answer in self.answers]
        start, size = min((place, size) for place, size in found if place >= 0)
        return start, start + size


@dataclass(frozen=True)
class Items:
    """Items of a set, where they came from, and how many rows were left out, their answer not standing in their text."""

    items: tuple[Item, ...]
    source: str
    left_out: int

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of all items."""
        content = [[item.document, item.text, item.stem, item.answers] for item in self.items]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True)
class Set:
    """One set of Figure 2.

    Args:
        name: as lm-evaluation-harness calls it.
        hub: its name on the hub; split `validation`, config `default`, fields text, key or question, value.
        files: local files, the first one found counts.
        around: whether other documents may stand on both sides of the right one. They may where the question names what it is
            about; a stem such as "Applicant:" is about the document before it, so others stand in front.
    """

    name: str
    hub: str
    files: tuple[str, ...]
    around: bool = False


SETS: dict[str, Set] = {
    one.name: one
    for one in (
        Set("swde", "hazyresearch/based-swde-v2", ("swde", "based_swde", "based-swde-v2")),
        Set(
            "squad_completion",
            "hazyresearch/based-squad",
            ("squad_completion", "based_squad", "based-squad", "squad_v1_validation", "squad_v1_validation_1000"),
            around=True,
        ),
        Set("fda", "hazyresearch/based-fda", ("fda", "based_fda", "based-fda", "fda_like_510k_long", "fda_like_510k")),
    )
}
"""In the order of the figure."""


def load_items(name: str, data: Path | None, *, offline: bool = False) -> Items:
    """The items of a set: from a local file, else from the hub.

    Raises:
        MissingData: when there is neither.
        ValueError: for a file that lacks what it needs.
    """
    one = SETS[name]
    file = find_file(data, *one.files)
    if file is not None:
        rows = read_rows(file, ())
    else:
        remedy = (
            f"Give --data DIR with DIR/{one.files[0]}.jsonl: rows with text (a document, then what is to be completed), "
            "key (the words at its end), value (the answer)"
        )
        rows = hub_rows(one.hub, "default", "validation", fields=("text", "value"), remedy=remedy, offline=offline)
    items = list(_items(rows))
    whole = [item for item in items if any(a and a.lower() in item.text.lower() for a in item.answers)]
    if not whole:
        raise ValueError(f"{rows.source}: no row's answer stands in its text; rows need text, key and value")
    return Items(tuple(whole), rows.source, len(items) - len(whole))


def _items(rows: Rows) -> Iterable[Item]:
    for number, row in enumerate(rows.rows):
        where = f"{rows.source} row {number}"
        if "pairs" in row:
            yield from (_local(row, pair["key"], pair["value"], where) for pair in row["pairs"])
        elif "value" not in row:
            yield _question(row, where)
        elif rows.source.startswith("hub ") or "key" not in row or _key_place(row) >= 0:
            yield _based(row, where)
        else:
            yield _local(row, str(row["key"]), str(row["value"]), where)


def _local(row: dict[str, Any], key: str, value: str, where: str) -> Item:
    """A document and a key apart: the key is asked for as the `based` sets ask."""
    _check(row, ("text",), where)
    text = str(row["text"]).strip()
    return Item(str(row.get("doc_id", where)), text, f"\n\n{key[:1].upper()}{key[1:]}:", (str(value).strip(),))


def _question(row: dict[str, Any], where: str) -> Item:
    """SQuAD's own layout: the question is put as a question."""
    _check(row, ("context", "question", "answers"), where)
    answers = row["answers"]["text"] if isinstance(row["answers"], dict) else row["answers"]
    answers = tuple(dict.fromkeys(str(answer).strip() for answer in answers))
    return Item(str(row["context"])[:200], str(row["context"]).strip(), f"\nQuestion: {row['question'].strip()}\nAnswer:", answers)


def _based(row: dict[str, Any], where: str) -> Item:
    """The hub's layout: the text ends with the words to complete. Document and stem together are the text, to the letter."""
    _check(row, ("text", "value"), where)
    text = str(row["text"]).strip()
    place = _key_place(row)
    if place < 0:
        place = text.rfind("\n") + 1
    document = text[:place].rstrip()
    if not document:
        raise ValueError(f"{where}: its text is one line; the words to complete must stand on a line of their own, or in key")
    return Item(str(row.get("doc_id", document[:200])), document, text[len(document) :], (str(row["value"]).strip(),))


def _key_place(row: dict[str, Any]) -> int:
    """Where the key (or question) stands at the end of a text; -1 where it does not."""
    text = str(row.get("text", "")).strip()
    key = str(row.get("key") or row.get("question") or "").strip().rstrip(":")
    place = text.lower().rfind(key.lower()) if key else -1
    return place if place >= 0 and text[place + len(key) :].strip() in ("", ":") else -1


def _check(row: dict[str, Any], fields: tuple[str, ...], where: str) -> None:
    missing = [name for name in fields if name not in row]
    if missing:
        raise ValueError(f"{where} has no field {', '.join(missing)}")
