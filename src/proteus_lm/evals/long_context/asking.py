"""Questions put to a model and what it said: prompts made as they are needed, one record a sample, a score with its error."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proteus_lm.evals.long_context.tokens import encode_all
from proteus_lm.evals.suite import Score, SuiteOptions

if TYPE_CHECKING:
    from proteus_lm.evals.language_model import LanguageModel

_GROUP_CHARACTERS = 2**24  # of prompts held at once: the ids of a whole set of long ones would not fit in memory
_GROUP_PROMPTS = 256


@dataclass(frozen=True)
class Question:
    """A prompt, what should be in the answer, and what to remember about it.

    Args:
        prompt: text.
        expected: texts, whose meaning is the scorer's.
        about: kept in the record (depths, index, ...), as JSON values.
    """

    prompt: str
    expected: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answered:
    """One sample: tokens of its prompt, what was expected, what came, its score (0 to 1), and the question's `about`."""

    tokens: int
    expected: tuple[str, ...]
    got: str
    score: float
    about: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """A record for JSON, the score in percent."""
        return {
            **self.about,
            "tokens": self.tokens,
            "expected": list(self.expected),
            "got": self.got,
            "score": 100 * self.score,
        }


def ask(
    model: LanguageModel,
    questions: Iterable[Question],
    score: Callable[[str, Question], float],
    *,
    allow_truncation: bool,
    max_new_tokens: int,
    stop: tuple[str, ...] = (),
    fitted: Callable[[list[int]], list[int]] | None = None,
) -> tuple[list[Answered], int]:
    """Ask each question once, greedily.

    Args:
        model: prompts are read by its `generate`, in chunks.
        questions: made one after the other; only a group of them is held at once.
        score: (text that came, question) -> 0 to 1.
        allow_truncation: whether `generate` may cut prompts; those it cuts count as truncated.
        max_new_tokens, stop: of `generate`.
        fitted: cuts a prompt's ids where a task says how; each prompt that it shortens counts as truncated.

    Returns:
        One record a question in their order, and how many prompts were truncated.

    Raises:
        TooLong: when a prompt is too long for the model, and cutting it was not allowed.
    """
    before, cut, allowed = model.truncated, 0, model.allow_truncation
    records: list[Answered] = []
    model.allow_truncation = allow_truncation
    try:
        for group in _groups(model, questions):
            prompts = [ids if fitted is None else fitted(ids) for ids, _ in group]
            cut += sum(len(prompt) < len(ids) for prompt, (ids, _) in zip(prompts, group))
            texts = model.generate(prompts, max_new_tokens=max_new_tokens, stop=stop)
            for prompt, text, (_, question) in zip(prompts, texts, group):
                records.append(Answered(len(prompt), question.expected, text, score(text, question), question.about))
    finally:
        model.allow_truncation = allowed
    return records, cut + model.truncated - before


def _groups(model: LanguageModel, questions: Iterable[Question]) -> Iterator[list[tuple[list[int], Question]]]:
    """Questions with their ids, as many at once as their characters allow: a token has one at least, nearly always."""
    group: list[Question] = []
    held = 0
    for question in questions:
        if group and (held + len(question.prompt) > _GROUP_CHARACTERS or len(group) == _GROUP_PROMPTS):
            yield list(zip(encode_all(model.tokenizer, [q.prompt for q in group]), group))
            group, held = [], 0
        group.append(question)
        held += len(question.prompt)
    if group:
        yield list(zip(encode_all(model.tokenizer, [q.prompt for q in group]), group))


def score_of(task: str, metric: str, records: list[Answered], truncated: int, *, version: str, data: str, note: str = "") -> Score:
    """Mean score in percent, with the standard error of the mean over samples (none for a single one).

    Raises:
        ValueError: without a record.
    """
    if not records:
        raise ValueError(f"{task} has no sample to score")
    values = [100 * record.score for record in records]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Score(task, metric, statistics.fmean(values), error, len(values), truncated, version, data, note)


def readable(model: LanguageModel, options: SuiteOptions, length: int) -> str:
    """Why a model cannot be asked at this length; nothing where it can, or where cutting was allowed."""
    if model.max_length is None or length <= model.max_length or options.allow_truncation:
        return ""
    return (
        f"{model.name} reads {model.max_length} tokens at most, and a prompt has {length}; choose shorter lengths, or allow "
        "truncation: what is cut is then counted"
    )
