"""From saved results of suites to a page in the paper's shape: Markdown, HTML, PNG, and beside each table its raw rows as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from proteus_lm.config import ProteusConfig
from proteus_lm.data.files import file_sha256, make_folder, write_json, write_text
from proteus_lm.evals.positions import paired_raw
from proteus_lm.evals.suite import SuiteResult
from proteus_lm.report.build import run_names
from proteus_lm.report.figures import check_drawing
from proteus_lm.report.html import to_html
from proteus_lm.report.paper import IN_WORDS, PAPER, Paper
from proteus_lm.report.suite_figures import draw_ablation, draw_by_length, draw_needles, draw_positions
from proteus_lm.report.suite_tables import TITLES, Entry, ablation_table, positions_tables, suite_tables
from proteus_lm.report.tables import quote
from proteus_lm.run import EVALS, RECIPE, TRAINER, Run, checkpoint_path

SIZES = ("760M", "1.3B")
PAGE = "paper"


@dataclass(frozen=True)
class PaperPage:
    """What was written."""

    folder: Path
    files: tuple[Path, ...]

    @property
    def text(self) -> str:
        """Where it is: for a terminal."""
        return "\n".join(f"{'Page' if path.stem == PAGE else 'Figure'}: {path}" for path in self.files if path.suffix != ".json")


def collect(runs: Sequence[Path], results: Sequence[Path] = (), names: Sequence[str] | None = None) -> list[Entry]:
    """The results in RUN/evals of each run, and in single files, by model.

    Args:
        runs: folders; one without results is left out.
        results: files that `proteus eval --suite` or `proteus ablate` wrote.
        names: what to call the runs; by default as `run_names`.

    Raises:
        FileNotFoundError: for a run or a file that is not there.
        ValueError: for a file that holds no results or not all that its figure needs, two files with one suite of one model, or
            a result in a run's folder that is of other weights than the run's.
    """
    entries = []
    for run in runs:
        if not run.is_dir():
            raise FileNotFoundError(f"no folder {run}; give the folder of a run, or single files of results with --results")
    for run, name in zip(runs, names or (run_names(runs) if runs else []), strict=True):
        files = [path for path in sorted((run / EVALS).glob("*.json")) if path.stem in TITLES]
        if files:
            entry = _entry(name, files)
            entries.append(replace(entry, marks=_marks(Run.open(run), entry)) if (run / RECIPE).is_file() else entry)
    by_model: dict[str, list[Path]] = {}
    for path in results:
        by_model.setdefault(SuiteResult.load(path).model, []).append(path)
    return entries + [_entry(name, files) for name, files in by_model.items()]


def _entry(name: str, files: Sequence[Path]) -> Entry:
    loaded = [(path, SuiteResult.load(path)) for path in files]
    for path, result in loaded:
        if result.suite not in TITLES:
            raise ValueError(f"{path} holds the suite {result.suite!r}, which no table shows; known: {', '.join(TITLES)}")
        if sum(other.suite == result.suite for _, other in loaded) > 1:
            raise ValueError(f"{name} has {result.suite} twice, once in {path}; give it once")
        _check_extra(path, result)
    return Entry(name, {result.suite: result for _, result in loaded}, {result.suite: path for path, result in loaded})


def _marks(run: Run, entry: Entry) -> dict[str, str]:
    """What to say of results that are not of the run's newest checkpoint, by suite.

    Raises:
        ValueError: naming the file, for a result of another model than the run's, or of other weights than it has at that step.
    """
    try:
        newest = run.checkpoint()
    except (FileNotFoundError, ValueError):  # none, or none that is whole: its results are all there is
        newest = None
    marks = {}
    for suite, result in entry.results.items():
        about = result.extra.get("provenance", {})
        made = about.get("checkpoint")
        if suite == "fig3":  # of many runs
            continue
        wrong = [] if newest is None else _other_fields(about.get("config", {}), newest)
        folder = None if made is None else checkpoint_path(run.path, made["step"])
        there = folder is not None and (folder / TRAINER).is_file()
        if made is not None and folder is not None and there and file_sha256(folder / TRAINER) != made["sha256"]:
            wrong.append(f"{TRAINER} of {folder} has another SHA-256 than the {made['sha256'][:12]} it was made of")
        if wrong:
            raise ValueError(
                f"{entry.files[suite]} is not of the model that is in {run.path} now ({'; '.join(wrong)}); run `{result.command}` "
                "again, or remove the file"
            )
        if folder is None:  # by a version that did not record it
            marks[suite] = f"made of {result.model}, weights not recorded"
        elif newest is None or folder.name != newest.name:
            marks[suite] = f"{folder.name}{'' if there else ', gone'}; newest: {'none' if newest is None else newest.name}"
    return marks


def _other_fields(config: Mapping[str, Any], checkpoint: Path) -> list[str]:
    """How the configuration in a result is not that of a checkpoint; over what length blocks open is an evaluation's choice."""
    own = ProteusConfig.from_pretrained(checkpoint)
    pairs = {name: (value, getattr(own, name, value)) for name, value in config.items() if name != "memory_policy"}
    return [f"{name} is {there!r} there and {here!r} here" for name, (there, here) in pairs.items() if there != here]


def _check_extra(path: Path, result: SuiteResult) -> None:
    """Raise ValueError, naming the file, where what a figure draws is not in it."""
    missing = [name for name in ("key", "seeds", "values", "paired") if result.suite == "fig3" and name not in result.extra]
    try:
        if missing:
            raise ValueError(f"no {', '.join(missing)} in extra")
        if result.suite == "fig4":
            paired_raw(result)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; run `{result.command}` again") from error


def build_page(entries: Sequence[Entry], out: Path, *, paper: Paper = PAPER, size: str = SIZES[0], made_by: str = "") -> PaperPage:
    """Write OUT/paper.md, paper.html, a picture for each figure, and for each suite its raw rows; each whole or not at all.

    Only what was run is shown. Each row holds the command that made it; what could not run says why in its cell.

    Args:
        size: which of the paper's two sizes stands beside our numbers in Table 1.
        made_by: the command line of the page itself.

    Raises:
        ValueError: without results, or for a size the paper does not have. ImportError: without matplotlib.
    """
    if not entries:
        raise ValueError("no results to show; run `proteus eval RUN --suite table1` (or another suite) first")
    if size not in SIZES:
        raise ValueError(f"size is {size!r}; the paper has {' and '.join(SIZES)}")
    check_drawing()
    make_folder(out)
    parts, files = ["# The paper's tables and figures", _preface(size)], []
    for suite, title in TITLES.items():
        mine = [entry.marked(suite) for entry in entries if suite in entry.results]
        if not mine:
            continue
        parts.append(f"## {title}")
        pictures = _draw(suite, mine, paper, out)
        files += pictures
        parts += [f"![{title}]({path.name})" for path in pictures]
        parts += [f"The paper in words: {IN_WORDS[suite]}"] if suite in IN_WORDS else []
        parts += _text(suite, mine, paper, size)
        raw = out / f"{suite}.json"
        write_json(raw, {"made_by": made_by, "paper": _values(suite, paper), "results": [e.results[suite].to_dict() for e in mine]})
        files.append(raw)
        parts.append(f"Raw rows, settings and versions: {raw.name}. {_provenance(suite, mine)}")
    parts.append(f"This page:\n\n{quote(made_by)}")
    page = "\n\n".join(parts) + "\n"
    write_text(out / f"{PAGE}.md", page)
    write_text(out / f"{PAGE}.html", to_html(page, out))
    return PaperPage(out, (out / f"{PAGE}.md", out / f"{PAGE}.html", *files))


def _preface(size: str) -> str:
    return (
        "Our cells: value ± standard error (n samples, in Figure 4 tokens; how many were truncated if any). Paper columns: what "
        f"the paper (Proteus, arXiv 2608.16844v1) prints for the model of the same kind, of {size} in Table 1; Tables 2 and 3 do "
        "not say their size. The paper's models are far larger and trained on other data than most of ours: the columns stand side "
        "by side to be read, not to be subtracted. A checkpoint behind a model's name says that the numbers are not of its run's "
        "newest one."
    )


def _text(suite: str, entries: Sequence[Entry], paper: Paper, size: str) -> list[str]:
    if suite == "fig3":
        parts = []
        for entry in entries:
            result = entry.results[suite]
            parts += [f"**{entry.name}**", ablation_table(result), f"`{result.command}`"]
        return parts
    return [positions_tables(entries, paper, size) if suite == "fig4" else suite_tables(suite, entries, paper, size)]


def _draw(suite: str, entries: Sequence[Entry], paper: Paper, out: Path) -> list[Path]:
    """The pictures of a suite that there is something to draw for."""
    path = out / f"{suite}.png"
    if suite == "fig3":
        paths = [out / f"fig3-{i}.png" if i else path for i in range(len(entries))]
        for entry, each in zip(entries, paths):
            draw_ablation(entry.results[suite], each)
        return paths
    if suite in ("fig2", "babilong") and any(s.value is not None for e in entries for s in e.results[suite].scores):
        draw_by_length(suite, entries, paper, path)
        return [path]
    drawers: dict[str, Callable[[], bool]] = {
        "fig4": lambda: draw_positions(entries, path),
        "table2": lambda: draw_needles(entries, path),
    }
    return [path] if suite in drawers and drawers[suite]() else []


def _values(suite: str, paper: Paper) -> list[dict[str, object]]:
    """The paper's values that belong to a suite, with their sources."""
    return [
        {"task": task, "metric": metric, **asdict(value)}
        for (in_suite, task, metric), values in paper.items()
        if in_suite == suite
        for value in values
    ]


def _provenance(suite: str, entries: Sequence[Entry]) -> str:
    """Versions behind the results, once where all agree."""
    found = {}
    for entry in entries:
        versions = entry.results[suite].extra.get("provenance", {}).get("versions", {})
        found.setdefault(", ".join(f"{name} {version}" for name, version in versions.items()), []).append(entry.name)
    return " ".join(f"{', '.join(names)}: {text}." for text, names in found.items() if text)
