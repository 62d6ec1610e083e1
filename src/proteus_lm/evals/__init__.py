"""Evaluation: perplexity by position, and paired comparison of models. Knows nothing of training."""

from proteus_lm.evals.compare import PairedDifference, compare
from proteus_lm.evals.perplexity import PerplexityResult, evaluate
from proteus_lm.evals.statistics import Estimate
from proteus_lm.evals.windows import LeftOut, Window, choose_windows

__all__ = ["Estimate", "LeftOut", "PairedDifference", "PerplexityResult", "Window", "choose_windows", "compare", "evaluate"]
