"""The report's pictures: loss by position, training curves, and the memory. PNG, drawn without a display."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from proteus_lm.data.files import write_whole
from proteus_lm.report.collect import RunReport, same_data
from proteus_lm.report.tables import base_of, paired

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def new_figure(rows: int, columns: int, width: float, height: float, *, sharex: bool = False) -> tuple[Figure, np.ndarray]:
    """A figure of so many inches with its axes (rows, columns), on the Agg canvas whatever the machine has."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=sharex)


def check_drawing() -> None:
    """Raise ImportError, with the remedy, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("figures need matplotlib; install it with: pip install 'proteus-lm[plot]'")


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, whole or not at all. Raises OSError naming the path."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_whole(path, buffer.getvalue())


def draw_loss_by_position(runs: Sequence[RunReport], path: Path) -> None:
    """Loss at each position at the longest context, and under it the paired difference from the base run."""
    base = base_of(runs)
    others = [run for run in runs if run is not base and same_data(base, run) and run.longest.edges == base.longest.edges]
    figure, axes = new_figure(2 if others else 1, 1, 8, 7 if others else 4.5, sharex=True)
    for run, colour in zip(runs, colours(runs)):
        band(axes[0, 0], run.longest.edges, run.longest.bins, colour, f"{run.name} (E = {run.blocks})")
    for run, colour in zip(runs, colours(runs)):
        if run in others:
            pair = list(paired(base, run).values())[-1]
            band(axes[1, 0], pair.edges, pair.bins, colour, f"{run.name} minus {base.name}")
    for axis in axes[:, 0]:
        _mark_unlocks(axis, runs)
        if base.training_context < base.longest.edges[-1]:
            axis.axvline(base.training_context, color="black", linewidth=1)
    if base.training_context < base.longest.edges[-1]:
        note = {"xycoords": ("data", "axes fraction"), "xytext": (5, -4), "textcoords": "offset points"}
        axes[0, 0].annotate("end of the training context", (base.training_context, 1), va="top", fontsize=8, **note)
    axes[0, 0].set(ylabel="loss (nats per token)", title="Loss by position, mean ± standard error over documents")
    if others:
        axes[1, 0].axhline(0, color="black", linewidth=0.8)
        axes[1, 0].set(ylabel="difference (nats per token)\nabove 0: worse")
    axes[-1, 0].set(xlabel="position in the document (dotted: a block of memory opens)", xlim=(0, base.longest.edges[-1]))
    for axis in axes[:, 0]:
        axis.legend(fontsize=8)
    save(figure, path)


def draw_training(runs: Sequence[RunReport], path: Path) -> None:
    """Training loss of each run, every step faint and its running mean strong, with the validation losses as dots."""
    figure, axes = new_figure(1, 1, 8, 4.5)
    axis = axes[0, 0]
    for run, colour in zip(runs, colours(runs)):
        points = [(m["step"], m["loss"]) for m in run.metrics if m.get("loss") is not None]
        if points:
            steps, losses = np.array(points, dtype=float).T
            axis.plot(steps, losses, color=colour, alpha=0.2, linewidth=0.8)
            axis.plot(steps, running_mean(losses, max(1, len(losses) // 30)), color=colour, label=f"{run.name} (E = {run.blocks})")
        checks = [(m["step"], m["validation_loss"]) for m in run.metrics if m.get("validation_loss") is not None]
        if checks:
            axis.plot(*np.array(checks, dtype=float).T, "o", color=colour, markeredgecolor="white", label=f"{run.name}, validation")
    axis.set(xlabel="optimiser step", ylabel="loss (nats per token)", title="Training")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)
    save(figure, path)


def draw_memory(runs: Sequence[RunReport], path: Path) -> None:
    """One picture a layer: blocks upward, tokens read to the right, colour = norm beyond the initial value, grey = locked.

    Each run has a scale of its own: blocks of a cut memory hold less than the whole of another.
    """
    traced = [(run, run.memory) for run in runs if run.memory is not None]
    layers = max(trace.norms.shape[1] for _, trace in traced)
    figure, axes = new_figure(len(traced), layers, 1.5 + 4.2 * layers, 0.6 + 3.0 * len(traced))
    for (run, trace), row in zip(traced, axes):
        image = None
        for layer, axis in enumerate(row):
            if layer >= trace.norms.shape[1]:
                axis.axis("off")
                continue
            norms = np.ma.masked_array(
                trace.norms[:, layer].T, [[b >= opened for opened in trace.open] for b in range(len(trace.unlocks))]
            )
            axis.set_facecolor("#d9d9d9")
            image = axis.imshow(
                norms, origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=trace.norms.max(), interpolation="nearest"
            )
            axis.set_xticks(
                range(len(trace.tokens)), [str(t) for t in trace.tokens], rotation=90 if len(trace.tokens) > 8 else 0, fontsize=8
            )
            axis.set_yticks(range(0, len(trace.unlocks), max(1, len(trace.unlocks) // 8)))
            axis.set(title=f"{run.name}, layer {layer}", xlabel="tokens read", ylabel="block")
        if image is not None:
            figure.colorbar(image, ax=list(row), label="norm beyond initial value\n(grey: locked)")
    save(figure, path)


def colours(runs: Sequence[RunReport]) -> list[str]:
    """One colour a run, in order."""
    return [COLOURS[i % len(COLOURS)] for i in range(len(runs))]


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of each value and up to `width` - 1 before it; float (n,), as `values`."""
    total = np.concatenate(([0.0], np.cumsum(values)))
    start = np.maximum(np.arange(len(values)) - width + 1, 0)
    return (total[1:] - total[start]) / (np.arange(len(values)) + 1 - start)


def band(axis: Axes, edges: Sequence[int], bins: Sequence, colour: str, name: str) -> None:
    """A line through the middle of each bin with a band of one standard error."""
    middle = [(a + b - 1) / 2 for a, b in zip(edges, edges[1:])]
    mean = np.array([e.mean for e in bins])
    error = np.array([e.error or 0.0 for e in bins])
    axis.plot(middle, mean, color=colour, marker=".", linewidth=1.2, label=name)
    axis.fill_between(middle, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)


def _mark_unlocks(axis: Axes, runs: Sequence[RunReport]) -> None:
    """A dotted line where a block opens, in the colour of the run with the most blocks; runs often share schedules."""
    run, colour = max(zip(runs, colours(runs)), key=lambda pair: pair[0].blocks)
    for position in run.unlocks[1:]:
        axis.axvline(position, color=colour, linewidth=0.8, linestyle=":")
