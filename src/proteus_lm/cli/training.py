"""`proteus train`: recipe in, run folder out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from proteus_lm.cli.common import Overrides, Positional, app, flat, no_bars


@app.command
def train(
    recipe: Annotated[Positional[Path], tyro.conf.arg(metavar="RECIPE")],
    /,
    *,
    overrides: Overrides = (),
    out: Path | None = None,
    resume: Literal["auto", "never", "restart"] = "auto",
    stop_at: int | None = None,
) -> None:
    """Train a model by a recipe, or go on with a run that was stopped.

    The same command resumes a run that was killed, from its newest checkpoint, with the same losses as if it had not been.
    Example: proteus train recipes/demo-titans-e8.yaml --out runs/e8 --set train.steps=100 train.lr=1e-3

    Args:
        recipe: YAML file with the sections model, data, train.
        overrides: Fields that replace the recipe's, such as train.lr=1e-3 model.memory_blocks=4; --set can be given
            several times, each field once.
        out: Run folder to write; by default runs/ and the recipe's name.
        resume: auto goes on with the run in the folder if there is one; never refuses; restart removes it, its evals
            and inspect folders too, and begins again.
        stop_at: Stop after this step and save, although the recipe has more.
    """
    from proteus_lm.train.loop import train as train_run
    from proteus_lm.train.recipe import load_recipe

    no_bars()
    run = train_run(load_recipe(recipe, flat(overrides)), out or Path("runs") / recipe.stem, resume=resume, stop_at=stop_at)
    print(f"trained    {run.path} (steps with a checkpoint: {', '.join(map(str, run.steps))})")
