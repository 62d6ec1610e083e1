"""The paper's numbers: whole tables whose averages agree with what is printed, and a user's values, strictly read."""

import json

import pytest
import yaml

from proteus_lm.presets import preset
from proteus_lm.report.paper import (
    ANY_METRIC,
    AVERAGE,
    NOT_AT_HAND,
    NOT_IN_PAPER,
    PAPER,
    TABLE1,
    TABLE2,
    TABLE2_LENGTHS,
    TABLE3,
    find_value,
    load_paper,
    paper_model,
)


def value(suite, task, metric, model, size=""):
    found = find_value(PAPER, suite, task, metric, model, size)
    assert not isinstance(found, str), found
    return found.value


@pytest.mark.parametrize("size", ["760M", "1.3B"])
def test_the_eight_accuracies_of_each_row_of_table_1_give_the_printed_average(size):
    rows = [v.model for v in PAPER["table1", AVERAGE, "acc"] if v.size == size]
    assert len(rows) == len(set(rows)) == 11
    for model in rows:
        accuracies = [value("table1", task, metric, model, size) for task, metric in TABLE1 if metric.startswith("acc")]
        assert len(accuracies) == 8
        # The paper averages numbers with more digits than it prints; each printed one is within 0.05.
        assert sum(accuracies) / 8 == pytest.approx(value("table1", AVERAGE, "acc", model, size), abs=0.0101)


def test_the_six_tasks_of_each_row_of_table_3_give_the_printed_average():
    rows = [v.model for v in PAPER["table3", AVERAGE, ANY_METRIC]]
    assert len(rows) == 6
    for model in rows:
        tasks = [value("table3", task, "qa_f1", model) for task in TABLE3]
        assert sum(tasks) / 6 == pytest.approx(value("table3", AVERAGE, ANY_METRIC, model), abs=0.0101)


def test_numbers_that_the_papers_text_repeats_are_those_of_the_tables():
    assert value("table1", "wikitext", "word_perplexity", "Hope-Attention + Proteus", "760M") == 19.87
    assert value("table1", "lambada_openai", "perplexity", "Titans + Proteus", "1.3B") == 13.03
    for task, model, base, scheduled in (
        ("niah_single_3", "Titans", 21.4, 29.8),
        ("niah_single_2", "Titans", 69.4, 74.2),
        ("niah_single_2", "Comba", 13.4, 21.2),
        ("niah_multikey_1", "Titans", 11.8, 16.8),
        ("niah_multiquery", "Hope-Attention", 30.6, 34.2),
        ("niah_multivalue", "Hope-Attention", 23.0, 25.8),
    ):
        assert (value("table2", task, "16384", model), value("table2", task, "16384", f"{model} + Proteus")) == (base, scheduled)


def test_every_value_says_where_it_stands_and_table_2_is_whole():
    assert all("arXiv 2608.16844v1, Table" in v.source and not v.read_off for values in PAPER.values() for v in values)
    for task in TABLE2:
        for length in TABLE2_LENGTHS:
            assert len(PAPER["table2", task, str(length)]) == 7


def test_what_the_paper_does_not_give_is_said_and_never_made_up():
    assert find_value(PAPER, "table1", "wikitext", "bits_per_byte", "Titans", "760M") == NOT_IN_PAPER
    assert find_value(PAPER, "table2", "niah_multikey_2", "4096", "Titans", "760M") == NOT_IN_PAPER
    assert find_value(PAPER, "table2", "niah_single_1", "32768", "Titans", "760M") == NOT_IN_PAPER
    assert find_value(PAPER, "table2", "niah_single_1", "4096", "SWLA", "760M") == NOT_IN_PAPER
    assert find_value(PAPER, "fig4", "all", "perplexity", "Titans", "760M") == NOT_AT_HAND
    assert find_value(PAPER, "table1", "piqa", "acc", None, "760M") == "–"


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({"mixer": "titans"}, "Titans"),
        ({"mixer": "comba", "memory_blocks": 16}, "Comba + Proteus"),
        ({"mixer": "attention", "channel": "chain", "update_blocks": 16}, "Hope-Attention + Proteus"),
        ({"mixer": "attention", "channel": "chain"}, "Hope-Attention"),
        ({"mixer": "attention"}, "Transformer++"),
        ({"mixer": "titans", "titans_variant": "mac"}, None),
        ({"mixer": "gated_deltanet"}, None),
    ],
)
def test_a_model_stands_beside_its_row_of_the_paper(fields, row):
    config = preset("20M", **fields)
    assert paper_model({name: getattr(config, name) for name in type(config).__annotations__}) == row


def test_a_model_that_is_not_ours_has_no_row():
    assert paper_model({"model_type": "gpt_neox"}) is None


def test_a_users_values_are_added_with_their_own_source(tmp_path):
    entry = {"suite": "fig4", "task": "all", "metric": "perplexity", "model": "Titans", "value": 15.2, "read_off": True}
    other = {"suite": "table3", "task": "qasper", "model": "Titans", "value": 10, "source": "elsewhere"}
    for path, text in (
        (tmp_path / "a.yaml", yaml.safe_dump({"source": "read off Figure 4", "values": [entry, other]})),
        (tmp_path / "a.json", json.dumps({"source": "read off Figure 4", "values": [entry, other]})),
    ):
        path.write_text(text)
        paper = load_paper(path)
        found = find_value(paper, "fig4", "all", "perplexity", "Titans", "760M")
        assert (found.value, found.read_off, found.source) == (15.2, True, "read off Figure 4")
        replaced = find_value(paper, "table3", "qasper", "qa_f1", "Titans", "760M")
        assert (replaced.value, replaced.source) == (10.0, "elsewhere")
    assert value("table3", "qasper", "qa_f1", "Titans") == 10.3  # the built-in values are as they were


RIGHT = {"suite": "fig2", "task": "swde", "model": "Titans", "value": 1.0}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([RIGHT], "must hold `source`"),
        ({"values": [RIGHT]}, "must hold `source`"),
        ({"source": " ", "values": [RIGHT]}, "say where the values are from"),
        ({"source": "s", "values": [RIGHT], "more": 1}, "nothing else"),
        ({"source": "s", "values": [RIGHT, 3]}, "value 2 is 3"),
        ({"source": "s", "values": [{**RIGHT, "modell": "x"}]}, "has modell, which is not known"),
        ({"source": "s", "values": [{"suite": "fig2", "task": "swde", "value": 1}]}, "has no model"),
        ({"source": "s", "values": [{**RIGHT, "value": "12"}]}, "value is '12'; it must be a number"),
        ({"source": "s", "values": [{**RIGHT, "value": True}]}, "it must be a number"),
        ({"source": "s", "values": [{**RIGHT, "suite": "table9"}]}, "suite is 'table9'"),
        ({"source": "s", "values": [{**RIGHT, "read_off": "yes"}]}, "read_off is 'yes'"),
    ],
)
def test_a_file_of_another_layout_is_refused_with_the_entry_and_the_rule(content, says, tmp_path):
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=says):
        load_paper(path)


def test_a_file_that_is_not_there_or_not_yaml_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        load_paper(tmp_path / "none.yaml")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="not readable"):
        load_paper(tmp_path / "bad.json")
