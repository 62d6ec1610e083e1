"""Running text to hide things in: cut at any word, split between sentences, repeated where more is asked than there is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from proteus_lm.data.python_docs import PythonDocs
from proteus_lm.evals.files import read_text
from proteus_lm.evals.long_context.rows import find_file, read_rows
from proteus_lm.evals.suite import MissingData

_SENTENCE_END = re.compile(r"""[.!?]["')\]]*\s(?=["'(\[]?[A-Z0-9])""")
_FILES = ("essays", "PaulGrahamEssays", "public_domain_essays")
_REMEDY = "give text in --data DIR: DIR/essays.txt, a folder DIR/essays of .txt files, or DIR/essays.jsonl with a field text"


class Haystack:
    """A text whose white space is single spaces, as RULER makes it, seen as words and sentences.

    Words and sentences are counted over the text repeated without end, so any number of them can be had.

    Args:
        text: running text.
        source: what it is, for results.

    Raises:
        ValueError: for a text without a word.
    """

    def __init__(self, text: str, source: str) -> None:
        self._text = " ".join(text.split())
        if not self._text:
            raise ValueError(f"the haystack {source} holds no word; {_REMEDY}")
        self.source = source
        self.hash = hashlib.sha256(self._text.encode("utf-8", "surrogatepass")).hexdigest()
        spaces = [0, *(match.end() for match in re.finditer(" ", self._text))]
        self._starts = np.array(spaces, np.int64)  # of words, in characters
        ends = [0, *(match.end() for match in _SENTENCE_END.finditer(self._text))]
        self._tallies = dict[str, np.ndarray]()
        self._sentences = np.unique(np.searchsorted(self._starts, np.array(ends, np.int64)))  # first words of sentences

    @property
    def words(self) -> int:
        """Words before the text repeats."""
        return len(self._starts)

    @property
    def sentences(self) -> int:
        """Sentences before the text repeats."""
        return len(self._sentences)

    def text(self, first: int, last: int) -> str:
        """Words first <= w < last."""
        parts = []
        while first < last:
            inside = first % self.words
            until = min(self.words, inside + last - first)
            end = len(self._text) if until == self.words else int(self._starts[until]) - 1
            parts.append(self._text[int(self._starts[inside]) : end])
            first += until - inside
        return " ".join(parts)

    def sentences_in(self, words: int) -> int:
        """Sentences that begin within the first `words` words."""
        whole, rest = divmod(words, self.words)
        return whole * self.sentences + int(np.searchsorted(self._sentences, rest))

    def sentence(self, index: int) -> int:
        """First word of a sentence."""
        whole, rest = divmod(index, self.sentences)
        return whole * self.words + int(self._sentences[rest])

    def words_for(self, first: int, tokens: int, tally: np.ndarray) -> int:
        """About how many words from word `first` on have that many tokens, by a tally."""
        words = np.append(self._sentences, self.words)
        whole, rest = divmod(first, self.words)
        before = whole * float(tally[-1]) + float(np.interp(rest, words, tally))
        copies, left = divmod(before + max(0, tokens), float(tally[-1]))
        return int(copies * self.words + np.interp(left, tally, words)) - first

    def tally(self, counts: Callable[[list[str]], list[int]], tokenizer: str) -> np.ndarray:
        """Tokens before each sentence, and in all: float64 (sentences + 1,). Sentences are counted one by one, once a tokenizer,
        without the special tokens around a text.

        Args:
            counts: tokens of texts.
            tokenizer: its hash, under which the tally is remembered.
        """
        if tokenizer not in self._tallies:
            edges = [*self._sentences.tolist(), self.words]
            special, *sizes = counts(["", *(f" {self.text(a, b)}" for a, b in zip(edges, edges[1:]))])
            alone = np.maximum(np.array(sizes, np.float64) - special, 1e-3)  # interpolation needs a tally that grows
            self._tallies[tokenizer] = np.concatenate([[0.0], np.cumsum(alone)])
        return self._tallies[tokenizer]


def load_haystack(data: Path | None) -> Haystack:
    """The user's text of `data` (essays.txt, essays/*.txt, or rows with a field `text`); by default CPython's documentation prose.

    Raises:
        ValueError: for a file that cannot be read as such.
        MissingData: when no file is given and this Python carries no sources.
    """
    return (None if data is None else _given(data.resolve())) or _pydoc()


@lru_cache(maxsize=2)
def _given(data: Path) -> Haystack | None:
    """The text in a folder; None where there is none."""
    texts = [path for path in (data / "essays.txt", *sorted((data / "essays").glob("*.txt"))) if path.is_file()]
    if texts:
        name = texts[0].name if len(texts) == 1 else f"essays/ ({len(texts)} files)"
        return Haystack(" ".join(map(read_text, texts)), name)
    file = find_file(data, *_FILES)
    if file is None:
        return None
    rows = read_rows(file, ("text",))
    return Haystack(" ".join(row["text"] for row in rows.rows), rows.source)


@lru_cache(maxsize=1)
def _pydoc() -> Haystack:
    try:
        return Haystack(" ".join(document.text for document in PythonDocs().documents()), "pydoc")
    except FileNotFoundError as error:
        raise MissingData(f"{error}. {_REMEDY}") from error
