"""When blocks open: equation 12-13 to the letter, with its remainders and its odd cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proteus_lm import ActivationSchedule


def by_definition(blocks: int, context: int, position: int) -> int:
    if position >= context:
        return blocks
    return min(blocks, 1 + max(position, 0) // max(1, context // blocks))


@given(st.integers(1, 20), st.integers(1, 200), st.integers(-5, 300))
def test_open_blocks_follow_the_definition_for_ints_and_tensors(blocks, context, position):
    schedule = ActivationSchedule(blocks, context)
    right = by_definition(blocks, context, position)
    assert schedule.active_blocks(position) == right
    assert schedule.active_blocks(torch.tensor([[position]])).tolist() == [[right]]


@given(st.integers(1, 20), st.integers(1, 200), st.integers(0, 19))
def test_unlock_position_is_the_first_open_one(blocks, context, block):
    schedule = ActivationSchedule(blocks, context)
    block %= blocks
    first = schedule.unlock_position(block)
    assert schedule.active_blocks(first) > block
    assert first == 0 or schedule.active_blocks(first - 1) <= block


@given(st.integers(1, 9), st.integers(1, 60), st.integers(0, 40), st.integers(0, 70), st.integers(1, 40))
def test_segments_and_tensor_say_the_same(blocks, context, extra, offset, length):
    schedule = ActivationSchedule(blocks, context)
    activation = schedule.activation(blocks + extra, length, offset=offset)
    lengths = [n for a, b, n in activation.segments for _ in range(a, b)]
    assert lengths == activation.active[0].tolist()
    assert activation.segments[0][0] == 0 and activation.segments[-1][1] == length


def test_last_block_takes_the_remainder():
    schedule = ActivationSchedule(4, 8)
    assert [schedule.active(18, t) for t in range(9)] == [4, 4, 8, 8, 12, 12, 18, 18, 18]
    assert schedule.block_bounds(18) == [(0, 4), (4, 8), (8, 12), (12, 18)]


def test_more_blocks_than_context_open_together_at_its_end():
    schedule = ActivationSchedule(8, 4)
    assert [schedule.active_blocks(t) for t in range(6)] == [1, 2, 3, 4, 8, 8]
    assert [schedule.unlock_position(e) for e in range(8)] == [0, 1, 2, 3, 4, 4, 4, 4]


def test_custom_unlocks_open_where_they_say():
    schedule = ActivationSchedule(3, 10, unlocks=(0, 2, 7))
    assert [schedule.active_blocks(t) for t in range(9)] == [1, 1, 2, 2, 2, 2, 2, 3, 3]
    assert schedule.active_blocks(torch.tensor([-3, 0, 2, 7, 99])).tolist() == [1, 1, 2, 3, 3]
    assert schedule.activation(6, 9).active.tolist() == [[2, 2, 4, 4, 4, 4, 4, 6, 6]]


def test_a_function_of_the_block_gives_unlocks_once():
    schedule = ActivationSchedule(4, 64, unlocks=lambda block: 0 if block == 0 else 4 * 2**block)
    assert schedule.unlocks == (0, 8, 16, 32)
    assert schedule == ActivationSchedule(4, 64, unlocks=[0, 8, 16, 32])


@given(st.integers(1, 12), st.integers(1, 100), st.integers(1, 400))
def test_a_stretched_schedule_is_that_of_the_other_length(blocks, context, length):
    stretched = ActivationSchedule(blocks, context).stretched(length)
    assert [stretched.active_blocks(t) for t in range(length + 2)] == [by_definition(blocks, length, t) for t in range(length + 2)]
    assert stretched.active_blocks(length) == blocks


def test_packed_positions_restart_at_each_document_with_its_own_offset():
    schedule = ActivationSchedule(4, 8)
    cu = torch.tensor([0, 3, 4, 9])
    assert schedule.activation(8, 9, cu_seqlens=cu).positions.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4]]
    moved = schedule.activation(8, 9, cu_seqlens=cu, offset=[5, 0, 2])
    assert moved.positions.tolist() == [[5, 6, 7, 0, 2, 3, 4, 5, 6]]
    assert moved.segments is None


def test_mask_is_a_prefix():
    activation = ActivationSchedule(2, 4).activation(4, 3, offset=1)
    assert activation.mask().int().tolist() == [[[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]]


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: ActivationSchedule(0, 8), "blocks is 0"),
        (lambda: ActivationSchedule(2, 0), "context is 0"),
        (lambda: ActivationSchedule(True, 8), "blocks is True"),
        (lambda: ActivationSchedule(2, 8, unlocks=(0, 1, 2)), "3 unlock positions for 2 blocks"),
        (lambda: ActivationSchedule(2, 8, unlocks=(1, 2)), "must open at position 0"),
        (lambda: ActivationSchedule(3, 8, unlocks=(0, 5, 2)), "must not decrease"),
        (lambda: ActivationSchedule(2, 8, unlocks=(0, 1.5)), "block 1 opens at 1.5; unlock positions must be whole numbers"),
        (lambda: ActivationSchedule(2, 8, unlocks=(0, 5)).stretched(16), "only the uniform rule can be stretched"),
        (lambda: ActivationSchedule(2, 8).stretched(0), "context is 0"),
        (lambda: ActivationSchedule(8, 8).activation(7, 3), "cannot be cut into 8 blocks"),
        (lambda: ActivationSchedule(2, 8).activation(4, 3, offset=torch.zeros(2, 2)), "offset is"),
        (lambda: ActivationSchedule(2, 8).activation(4, 3, offset=[1], cu_seqlens=torch.tensor([0, 1, 3])), "1 offsets for 2"),
    ],
)
def test_bad_schedules_name_the_value(build, says):
    with pytest.raises(ValueError, match=says):
        build()


def test_unknown_block_raises():
    with pytest.raises(IndexError, match="block 4 of 4"):
        ActivationSchedule(4, 8).unlock_position(4)
