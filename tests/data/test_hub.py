"""Data sets on the hub: fields, revision, and no network."""

from __future__ import annotations

from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest

from proteus_lm.data.sources import open_source


@pytest.fixture
def hub(monkeypatch):
    """A hub with one data set, in place of the network; `calls` notes how it was asked for."""
    calls = []

    def load(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_dict({"id": [1, 2], "body": ["one", "two"]}).to_iterable_dataset()

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, timeout: SimpleNamespace(sha="abc123"))
    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


def test_a_hub_data_set_is_streamed_at_the_revision_it_had(hub):
    source = open_source("owner/name", field="body", hub_config="en", hub_split="test")
    assert [document.text for document in source.documents()] == ["one", "two"]
    assert hub == [(("owner/name", "en"), {"split": "test", "streaming": True, "revision": "abc123"})]
    expected = {"kind": "hub", "name": "owner/name", "config": "en", "split": "test", "revision": "abc123"}
    assert source.identity() == expected


def test_a_hub_row_without_the_field_names_those_it_has(hub):
    with pytest.raises(ValueError, match="owner/name row 0: no field 'text'; fields seen: id, body"):
        list(open_source("owner/name").documents())


def test_an_unknown_split_is_named(hub, monkeypatch):
    def load(*args, **kwargs):
        raise ValueError("Bad split: dev. Available splits: ['train']")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ValueError, match=r"owner/name, split 'dev': Bad split: dev\. Available"):
        list(open_source("owner/name", hub_split="dev").documents())


def test_a_hub_that_is_switched_off_says_to_give_a_local_file(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"no file or folder owner/name here.*switched off.*give a local file"):
        open_source("owner/name")


def test_a_hub_that_cannot_be_reached_says_to_give_a_local_file(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    real = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: real(endpoint="http://127.0.0.1:9"))  # nothing listens there
    with pytest.raises(FileNotFoundError, match=r"no file or folder corpus here, and the hub gave no data set.*give a local file"):
        open_source("corpus")
