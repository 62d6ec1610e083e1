"""The tokenizers: the built-in one of bytes, and those read from files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from proteus_lm.data.tokenizer import byte_tokenizer, load_tokenizer

ODD = "caf\u00e9 \U0001f600\r\n\x00 \ufeff\u200b<|endoftext|> end"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A small BPE that also has what must not act here: truncation, padding and a template that adds tokens."""
    built = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.train_from_iterator(["low lower lowest new newer"] * 9, trainers.BpeTrainer(special_tokens=["<unk>", "</s>", "<pad>"]))
    built.post_processor = processors.TemplateProcessing(single="</s> $A </s>", special_tokens=[("</s>", 1)])
    built.enable_truncation(3)
    built.enable_padding(length=8, pad_id=2, pad_token="<pad>")
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    built.save(str(path))
    return path


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Path:
    """A byte-level BPE with merges, as of GPT-2."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>", "</s>"], initial_alphabet=alphabet)
    built.train_from_iterator(["low lower lowest new newer <|endoftext|>"] * 9, trainer)
    path = tmp_path_factory.mktemp("byte-level") / "tokenizer.json"
    built.save(str(path))
    return path


@given(st.text())
def test_byte_ids_are_the_utf8_bytes_and_decode_to_the_same_text(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode(ids) == text


@given(st.text())
def test_the_byte_tokenizer_s_short_cut_gives_the_ids_of_its_tokenizer_json(text):
    slow = tokenizers.Tokenizer.from_str(byte_tokenizer().definition)
    slow.encode_special_tokens = True
    assert slow.encode(text).ids == byte_tokenizer().encode(text).tolist()


def test_byte_vocabulary_is_the_256_bytes_and_an_end_token():
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.eos) == (257, 256, "<|endoftext|>")
    assert tokenizer.decode([104, 105, 256]) == "hi<|endoftext|>"
    assert tokenizer.decode([104, 105, 256], skip_special_tokens=True) == "hi"
    assert tokenizer.decode([0xC3, 0x28]) == "\ufffd("


def test_an_end_token_written_in_a_text_is_text():
    assert 256 not in byte_tokenizer().encode(ODD)
    assert byte_tokenizer().decode(byte_tokenizer().encode(ODD)) == ODD


def test_a_saved_tokenizer_is_the_same_one_here_and_in_transformers(tmp_path, trained):
    for spec, text in (("byte", "caf\u00e9 \U0001f600\r\n\x00"), (trained, "low newest lower")):
        tokenizer = load_tokenizer(spec)
        folder = tmp_path / f"saved-{tokenizer.vocab_size}"
        tokenizer.save(folder)
        again, auto = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        assert (again.hash, again.eos_id, again.vocab_size) == (tokenizer.hash, tokenizer.eos_id, tokenizer.vocab_size)
        assert auto(text).input_ids == tokenizer.encode(text).tolist()
        assert auto.decode(auto(text).input_ids) == tokenizer.decode(tokenizer.encode(text))
        assert (auto.eos_token_id, len(auto)) == (tokenizer.eos_id, tokenizer.vocab_size)
        batch = auto([text, text[:1]], padding=True)  # as a user pads prompts to generate from: on the left
        assert batch.attention_mask[1][-1] == 1 and batch.attention_mask[1][0] == 0
        assert sorted(path.name for path in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_special_tokens_written_in_a_text_are_text_in_transformers_too(tmp_path, trained, byte_level):
    text = "a <|endoftext|> low</s> <pad> <unk> b</s>"
    for spec in ("byte", trained, byte_level):
        tokenizer, folder = load_tokenizer(spec), tmp_path / "saved"
        tokenizer.save(folder)
        wanted, auto = tokenizer.encode(text).tolist(), AutoTokenizer.from_pretrained(folder)
        assert auto.encode(text) == auto(text).input_ids == auto([text, text]).input_ids[1] == wanted
        auto.save_pretrained(folder)
        assert AutoTokenizer.from_pretrained(folder).encode(text) == wanted
        assert auto.encode(text, split_special_tokens=False) != wanted  # on demand they are what their name says


def test_nothing_is_cut_padded_or_added_whatever_the_file_says(trained):
    tokenizer = load_tokenizer(trained)
    ids = tokenizer.encode("low lower lowest new newer")
    assert len(ids) == 5 and not np.isin(ids, [0, 1, 2]).any()


def test_the_end_token_comes_from_the_config_beside_the_file_or_from_the_caller(tmp_path, trained):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(trained.read_bytes())
    assert load_tokenizer(folder).eos == "</s>"  # a known name
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<pad>"}, "pad_token": "<unk>"}))
    for spec in (folder, folder / "tokenizer.json"):
        assert load_tokenizer(spec).eos_id == 2 and load_tokenizer(spec).special == {"pad_token": "<unk>"}
    assert load_tokenizer(folder, eos="<unk>").eos_id == 0


def test_the_hash_follows_vocabulary_and_end_token_and_nothing_else(tmp_path, trained):
    tokenizer = load_tokenizer(trained)
    assert tokenizer.hash != byte_tokenizer().hash
    assert tokenizer.hash != load_tokenizer(trained, eos="<unk>").hash
    renamed = tmp_path / "other.json"
    fields = json.loads(trained.read_text()) | {"padding": None, "post_processor": None}
    assert fields["model"].pop("ignore_merges") is False  # a field that an older library did not write
    renamed.write_text(json.dumps(fields, indent=2))
    assert load_tokenizer(renamed).hash == tokenizer.hash
    fields["model"]["vocab"]["zzz"] = max(fields["model"]["vocab"].values()) + 1
    renamed.write_text(json.dumps(fields))
    assert load_tokenizer(renamed).hash != tokenizer.hash


def test_files_that_transformers_converts_are_taken(tmp_path):
    symbols = json.loads(byte_tokenizer().definition)["model"]["vocab"]
    (tmp_path / "vocab.json").write_text(json.dumps(symbols | {"<|endoftext|>": 256}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == 256 and tokenizer.encode("hi!").tolist() == [104, 105, 33]


def test_a_text_that_is_not_unicode_is_an_error(trained):
    for tokenizer in (byte_tokenizer(), load_tokenizer(trained)):
        with pytest.raises(ValueError, match="not Unicode"):
            tokenizer.encode("half \ud83d a pair")


def test_an_id_outside_the_vocabulary_is_an_error():
    with pytest.raises(ValueError, match="token id 257 is outside the vocabulary of 257"):
        byte_tokenizer().decode([1, 257])


def test_a_file_without_a_known_end_token_names_the_remedy(tmp_path):
    path = tmp_path / "t.json"
    tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(path))
    with pytest.raises(ValueError, match="which token ends a document; put eos_token"):
        load_tokenizer(path)
    with pytest.raises(ValueError, match="'b' is not in the vocabulary"):
        load_tokenizer(path, eos="b")
    assert load_tokenizer(path, eos="a").eos_id == 0


@pytest.mark.parametrize("content", ["not json", "[1]", '{"version": "1.0"}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "wrong.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"wrong\.json"):
        load_tokenizer(path, eos="a")


def test_a_file_that_is_not_text_is_named_as_no_tokenizer(tmp_path):
    path = tmp_path / "wrong.json"
    path.write_bytes(b"\xff\x00")
    with pytest.raises(ValueError, match=r"wrong\.json is not a tokenizer\.json: it is not UTF-8 text"):
        load_tokenizer(path, eos="a")


def test_a_missing_tokenizer_is_a_clear_error_without_network(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="no tokenizer file or folder owner/none here"):
        load_tokenizer("owner/none")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(empty)
