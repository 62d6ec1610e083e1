"""Needles in a haystack: RULER's tasks, made offline for any tokenizer and any length (Table 2)."""

from proteus_lm.evals.needle.samples import Kitchen, Recipe, samples
from proteus_lm.evals.needle.suite import table2
from proteus_lm.evals.needle.tasks import PAPER_NAMES, TASKS, TOKENS_TO_GENERATE, NeedleTask, string_match_all
from proteus_lm.evals.needle.words import WordLists, load_words

__all__ = [
    "PAPER_NAMES",
    "TASKS",
    "TOKENS_TO_GENERATE",
    "Kitchen",
    "NeedleTask",
    "Recipe",
    "WordLists",
    "load_words",
    "samples",
    "string_match_all",
    "table2",
]
