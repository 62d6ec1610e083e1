"""Samples of a needle task: small recipes, drawn by seed and fitted to a length, and the prompts they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from proteus_lm.evals.long_context import Haystack, NoRoom, Question, Store, fit
from proteus_lm.evals.needle.tasks import DEPTHS, NOISE, TOKENS_TO_GENERATE, NeedleTask
from proteus_lm.evals.needle.words import Draw, WordLists

VERSION = 1
"""Of the way samples are drawn: a change makes new samples, and so a new number."""

Counts = Callable[[list[str]], list[int]]
_GROUP_TOKENS = 2**22  # tokens of texts encoded together: in parallel where they are short, and not too many at once
_GROUP_PROMPTS = 256
_LONG = 2**16  # tokens from which on counting an essay's sentences once is cheaper than some encodings more of a prompt


@dataclass(frozen=True)
class Recipe:
    """What a sample is, apart from its words: number, haystack units (words or lines), tokens with the room for the answer."""

    index: int
    units: int
    length: int


class Kitchen:
    """Makes the samples of one task from one haystack.

    Args:
        task: what to hide and ask.
        words: of keys and values.
        essay: running text, for essay haystacks.
        seed: of all draws. A sample's keys, values and depths depend on the seed, the task and its index, not on the length,
            so that the same needle is looked for at each length.
    """

    def __init__(self, task: NeedleTask, words: WordLists, essay: Haystack | None, seed: int) -> None:
        if task.haystack == "essay" and essay is None:
            raise ValueError(f"{task.name} hides its needles in running text; give a haystack")
        self.task, self.words, self.seed = task, words, seed
        self.essay = essay if task.haystack == "essay" else None

    def settings(self) -> dict[str, Any]:
        """All that the prompts depend on, without tokenizer and length."""
        words = {"source": self.words.source, "hash": self.words.hash}
        text = self.essay and {"source": self.essay.source, "hash": self.essay.hash}
        return {"task": self.task.settings(), "words": words, "essay": text, "seed": self.seed, "version": VERSION}

    def recipes(self, count: int, length: int, tokens: Counts, tokenizer: str) -> list[Recipe]:
        """Recipes of `count` samples whose prompts, with the room for the answer, have at most `length` tokens.

        All have the haystack that the first one has room for, as in RULER; those that are too long with it get less.

        Args:
            tokens: of texts, in the model's tokenizer.
            tokenizer: its hash.

        Raises:
            NoRoom: a ValueError, when the shortest prompt of the task does not fit.
        """
        room, least = length - TOKENS_TO_GENERATE, self.task.needles
        first, seen = _Dish(self, 0), dict[int, int]()

        def measure(units: int) -> int:
            (seen[units],) = tokens([first.prompt(units)])
            return seen[units]

        start = None
        if self.essay is not None and length >= _LONG:
            start = self.essay.words_for(0, room - measure(least), self.essay.tally(tokens, tokenizer))
        usual = fit(measure, room, least=least, start=start)
        found, size = [first.recipe(usual, seen[usual], room, least, tokens)], max(1, min(_GROUP_PROMPTS, _GROUP_TOKENS // length))
        for start in range(1, count, size):
            dishes = [_Dish(self, index) for index in range(start, min(count, start + size))]
            measured = tokens([dish.prompt(usual) for dish in dishes])
            found += [dish.recipe(usual, now, room, least, tokens) for dish, now in zip(dishes, measured)]
        return found

    def question(self, recipe: Recipe) -> Question:
        """The prompt of a recipe, the values expected, and the depth of each in percent of the haystack."""
        dish = _Dish(self, recipe.index)
        places = dish.places(recipe.units)
        answers = [i for key in dish.asked for i in range(key * self.task.values, (key + 1) * self.task.values)]
        depths = [round(100 * places[i] / recipe.units, 2) for i in answers]
        about = {"task": self.task.name, "index": recipe.index, "length": recipe.length, "depths": depths}
        return Question(dish.prompt(recipe.units), tuple(dish.values[i] for i in answers), about)


class _Dish:
    """One sample while it is made. Everything but the size of its haystack is drawn here, in one order."""

    def __init__(self, kitchen: Kitchen, index: int) -> None:
        task = kitchen.task
        self._kitchen, self._task, self._index = kitchen, task, index
        self._draw = Draw(f"proteus needle {VERSION} {kitchen.seed} {task.name} {index}", kitchen.words)
        random = self._draw.random
        self.keys = self._draw.things(task.key_kind, task.all_keys)
        self.values = [self._draw.thing(task.value_kind) for _ in range(task.needles)]  # of key k: k * values ...
        self.asked = random.sample(range(task.all_keys), task.queries)
        self._depths = random.sample(DEPTHS, task.needles)
        self._shares = [random.random() for _ in range(task.needles)]
        self._lines = list[str]()

    def recipe(self, units: int, measured: int, room: int, least: int, tokens: Counts) -> Recipe:
        """With `units` of haystack, whose prompt has `measured` tokens, or as many fewer as it takes to have `room`."""
        while measured > room:
            if units == least:
                raise NoRoom(
                    f"{self._task.name} has a prompt of at least {measured} tokens, and there is room for {max(0, room)}; "
                    "ask for more"
                )
            units = max(least, units - max(1, math.ceil((measured - room) * units / measured)))
            (measured,) = tokens([self.prompt(units)])
        return Recipe(self._index, units, measured + TOKENS_TO_GENERATE)

    def places(self, units: int) -> list[int]:
        """Where each needle stands: before that unit of the haystack (a word for essays, else a line)."""
        task, essay = self._task, self._kitchen.essay
        asked = {i for key in self.asked for i in range(key * task.values, (key + 1) * task.values)}
        if essay is not None:
            count = essay.sentences_in(units)
            depths = [task.depth if task.depth is not None and i in asked else d for i, d in enumerate(self._depths)]
            sentences = [math.floor(count * depth / 100) for depth in depths]
            return [units if s >= count else essay.sentence(s) for s in sentences]
        shares = [task.depth / 100 if task.depth is not None and i in asked else s for i, s in enumerate(self._shares)]
        return [min(units, math.floor(units * share)) for share in shares]

    def prompt(self, units: int) -> str:
        """The whole prompt with that much haystack."""
        places = self.places(units)
        order = sorted(range(len(places)), key=lambda i: (places[i], i))
        stretches, last = list[str](), 0
        for i in order:
            stretches += [*self._between(last, places[i]), self._task.needle(self.keys[i // self._task.values], self.values[i])]
            last = places[i]
        stretches += self._between(last, units)
        joint = " " if self._kitchen.essay is not None else "\n"
        return self._task.prompt(joint.join(stretches), [self.keys[k] for k in self.asked])

    def _between(self, first: int, last: int) -> list[str]:
        """Units of the haystack, as texts to be joined."""
        if first == last:
            return []
        if self._kitchen.essay is not None:
            return [self._kitchen.essay.text(first, last)]
        if self._task.haystack == "noise":
            return [NOISE] * (last - first)
        while len(self._lines) < last:
            self._lines.append(next(self._distractors))
        return self._lines[first:last]

    @cached_property
    def _distractors(self) -> Iterator[str]:
        """Lines like the needle's, of keys that are not hidden: the first ones are the same for every size of haystack."""
        return self._other_lines()

    def _other_lines(self) -> Iterator[str]:
        task, hidden = self._task, set(self.keys)
        while True:
            key, value = self._draw.thing(task.key_kind), self._draw.thing(task.value_kind)
            if key not in hidden:
                yield task.needle(key, value)


def samples(kitchen: Kitchen, count: int, length: int, tokens: Counts, tokenizer: str, store: Store) -> list[Recipe]:
    """`Kitchen.recipes`, kept in `store` under all that they depend on.

    Args:
        tokenizer: hash of the tokenizer that `tokens` counts with.
    """
    settings = {**kitchen.settings(), "count": count, "length": length, "tokenizer": tokenizer}
    lines = store.get(
        f"{kitchen.task.name}-{length}",
        settings,
        lambda: [asdict(recipe) for recipe in kitchen.recipes(count, length, tokens, tokenizer)],
    )
    return [Recipe(**line) for line in lines]
