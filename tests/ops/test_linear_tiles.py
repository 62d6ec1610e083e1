"""How rows of tokens are cut into tiles: every token once, never across an unlock, short rows no longer than they are."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proteus_lm import ActivationSchedule
from proteus_lm.ops._linear_tiles import Group, add_tiles, cut, plan, split_tiles


def test_tiles_restart_at_an_unlock_and_alike_ones_form_a_group():
    groups = cut([(10, 4), (9, 8)], [19, 19], 4, 100)
    assert groups == [Group(0, 4, 2, 4, 2), Group(8, 2, 1, 4, 2), Group(10, 4, 2, 8, 2), Group(18, 1, 1, 8, 2)]


def test_a_group_holds_no_more_matrices_than_asked():
    assert [g.count for g in cut([(40, 4)], [40, 40], 4, 6)] == [3, 3, 3, 1]
    assert [g.count for g in cut([(8, 4)], [8, 8], 4, 1)] == [1, 1]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    offsets=st.lists(st.integers(0, 30), min_size=5, max_size=5),
    blocks=st.integers(1, 6),
    context=st.integers(1, 50),
    size=st.integers(1, 9),
)
def test_every_token_of_every_row_is_in_one_tile_of_its_own_open_width(lengths, offsets, blocks, context, size):
    schedule = ActivationSchedule(blocks, context)
    offset = torch.tensor(offsets[: len(lengths)])
    active = schedule.activation(13, max(lengths), offset=offset).active
    seen = torch.zeros_like(active)
    for bucket in plan(active, lengths, 13, size, 8):
        rows = list(range(len(lengths))) if bucket.rows is None else bucket.rows
        for group in bucket.groups:
            assert group.length <= size
            for row in rows[: group.rows]:
                last = min(group.end, lengths[row])
                assert group.end - group.length < lengths[row]  # no tile begins behind a row's end
                assert (active[row, group.start : last] == group.width).all()
                seen[row, group.start : last] += 1
    assert all((seen[r, :n] == 1).all() and (seen[r, n:] == 0).all() for r, n in enumerate(lengths))


def test_rows_that_open_alike_share_a_bucket():
    active = ActivationSchedule(4, 40).activation(8, 12, offset=torch.tensor([50, 0, 60, 0])).active
    assert [b.rows for b in plan(active, [12, 12, 12, 12], 8, 64, 99)] == [[0, 2], [1, 3]]
    assert [b.rows for b in plan(active[:1], [12, 12], 8, 64, 99)] == [None]


def test_tiles_put_back_add_up_to_what_was_taken():
    x = torch.randn(2, 3 + 11, 2, 5, dtype=torch.float64)
    group = Group(1, 2, 4, 5, 2)  # tiles of 2 tokens, each with the 3 before it
    back = torch.zeros_like(x)
    add_tiles(back, split_tiles(x, group, x.dtype, lead=3), group, lead=3)
    times = torch.zeros(14, dtype=torch.float64)
    for tile in range(4):
        times[1 + 2 * tile : 1 + 2 * tile + 5] += 1
    assert torch.allclose(back, x * times[:, None, None], atol=1e-14)
