"""A prompt of a given length around one answer: a window of a long document, or other documents beside a short one."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from proteus_lm.evals.completion.items import SETS, Item, Items
from proteus_lm.evals.long_context import Question, Store, fit

VERSION = 1
"""Of the way prompts are built."""
TOKENS_TO_GENERATE = 48
_WORD = re.compile(r"\S+")
_FILLERS = 4096  # documents looked at to fill a prompt, at most
Counts = Callable[[list[str]], list[int]]


@dataclass(frozen=True)
class Recipe:
    """Item number, words of its document (`inside`) or of other documents (`beside`), tokens with the room for the answer."""

    index: int
    inside: int
    beside: int
    length: int


@dataclass(frozen=True)
class _Document:
    name: str
    text: str
    lower: str
    spans: list[tuple[int, int]]  # characters of each word


def _spans(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in _WORD.finditer(text)]


class Builder:
    """Builds the prompts of one set.

    A document longer than its room is cut to a window of whole words around its first answer, half of it in front where there is so
    much (as Arora et al. 2024 cut). A shorter one is kept whole, and other documents that do not tell the answer fill the rest.

    Args:
        name: of the set.
        items: of it.
        seed: chooses the items asked, the documents that fill, and the place among them. Nothing depends on the length.
    """

    def __init__(self, name: str, items: Items, seed: int) -> None:
        self.name, self.items, self.seed = name, items, seed

    def settings(self) -> dict[str, Any]:
        """All that the prompts depend on, without tokenizer and length."""
        return {"set": self.name, "source": self.items.source, "hash": self.items.hash, "seed": self.seed, "version": VERSION}

    def chosen(self, count: int) -> list[int]:
        """Numbers of the items asked: the same ones, in one order, at each length."""
        order = list(range(len(self.items.items)))
        random.Random(f"proteus completion {VERSION} {self.seed} {self.name}").shuffle(order)
        return order[:count]

    def recipes(self, count: int, length: int, tokens: Counts) -> list[Recipe]:
        """Recipes of `count` items, or all there are; those whose answer and stem alone are longer than `length` are left out."""
        found = []
        for index in self.chosen(count):
            recipe = _Prompt(self, index).recipe(length - TOKENS_TO_GENERATE, tokens)
            found += [recipe] if recipe is not None else []
        return found

    def question(self, recipe: Recipe) -> Question:
        """The prompt, the answers, and the depth of the first answer in percent of the prompt's characters."""
        prompt = _Prompt(self, recipe.index)
        text, place = prompt.text(recipe.inside, recipe.beside)
        about = {
            "task": self.name,
            "index": recipe.index,
            "length": recipe.length,
            "document": prompt.item.document[:80],
            "depths": [round(100 * place / len(text), 2)],
        }
        return Question(text, prompt.item.answers, about)

    @cached_property
    def documents(self) -> list[_Document]:
        """Each document once."""
        texts = {item.document: item.text for item in self.items.items}
        return [_Document(name, text, text.lower(), _spans(text)) for name, text in texts.items()]


class _Prompt:
    """One item while its prompt is built."""

    def __init__(self, builder: Builder, index: int) -> None:
        self._builder, self._index = builder, index
        self.item: Item = builder.items.items[index]
        self._words = _spans(self.item.text)
        start, end = self.item.answer_at
        self._first = max(0, sum(a <= start for a, _ in self._words) - 1)  # words that the answer touches
        self._last = sum(a < end for a, _ in self._words)
        self._draw = random.Random(f"proteus completion {VERSION} {builder.seed} {builder.name} {index}")
        self._share = self._draw.random()

    def recipe(self, room: int, tokens: Counts) -> Recipe | None:
        """As much of the document as fits, then as much of others; None where the answer and the stem do not fit."""
        whole, least = len(self._words), self._last - self._first
        slack, measured = room // 100, dict[tuple[int, int], int]()

        def measure(inside: int, beside: int) -> int:
            if (inside, beside) not in measured:
                (measured[inside, beside],) = tokens([self.text(inside, beside)[0]])
            return measured[inside, beside]

        if measure(whole, 0) > room:
            if measure(least, 0) > room:
                return None
            start = max(least, math.floor(whole * room / measure(whole, 0)))
            inside = fit(lambda n: measure(n, 0), room, least=least, most=whole - 1, start=start, slack=slack)
            return self._made(inside, 0, measure(inside, 0))
        most = sum(len(other.spans) for other in self._others)
        rate = measure(whole, 0) / whole
        start = max(1, math.floor((room - measure(whole, 0)) / rate))
        beside = fit(lambda n: measure(whole, n), room, most=most, start=start, slack=slack) if most else 0
        return self._made(whole, beside, measure(whole, beside))

    def _made(self, inside: int, beside: int, tokens: int) -> Recipe:
        return Recipe(self._index, inside, beside, tokens + TOKENS_TO_GENERATE)

    def text(self, inside: int, beside: int) -> tuple[str, int]:
        """The whole prompt, and the character at which the answer begins in it."""
        first = min(max(0, self._first - inside // 2), len(self._words) - inside)
        first = max(first, self._last - inside, 0)
        begin, end = self._words[first][0], self._words[first + inside - 1][1]
        begin, end = (0 if first == 0 else begin), (len(self.item.text) if first + inside == len(self._words) else end)
        before, after = self._filling(beside)
        front = "".join(f"{text}\n\n" for text in before)
        behind = "".join(f"\n\n{text}" for text in after)
        return f"{front}{self.item.text[begin:end]}{behind}{self.item.stem}", len(front) + self.item.answer_at[0] - begin

    def _filling(self, words: int) -> tuple[list[str], list[str]]:
        """Other documents of that many words in all, the last one cut: those in front, and those behind."""
        pieces = list[str]()
        for other in self._others if words else ():
            take = min(words, len(other.spans))
            pieces.append(other.text if take == len(other.spans) else other.text[: other.spans[take - 1][1]])
            words -= take
            if not words:
                break
        if not SETS[self._builder.name].around:
            return pieces[::-1], []  # the cut one is farthest from the document
        place = math.floor(self._share * (len(pieces) + 1))
        return pieces[:place], pieces[place:]

    @cached_property
    def _others(self) -> list[_Document]:
        """Other documents that do not tell an answer, in an order of this item's own."""
        others = [other for other in self._builder.documents if other.name != self.item.document]
        answers = [answer.lower() for answer in self.item.answers]
        picked = self._draw.sample(others, min(len(others), _FILLERS))
        return [other for other in picked if not any(answer in other.lower for answer in answers)]


def prompts(builder: Builder, count: int, length: int, tokens: Counts, tokenizer: str, store: Store) -> list[Recipe]:
    """`Builder.recipes`, kept in `store` under all that they depend on.

    Args:
        tokenizer: hash of the tokenizer that `tokens` counts with.
    """
    settings = {**builder.settings(), "count": count, "length": length, "tokenizer": tokenizer}
    made = store.get(
        f"{builder.name}-{length}", settings, lambda: [asdict(recipe) for recipe in builder.recipes(count, length, tokens)]
    )
    return [Recipe(**line) for line in made]
