"""The paper's tables with our models: what was run and nothing else, why the rest was not, and the command beside it."""

import json
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

from proteus_lm.evals import evaluate
from proteus_lm.evals.positions import octave_edges
from proteus_lm.evals.suite import Score, SuiteResult
from proteus_lm.report.paper import PAPER, TABLE1, TABLE3, PaperValue
from proteus_lm.report.suite_figures import needle_hits
from proteus_lm.report.suite_tables import Entry, average, cell, columns, describe, positions_tables, suite_tables
from proteus_lm.report.suites import build_page, collect

from ..evals.doubles import Recurrent, texts


def config(blocks=1, mixer="comba"):
    return {"provenance": {"config": {"mixer": mixer, "memory_blocks": blocks}, "versions": {"torch": "2.13"}}}


def table1(value=50.0, missing=(), blocks=1):
    scores = [
        Score.not_run(task, metric, "no file here; give --data")
        if task in missing
        else Score(task, metric, value + i, 1.0 + i, 100, 0, "1", "file")
        for i, (task, metric) in enumerate(TABLE1)
    ]
    return SuiteResult("table1", "m", f"proteus eval runs/e{blocks} --suite table1", tuple(scores), config(blocks))


def table2(found=True, blocks=1):
    tasks, got = ("niah_single_1", "niah_multikey_2"), "It is 12345." if found else "no"
    samples = [
        {"task": task, "context": n, "depths": [d], "expected": ["12345"], "got": got}
        for task in tasks
        for n in (4096, 8192)
        for d in (0, 50, 100)
    ]
    scores = [Score(task, str(n), 100.0 * found, 0.0, 3, 1, "1", "essays") for task in tasks for n in (8192, 4096)]
    return SuiteResult("table2", "m", "proteus eval x --suite table2", tuple(scores), {"samples": samples, **config(blocks)})


def fig4(worse=0.0, blocks=1, seed=0):
    model = Recurrent(seed=seed)
    with torch.no_grad():
        model.head.weight.mul_(1 + worse)
    raw = evaluate(model, texts(*[600] * 5), context=None, edges=octave_edges(512), longest=512)
    parts = {"all": raw.whole} | {f"{a}-{b - 1}": e for a, b, e in zip(raw.edges, raw.edges[1:], raw.bins)}
    scores = [Score(name, "perplexity", math.exp(e.mean), 0.1, e.tokens, 0, "1", "d") for name, e in parts.items()]
    return SuiteResult("fig4", "m", "proteus eval x --suite fig4", tuple(scores), {"raw": raw.to_raw(), **config(blocks)})


def rows_of(table):
    return [[c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines() if line]


def test_table_1_has_models_as_rows_and_the_papers_value_beside_each_of_ours():
    entries = [Entry("e1", {"table1": table1()}), Entry("e16", {"table1": table1(60, blocks=16)})]
    header, _, base, scheduled = rows_of(suite_tables("table1", entries, PAPER, "760M"))
    assert header[:3] == ["model", "Wiki. ppl ↓", "paper"]
    assert header[-3:] == ["average ↑", "paper", "command"]
    assert (base[0], base[1], base[2]) == ("e1", "50.00 ± 1.00 (n 100)", "21.94")
    assert scheduled[2] == "21.32"
    assert (base[-2], scheduled[-2]) == ("51.43", "52.15")
    assert base[-1] == "`proteus eval runs/e1 --suite table1`"
    bigger = rows_of(suite_tables("table1", entries, PAPER, "1.3B"))[2]
    assert (bigger[2], bigger[-2]) == ("16.98", "55.42")


def test_a_cell_that_was_not_run_says_why_and_the_average_waits_for_all():
    entry = Entry("e1", {"table1": table1(missing=("piqa",))})
    _, _, row = rows_of(suite_tables("table1", [entry], PAPER, "760M"))
    assert "not run: no file here; give --data" in row
    assert "not run: 7 of 8 scores are there" in row
    few = Entry("e1", {"table1": SuiteResult("table1", "m", "c", table1().scores[:2], config())})
    assert "not run: not asked for" in rows_of(suite_tables("table1", [few], PAPER, "760M"))[2]


def test_the_average_is_over_the_accuracies_with_the_error_of_their_mean():
    accuracies = [s for s in table1().scores if s.metric.startswith("acc")]
    mean = sum(s.value for s in accuracies) / 8
    error = math.sqrt(sum(s.stderr**2 for s in accuracies)) / 8
    assert average("table1", table1()) == f"{mean:.2f} ± {error:.2f}"
    longbench = SuiteResult("table3", "m", "c", tuple(Score(t, "qa_f1", 6.0, None, 5, 0, "1", "d") for t in TABLE3))
    assert average("table3", longbench) == "6.00"


def test_cells_show_value_error_samples_and_truncations():
    assert cell(Score("a", "acc", 12.34, 1.26, 1000, 3, "1", "d")) == "12.3 ± 1.3 (n 1,000, 3 truncated)"
    assert cell(Score("a", "4096", 12.34, None, 1, 0, "1", "d")) == "12.3 (n 1)"
    assert cell(Score("a", "word_perplexity", 1.234e7, 2.0e6, 9, 0, "1", "d")) == "1.23e+07 ± 2e+06 (n 9)"
    assert cell(Score("a", "perplexity", math.inf, None, 9, 0, "1", "d")) == "inf (n 9)"


def test_table_2_keeps_the_papers_order_of_tasks_and_lengths_and_names_line_retrieval():
    entry = Entry("e1", {"table2": table2()})
    assert columns("table2", [entry]) == [
        ("niah_single_1", "4096"),
        ("niah_single_1", "8192"),
        ("niah_multikey_2", "4096"),
        ("niah_multikey_2", "8192"),
    ]
    header, _, row = rows_of(suite_tables("table2", [entry], PAPER, "760M"))
    assert header[1:4:2] == ["S-NIAH-1 4K", "S-NIAH-1 8K"]
    assert "MK-NIAH-2 (line retrieval) 4K" in header
    assert row[2] == "100.0"
    assert row[header.index("MK-NIAH-2 (line retrieval) 4K") + 1] == "not in the paper"


def test_values_read_off_a_plot_are_marked():
    paper = {("fig2", "swde", "4096"): [PaperValue("Comba", "", 41.0, "read off", True)]}
    result = SuiteResult("fig2", "m", "c", (Score("swde", "4096", 10.0, 1.0, 5, 0, "1", "d"),), config())
    assert "41 (read off)" in suite_tables("fig2", [Entry("e1", {"fig2": result})], paper, "760M")
    assert "paper's value not at hand" in suite_tables("fig2", [Entry("e1", {"fig2": result})], PAPER, "760M")


def test_figure_4_pairs_models_on_the_same_documents_and_can_say_worse():
    entries = [Entry("e1", {"fig4": fig4()}), Entry("e8", {"fig4": fig4(worse=0.5, blocks=8)})]
    text = positions_tables(entries, PAPER, "760M")
    assert "e8 is worse than e1 by" in text
    header, _, whole, *_ = rows_of(text.split("\n\n")[0])
    assert header[-1] == "e8 minus e1 (nats per token)"
    assert whole[-1].startswith("**+")
    single = evaluate(Recurrent(), texts(600, seed=5), context=None, edges=octave_edges(512), longest=512)
    other = SuiteResult("fig4", "m", "c", fig4().scores, {"raw": single.to_raw(), **config(4)})
    refused = positions_tables([*entries, Entry("other", {"fig4": other})], PAPER, "760M")
    assert "other is not paired with e1" in refused


def test_needles_are_found_by_depth_whatever_their_case():
    samples = [
        {"task": "t", "context": 4096, "depths": [0, 95], "expected": ["Abc", "Def"], "got": "abc", "score": 50},
        {"task": "t", "context": 8192, "depths": [95], "expected": ["x"], "got": "X", "score": 100},
        {"task": "other", "context": 4096, "depths": [50], "expected": ["x"], "got": "X", "score": 100},
    ]
    lengths, share, count = needle_hits(samples, "t")
    assert lengths == [4096, 8192]
    assert (share[0, 0], share[9, 0], share[9, 1]) == (1, 0, 1)
    assert np.isnan(share[0, 1])
    assert count.sum() == 3


def save(run, *results):
    for result in results:
        result.save(run / "evals" / f"{result.suite}.json")
    return run


def test_the_page_shows_what_was_run_and_keeps_raw_rows_settings_and_versions_beside_it(tmp_path):
    runs = [save(tmp_path / "a", table1(), fig4()), save(tmp_path / "b", table1(60, blocks=8), fig4(0.5, 8), table2(blocks=8))]
    (tmp_path / "without").mkdir()
    page = build_page(collect([*runs, tmp_path / "without"]), tmp_path / "out", made_by="proteus report a b")
    text = (tmp_path / "out" / "paper.md").read_text()
    assert "## Table 1" in text and "## Table 2" in text and "## Figure 4" in text
    assert "Table 3" not in re.findall("## (.*)", text) and "## Figure 3" not in text
    assert "proteus report a b" in text and "torch 2.13" in text
    html = (tmp_path / "out" / "paper.html").read_text()
    assert html.count("data:image/png;base64,") == 2  # needles and positions
    raw = json.loads((tmp_path / "out" / "table1.json").read_text())
    assert [r["scores"][0]["value"] for r in raw["results"]] == [50.0, 60.0]
    assert raw["results"][0]["extra"]["provenance"]["versions"] == {"torch": "2.13"}
    assert any(v["model"] == "Comba" and v["source"].endswith("Table 1, 760M") for v in raw["paper"])
    for name in ("table2.png", "fig4.png"):
        assert Image.open(tmp_path / "out" / name).size[0] > 300
    assert "paper.md" in page.text and "fig4.png" in page.text


def test_results_of_models_that_are_no_runs_are_collected_by_model(tmp_path):
    result = table1()
    for name, model in (("x", "hub/x"), ("y", "hub/y")):
        SuiteResult("table1", model, "c", result.scores, {}).save(tmp_path / f"{name}.json")
    entries = collect([], [tmp_path / "x.json", tmp_path / "y.json"])
    assert [entry.name for entry in entries] == ["hub/x", "hub/y"]
    _, _, row, _ = rows_of(suite_tables("table1", entries, PAPER, "760M"))
    assert row[2] == "–"  # the paper has no such model


def test_two_results_of_one_suite_of_one_model_are_refused(tmp_path):
    for name in ("x", "y"):
        table1().save(tmp_path / f"{name}.json")
    with pytest.raises(ValueError, match="has table1 twice"):
        collect([], [tmp_path / "x.json", tmp_path / "y.json"])


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (SuiteResult("fig3", "m", "proteus ablate r.yaml", (), {"key": "k"}), "no seeds, values, paired in extra"),
        (SuiteResult("fig4", "m", "proteus eval m", (), {"raw": {"a": 1}}), "these are no raw rows"),
    ],
)
def test_a_result_that_its_figure_cannot_draw_is_named_with_its_command(tmp_path, result, words):
    result.save(tmp_path / "x.json")
    with pytest.raises(ValueError, match=rf"x\.json: {words}.*run `{result.command}` again"):
        collect([], [tmp_path / "x.json"])


def test_a_run_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere; give the folder of a run"):
        collect([tmp_path / "nowhere"])


def test_no_results_and_a_size_the_paper_lacks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no results to show"):
        build_page([], tmp_path / "out")
    with pytest.raises(ValueError, match=r"the paper has 760M and 1\.3B"):
        build_page([Entry("a", {"table1": table1()})], tmp_path / "out", size="7B")
    assert not (tmp_path / "out").exists()


def test_a_suite_on_the_terminal_names_what_was_not_run():
    text = describe(table1(missing=("piqa",)))
    assert "| piqa | acc | not run: no file here; give --data | 0 | 0 |" in text
    assert "| wikitext | word_perplexity | 50.00 ± 1.00 | 100 | 0 |" in text
