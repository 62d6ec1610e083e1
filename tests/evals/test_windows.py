import pytest
from hypothesis import given
from hypothesis import strategies as st

from proteus_lm.evals.windows import choose_windows

from .doubles import texts


def test_windows_are_cut_from_each_documents_start_and_share_no_prediction():
    windows, left = choose_windows(texts(10, 4, 9), 4)
    assert [(w.document, w.start, w.length) for w in windows] == [(0, 0, 4), (0, 4, 4), (2, 0, 4), (2, 4, 4)]
    assert (left.first, left.tails, left.limit, left.short_documents) == (3, 1 + 3, 0, 1)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
    st.one_of(st.none(), st.integers(1, 20)),
    st.one_of(st.none(), st.integers(1, 90)),
)
def test_every_token_is_predicted_or_counted_as_left_out(lengths, context, limit):
    if max(lengths) <= (context or 1):
        with pytest.raises(ValueError, match=f"longest of {len(lengths)} has {max(lengths)}"):
            choose_windows(texts(*lengths), context, limit)
        return
    windows, left = choose_windows(texts(*lengths), context, limit)
    seen = {(w.document, w.start + i + 1) for w in windows for i in range(w.length)}
    assert len(seen) == sum(w.length for w in windows)  # nothing twice
    assert all(position < lengths[document] for document, position in seen)
    assert len(seen) + left.first + left.tails + left.limit == sum(lengths)
    if limit is not None:
        assert len(seen) <= limit or len(windows) == 1


def test_a_limit_spreads_over_the_whole_split_and_not_over_its_beginning():
    windows, left = choose_windows(texts(*[41] * 10), 10, 200)
    assert len(windows) == 20
    assert {w.document for w in windows} == set(range(10))
    assert left.limit == 200


def test_whole_documents_are_windows_of_their_own_length():
    windows, left = choose_windows(texts(7, 1, 0, 3), None)
    assert [(w.document, w.length) for w in windows] == [(0, 6), (3, 2)]
    assert (left.first, left.tails, left.short_documents) == (3, 0, 2)


def test_a_context_longer_than_any_document_is_an_error_that_names_both():
    with pytest.raises(ValueError, match=r"holds 65 tokens .* has 30"):
        choose_windows(texts(30, 20), 64)


@pytest.mark.parametrize("name", ["context", "max_tokens"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        choose_windows(texts(30), **{"context": 4, "max_tokens": 9, name: 0})
