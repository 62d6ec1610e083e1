"""Table 1 through lm-evaluation-harness (extra `eval`): an adapter, its tasks over local files or the hub's, and their scores."""

from proteus_lm.evals.harness.table1 import table1
from proteus_lm.evals.harness.tasks import NAMES, TASKS, HarnessTask

__all__ = ["NAMES", "TASKS", "HarnessTask", "table1"]
