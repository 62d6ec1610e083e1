"""The synthetic tasks: right answers, no answer given away, equal batches for equal seeds."""

from __future__ import annotations

import itertools

import pytest
import torch

from proteus_lm.data.synthetic import BLANK, IGNORED, accuracy, key_value_stream, mqar, mqar_text, parity, permutations


def test_every_key_of_a_recall_row_is_asked_once_and_answered_by_the_value_behind_it():
    tokens, targets = mqar(batch=40, length=30, pairs=5, vocab=24, seed=0)
    assert tokens.shape == targets.shape == (40, 30) and tokens.dtype == targets.dtype == torch.int64
    for row, wanted in zip(tokens.tolist(), targets.tolist()):
        keys, values = row[0:10:2], row[1:10:2]
        assert len(set(keys)) == len(set(values)) == 5
        assert all(1 <= key < 12 for key in keys) and all(12 <= value < 24 for value in values)
        asked = {row[t]: wanted[t] for t in range(30) if wanted[t] != IGNORED}
        assert asked == dict(zip(keys, values))
        assert all((row[t] == BLANK) == (wanted[t] == IGNORED) for t in range(10, 30))
        assert wanted[:10] == [IGNORED] * 10


def test_recall_asks_at_every_place_in_every_order():
    tokens, targets = mqar(batch=400, length=12, pairs=3, vocab=16, seed=0)
    assert ((targets != IGNORED).sum(0)[6:] > 100).all()  # half of 400 on average
    orders = {tuple(row[:6:2].index(key) for key in row[6:] if key) for row in tokens.tolist()}
    assert orders == set(itertools.permutations(range(3)))


def test_a_recall_row_may_be_just_full():
    tokens, targets = mqar(batch=3, length=12, pairs=4, vocab=10, seed=0)
    assert (tokens != BLANK).all() and ((targets != IGNORED).sum(1) == 4).all()


def test_recall_as_text_puts_each_answer_behind_its_question():
    tokens, targets = mqar_text(batch=20, length=30, pairs=5, vocab=24, seed=0)
    for row, wanted in zip(tokens.tolist(), targets.tolist()):
        pairs = dict(zip(row[0:10:2], row[1:10:2]))
        asked = [t for t in range(30) if wanted[t] != IGNORED]
        assert sorted(row[t] for t in asked) == sorted(pairs)
        assert all(row[t + 1] == wanted[t] == pairs[row[t]] for t in asked)
        rest = [t for t in range(10, 30) if t not in asked and t - 1 not in asked]
        assert all(row[t] == BLANK for t in rest)


def test_a_stream_asks_only_for_keys_given_before_and_answers_with_their_value():
    tokens, targets = key_value_stream(batch=20, length=101, keys=7, vocab=24, seed=0)
    assert (tokens[:, 100] == BLANK).all()
    for row, wanted in zip(tokens.tolist(), targets.tolist()):
        known = {}
        for t in range(0, 100, 2):
            key, value = row[t], row[t + 1]
            assert 1 <= key < 12 <= value < 24
            assert wanted[t] == known.get(key, IGNORED)
            assert known.setdefault(key, value) == value
        assert len(known) == 7
        assert all(w == IGNORED for w in wanted[1::2])


def test_a_stream_asks_at_every_distance():
    tokens, targets = key_value_stream(batch=50, length=200, keys=10, vocab=64, seed=0)
    distances = set()
    for row, wanted in zip(tokens.tolist(), targets.tolist()):
        last = {}
        for t in range(0, 200, 2):
            if wanted[t] != IGNORED:
                distances.add(t - last[row[t]])
            last[row[t]] = t
    assert min(distances) == 2 and max(distances) > 80


def test_parity_is_that_of_the_ones_so_far():
    tokens, targets = parity(batch=7, length=19, seed=3)
    for row, wanted in zip(tokens.tolist(), targets.tolist()):
        assert wanted == [sum(row[: t + 1]) % 2 for t in range(19)]
    assert 0.3 < tokens.double().mean() < 0.7


@pytest.mark.parametrize("size", [1, 3, 5])
def test_permutations_are_applied_one_after_another(size):
    tokens, targets = permutations(batch=4, length=15, seed=1, size=size)
    every = list(itertools.permutations(range(size)))
    for row, wanted in zip(tokens.tolist(), targets.tolist()):
        things = list(range(size))  # where each thing lies
        for token, target in zip(row, wanted):
            things = [every[token][place] for place in things]
            assert every[target] == tuple(things)


def test_permutations_of_five_use_all_tokens_and_do_not_commute():
    tokens, targets = permutations(batch=200, length=20, seed=0)
    assert tokens.unique().tolist() == targets.unique().tolist() == list(range(120))
    turned = permutations(batch=200, length=20, seed=0)
    assert torch.equal(turned.targets, targets)
    swap, cycle = 1, 3  # of three things: (0 2 1), (1 2 0)
    pairs = permutations(batch=500, length=2, seed=0, size=3)
    ends = {tuple(row): int(end) for row, end in zip(pairs.tokens.tolist(), pairs.targets[:, 1])}
    assert ends[(swap, cycle)] != ends[(cycle, swap)]


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: mqar(4, 30, 5, 24, seed),
        lambda seed: mqar_text(4, 30, 5, 24, seed),
        lambda seed: key_value_stream(4, 30, 5, 24, seed),
        lambda seed: parity(4, 30, seed),
        lambda seed: permutations(4, 30, seed),
    ],
    ids=["mqar", "mqar text", "stream", "parity", "permutations"],
)
def test_a_seed_is_a_batch_whatever_was_drawn_before(make):
    first = make(1)
    torch.rand(5)
    state = torch.get_rng_state()
    again, other = make(1), make(2)
    assert all(torch.equal(one, two) for one, two in zip(first, again))
    assert not torch.equal(first.tokens, other.tokens)
    assert torch.equal(state, torch.get_rng_state())


def test_accuracy_counts_asked_places_alone():
    targets = torch.tensor([[IGNORED, 1, 2, 0]])
    logits = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2, 2]]), 3).float()
    assert accuracy(logits, targets) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mqar(1, 11, 4, 24, 0), ["length is 11", "4 pairs", "at least 12"]),
        (lambda: mqar(1, 30, 0, 24, 0), ["0 pairs", "at least one"]),
        (lambda: mqar(1, 30, 5, 11, 0), ["vocab is 11", "at least 12"]),
        (lambda: mqar_text(1, 15, 4, 24, 0), ["length is 15", "4 pairs", "at least 16"]),
        (lambda: key_value_stream(1, 3, 1, 24, 0), ["length is 3", "at least 4"]),
        (lambda: key_value_stream(1, 30, 12, 24, 0), ["vocab is 24", "12 keys", "at least 26"]),
        (lambda: key_value_stream(1, 30, 2, 24, 0, fresh=0.0), ["fresh is 0.0"]),
        (lambda: permutations(1, 5, 0, size=7), ["size is 7", "1 to 6"]),
    ],
)
def test_tasks_that_cannot_be_made_are_refused_in_words(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words), str(error.value)
