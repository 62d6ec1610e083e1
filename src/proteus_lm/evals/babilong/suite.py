"""BABILong, qa1 to qa10, at the lengths of Table 2 or any others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from proteus_lm.evals.babilong.facts import TASKS, load_stories
from proteus_lm.evals.babilong.samples import TOKENS_TO_GENERATE, VERSION, Scatter, compare, samples
from proteus_lm.evals.language_model import TooLong
from proteus_lm.evals.long_context import (
    Answered,
    Question,
    Store,
    ask,
    count_tokens,
    load_haystack,
    readable,
    score_of,
)
from proteus_lm.evals.suite import MissingData, Score, SuiteOptions, SuiteResult

if TYPE_CHECKING:
    from proteus_lm.evals.language_model import LanguageModel

LENGTHS = (4096, 8192, 16384)
SAMPLES = 100


def babilong(model: LanguageModel, options: SuiteOptions) -> SuiteResult:
    """BABILong's accuracy in percent, by task and length.

    A score's `metric` is the length in tokens: of the whole prompt and the room for the answer, where BABILong's own counts the
    facts and the text alone. A length beyond the model's limit is not run, unless truncation is allowed. `extra["samples"]` has one
    record a sample: task, context (the length asked for), index (of the story), length, question, tokens, depths, expected, got,
    score.

    Args:
        model: prompts are read in chunks through its cache.
        options: data (folder with bAbI's stories, and essays), lengths, samples (100 by default), limit, seed, cache, tasks.
    """
    lengths = options.lengths or LENGTHS
    count = options.count(SAMPLES)
    scores, records = list[Score](), list[dict[str, Any]]()
    for task in options.chosen(TASKS):
        for length in lengths:
            try:
                scatter = Scatter(task, load_stories(task, options.data), load_haystack(options.data), options.seed)
                score, answers = _run(model, scatter, length, count, options)
            except (MissingData, TooLong) as error:
                score, answers = Score.not_run(task, str(length), str(error), version=str(VERSION)), []
            scores.append(score)
            records += [{"context": length, **answer.to_dict()} for answer in answers]
    settings = {"lengths": list(lengths), "samples": count, "seed": options.seed, "tokens_to_generate": TOKENS_TO_GENERATE}
    return SuiteResult("babilong", model.name, options.command, tuple(scores), {"settings": settings, "samples": records})


def _run(model: LanguageModel, scatter: Scatter, length: int, count: int, options: SuiteOptions) -> tuple[Score, list[Answered]]:
    """One task at one length: its score, and a record a sample."""
    metric, version = str(length), str(VERSION)
    data = f"stories {scatter.stories.source}, text {scatter.haystack.source}"
    reason = readable(model, options, length)
    recipes = []
    if not reason:
        tokens = partial(count_tokens, model.tokenizer)
        recipes = samples(scatter, count, length, tokens, model.tokenizer_hash, Store(options.cache))
        if not recipes:
            reason = f"no story of {scatter.task} has room for its facts in {length} tokens; ask for more"
    if reason:
        return Score.not_run(scatter.task, metric, reason, version=version, data=data), []
    answers, truncated = ask(
        model,
        map(scatter.question, recipes),
        _score,
        allow_truncation=options.allow_truncation,
        max_new_tokens=TOKENS_TO_GENERATE,
    )
    note = f"accuracy at {length} tokens"
    if len(recipes) < count:
        note += f"; {len(recipes)} samples, for want of stories short enough"
    return score_of(scatter.task, metric, answers, truncated, version=version, data=data, note=note), answers


def _score(text: str, question: Question) -> float:
    return float(compare(question.about["task"], question.about["question"], question.expected[0], text))
