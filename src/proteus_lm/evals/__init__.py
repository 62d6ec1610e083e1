"""Evaluation: perplexity by position, paired comparison, and the suites of the paper's tables. Knows nothing of training."""

from proteus_lm.evals.compare import PairedDifference, compare
from proteus_lm.evals.language_model import LanguageModel, TooLong
from proteus_lm.evals.perplexity import PerplexityResult, evaluate
from proteus_lm.evals.statistics import Estimate
from proteus_lm.evals.suite import SUITES, MissingData, Score, SuiteOptions, SuiteResult
from proteus_lm.evals.windows import LeftOut, Window, choose_windows

__all__ = [
    "SUITES",
    "Estimate",
    "LanguageModel",
    "LeftOut",
    "MissingData",
    "PairedDifference",
    "PerplexityResult",
    "Score",
    "SuiteOptions",
    "SuiteResult",
    "TooLong",
    "Window",
    "choose_windows",
    "compare",
    "evaluate",
]
