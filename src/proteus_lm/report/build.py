"""From run directories to a report: measure each run alike, then write tables, figures and raw numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proteus_lm.config import ProteusConfig
from proteus_lm.data.files import make_folder, write_json, write_text
from proteus_lm.evals import PerplexityResult, evaluate
from proteus_lm.generate import Sampling, generate
from proteus_lm.report.collect import Options, Progress, RunReport, bytes_per_token, command, data_identity
from proteus_lm.report.figures import check_drawing, draw_loss_by_position, draw_memory, draw_training
from proteus_lm.report.html import to_html
from proteus_lm.report.memory import look_points, trace_memory
from proteus_lm.report.tables import base_of, main_table, paired, report_markdown, verdicts
from proteus_lm.run import Run

if TYPE_CHECKING:
    from proteus_lm.schedule import ActivationSchedule


@dataclass(frozen=True)
class Report:
    """What was written, and the parts worth showing at once."""

    folder: Path
    runs: tuple[RunReport, ...]
    figures: tuple[Path, ...]

    @property
    def text(self) -> str:
        """The table, the verdict, where the files are, and the samples: for a terminal."""
        base = base_of(self.runs)
        others = [run for run in self.runs if run is not base]
        parts = [main_table(self.runs)]
        if others:
            parts.append(f"Did scheduled capacity help?\n{verdicts(base, others)}")
        for run in self.runs:
            if run.sample:
                parts.append(f"Sample of {run.name} after {json.dumps(run.prompt[-60:], ensure_ascii=False)}:\n{run.sample}")
        parts.append("\n".join([f"Report: {self.folder / 'report.md'}", *(f"Figure: {path}" for path in self.figures)]))
        return "\n\n".join(parts)


def build_report(
    paths: Sequence[Path | str],
    out: Path | str,
    options: Options | None = None,
    *,
    made_by: str = "",
    progress: Progress | None = None,
) -> Report:
    """Measure runs and write OUT/report.md, report.html, report.json and the figures, each whole or not at all.

    Args:
        paths: run directories. out: a folder, made when it is not there.
        made_by: the command line, for the report's own record.
        progress: called with (tokens predicted, tokens to predict) during each evaluation.

    Raises:
        ValueError: for no run, the same run twice, or numbers that cannot be compared.
        FileNotFoundError: for a run that is not there. FileExistsError: when `out` is a file. ImportError: without matplotlib.
    """
    options = options or Options()
    runs = [Run.open(path) for path in paths]
    names = run_names([run.path for run in runs])
    _check_comparable(runs, names, options.split)
    check_drawing()
    out = Path(out)
    make_folder(out)
    schedules = [ProteusConfig.from_pretrained(run.checkpoint()).schedule for run in runs]
    reports = tuple(_measure(run, name, options, schedules, progress) for run, name in zip(runs, names))
    base = base_of(reports)
    pairs = {other.name: _differences(base, other) for other in reports if other is not base}
    figures = _figures(reports, out)
    page = report_markdown(reports, {caption: path.name for caption, path in figures.items()}, made_by)
    write_text(out / "report.md", page)
    write_text(out / "report.html", to_html(page, out))
    raw = {"made_by": made_by, "options": asdict(options), "runs": [run.to_dict() for run in reports]}
    write_json(out / "report.json", raw | {"base": base.name, "differences": pairs})
    return Report(out, reports, tuple(figures.values()))


def _check_comparable(runs: Sequence[Run], names: Sequence[str], split: str) -> None:
    """Raise ValueError, before any work, for runs whose losses would not be of the same tokens at the same positions."""
    first, context = data_identity(runs[0], split), runs[0].recipe.data.context
    for run, name in zip(runs[1:], names[1:]):
        if data_identity(run, split) != first:
            raise ValueError(
                f"{names[0]} and {name} have other {split} data ({runs[0].recipe.data.path} and {run.recipe.data.path}); "
                "their losses cannot be compared: report runs that share prepared data"
            )
        if run.recipe.data.context != context:
            raise ValueError(
                f"{names[0]} was trained with a context of {context} and {name} with {run.recipe.data.context}; "
                "report runs of one context together, or compare with `proteus eval --context` at one length"
            )


def _differences(base: RunReport, other: RunReport) -> dict[str, Any]:
    """Paired differences of two runs, ready for JSON: nats per token, other minus base."""
    return {
        which: {
            "positions": [d.start, d.edges[-1]],
            "verdict": d.verdict(),
            "whole": asdict(d.whole),
            "bins": [{"start": a, "end": b, **asdict(e)} for a, b, e in zip(d.edges, d.edges[1:], d.bins)],
        }
        for which, d in paired(base, other).items()
    }


def run_names(paths: Sequence[Path]) -> list[str]:
    """Short names that tell runs apart: the folder's own, or with its parents where two are alike."""
    resolved = [path.resolve() for path in paths]
    if not resolved:
        raise ValueError("no run to report; give at least one folder that `proteus train` wrote")
    for path in resolved:
        if resolved.count(path) > 1:
            raise ValueError(f"{path} is given twice; give each run once")
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(resolved):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in resolved]


def _measure(
    run: Run, name: str, options: Options, schedules: Sequence[ActivationSchedule], progress: Progress | None
) -> RunReport:
    model: Any = run.load_model(device=options.device)
    dataset, training = run.dataset(options.split), run.recipe.data.context
    step = _step(run)
    evaluations, skipped = _evaluate(model, dataset, training, options, progress)
    commands = {"train": _training_command(run)}
    limit = () if options.max_tokens is None else ("--max-tokens", options.max_tokens)
    commands["evaluate"] = command(
        *("proteus", "eval", run.path, "--step", step, "--context", *(f"{m}x" for m in evaluations), *limit),
        *("--bins", options.bins, "--batch-size", options.batch_size, "--split", options.split),
    )
    memory = trace_memory(model, dataset, model.config.schedule, look_points(schedules, max(evaluations) * training))
    prompt, sample = _sample(model, run, dataset, options)
    if sample:
        commands["generate"] = command(
            *("proteus", "generate", run.path, "--step", step, f"--prompt={prompt}", "--max-new-tokens", options.sample_tokens),
            *("--temperature", options.temperature, "--top-k", options.top_k, "--seed", options.seed),
        )
    return RunReport(
        name=name,
        path=run.path,
        step=step,
        parameters=sum(p.numel() for p in model.parameters()),
        recipe=run.recipe.to_dict(),
        model=_model_fields(model),
        metrics=run.metrics(),
        data=data_identity(run, options.split),
        evaluations=evaluations,
        memory=memory if memory.norms.any() else None,  # a layer without a memory in blocks gives zeros
        prompt=prompt,
        sample=sample,
        commands=commands,
        skipped=tuple(skipped),
    )


def _evaluate(
    model: Any, dataset: Any, training: int, options: Options, progress: Progress | None
) -> tuple[dict[int, PerplexityResult], list[str]]:
    """The evaluation at each multiple of the training context that the documents can hold, and why others are absent.

    Raises:
        ValueError: when not even the shortest can be held.
    """
    found: dict[int, PerplexityResult] = {}
    skipped: list[str] = []
    for multiple in sorted(set(options.contexts)):
        if found and multiple * training + 1 > dataset.longest_document:
            held = f"the longest of the split holds {dataset.longest_document:,}"
            skipped.append(f"No evaluation at {multiple}x: no document holds {multiple * training + 1:,} tokens ({held}).")
            continue
        found[multiple] = evaluate(
            model,
            dataset,
            context=multiple * training,
            batch_size=options.batch_size,
            max_tokens=options.max_tokens,
            bins=options.bins,
            training_context=training,
            bytes_per_token=bytes_per_token(dataset),
            progress=progress,
        )
    return found, skipped


def _sample(model: Any, run: Run, dataset: Any, options: Options) -> tuple[str, str]:
    """The beginning of the split's longest document, and what the model writes after it."""
    if options.sample_tokens == 0:
        return "", ""
    tokenizer = run.tokenizer
    longest = max(range(dataset.documents), key=lambda index: len(dataset.document(index)))
    prompt = tokenizer.decode(dataset.document(longest)[: options.prompt_tokens])
    sampling = Sampling(options.sample_tokens, options.temperature, options.top_k, None, options.seed)
    return prompt, generate(model, tokenizer, prompt, sampling)


def _training_command(run: Run) -> str:
    """The command a run was started with, as its own record says; the resolved recipe does the same."""
    sessions = run.path / "sessions.jsonl"
    if sessions.is_file():
        first = json.loads(sessions.read_text(encoding="utf-8").splitlines()[0])
        if first.get("command"):
            words = first["command"]
            return words if isinstance(words, str) else command(*words)
    return command("proteus", "train", run.path / "recipe.yaml", "--out", run.path)


def _step(run: Run) -> int:
    return int(run.checkpoint().name.removeprefix("step-"))


def _model_fields(model: Any) -> dict[str, Any]:
    """The resolved fields of the model's own configuration, without those every Hugging Face config has."""
    from proteus_lm.train.recipe import model_fields

    return {name: getattr(model.config, name) for name in model_fields()}


def _figures(runs: Sequence[RunReport], out: Path) -> dict[str, Path]:
    """Draw what there is to draw: file by caption."""
    drawings: list[tuple[str, str, Callable[[Sequence[RunReport], Path], None]]] = [
        ("Loss by position", "loss-by-position.png", draw_loss_by_position),
        ("Training curves", "training.png", draw_training),
    ]
    if any(run.memory is not None for run in runs):
        drawings.append(("What each block of memory holds", "memory.png", draw_memory))
    for _, name, draw in drawings:
        draw(runs, out / name)
    return {caption: out / name for caption, name, _ in drawings}
