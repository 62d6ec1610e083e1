"""Chunks of tokens and the slice each works on; packed documents as rows and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proteus_lm import ActivationSchedule
from proteus_lm.ops.plan import plan_chunks
from proteus_lm.ops.rows import Rows, check_packed


@given(st.integers(1, 5), st.integers(1, 30), st.integers(0, 40), st.integers(1, 40), st.integers(1, 9))
def test_host_and_tensor_plans_agree_and_cover(blocks, context, offset, length, chunk):
    activation = ActivationSchedule(blocks, context).activation(11, length, offset=offset)
    host = plan_chunks(length, chunk, 11, segments=activation.segments)
    assert host == plan_chunks(length, chunk, 11, active=activation.active)
    assert [c.start for c in host] == list(range(0, length, chunk)) and host[-1].end == length
    for c in host:
        inside = activation.active[0, c.start : c.end].tolist()
        assert c.width == max(inside) and c.mixed == (min(inside) != max(inside))


def test_rows_that_differ_make_a_chunk_mixed_and_empty_slots_do_not():
    active = torch.tensor([[2, 2, 4, 4], [4, 4, 0, 0]])
    assert [(c.width, c.mixed) for c in plan_chunks(4, 2, 4, active=active)] == [(4, True), (4, False)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_packed_documents_survive_the_round_trip(lengths):
    cu = torch.tensor([0, *lengths]).cumsum(0)
    packed = torch.randn(1, sum(lengths), 3)
    rows = Rows(cu, sum(lengths))
    split = rows.split(packed)
    assert split.shape == (len(lengths), max(lengths), 3)
    assert torch.equal(rows.join(split), packed)
    assert not split[~rows.valid].any()


@pytest.mark.parametrize("cu", [[0, 2], [1, 3], [0, 2, 2, 3], [0, 2, 1, 3]])
def test_bad_boundaries_raise(cu):
    with pytest.raises(ValueError, match="must rise from 0 to the 3 tokens"):
        Rows(torch.tensor(cu), 3)


def test_packing_wants_one_row():
    with pytest.raises(ValueError, match="batch of 2 rows"):
        check_packed(2, torch.tensor([0, 3]))
