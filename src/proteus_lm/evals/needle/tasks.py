"""The needle tasks: what is hidden where, and how it is asked. Definitions of RULER (Hsieh et al. 2024, synthetic.yaml)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from proteus_lm.evals.needle.words import KINDS

HAYSTACKS = ("noise", "essay", "needle")
TOKENS_TO_GENERATE = 128
DEPTHS = tuple(round(100 * i / 39) for i in range(40))
"""Percent of a haystack's sentences at which essay needles may stand, each used once a sample."""

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_MANY = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about the {kind} "
    "afterwards.\n",
    "\nWhat are all the special magic {kind} for {query} mentioned in the provided text? The special magic {kind} for {query} "
    "mentioned in the provided text are",
)
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the {kind} "
    "afterwards.\n",
    "\nWhat is the special magic {kind} for {query} mentioned in the provided text? The special magic {kind} for {query} "
    "mentioned in the provided text is",
)


@dataclass(frozen=True)
class NeedleTask:
    """One task.

    Args:
        name: in results; RULER's where it is one of RULER's.
        haystack: "noise" (one line repeated), "essay" (running text), "needle" (lines like the needle, with other keys).
        keys: needles' names there are, besides those of the haystack.
        values: needles of each key.
        queries: keys asked for.
        key_kind, value_kind: "words", "numbers" or "uuids".
        depth: percent of the haystack at which the needles asked for stand; None draws it for each sample, as RULER does.

    Raises:
        ValueError: for a setting outside these.
    """

    name: str
    haystack: str = "essay"
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_kind: str = "words"
    value_kind: str = "numbers"
    depth: float | None = None

    def __post_init__(self) -> None:
        for what, value, known in (
            ("haystack", self.haystack, HAYSTACKS),
            ("key_kind", self.key_kind, KINDS),
            ("value_kind", self.value_kind, KINDS),
        ):
            if value not in known:
                raise ValueError(f"{what} is {value!r}; it must be one of {', '.join(known)}")
        if min(self.keys, self.values, self.queries) < 1 or self.needles > len(DEPTHS):
            raise ValueError(
                f"{self.name}: keys {self.keys}, values {self.values}, queries {self.queries}; each must be at least 1, "
                f"and there can be {len(DEPTHS)} needles"
            )
        if self.depth is not None and not 0 <= self.depth <= 100:
            raise ValueError(f"depth is {self.depth}; it is a percentage, 0 to 100")

    @property
    def all_keys(self) -> int:
        """Keys hidden: at least those asked for."""
        return max(self.keys, self.queries)

    @property
    def needles(self) -> int:
        """Needles hidden."""
        return self.all_keys * self.values

    def needle(self, key: str, value: str) -> str:
        """The line that tells a value."""
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)

    def prompt(self, context: str, asked: list[str]) -> str:
        """The whole prompt: task, text, question, and the answer's beginning, which ends without a space."""
        single = self.queries * self.values == 1
        before, after = _ONE if single else _MANY
        kind = self.value_kind.removesuffix("s") if single else self.value_kind
        query = f"{', '.join(asked[:-1])}, and {asked[-1]}" if len(asked) > 1 else asked[0]
        return before.format(kind=kind) + context + after.format(kind=kind, query=query)

    def settings(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


TASKS: dict[str, NeedleTask] = {
    task.name: task
    for task in (
        NeedleTask("niah_single_1", "noise"),
        NeedleTask("niah_single_2"),
        NeedleTask("niah_single_3", value_kind="uuids"),
        NeedleTask("niah_multikey_1", keys=4),
        NeedleTask("niah_multikey_2", "needle"),
        NeedleTask("niah_multiquery", queries=4),
        NeedleTask("niah_multivalue", values=4),
    )
}
"""By RULER's names. The paper calls its MK-NIAH-1 "line retrieval", which in RULER is niah_multikey_2: both are here."""

PAPER_NAMES = {
    "niah_single_1": "S-NIAH-1",
    "niah_single_2": "S-NIAH-2",
    "niah_single_3": "S-NIAH-3",
    "niah_multikey_1": "MK-NIAH-1",
    "niah_multikey_2": "line retrieval (RULER's MK-NIAH-2)",
    "niah_multiquery": "MQ-NIAH",
    "niah_multivalue": "MV-NIAH",
}


def string_match_all(answer: str, expected: tuple[str, ...]) -> float:
    """Share of the expected values that stand in the answer, whatever their case and order (RULER's metric of the same name)."""
    text = answer.lower()
    return sum(value.lower() in text for value in expected) / len(expected)
