"""Reports of runs that were never trained: real evaluations of small recurrent models, metrics and memories made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from proteus_lm.evals import evaluate
from proteus_lm.report.collect import RunReport
from proteus_lm.report.memory import MemoryTrace
from proteus_lm.schedule import ActivationSchedule

from ..evals.doubles import Recurrent, texts

CONTEXT = 32


def trace(blocks: int, layers: int = 2) -> MemoryTrace:
    """Norms that grow with the tokens read; a locked block holds exactly nothing."""
    schedule = ActivationSchedule(blocks, CONTEXT)
    points = tuple(range(8, 65, 8))
    opened = tuple(schedule.active_blocks(p - 1) for p in points)
    unlocks = tuple(schedule.unlock_position(b) for b in range(blocks))
    norms = np.zeros((len(points), layers, blocks))
    for i, p in enumerate(points):
        for b in range(opened[i]):
            norms[i, :, b] = (1 + np.arange(layers)) * np.log1p(p - unlocks[b])
    return MemoryTrace(points, norms, opened, unlocks, 4)


def run_report(
    name: str = "e1", blocks: int = 1, *, seed: int = 0, worse: float = 0.0, source: str = "made up", **changes
) -> RunReport:
    """A run whose model is a GRU; `worse` makes its predictions less certain."""
    model = Recurrent(seed=seed)
    with torch.no_grad():
        model.head.weight.mul_(1 + worse)
    data = texts(*[65] * 9)
    evaluations = {
        m: evaluate(model, data, context=m * CONTEXT, bins=8, training_context=CONTEXT, bytes_per_token=1.0) for m in (1, 2)
    }
    fields = {
        "name": name,
        "path": Path("runs") / name,
        "step": 40,
        "parameters": sum(p.numel() for p in model.parameters()),
        "recipe": {"model": {"memory_blocks": blocks}, "data": {"path": "d", "context": CONTEXT}, "train": {"seed": 0, "lr": 1e-3}},
        "model": {"mixer": "titans", "memory_blocks": blocks, "memory_context": CONTEXT if blocks > 1 else 8192},
        "metrics": [
            {"step": s, "loss": 5 / s**0.3, "tokens_per_second": 1000.0 + s, **({"validation_loss": 2.0} if s % 20 == 0 else {})}
            for s in range(1, 41)
        ],
        "data": {"source": source, "shards": ["abc"]},
        "evaluations": evaluations,
        "memory": trace(blocks),
        "prompt": "the prompt",
        "sample": f"what {name} writes",
        "commands": {"train": f"proteus train recipes/{name}.yaml", "evaluate": f"proteus eval runs/{name}"},
    }
    return RunReport(**(fields | changes))
