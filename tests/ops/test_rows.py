"""Packed documents as rows and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proteus_lm.ops.rows import Rows, check_packed


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
