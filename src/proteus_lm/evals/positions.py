"""Figure 4 of the paper: perplexity by position, whole documents read with the state carried, to 32K tokens and beyond."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.sources import open_source
from proteus_lm.data.tokenizer import Tokenizer
from proteus_lm.evals.perplexity import PerplexityResult, evaluate
from proteus_lm.evals.statistics import Estimate
from proteus_lm.evals.suite import WHOLE, MissingData, Score, SuiteResult

if TYPE_CHECKING:
    from proteus_lm.evals.language_model import LanguageModel
    from proteus_lm.evals.suite import SuiteOptions

SUITE, ALL, METRIC, VERSION = "fig4", WHOLE, "perplexity", "1"
LONGEST = 32768
"""Positions the paper shows."""
LONG_TEXTS = "public_domain_essays.jsonl.gz"
"""Long documents among the evaluation files of a `data` folder, where it is no prepared data."""


class TextDocuments:
    """Documents held as ids: each text with the end token behind it."""

    def __init__(self, rows: list[np.ndarray], size: int) -> None:
        self._rows, self.bytes = rows, size

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self._rows)

    def document(self, index: int, /) -> np.ndarray:
        """Ids, int64 (tokens,)."""
        return self._rows[index]

    @property
    def tokens(self) -> int:
        """Ids of all documents."""
        return sum(map(len, self._rows))


def octave_edges(longest: int, first: int = 1024, parts: int = 4) -> tuple[int, ...]:
    """Edges of bins of positions: `parts` to each doubling from `first` on, as many equal ones below; the last is `longest`.

    They do not depend on the model or its training, so that any two results over one set of documents share them.
    """
    edges = [first * i // parts for i in range(parts)]
    start = first
    while start < longest:
        edges += [start + start * i // parts for i in range(parts)]
        start *= 2
    return (*sorted({e for e in edges if e < longest}), longest)


def perplexity_by_position(model: LanguageModel, options: SuiteOptions) -> SuiteResult:
    """Loss of a model at each position of whole documents, its state carried from each document's start.

    Documents are those of a prepared folder's validation split or the texts of the evaluation files' folder (`LONG_TEXTS`): the
    ids as they are where the model's own tokenizer made them, else their text tokenized by it. `options.limit` takes the first so
    many, the largest of `options.lengths` (32K without) is where reading stops. Errors are over documents. `extra["raw"]` is
    `PerplexityResult.to_raw()`, for paired comparison.

    Raises:
        ValueError: for documents longer than the model's position limit, unless truncation is allowed (and counted); for a task
            other than "all".
    """
    options.chosen((ALL,))
    longest = max(options.lengths or (LONGEST,))
    try:
        documents, source = load_documents(model, options)
    except MissingData as missing:
        return SuiteResult(SUITE, model.name, options.command, (Score.not_run(ALL, METRIC, str(missing), version=VERSION),))
    cut = 0
    if model.max_length is not None and model.max_length < longest:
        cut = sum(len(documents.document(i)) - 1 > model.max_length for i in range(documents.documents))
        if cut and not model.allow_truncation:
            raise ValueError(
                f"{cut} documents are longer than the {model.max_length} positions of {model.name}; ask for --lengths "
                f"{model.max_length} or less, or allow truncation, which is then counted"
            )
        longest = model.max_length
    result = evaluate(
        model.model,
        documents,
        context=None,
        batch_size=model.rows,
        edges=octave_edges(longest),
        longest=longest,
        bytes_per_token=documents.bytes / documents.tokens,
        read=lambda tokens: model.pieces(tokens, 0),
    )
    scores = [_score(ALL, result.whole, cut, source)]
    scores += [_score(f"{a}-{b - 1}", e, cut, source) for a, b, e in zip(result.edges, result.edges[1:], result.bins)]
    return SuiteResult(SUITE, model.name, options.command, tuple(scores), {"longest": longest, "raw": result.to_raw()})


def paired_raw(result: SuiteResult) -> PerplexityResult | None:
    """The losses behind a saved result, for `compare`; None where it was not run."""
    raw = result.extra.get("raw")
    return None if raw is None else PerplexityResult.from_raw(raw)


def load_documents(model: LanguageModel, options: SuiteOptions) -> tuple[TextDocuments, str]:
    """The documents to read as the model's ids, and where they are from.

    Raises:
        MissingData: where there are none.
        ValueError: where they hold no text.
    """
    remedy = "give --data: a folder that `proteus prepare` wrote, or one that holds " + LONG_TEXTS
    if options.data is None:
        raise MissingData(f"no documents to read; {remedy}")
    folder = Path(options.data)
    if (folder / "manifest.json").is_file() and (folder / "tokenizer.json").is_file():
        dataset = TokenDataset(folder, "validation")
        tokenizer = dataset.tokenizer
        if _made_with(model.tokenizer, dataset):  # text and back would not give the same ids with every tokenizer
            rows = [dataset.document(i) for i in range(dataset.documents)[: options.limit]]
            share = sum(map(len, rows)) / dataset.tokens
            return TextDocuments(rows, round(dataset.bytes * share)), f"{folder} (validation)"
        texts = (tokenizer.decode(dataset.document(i)[:-1]) for i in range(dataset.documents))
        source = f"{folder} (validation)"
    elif (folder / LONG_TEXTS).is_file():
        texts = (document.text for document in open_source(folder / LONG_TEXTS).documents())
        source = str(folder / LONG_TEXTS)
    else:
        raise MissingData(f"{folder} holds no long documents; {remedy}")
    rows, size = [], 0
    for text in _first(texts, options.limit):
        # As in prepared data: a special token written out in a text is text.
        ids = model.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        rows.append(np.array([*ids, model.eos_id], dtype=np.int64))  # pyright: ignore[reportGeneralTypeIssues]
        size += len(text.encode())
    if not size:
        raise ValueError(f"{source} holds no text; {remedy}")
    return TextDocuments(rows, size), source


def _made_with(tokenizer: Any, dataset: TokenDataset) -> bool:
    """Whether a transformers tokenizer is the one that made a prepared folder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    return Tokenizer(backend.to_str(), tokenizer.eos_token, tokenizer.name_or_path).hash == dataset.manifest.tokenizer["hash"]


def _first(texts: Iterator[str], limit: int | None) -> Iterator[str]:
    for count, text in enumerate(texts):
        if count == limit:
            return
        yield text


def _score(task: str, loss: Estimate, cut: int, source: str) -> Score:
    """Perplexity exp(loss), its error by the delta method."""
    value = math.exp(loss.mean) if loss.mean < 700 else math.inf
    return Score(task, METRIC, value, None if loss.error is None else value * loss.error, loss.tokens, cut, VERSION, source)
