import re

import pytest

from proteus_lm.report.collect import differences, quarters
from proteus_lm.report.tables import (
    base_of,
    main_table,
    markdown_table,
    memory_table,
    paired,
    positions_table,
    report_markdown,
    verdicts,
)

from .doubles import CONTEXT, run_report, trace


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]


def test_the_main_table_holds_the_evaluations_own_numbers():
    run = run_report("e8", 8)
    header, _, cells = rows_of(main_table([run]))
    row = dict(zip(header, cells))
    assert row["loss"] == f"{run.main.whole.mean:.3f} ± {run.main.whole.error:.3f}"
    assert row["perplexity"] == f"{run.main.perplexity:.2f}"
    assert row["past the training context"].startswith(f"{run.evaluations[2].past_training.mean:.3f} ±")
    assert (row["E"], row["steps"], row["parameters"]) == ("8", "40", f"{run.parameters:,}")
    assert row["training tokens/s"] == "1,020"  # the median of 1001 .. 1040, to the even one


def test_quarters_are_the_first_and_last_quarter_of_the_training_context():
    run = run_report()
    for result in run.evaluations.values():
        first, last = quarters(result)
        assert first == result.between(0, CONTEXT // 4)
        assert last == result.between(3 * CONTEXT // 4, CONTEXT)


def test_the_run_without_a_schedule_is_the_base_wherever_it_stands():
    runs = [run_report("e8", 8), run_report("e1", 1)]
    assert base_of(runs).name == "e1"
    assert base_of(runs[:1]).name == "e8"


def test_the_verdict_can_say_that_it_did_not_help():
    text = verdicts(run_report("e1", 1), [run_report("e8", 8, worse=0.5)])
    found = paired(run_report("e1", 1), run_report("e8", 8, worse=0.5))["1x"].whole
    assert found.mean > 0
    assert f"E = 8 is worse than E = 1 by {found.mean:.4f} ± {found.error:.4f} nats per token" in text
    assert "differ in `model.memory_blocks` alone" in text
    assert "another seed" in text  # the limits of what the error covers are said beside it


def test_the_verdict_past_the_training_context_is_of_the_positions_past_it():
    base, other = run_report("e1", 1), run_report("e8", 8, worse=0.5)
    past = [run.evaluations[2].past_training.mean for run in (base, other)]
    assert paired(base, other)["2x"].whole.mean == pytest.approx(past[1] - past[0], abs=1e-12)
    assert f"**Past the training context** (positions {CONTEXT}–{2 * CONTEXT - 1}, windows of 2x): E = 8 is worse" in verdicts(
        base, [other]
    )


def test_the_verdict_can_say_that_there_is_no_difference():
    assert "No difference beyond the noise" in verdicts(run_report("e1", 1), [run_report("e8", 8)])


def test_the_verdict_names_what_else_differs_between_two_runs():
    other = run_report("e8", 8)
    other.recipe["train"]["lr"] = 2e-3
    text = verdicts(run_report("e1", 1), [other])
    assert "`train.lr`: 0.001 and 0.002" in text
    assert "alone" not in text


def test_the_schedules_context_is_no_difference_where_there_is_one_block_but_is_one_between_schedules():
    one, eight, four = run_report("e1", 1), run_report("e8", 8), run_report("e4", 4)
    assert [name for name, *_ in differences(one, eight)] == ["model.memory_blocks"]
    four.model["memory_context"] = 16
    assert [name for name, *_ in differences(eight, four)] == ["model.memory_blocks", "model.memory_context"]


def test_runs_on_other_data_are_not_compared():
    with pytest.raises(ValueError, match="evaluated on other data"):
        paired(run_report("e1", 1), run_report("e8", 8, source="another"))


def test_the_positions_table_holds_every_bin_and_its_difference():
    base, other = run_report("e1", 1), run_report("e8", 8, worse=0.5)
    _, _, *rows = rows_of(positions_table([base, other], base))
    assert [row[0] for row in rows] == [f"{4 * i}–{4 * i + 3}" for i in range(16)]
    pair = paired(base, other)["2x"]
    assert rows[3][3].strip("*").startswith(f"{pair.bins[3].mean:+.3f}")


def test_the_memory_table_says_which_blocks_are_locked_and_when_they_open():
    _, _, *rows = rows_of(memory_table(trace(4)))
    assert [row[1] for row in rows] == ["0", "8", "16", "24"]
    assert rows[3][2:6] == ["locked", "locked", "locked", rows[3][5]]
    assert float(rows[3][5]) > 0


def test_a_locked_block_that_holds_something_is_shown_as_wrong():
    broken = trace(4)
    broken.norms[0, 1, 3] = 0.5
    assert "locked, but 0.25" in memory_table(broken)


def test_cells_cannot_break_a_table():
    assert markdown_table(("a",), [("x|y",)]).splitlines()[-1] == "| x\\|y |"


def test_a_sample_cannot_break_out_of_its_quotation():
    text = report_markdown([run_report(sample="```\n# not a heading of ours")], {}, "proteus report runs/e1")
    headings = [line for line in re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", text).splitlines() if line.startswith("#")]
    assert "# not a heading of ours" not in headings
    assert "## A sample of text" in headings


def test_the_report_gives_the_command_behind_its_numbers():
    text = report_markdown([run_report("e1", 1), run_report("e8", 8)], {"Loss": "loss.png"}, "proteus report runs/e1 runs/e8")
    for command in ("proteus train recipes/e1.yaml", "proteus eval runs/e8", "proteus report runs/e1 runs/e8"):
        assert command in text
    assert "![Loss](loss.png)" in text
    assert "Left out:" in text
