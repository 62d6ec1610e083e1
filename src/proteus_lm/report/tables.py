"""The report's text: Markdown tables, the verdict, the memory, the samples, and the command behind each number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from proteus_lm.evals import Estimate, PairedDifference, PerplexityResult, compare
from proteus_lm.report.collect import RunReport, differences, quarters, same_data
from proteus_lm.report.memory import MemoryTrace

Row = Sequence[object]


def markdown_table(header: Row, rows: Iterable[Row]) -> str:
    """A Markdown table; cells are turned into text, and a bar in a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def estimate(value: Estimate | None, digits: int = 3) -> str:
    """A loss in nats per token with its standard error, or a dash."""
    if value is None or value.tokens == 0:
        return "–"
    error = "" if value.error is None else f" ± {value.error:.{digits}f}"
    return f"{value.mean:.{digits}f}{error}"


def main_table(runs: Sequence[RunReport]) -> str:
    """One row a run. Losses are nats per token, with the standard error over documents."""
    header = ("run", "mixer", "E", "parameters", "steps", "loss", "perplexity", "bits/byte")
    header += ("first quarter", "last quarter", "past the training context", "training tokens/s")
    rows = []
    for run in runs:
        first, last = quarters(run.main)
        bits = run.main.bits_per_byte(run.main.whole.mean)
        speed = run.tokens_per_second
        rows.append(
            (
                *(run.name, run.mixer, run.blocks, f"{run.parameters:,}", run.step),
                *(estimate(run.main.whole), f"{run.main.perplexity:.2f}", "–" if bits is None else f"{bits:.3f}"),
                *(estimate(first), estimate(last), estimate(run.longest.past_training), "–" if speed is None else f"{speed:,.0f}"),
            )
        )
    return markdown_table(header, rows)


def base_of(runs: Sequence[RunReport]) -> RunReport:
    """The run that the others are measured against: the first without a schedule (E = 1), or the first."""
    return next((run for run in runs if run.blocks == 1), runs[0])


def paired(base: RunReport, other: RunReport) -> Mapping[str, PairedDifference]:
    """Paired differences by multiple of the training context ("1x", "2x"): past that context where the windows are longer.

    Raises:
        ValueError: when the two were not evaluated on the same tokens.
    """
    if not same_data(base, other):
        raise ValueError(
            f"{base.name} and {other.name} were evaluated on other data ({base.data['source']} and {other.data['source']}); "
            "their losses cannot be compared: report runs that share prepared data"
        )
    names = (label(base), label(other)) if base.blocks != other.blocks else (base.name, other.name)
    shared = sorted(base.evaluations.keys() & other.evaluations.keys())
    past = base.training_context
    return {f"{m}x": compare(base.evaluations[m], other.evaluations[m], names=names, start=past if m > 1 else 0) for m in shared}


def label(run: RunReport) -> str:
    """How a run is called in sentences and legends."""
    return f"E = {run.blocks}"


def verdicts(base: RunReport, others: Sequence[RunReport]) -> str:
    """Did it help? One paragraph for each run against the base, with what else differs between the two."""
    parts = []
    for other in others:
        for multiple, difference in paired(base, other).items():
            first, last = difference.start, difference.edges[-1] - 1
            where = "Past the training context" if first else "Within the training context"
            parts.append(f"- **{where}** (positions {first}–{last}, windows of {multiple}): {difference.verdict()}")
        changed = differences(base, other)
        if [name for name, *_ in changed] == ["model.memory_blocks"]:
            parts.append("- The two runs differ in `model.memory_blocks` alone: same seed, same data in the same order.")
        else:
            listed = "; ".join(f"`{n}`: {a} and {b}" for n, a, b in changed) or "nothing"
            parts.append(f"- Fields in which {base.name} and {other.name} differ: {listed}.")
        if base.step != other.step:
            parts.append(f"- {base.name} stands at step {base.step} and {other.name} at step {other.step}.")
    parts.append(
        "- The ± is over documents of the split. It says nothing about how a second training run with another seed would differ: "
        "there is one run of each here."
    )
    return "\n".join(parts)


def positions_table(runs: Sequence[RunReport], base: RunReport) -> str:
    """Loss by position of every run at the longest context, and the paired difference from the base."""
    others = [run for run in runs if run is not base and same_data(base, run) and run.longest.edges == base.longest.edges]
    pairs = [list(paired(base, run).values())[-1] for run in others]
    header = ["positions", *(run.name for run in runs), *(f"{run.name} minus {base.name}" for run in others)]
    rows = []
    for i, (start, end) in enumerate(zip(base.longest.edges, base.longest.edges[1:])):
        cells = [estimate(run.longest.bins[i]) if run.longest.edges == base.longest.edges else "–" for run in runs]
        rows.append([f"{start}–{end - 1}", *cells, *(signed(pair.bins[i]) for pair in pairs)])
    return markdown_table(header, rows)


def signed(value: Estimate) -> str:
    """A difference in nats per token; bold where it is beyond the noise."""
    text = f"{value.mean:+.3f}" + ("" if value.error is None else f" ± {value.error:.3f}")
    return f"**{text}**" if value.beyond_noise else text


def memory_table(trace: MemoryTrace) -> str:
    """How full each block is after so many tokens, mean over layers; a locked block says so."""
    header = ["block", "opens at position", *(f"after {t}" for t in trace.tokens)]
    rows = []
    for block, unlock in enumerate(trace.unlocks):
        norms = trace.norms[:, :, block].mean(1)
        cells = [
            f"{n:.3f}" if block < opened else ("locked" if n == 0 else f"locked, but {n:.3g}")
            for n, opened in zip(norms, trace.open)
        ]
        rows.append([block, unlock, *cells])
    return markdown_table(header, rows)


def left_out_line(result: PerplexityResult) -> str:
    """What an evaluation predicted, and what it did not."""
    left = result.left_out
    documents = len({w.document for w in result.windows})
    made = f"{result.whole.tokens:,} predictions in {len(result.windows):,} windows of {documents:,} documents"
    tails = f"{left.tails:,} tokens in tails shorter than a window ({left.short_documents:,} documents hold no window)"
    return f"{made}. Left out: {tails}, {left.limit:,} beyond the limit, {left.first:,} first tokens."


def left_out(run: RunReport) -> str:
    """One line for each evaluation of a run, and one for each that could not be made."""
    lines = [f"- {multiple}x: {left_out_line(result)}" for multiple, result in run.evaluations.items()]
    return "\n".join(lines + [f"- {reason}" for reason in run.skipped])


def quote(text: str) -> str:
    """Text as a Markdown code block that nothing inside can end."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


def report_markdown(runs: Sequence[RunReport], figures: Mapping[str, str], made_by: str) -> str:
    """The whole report.

    Args:
        figures: file name by caption, relative to the report.
        made_by: the command that writes this report.
    """
    base = base_of(runs)
    others = [run for run in runs if run is not base]
    parts = [f"# {' against '.join(run.name for run in runs)}", main_table(runs)]
    parts.append(
        "Losses are nats per token ± standard error over documents. Quarters are of the positions within the training context; "
        "positions restart at 0 in each window. Tokens/s is the median over training steps."
    )
    if others:
        parts += ["## Did scheduled capacity help?", verdicts(base, others)]
    parts.append("## Loss by position")
    parts += [f"![{caption}]({name})" for caption, name in figures.items()]
    parts += [positions_table(runs, base), "Bold: beyond the noise (95%)."]
    parts.append("## What the memory holds")
    parts.append("Frobenius norm of what a block holds beyond its initial value, mean over layers and windows, as tokens are read.")
    for run in runs:
        parts.append(f"**{run.name}**")
        parts.append("This mixer keeps no memory in blocks." if run.memory is None else memory_table(run.memory))
    if any(run.sample for run in runs):
        parts.append("## A sample of text")
        parts.append("Each model goes on from the same prompt:")
        parts.append(quote(runs[0].prompt))
        for run in runs:
            parts += [f"**{run.name}**", quote(run.sample)]
    parts.append("## Where the numbers come from")
    parts += [f"**{run.name}** ({run.path})\n\n{left_out(run)}\n\n{quote(chr(10).join(run.commands.values()))}" for run in runs]
    parts.append(f"This report:\n\n{quote(made_by)}")
    return "\n\n".join(parts) + "\n"
