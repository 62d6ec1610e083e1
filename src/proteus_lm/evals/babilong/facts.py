"""bAbI's stories: facts in order, one question, its answer and the facts that tell it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from proteus_lm.evals.long_context import Rows, find_file, read_rows
from proteus_lm.evals.suite import MissingData

TASKS = tuple(f"qa{i}" for i in range(1, 11))
_REMEDY = (
    "Give --data DIR with DIR/babi_qa1_10_test.jsonl.gz (rows: task, facts, question, answer, supporting), "
    "or with bAbI's own files DIR/babi/qa1_*_test.txt ... (tasks_1-20_v1-2/en of the bAbI download)"
)


@dataclass(frozen=True)
class Story:
    """Args:
    facts: sentences, in order.
    question, answer: of bAbI.
    supporting: 0-based places of the facts that the answer needs.
    """

    facts: tuple[str, ...]
    question: str
    answer: str
    supporting: tuple[int, ...]


@dataclass(frozen=True)
class Stories:
    """All stories of a task, and where they came from."""

    stories: tuple[Story, ...]
    source: str


def load_stories(task: str, data: Path | None) -> Stories:
    """The stories of a task, from the user's folder.

    Raises:
        MissingData: when the folder is not given or holds none of this task.
        ValueError: for a file that is not as bAbI's.
    """
    file = find_file(data, "babi_qa1_10_test", "babi")
    if file is not None:
        rows = _rows(file, file.stat().st_mtime_ns)
        stories = [_story(row) for row in rows.rows if row["task"] == task]
        if stories:
            return Stories(tuple(stories), rows.source)
    for path in sorted((data / "babi").glob(f"{task}_*_test.txt")) if data is not None else ():
        return Stories(tuple(_parse(path)), path.name)
    raise MissingData(f"bAbI's stories of {task} are not here{'' if data is None else f' (looked in {data})'}. {_REMEDY}")


@lru_cache(maxsize=1)
def _rows(file: Path, changed: int) -> Rows:
    """All rows of a file, read once for the ten tasks as long as it was not `changed` since (a time)."""
    return read_rows(file, ("task", "facts", "question", "answer", "supporting"))


def _story(row: dict[str, Any]) -> Story:
    return Story(tuple(row["facts"]), str(row["question"]).strip(), str(row["answer"]), tuple(row["supporting"]))


def _parse(path: Path) -> Iterator[Story]:
    """Stories of bAbI's own format: numbered lines; a question's line has its answer and the facts' numbers behind tabs.

    A question's story is all facts before it since number 1, without the questions between.
    """
    facts: dict[int, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        first, _, rest = line.strip().partition(" ")
        if not first.isdigit():
            raise ValueError(f"{path} line {number} does not begin with a number, as bAbI's do: {line[:40]!r}")
        if first == "1":
            facts = {}
        question, *answer = rest.split("\t")
        if not answer:
            facts[int(first)] = rest.strip()
            continue
        order = {fact: place for place, fact in enumerate(facts)}
        needed = [int(n) for n in (answer[1].split() if len(answer) > 1 else ())]
        if any(n not in order for n in needed):
            raise ValueError(f"{path} line {number} names a fact that does not stand before it: {answer[1]!r}")
        yield Story(tuple(facts.values()), question.strip(), answer[0].strip(), tuple(order[n] for n in needed))
