"""The tasks of the paper's Table 1, as lm-evaluation-harness names them, and the local files that can stand in for the hub's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proteus_lm.evals.files import read_lines

Row = dict[str, Any]


@dataclass(frozen=True)
class HarnessTask:
    """One task.

    Args:
        name: the harness's name; its definition (prompt, choices, metrics, version) is used as it is.
        metrics: the paper's, then others worth a column, by the harness's names.
        file: stem of the local file, NAME.jsonl.gz or NAME.jsonl; one named after the task is taken too.
        folder: of its definition among the harness's tasks.
        split: that the harness scores.
        fields: that a row must have.
        adapt: of other layouts of the same data to the hub's.
    """

    name: str
    metrics: tuple[str, ...]
    file: str
    folder: str
    split: str
    fields: tuple[str, ...]
    adapt: Callable[[Row], Row] = dict

    def find(self, folder: Path) -> Path | None:
        """Its local file, if the folder holds one."""
        names = (f"{stem}{suffix}" for stem in (self.file, self.name) for suffix in (".jsonl.gz", ".jsonl"))
        return next((folder / name for name in names if (folder / name).is_file()), None)

    def rows(self, path: Path) -> list[Row]:
        """The samples of a local file, in the hub's layout.

        Raises:
            ValueError: for a file that is empty, damaged, no JSON lines, or without a field the task needs.
        """
        rows = []
        for number, line in read_lines(path):
            try:
                row = self.adapt(json.loads(line))
                rows.append({name: row[name] for name in self.fields})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"line {number} of {path} is no sample of {self.name} ({type(error).__name__}: {error}); "
                    f"each line must be a JSON object with {', '.join(self.fields)}"
                ) from error
        if not rows:
            raise ValueError(f"{path} holds no sample of {self.name}; give a file with at least one line")
        return rows

    def missing(self, folder: Path | None) -> str:
        """How to give its data."""
        where = (
            f"{folder} holds neither {self.file}.jsonl.gz nor {self.name}.jsonl; put one there"
            if folder
            else (f"Give a folder that holds {self.file}.jsonl.gz with --data DIR")
        )
        return f"{where} (a JSON object a line, with {', '.join(self.fields)})"


def _arc(row: Row) -> Row:
    """The authors' own files keep stem and choices together in `question`."""
    if not isinstance(row["question"], dict):
        return row
    choices = row["question"]["choices"]
    return {
        "id": row["id"],
        "question": row["question"]["stem"],
        "choices": {"text": [c["text"] for c in choices], "label": [c["label"] for c in choices]},
        "answerKey": row["answerKey"],
    }


def _boolq(row: Row) -> Row:
    """The authors' own files have the answer as true or false."""
    return row if "label" in row else row | {"label": int(row["answer"])}


def _siqa(row: Row) -> Row:
    """The authors' own files have the answer as a letter."""
    return row if "label" in row else row | {"label": str(" ABC".index(row["correct"]))}


def _piqa(row: Row) -> Row:
    return row | {"label": int(row["label"])}


def _text(row: Row) -> Row:
    return row | {"label": str(row["label"])}


_PERPLEXITIES = ("word_perplexity", "byte_perplexity", "bits_per_byte")
_ARC = ("id", "question", "choices", "answerKey")
_HELLASWAG = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
_SIQA = ("context", "question", "answerA", "answerB", "answerC", "label")
_WINOGRANDE = ("sentence", "option1", "option2", "answer")
TASKS = (
    HarnessTask("wikitext", _PERPLEXITIES, "wikitext2_raw_test", "wikitext", "test", ("page",)),
    HarnessTask("lambada_openai", ("perplexity", "acc"), "lambada_openai_test", "lambada", "test", ("text",)),
    HarnessTask("piqa", ("acc",), "piqa_validation", "piqa", "validation", ("goal", "sol1", "sol2", "label"), _piqa),
    HarnessTask("hellaswag", ("acc_norm",), "hellaswag_validation", "hellaswag", "validation", _HELLASWAG, _text),
    HarnessTask("winogrande", ("acc",), "winogrande_xl_validation", "winogrande", "validation", _WINOGRANDE),
    HarnessTask("arc_easy", ("acc",), "arc_easy_test", "arc", "test", _ARC, _arc),
    HarnessTask("arc_challenge", ("acc_norm",), "arc_challenge_test", "arc", "test", _ARC, _arc),
    HarnessTask("social_iqa", ("acc",), "social_iqa_validation", "siqa", "validation", _SIQA, _siqa),
    HarnessTask("boolq", ("acc",), "boolq_validation", "super_glue", "validation", ("passage", "question", "label"), _boolq),
)
"""In the order of the paper's Table 1."""
NAMES = tuple(task.name for task in TASKS)
