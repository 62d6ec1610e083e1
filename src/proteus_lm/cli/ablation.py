"""`proteus ablate`: one key of a recipe over values and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from proteus_lm.cli.common import Device, Overrides, Positional, app, choose_device, command_line, flat, no_bars


@app.command
def ablate(
    recipe: Annotated[Positional[Path], tyro.conf.arg(metavar="RECIPE")],
    /,
    *,
    over: Annotated[str, tyro.conf.arg(metavar="KEY=VALUE,VALUE,...")],
    seeds: Annotated[str, tyro.conf.arg(metavar="SEED,SEED,...")] = "0,1,2",
    overrides: Overrides = (),
    out: Path | None = None,
    max_tokens: int | None = 65536,
    context: int = 1,
    device: Device = "auto",
) -> None:
    """Train a recipe at several values of one key, several seeds each, and compare (the paper's Figure 3).

    The first value is what the others are compared with, seed by seed. Runs that are finished are used as they are, and the same
    command goes on with what was stopped; runs of another recipe or of other data in the folder are refused.
    Example: proteus ablate recipes/demo-titans-e8.yaml --over model.memory_blocks=1,4,8,16 --seeds 0,1,2 --out runs/blocks

    Args:
        recipe: YAML file with the sections model, data, train.
        over: The key and its values, such as model.memory_blocks=1,4,8,16 or train.lr=1e-3,2e-3.
        seeds: Values of train.seed, each used with each value of the key.
        overrides: Fields that replace the recipe's in all runs, such as train.steps=100; --set can be given several times.
        out: Folder for the runs, fig3.json, ablation.md, .html and .png; by default runs/ and the recipe's and key's names.
        max_tokens: Predict at most so many tokens of the validation split; None for the whole.
        context: Windows of the validation, in training contexts.
        device: For the measurements: auto (CUDA where there is one), cpu, cuda ... (training goes where train.device says).
    """
    from proteus_lm.ablate import Ablation, parse_over
    from proteus_lm.ablate import ablate as run_ablation
    from proteus_lm.report.suite_tables import ablation_table

    no_bars()
    key, values = parse_over(over)
    plan = Ablation(recipe, key, values, _seeds(seeds), tuple(flat(overrides)), max_tokens, context)
    folder = out or Path("runs") / f"{recipe.stem}-{key.partition('.')[2]}"
    result = run_ablation(plan, folder, made_by=command_line(), device=choose_device(device))
    print(f"\n{ablation_table(result)}\n\nReport: {folder / 'ablation.md'}\nFigure: {folder / 'ablation.png'}")


def _seeds(text: str) -> tuple[int, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not all(name.isdecimal() for name in names):
        raise ValueError(f"--seeds {text!r} must be whole numbers with commas between, such as 0,1,2")
    return tuple(int(name) for name in names)
