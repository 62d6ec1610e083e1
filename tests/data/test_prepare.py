"""From text to shards: the same bytes always, the right split, and nothing lost when something is wrong."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.files import WriteError, file_sha256
from proteus_lm.data.prepare import document_place, prepare
from proteus_lm.data.shards import ShardWriter, Split
from proteus_lm.data.sources import open_source
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
        expected = [t for t in make_texts() if (document_place(t.encode(), 0) < 0.2) == (name == "validation")]
        assert texts == expected
        assert (split.documents, split.tokens) == (len(texts), sum(map(len, ids))) == (data.documents, data.tokens)
        assert split.bytes == data.bytes == sum(len(text.encode()) for text in texts)
        assert split.longest_document == data.longest_document == max(map(len, ids))
        assert [shard.tokens >= 3000 for shard in split.shards[:-1]] == [True] * (len(split.shards) - 1)
        found += texts
    assert sorted(found) == sorted(make_texts()) and len(manifest.splits["train"].shards) > 3


def test_the_bytes_are_the_same_whatever_the_workers(tmp_path, wide_tokenizer):
    rows = write_rows(tmp_path / "rows.jsonl", [f"w{i} w{70_000 - i} unknown" for i in range(1, 700)])
    for workers in (0, 2):
        prepare(rows, wide_tokenizer, tmp_path / f"out{workers}", workers=workers, **OPTIONS | {"shard_tokens": 400})
    assert content(tmp_path / "out0") == content(tmp_path / "out2")
    data = TokenDataset(tmp_path / "out2", "train")
    assert data.manifest.dtype == "uint32" and data.read(0, data.tokens).max() == 70_000
    assert len(data.manifest.splits["train"].shards) > 3


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
    with pytest.raises(ValueError, match=r"70001 tokens of .* do not fit uint16; use uint32 or auto"):
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


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_same_call_names_a_changed_shard_and_overwrite_mends_it(tmp_path, rows, monkeypatch, split):
    monkeypatch.setattr("proteus_lm.data.dataset.COMPARED", 0)  # whatever the size
    out = tmp_path / "out"
    prepare(rows, "byte", out, **OPTIONS)
    before, shard = content(out), out / split / "shard-00000.bin"
    shard.write_bytes(b"A\0" * 20 + shard.read_bytes()[40:])
    with pytest.raises(ValueError, match=rf"{split}/shard-00000\.bin is damaged: its SHA-256 is not the manifest's.*overwrite"):
        prepare(rows, "byte", out, **OPTIONS)
    prepare(rows, "byte", out, overwrite=True, **OPTIONS)
    assert content(out) == before


def test_a_shard_changed_after_an_interruption_is_made_again(tmp_path, rows):
    assert prepare_in_fork(rows, tmp_path / "out", 1, ("rename",)) == -signal.SIGKILL
    shard = tmp_path / ".out.partial" / "train" / "shard-00000.bin"
    shard.write_bytes(b"A\0" * 20 + shard.read_bytes()[40:])
    prepare(rows, "byte", tmp_path / "out", **OPTIONS)
    prepare(rows, "byte", tmp_path / "fresh", **OPTIONS)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


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
    with pytest.raises(FileExistsError, match=r"source bytes was .*source sha256 was"):
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


@pytest.mark.parametrize("place", ["last", "first"])
def test_a_bad_row_loses_no_whole_shard_and_the_mended_source_goes_on(tmp_path, rows, capsys, monkeypatch, place):
    monkeypatch.setattr("proteus_lm.data.prepare._BATCH_DOCUMENTS", 5)
    good = rows.read_text()
    rows.write_text(good + '{"body": 1}\n')
    with pytest.raises(ValueError, match="line 61: no field 'text'"):
        prepare(rows, "byte", tmp_path / "out", **OPTIONS | {"progress": True})
    assert "whole shards are kept" in capsys.readouterr().err and not (tmp_path / "out").exists()
    more = '{"text": "mended"}\n'
    rows.write_text(good + more if place == "last" else more + good)
    prepare(rows, "byte", tmp_path / "out", **OPTIONS | {"progress": True})
    assert ("the source has changed" in capsys.readouterr().err) == (place == "first")
    prepare(rows, "byte", tmp_path / "fresh", **OPTIONS)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


@pytest.mark.parametrize("count", [30, 59, 61, 90])
def test_a_source_cut_or_grown_after_an_interruption_gives_what_a_fresh_call_gives(tmp_path, rows, count):
    assert prepare_in_fork(rows, tmp_path / "out", 1, ("rename",)) == -signal.SIGKILL  # all shards whole, the last ones short
    write_rows(rows, [*make_texts(60), *make_texts(90)[60:]][:count])
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
    with pytest.raises(
        OSError, match=r"could not write .*\.out\.partial.*: No space left.*; \d+ bytes needed, \d+ bytes free"
    ) as caught:
        prepare(rows, "byte", out, overwrite=True, **OPTIONS | {"split_seed": 1})
    assert caught.value.errno == errno.ENOSPC
    assert content(out) == before and sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]


def die_at(moment: int, owner: object, name: str, steps: Iterator[int]) -> None:
    """Let this process be killed when the call `owner.name` takes the number `moment` from the shared `steps`."""
    real = getattr(owner, name)

    def counted(*arguments):
        if next(steps) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(owner, name, counted)


def prepare_in_fork(source: Path, out: Path, moment: int, names: tuple[str, ...], **options) -> int:
    """`prepare` in a process of its own, killed at the given call (from 1) of those that reach the disk; its exit status."""

    def work() -> None:
        steps = itertools.count(1)
        for name in names:
            die_at(moment, os if name == "fsync" else Path, name, steps)
        prepare(source, "byte", out, **OPTIONS | options)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    return child.exitcode if child.exitcode is not None else 1


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path, rows, capsys):
    large = {"shard_tokens": 12_000}
    shards = prepare(rows, "byte", tmp_path / "fresh", **OPTIONS | large).splits["train"].shards
    fresh, continued = content(tmp_path / "fresh"), 0
    for moment in itertools.count(1):
        out = tmp_path / f"out{moment}"
        if prepare_in_fork(rows, out, moment, ("fsync", "replace", "rename"), **large) == 0:
            break
        assert not out.exists() and (tmp_path / f".{out.name}.partial").is_dir()
        capsys.readouterr()
        prepare(rows, "byte", out, **OPTIONS | large | {"progress": True})
        continued += "going on behind the" in capsys.readouterr().err
        assert content(out) == fresh, f"killed at step {moment}"
    assert moment > 5 * len(shards) > 10
    assert moment - continued == 6  # five steps make the first shard whole and known; the last moment is no kill
    assert not list(tmp_path.glob(".*"))


def test_killed_before_the_last_step_no_shard_is_made_again(tmp_path, rows, monkeypatch):
    prepare(rows, "byte", tmp_path / "fresh", **OPTIONS)
    assert prepare_in_fork(rows, tmp_path / "out", 1, ("rename",)) == -signal.SIGKILL
    monkeypatch.setattr("proteus_lm.data.shards.ShardWriter.add", None)
    prepare(rows, "byte", tmp_path / "out", **OPTIONS)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def test_shards_of_another_call_are_not_continued(tmp_path, rows, capsys):
    out = tmp_path / "out"
    assert prepare_in_fork(rows, out, 12, ("fsync",)) == -signal.SIGKILL
    prepare(rows, "byte", out, **OPTIONS | {"split_seed": 1, "progress": True})
    assert "going on" not in capsys.readouterr().err
    prepare(rows, "byte", tmp_path / "fresh", **OPTIONS | {"split_seed": 1})
    assert content(out) == content(tmp_path / "fresh")


@pytest.mark.parametrize("moment", [1, 2])
def test_killed_between_the_renames_that_replace_a_folder_the_old_one_is_there_again(tmp_path, rows, moment):
    out = tmp_path / "out"
    prepare(rows, "byte", out, **OPTIONS | {"split_seed": 1})
    old = content(out)
    assert prepare_in_fork(rows, out, moment, ("rename",), overwrite=True) == -signal.SIGKILL
    with pytest.raises(FileExistsError, match="split_seed was 1, now 0"):
        prepare(rows, "byte", out, **OPTIONS)
    assert content(out) == old
    prepare(rows, "byte", out, overwrite=True, **OPTIONS)
    assert content(out) != old and sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]


def test_workers_end_when_the_process_that_started_them_is_killed(tmp_path, rows):
    script = (
        "import os, signal, sys\n"
        "from proteus_lm.data import prepare, shards\n"
        "shards.ShardWriter.add = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare.prepare(sys.argv[1], 'byte', sys.argv[2], workers=1)\n"
    )
    # The worker holds the pipe of the output too: communicate() returns only when it has ended.
    command = [sys.executable, "-c", script, str(rows), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_write_that_the_system_refuses_is_a_clear_error(tmp_path, rows):
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        with pytest.raises(WriteError, match=r"could not write .*shard-00000\.bin: File too large; \d+ bytes needed"):
            prepare(rows, "byte", tmp_path / "out", **OPTIONS)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_worker_that_dies_is_a_clear_error(tmp_path, rows, monkeypatch):
    monkeypatch.setattr("proteus_lm.data.parallel._start", os._exit)  # pickled by its name: it ends the worker, not this process
    with pytest.raises(RuntimeError, match="a worker process died"):
        prepare(rows, "byte", tmp_path / "out", workers=1, **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


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


def test_a_bar_on_a_terminal(tmp_path, rows, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    prepare(rows, "byte", tmp_path / "out", **OPTIONS | {"progress": True})
    shown = capsys.readouterr().err
    assert "\u2501" in shown and "100%" in shown and "60 documents" in shown


def test_a_token_that_the_shards_cannot_hold_is_an_error(tmp_path):
    writer = ShardWriter(tmp_path / "train", "uint16", 70_000, 100, Split(()), lambda: None)
    writer.add(np.array([65_535, 0]), b"ab")
    with pytest.raises(ValueError, match="token id 65536 does not fit: vocabulary 70000, uint16 shards; use uint32"):
        writer.add(np.array([3, 65_536]), b"ab")
    writer.abandon()


def test_a_place_that_cannot_be_written_is_named(tmp_path, rows):
    with pytest.raises(OSError, match=r"could not write .*rows\.jsonl/\.out\.partial: .*; check the disk and the rights"):
        prepare(rows, "byte", rows / "out", **OPTIONS)


@pytest.mark.shared
def test_real_text_with_a_real_tokenizer_comes_back(tmp_path, shared):
    corpus, spec = shared / "data" / "corpus" / "validation", shared / "data" / "tokenizer" / "tokenizer.json"
    manifest = prepare(corpus, spec, tmp_path / "out", max_documents=8, **OPTIONS)
    assert manifest.dtype == "uint16" and manifest.tokenizer["vocab_size"] == 32_000
    documents = [document.text for document, _ in zip(open_source(corpus).documents(), range(8))]
    tokenizer = load_tokenizer(spec)
    found = []
    for split in manifest.splits:
        data = TokenDataset(tmp_path / "out", split)
        data.check_tokenizer(tokenizer)
        found += [tokenizer.decode(data.document(i)[:-1]) for i in range(data.documents)]
    assert sorted(found) == sorted(documents)
