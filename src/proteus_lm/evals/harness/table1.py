"""Table 1: language modelling and common-sense reasoning, by lm-evaluation-harness's own tasks over local files or the hub's."""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from proteus_lm.evals.harness.tasks import NAMES, TASKS, HarnessTask
from proteus_lm.evals.hub import MissingData, require_hub, without_hub
from proteus_lm.evals.language_model import TooLong
from proteus_lm.evals.statistics import ratio_estimate
from proteus_lm.evals.suite import Score, SuiteOptions, SuiteResult

if TYPE_CHECKING:
    from proteus_lm.evals.language_model import LanguageModel

Given = tuple[Path, list[dict[str, Any]]]
_LIBRARIES = ("lm_eval", "datasets", "transformers", "torch")


def table1(model: LanguageModel, options: SuiteOptions) -> SuiteResult:
    """Scores of the nine tasks, zero-shot. A task without data, or too long for the model, has no value and says why.

    Accuracies are in percent, perplexities are exp of nats a word, a byte, or (LAMBADA) a last word. Standard errors: of the mean
    over samples for accuracies, as the harness; for perplexities that of the mean in nats (over documents for Wikitext) times the
    derivative of exp, where the harness draws bootstrap samples or gives none.

    Raises:
        ImportError: without lm-eval.
        ValueError: for a task that is not of this suite, or a local file that is not what it should be.
    """
    chosen = options.chosen(NAMES)
    tasks = [task for task in TASKS if task.name in chosen]
    given = {task.name: _given(task, options) for task in tasks}  # first: a damaged file of the last task would lose all others
    manager = _manager()
    lm = _harness_model(model)
    before, model.allow_truncation = model.allow_truncation, options.allow_truncation
    scores: list[Score] = []
    samples: dict[str, Any] = {}
    try:
        for task in tasks:
            found, rows = _run(task, lm, manager, options, given[task.name])
            scores += found
            samples[task.name] = rows
    finally:
        model.allow_truncation = before
    extra = {
        "versions": {name: metadata.version(name) for name in _LIBRARIES},
        "limit": options.limit,
        "seed": options.seed,
        "num_fewshot": 0,
        "max_length": model.max_length,
        "samples": samples,
    }
    return SuiteResult("table1", model.name, options.command, tuple(scores), extra)


def _harness(module: str) -> Any:
    """A module of lm-evaluation-harness.

    Raises:
        ImportError: where it is not installed, saying how to.
    """
    try:
        return import_module(f"lm_eval.{module}")
    except ImportError as error:
        raise ImportError(
            f"Table 1 needs lm-evaluation-harness, which cannot be imported ({error}); pip install proteus-lm[eval]"
        ) from error


def _manager() -> Any:
    """The harness's index of these tasks: of their folders alone, as reading all 14,000 definitions takes seconds."""
    tasks = _harness("tasks")
    folders = sorted({str(Path(tasks.__file__).parent / task.folder) for task in TASKS})
    manager = tasks.TaskManager(include_path=folders, include_defaults=False)
    return manager if set(NAMES) <= set(manager.all_tasks) else tasks.TaskManager()


def _harness_model(model: LanguageModel) -> Any:
    from proteus_lm.evals.harness.adapter import HarnessModel

    return HarnessModel(model)


def _run(
    task: HarnessTask, lm: Any, manager: Any, options: SuiteOptions, given: Given | None
) -> tuple[list[Score], dict[str, list[float]]]:
    """The scores of one task and, by metric, what they are the mean of (for a perplexity: nats of each document)."""
    data, version = "", ""
    try:
        loaded, data = _load(task, manager, options, given)
        (definition,) = loaded["tasks"].values()
        version = str(definition.VERSION)
        lm.cut.clear()
        windowed = lm.model.windowed
        with _quiet(), _each_thing_once(definition, task.split):
            results = _harness("evaluator").evaluate(lm, task_dict=loaded, limit=options.limit, bootstrap_iters=0, log_samples=True)
    except (LookupError, ZeroDivisionError) as error:
        raise _unfit(data, task, error) from error
    except (MissingData, TooLong) as error:
        return [Score.not_run(task.name, metric, str(error), version=version, data=data) for metric in task.metrics], {}
    windowed = lm.model.windowed - windowed
    note = "" if not windowed else f"{windowed} documents are longer than the model's {lm.model.max_length} tokens: read in windows"
    samples = results["samples"][task.name]
    scores, rows = [], {}
    for metric in task.metrics:
        value = float(results["results"][task.name][f"{metric},none"])
        rows[metric] = [sample[metric] for sample in samples]
        percent = 100 if metric.startswith("acc") else 1
        error = _error(metric, value, rows[metric])
        scores.append(
            Score(
                task=task.name,
                metric=metric,
                value=percent * value,
                stderr=None if error is None else percent * error,
                count=len(samples),
                truncated=len(lm.cut),
                version=version,
                data=data,
                note=note,
            )
        )
    return scores, rows


def _error(metric: str, value: float, rows: Sequence[Any]) -> float | None:
    """Standard error of a metric, in its unit; None where there are fewer than two samples."""
    if len(rows) < 2:
        return None
    if metric.startswith("acc"):
        return float(np.std(rows, ddof=1)) / math.sqrt(len(rows))
    if metric == "perplexity":  # exp of minus the mean
        return value * float(np.std(rows, ddof=1)) / math.sqrt(len(rows))
    sums, counts = (np.array(column, np.float64) for column in zip(*rows))  # nats and words or bytes of each document
    error = ratio_estimate(-sums, counts, range(len(rows))).error
    return None if error is None else error / math.log(2) if metric == "bits_per_byte" else value * error


# Data.


def _given(task: HarnessTask, options: SuiteOptions) -> Given | None:
    """The user's own samples of a task and their file; None where there are none."""
    path = None if options.data is None else task.find(options.data)
    return None if path is None else (path, task.rows(path))


def _load(task: HarnessTask, manager: Any, options: SuiteOptions, given: Given | None) -> tuple[Any, str]:
    """The harness's task over a local file or the hub's data, and where the data came from.

    Raises:
        MissingData: when there is neither.
    """
    if given is not None:
        path, rows = given
        try:
            with _quiet():
                return _task_dict(manager, _local(task, rows)), str(path)
        except (LookupError, TypeError, ValueError) as error:  # the harness makes the first sample to see that it can
            raise _unfit(path, task, error) from error
    what, remedy = f"the data of {task.name}", task.missing(options.data)
    try:
        require_hub(what, remedy, offline=options.offline)
    except MissingData:
        with without_hub(), _quiet(), contextlib.suppress(Exception):  # it may lie in the hub's cache
            loaded = _task_dict(manager, {"task": task.name})
            return loaded, f"{_hub_name(loaded)} (cached)"
        raise
    try:
        with _quiet():
            loaded = _task_dict(manager, {"task": task.name})
    except Exception as error:  # many kinds: no such data set, no access, a broken connection
        raise MissingData(f"{what} did not come from the hub ({type(error).__name__}: {error}). {remedy}") from error
    return loaded, _hub_name(loaded)


def _unfit(data: str | Path, task: HarnessTask, error: Exception) -> ValueError:
    """For samples whose fields are there, but not what the harness's task makes of them (an answer that is none of the choices)."""
    return ValueError(
        f"lm-evaluation-harness cannot use the samples of {data} for {task.name} ({type(error).__name__}: {error}); look at "
        f"{', '.join(task.fields)} of its rows for empty texts, or an answer that is none of the choices"
    )


def _task_dict(manager: Any, changes: dict[str, Any]) -> Any:
    """The harness's definition of a task with some fields changed, zero-shot. Only a member of a group can be changed so."""
    group = {"group": "proteus_table1", "task": [{"num_fewshot": 0, **changes}]}
    return {"tasks": manager.load([group])["tasks"], "groups": {}, "group_map": {}}


def _local(task: HarnessTask, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What changes in the harness's definition of a task to read these rows in place of the hub's."""

    def dataset(**_: Any) -> Any:
        from datasets import Dataset, DatasetDict

        return DatasetDict({task.split: Dataset.from_list(rows)})

    splits = {f"{name}_split": task.split if name == task.split else None for name in ("training", "validation", "test")}
    return {"task": task.name, "custom_dataset": dataset, **splits}


def _hub_name(loaded: Any) -> str:
    (definition,) = loaded["tasks"].values()
    names = (definition.config.dataset_path, definition.config.dataset_name)
    return " ".join(name for name in names if name)


@contextlib.contextmanager
def _each_thing_once(definition: Any, split: str) -> Iterator[None]:
    """The harness compiles a template for every sample and choice, and rewrites all samples at every look: half of its time."""
    name, templates = f"{split}_docs", getattr(_harness("utils"), "env", None)
    documents = getattr(definition, name)()
    setattr(definition, name, lambda: documents)
    if templates is None:
        yield
        return
    templates.from_string = cache(templates.from_string)
    try:
        yield
    finally:
        del templates.from_string  # the class's own again


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's log and the bars of its libraries, some of which know no switch but the stream they write to."""
    import datasets

    logger, bars = logging.getLogger("lm_eval"), datasets.is_progress_bar_enabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
