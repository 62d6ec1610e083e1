"""From text to shards: the same bytes always, the right split, and nothing lost when something is wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.files import file_sha256
from proteus_lm.data.prepare import document_place, prepare
from proteus_lm.data.shards import Manifest
from proteus_lm.data.tokenizer import load_tokenizer

OPTIONS = {"validation_fraction": 0.2, "shard_tokens": 3000, "progress": False}


def make_texts(count: int = 60) -> list[str]:
    draw = random.Random(0)
    alphabet = "abc \n\u00e9\U0001f600\x00"
    return ["".join(draw.choices(alphabet, k=draw.randint(1, 900))) for _ in range(count)]


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", make_texts())


@pytest.fixture(scope="module")
def wide_tokenizer(tmp_path_factory) -> Path:
    """A tokenizer whose largest ids need more than 16 bits."""
    vocab = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000}
    built = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.add_special_tokens(["</s>"])
    path = tmp_path_factory.mktemp("wide") / "wide.json"
    built.save(str(path))
    return path


def test_documents_come_back_as_written_each_with_its_end_token(tmp_path, rows):
    manifest = prepare(rows, "byte", tmp_path / "out", **OPTIONS)
    found = []
    for name, split in manifest.splits.items():
        data = TokenDataset(tmp_path / "out", name)
        ids = [data.document(i) for i in range(data.documents)]
        assert all(document[-1] == 256 for document in ids)
        texts = [data.tokenizer.decode(document[:-1]) for document in ids]
        expected = [t for t in make_texts() if (document_place(t, 0) < 0.2) == (name == "validation")]
        assert texts == expected
        assert (split.documents, split.tokens) == (len(texts), sum(map(len, ids))) == (data.documents, data.tokens)
        assert split.bytes == data.bytes == sum(len(text.encode()) for text in texts)
        assert split.longest_document == data.longest_document == max(map(len, ids))
        assert [shard.tokens >= 3000 for shard in split.shards[:-1]] == [True] * (len(split.shards) - 1)
        found += texts
    assert sorted(found) == sorted(make_texts()) and len(manifest.splits["train"].shards) > 3


def test_the_bytes_are_the_same_whatever_the_workers(tmp_path, rows, shared_or_byte="byte"):
    for workers in (0, 2):
        prepare(rows, shared_or_byte, tmp_path / f"out{workers}", workers=workers, **OPTIONS)
    assert content(tmp_path / "out0") == content(tmp_path / "out2")
    assert {"manifest.json", "tokenizer.json", "tokenizer_config.json"} < set(content(tmp_path / "out0"))


def test_workers_give_the_ids_of_a_tokenizer_file_too(tmp_path, wide_tokenizer):
    rows = write_rows(tmp_path / "rows.jsonl", [f"w{i} w{70_000 - i} unknown" for i in range(1, 700)])
    for workers in (0, 1):
        prepare(rows, wide_tokenizer, tmp_path / f"out{workers}", workers=workers, **OPTIONS)
    assert content(tmp_path / "out0") == content(tmp_path / "out1")
    data = TokenDataset(tmp_path / "out1", "train")
    assert data.manifest.dtype == "uint32" and data.read(0, data.tokens).max() == 70_000


def test_the_split_follows_the_text_and_the_seed_alone(tmp_path, rows):
    backwards = write_rows(tmp_path / "backwards.jsonl", make_texts()[::-1])

    def validation(source: Path, seed: int) -> set[str]:
        out = tmp_path / f"{source.stem}{seed}"
        prepare(source, "byte", out, split_seed=seed, **OPTIONS)
        data = TokenDataset(out, "validation")
        return {data.tokenizer.decode(data.document(i)) for i in range(data.documents)}

    assert validation(rows, 0) == validation(backwards, 0) != validation(rows, 1)


def test_uint16_where_the_vocabulary_fits_and_uint32_on_demand(tmp_path, rows):
    assert prepare(rows, "byte", tmp_path / "a", **OPTIONS).dtype == "uint16"
    manifest = prepare(rows, "byte", tmp_path / "b", dtype="uint32", **OPTIONS)
    shard = manifest.splits["train"].shards[0]
    assert (tmp_path / "b" / "train" / f"{shard.name}.bin").stat().st_size == 4 * shard.tokens
    narrow, wide = TokenDataset(tmp_path / "a"), TokenDataset(tmp_path / "b")
    assert np.array_equal(narrow.read(0, narrow.tokens), wide.read(0, wide.tokens))


def test_a_vocabulary_too_large_for_the_type_is_an_error_at_once(tmp_path, rows, wide_tokenizer):
    with pytest.raises(ValueError, match="70001 tokens of .* do not fit uint16; use uint32 or auto"):
        prepare(rows, wide_tokenizer, tmp_path / "out", dtype="uint16", **OPTIONS)
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        prepare(rows, "byte", tmp_path / "out", dtype="int8", **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_the_same_call_uses_what_is_there(tmp_path, rows, capsys):
    out = tmp_path / "out"
    first = prepare(rows, "byte", out, **OPTIONS)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    second = prepare(rows, "byte", out, **OPTIONS | {"progress": True})
    assert first == second and times == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert "holds the result of this call already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, message",
    [
        ({"validation_fraction": 0.3}, r"validation_fraction was 0\.2, now 0\.3"),
        ({"split_seed": 5, "shard_tokens": 10}, r"split_seed was 0, now 5; shard_tokens was 3000, now 10"),
        ({"dtype": "uint32"}, "dtype was 'uint16', now 'uint32'"),
    ],
)
def test_another_call_for_the_same_folder_names_the_difference_and_overwrite(tmp_path, rows, change, message):
    out = tmp_path / "out"
    prepare(rows, "byte", out, **OPTIONS)
    before = content(out)
    with pytest.raises(FileExistsError, match=rf"prepared in another way: {message}\. Use --overwrite"):
        prepare(rows, "byte", out, **OPTIONS | change)
    assert content(out) == before
    prepare(rows, "byte", out, overwrite=True, **OPTIONS | change)
    prepare(rows, "byte", tmp_path / "fresh", **OPTIONS | change)
    assert content(out) == content(tmp_path / "fresh") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out", "rows.jsonl"]


def test_a_source_or_tokenizer_that_changed_is_another_call(tmp_path, rows, wide_tokenizer):
    out = tmp_path / "out"
    prepare(rows, "byte", out, **OPTIONS)
    with pytest.raises(FileExistsError, match="tokenizer hash was"):
        prepare(rows, wide_tokenizer, out, **OPTIONS)
    write_rows(rows, make_texts(59))
    with pytest.raises(FileExistsError, match="source bytes was .*source sha256 was"):
        prepare(rows, "byte", out, **OPTIONS)


def test_a_folder_of_other_files_is_never_overwritten(tmp_path, rows):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="not prepared data; it is left alone"):
            prepare(rows, "byte", tmp_path / "mine", overwrite=overwrite, **OPTIONS)
        with pytest.raises(FileExistsError, match="not prepared data; it is left alone"):
            prepare(rows, "byte", rows, overwrite=overwrite, **OPTIONS)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_is_filled(tmp_path, rows):
    (tmp_path / "out").mkdir()
    prepare(rows, "byte", tmp_path / "out", **OPTIONS)
    assert TokenDataset(tmp_path / "out").documents > 0


def test_a_finished_folder_with_a_shard_cut_short_is_not_used_again(tmp_path, rows):
    prepare(rows, "byte", tmp_path / "out", **OPTIONS)
    shard = tmp_path / "out" / "train" / "shard-00001.bin"
    os.truncate(shard, 100)
    with pytest.raises(ValueError, match=r"shard-00001\.bin holds 100 bytes; its manifest says \d+ bytes"):
        prepare(rows, "byte", tmp_path / "out", **OPTIONS)


def test_max_documents_takes_the_first_ones(tmp_path, rows):
    manifest = prepare(rows, "byte", tmp_path / "out", max_documents=30, **OPTIONS)
    assert sum(split.documents for split in manifest.splits.values()) == 30
    assert sum(split.bytes for split in manifest.splits.values()) == sum(len(t.encode()) for t in make_texts()[:30])


def test_empty_documents_are_counted_and_left_out(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", ["one", "", "two", ""])
    manifest = prepare(rows, "byte", tmp_path / "out", **OPTIONS | {"validation_fraction": 0})
    assert manifest.empty_documents == 2 and manifest.splits["train"].documents == 2
    assert list(manifest.splits) == ["train"]


def test_a_source_without_text_is_an_error(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", ["", ""])
    with pytest.raises(ValueError, match=r"rows\.jsonl is empty: it has no text \(2 empty documents\)"):
        prepare(rows, "byte", tmp_path / "out", **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_an_empty_split_names_a_fraction_that_works(tmp_path, rows, fraction):
    options = OPTIONS | {"validation_fraction": fraction}
    with pytest.raises(ValueError, match="split would be empty: of 60 documents none falls there") as caught:
        prepare(rows, "byte", tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    works = float(str(caught.value).split("validation_fraction=")[2].split()[0])
    manifest = prepare(rows, "byte", tmp_path / "out", **OPTIONS | {"validation_fraction": works})
    assert manifest.splits["validation"].documents == 1


@pytest.mark.parametrize("texts", [["alone"], ["twin", "twin", "twin"]])
def test_one_text_cannot_be_split_and_the_error_says_what_can_be_done(tmp_path, texts):
    rows = write_rows(tmp_path / "rows.jsonl", texts)
    with pytest.raises(ValueError, match="all of one text: it cannot be split by document; set validation_fraction=0"):
        prepare(rows, "byte", tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize(
    "option, value",
    [("validation_fraction", 1.0), ("validation_fraction", -0.1), ("validation_fraction", float("nan")), ("shard_tokens", 0),
     ("max_documents", 0), ("workers", -1), ("split_seed", 2**63)],
)  # fmt: skip
def test_a_number_outside_its_range_is_named(tmp_path, rows, option, value):
    with pytest.raises(ValueError, match=f"{option} is {value}; it must"):
        prepare(rows, "byte", tmp_path / "out", **OPTIONS | {option: value})


def test_a_bad_row_loses_no_whole_shard_and_the_mended_source_starts_over_cleanly(tmp_path, rows, capsys):
    good = rows.read_text()
    rows.write_text(good + '{"body": 1}\n')
    with pytest.raises(ValueError, match="line 61: no field 'text'"):
        prepare(rows, "byte", tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()
    rows.write_text(good)
    prepare(rows, "byte", tmp_path / "out", **OPTIONS)
    prepare(rows, "byte", tmp_path / "fresh", **OPTIONS)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


@pytest.mark.parametrize("call", [1, 2, 6, 9, 20])
def test_a_full_disk_names_path_and_bytes_and_leaves_the_old_folder_as_it_was(tmp_path, rows, monkeypatch, call):
    out, calls = tmp_path / "out", iter(range(1, 1000))
    prepare(rows, "byte", out, **OPTIONS)
    before, real = content(out), os.fsync

    def full(descriptor: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"could not write .*\.out\.partial.*: No space left.*; \d+ bytes needed, \d+ bytes free") as caught:
        prepare(rows, "byte", out, overwrite=True, **OPTIONS | {"split_seed": 1})
    assert caught.value.errno == errno.ENOSPC
    assert content(out) == before and sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]


CHILD = """
import os, resource, signal, sys
from pathlib import Path
from proteus_lm.data.prepare import prepare

def kill_at(owner, name, count):
    real, calls = getattr(owner, name), iter(range(1, 1000))
    def counted(*arguments):
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    setattr(owner, name, counted)

source, out, action = sys.argv[1:4]
workers, overwrite = 0, False
exec(action)
prepare(source, "byte", out, validation_fraction=0.2, shard_tokens=3000, progress=False, workers=workers, overwrite=overwrite)
"""


def run_child(source: Path, out: Path, action: str) -> subprocess.CompletedProcess[str]:
    """`prepare` in a process of its own; returns when it and all processes it started have ended."""
    command = [sys.executable, "-c", CHILD, str(source), str(out), action]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "action, kept",
    [
        ("kill_at(os, 'fsync', 1)", 0),  # before the first shard is whole
        ("kill_at(os, 'fsync', 8)", 2),  # between the tokens of the third shard and its index
        ("kill_at(os, 'fsync', 9); workers = 1", 2),  # between a shard and the note that it is whole
        ("kill_at(Path, 'replace', 6)", 2),  # the note is written, not yet in its place
        ("kill_at(Path, 'rename', 1)", 6),  # all is done but the last step
    ],
)
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path, rows, capsys, action, kept):
    out = tmp_path / "out"
    assert run_child(rows, out, action).returncode == -9
    assert not out.exists() and (tmp_path / ".out.partial").is_dir()
    prepare(rows, "byte", out, **OPTIONS | {"progress": True})
    said = capsys.readouterr().err
    assert (f"going on behind the {kept} whole shards" in said) if kept else ("going on" not in said)
    prepare(rows, "byte", tmp_path / "fresh", **OPTIONS)
    assert content(out) == content(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out", "rows.jsonl"]


def test_shards_of_another_call_are_not_continued(tmp_path, rows, capsys):
    out = tmp_path / "out"
    assert run_child(rows, out, "kill_at(os, 'fsync', 9)").returncode == -9
    prepare(rows, "byte", out, **OPTIONS | {"split_seed": 1, "progress": True})
    assert "going on" not in capsys.readouterr().err
    prepare(rows, "byte", tmp_path / "fresh", **OPTIONS | {"split_seed": 1})
    assert content(out) == content(tmp_path / "fresh")


def test_killed_between_the_two_renames_of_overwrite_the_old_folder_comes_back(tmp_path, rows):
    out = tmp_path / "out"
    prepare(rows, "byte", out, **OPTIONS | {"split_seed": 1})
    before = content(out)
    assert run_child(rows, out, "overwrite = True; kill_at(Path, 'rename', 2)").returncode == -9
    assert not out.exists()
    with pytest.raises(FileExistsError, match="split_seed was 1, now 0"):
        prepare(rows, "byte", out, **OPTIONS)
    assert content(out) == before
    prepare(rows, "byte", out, overwrite=True, **OPTIONS)
    assert Manifest.read(out).options["split_seed"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]


def test_a_write_that_the_system_refuses_is_a_clear_error(tmp_path, rows):
    done = run_child(rows, tmp_path / "out", "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))")
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert "WriteError" in done.stderr and "shard-00000.bin: File too large" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_worker_that_dies_is_a_clear_error(tmp_path, rows):
    action = (
        "from proteus_lm.data import parallel\n"
        "parallel._start = os._exit\nworkers = 1\n"  # pickled by name: the worker's first call ends it
    )
    done = run_child(rows, tmp_path / "out", action)
    assert done.returncode == 1 and "RuntimeError: a worker process died" in done.stderr


def test_two_processes_do_not_prepare_one_folder_at_a_time(tmp_path, rows, monkeypatch):
    def second(*_arguments) -> None:
        monkeypatch.setattr("proteus_lm.data.output.Output.finish", real)
        with pytest.raises(FileExistsError, match="another process is preparing"):
            prepare(rows, "byte", tmp_path / "out", **OPTIONS)
        return real(*_arguments)

    from proteus_lm.data.output import Output

    real = Output.finish
    monkeypatch.setattr("proteus_lm.data.output.Output.finish", second)
    prepare(rows, "byte", tmp_path / "out", **OPTIONS)
    assert TokenDataset(tmp_path / "out").documents > 0


def test_plain_lines_where_there_is_no_terminal(tmp_path, rows, capsys):
    prepare(rows, "byte", tmp_path / "out", **OPTIONS | {"progress": True})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("prepare: 60 documents, 0.0M tokens")


def test_the_embedded_corpus_has_both_splits_and_long_documents(tmp_path):
    manifest = prepare("pydoc", "byte", tmp_path / "out", progress=False)
    train, validation = manifest.splits["train"], manifest.splits["validation"]
    assert train.bytes + validation.bytes > 1_500_000 and validation.bytes > 10_000
    assert train.tokens / train.documents > 8_000


@pytest.mark.shared
def test_real_text_with_a_real_tokenizer_comes_back(tmp_path, shared):
    corpus, spec = shared / "data" / "corpus" / "validation", shared / "data" / "tokenizer" / "tokenizer.json"
    manifest = prepare(corpus, spec, tmp_path / "out", max_documents=8, **OPTIONS)
    assert manifest.dtype == "uint16" and manifest.tokenizer["vocab_size"] == 32_000
    documents = [document.text for document, _ in zip(_rows(corpus), range(8))]
    tokenizer = load_tokenizer(spec)
    found = []
    for split in manifest.splits:
        data = TokenDataset(tmp_path / "out", split)
        data.check_tokenizer(tokenizer)
        found += [tokenizer.decode(data.document(i)[:-1]) for i in range(data.documents)]
    assert sorted(found) == sorted(documents)


def _rows(corpus: Path):
    from proteus_lm.data.sources import open_source

    return open_source(corpus).documents()
