"""`proteus report`: runs compared, and the paper's tables and figures with the paper's values beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from proteus_lm.cli.common import (
    Device,
    Lengths,
    Positional,
    app,
    check_seed,
    choose_device,
    command_line,
    multiple,
    no_bars,
    progress_line,
    split_commas,
)


@app.command
def report(
    runs: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN ...")],
    /,
    *,
    out: Path = Path("runs/report"),
    context: Lengths = ("1x", "2x"),
    max_tokens: int | None = 65536,
    split: Literal["validation", "train"] = "validation",
    bins: int = 16,
    batch_size: int = 16,
    sample_tokens: int = 200,
    seed: int = 0,
    device: Device = "auto",
    results: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")] = (),
    paper: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    paper_size: Literal["760M", "1.3B"] = "760M",
    only_suites: bool = False,
) -> None:
    """Compare runs: tables, figures, which blocks of memory are open and how full, samples, and a verdict.

    Runs are measured alike, on the same tokens; the one with E = 1 is what the others are measured against.
    Where runs have results of `proteus eval --suite`, paper.md and paper.html show them in the paper's tables and figures, with the
    paper's values in columns of their own.
    Example: proteus report runs/demo/titans-e1 runs/demo/titans-e8 --out runs/demo/report

    Args:
        runs: Folders that proteus train wrote.
        out: Folder for report.md, report.html, report.json, paper.md, paper.html and the figures.
        context: Lengths of the windows as multiples of the training context; the first gives the table's main numbers.
        max_tokens: Predict at most so many tokens for each length and run; None for the whole split.
        split: Which part of the runs' data.
        bins: Stretches of positions within the training context.
        batch_size: Windows read at once.
        sample_tokens: Length of each run's text sample; 0 for none.
        seed: Of the text samples.
        device: auto (CUDA where there is one), cpu, cuda, cuda:1 ...
        results: Further files of proteus eval --suite (of models that are no runs) or of proteus ablate (fig3.json).
        paper: YAML or JSON file with more values of the paper, such as read off its plots (docs/evaluation.md).
        paper_size: Which size of the paper's models stands beside ours in Table 1.
        only_suites: Do not measure the runs; show results of suites alone.
    """
    from proteus_lm.report.build import build_report
    from proteus_lm.report.collect import Options
    from proteus_lm.report.paper import PAPER, load_paper
    from proteus_lm.report.suites import build_page, collect

    no_bars()
    values = PAPER if paper is None else load_paper(paper)
    if only_suites or (results and not runs):
        print(build_page(collect(runs, results), out, paper=values, size=paper_size, made_by=command_line()).text)
        return
    entries = collect([run for run in runs if run.is_dir()], results)
    options = Options(
        contexts=tuple(multiple(name) for name in split_commas(context)),
        max_tokens=max_tokens,
        split=split,
        bins=bins,
        batch_size=batch_size,
        sample_tokens=sample_tokens,
        seed=check_seed(seed),
        device=choose_device(device),
    )
    print(build_report(runs, out, options, made_by=command_line(), progress=progress_line("")).text)
    if entries:
        print(build_page(entries, out, paper=values, size=paper_size, made_by=command_line()).text)
