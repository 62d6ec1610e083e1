"""LongBench as its authors run it: prompts, the cut in the middle, lengths of answers, metrics."""

import json

import pytest
import torch

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.evals.language_model import LanguageModel
from proteus_lm.evals.longbench import (
    PAPER,
    SETS,
    classification_score,
    count_score,
    middle_cut,
    qa_f1_score,
    retrieval_score,
    rouge_score,
    table3,
)
from proteus_lm.evals.suite import SUITES, SuiteOptions

from .recallers import ESSAY, Says, byte_level

ANSWERS = {"trec": ["Colour"], "passage_count": ["7"], "passage_retrieval_en": ["Paragraph 12"]}


def write(folder, *names, context=ESSAY[:400]):
    for name in names:
        answers = ANSWERS.get(name, ["the red house", "a blue barn."])
        rows = [
            {
                "input": f"What of {name} {i}?",
                "context": context,
                "answers": answers,
                "all_classes": ["Colour", "Number"],
                "_id": str(i),
            }
            for i in range(4)
        ]
        (folder / f"longbench_{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


# Metrics.


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("The red house", "a RED house!", 1),
        ("red", "the red house", 2 / 3),
        ("red red", "red house", 1 / 2),
        ("it is red", "house", 0),
        ("", "house", 0),
        ("the", "a", 0),  # nothing is left of either
    ],
)
def test_f1_is_over_words_without_case_articles_and_punctuation(prediction, reference, score):
    assert qa_f1_score(prediction, reference) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("a b c", "a b c", 1),
        ("a c", "a b c", 0.8),  # 2 of 2 and 2 of 3 words
        ("c a", "a b c", 0.4),  # order counts within a sentence
        ("the cat sat on the mat. a dog ran", "a dog sat. the cat ran on", 14 / 15),  # `rouge` 1.0.1 gave 0.93333
        ("", "a", 0),
        ("...", "a", 0),
    ],
)
def test_rouge_is_that_of_the_package_the_authors_use(prediction, reference, score):
    """Besides these, 3,000 random pairs and 12 rows of multi_news gave what `rouge` 1.0.1 gives, to 1e-12."""
    assert rouge_score(prediction, reference) == pytest.approx(score, abs=1e-7)


def test_classes_retrieval_and_counts():
    classes = ["Number", "Number of people", "Colour"]
    assert classification_score("It is Colour.", "Colour", classes) == 1
    assert classification_score("Number or Colour", "Colour", classes) == 1 / 2
    assert classification_score("Number of people", "Number of people", classes) == 1  # "Number" is a part of it
    assert classification_score("colour", "Colour", classes) == 0
    assert retrieval_score("Paragraph 12", "Paragraph 12") == 1 and retrieval_score("12 or 13", "Paragraph 12") == 1 / 2
    assert retrieval_score("none", "Paragraph 1") == 0 and retrieval_score("Paragraph 121", "Paragraph 12") == 0
    assert count_score("7", "7") == 1 and count_score("7 8 9 7", "7") == 1 / 2 and count_score("", "7") == 0
    with pytest.raises(ValueError, match="names no paragraph"):
        retrieval_score("1", "12")


# The cut.


def test_the_middle_is_cut_out():
    ids = list(range(10))
    assert middle_cut(ids, 10) == ids and middle_cut(ids, 6) == [0, 1, 2, 7, 8, 9]
    assert middle_cut(ids, 7) == [0, 1, 2, 7, 8, 9]  # two equal halves, as upstream
    with pytest.raises(ValueError, match="room for 1 tokens"):
        middle_cut(ids, 1)


def test_long_prompts_are_cut_only_where_that_was_wished_and_counted(tmp_path):
    data = write(tmp_path, "hotpotqa", context=ESSAY[:3000])
    model = Says(lambda text: "the red house", max_length=1000)
    (refused,) = table3(model, SuiteOptions(data=data, tasks=("hotpotqa",))).scores
    assert refused.value is None and "4 of 4 prompts are longer than the 968 tokens" in refused.note and not model.prompts
    (cut,) = table3(model, SuiteOptions(data=data, tasks=("hotpotqa",), allow_truncation=True)).scores
    assert (cut.value, cut.truncated, cut.count) == (100, 4, 4) and {len(p) for p in model.prompts} == {968}
    assert all(text.startswith("Answer the question") and text.endswith("?\nAnswer:") for text in model.texts)
    free = Says(lambda text: "the red house")
    (whole,) = table3(free, SuiteOptions(data=data, tasks=("hotpotqa",))).scores
    assert whole.truncated == 0 and min(map(len, free.prompts)) > 3000
    (wished,) = table3(free, SuiteOptions(data=data, tasks=("hotpotqa",), lengths=(632,))).scores
    assert wished.truncated == 4 and len(free.prompts[-1]) == 600
    (other,) = table3(free, SuiteOptions(data=data, tasks=("hotpotqa",), lengths=(600, 700))).scores
    assert other.truncated == 0  # several lengths are for other suites
    (short,) = table3(free, SuiteOptions(data=data, tasks=("hotpotqa",), lengths=(12,))).scores
    assert short.value is None and "12 tokens hold no prompt beside an answer of 32; ask for 34" in short.note


def test_rows_that_cannot_be_scored_are_known_before_any_set_is_asked(tmp_path):
    write(tmp_path, "hotpotqa", context=ESSAY[:300])
    for name, row, words in (
        ("trec", {"context": "c", "input": "i", "answers": ["x"]}, "no list all_classes, which trec is scored with"),
        ("trec", {"context": "c", "input": "i", "answers": []}, r"row 0 has the answers \[\]; it needs a list"),
        ("trec", {"context": "c", "input": "i", "answers": "abc"}, "row 0 has the answers 'abc'; it needs a list"),
    ):
        (tmp_path / f"longbench_{name}.jsonl").write_text(json.dumps(row))
        model = Says(lambda text: "x")
        with pytest.raises(ValueError, match=words):
            table3(model, SuiteOptions(data=tmp_path, tasks=("hotpotqa", name)))
        assert not model.prompts


# The suite.


def right(text: str) -> str:
    """The second of two references, or the one there is. The prompt that asks for a count has no input."""
    if "how many unique paragraphs" in text:
        return "7"
    return next((ANSWERS[name][0] for name in ANSWERS if f"What of {name} " in text), "a blue barn.")


def test_a_perfect_memory_scores_100_and_none_scores_0(tmp_path):
    """Each set, by its own metric. A small number in ROUGE's denominator keeps it 5e-7 below 100."""
    options = SuiteOptions(data=write(tmp_path, *SETS))
    model = Says(right)
    perfect, blind = table3(model, options), table3(Says(lambda text: " ."), options)
    assert [(s.task, s.metric, s.count) for s in perfect.scores] == [(n, one.metric, 4) for n, one in SETS.items()]
    assert [s.value for s in perfect.scores] == pytest.approx([100] * len(SETS), abs=1e-5)
    assert {s.value for s in blind.scores} == {0}
    assert list(SETS)[:6] == list(PAPER)
    assert [s.task for s in perfect.scores if "not one of the paper's six" in s.note] == list(SETS)[6:]
    assert [n for n, _ in model.asked[::4]] == [one.max_new_tokens for one in SETS.values()]
    assert set(perfect.extra["samples"][0]) == {"task", "index", "id", "tokens", "expected", "got", "score"}
    json.dumps(perfect.to_dict())


def test_only_the_first_line_counts_where_a_model_goes_on_with_examples(tmp_path):
    result = table3(
        Says(lambda text: f"\n{right(text)}\nWhat of the next"), SuiteOptions(data=write(tmp_path, "triviaqa", "musique"))
    )
    assert result.score("triviaqa", "qa_f1_score").value == 100
    assert result.score("musique", "qa_f1_score").value == pytest.approx(100 * 4 / 7)  # 2 of 5 words are the 2 right ones


def test_prompts_are_the_authors(tmp_path):
    model = Says(lambda text: "")
    table3(model, SuiteOptions(data=write(tmp_path, "qasper", context="A {strange} text"), tasks=("qasper",), limit=1))
    (text,) = model.texts
    ask = (
        "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based on the "
        'information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or '
        '"unanswerable". Do not provide any explanation.'
    )
    assert text == (
        f"You are given a scientific article and a question. Answer the question {ask}\n\nArticle: A {{strange}} text\n\n "
        f"Answer the question based on the above article {ask}\n\nQuestion: What of qasper 0?\n\nAnswer:"
    )


def test_only_the_six_run_without_more_files_and_say_what_to_give(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = SUITES["table3"](Says(lambda text: "red house"), SuiteOptions(data=write(tmp_path, "musique")))
    assert [(s.task, s.value) for s in result.scores] == [(name, 100 if name == "musique" else None) for name in PAPER]
    assert "longbench_narrativeqa.jsonl" in result.scores[0].note and "HF_HUB_OFFLINE" in result.scores[0].note


def test_batch_padding_and_chunk_change_no_answer(tmp_path):
    """A real model in fp64, on prompts of unequal length."""
    torch.manual_seed(0)
    config = ProteusConfig(mixer="gated_deltanet", hidden_size=16, num_heads=2, num_hidden_layers=1)
    model = ProteusForCausalLM(config).double()
    data = write(tmp_path, "2wikimqa")
    rows = [json.loads(line) for line in (data / "longbench_2wikimqa.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        row["context"] = row["context"][: 100 + 40 * i]
    (data / "longbench_2wikimqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    got = []
    for batch_size, chunk in ((1, 5000), (3, 5000), (3, 77)):
        asked = LanguageModel(model, byte_level(), batch_size=batch_size, chunk=chunk)
        got.append([r["got"] for r in table3(asked, SuiteOptions(data=data, tasks=("2wikimqa",))).extra["samples"]])
    assert got[0] == got[1] == got[2] and len(got[0]) == 4


@pytest.mark.shared
def test_a_real_set_is_read(shared):
    data = shared / "data" / "eval"
    model = Says(lambda text: "The protesters stayed.")
    result = table3(model, SuiteOptions(data=data, offline=True, limit=3))
    assert [s.task for s in result.scores] == [*PAPER, "multi_news"]
    assert all(s.value is None for s in result.scores[:6]) and 0 < result.scores[6].value < 20
    assert model.texts[0].startswith("You are given several news passages.") and model.asked[0] == (512, ())
