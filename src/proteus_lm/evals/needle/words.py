"""What is hidden and what it is called: seven-digit numbers, UUIDs, and adjective-noun words, drawn from one stream."""

from __future__ import annotations

import hashlib
import json
import random
import uuid
from dataclasses import dataclass
from pathlib import Path

from proteus_lm.evals.long_context import find_file, read_rows
from proteus_lm.evals.needle.word_list import ADJECTIVES, NOUNS

KINDS = ("words", "numbers", "uuids")


@dataclass(frozen=True)
class WordLists:
    """Adjectives and nouns whose pairs are the words, and where they came from."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    source: str

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of both lists."""
        return hashlib.sha256(json.dumps([self.adjectives, self.nouns]).encode()).hexdigest()


def load_words(data: Path | None) -> WordLists:
    """RULER's lists where `data` holds them (ruler_words.json: adjectivelist, nounlist of wonderwords), else this package's.

    Raises:
        ValueError: for a file without these lists, or with an empty one.
    """
    file = find_file(data, "ruler_words")
    if file is None:
        return WordLists(ADJECTIVES, NOUNS, "proteus_lm")
    lists = read_rows(file, ("adjectivelist", "nounlist")).rows[0]
    adjectives, nouns = (tuple(dict.fromkeys(lists[name])) for name in ("adjectivelist", "nounlist"))
    if not adjectives or not nouns:
        raise ValueError(f"{file} holds an empty list; adjectivelist and nounlist need words")
    return WordLists(adjectives, nouns, file.name)


class Draw:
    """One sample's stream of random things: equal names give equal streams, in any process.

    Args:
        name: what the stream is for; all of it is the seed.
        words: for keys and values that are words.
    """

    def __init__(self, name: str, words: WordLists) -> None:
        self.random = random.Random(name)  # a text is hashed with SHA-512 there, not with Python's own hash
        self._words = words

    def thing(self, kind: str) -> str:
        """A key or value of a kind, as RULER draws it."""
        if kind == "numbers":
            return str(self.random.randint(10**6, 10**7 - 1))
        if kind == "uuids":
            return str(uuid.UUID(int=self.random.getrandbits(128), version=4))
        return f"{self.random.choice(self._words.adjectives)}-{self.random.choice(self._words.nouns)}"

    def things(self, kind: str, count: int) -> list[str]:
        """Different ones: two needles of one name would be one question with two answers.

        Raises:
            ValueError: for word lists that do not give so many and one more, for what is hidden beside them.
        """
        pairs = len(self._words.adjectives) * len(self._words.nouns)
        if kind == "words" and count >= pairs:
            raise ValueError(
                f"{self._words.source} gives {pairs} names of adjective and noun, and {count + 1} are needed; give longer lists"
            )
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.thing(kind)] = None
        return list(found)
