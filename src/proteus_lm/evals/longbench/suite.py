"""Table 3: LongBench over the hub's rows or local files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from proteus_lm.evals.long_context import Answered, Question, Rows, ask, count_tokens, find_file, hub_rows, read_rows, score_of
from proteus_lm.evals.longbench import metrics
from proteus_lm.evals.longbench.sets import PAPER, SETS, LongBenchSet
from proteus_lm.evals.suite import MissingData, Score, SuiteOptions, SuiteResult

if TYPE_CHECKING:
    from proteus_lm.evals.language_model import LanguageModel

VERSION = "1"
_HUB = "Xnhyacinth/LongBench"  # LongBench's prompts as Parquet; its own hub set is a script, which `datasets` 4 does not run
_FIELDS = ("context", "answers")


def table3(model: LanguageModel, options: SuiteOptions) -> SuiteResult:
    """LongBench's scores in percent: the best over a row's references, the mean over rows.

    The six sets of the paper run by default, and beside them each further set whose local file is given. A prompt that is too long
    is cut in its middle, as LongBench's authors cut, and counted; but only where that was allowed, or `lengths` names one length
    (of prompt and answer together): else the set is not run and says how many prompts are too long. A model without a limit reads
    all.

    Args:
        model: prompts are read in chunks through its cache.
        options: data (folder with longbench_NAME.jsonl, longbench/NAME.jsonl or NAME.jsonl), lengths (one; several are for other
            suites), limit (first rows), allow_truncation, tasks, offline.

    A length without room for a prompt beside the answer is not run and says so.

    Raises:
        ValueError: for a local file that is not what it should be.
    """
    limits = [limit for limit in (model.max_length, _wished(options)) if limit is not None]
    limit = min(limits, default=None)
    scores, records = list[Score](), list[dict[str, Any]]()
    given = [(SETS[name], _rows(SETS[name], options)) for name in _chosen(options)]  # first: a damaged file would lose all others
    for one, rows in given:
        if isinstance(rows, MissingData):
            score, answers = Score.not_run(one.name, one.metric, str(rows), version=VERSION), []
        else:
            score, answers = _run(model, one, rows, options, limit)
        scores.append(score)
        records += [answer.to_dict() for answer in answers]
    settings = {"limit": options.limit, "max_length": limit}
    return SuiteResult("table3", model.name, options.command, tuple(scores), {"settings": settings, "samples": records})


def middle_cut(ids: list[int], room: int) -> list[int]:
    """The first and the last half of `room` tokens of what is longer (LongBench/pred.py, here on the ids themselves).

    Raises:
        ValueError: for a room below 2.
    """
    if room < 2:
        raise ValueError(f"there is room for {room} tokens of a prompt; at least 2 are needed for its two halves")
    return ids if len(ids) <= room else [*ids[: room // 2], *ids[-(room // 2) :]]


def _wished(options: SuiteOptions) -> int | None:
    """The length that the user wants prompts cut to."""
    return options.lengths[0] if options.lengths is not None and len(options.lengths) == 1 else None


def _chosen(options: SuiteOptions) -> tuple[str, ...]:
    if options.tasks is not None:
        return options.chosen(tuple(SETS))
    return (*PAPER, *(name for name in SETS if name not in PAPER and _file(name, options) is not None))


def _file(name: str, options: SuiteOptions) -> Any:
    return find_file(options.data, f"longbench_{name}", f"longbench/{name}", name)


def _rows(one: LongBenchSet, options: SuiteOptions) -> Rows | MissingData:
    """The rows of a set, or what is missing. Raises ValueError for rows without answers, or without classes to be scored with."""
    file = _file(one.name, options)
    if file is not None:
        rows = read_rows(file, _FIELDS)
    else:
        remedy = (
            f"Give --data DIR with DIR/longbench_{one.name}.jsonl (LongBench's data.zip holds {one.name}.jsonl): "
            "rows with context, input, answers"
        )
        try:
            rows = hub_rows(_HUB, one.name, "test", fields=_FIELDS, remedy=remedy, offline=options.offline, limit=options.limit)
        except MissingData as error:
            return error
    for index, row in enumerate(rows.rows):
        if not isinstance(row["answers"], list) or not row["answers"]:
            raise ValueError(f"{rows.source} row {index} has the answers {row['answers']!r}; it needs a list of at least one")
        if one.metric == "classification_score" and not isinstance(row.get("all_classes"), list):
            raise ValueError(f"{rows.source} row {index} has no list all_classes, which {one.name} is scored with")
    return Rows(rows.rows[: options.limit], rows.source)


def _run(
    model: LanguageModel, one: LongBenchSet, rows: Rows, options: SuiteOptions, limit: int | None
) -> tuple[Score, list[Answered]]:
    """One set: its score, and a record a row."""
    room = None if limit is None else limit - one.max_new_tokens
    if room is not None and room < 2:
        reason = f"{limit} tokens hold no prompt beside an answer of {one.max_new_tokens}; ask for {one.max_new_tokens + 2}"
        return Score.not_run(one.name, one.metric, reason, version=VERSION, data=rows.source), []
    questions = list(_questions(one, rows))
    if room is not None and not (options.allow_truncation or _wished(options)):
        long = sum(count > room for count in count_tokens(model.tokenizer, [q.prompt for q in questions]))
        if long:
            reason = (
                f"{long} of {len(questions)} prompts are longer than the {room} tokens that {model.name} can read before "
                f"{one.max_new_tokens} new ones; allow truncation to cut them in the middle, as LongBench does: it is then counted"
            )
            return Score.not_run(one.name, one.metric, reason, version=VERSION, data=rows.source), []

    def score(text: str, question: Question) -> float:
        return _score(one, text, question.expected, rows.rows[question.about["index"]])

    answers, truncated = ask(
        model,
        questions,
        score,
        allow_truncation=False,
        max_new_tokens=one.max_new_tokens,
        fitted=None if room is None else lambda ids: middle_cut(ids, room),
    )
    beside = "" if one.name in PAPER else "not one of the paper's six"
    return score_of(one.name, one.metric, answers, truncated, version=VERSION, data=rows.source, note=beside), answers


def _questions(one: LongBenchSet, rows: Rows) -> Iterator[Question]:
    for index, row in enumerate(rows.rows):
        about = {"task": one.name, "index": index, "id": row.get("_id")}
        yield Question(_prompt(one, row), tuple(row["answers"]), about)


def _prompt(one: LongBenchSet, row: dict[str, Any]) -> str:
    """LongBench's prompt of a row; the hub's rows carry it already, cut in three (context, question, answer_prefix)."""
    asked = row.get("input", row.get("question")) or ""
    if "answer_prefix" in row and row["context"].startswith(one.prompt.partition("{context}")[0]):
        return f"{row['context']}{asked}{row['answer_prefix']}"
    return one.prompt.format(context=row["context"], input=asked)


def _score(one: LongBenchSet, text: str, answers: tuple[str, ...], row: dict[str, Any]) -> float:
    """The best score over the references."""
    text = text.lstrip("\n").split("\n")[0] if one.first_line else text
    if one.metric == "classification_score":
        return max(metrics.classification_score(text, answer, row["all_classes"]) for answer in answers)
    return max(getattr(metrics, one.metric)(text, answer) for answer in answers)
