"""What the long suites share: fitting with few encodings, text cut at words and sentences, rows of files and of the hub."""

import gzip
import json

import huggingface_hub
import pytest

from proteus_lm.data.python_docs import PythonDocs
from proteus_lm.evals.long_context import (
    Haystack,
    NoRoom,
    Question,
    Store,
    ask,
    fit,
    haystack,
    hub_rows,
    load_haystack,
    read_rows,
    score_of,
)
from proteus_lm.evals.long_context.rows import find_file
from proteus_lm.evals.suite import MissingData

from .recallers import ESSAY, Says, byte_level, essays

# Fitting.


@pytest.mark.parametrize("rate", [0.3, 1, 1.37, 23])
@pytest.mark.parametrize("room", [100, 999, 4096, 2**21])
@pytest.mark.parametrize("start", [None, 1, 10**6])
def test_fit_finds_what_fills_the_room_with_few_looks(rate, room, start):
    looks = []

    def tokens(units):
        looks.append(units)
        return 50 + int(rate * units) + units % 3  # not quite in proportion

    found = fit(tokens, room, start=start)
    assert tokens(found) <= room and room - tokens(found) <= max(rate + 3, room / 1000)
    assert len(looks) < 20


def test_fit_keeps_to_its_bounds():
    assert fit(lambda n: n, 100, least=5, most=40) == 40
    assert fit(lambda n: n, 10, least=10) == 10
    with pytest.raises(NoRoom, match="11 tokens is the shortest this task has, and there is room for 10"):
        fit(lambda n: n, 10, least=11)
    with pytest.raises(ValueError, match="does not read the text"):
        fit(lambda n: 0, 10)


def test_fit_bears_texts_that_grow_in_leaps():
    found = fit(lambda n: 700 * (n // 100), 5000)
    assert found // 100 == 7


# Text.


def test_words_and_sentences_go_on_without_end():
    text = Haystack("One two.  Three\nfour five! (Six) seven e.g. eight? Nine", "test")
    assert (text.words, text.sentences) == (10, 4)
    assert [text.text(text.sentence(i), text.sentence(i + 1)) for i in range(5)] == [
        *("One two.", "Three four five!", "(Six) seven e.g. eight?", "Nine", "One two."),
    ]
    assert text.text(8, 13) == "eight? Nine One two. Three" and text.text(3, 3) == ""
    assert [text.sentences_in(n) for n in (0, 1, 2, 3, 9, 10, 11, 20)] == [0, 1, 1, 2, 3, 4, 5, 8]


def test_a_tally_foresees_tokens():
    text = Haystack(ESSAY, "test")
    tally = text.tally(lambda texts: [len(t) for t in texts], "bytes")
    for first in (0, 5, text.words - 3, text.words + 100):
        for tokens in (300, 5000, 5 * int(tally[-1])):
            words = text.words_for(first, tokens, tally)
            assert abs(len(text.text(first, first + words)) - tokens) < 60
    assert text.words_for(7, 0, tally) == text.words_for(7, -5, tally) == 0


def test_a_user_gives_text_in_several_ways(tmp_path):
    def load(name, content):
        folder = tmp_path / name.replace("/", "-")
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        return load_haystack(folder)

    rows = b'{"text": "Row one."}\n{"text": "Row two."}\n'
    assert load("essays.txt", b"A  text.").text(0, 2) == "A text."
    assert load("essays/b.txt", b"B text.").source == "b.txt"
    assert load("essays.jsonl", rows).text(0, 4) == "Row one. Row two."
    assert load("essays.jsonl.gz", gzip.compress(rows)).source == "essays.jsonl.gz"
    assert load("PaulGrahamEssays.json", b'{"text": "P G."}').text(0, 2) == "P G."
    with pytest.raises(ValueError, match=r"holds no word; give text in --data DIR"):
        load("essays.txt".replace("txt", "json"), b'[{"text": " "}]')
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "essays.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"essays.txt cannot be read as UTF-8 text"):
        load_haystack(tmp_path / "x")


def test_the_default_text_is_pythons_documentation(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text('"""What a module does.\n\nIt says so."""\n')
    monkeypatch.setattr(haystack, "PythonDocs", lambda: PythonDocs(tmp_path / "lib"))
    haystack._pydoc.cache_clear()
    try:
        text = load_haystack(None)
        assert text.source == "pydoc" and text.text(0, text.words) == "a What a module does. It says so."
        (tmp_path / "data").mkdir()
        assert load_haystack(tmp_path / "data") is text  # a folder without any
        haystack._pydoc.cache_clear()
        monkeypatch.setattr(haystack, "PythonDocs", lambda: PythonDocs(tmp_path / "data"))
        with pytest.raises(MissingData, match=r"no sources of its standard library.*give text in --data DIR"):
            load_haystack(None)
    finally:
        haystack._pydoc.cache_clear()


# Rows.


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"x": 1}\n{"y": 2}\n', r"a.jsonl row 1 has no field x"),
        ("a.jsonl", b'{"x": 1}\n{"x": \n', r"line 2 is not JSON"),
        ("a.jsonl", b"", r"holds no rows"),
        ("a.json", b"3", r"holds no rows"),
        ("a.json", b"[3]", r"row 0 is no JSON object; give rows of fields: x"),
        ("a.jsonl.gz", b"no gzip", r"cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"x": 1}', mtime=0)[:-9], r"a.jsonl.gz cannot be read"),
        (
            "a.jsonl.gz",
            gzip.compress(b"x" * 99, mtime=0)[:10] + b"\xff" * 20,
            r"a.jsonl.gz cannot be read",
        ),  # no OSError: zlib's own
        ("a.jsonl", b"\xff", r"cannot be read as UTF-8"),
    ],
)
def test_a_file_that_is_not_rows_names_its_fault(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name, ("x",))


def test_ends_of_lines_inside_texts_end_no_row(tmp_path):
    """JSON may hold U+2028 and its like as they are; `str.splitlines` cuts there."""
    text = "a\u2028b\u2029c\u0085d\x1ce"
    (tmp_path / "a.jsonl").write_text(f'{{"x": "{text[:-2]}"}}\r\n\n{{"x": 2}}\n', encoding="utf-8", newline="")
    assert [row["x"] for row in read_rows(tmp_path / "a.jsonl", ("x",)).rows] == [text[:-2], 2]


def test_samples_with_any_character_come_back_from_the_store(tmp_path):
    made = [{"a": "x\u2028y"}]
    assert Store(tmp_path).get("n", {"s": 1}, lambda: made) == made
    assert Store(tmp_path).get("n", {"s": 1}, lambda: pytest.fail("made again")) == made


def test_a_store_that_cannot_be_is_known_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="cannot be a folder"):
        Store(tmp_path / "file").get("n", {}, lambda: pytest.fail("worked in vain"))


def test_the_first_file_in_the_order_of_names_counts(tmp_path):
    (tmp_path / "b.jsonl").write_text("{}")
    (tmp_path / "a.json").write_text("[{}]")
    assert (
        find_file(tmp_path, "a", "b") == tmp_path / "a.json" and find_file(tmp_path, "c") is None and find_file(None, "a") is None
    )


def test_the_hubs_rows_are_taken_or_missed_with_the_remedy(monkeypatch):
    import datasets

    class Stream(list):
        def take(self, count):
            return self[:count]

    def ask_hub(**options):
        return hub_rows("a/b", "c", "test", fields=("text",), remedy="Give DIR/b.jsonl.", **{"offline": False, **options})

    monkeypatch.setattr("proteus_lm.evals.long_context.rows.require_hub", lambda *a, **k: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: Stream({"text": str(i)} for i in range(5)))
    assert [r["text"] for r in ask_hub(limit=2).rows] == ["0", "1"] and ask_hub().source == "hub a/b (c)"

    def broken(*a, **k):
        raise ConnectionError("reset")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(MissingData, match=r"gave no a/b, split test \(ConnectionError: reset\)\. Give DIR/b.jsonl\."):
        ask_hub()


def test_offline_only_the_cache_is_looked_at(monkeypatch):
    import datasets

    def ask_hub(**options):
        return hub_rows("a/b", None, "test", fields=("text",), remedy="Give it.", offline=True, **options)

    def load(name, config, *, split, streaming=False):
        assert datasets.config.HF_HUB_OFFLINE and huggingface_hub.constants.HF_HUB_OFFLINE and not streaming
        if missing:
            raise ConnectionError("offline")
        return [{"text": "0"}, {"text": "1"}]

    before, missing = datasets.config.HF_HUB_OFFLINE, False
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [row["text"] for row in ask_hub().rows] == ["0", "1"] and len(ask_hub(limit=1).rows) == 1
    missing = True
    with pytest.raises(MissingData, match=r"a/b is not here, .*offline was asked for.* Give it\."):
        ask_hub()
    assert before == datasets.config.HF_HUB_OFFLINE


# Asking.


def test_questions_are_made_and_asked_in_groups_that_fit(monkeypatch):
    monkeypatch.setattr("proteus_lm.evals.long_context.asking._GROUP_CHARACTERS", 25)
    held, most = [0], [0]

    def questions():
        for i in range(9):
            held[0] += 1
            most[0] = max(most[0], held[0])
            yield Question(f"prompt {i}  ", (str(i),), {"index": i})

    class Counts(Says):
        def generate(self, prompts, **options):
            held[0] -= len(prompts)
            return super().generate(prompts, **options)

    model = Counts(lambda text: text.split()[-1])
    records, cut = ask(model, questions(), lambda text, q: float(text in q.expected), allow_truncation=False, max_new_tokens=1)
    assert [(r.got, r.score, r.about["index"], r.tokens) for r in records] == [(str(i), 1.0, i, 10) for i in range(9)]
    assert cut == 0 and most[0] <= 3


def test_a_score_is_the_mean_with_its_error_in_percent():
    records, _ = ask(
        Says(lambda text: text),
        [Question(text, ("a",)) for text in "abab"],
        lambda text, q: float(text in q.expected),
        allow_truncation=False,
        max_new_tokens=1,
    )
    score = score_of("t", "m", records, 2, version="1", data="d")
    assert (score.value, score.count, score.truncated) == (50, 4, 2)
    assert score.stderr == pytest.approx(100 * (1 / 3) ** 0.5 / 2)  # deviation of 0, 1, 0, 1 is sqrt(1/3)
    assert score_of("t", "m", records[:1], 0, version="1", data="d").stderr is None
    json.dumps(records[0].to_dict())


def test_the_models_own_wish_about_cutting_comes_back(tmp_path):
    model = Says(lambda text: pytest.fail("asked"), byte_level())
    with pytest.raises(pytest.fail.Exception):
        ask(model, [Question("a", ("a",))], lambda text, q: 0, allow_truncation=True, max_new_tokens=1)
    assert model.allow_truncation is False and essays(tmp_path) == tmp_path
