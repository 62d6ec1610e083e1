"""Table 2: the needle tasks at 4K, 8K, 16K tokens, or at any lengths asked for."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from proteus_lm.evals.language_model import TooLong
from proteus_lm.evals.long_context import (
    Answered,
    NoRoom,
    Question,
    Store,
    ask,
    count_tokens,
    load_haystack,
    readable,
    score_of,
)
from proteus_lm.evals.needle.samples import VERSION, Kitchen, samples
from proteus_lm.evals.needle.tasks import PAPER_NAMES, TASKS, TOKENS_TO_GENERATE, string_match_all
from proteus_lm.evals.needle.words import WordLists, load_words
from proteus_lm.evals.suite import MissingData, Score, SuiteOptions, SuiteResult

if TYPE_CHECKING:
    from proteus_lm.evals.language_model import LanguageModel

LENGTHS = (4096, 8192, 16384)
SAMPLES = 100


def table2(model: LanguageModel, options: SuiteOptions) -> SuiteResult:
    """RULER's needle tasks, scored by string_match_all in percent.

    A score's `metric` is the length in tokens, prompt and room for the answer together, as RULER counts. A length beyond the
    model's limit (unless truncation is allowed), or too short for a task, is not run and says so. `extra["samples"]` has one record
    a sample: task, context (the length asked for), index, length, tokens, depths (percent, one for each expected value), expected,
    got, score.

    Args:
        model: prompts are read in chunks through its cache.
        options: data (folder with essays and word lists), lengths, samples (100 by default), limit, seed, cache, tasks.
    """
    lengths = options.lengths or LENGTHS
    count = options.count(SAMPLES)
    words = load_words(options.data)
    with suppress(MissingData):  # of a task that needs it; a damaged file is known before the work, and the text is kept
        load_haystack(options.data)
    scores, records = list[Score](), list[dict[str, Any]]()
    for name in options.chosen(tuple(TASKS)):
        for length in lengths:
            try:
                kitchen = _kitchen(name, words, options)
                score, answers = _run(model, kitchen, length, count, options)
            except (MissingData, TooLong, NoRoom) as error:
                score, answers = Score.not_run(name, str(length), str(error), version=str(VERSION)), []
            scores.append(score)
            records += [{"context": length, **answer.to_dict()} for answer in answers]
    settings = {"lengths": list(lengths), "samples": count, "seed": options.seed, "tokens_to_generate": TOKENS_TO_GENERATE}
    tasks = {name: task.settings() for name, task in TASKS.items()}
    return SuiteResult(
        "table2", model.name, options.command, tuple(scores), {"settings": settings, "tasks": tasks, "samples": records}
    )


def _kitchen(name: str, words: WordLists, options: SuiteOptions) -> Kitchen:
    task = TASKS[name]
    return Kitchen(task, words, load_haystack(options.data) if task.haystack == "essay" else None, options.seed)


def _run(model: LanguageModel, kitchen: Kitchen, length: int, count: int, options: SuiteOptions) -> tuple[Score, list[Answered]]:
    """One task at one length: its score, and a record a sample."""
    name, metric, version = kitchen.task.name, str(length), str(VERSION)
    text = kitchen.essay.source if kitchen.essay is not None else kitchen.task.haystack
    data = f"haystack {text}, words of {kitchen.words.source}"
    reason = readable(model, options, length)
    if reason:
        return Score.not_run(name, metric, reason, version=version, data=data), []
    tokens = partial(count_tokens, model.tokenizer)
    recipes = samples(kitchen, count, length, tokens, model.tokenizer_hash, Store(options.cache))
    answers, truncated = ask(
        model,
        map(kitchen.question, recipes),
        _score,
        allow_truncation=options.allow_truncation,
        max_new_tokens=TOKENS_TO_GENERATE,
    )
    note = f"{PAPER_NAMES[name]}: string_match_all at {length} tokens"
    return score_of(name, metric, answers, truncated, version=version, data=data, note=note), answers


def _score(text: str, question: Question) -> float:
    return string_match_all(text, question.expected)
