"""The command `proteus`. Nothing heavy is imported until a command runs, so that help comes at once.

Errors a user can do something about are one line on standard error and exit code 2; Ctrl-C exits with 130.
`--debug` anywhere on the line, or PROTEUS_DEBUG=1, shows the traceback instead.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

if TYPE_CHECKING:
    from proteus_lm.evals import PerplexityResult

# What the library raises for reasons outside the program; anything else is a defect of ours and keeps its traceback.
USER_ERRORS = (ValueError, OSError, ArithmeticError, ImportError, NotImplementedError, RuntimeError)

T = TypeVar("T")
Positional = tyro.conf.Positional
Run = Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
Device = Annotated[str, tyro.conf.arg(metavar="DEVICE")]

app = tyro.extras.SubcommandApp()


@app.command
def prepare(
    *,
    source: str,
    tokenizer: str,
    out: Path,
    field: str = "text",
    separator: str | None = None,
    errors: Literal["strict", "replace"] = "strict",
    hub_config: str | None = None,
    hub_split: str = "train",
    max_documents: int | None = None,
    validation_fraction: float = 0.05,
    split_seed: int = 0,
    shard_tokens: int = 100_000_000,
    dtype: Literal["auto", "uint16", "uint32"] = "auto",
    workers: int | None = None,
    overwrite: bool = False,
) -> None:
    """Turn text into token shards to train on.

    Interrupted work goes on where it stopped when the same command is given again; finished work is used as it is.
    Example: proteus prepare --source pydoc --tokenizer byte --out runs/demo/data

    Args:
        source: pydoc (the documentation inside this Python), a text file, a folder, JSON lines (plain or compressed), Parquet, or a
            data set's name on the hub.
        tokenizer: byte (built in), a tokenizer.json, a folder that holds one, or the name of a model on the hub.
        out: Folder to write: manifest.json, tokenizer.json, train/, validation/.
        field: Field of a row that holds the text (JSON lines, Parquet, hub).
        separator: Text that separates documents inside a text file; without it a file is one document.
        errors: strict stops at bytes that are not UTF-8 and says where; replace puts U+FFFD there.
        hub_config: Configuration of a data set on the hub.
        hub_split: Split of a data set on the hub.
        max_documents: Stop after so many documents.
        validation_fraction: Share of documents kept for validation.
        split_seed: Another seed, another choice of validation documents.
        shard_tokens: A shard is closed by the document that reaches this many tokens.
        dtype: Type of the stored ids; auto takes the smallest that holds the vocabulary.
        workers: Processes that tokenize; 0 works in this one; by default chosen by the size of the source.
        overwrite: Replace prepared data that is there already.
    """
    from proteus_lm.data.prepare import prepare as prepare_data

    manifest = prepare_data(
        _path_or_name(source),
        tokenizer,
        out,
        field=field,
        separator=separator,
        errors=errors,
        hub_config=hub_config,
        hub_split=hub_split,
        max_documents=max_documents,
        validation_fraction=validation_fraction,
        split_seed=split_seed,
        shard_tokens=shard_tokens,
        dtype=dtype,
        workers=workers,
        overwrite=overwrite,
    )
    for name, split in manifest.splits.items():
        sizes = f"{split.documents:,} documents, {split.tokens:,} tokens, {split.bytes:,} bytes of text"
        print(f"{name:<10} {sizes}; the longest has {split.longest_document:,} tokens")
    print(f"prepared   {out}")


@app.command
def train(
    recipe: Annotated[Positional[Path], tyro.conf.arg(metavar="RECIPE")],
    /,
    *,
    overrides: Annotated[
        tuple[tuple[str, ...], ...], tyro.conf.arg(name="set", metavar="KEY=VALUE ..."), tyro.conf.UseAppendAction
    ] = (),
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
        resume: auto goes on with the run in the folder if there is one; never refuses; restart removes it and begins again.
        stop_at: Stop after this step and save, although the recipe has more.
    """
    from proteus_lm.train.loop import train as train_run
    from proteus_lm.train.recipe import load_recipe

    _no_bars()
    changed = [item for group in overrides for item in group]
    run = train_run(load_recipe(recipe, changed), out or Path("runs") / recipe.stem, resume=resume, stop_at=stop_at)
    print(f"trained    {run.path} (steps with a checkpoint: {', '.join(map(str, run.steps))})")


@app.command(name="eval")
def evaluate(
    run: Run,
    /,
    *,
    context: Annotated[tuple[str, ...], tyro.conf.arg(metavar="LENGTH ...")] = ("1x",),
    step: int | None = None,
    split: Literal["validation", "train"] = "validation",
    max_tokens: int | None = None,
    bins: int = 16,
    batch_size: int = 8,
    chunk: int = 2048,
    device: Device = "auto",
    json: bool = False,
) -> None:
    """Perplexity of a run: whole, by position, and past the context it was trained with.

    Each window is cut from a document and read from position 0, its state carried from piece to piece.
    Example: proteus eval runs/e8 --context 1x 2x 4x

    Args:
        run: Folder that proteus train wrote.
        context: Window lengths: 1x, 2x, ... of the training context, a number of tokens, or documents (whole). Also 1x,2x,4x.
        step: Checkpoint to use; by default the newest.
        split: Which part of the run's data.
        max_tokens: Predict at most so many tokens for each length, in windows spread over the split; what is left out is counted.
        bins: Stretches of positions within the training context.
        batch_size: Windows read at once.
        chunk: Tokens in one forward pass; longer windows carry their state from pass to pass.
        device: auto (CUDA where there is one), cpu, cuda, cuda:1 ...
        json: Print one JSON object instead of tables.
    """
    from proteus_lm.evals import evaluate as evaluate_model
    from proteus_lm.report.collect import bytes_per_token
    from proteus_lm.run import Run as OpenRun

    _no_bars()
    opened = OpenRun.open(run)
    training = opened.recipe.data.context
    lengths = {name: _length(name, training) for item in context for name in item.split(",") if name}
    model = opened.load_model(step, device=_device(device))
    dataset = opened.dataset(split)
    results = {}
    for name, length in lengths.items():
        results[name] = evaluate_model(
            model,
            dataset,
            context=length,
            batch_size=batch_size,
            max_tokens=max_tokens,
            bins=bins,
            training_context=training,
            chunk=chunk,
            bytes_per_token=bytes_per_token(dataset),
            progress=_progress(f"{name}: "),
        )
    checkpoint = opened.checkpoint(step)
    if json:
        _print_json({"checkpoint": str(checkpoint), "split": split, "results": {n: r.to_dict() for n, r in results.items()}})
        return
    print(f"{checkpoint}, {split} split, trained with a context of {training:,} tokens")
    for name, result in results.items():
        print("\n" + _describe(name, result))


@app.command
def generate(
    run: Run,
    /,
    *,
    prompt: str,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    num_beams: int = 1,
    step: int | None = None,
    device: Device = "auto",
) -> None:
    """Let a run go on from a prompt. The text goes to standard output, without the prompt.

    Example: proteus generate runs/e8 --prompt "The memory of" --temperature 0

    Args:
        run: Folder that proteus train wrote.
        prompt: Text to go on from; - reads it from standard input.
        max_new_tokens: Write at most so many tokens; the end of the document stops earlier.
        temperature: 0 takes the likeliest token each time; 1 draws as the model says.
        top_k: Draw among so many likeliest tokens only.
        top_p: Draw among the likeliest tokens that hold this probability together.
        seed: Of the draw: the same seed gives the same text.
        num_beams: Beams of a beam search; needs --temperature 0.
        step: Checkpoint to use; by default the newest.
        device: auto (CUDA where there is one), cpu, cuda, cuda:1 ...
    """
    from proteus_lm.generate import Sampling
    from proteus_lm.generate import generate as generate_text
    from proteus_lm.run import Run as OpenRun

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, num_beams)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise ValueError("the prompt is empty and gives no token; give at least one character to go on from")
    _no_bars()
    opened = OpenRun.open(run)
    print(generate_text(opened.load_model(step, device=_device(device)), opened.tokenizer, text, sampling))


@app.command
def report(
    runs: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN ...")],
    /,
    *,
    out: Path = Path("runs/report"),
    context: Annotated[tuple[str, ...], tyro.conf.arg(metavar="LENGTH ...")] = ("1x", "2x"),
    max_tokens: int | None = 65536,
    split: Literal["validation", "train"] = "validation",
    bins: int = 16,
    batch_size: int = 16,
    sample_tokens: int = 200,
    seed: int = 0,
    device: Device = "auto",
) -> None:
    """Compare runs: tables, figures, which blocks of memory are open and how full, samples, and a verdict.

    Runs are measured alike, on the same tokens; the one with E = 1 is what the others are measured against.
    Example: proteus report runs/demo/titans-e1 runs/demo/titans-e8 --out runs/demo/report

    Args:
        runs: Folders that proteus train wrote.
        out: Folder for report.md, report.json and the figures.
        context: Lengths of the windows as multiples of the training context; the first gives the table's main numbers.
        max_tokens: Predict at most so many tokens for each length and run; None for the whole split.
        split: Which part of the runs' data.
        bins: Stretches of positions within the training context.
        batch_size: Windows read at once.
        sample_tokens: Length of each run's text sample; 0 for none.
        seed: Of the text samples.
        device: auto (CUDA where there is one), cpu, cuda, cuda:1 ...
    """
    from proteus_lm.report.build import build_report
    from proteus_lm.report.collect import Options

    _no_bars()
    names = [name for item in context for name in item.split(",") if name]
    options = Options(
        contexts=tuple(_multiple(name) for name in names),
        max_tokens=max_tokens,
        split=split,
        bins=bins,
        batch_size=batch_size,
        sample_tokens=sample_tokens,
        seed=seed,
        device=_device(device),
    )
    made_by = shlex.join(["proteus", *sys.argv[1:]])
    print(build_report(runs, out, options, made_by=made_by, progress=_progress("")).text)


@app.command
def doctor() -> int:
    """Versions, devices, which backend each operation would use and why, and a check of every operation on this machine.

    Each operation is compared with the token-by-token reference on each device: output, final state and gradients.
    The exit code is 1 when a check fails.
    """
    from proteus_lm.doctor import doctor as examine

    return examine()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or os.environ.get("PROTEUS_DEBUG", "") not in ("", "0")
    arguments = [a for a in arguments if a != "--debug"]
    try:
        code = app.cli(args=arguments, prog="proteus", description=_DESCRIPTION, config=(tyro.conf.FlagCreatePairsOff,))
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except SystemExit as leaving:
        if isinstance(getattr(leaving, "message", None), str):  # training that a signal stopped says where
            _say(leaving.message)  # pyright: ignore[reportAttributeAccessIssue]
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BrokenPipeError:
        # The reader of a pipe has gone: nobody is there to be told. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except USER_ERRORS as error:
        if debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, ValueError | OSError | ImportError | ArithmeticError):
            text = f"{type(error).__name__}: {text} (--debug shows where)"
        _say(f"error: {text}")
        return 2


_DESCRIPTION = """Train, study and run language models whose memory is opened on a schedule (Proteus).

First steps: make demo, or
  proteus prepare --source pydoc --tokenizer byte --out runs/demo/data
  proteus train recipes/demo-titans-e8.yaml --out runs/demo/titans-e8
  proteus eval runs/demo/titans-e8 --context 1x 2x
  proteus generate runs/demo/titans-e8 --prompt "A list is"

--debug on any command shows the traceback of an error."""


def _no_bars() -> None:
    """No progress bars of transformers, which counts files of a single model."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _say(text: str) -> None:
    print(f"proteus: {text}", file=sys.stderr)


def _path_or_name(text: str) -> str:
    return str(Path(text).expanduser()) if text.startswith("~") else text


def _device(name: str) -> str:
    """The device to use. Raises ValueError for one that PyTorch does not know or this machine does not have."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(
            f"device {name!r} cannot be used here ({first}); give auto, cpu, or a device of `proteus doctor`"
        ) from error
    return name


def _length(name: str, training: int) -> int | None:
    """Tokens of a window named 2x, 4096 or documents (None)."""
    if name == "documents":
        return None
    if name.isdigit():
        return int(name)
    return _multiple(name) * training


def _multiple(name: str) -> int:
    if not name.endswith("x") or not name[:-1].isdigit() or int(name[:-1]) < 1:
        raise ValueError(f"context {name!r} is not a length; give 1x, 2x, ... for multiples of the training context")
    return int(name[:-1])


def _progress(label: str) -> Callable[[int, int], None] | None:
    """A line on a terminal that counts tokens and is gone when they are done; None elsewhere."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\r" + " " * 60 + "\r" if done == total else ""
        print(f"\r{label}{done:,} of {total:,} tokens", end=end, file=sys.stderr, flush=True)

    return show


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


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


if __name__ == "__main__":
    sys.exit(main())
