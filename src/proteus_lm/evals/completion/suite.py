"""Figure 2: how often the right value is written, by the length of the context."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from proteus_lm.evals.completion.items import SETS, load_items
from proteus_lm.evals.completion.prompts import TOKENS_TO_GENERATE, VERSION, Builder, prompts
from proteus_lm.evals.long_context import Answered, Question, Store, ask, count_tokens, readable, score_of
from proteus_lm.evals.suite import MissingData, Score, SuiteOptions, SuiteResult

if TYPE_CHECKING:
    from proteus_lm.evals.language_model import LanguageModel

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = 200
_FILLED = 0.9  # a prompt below this share of its length is counted as shorter than asked


def fig2(model: LanguageModel, options: SuiteOptions) -> SuiteResult:
    """SWDE, SQuAD and FDA completion, in percent of continuations that contain an answer, by set and length.

    A score's `metric` is the length in tokens, prompt and room for the answer together. A length beyond the model's limit is not
    run, unless truncation is allowed. `extra["samples"]` has one record a sample: task, context (the length asked for), index (of
    the item), length, document, tokens, depths (of the answer), expected, got, score.

    Args:
        model: prompts are read in chunks through its cache.
        options: data (folder with local sets), lengths, samples (200 by default, the same items at each length), limit, seed,
            cache, tasks, offline.
    """
    lengths = options.lengths or LENGTHS
    count = options.count(SAMPLES)
    scores, records = list[Score](), list[dict[str, Any]]()
    builders = {
        name: _builder(name, options) for name in options.chosen(tuple(SETS))
    }  # first: a damaged file would lose the others
    for name, builder in builders.items():
        if isinstance(builder, MissingData):
            scores += [Score.not_run(name, str(length), str(builder), version=str(VERSION)) for length in lengths]
            continue
        for length in lengths:
            score, answers = _run(model, builder, length, count, options)
            scores.append(score)
            records += [{"context": length, **answer.to_dict()} for answer in answers]
    settings = {"lengths": list(lengths), "samples": count, "seed": options.seed, "tokens_to_generate": TOKENS_TO_GENERATE}
    return SuiteResult("fig2", model.name, options.command, tuple(scores), {"settings": settings, "samples": records})


def _builder(name: str, options: SuiteOptions) -> Builder | MissingData:
    """What builds the prompts of a set, or what is missing. Raises ValueError for a file that is not what it should be."""
    try:
        return Builder(name, load_items(name, options.data, offline=options.offline), options.seed)
    except MissingData as error:
        return error


def contains(text: str, answers: tuple[str, ...]) -> bool:
    """Whether an answer stands in a text, whatever the case (`contains` of lm-evaluation-harness's swde, fda, squad_completion)."""
    return any(answer.lower() in text.lower() for answer in answers)


def _run(model: LanguageModel, builder: Builder, length: int, count: int, options: SuiteOptions) -> tuple[Score, list[Answered]]:
    """One set at one length: its score, and a record a sample."""
    name, metric, version, data = builder.name, str(length), str(VERSION), builder.items.source
    reason = readable(model, options, length)
    recipes = []
    if not reason:
        tokens = partial(count_tokens, model.tokenizer)
        recipes = prompts(builder, count, length, tokens, model.tokenizer_hash, Store(options.cache))
        if not recipes:
            reason = f"no answer of {name} has room in {length} tokens; ask for more"
    if reason:
        return Score.not_run(name, metric, reason, version=version, data=data), []
    answers, truncated = ask(
        model,
        map(builder.question, recipes),
        _score,
        allow_truncation=options.allow_truncation,
        max_new_tokens=TOKENS_TO_GENERATE,
        stop=("\n",),
    )
    notes = [f"contains, at {length} tokens"]
    for number, what in (
        (len(builder.chosen(count)) - len(recipes), "items left out, too long for this length"),
        (sum(recipe.length < _FILLED * length for recipe in recipes), "prompts shorter, for want of other documents"),
        (builder.items.left_out, "rows of the set left out, their answer not in their text"),
    ):
        notes += [f"{number} {what}"] if number else []
    return score_of(name, metric, answers, truncated, version=version, data=data, note="; ".join(notes)), answers


def _score(text: str, question: Question) -> float:
    return float(contains(text, question.expected))
