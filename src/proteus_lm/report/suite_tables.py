"""The paper's tables with our models as rows: value ± standard error, samples, what was cut, the paper's value, the command."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from proteus_lm.evals import PairedDifference, compare
from proteus_lm.evals.positions import paired_raw
from proteus_lm.evals.suite import Score, SuiteResult
from proteus_lm.report.paper import ANY_METRIC, AVERAGE, TABLE1, TABLE2, TABLE3, Paper, PaperValue, find_value, paper_model
from proteus_lm.report.tables import markdown_table, signed

TITLES = {
    "table1": "Table 1: language modelling and commonsense reasoning",
    "table2": "Table 2: needles in a haystack",
    "babilong": "BABILong (not in the paper)",
    "fig2": "Figure 2: recall by context length",
    "table3": "Table 3: LongBench",
    "fig3": "Figure 3: ablation",
    "fig4": "Figure 4: perplexity by position",
}
"""In the paper's order; what is not run has no place in a report."""
_NAMES = {
    "wikitext": "Wiki.",
    "lambada_openai": "LMB.",
    "piqa": "PIQA",
    "hellaswag": "Hella.",
    "winogrande": "Wino.",
    "arc_easy": "ARC-e",
    "arc_challenge": "ARC-c",
    "social_iqa": "SIQA",
    "boolq": "BoolQ",
    "niah_single_1": "S-NIAH-1",
    "niah_single_2": "S-NIAH-2",
    "niah_single_3": "S-NIAH-3",
    "niah_multikey_1": "MK-NIAH-1",
    "niah_multikey_2": "MK-NIAH-2 (line retrieval)",
    "niah_multiquery": "MQ-NIAH",
    "niah_multivalue": "MV-NIAH",
    "narrativeqa": "Narrative",
    "qasper": "Qasper",
    "multifieldqa_en": "MultiField",
    "hotpotqa": "Hotpot",
    "2wikimqa": "2WikiMulti",
    "musique": "Musique",
}
_METRICS = {"word_perplexity": "ppl ↓", "perplexity": "ppl ↓", "acc": "acc ↑", "acc_norm": "acc_n ↑"}
_BY_LENGTH = ("table2", "babilong", "fig2")
_TASKS_A_TABLE = 3


@dataclass(frozen=True)
class Entry:
    """One model with the results of its suites.

    Args:
        name: what it is called in tables.
        results: by suite.
        files: where each was saved.
        marks: by suite, what a reader has to know of the checkpoint behind a result; none where it is the run's newest.
    """

    name: str
    results: Mapping[str, SuiteResult]
    files: Mapping[str, Path] = field(default_factory=dict)
    marks: Mapping[str, str] = field(default_factory=dict)

    def marked(self, suite: str) -> Entry:
        """The same with the mark of a suite behind its name, as tables and figures of that suite show it."""
        return replace(self, name=f"{self.name} ({self.marks[suite]})") if suite in self.marks else self

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's configuration, from any of its results; empty where none says it."""
        provenances = (result.extra.get("provenance", {}) for result in self.results.values())
        return next((about["config"] for about in provenances if "config" in about), {})

    @property
    def blocks(self) -> int:
        """E, 1 where nothing is known."""
        return int(self.config.get("memory_blocks") or 1)


Column = tuple[str, str]
"""(task, metric) of a score."""


def columns(suite: str, entries: Sequence[Entry]) -> list[Column]:
    """What a table shows: the paper's columns first, in its order, then what else was run."""
    found = [(s.task, s.metric) for e in entries if suite in e.results for s in e.results[suite].scores]
    first: list[Column] = list(TABLE1) if suite == "table1" else []
    tasks = {"table2": TABLE2, "table3": TABLE3}.get(suite, ())
    for task in (*tasks, *(task for task, _ in found)):
        rows = [column for column in found if column[0] == task]
        rows = rows or ([(task, ANY_METRIC)] if suite == "table3" else [])
        first += sorted(set(rows) - set(first), key=lambda column: _length_of(column[1])) if suite in _BY_LENGTH else rows
    return list(dict.fromkeys(first))


def suite_tables(suite: str, entries: Sequence[Entry], paper: Paper, size: str) -> str:
    """The tables of one suite in Markdown: models as rows, for each task our cell and the paper's, the command at the end."""
    with_suite = [entry for entry in entries if suite in entry.results]
    shown = columns(suite, with_suite)
    parts = []
    for group in _groups(suite, shown):
        header = ["model"]
        for task, metric in group:
            header += [_heading(suite, task, metric), "paper"]
        averaged = suite in ("table1", "table3")
        header += ["average ↑", "paper"] if averaged else []
        rows = []
        for entry in with_suite:
            result, model = entry.results[suite], paper_model(entry.config)
            cells: list[object] = [entry.name]
            for task, metric in group:
                cells += [
                    cell(_score(result, task, metric)),
                    paper_cell(find_value(paper, suite, task, metric, model, size), metric),
                ]
            if averaged:
                metric = "acc" if suite == "table1" else ANY_METRIC
                cells += [average(suite, result), paper_cell(find_value(paper, suite, AVERAGE, metric, model, size), AVERAGE)]
            rows.append([*cells, f"`{result.command}`"])
        parts.append(markdown_table([*header, "command"], rows))
    return "\n\n".join(parts)


def cell(score: Score | None) -> str:
    """value ± standard error, samples, and what was cut; or that it was not run, and why."""
    if score is None:
        return "not run: not asked for"
    if score.value is None:
        return f"not run: {score.note or 'no reason given'}"
    error = "" if score.stderr is None else f" ± {_number(score, score.stderr)}"
    cut = f", {score.truncated:,} truncated" if score.truncated else ""
    return f"{_number(score, score.value)}{error} (n {score.count:,}{cut})"


def paper_cell(found: PaperValue | str, metric: str) -> str:
    """The paper's number as it prints it, or marked as read off a plot; or why there is none."""
    if isinstance(found, str):
        return found
    if found.read_off:
        return f"{found.value:g} (read off)"
    return f"{found.value:.2f}" if metric == AVERAGE or "perplexity" in metric else f"{found.value:.1f}"


def average(suite: str, result: SuiteResult) -> str:
    """Mean of the eight accuracies of Table 1, or of the six tasks of Table 3, its error from theirs; or what it lacks."""
    wanted = [c for c in TABLE1 if "acc" in c[1]] if suite == "table1" else [(task, ANY_METRIC) for task in TABLE3]
    scores = [_score(result, task, metric) for task, metric in wanted]
    values = [score.value for score in scores if score is not None and score.value is not None]
    if len(values) < len(wanted):
        return f"not run: {len(values)} of {len(wanted)} scores are there"
    errors = [score.stderr for score in scores if score is not None and score.stderr is not None]
    error = f" ± {math.hypot(*errors) / len(wanted):.2f}" if len(errors) == len(wanted) else ""
    return f"{sum(values) / len(values):.2f}{error}"


def describe(result: SuiteResult) -> str:
    """One suite of one model for a terminal: a line a score."""
    rows = []
    for score in result.scores:
        value = f"not run: {score.note}" if score.value is None else cell(score).partition(" (n")[0]
        rows.append((score.task, score.metric, value, f"{score.count:,}", f"{score.truncated:,}"))
    return f"{result.suite} of {result.model}\n" + markdown_table(("task", "metric", "value", "n", "truncated"), rows)


def positions_tables(entries: Sequence[Entry], paper: Paper, size: str) -> str:
    """Figure 4 as tables: perplexity by position, and the paired difference in loss from the base model."""
    with_suite = [entry for entry in entries if "fig4" in entry.results]
    base, pairs, refused = position_pairs(with_suite)
    header = ["positions"]
    for entry in with_suite:
        header += [entry.name, "paper"]
    header += [f"{name} minus {base.name} (nats per token)" for name in pairs] if base else []
    rows = []
    for task, metric in columns("fig4", with_suite):
        cells: list[object] = [task]
        for entry in with_suite:
            model = paper_model(entry.config)
            score = _score(entry.results["fig4"], task, metric)
            cells += [cell(score), paper_cell(find_value(paper, "fig4", task, metric, model, size), metric)]
        cells += [_difference(pair, task) for pair in pairs.values()]
        rows.append(cells)
    lines = [markdown_table(header, rows)]
    lines += [f"- {pair.verdict()}" for pair in pairs.values()] + [f"- {why}" for why in refused]
    commands = "\n".join(f"- {entry.name}: `{entry.results['fig4'].command}`" for entry in with_suite)
    return "\n\n".join([lines[0], "\n".join(lines[1:]), commands] if lines[1:] else [lines[0], commands])


def position_pairs(entries: Sequence[Entry]) -> tuple[Entry | None, dict[str, PairedDifference], list[str]]:
    """The base of Figure 4 (the first with E = 1, or the first), the paired differences from it, and why others have none."""
    there = [(entry, raw) for entry in entries if (raw := paired_raw(entry.results["fig4"])) is not None]
    if not there:
        return None, {}, []
    base, first = next((pair for pair in there if pair[0].blocks == 1), there[0])
    pairs, refused = {}, []
    for entry, raw in there:
        if entry is not base:
            try:
                pairs[entry.name] = compare(first, raw, names=(base.name, entry.name))
            except ValueError as error:
                refused.append(f"{entry.name} is not paired with {base.name}: {error}")
    return base, pairs, refused


def ablation_table(result: SuiteResult) -> str:
    """Figure 3 as a table: loss and perplexity over seeds, and the difference from the first value, paired by seed."""
    key, paired = result.extra["key"], {row["value"]: row for row in result.extra["paired"]}
    rows = []
    for row in result.extra["values"]:
        pair = paired.get(row["value"])
        difference = "base" if pair is None else interval(pair["mean"], pair["half_width"], signed=True)
        perplexity = f"{math.exp(row['mean']):.3f}" if row["mean"] < 700 else "inf"
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
        verdict = "" if pair is None else pair["verdict"]
        rows.append((row["value"], interval(row["mean"], row["half_width"]), perplexity, difference, verdict, losses))
    header = (f"`{key}`", "loss (nats per token)", "perplexity", f"minus {key}={result.extra['values'][0]['value']}", "verdict")
    return markdown_table((*header, f"loss by seed ({', '.join(map(str, result.extra['seeds']))})"), rows)


def interval(mean: float, half_width: float | None, *, signed: bool = False) -> str:
    """A mean with its 95% interval over seeds; a single seed gives none, and that is said."""
    text = f"{mean:+.4f}" if signed else f"{mean:.4f}"
    return f"{text} (one seed: no interval)" if half_width is None else f"{text} ± {half_width:.4f}"


def _difference(pair: PairedDifference, task: str) -> str:
    if task == "all":
        return signed(pair.whole)
    index = [f"{a}-{b - 1}" for a, b in zip(pair.edges, pair.edges[1:])]
    return signed(pair.bins[index.index(task)]) if task in index else "–"


def _score(result: SuiteResult, task: str, metric: str) -> Score | None:
    """The score of a column; `ANY_METRIC` takes the task's first."""
    return next((s for s in result.scores if s.task == task and metric in (ANY_METRIC, s.metric)), None)


def _groups(suite: str, shown: Sequence[Column]) -> Iterable[list[Column]]:
    """Columns table by table: three tasks each where each has several lengths, as the paper does; else all together."""
    if suite not in _BY_LENGTH:
        return [list(shown)]
    tasks = list(dict.fromkeys(task for task, _ in shown))
    return [
        [column for column in shown if column[0] in tasks[i : i + _TASKS_A_TABLE]] for i in range(0, len(tasks), _TASKS_A_TABLE)
    ]


def _heading(suite: str, task: str, metric: str) -> str:
    name = _NAMES.get(task, task)
    length = _length_of(metric)
    if suite in _BY_LENGTH and length:
        return f"{name} {length // 1024}K" if length % 1024 == 0 else f"{name} {length}"
    return f"{name} {_METRICS.get(metric, metric)}".strip()


def _length_of(metric: str) -> int:
    """The length that stands in a metric's place; 0 for none."""
    return int(metric) if metric.isdigit() else 0


def _number(score: Score, value: float) -> str:
    """Percent with one decimal, perplexities with two, bits and nats with four; very large ones in short."""
    if abs(value) >= 1e5:
        return f"{value:.3g}"
    if "perplexity" in score.metric:
        return f"{value:.2f}"
    return f"{value:.4f}" if score.metric in ("loss", "bits_per_byte") else f"{value:.1f}"
