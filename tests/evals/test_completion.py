"""Completion by length: the prompt has the length, the answer is in it, other documents do not tell it, `contains` scores it."""

import json
import re

import pytest
import torch

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.evals.completion import SETS, Builder, contains, fig2, load_items
from proteus_lm.evals.completion.prompts import TOKENS_TO_GENERATE
from proteus_lm.evals.language_model import LanguageModel
from proteus_lm.evals.long_context import Rows, count_tokens
from proteus_lm.evals.suite import SUITES, SuiteOptions

from .recallers import ESSAY, Says, byte_level, pieces

NAMES = [f"{a}{b}" for a in ("Acu", "Bio", "Cardio", "Derma", "Endo") for b in ("Scan", "Test", "Flow", "Link")]


def write(folder, name, rows):
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def fda(folder):
    """Summaries of unequal length, each with an applicant in its middle, and the key at the end of the text as on the hub."""
    rows = []
    for i, name in enumerate(NAMES):
        text = f"Summary of {name}.\n\n{ESSAY[: 150 * i]}\nApplicant: {name} Inc.\n{ESSAY[40 * i : 140 * i]}"
        rows.append({"doc_id": str(i), "key": "applicant", "value": f"{name} Inc", "text": f"{text} (...)\n\nApplicant:"})
    return write(folder, "fda", rows)


def squad(folder):
    rows = [
        {
            "id": str(i),
            "context": f"{ESSAY[90 * i : 90 * i + 200]} The {name} was built in {1900 + i} by two brothers.",
            "question": f"When was the {name} built?",
            "answers": {"text": [str(1900 + i), f"in {1900 + i}"]},
        }
        for i, name in enumerate(NAMES)
    ]
    return write(folder, "squad_v1_validation", rows)


def swde(folder):
    rows = [
        {"key": "director", "value": f"Ms {n}", "text": f"{n} film | director: Ms {n} | {ESSAY[:99]}\nDirector:"} for n in NAMES
    ]
    return write(folder, "swde", rows)


def recall(prompt: str) -> str:
    """What a reader with a perfect memory completes."""
    if prompt.endswith("Applicant:"):
        return f" {re.findall(r'Applicant: (.*)', prompt)[-1]}"
    if prompt.endswith("Director:"):
        return f" {re.findall(r'director: (Ms [A-Za-z]+)', prompt)[-1]}"
    (name,) = re.findall(r"Question: When was the (\w+) built\?\nAnswer:$", prompt)
    return " In " + re.findall(rf"The {name} was built in (\d+)", prompt)[0]


def built(name, items, length, make=byte_level, count=20, seed=0):
    tokenizer = make()
    builder = Builder(name, items, seed)
    recipes = builder.recipes(count, length, lambda texts: count_tokens(tokenizer, texts))
    questions = [builder.question(recipe) for recipe in recipes]
    for question in questions:
        assert len(tokenizer.encode(question.prompt)) + TOKENS_TO_GENERATE == question.about["length"] <= length
        assert contains(question.prompt, question.expected)
    return questions


# The length, and the answer in it.


@pytest.mark.parametrize(
    ("length", "make"), [(150, byte_level), (700, byte_level), (2500, byte_level), (150, pieces), (700, pieces)]
)
def test_a_prompt_has_its_length_and_its_answer(tmp_path, length, make):
    for name, data in (("fda", fda), ("squad_completion", squad), ("swde", swde)):
        questions = built(name, load_items(name, data(tmp_path)), length, make)
        assert len(questions) == 20
        whole = [q for q in questions if q.about["length"] > 0.93 * length]
        assert len(whole) >= 15 or name == "swde", name  # windows end at whole words; few short films fill no long prompt


def test_a_long_document_becomes_a_window_around_its_answer(tmp_path):
    items = load_items("fda", fda(tmp_path))
    for question in built("fda", items, 400):
        item = items.items[question.about["index"]]
        body, stem = question.prompt.removesuffix(item.stem), item.stem
        assert stem.endswith("Applicant:") and question.prompt.endswith(stem)
        if body in item.text:
            place = body.lower().index(item.answers[0].lower())
            before_it = item.text.lower().index(item.answers[0].lower())
            assert place == before_it or 0.3 < place / len(body) < 0.9  # half in front, where there is so much
        else:
            assert item.text in question.prompt


def test_a_whole_document_alone_is_the_hubs_prompt_to_the_letter(tmp_path):
    items = load_items("fda", fda(tmp_path))
    texts = [json.loads(line)["text"].strip() for line in (tmp_path / "fda.jsonl").read_text().splitlines()]
    assert [item.text + item.stem for item in items.items] == texts


def test_other_documents_fill_a_short_one_and_do_not_tell_its_answer(tmp_path):
    items = load_items("squad_completion", squad(tmp_path))
    depths = []
    for question in built("squad_completion", items, 2500):
        item = items.items[question.about["index"]]
        assert question.prompt.count(item.text) == 1
        rest = question.prompt.replace(item.text, "").lower()
        assert not any(answer in rest for answer in item.answers) and rest.count("was built in") > 3
        depths.append(question.about["depths"][0])
    assert min(depths) < 35 and max(depths) > 65  # on both sides, as the question names what it is about


def test_documents_with_a_stem_stand_last(tmp_path):
    items = load_items("fda", fda(tmp_path))
    filled = [q for q in built("fda", items, 2500) if items.items[q.about["index"]].text in q.prompt]
    assert len(filled) > 5
    for question in filled:
        item = items.items[question.about["index"]]
        assert question.prompt.endswith(item.text + item.stem) and len(question.prompt) > len(item.text) + 50


def test_the_same_items_are_asked_at_each_length(tmp_path):
    items = load_items("fda", fda(tmp_path))
    short, long = ([q.about["index"] for q in built("fda", items, n, count=7)] for n in (300, 2000))
    assert short == long and short != [q.about["index"] for q in built("fda", items, 300, count=7, seed=1)]


def test_an_answer_without_room_is_left_out_and_counted(tmp_path):
    rows = [{"text": f"The code is {'x1' * n} now.\nThe code is", "value": "x1" * n} for n in (2, 90)]
    options = SuiteOptions(data=write(tmp_path, "swde", rows), lengths=(150,), tasks=("swde",))
    (score,) = fig2(Says(lambda prompt: "x1x1"), options).scores
    assert (score.value, score.count) == (100, 1) and "1 items left out, too long for this length" in score.note
    none = SuiteOptions(data=tmp_path, lengths=(60,), tasks=("swde",))
    (score,) = fig2(Says(lambda prompt: "x1x1"), none).scores
    assert score.value is None and "no answer of swde has room in 60 tokens" in score.note


def test_prompts_that_nothing_fills_are_counted(tmp_path):
    options = SuiteOptions(data=swde(tmp_path), lengths=(600, 9000), samples=5, tasks=("swde",))
    enough, short = fig2(Says(recall), options).scores
    assert "shorter" not in enough.note and "5 prompts shorter, for want of other documents" in short.note


# Layouts.


def test_keys_apart_from_their_text_are_put_behind_it(tmp_path):
    rows = [{"doc_id": "K1", "text": "A. Type of Test: Rapid\nB. Panel: Blood", "pairs": [{"key": "panel", "value": "Blood"}]}]
    (item,) = load_items("fda", write(tmp_path, "fda_like_510k_long", rows)).items
    assert (item.document, item.stem, item.answers) == ("K1", "\n\nPanel:", ("Blood",))
    rows = [{"doc_id": "K1", "text": "A. Type of Test: Rapid", "key": "type of test", "value": "Rapid"}]
    (item,) = load_items("fda", write(tmp_path, "fda", rows)).items
    assert item.text + item.stem == "A. Type of Test: Rapid\n\nType of test:"


@pytest.mark.parametrize("end", ["The river is called", "the river is called:"])
def test_a_sentence_to_complete_is_split_from_its_passage(tmp_path, end):
    rows = [{"text": f"It flows by the town. People call it Ash. {end}", "question": "The river is called", "value": "Ash"}]
    (item,) = load_items("squad_completion", write(tmp_path, "squad_completion", rows)).items
    assert (item.text, item.stem) == ("It flows by the town. People call it Ash.", f" {end}")


def test_rows_whose_answer_is_not_in_the_text_are_left_out_and_said(tmp_path):
    rows = [{"text": "a b\nc:", "value": "b"}, {"text": "a b\nc:", "value": "z"}]
    options = SuiteOptions(data=write(tmp_path, "swde", rows), lengths=(100,), tasks=("swde",))
    assert "1 rows of the set left out, their answer not in their text" in fig2(Says(lambda p: "b"), options).scores[0].note


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a b c", "value": "b"}], "one line"),
        ([{"value": "b"}], "no field text"),
        ([{"text": "a\nb", "value": "z"}], "no row's answer stands in its text"),
        ([{"context": "a"}], "no field question"),
    ],
)
def test_rows_that_are_none_are_an_error_that_names_what_is_missing(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        load_items("swde", write(tmp_path, "swde", rows))


def test_rows_of_the_hub_end_with_their_stem_whatever_their_key_says(tmp_path, monkeypatch):
    rows = [{"doc_id": "1", "text": "Maker: Ann.\n\nWho made it:", "key": "maker of it", "value": "Ann"}]
    from proteus_lm.evals.completion import items

    monkeypatch.setattr(items, "hub_rows", lambda *args, **kwargs: Rows(rows, "hub hazyresearch/based-fda"))
    (item,) = load_items("fda", None).items
    assert (item.text, item.stem) == ("Maker: Ann.", "\n\nWho made it:")


# The score.


@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        (" class ii device", ("Class II",), True),
        (" Class I", ("Class II",), False),
        ("a+b (c)", ("A+B (C)",), True),  # no pattern
        ("twenty-three", ("23 years", "23"), False),
        ("about 23", ("23 years", "23"), True),
        ("", ("x",), False),
    ],
)
def test_contains_is_any_answer_whatever_its_case(text, answers, right):
    assert contains(text, answers) is right


# The suite.


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_a_perfect_memory_scores_100_and_none_scores_0(tmp_path, make):
    for data in (fda, squad, swde):
        data(tmp_path)
    options = SuiteOptions(data=tmp_path, lengths=(300, 1500), samples=8, cache=tmp_path / "cache")
    model = Says(recall, make())
    perfect, blind = fig2(model, options), fig2(Says(lambda prompt: " nothing", make()), options)
    assert [(s.task, s.metric, s.value, s.count) for s in perfect.scores] == [(n, m, 100, 8) for n in SETS for m in ("300", "1500")]
    assert {s.value for s in blind.scores} == {0} and set(model.asked) == {(48, ("\n",))}
    assert len(perfect.extra["samples"]) == 48 and perfect.extra["samples"][0]["context"] == 300
    assert SUITES["fig2"](Says(recall, make()), options).scores == perfect.scores
    json.dumps(perfect.to_dict())


def test_no_data_and_no_network_say_what_to_give(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = fig2(Says(recall), SuiteOptions(data=fda(tmp_path), lengths=(300,), samples=2))
    assert [s.value for s in result.scores] == [None, None, 100]
    assert "HF_HUB_OFFLINE is set" in result.scores[0].note and "swde.jsonl: rows with text" in result.scores[0].note


def test_batch_padding_and_chunk_change_no_answer(tmp_path):
    """A real model in fp64, on prompts of unequal length."""
    torch.manual_seed(0)
    config = ProteusConfig(mixer="comba", hidden_size=16, num_heads=2, num_hidden_layers=1, memory_blocks=2)
    model = ProteusForCausalLM(config).double()
    options = SuiteOptions(data=fda(tmp_path), lengths=(500,), samples=5, tasks=("fda",))
    got = []
    for batch_size, chunk in ((1, 5000), (4, 5000), (4, 61)):
        rows = fig2(LanguageModel(model, byte_level(), batch_size=batch_size, chunk=chunk), options).extra["samples"]
        got.append([row["got"] for row in rows])
        assert len({row["tokens"] for row in rows}) > 1
    assert got[0] == got[1] == got[2]


@pytest.mark.shared
def test_the_local_sets_run(shared):
    asked: list[str] = []
    model = Says(lambda prompt: asked.append(prompt) or "")
    options = SuiteOptions(data=shared / "data" / "eval", lengths=(600, 9000), samples=10, offline=True)
    result = fig2(model, options)
    assert [s.value for s in result.scores] == [None, None, 0, 0, 0, 0] and [s.count for s in result.scores[2:]] == [10] * 4
    rows = result.extra["samples"]
    assert all(contains(text, tuple(row["expected"])) for text, row in zip(asked, rows))
    assert all(row["length"] > 0.9 * row["context"] for row in rows)
