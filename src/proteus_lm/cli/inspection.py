"""`proteus inspect`: what a run's memory holds, does and retains."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from proteus_lm.cli.common import Device, Run, app, check_seed, choose_device, command_line, no_bars, print_json


@app.command(name="inspect")
def examine(
    run: Run,
    /,
    *,
    step: int | None = None,
    split: Literal["validation", "train"] = "validation",
    length: int | None = None,
    windows: int = 4,
    pairs: int = 16,
    looks: int = 8,
    seed: int = 0,
    rows: int = 64,
    task_length: int | None = None,
    device: Device = "auto",
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Look into the memory of a run: norm, effective rank, write and read strength by position and block, and what it retains.

    Retention: pairs of random tokens are put into text and asked for later, by when they were written and how much came after. Of a
    run trained on a task of proteus synthesize, the task is asked too, on new rows.
    Example: proteus inspect runs/e8

    Args:
        run: Folder that proteus train wrote.
        step: Checkpoint to use; by default the newest.
        split: Which part of the run's data.
        length: Tokens to read; by default twice the training context, or what the longest document holds.
        windows: Windows of text to average over.
        pairs: Pairs written into each window.
        looks: Places at which the pairs are asked for.
        seed: Of the pairs.
        rows: New rows of a synthetic task.
        task_length: Tokens of those rows, such as 8191; by default as the run was trained.
        device: auto (CUDA where there is one), cpu, cuda, cuda:1 ...
        out: Folder for inspect.md, .html, .json and the pictures; by default RUN/inspect.
        json: Print the JSON instead of the tables.
    """
    from proteus_lm.report.inspect import Look, inspect_run
    from proteus_lm.run import INSPECT

    no_bars()
    look = Look(step, split, length, windows, pairs, looks, check_seed(seed), rows, task_length, choose_device(device))
    found = inspect_run(run, out or run / INSPECT, look, made_by=command_line())
    print_json(found.raw) if json else print(found.text)
