"""`proteus inspect`: what the memory of a run holds and does by position and block, what it retains; tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from proteus_lm.data.files import make_folder, write_json, write_text
from proteus_lm.data.synthesize import TaskSpec, task_of
from proteus_lm.evals.diagnostics import AGES, MemoryProfile, Recall, Retention, measure_retention, profile_memory, task_recall
from proteus_lm.evals.diagnostics.blocks import STEPS
from proteus_lm.evals.provenance import model_config, versions
from proteus_lm.report.figures import check_drawing, new_figure, save
from proteus_lm.report.html import to_html
from proteus_lm.report.memory import look_points
from proteus_lm.report.tables import markdown_table, quote
from proteus_lm.run import Run

_WHAT = {
    "norm": ("Norm", "Frobenius norm of what a block holds beyond its initial value"),
    "rank": ("Effective rank", "exp of the entropy of the singular values' shares, mean over heads"),
    "write": ("Write strength", f"norm of the change of a block by one token, mean over {STEPS} tokens"),
    "read": (
        "Read strength",
        "change of the mixer's output at the next token if the block were empty, over the output's norm",
    ),
}
_SHOWN = 8  # columns of a table of positions


@dataclass(frozen=True)
class Look:
    """How to look.

    Args:
        step: checkpoint, None for the newest. split: of the run's data.
        length: tokens to read; None: twice the training context, or what the longest document holds.
        windows: sequences behind each mean. pairs, looks, seed: of the retention.
        rows: new rows of a synthetic task. task_length: their tokens; None: as it was trained. device: where the model runs.

    Raises:
        ValueError: for a number below 1.
    """

    step: int | None = None
    split: str = "validation"
    length: int | None = None
    windows: int = 4
    pairs: int = 16
    looks: int = 8
    seed: int = 0
    rows: int = 64
    task_length: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("length", "windows", "pairs", "looks", "rows", "task_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class Inspection:
    """What was found and written."""

    folder: Path
    text: str
    raw: dict[str, Any]


def inspect_run(path: Path, out: Path, look: Look, *, made_by: str = "") -> Inspection:
    """Look into a run's memory and write OUT/inspect.md, .html, .json and the pictures, each whole or not at all.

    Raises:
        FileNotFoundError: for a run that is not there. ValueError: for a length no document holds, or data of another tokenizer.
        ImportError: without matplotlib.
    """
    run = Run.open(path)
    check_drawing()
    checkpoint, dataset = run.checkpoint(look.step), run.dataset(look.split)
    make_folder(out)
    model: Any = run.load_model(look.step, device=look.device)
    schedule = model.config.schedule
    length = look.length or min(2 * run.recipe.data.context, dataset.longest_document - 2)
    points = _spaced(look_points([schedule], length))
    profile = profile_memory(model, dataset, schedule, points, windows=look.windows) if points else None
    profile = profile if profile is not None and profile.layers else None
    spec = task_of(run.recipe.data.path)
    retention, why = _retention(model, dataset, length, look, spec)
    if spec is not None and look.task_length is not None:
        spec = replace(spec, length=look.task_length)
    recall = None if spec is None else task_recall(model, spec.fresh(look.rows))
    pictures = _draw(profile, retention, out)
    parts = [f"# The memory of {path.resolve().name}", f"`{checkpoint}`, {length:,} tokens of the {look.split} split."]
    parts += _profile_text(profile) + _retention_text(retention, why) + _recall_text(recall)
    raw = {
        "made_by": made_by,
        "look": asdict(look) | {"length": length},
        "checkpoint": str(checkpoint),
        "versions": versions(),
        "config": model_config(model),
        "profile": profile and profile.to_dict(),
        "retention": retention and retention.to_dict(),
        "task": None if spec is None or recall is None else {"task": asdict(spec), "answers": recall.to_dict()},
    }
    shown = [*parts, *(f"![{caption}]({name})" for caption, name in pictures.items()), f"Made by:\n\n{quote(made_by)}"]
    page = "\n\n".join(shown) + "\n"
    write_text(out / "inspect.md", page)
    write_text(out / "inspect.html", to_html(page, out))
    write_json(out / "inspect.json", raw)
    files = [f"Report: {out / 'inspect.md'}", *(f"Figure: {out / name}" for name in pictures.values())]
    return Inspection(out, "\n\n".join([*parts, "\n".join(files)]), raw)


def _spaced(points: Sequence[int]) -> tuple[int, ...]:
    """Points far enough apart for `profile_memory`, the last one kept."""
    kept: list[int] = []
    for point in points:
        if point - (kept[-1] if kept else 0) >= STEPS:
            kept.append(point)
    return tuple(kept)


def _retention(model: Any, dataset: Any, length: int, look: Look, spec: TaskSpec | None) -> tuple[Retention | None, str]:
    """What is retained, or why it could not be measured at the default length (an explicit one raises)."""
    sizes = {"length": length, "pairs": look.pairs, "looks": look.looks, "rows": look.windows, "seed": look.seed}
    try:
        return measure_retention(model, dataset, **sizes, names=None if spec is None else spec.names), ""
    except ValueError as error:
        if look.length is not None:
            raise
        return None, str(error)


def _profile_text(profile: MemoryProfile | None) -> list[str]:
    if profile is None:
        return ["## By position and block", "This model keeps no memory in blocks."]
    points = _columns(len(profile.tokens))
    parts = ["## By position and block", f"Means over {profile.windows} windows and over the layers with a memory."]
    for name, (title, what) in _WHAT.items():
        values = getattr(profile, name)[:, list(profile.layers)].mean(1)  # (points, blocks)
        header = ["block", "opens at position", *(f"after {profile.tokens[i]:,}" for i in points)]
        rows = [
            [block, unlock, *(_cell(values[i, block], block < profile.open[i]) for i in points)]
            for block, unlock in enumerate(profile.unlocks)
        ]
        parts += [f"**{title}**: {what}.", markdown_table(header, rows)]
    return parts


def _cell(value: float, opened: bool) -> str:
    if opened:
        return f"{value:.4g}"
    return "locked" if value == 0 else f"locked, but {value:.3g}"


def _columns(count: int) -> list[int]:
    """Which of many points a table shows: evenly spread, the last among them."""
    return list(range(count)) if count <= _SHOWN else sorted({round(i * (count - 1) / (_SHOWN - 1)) for i in range(_SHOWN)})


def _retention_text(retention: Retention | None, why: str) -> list[str]:
    parts = ["## What is retained"]
    if retention is None:
        return [*parts, f"Not measured: {why}."]
    rows = []
    for first, last, gain, error, right, count in retention.by_age(_age_edges(retention)):
        rows.append(
            (f"{first:,}–{last - 1:,}", f"{gain:+.3f}" + ("" if error is None else f" ± {error:.3f}"), f"{right:.2f}", count)
        )
    chance = retention.chance
    return [
        *parts,
        "Gain: log p(value | its key) minus log p(value | a key never written), nats, ± standard error over windows; above 0, the "
        "pair is remembered. Right: its value is the likeliest of those written so far "
        f"(by chance {chance.min():.2f} to {chance.max():.2f}).",
        markdown_table(("tokens read since", "gain (nats)", "right", "pairs asked"), rows),
    ]


def _age_edges(retention: Retention) -> tuple[int, ...]:
    return (*(edge for edge in AGES if edge < max(retention.asked)), max(retention.asked) + 1)


def _recall_text(recall: Recall | None) -> list[str]:
    if recall is None:
        return []
    whole = recall.accuracy
    parts = ["## Its task on new rows", f"Right: {_share(whole.mean, whole.error)} of {len(recall.rows):,} questions."]
    ages = [(f"{a:,}–{b - 1:,}", _share(e.mean, e.error), f"{e.tokens:,}") for a, b, e in recall.by_age()]
    places = [(f"{a:,}–{b - 1:,}", _share(e.mean, e.error), f"{e.tokens:,}") for a, b, e in recall.by_written()]
    parts.append(markdown_table(("tokens since the key stood last", "right", "questions"), ages))
    return [*parts, markdown_table(("where the key stood last", "right", "questions"), places)]


def _share(mean: float, error: float | None) -> str:
    return f"{100 * mean:.1f}%" + ("" if error is None else f" ± {100 * error:.1f}")


def _draw(profile: MemoryProfile | None, retention: Retention | None, out: Path) -> dict[str, str]:
    """The pictures there is something for: file name by caption."""
    found = {}
    if profile is not None:
        draw_profile(profile, out / "blocks.png")
        found["By position and block"] = "blocks.png"
    if retention is not None:
        draw_retention(retention, out / "retention.png")
        found["What is retained"] = "retention.png"
    return found


def draw_profile(profile: MemoryProfile, path: Path) -> None:
    """A row a quantity, a column a layer with a memory: blocks upward, tokens read to the right, grey = locked."""
    figure, axes = new_figure(len(_WHAT), len(profile.layers), 1.6 + 3.6 * len(profile.layers), 2.6 * len(_WHAT))
    locked = np.array([[block >= opened for opened in profile.open] for block in range(len(profile.unlocks))])
    for (name, (title, _)), row in zip(_WHAT.items(), axes):
        values = getattr(profile, name)
        image = None
        for layer, axis in zip(profile.layers, row):
            axis.set_facecolor("#d9d9d9")
            shown = np.ma.masked_array(values[:, layer].T, locked)
            top = max(values.max(), 1e-12)
            image = axis.imshow(shown, origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
            axis.set_xticks(range(len(profile.tokens)), [str(t) for t in profile.tokens], rotation=90, fontsize=7)
            axis.set_title(f"{title}, layer {layer}", fontsize=9)
            axis.set(ylabel="block")
        if image is not None:
            figure.colorbar(image, ax=list(row))
    for axis in axes[-1]:
        axis.set(xlabel="tokens read")
    save(figure, path)


def draw_retention(retention: Retention, path: Path) -> None:
    """Gain in nats: pairs upward by when they were written, to the right when they were asked for; grey = not yet written."""
    figure, axes = new_figure(1, 1, 7, 4.5)
    axis, gain = axes[0, 0], retention.mean_gain()
    axis.set_facecolor("#d9d9d9")
    top = max(float(np.nanmax(np.abs(gain))), 1e-12)
    image = axis.imshow(
        np.ma.masked_invalid(gain), origin="lower", aspect="auto", cmap="RdBu", vmin=-top, vmax=top, interpolation="nearest"
    )
    axis.set_xticks(range(len(retention.asked)), [f"{n:,}" for n in retention.asked], rotation=45, fontsize=8)
    axis.set_yticks(range(len(retention.written)), [f"{n:,}" for n in retention.written], fontsize=8)
    axis.set(xlabel="asked after so many tokens", ylabel="written at", title="Gain of a value's log probability by its key (nats)")
    figure.colorbar(image, ax=axis)
    save(figure, path)
