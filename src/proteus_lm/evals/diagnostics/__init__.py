"""What a memory does, for any checkpoint of ours: how full each block is, how it is written and read, and what is retained."""

from proteus_lm.evals.diagnostics.blocks import MemoryProfile, effective_rank, profile_memory, unit_rows
from proteus_lm.evals.diagnostics.recall import AGES, Recall, task_recall
from proteus_lm.evals.diagnostics.retention import Retention, measure_retention

__all__ = [
    "AGES",
    "MemoryProfile",
    "Recall",
    "Retention",
    "effective_rank",
    "measure_retention",
    "profile_memory",
    "task_recall",
    "unit_rows",
]
