"""The paper's figures for our models: accuracy by length, the ablation, perplexity by position; and where needles are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from proteus_lm.evals.positions import paired_raw
from proteus_lm.evals.suite import SuiteResult
from proteus_lm.report.figures import COLOURS, band, new_figure, save
from proteus_lm.report.paper import Paper, paper_model
from proteus_lm.report.suite_tables import Entry, position_pairs

DEPTH_BINS = 10
_GREY = "#d9d9d9"


def draw_by_length(suite: str, entries: Sequence[Entry], paper: Paper, path: Path) -> None:
    """One picture a task: score against context length with one standard error; dashed: the paper's model, where it is given."""
    with_suite = [entry for entry in entries if suite in entry.results]
    tasks = list(dict.fromkeys(s.task for e in with_suite for s in e.results[suite].scores if s.value is not None))
    rows = -(-len(tasks) // 3)
    figure, axes = new_figure(rows, min(3, len(tasks)), 4.2 * min(3, len(tasks)) + 1, 3.4 * rows)
    for axis in axes.flat[len(tasks) :]:
        axis.axis("off")
    for axis, task in zip(axes.flat, tasks):
        for entry, colour in zip(with_suite, _colours(len(with_suite))):
            scores = [s for s in entry.results[suite].scores if s.task == task and s.value is not None and s.metric.isdigit()]
            scores.sort(key=lambda s: int(s.metric))
            if scores:
                errors = [s.stderr or 0.0 for s in scores]
                lengths = [int(s.metric) for s in scores]
                axis.errorbar(
                    lengths, [s.value or 0.0 for s in scores], errors, color=colour, marker="o", capsize=3, label=entry.name
                )
            model = paper_model(entry.config)
            theirs = sorted(
                (int(metric), value.value, value.read_off)
                for (in_suite, in_task, metric), values in paper.items()
                if (in_suite, in_task) == (suite, task) and metric.isdigit()
                for value in values
                if value.model == model
            )
            if theirs:
                name = f"paper: {model}" + (" (read off)" if any(point[2] for point in theirs) else "")
                axis.plot([p[0] for p in theirs], [p[1] for p in theirs], "--", color=colour, linewidth=1, label=name)
        axis.set(title=task, xlabel="context (tokens)", ylabel="percent", ylim=(-3, 103))
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.flat[0].legend(fontsize=7)
    save(figure, path)


def draw_positions(entries: Sequence[Entry], path: Path) -> bool:
    """Figure 4: loss by position with one standard error over documents, and the paired difference. False: nothing to draw."""
    there = [(e, raw) for e in entries if "fig4" in e.results and (raw := paired_raw(e.results["fig4"])) is not None]
    if not there:
        return False
    base, pairs, _ = position_pairs([entry for entry, _ in there])
    figure, axes = new_figure(2 if pairs else 1, 1, 8, 7 if pairs else 4.5, sharex=True)
    for (entry, raw), colour in zip(there, _colours(len(there))):
        band(axes[0, 0], raw.edges, raw.bins, colour, f"{entry.name} (E = {entry.blocks})")
        if entry.name in pairs and base is not None:
            pair = pairs[entry.name]
            band(axes[1, 0], pair.edges, pair.bins, colour, f"{entry.name} minus {base.name}")
    axes[0, 0].set(
        ylabel="loss (nats per token)", title="Loss by position in whole documents, mean ± standard error over documents"
    )
    if pairs:
        axes[1, 0].axhline(0, color="black", linewidth=0.8)
        axes[1, 0].set(ylabel="difference (nats per token)\nbelow 0: better")
    axes[-1, 0].set(xlabel="position in the document")
    axes[-1, 0].set_xscale("symlog", base=2, linthresh=256)
    axes[-1, 0].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for axis in axes[:, 0]:
        axis.legend(fontsize=8)
    save(figure, path)
    return True


def draw_ablation(result: SuiteResult, path: Path) -> None:
    """Figure 3: loss against the values, each seed as a dot and the mean with its 95% interval, and the paired difference below."""
    extra = result.extra
    values, paired = extra["values"], {row["value"]: row for row in extra["paired"]}
    places, labels = range(len(values)), [str(row["value"]) for row in values]
    figure, axes = new_figure(2 if paired else 1, 1, 7, 7 if paired else 4, sharex=True)
    axis = axes[0, 0]
    for place, row in zip(places, values):
        axis.plot([place] * len(row["losses"]), row["losses"], ".", color="#999999")
    halves = [row["half_width"] or 0.0 for row in values]
    axis.errorbar(places, [row["mean"] for row in values], halves, color=COLOURS[0], marker="o", capsize=4)
    axis.set(
        ylabel="validation loss (nats per token)", title=f"{extra['key']}: mean and 95% interval over {len(extra['seeds'])} seeds"
    )
    if paired:
        below = axes[1, 0]
        shown = [(place, paired[row["value"]]) for place, row in zip(places, values) if row["value"] in paired]
        errors = [row["half_width"] or 0.0 for _, row in shown]
        below.errorbar(
            [p for p, _ in shown], [row["mean"] for _, row in shown], errors, color=COLOURS[1], marker="o", capsize=4, ls=""
        )
        below.axhline(0, color="black", linewidth=0.8)
        below.set(ylabel=f"minus {labels[0]}, paired by seed\nbelow 0: better")
    axes[-1, 0].set_xticks(list(places), labels)
    axes[-1, 0].set(xlabel=extra["key"])
    save(figure, path)


def needle_hits(samples: Sequence[Mapping[str, Any]], task: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Lengths, share found and needles behind it by depth and length: float64 and int64 (DEPTH_BINS, lengths); NaN where none was.

    A needle is found when its value stands in the answer, whatever the case (RULER's string_match_all).
    """
    mine = [sample for sample in samples if sample["task"] == task and sample.get("depths")]
    lengths = sorted({int(sample["context"]) for sample in mine})
    found, count = np.zeros((DEPTH_BINS, len(lengths))), np.zeros((DEPTH_BINS, len(lengths)), dtype=np.int64)
    for sample in mine:
        column = lengths.index(int(sample["context"]))
        for depth, value in zip(sample["depths"], sample["expected"]):
            row = min(DEPTH_BINS - 1, int(float(depth) * DEPTH_BINS / 100))
            count[row, column] += 1
            found[row, column] += str(value).lower() in str(sample["got"]).lower()
    return lengths, np.where(count > 0, found / np.maximum(count, 1), np.nan), count


def draw_needles(entries: Sequence[Entry], path: Path) -> bool:
    """Heat maps: a row a model, a column a task; depth downward, length to the right. False where no sample has a depth."""
    with_suite = [e for e in entries if "table2" in e.results and e.results["table2"].extra.get("samples")]
    tasks = list(dict.fromkeys(s["task"] for e in with_suite for s in e.results["table2"].extra["samples"] if s.get("depths")))
    if not tasks:
        return False
    figure, axes = new_figure(len(with_suite), len(tasks), 2.4 * len(tasks) + 1.5, 2.6 * len(with_suite) + 0.5)
    image = None
    for entry, row in zip(with_suite, axes):
        for task, axis in zip(tasks, row):
            lengths, share, _ = needle_hits(entry.results["table2"].extra["samples"], task)
            axis.set_facecolor(_GREY)
            if lengths:
                masked = np.ma.masked_invalid(100 * share)
                image = axis.imshow(masked, aspect="auto", cmap="viridis", vmin=0, vmax=100, interpolation="nearest")
            axis.set_xticks(range(len(lengths)), [f"{n / 1024:g}K" for n in lengths], fontsize=8)
            axis.set_yticks([0, DEPTH_BINS // 2, DEPTH_BINS - 1], ["0%", "50%", "90%"], fontsize=8)
            axis.set_title(task, fontsize=8)
        row[0].set_ylabel(f"{entry.name}\ndepth", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=axes.ravel().tolist(), label="needles found, percent (grey: none placed)")
    save(figure, path)
    return True


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
