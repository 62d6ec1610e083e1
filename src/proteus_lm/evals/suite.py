"""What every suite of evaluations gives back: scores with counts, errors, versions and truncations; and where each suite lives.

A score that could not be had for want of data has the value None and says in its note what is missing and how to give it.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proteus_lm.data.files import make_folder, write_json
from proteus_lm.evals.hub import MissingData, require_hub

if TYPE_CHECKING:
    from proteus_lm.evals.language_model import LanguageModel

WHOLE = "all"
"""The task of a suite whose other tasks are parts of it."""

__all__ = ["SUITES", "WHOLE", "MissingData", "Score", "SuiteOptions", "SuiteResult", "require_hub"]


@dataclass(frozen=True)
class Score:
    """One number of one task.

    Args:
        task: its name, as lm-evaluation-harness, RULER or LongBench call it.
        metric: what is measured; the unit goes with it: accuracies and matches in percent (0 to 100), perplexities as they are.
        value: the number; None where it was not run.
        stderr: its standard error in the same unit; None where there is none.
        count: samples behind it.
        truncated: samples that were cut to the model's length (0 unless truncation was allowed).
        version: of the task's definition.
        data: where the samples came from: a file or a name on the hub.
        note: why there is no value, or what a reader has to know about it.
    """

    task: str
    metric: str
    value: float | None
    stderr: float | None
    count: int
    truncated: int
    version: str
    data: str
    note: str = ""

    @classmethod
    def not_run(cls, task: str, metric: str, why: str, *, version: str = "", data: str = "") -> Score:
        """The score of a task that could not run, and why."""
        return cls(task, metric, None, None, 0, 0, version, data, why)


@dataclass(frozen=True)
class SuiteResult:
    """The scores of one model in one suite.

    Args:
        suite: its name in `SUITES`.
        model: `LanguageModel.name`.
        command: what made it.
        scores: in the order of the paper's table.
        extra: settings, versions of libraries, and raw rows, all ready for JSON.
    """

    suite: str
    model: str
    command: str
    scores: tuple[Score, ...]
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: a value that is not finite becomes its name ("inf", "-inf", "nan"), so that the file is strict JSON."""
        return _named(asdict(self) | {"scores": [asdict(score) for score in self.scores]})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SuiteResult:
        """The result that `to_dict` gave.

        Raises:
            ValueError: for a mapping without these fields.
        """
        try:
            scores = tuple(
                Score(**{**score, **{name: _number(score[name]) for name in ("value", "stderr")}}) for score in data["scores"]
            )
            extra = dict(data["extra"])
            extra.get("provenance", {}).keys()  # a mapping where it is there
            return cls(data["suite"], data["model"], data["command"], scores, extra)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"this is not the result of a suite ({type(error).__name__}: {error}); give one that was saved"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON, whole or not at all; the folder is made."""
        path = Path(path)
        make_folder(path.parent)
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> SuiteResult:
        """The result that `save` wrote.

        Raises:
            FileNotFoundError: where there is none.
            ValueError: for a file that is none.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}); give a file that a suite saved") from error
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def more_than(self, other: SuiteResult) -> tuple[str, ...]:
        """What this result has and `other` has not, or of fewer samples: "task metric: 100 samples, not 2" each.

        Of perplexity by position only the whole counts: its stretches follow the lengths that were asked for.
        """
        mine = [score for score in self.scores if score.value is not None]
        mine = [score for score in mine if score.task == WHOLE] or mine
        theirs = {(score.task, score.metric): score.count for score in other.scores if score.value is not None}
        found = [(score, theirs.get((score.task, score.metric), 0)) for score in mine]
        return tuple(f"{s.task} {s.metric}: {s.count:,} samples, not {count:,}" for s, count in found if count < s.count)

    def why_nothing_ran(self) -> str | None:
        """The reasons (the first three), where no score has a value; None where one has."""
        if any(score.value is not None for score in self.scores):
            return None
        notes = {score.note: [f"{s.task} {s.metric}" for s in self.scores if s.note == score.note] for score in self.scores}
        reasons = [f"{', '.join(names)}: {note}" for note, names in notes.items()]
        return "; ".join(reasons[:3] + ([f"and {len(reasons) - 3} more"] if len(reasons) > 3 else []))

    def score(self, task: str, metric: str) -> Score:
        """The score of a task and metric.

        Raises:
            KeyError: where there is none, naming those there are.
        """
        for score in self.scores:
            if (score.task, score.metric) == (task, metric):
                return score
        known = ", ".join(f"{score.task} {score.metric}" for score in self.scores)
        raise KeyError(f"no {metric} of {task} in {self.suite}; it has {known}")


@dataclass
class SuiteOptions:
    """What a user can choose about a suite.

    Args:
        data: folder with local files in the layout of `shared/data/eval` (NAME.jsonl.gz); None takes the hub's.
        limit: samples of each task, the first ones; None for all.
        lengths: context lengths in tokens, for suites that have them; None for the paper's.
        seed: of everything drawn.
        samples: generated samples a task and length, for suites that make their own; None for the suite's default.
        allow_truncation: cut what is too long for the model and count it, instead of an error.
        offline: never ask the hub; HF_HUB_OFFLINE=1 says the same.
        cache: folder for generated samples; None for none.
        tasks: only these; None for all of the suite.
        command: what the user typed, kept with the result.

    Raises:
        ValueError: for a limit, a length or a number of samples below 1, or a `data` that is no folder.
    """

    data: Path | None = None
    limit: int | None = None
    lengths: tuple[int, ...] | None = None
    seed: int = 0
    samples: int | None = None
    allow_truncation: bool = False
    offline: bool = False
    cache: Path | None = None
    tasks: tuple[str, ...] | None = None
    command: str = ""

    def __post_init__(self) -> None:
        counts = {"limit": self.limit, "samples": self.samples, **{f"length {n}": n for n in self.lengths or ()}}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, or left out")
        if self.data is not None:
            self.data = Path(self.data).expanduser()
            if not self.data.is_dir():
                raise ValueError(f"no folder {self.data}; give the folder that holds the evaluation files (NAME.jsonl.gz)")

    def count(self, default: int) -> int:
        """Samples of each task: `samples`, or `default`, and no more than `limit`."""
        wanted = self.samples or default
        return min(wanted, self.limit or wanted)

    def chosen(self, tasks: tuple[str, ...]) -> tuple[str, ...]:
        """Those of a suite's tasks that the user wants, in the suite's order.

        Raises:
            ValueError: for a task the suite does not have.
        """
        unknown = [name for name in self.tasks or () if name not in tasks]
        if unknown:
            raise ValueError(f"no task {', '.join(unknown)} in this suite; it has {', '.join(tasks)}")
        return tuple(name for name in tasks if self.tasks is None or name in self.tasks)


Suite = Callable[["LanguageModel", SuiteOptions], SuiteResult]


def _lazy(home: str, name: str) -> Suite:
    """The suite `name` of module `home`, imported when it runs: its libraries are needed only then."""

    def run(model: LanguageModel, options: SuiteOptions) -> SuiteResult:
        return getattr(importlib.import_module(f"proteus_lm.evals.{home}"), name)(model, options)

    run.__name__ = name
    return run


_HOMES = {
    "table1": "harness",
    "table2": "needle",
    "babilong": "babilong",
    "fig2": "completion",
    "table3": "longbench",
    "fig4": "perplexity",
}
SUITES: dict[str, Suite] = {name: _lazy(home, name) for name, home in _HOMES.items()}
"""Each suite by name: `proteus_lm.evals.HOME.NAME(model, options)`."""


def _named(value: Any) -> Any:
    """The same structure with floats that JSON does not have by name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    return [_named(item) for item in value] if isinstance(value, list | tuple) else value


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
