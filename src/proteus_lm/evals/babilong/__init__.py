"""BABILong: bAbI's facts scattered in running text, made offline for any tokenizer and any length."""

from proteus_lm.evals.babilong.facts import Story, load_stories
from proteus_lm.evals.babilong.samples import VERSION, Scatter, compare
from proteus_lm.evals.babilong.suite import babilong

__all__ = ["VERSION", "Scatter", "Story", "babilong", "compare", "load_stories"]
