"""What a run reports while it trains: a line a step in metrics.jsonl, TensorBoard scalars, and the console."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from proteus_lm.run import METRICS, TENSORBOARD, read_metrics


class Metrics:
    """RUN/metrics.jsonl, appended a line a step, and RUN/tensorboard.

    On a resume the file is first cut back to `step`, so that no step stands twice.

    Args:
        run: the run directory. step: steps done; lines after it are dropped.
        tensorboard: also write scalars of every number.
        wandb: also send them to this project of Weights & Biases.

    Raises:
        OSError: naming the file, when it cannot be written.
        ValueError: when `wandb` is asked for and not installed.
    """

    def __init__(self, run: Path, step: int, *, tensorboard: bool, wandb: str | None = None) -> None:
        self._wandb = None if wandb is None else _open_wandb(run, wandb)
        self._path = run / METRICS
        _cut_back(self._path, step)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run is
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run / TENSORBOARD), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record (it has a "step"); numbers that are not finite become null, as JSON has none."""
        try:
            self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"could not write {self._path} ({error}); make space and run the same command again") from error
        if self._board is not None:
            for name, value in _scalars(record).items():
                self._board.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(_scalars(record), step=record["step"])

    def sync(self) -> None:
        """Make the lines so far last: before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """Without the traceback that TensorBoard's thread prints of a write that failed: `Metrics` raises the same error."""
    shown = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__module__.startswith("tensorboard.")):
            shown(failure)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = shown


def require_wandb() -> Any:
    """The package Weights & Biases. Raises ValueError when it is not installed."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "train.wandb is set and the package wandb is not installed; pip install 'proteus-lm[wandb]', or set train.wandb to null"
        ) from error
    return wandb


def _open_wandb(run: Path, project: str) -> Any:
    return require_wandb().init(project=project, name=run.name, id=run.name, dir=str(run), resume="allow")


class Screen:
    """The console of a run: a progress bar on a terminal, plain lines elsewhere, nothing when `quiet`.

    Args:
        steps: in all. quiet: for the processes that are not the first.
    """

    def __init__(self, steps: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._steps = steps
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("step"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("train", total=steps, line="")
            self._bar.start()

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, markup=False)

    def step(self, record: dict[str, Any], *, line: bool) -> None:
        """One step: moves the bar, or prints a line when `line` (validation lines are always printed)."""
        text = summary(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], line=text)
        if "validation_loss" in record or (line and self._bar is None):
            self.say(f"step {record['step']:>{len(str(self._steps))}}/{self._steps}  {text}")

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()


def summary(record: dict[str, Any]) -> str:
    """A record as one short line: loss, learning rate, gradient norm, speed, validation."""
    parts = [f"loss {record['loss']:.4f}", f"lr {record['lr']:.2e}", f"grad {record['gradient_norm']:.2f}"]
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
    if "peak_memory_bytes" in record:
        parts.append(f"{record['peak_memory_bytes'] / 2**30:.1f} GiB")
    if record.get("skipped"):
        parts.append(f"skipped {record['skipped']}")
    if "validation_loss" in record:
        parts.append(f"validation {record['validation_loss']:.4f}")
    return "  ".join(parts)


def perplexity(loss: float) -> float:
    """exp(loss in nats a token), infinite where fp64 cannot hold it."""
    return math.inf if loss >= 700 else math.exp(loss)


def _cut_back(path: Path, step: int) -> None:
    """Drop the records after `step` and a line cut short; atomic."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    temporary.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    """Numbers of a record by TensorBoard name; memory_norm (layers x blocks) as memory_norm/layer-L/block-E, others by layer."""
    found = {name: float(value) for name, value in record.items() if isinstance(value, int | float) and name != "step"}
    for layer, norms in enumerate(record.get("memory_norm", [])):
        found |= {f"memory_norm/layer-{layer}/block-{block}": norm for block, norm in enumerate(norms)}
    found |= {f"inner_gradient_norm/layer-{layer}": norm for layer, norm in enumerate(record.get("inner_gradient_norm", []))}
    return found
