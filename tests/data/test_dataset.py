"""Reading prepared data: documents, the stream, and what does not fit together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models

from proteus_lm.data import dataset
from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.prepare import prepare
from proteus_lm.data.shards import Manifest
from proteus_lm.data.tokenizer import load_tokenizer

TEXTS = [chr(97 + i) * (1 + 7 * i) for i in range(20)]


@pytest.fixture
def folder(tmp_path) -> Path:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(rows, "byte", tmp_path / "out", validation_fraction=0, shard_tokens=200, progress=False)
    return tmp_path / "out"


def test_a_document_is_its_ids_and_its_end_token(folder):
    data = TokenDataset(folder)
    assert data.documents == 20 and len(data.manifest.splits["train"].shards) > 3
    for index, text in enumerate(TEXTS):
        document = data.document(index)
        assert document.dtype == np.int64 and document.tolist() == [*text.encode(), 256]
    for wrong in (-1, 20):
        with pytest.raises(IndexError, match=f"document {wrong} of 20"):
            data.document(wrong)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_stretch_of_the_stream_is_that_of_the_documents_joined(folder, data):
    stream = [token for text in TEXTS for token in [*text.encode(), 256]]
    read = TokenDataset(folder)
    assert read.tokens == len(stream)
    start = data.draw(st.integers(0, len(stream)))
    stop = data.draw(st.integers(start, len(stream)))
    assert read.read(start, stop).tolist() == stream[start:stop]


def test_places_outside_the_stream_are_an_error(folder):
    data = TokenDataset(folder)
    for start, stop in ((-1, 3), (4, 3), (0, data.tokens + 1)):
        with pytest.raises(IndexError, match=f"tokens {start} to {stop} of {data.tokens}"):
            data.read(start, stop)


def test_an_id_outside_the_vocabulary_names_its_shard_where_content_was_not_compared(folder, monkeypatch):
    monkeypatch.setattr(dataset, "COMPARED", 0)
    shard = folder / "train" / "shard-00001.bin"
    data = bytearray(shard.read_bytes())
    data[6:8] = (300).to_bytes(2, "little")
    shard.write_bytes(data)
    read = TokenDataset(folder)
    with pytest.raises(ValueError, match=r"train/shard-00001\.bin is damaged: it holds the id 300, .* 257 tokens"):
        read.read(0, read.tokens)
    assert read.document(0).tolist() == [*TEXTS[0].encode(), 256]


def test_document_starts_are_where_documents_start(folder):
    data = TokenDataset(folder)
    starts = data.document_starts
    assert starts.dtype == np.int64 and starts[0] == 0 and starts[-1] == data.tokens
    assert (data.read(0, data.tokens)[starts[1:] - 1] == 256).all()


@pytest.mark.parametrize("name, size", [("shard-00002.bin", -2), ("shard-00002.bin", 2), ("shard-00000.idx", -8)])
def test_a_shard_of_another_size_is_an_error_at_open(folder, name, size):
    path = folder / "train" / name
    os.truncate(path, path.stat().st_size + size)
    with pytest.raises(ValueError, match=rf"{name} holds \d+ bytes; its manifest says \d+ bytes"):
        TokenDataset(folder)


def test_a_missing_shard_is_an_error_at_open(folder):
    (folder / "train" / "shard-00001.bin").unlink()
    with pytest.raises(ValueError, match=r"shard-00001\.bin is missing"):
        TokenDataset(folder)


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


@pytest.mark.parametrize("name", ["shard-00001.bin", "shard-00001.idx"])
def test_one_changed_bit_is_an_error_at_open_that_names_the_file(folder, name):
    TokenDataset(folder).verify()
    flip(folder / "train" / name)
    with pytest.raises(ValueError, match=rf"{name} is damaged: its SHA-256 is not the manifest's\. Copy it again or prepare"):
        TokenDataset(folder)


def test_of_a_large_split_only_sizes_are_compared_which_is_said_and_verify_compares_all(folder, monkeypatch, caplog):
    TokenDataset(folder)
    assert not caplog.records
    flip(folder / "train" / "shard-00001.bin")
    monkeypatch.setattr(dataset, "COMPARED", Manifest.read(folder).size("train") - 1)
    data = TokenDataset(folder)
    (record,) = caplog.records
    assert "the train split of" in record.message and "only the sizes of its files were compared" in record.message
    with pytest.raises(ValueError, match=r"shard-00001\.bin is damaged"):
        data.verify()


def test_opening_a_split_reads_no_other(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(rows, "byte", tmp_path / "out", validation_fraction=0.3, progress=False)
    flip(tmp_path / "out" / "train" / "shard-00000.bin")
    data = TokenDataset(tmp_path / "out", "validation")
    with pytest.raises(ValueError, match=r"train/shard-00000\.bin is damaged"):
        data.verify()


def test_a_damaged_index_is_an_error_at_open_where_content_was_not_compared(folder, monkeypatch):
    monkeypatch.setattr(dataset, "COMPARED", 0)
    path = folder / "train" / "shard-00000.idx"
    path.write_bytes(path.read_bytes()[8:] + bytes(8))
    with pytest.raises(ValueError, match=r"shard-00000\.idx is damaged: document starts must rise"):
        TokenDataset(folder)


def test_another_tokenizer_than_the_one_of_the_shards_is_an_error(folder, tmp_path):
    data = TokenDataset(folder)
    data.check_tokenizer(load_tokenizer("byte"))
    assert data.tokenizer.hash == load_tokenizer("byte").hash
    path = tmp_path / "other.json"
    tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(path))
    other = load_tokenizer(path, eos="b")
    with pytest.raises(ValueError, match=r"made with the tokenizer byte \(hash .*257 tokens\), not with .*other\.json .*2 tokens"):
        data.check_tokenizer(other)
    other.save(folder)
    with pytest.raises(
        ValueError, match=r"tokenizer\.json \(hash .*2 tokens\) is not the tokenizer that made.* byte .*put that one back"
    ):
        _ = data.tokenizer


def test_a_folder_that_is_not_prepared_data_is_named(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"not prepared data: it has no manifest.json; make it with proteus prepare"):
        TokenDataset(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no split 'validation' \(it has: train\)"):
        TokenDataset(folder, "validation")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 99}, "proteus-tokens version 99, this program reads proteus-tokens version 1; prepare the data again"),
        ({"format": "other"}, "it is other version 1"),
        ({"splits": 5}, "not a manifest"),
        (None, "not a manifest"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(folder, change, message):
    path = folder / "manifest.json"
    path.write_text("{" if change is None else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        TokenDataset(folder)
