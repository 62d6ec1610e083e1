"""`proteus eval`: perplexity by position of a run, and the paper's suites for any causal model."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from proteus_lm.cli.common import (
    Device,
    Lengths,
    Run,
    app,
    choose_device,
    command_line,
    no_bars,
    print_json,
    progress_line,
    say,
    split_commas,
    token_counts,
    window_length,
)
from proteus_lm.cli.memory import MemoryContext, MemoryPolicy, spread

if TYPE_CHECKING:
    from proteus_lm.evals import PerplexityResult
    from proteus_lm.evals.language_model import LanguageModel
    from proteus_lm.evals.suite import SuiteOptions, SuiteResult

Suites = Literal["table1", "table2", "table3", "babilong", "fig2", "fig3", "fig4", "all"]


@app.command(name="eval")
def evaluate(
    run: Run,
    /,
    *,
    suite: Suites | None = None,
    context: Lengths = ("1x",),
    step: int | None = None,
    split: Literal["validation", "train"] = "validation",
    max_tokens: int | None = None,
    bins: int = 16,
    batch_size: int | None = None,
    chunk: int = 2048,
    device: Device = "auto",
    memory_policy: MemoryPolicy | None = None,
    memory_context: MemoryContext = None,
    json: bool = False,
    data: Path | None = None,
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK ...")] = (),
    limit: int | None = None,
    lengths: Lengths = (),
    samples: int | None = None,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    allow_truncation: bool = False,
    offline: bool = False,
    cache: Path | None = None,
    out: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Perplexity of a run by position and past the context it was trained with; with --suite, a table or figure of the paper.

    Without --suite: each window is cut from a document and read from position 0, its state carried from piece to piece.
    Example: proteus eval runs/e8 --context 1x 2x 4x

    With --suite: any run of ours, or any causal model of Hugging Face (a folder or a name on the hub). The scores are printed and
    written to RUN/evals/SUITE.json with the command, versions, settings and raw rows. Nothing is cut in silence. A result of fewer
    tasks, lengths or samples does not take the place of the one that is there: it is written beside it, to SUITE.2.json.
    Example: proteus eval runs/e8 --suite table2 --lengths 4K 8K 16K --samples 100

    Args:
        run: Folder that proteus train wrote; with --suite also a folder or hub name of a Hugging Face causal model.
        suite: table1 (language modelling and commonsense), table2 (needles), babilong, fig2 (recall by length), table3
            (LongBench), fig4 (perplexity by position, whole documents), or all of them. Figure 3 is proteus ablate.
        context: Window lengths: 1x, 2x, ... of the training context, a number of tokens, or documents (whole). Also 1x,2x,4x.
        step: Checkpoint to use; by default the newest.
        split: Which part of the run's data.
        max_tokens: Predict at most so many tokens for each length, in windows spread over the split; what is left out is counted.
        bins: Stretches of positions within the training context.
        batch_size: Windows read at once, 8 by default; with --suite sequences, on a GPU 128 where the model's memory does not grow.
        chunk: Tokens in one forward pass; longer windows carry their state from pass to pass.
        device: auto (CUDA where there is one), cpu, cuda, cuda:1 ...
        memory_policy: stretch opens the blocks of a trained memory over another length than in training, --memory-context.
        memory_context: That length in tokens, such as 16K; by default the blocks open as in training.
        json: Print one JSON object instead of tables.
        data: (suite) Folder with the tasks' files; without it they come from the hub.
        tasks: (suite) Only these tasks.
        limit: (suite) The first so many samples of each task; all by default.
        lengths: (suite) Context lengths, such as 4K 8K 16K; K is 1,024 tokens.
        samples: (suite) Generated samples a task and length.
        seed: (suite) Of everything that is drawn.
        dtype: (suite) Type of the model's weights.
        allow_truncation: (suite) Cut what is too long for the model and count it, instead of an error.
        offline: (suite) Do not ask the hub.
        cache: (suite) Folder that keeps generated samples for the next run.
        out: (suite) Folder for the results; by default RUN/evals.
        overwrite: (suite) Replace a result that is there already, whatever it holds.
    """
    no_bars()
    windows = (
        ("--context", context, ("1x",)),
        ("--split", split, "validation"),
        ("--max-tokens", max_tokens, None),
        ("--bins", bins, 16),
    )
    of_suites = (
        *(("--data", data, None), ("--tasks", tasks, ()), ("--limit", limit, None), ("--lengths", lengths, ())),
        *(("--samples", samples, None), ("--seed", seed, 0), ("--dtype", dtype, "float32"), ("--out", out, None)),
        ("--overwrite", overwrite, False),
        *(("--allow-truncation", allow_truncation, False), ("--offline", offline, False), ("--cache", cache, None)),
    )
    _refuse(of_suites, "with") if suite is None else _refuse(windows, "without")
    if suite == "fig3":
        raise ValueError(
            "Figure 3 compares runs that are trained for it; use: proteus ablate RECIPE --over model.memory_blocks=1,8,16,32"
        )
    if suite is not None:
        options = _suite_options(data, limit, lengths, samples, seed, allow_truncation, offline, cache, tasks)
        model = _open(run, step, choose_device(device), dtype, batch_size, chunk, allow_truncation)
        spread(model.model, memory_policy, memory_context)
        _suites(model, run, suite, options, out or _results_folder(run), overwrite, json)
        return
    from proteus_lm.evals import evaluate as evaluate_model
    from proteus_lm.report.collect import bytes_per_token
    from proteus_lm.run import Run as OpenRun

    opened = OpenRun.open(run)
    training = opened.recipe.data.context
    windows = {name: window_length(name, training) for name in split_commas(context)}
    dataset = opened.dataset(split)
    model = opened.load_model(step, device=choose_device(device))
    spread(model, memory_policy, memory_context)
    results = {}
    for name, length in windows.items():
        results[name] = evaluate_model(
            model,
            dataset,
            context=length,
            batch_size=8 if batch_size is None else batch_size,
            max_tokens=max_tokens,
            bins=bins,
            training_context=training,
            chunk=chunk,
            bytes_per_token=bytes_per_token(dataset),
            progress=progress_line(f"{name}: "),
        )
    checkpoint = opened.checkpoint(step)
    if json:
        print_json({"checkpoint": str(checkpoint), "split": split, "results": {n: r.to_dict() for n, r in results.items()}})
        return
    print(f"{checkpoint}, {split} split, trained with a context of {training:,} tokens")
    for name, result in results.items():
        print("\n" + _describe(name, result))


def _refuse(options: tuple[tuple[str, object, object], ...], how: str) -> None:
    """Raise ValueError for an option (name, value, default) that would be passed over in silence."""
    given = [name for name, value, default in options if value != default]
    if given:
        raise ValueError(f"{', '.join(given)} can be given {how} --suite only; see proteus eval --help")


def _describe(name: str, result: PerplexityResult) -> str:
    """One evaluation as text."""
    from proteus_lm.report.tables import estimate, left_out_line, markdown_table

    whole, bits = result.whole, result.bits_per_byte(result.whole.mean)
    lines = [
        f"context {name}: loss {estimate(whole, 4)} nats per token, perplexity {result.perplexity:.3f}"
        + ("" if bits is None else f", {bits:.4f} bits per byte")
    ]
    if result.past_training is not None:
        inside = estimate(result.within_training, 4)
        lines.append(f"within the training context {inside}, past it {estimate(result.past_training, 4)}")
    lines.append(left_out_line(result))
    rows = [(f"{a}–{b - 1}", estimate(e, 4), f"{e.tokens:,}") for a, b, e in zip(result.edges, result.edges[1:], result.bins)]
    return "\n".join([*lines, "", markdown_table(("positions", "loss ± standard error", "tokens"), rows)])


def _suite_options(
    data: Path | None,
    limit: int | None,
    lengths: tuple[str, ...],
    samples: int | None,
    seed: int,
    allow_truncation: bool,
    offline: bool,
    cache: Path | None,
    tasks: tuple[str, ...],
) -> SuiteOptions:
    from proteus_lm.evals.suite import SuiteOptions

    return SuiteOptions(
        data=data,
        limit=limit,
        lengths=token_counts(lengths),
        seed=seed,
        samples=samples,
        allow_truncation=allow_truncation,
        offline=offline,
        cache=cache,
        tasks=tuple(split_commas(tasks)) or None,
        command=command_line(),
    )


def _open(
    run: Path, step: int | None, device: str, dtype: str, batch_size: int | None, chunk: int, allow_truncation: bool
) -> LanguageModel:
    import torch

    from proteus_lm.evals.language_model import LanguageModel

    return LanguageModel.open(
        str(run),
        step=step,
        device=device,
        dtype=getattr(torch, dtype),
        batch_size=batch_size,
        chunk=chunk,
        allow_truncation=allow_truncation,
    )


def _results_folder(run: Path) -> Path:
    """RUN/evals, or for a name on the hub evals/NAME here."""
    from proteus_lm.run import EVALS

    return run / EVALS if run.is_dir() else Path(EVALS) / str(run).replace("/", "--")


def _suites(model: LanguageModel, run: Path, suite: str, options: SuiteOptions, out: Path, overwrite: bool, as_json: bool) -> None:
    """Run one suite, or all; each is saved as soon as it is done. A suite that fails in `all` says so and the others go on."""
    from proteus_lm.data.files import make_folder
    from proteus_lm.evals.provenance import with_provenance
    from proteus_lm.evals.suite import SUITES

    if suite == "all" and options.tasks is not None:
        raise ValueError(f"--tasks {' '.join(options.tasks)} chooses among the tasks of one suite; name it in place of all")
    make_folder(out)  # before the work: a folder that cannot be made would lose its result
    names, failed = tuple(SUITES) if suite == "all" else (suite,), []
    there = {} if overwrite else {name: _earlier(out / f"{name}.json") for name in names}
    for name in names:
        try:
            chosen = _own_documents(options, run) if name == "fig4" else options
            result = with_provenance(SUITES[name](model, chosen), model, chosen)
            if (why := result.why_nothing_ran()) is not None:
                raise ValueError(f"nothing of {name} ran, and nothing is written: {why}")
        except (ValueError, ImportError, ArithmeticError, RuntimeError) as error:  # a device out of memory is the last
            if suite != "all":
                raise
            failed.append(f"{name}: {' '.join(str(error).split())}")
            continue
        path = _place(out / f"{name}.json", there.get(name), result)
        result.save(path)
        print_json(result.to_dict()) if as_json else print(f"{_describe_suite(result)}\nwritten    {path}\n")
    for line in failed:
        say(f"not run: {line}")
    if failed:
        raise ValueError(f"{len(failed)} of {len(SUITES)} suites could not run; the others are in {out}")


def _earlier(path: Path) -> SuiteResult | None:
    """The result that is at a place already. Raises ValueError, before any work, for a file that is none."""
    from proteus_lm.evals.suite import SuiteResult

    if not path.exists():
        return None
    try:
        return SuiteResult.load(path)
    except ValueError as error:
        raise ValueError(
            f"{path} is there and is no result of a suite; it is left alone: choose another --out, or use --overwrite"
        ) from error


def _place(path: Path, earlier: SuiteResult | None, result: SuiteResult) -> Path:
    """Where to save a result: `path`, or a free name beside it where what is there would lose tasks or samples; says so then."""
    lost = () if earlier is None else earlier.more_than(result)
    if not lost:
        return path
    free = next(p for p in (path.with_name(f"{path.stem}.{n}.json") for n in count(2)) if not p.exists())
    more = f"; and {len(lost) - 2} more" if len(lost) > 3 else ""
    what = "; ".join(lost[: 2 if more else None]) + more
    say(f"{path} holds more ({what}) and stays; this result goes to {free}. To replace it, use --overwrite")
    return free


def _own_documents(options: SuiteOptions, run: Path) -> SuiteOptions:
    """For perplexity by position, which needs no task: a run's own validation documents where no others are given."""
    from dataclasses import replace

    from proteus_lm.run import Run as OpenRun

    if options.data is not None or not (run / "recipe.yaml").is_file():
        return options
    return replace(options, data=Path(OpenRun.open(run).recipe.data.path))


def _describe_suite(result: SuiteResult) -> str:
    """Scores as a table, and under it why some have none."""
    from proteus_lm.report.suite_tables import describe

    return describe(result)
