"""`proteus synthesize`: recall tasks as data to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from proteus_lm.cli.common import Positional, app, check_seed


@app.command
def synthesize(
    task: Annotated[Positional[Literal["mqar", "stream"]], tyro.conf.arg(metavar="TASK")],
    /,
    *,
    out: Path,
    length: int | None = None,
    pairs: int | None = None,
    vocab: int | None = None,
    rows: int | None = None,
    episodes: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Make a recall task as prepared data: proteus train learns it in minutes, proteus inspect tests it on new rows.

    mqar: pairs are given, then every key is asked once (multi-query associative recall). stream: a long stream of pairs in which
    keys given before come again with their value, at every distance.
    Example: proteus synthesize mqar --out runs/mqar/data

    Args:
        task: mqar or stream.
        out: Folder to write, as proteus prepare writes it, with task.json.
        length: Tokens of a row; train with data.context = length * episodes + 1. By default 16 (mqar) or
            511 (stream).
        pairs: Pairs of a row, or different keys of a stream. By default 4 (mqar), 16 (stream).
        vocab: Tokens: half of them keys, half values. By default 16 (mqar), 64 (stream).
        rows: Documents. By default 4000.
        episodes: Rows of the task in a document, one after the other. By default 8 (mqar), 1 (stream).
        seed: Of the rows.
        overwrite: Replace prepared data that is there already.
    """
    from proteus_lm.data.synthesize import TaskSpec
    from proteus_lm.data.synthesize import synthesize as make

    usual = {"mqar": (16, 4, 16, 4000, 8), "stream": (511, 16, 64, 4000, 1)}[task]
    given = (length, pairs, vocab, rows, episodes)
    sizes = [value if value is not None else default for value, default in zip(given, usual)]
    spec = TaskSpec(task, *sizes[:4], seed=check_seed(seed), episodes=sizes[4])
    manifest = make(spec, out, overwrite=overwrite)
    for name, split in manifest.splits.items():
        print(f"{name:<10} {split.documents:,} documents, {split.tokens:,} tokens")
    print(f"prepared   {out} (train with data.context={spec.context} data.allow_short_documents=true)")
