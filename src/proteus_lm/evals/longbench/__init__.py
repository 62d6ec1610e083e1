"""LongBench's English sets, with its authors' prompts, lengths and metrics (Table 3)."""

from proteus_lm.evals.longbench.metrics import classification_score, count_score, qa_f1_score, retrieval_score, rouge_score
from proteus_lm.evals.longbench.sets import PAPER, SETS, LongBenchSet
from proteus_lm.evals.longbench.suite import middle_cut, table3

__all__ = [
    "PAPER",
    "SETS",
    "LongBenchSet",
    "classification_score",
    "count_score",
    "middle_cut",
    "qa_f1_score",
    "retrieval_score",
    "rouge_score",
    "table3",
]
