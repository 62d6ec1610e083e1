"""Batches: a function of (seed, step), every window once an epoch, the same whatever the world size."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.loader import Loader, cu_seqlens
from proteus_lm.data.prepare import prepare

CONTEXT = 16


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> TokenDataset:
    folder: Path = tmp_path_factory.mktemp("loader")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": chr(97 + i % 26) * (1 + 5 * (i % 9))}) + "\n" for i in range(60)))
    prepare(rows, "byte", folder / "out", validation_fraction=0, shard_tokens=300, progress=False)
    return TokenDataset(folder / "out")


def make(dataset: TokenDataset, **options) -> Loader:
    return Loader(dataset, **{"batch_size": 4, "context": CONTEXT, "seed": 3} | options)


def test_a_row_is_a_window_of_the_stream_with_the_next_token(dataset):
    loader, stream = make(dataset), dataset.read(0, dataset.tokens)
    for step in (0, 5):
        batch = loader.batch(step)
        assert batch.tokens.shape == (4, CONTEXT + 1) and batch.tokens.dtype == torch.int64
        for row, window in zip(batch.tokens, loader.window_indices(step)):
            assert row.tolist() == stream[window * CONTEXT : window * CONTEXT + CONTEXT + 1].tolist()


def test_starts_are_true_where_a_document_starts_and_in_column_0(dataset):
    loader, begins = make(dataset), set(dataset.document_starts[:-1].tolist())
    seen = 0
    for step in range(loader.steps_per_epoch):
        batch = loader.batch(step)
        assert batch.starts.shape == batch.tokens.shape and batch.starts.dtype == torch.bool
        for row, window in zip(batch.starts.tolist(), loader.window_indices(step)):
            expected = [i == 0 or window * CONTEXT + i in begins for i in range(CONTEXT + 1)]
            assert row == expected
            seen += sum(row[1:])
    assert seen > 30


def test_a_batch_depends_on_seed_and_step_alone(dataset):
    steps = [7, 0, 30, 7, 2]
    straight = {step: make(dataset).batch(step) for step in sorted(set(steps))}
    loader = make(dataset)
    for step in steps:
        again = loader.batch(step)
        assert torch.equal(again.tokens, straight[step].tokens) and torch.equal(again.starts, straight[step].starts)
    assert not torch.equal(make(dataset, seed=4).batch(0).tokens, straight[0].tokens)


def test_an_epoch_has_every_window_once_and_the_next_one_in_another_order(dataset):
    loader = make(dataset)
    windows = loader.windows
    assert windows == (dataset.tokens - 1) // CONTEXT and windows % 4 != 0  # epochs end inside a batch
    dealt = [window for step in range(windows) for window in loader.window_indices(step)]
    epochs = [dealt[i * windows : (i + 1) * windows] for i in range(4)]
    assert all(sorted(epoch) == list(range(windows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4 and epochs[0] != sorted(epochs[0])
    assert loader.steps_per_epoch == -(-windows // 4)
    assert len(Counter(dealt[: 4 * loader.steps_per_epoch])) == windows


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_global_batch_is_the_same_whatever_the_world_size(dataset, world_size):
    whole = make(dataset, batch_size=8)
    for step in (0, 3, 11):
        ranks = [make(dataset, batch_size=8 // world_size, rank=r, world_size=world_size).batch(step) for r in range(world_size)]
        assert torch.equal(torch.cat([batch.tokens for batch in ranks]), whole.batch(step).tokens)
        assert torch.equal(torch.cat([batch.starts for batch in ranks]), whole.batch(step).starts)


def test_the_order_is_that_of_earlier_releases(dataset):
    """Numbers noted when this was written: a resumed run must meet the windows it would have met."""
    assert make(dataset).window_indices(0) == [43, 78, 71, 6]
    assert make(dataset).window_indices(1000) == [65, 10, 7, 61]


def test_cu_seqlens_bound_the_documents_of_the_inputs(dataset):
    loader = make(dataset)
    batch = loader.batch(1)
    bounds = cu_seqlens(batch.starts)
    assert bounds.dtype == torch.int64 and bounds[0] == 0 and bounds[-1] == 4 * CONTEXT and (bounds.diff() > 0).all()
    flat = batch.tokens[:, :-1].reshape(-1).tolist()
    pieces = [flat[a:b] for a, b in zip(bounds.tolist(), bounds.tolist()[1:])]
    assert all(256 not in piece[:-1] for piece in pieces)  # an end token ends a piece
    assert {i * CONTEXT for i in range(4)} <= set(bounds.tolist())


def test_cu_seqlens_of_a_start_in_the_last_column_has_no_empty_piece():
    starts = torch.tensor([[True, False, True], [True, True, False]])
    assert cu_seqlens(starts).tolist() == [0, 2, 3, 4]


def test_a_context_longer_than_any_document_is_an_error_unless_allowed(dataset):
    longest = dataset.longest_document
    assert make(dataset, context=longest).windows > 0
    with pytest.raises(ValueError, match=f"context of {longest + 1} tokens is longer than any document.*the longest has {longest}"):
        make(dataset, context=longest + 1)
    allowed = make(dataset, context=longest + 1, allow_short_documents=True)
    assert allowed.batch(0).tokens.shape == (4, longest + 2)


def test_fewer_windows_than_a_global_batch_is_an_error(dataset):
    windows = make(dataset).windows
    assert make(dataset, batch_size=windows).steps_per_epoch == 1
    with pytest.raises(
        ValueError, match=f"{windows} windows of 16 tokens, fewer than one global batch of {2 * windows}; use a smaller"
    ):
        make(dataset, batch_size=windows, world_size=2)


@pytest.mark.parametrize(
    "option, message",
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"context": 0}, "context is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"rank": 2, "world_size": 2}, "rank is 2; with world_size 2 it must be 0 to 1"),
        ({"world_size": 0}, "world_size is 0"),
    ],
)
def test_a_number_outside_its_range_is_named(dataset, option, message):
    with pytest.raises(ValueError, match=message):
        make(dataset, **option)


def test_a_negative_step_is_an_error(dataset):
    with pytest.raises(ValueError, match="step is -1; steps count from 0"):
        make(dataset).batch(-1)
