"""Recall tasks as prepared data that `proteus train` reads: rows of numbers as text, a tokenizer of numbers, and task.json."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from proteus_lm.data.files import write_json, write_text
from proteus_lm.data.prepare import prepare
from proteus_lm.data.shards import Manifest
from proteus_lm.data.synthetic import Task, key_value_stream, mqar_text
from proteus_lm.data.tokenizer import END

TASK_FILE = "task.json"
_ROWS = 256  # made at once


@dataclass(frozen=True)
class TaskSpec:
    """A recall task, whole: equal specifications give equal data.

    Args:
        task: "mqar" (`mqar_text`) or "stream" (`key_value_stream`).
        length: tokens of a row.
        pairs: pairs, or different keys of a stream.
        vocab: tokens of the task; the end token of a row has the id `vocab`.
        rows: documents.
        seed: of the first rows; later ones follow.
        episodes: rows of the task in a document, one after the other: where rows are short, an end token behind each of them was
            seen to keep small models from learning the task.

    Raises:
        ValueError: for a task nobody knows, or sizes it cannot have.
    """

    task: str
    length: int
    pairs: int
    vocab: int
    rows: int
    seed: int = 0
    episodes: int = 1

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task {self.task!r} is not known; use one of {', '.join(TASKS)}")
        if self.rows < 2:
            raise ValueError(f"rows is {self.rows}; it must be at least 2, one of them to validate")
        if self.episodes < 1:
            raise ValueError(f"episodes is {self.episodes}; it must be at least 1")
        self.make(1, self.seed)  # raises where the sizes do not go together

    def make(self, batch: int, seed: int) -> Task:
        """Rows of the task; a seed is a batch."""
        return TASKS[self.task](batch, self.length, self.pairs, self.vocab, seed)

    @property
    def context(self) -> int:
        """Tokens of a document with its end token: the `data.context` to train with."""
        return self.length * self.episodes + 1

    @property
    def names(self) -> tuple[range, range]:
        """Ids of keys and of values."""
        return range(1, self.vocab // 2), range(self.vocab // 2, self.vocab)

    def fresh(self, batch: int) -> Task:
        """Rows that are not among the data (a seed that none of them has)."""
        return self.make(batch, -1 - self.seed)


TASKS: dict[str, Callable[[int, int, int, int, int], Task]] = {"mqar": mqar_text, "stream": key_value_stream}


def number_tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer whose tokens are the numbers 0 .. vocab - 1, written with spaces between; the id of a number is itself."""
    vocabulary = {str(i): i for i in range(vocab)}
    built = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="0"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return built


def synthesize(spec: TaskSpec, out: str | Path, *, overwrite: bool = False, progress: bool = True) -> Manifest:
    """Make the rows of a task and prepare them: OUT as `proteus prepare` writes it, and OUT/task.json.

    A document with its end token is a window of `data.context` = `TaskSpec.context` tokens, so that no window holds parts of
    two (`data.allow_short_documents` says that this is meant: a longer document would hold the window's last target too).

    Raises:
        FileExistsError: where OUT holds something else and is not to be overwritten.
    """
    out = Path(out)
    with tempfile.TemporaryDirectory() as folder:
        source, tokenizer = Path(folder) / f"{spec.task}.jsonl", Path(folder) / "tokenizer.json"
        write_text(tokenizer, number_tokenizer(spec.vocab).to_str())
        with source.open("w", encoding="utf-8") as file:
            for first in range(0, spec.rows, _ROWS):
                count = min(_ROWS, spec.rows - first)
                made = spec.make(count * spec.episodes, spec.seed + first).tokens.view(count, -1)
                file.writelines(json.dumps({"text": " ".join(map(str, row))}) + "\n" for row in made.tolist())
        share = max(0.05, 2 / spec.rows)
        manifest = prepare(source, tokenizer, out, validation_fraction=share, overwrite=overwrite, workers=0, progress=progress)
    write_json(out / TASK_FILE, asdict(spec))
    return manifest


def task_of(data: str | Path) -> TaskSpec | None:
    """The task that prepared data were made of; None for data of another origin.

    Raises:
        ValueError: for a task.json that cannot be read.
    """
    file = Path(data) / TASK_FILE
    if not file.is_file():
        return None
    try:
        return TaskSpec(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); make the data again with proteus synthesize") from error
