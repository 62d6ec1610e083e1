"""What a forward tells its mixers, and masked tokens taken out and put back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proteus_lm import ActivationSchedule
from proteus_lm.sequence import TokenSequence, Unpadding


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_taking_out_and_putting_back_keeps_what_counts_and_fills_the_rest(rows):
    mask = torch.tensor(rows)
    x = torch.arange(mask.numel() * 2).view(*mask.shape, 2) + 1
    unpadding = Unpadding(mask)
    taken = unpadding.take(x)
    assert taken.flatten(0, 1).tolist() == x[mask].tolist()
    assert unpadding.put(taken, -7).tolist() == torch.where(mask[..., None], x, -7).tolist()
    sizes = [sum(row) for row in rows if any(row)]
    if unpadding.cu_seqlens is None:
        assert taken.shape[:2] == (len(sizes), sizes[0] if sizes else 0)
    else:
        assert unpadding.cu_seqlens.diff().tolist() == sizes


def test_positions_count_from_what_each_row_has_behind_it_and_restart_at_documents():
    schedule = ActivationSchedule(2, 8)
    rows = TokenSequence(schedule, 2, 3, offset=torch.tensor([0, 5]))
    assert rows.positions.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert rows.activation(6).active.tolist() == [[3, 3, 3], [6, 6, 6]]
    packed = TokenSequence(schedule, 2, 5, cu_seqlens=torch.tensor([0, 2, 5]))
    assert packed.positions.tolist() == [[0, 1, 0, 1, 2]]
    assert not packed.is_step and TokenSequence(schedule, 2, 1, offset=torch.tensor([0, 5])).active(6).tolist() == [3, 6]


def test_what_layers_share_is_made_once():
    sequence = TokenSequence(ActivationSchedule(2, 8), 1, 3)
    assert sequence.activation(6) is sequence.activation(6)
    made = []
    assert [sequence.once("key", lambda: made.append(1) or 5) for _ in range(3)] == [5, 5, 5] and made == [1]


def test_one_block_is_no_schedule():
    assert TokenSequence(ActivationSchedule(1, 8), 1, 3).activation(6) is None


@pytest.mark.parametrize("width", [0, 1, 3])
def test_gaps_stand_before_each_document(width):
    gaps = TokenSequence(ActivationSchedule(1, 8), 2, 5, cu_seqlens=torch.tensor([0, 2, 5])).gaps(width)
    assert gaps.length == 5 + 2 * width
    assert gaps.tokens.tolist() == [width, width + 1, *range(2 * width + 2, 2 * width + 5)]
    assert gaps.free.tolist() == [list(range(width)), list(range(width + 2, 2 * width + 2))]
    assert gaps.last.tolist() == [list(range(2, 2 + width)), list(range(width + 5, 2 * width + 5))]
