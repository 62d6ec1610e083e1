"""The hub's sets as `datasets` leaves them in its cache: with the hub's own columns and types every suite reads them, offline.

Columns are those of the public sets (their dataset_info; of Xnhyacinth/LongBench: the public script that made it).
"""

import json
from pathlib import Path

import datasets
import pytest
from datasets import ClassLabel, Features, Sequence, Value
from datasets.arrow_writer import ArrowWriter
from datasets.naming import camelcase_to_snakecase

from proteus_lm.evals.completion import fig2
from proteus_lm.evals.longbench import SETS, table3
from proteus_lm.evals.longbench.sets import PAPER
from proteus_lm.evals.suite import SuiteOptions

from .recallers import Says, byte_level

TEXT = Value("string")


def texts(*names: str) -> dict[str, Value]:
    return dict.fromkeys(names, TEXT)


HARNESS = {
    "wikitext": ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", texts("page")),
    "lambada_openai": ("EleutherAI/lambada_openai", "default", texts("text")),
    "piqa": ("baber/piqa", "default", texts("goal", "sol1", "sol2") | {"label": ClassLabel(names=["0", "1"])}),
    "hellaswag": (
        "Rowan/hellaswag",
        "default",
        {
            "ind": Value("int32"),
            **texts("activity_label", "ctx_a", "ctx_b", "ctx", "source_id", "split", "split_type", "label"),
            "endings": Sequence(TEXT),
        },
    ),
    "winogrande": ("allenai/winogrande", "winogrande_xl", texts("sentence", "option1", "option2", "answer")),
    "arc_easy": (
        "allenai/ai2_arc",
        "ARC-Easy",
        texts("id", "question", "answerKey") | {"choices": Sequence(texts("text", "label"))},
    ),
    "arc_challenge": (
        "allenai/ai2_arc",
        "ARC-Challenge",
        texts("id", "question", "answerKey") | {"choices": Sequence(texts("text", "label"))},
    ),
    "social_iqa": ("lighteval/siqa", "default", texts("context", "question", "answerA", "answerB", "answerC", "label")),
    "boolq": (
        "aps/super_glue",
        "boolq",
        texts("question", "passage") | {"idx": Value("int32"), "label": ClassLabel(names=["False", "True"])},
    ),
}
LONGBENCH = {
    **texts("context", "question", "dataset", "language", "_id", "answer_prefix", "task"),
    **dict.fromkeys(("answers", "all_classes"), Sequence(TEXT)),
    **dict.fromkeys(("length", "max_new_tokens"), Value("int64")),
}


def leave(cache: Path, name: str, config: str, columns: dict, splits: dict[str, list[dict]]) -> None:
    """What `datasets.load_dataset(name, config)` leaves in its cache. Columns a row lacks are empty, as in unlabelled splits."""
    owner, repository = name.split("/")
    stem = camelcase_to_snakecase(repository)
    folder = cache / f"{owner}___{stem}" / config / "0.0.0" / ("0" * 40)
    folder.mkdir(parents=True)
    features, infos = Features(columns), {}
    for split, rows in splits.items():
        with ArrowWriter(path=str(folder / f"{stem}-{split}.arrow"), features=features) as writer:
            for row in rows:
                writer.write({column: row.get(column) for column in columns})
            count, size = writer.finalize()
        infos[split] = {"name": split, "num_bytes": size, "num_examples": count, "dataset_name": stem}
    info = datasets.DatasetInfo(features=features, splits=datasets.SplitDict.from_split_dict(infos), version="0.0.0")
    info.builder_name, info.dataset_name, info.config_name = "parquet", stem, config
    info.write_to_directory(str(folder))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, which may not be asked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    return tmp_path / "hub"


@pytest.mark.parametrize("task", HARNESS)
def test_table_1_reads_the_hubs_columns(task, cache, tmp_path):
    """A perfect stub is perfect on them, and sees what it sees of a local file of the same rows."""
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    from proteus_lm.evals.harness import table1

    from .test_harness import Stub, made_rows, write

    rows, (name, config, columns) = made_rows(6)[task], HARNESS[task]
    hidden = [{**row, **{column: None for column in ("label", "answer") if column in columns}} for row in rows]
    open_test = task in ("wikitext", "lambada_openai", "arc_easy", "arc_challenge")
    splits = {"train": rows[:2], "validation": rows[::-1] if open_test else rows, "test": rows if open_test else hidden}
    leave(cache, name, config, columns, splits)
    hub, local = Stub(byte_level(), True), Stub(byte_level(), True)
    found = table1(hub, SuiteOptions(tasks=(task,)))
    given = table1(local, SuiteOptions(tasks=(task,), data=write(tmp_path, {task: rows})))
    assert [(s.metric, s.value, s.count) for s in found.scores] == [(s.metric, s.value, s.count) for s in given.scores]
    assert hub.seen == local.seen
    assert {score.count for score in found.scores} == {6}
    assert all(score.data.startswith(name) and score.data.endswith("(cached)") for score in found.scores)
    assert all(score.value == 100 for score in found.scores if score.metric.startswith("acc"))


ANSWERS = {"passage_retrieval_en": "Paragraph 7", "passage_count": "7"}


def longbench_row(name: str) -> tuple[dict, str]:
    """A row as the hub has it, and LongBench's prompt of the row that it was made of."""
    context, asked = "It rained {all} day.", "What fell?"
    last = {"trec": "Type:", "triviaqa": "Answer:", "samsum": "Summary:"}.get(name, "")  # ends the authors' own `input`
    prompt = SETS[name].prompt.format(context=context, input=asked + last)
    place = prompt.index(context) + len(context)
    end = next(e for e in ("Answer:", "Summary:", "Type:", "The final answer is: ", "The answer is: ") if prompt.endswith(e))
    row = {"context": prompt[:place] + "\n\n", "question": prompt[place + 2 : len(prompt) - len(end)], "answer_prefix": end}
    if name == "trec":  # a single line break stands behind its context
        row |= {"context": prompt[: place + 1], "question": prompt[place + 1 : len(prompt) - len(end)]}
    return row | {
        "answers": [ANSWERS.get(name, "rain")],
        "all_classes": ["rain", "snow"],
        "task": name,
        "length": 9,
        "_id": "7",
    }, prompt


@pytest.mark.parametrize("name", SETS)
def test_the_prompts_of_the_hubs_longbench_are_its_authors(name, cache, tmp_path):
    """The hub's rows carry the prompt already: it is asked as it is, not put into itself."""
    row, prompt = longbench_row(name)
    leave(cache, "Xnhyacinth/LongBench", name, LONGBENCH, {"test": [row, row]})
    model = Says(lambda text: ANSWERS.get(name, "rain"))
    (score,) = table3(model, SuiteOptions(tasks=(name,))).scores
    assert model.texts == [prompt, prompt]
    assert (score.count, score.data) == (2, f"hub Xnhyacinth/LongBench ({name})")
    assert score.value == pytest.approx(100)
    raw = {
        "context": "It rained.",
        "question": "What fell?",
        "answers": row["answers"],
        "all_classes": ["rain"],
        "answer_prefix": "?",
    }
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(raw))
    table3(model, SuiteOptions(tasks=(name,), data=tmp_path))
    assert model.texts[-1] == SETS[name].prompt.format(context="It rained.", input="What fell?")  # rows without a prompt get it


def test_table_3_takes_the_papers_six_from_the_hub(cache):
    for name in PAPER:
        leave(cache, "Xnhyacinth/LongBench", name, LONGBENCH, {"test": [longbench_row(name)[0]] * 3})
    found = table3(Says(lambda text: "rain"), SuiteOptions(limit=2))
    assert [(score.task, score.value, score.count) for score in found.scores] == [(name, 100, 2) for name in PAPER]


BASED = {
    "swde": ("hazyresearch/based-swde-v2", "\n\nruntime:", "runtime"),
    "fda": ("hazyresearch/based-fda", "\n\nApplicant:", "applicant"),
    "squad_completion": ("hazyresearch/based-squad", "\nThe number of the flood is", "the number of the flood is"),
}


@pytest.mark.parametrize("name", BASED)
def test_figure_2_reads_the_hubs_columns(name, cache):
    hub, stem, key = BASED[name]
    rows = [
        {
            "doc_id": f"d{i}",
            "file_name": f"{i}.txt",
            "key": key,
            "text": f"A page. It says {1000 + i} here.{stem}",
            "value": str(1000 + i),
        }
        for i in range(4)
    ]
    leave(cache, hub, "default", texts("doc_id", "file_name", "key", "text", "value"), {"validation": rows})
    model = Says(lambda text: text[text.rindex("says ") + 5 :][:4])  # the document before the stem is the last one
    result = fig2(model, SuiteOptions(tasks=(name,), lengths=(120,)))
    (score,) = result.scores
    assert (score.count, score.data) == (4, f"hub {hub} (default)")
    assert all(text.endswith(stem) for text in model.texts)
    assert name == "squad_completion" or score.value == 100
