"""Stories scattered in running text to a length, and how an answer is judged (BABILong, Kuratov et al. 2024)."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from proteus_lm.evals.babilong.facts import Stories, Story
from proteus_lm.evals.babilong.prompts import prompt
from proteus_lm.evals.long_context import Haystack, Question, Store

VERSION = 1
"""Of the way samples are made and judged."""
TOKENS_TO_GENERATE = 20
_MARGIN = 8  # tokens left free, so that a text seldom overshoots and is encoded again

_PLACES = frozenset(("bathroom", "bedroom", "garden", "hallway", "kitchen", "office"))
LABELS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), _PLACES),
    "qa5": frozenset(("bill", "fred", "jeff", "mary", "apple", "football", "milk")),
    "qa6": frozenset(("yes", "no")),
    "qa7": frozenset(("none", "one", "two", "three")),
    "qa8": frozenset(("apple", "football", "milk", "nothing")),
    "qa9": frozenset(("yes", "no")),
    "qa10": frozenset(("yes", "no", "maybe")),
}
"""What can be an answer to a task, in lower case."""
_CUTS = (".", "<context>", "<example>")


def compare(task: str, question: str, target: str, output: str) -> bool:
    """Whether the first sentence of an output names the target (all its parts, in any order) and no other label of the task.

    Labels that the question names do not count. Labels are whole words: BABILong's own test for a part of a text finds "one" in
    "none", so that a right "none" would be wrong.
    """
    text = output.lower()
    for cut in _CUTS:
        text = text.split(cut)[0]
    said = set(re.findall(r"\w+", text)) & LABELS[task] - set(re.findall(r"\w+", question.lower()))
    return said == {part.strip() for part in target.lower().split(",")}


@dataclass(frozen=True)
class Recipe:
    """Story number, words of running text, and tokens of the prompt with the room for the answer."""

    index: int
    words: int
    length: int


class Scatter:
    """Makes the samples of one task.

    Args:
        task: "qa1" to "qa10".
        stories: of that task.
        haystack: text to scatter them in; each sample begins at a sentence of its own.
        seed: of all draws. A sample's draws depend on the seed, the task and its story, not on the length.
    """

    def __init__(self, task: str, stories: Stories, haystack: Haystack, seed: int) -> None:
        self.task, self.stories, self.haystack, self.seed = task, stories, haystack, seed

    def settings(self) -> dict[str, Any]:
        """All that the prompts depend on, without tokenizer and length."""
        text = {"source": self.haystack.source, "hash": self.haystack.hash}
        return {
            "task": self.task,
            "stories": [self.stories.source, len(self.stories.stories)],
            "haystack": text,
            "seed": self.seed,
            "version": VERSION,
        }

    def recipes(self, count: int, length: int, tokens: Callable[[list[str]], list[int]], tokenizer: str) -> list[Recipe]:
        """Recipes of `count` samples, or as many as there are stories that leave their facts room at this length.

        Args:
            tokens: of texts, in the model's tokenizer.
            tokenizer: its hash.
        """
        room, found = length - TOKENS_TO_GENERATE, list[Recipe]()
        order = list(range(len(self.stories.stories)))
        random.Random(f"proteus babilong {VERSION} {self.seed} {self.task}").shuffle(order)
        tally = self.haystack.tally(tokens, tokenizer)
        for index in order:
            if len(found) == count:
                break
            (measured,) = tokens([self._text(index, 0)])
            if measured > room:
                continue
            start, words = self.haystack.sentence(self._draws(index)[0]), 0
            wanted = self.haystack.words_for(start, room - measured - _MARGIN, tally)
            while wanted > words:  # the tally is near, not exact
                (measured,) = tokens([self._text(index, wanted)])
                if measured <= room:
                    words = wanted
                else:
                    wanted -= max(1, math.ceil((measured - room) * wanted / measured))
            found.append(Recipe(index, words, measured + TOKENS_TO_GENERATE))
        return found

    def question(self, recipe: Recipe) -> Question:
        """The prompt, the answer, and the depths of the facts it needs in percent of the running text."""
        story = self.stories.stories[recipe.index]
        places = self._places(recipe.index, recipe.words)
        depths = [round(100 * places[i] / max(1, recipe.words), 2) for i in story.supporting]
        about = {"task": self.task, "index": recipe.index, "length": recipe.length, "question": story.question, "depths": depths}
        return Question(self._text(recipe.index, recipe.words), (story.answer,), about)

    def _draws(self, index: int) -> tuple[int, list[float]]:
        """First sentence of the running text, and a share of it for each fact, in their order."""
        draw = random.Random(f"proteus babilong {VERSION} {self.seed} {self.task} {index}")
        facts = self.stories.stories[index].facts
        return draw.randrange(self.haystack.sentences), sorted(draw.random() for _ in facts)

    def _places(self, index: int, words: int) -> list[int]:
        """For each fact the word of the running text that it stands before: where a sentence begins, or the end."""
        first, shares = self._draws(index)
        start = self.haystack.sentence(first)
        count = self.haystack.sentences_in(start + words) - first
        picked = [math.floor(share * (count + 1)) for share in shares]
        return [words if i >= count else self.haystack.sentence(first + i) - start for i in picked]

    def _text(self, index: int, words: int) -> str:
        """The whole prompt with that much running text."""
        story: Story = self.stories.stories[index]
        start, last = self.haystack.sentence(self._draws(index)[0]), 0
        parts = list[str]()
        for fact, place in zip(story.facts, self._places(index, words)):
            parts += [self.haystack.text(start + last, start + place), fact]
            last = place
        parts.append(self.haystack.text(start + last, start + words))
        return prompt(self.task, " ".join(part for part in parts if part), story.question)


def samples(
    scatter: Scatter, count: int, length: int, tokens: Callable[[list[str]], list[int]], tokenizer: str, store: Store
) -> list[Recipe]:
    """`Scatter.recipes`, kept in `store` under all that they depend on.

    Args:
        tokenizer: hash of the tokenizer that `tokens` counts with.
    """
    settings = {**scatter.settings(), "count": count, "length": length, "tokenizer": tokenizer}
    made = store.get(
        f"babilong-{scatter.task}-{length}",
        settings,
        lambda: [asdict(recipe) for recipe in scatter.recipes(count, length, tokens, tokenizer)],
    )
    return [Recipe(**line) for line in made]
