"""Training in processes of its own, to be killed or to work together; PyTorch is imported once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

from proteus_lm.run import METRICS, read_metrics
from proteus_lm.train.recipe import Recipe

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["proteus_lm.train.loop"])


def _work(recipe: str, out: str, log: str, environment: dict[str, str]) -> None:
    """The whole life of a child: its output goes into `log`."""
    import torch

    from proteus_lm.train.loop import train
    from proteus_lm.train.recipe import load_recipe

    os.environ.update(environment)
    sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115 - until the process ends
    torch.set_num_threads(1)
    train(load_recipe(recipe), out)


class Training:
    """A process that trains `recipe` into `out`, started at once."""

    def __init__(self, recipe: Recipe, out: Path, environment: dict[str, str] | None = None) -> None:
        self.out, self.log = out, out.with_name(f"{out.name}-{(environment or {}).get('RANK', '0')}.log")
        path = out.with_name(f"{out.name}.yaml")
        recipe.save(path)
        self.process = _context.Process(target=_work, args=(str(path), str(out), str(self.log), environment or {}))
        self.process.start()

    def wait_for_step(self, step: int) -> None:
        """Until the metrics hold this step; the limit only ends a test that hangs."""
        for _ in range(6000):
            records = read_metrics(self.out / METRICS)
            if records and records[-1]["step"] >= step:
                return
            assert self.process.is_alive(), self.output
            time.sleep(0.01)
        raise AssertionError(f"no step {step}: {self.output}")

    def end(self) -> int | None:
        """The exit code, once it has ended; negative for a signal that killed it."""
        self.process.join(120)
        return self.process.exitcode

    @property
    def output(self) -> str:
        """What it wrote so far."""
        return self.log.read_text() if self.log.exists() else ""
