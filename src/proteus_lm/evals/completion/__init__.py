"""Completion by context length: SWDE, SQuAD and FDA, prompts built to a length with the answer in them (Figure 2)."""

from proteus_lm.evals.completion.items import SETS, Item, Items, load_items
from proteus_lm.evals.completion.prompts import VERSION, Builder, Recipe
from proteus_lm.evals.completion.suite import contains, fig2

__all__ = ["SETS", "VERSION", "Builder", "Item", "Items", "Recipe", "contains", "fig2", "load_items"]
