"""Retention and recall: a model that remembers everything is right everywhere, one that remembers nothing is at chance."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from proteus_lm.data.synthetic import IGNORED, key_value_stream, mqar_text
from proteus_lm.evals.diagnostics import measure_retention, task_recall
from proteus_lm.evals.diagnostics.recall import last_written

from ...mixers.models import VOCABULARY, make, options
from ..doubles import texts


class Dictionary(nn.Module):
    """Remembers which token followed each run of `order` tokens in its row, for `span` tokens; says so with certainty 0.9."""

    def __init__(self, vocabulary: int, order: int = 1, span: int = 10**9) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.dummy = nn.Parameter(torch.zeros(1))
        self.order, self.span = order, span

    def forward(self, input_ids, past_key_values, use_cache, logits_to_keep=0):
        before = past_key_values.states
        rows = input_ids if before is None else torch.cat((before[0], input_ids), 1)
        past_key_values.states, past_key_values.position = [rows], torch.full((len(rows),), rows.shape[1])
        size, vocabulary = input_ids.shape[1], self.config.vocab_size
        p = torch.full((len(rows), size, vocabulary), 1 / vocabulary)
        for r, row in enumerate(rows.tolist()):
            for i in range(size):
                end = rows.shape[1] - size + i + 1
                key = row[end - self.order : end]
                first = max(self.order, end - self.span)
                for j in range(end - 1, first - 1, -1):
                    if len(key) == self.order and row[j - self.order : j] == key:
                        p[r, i] = 0.1 / (vocabulary - 1)
                        p[r, i, row[j]] = 0.9
                        break
        return SimpleNamespace(logits=p.log()[:, -logits_to_keep:])


def test_a_perfect_memory_is_right_at_every_age_and_gains_the_same():
    found = measure_retention(
        Dictionary(200, order=3), texts(90, 90, vocabulary=200), length=80, pairs=8, looks=4, rows=2, key_tokens=3
    )
    asked = ~np.isnan(found.right)
    assert asked.any()
    assert (found.right[asked] == 1).all()
    # p is 0.9 after its key and 1 / 200 after a key never written.
    assert found.gain[asked] == pytest.approx(math.log(0.9 * 200))


def test_a_memory_that_forgets_is_right_as_long_as_it_keeps():
    found = measure_retention(
        Dictionary(200, order=3, span=30), texts(90, 90, vocabulary=200), length=80, pairs=8, looks=8, rows=2, key_tokens=3
    )
    age = np.array(found.asked)[None] - np.array(found.written)[:, None]
    there = ~np.isnan(found.gain[0])
    # The copy reads three tokens of the key more.
    assert (found.gain[:, there & (age <= 26)] > 5).all()
    assert (np.abs(found.gain[:, there & (age > 26)]) < 1e-6).all()


def test_a_model_that_remembers_nothing_gains_nothing():
    found = measure_retention(Dictionary(200, order=3, span=0), texts(90, vocabulary=200), length=80, pairs=8, looks=4, rows=1)
    assert np.abs(found.gain[~np.isnan(found.gain)]).max() < 1e-6


def test_pairs_are_asked_only_after_they_are_written_and_by_age_counts_each_once():
    found = measure_retention(Dictionary(200), texts(90, 90, vocabulary=200), length=80, pairs=8, looks=4, rows=2, key_tokens=1)
    for pair, written in enumerate(found.written):
        for look, asked in enumerate(found.asked):
            assert np.isnan(found.gain[:, pair, look]).all() == (written > asked)
    rows = found.by_age((0, 16, 32, 64, 81))
    assert sum(row[-1] for row in rows) == (~np.isnan(found.gain)).sum()
    assert found.chance.tolist() == pytest.approx([1 / sum(w <= a for w in found.written) for a in found.asked])
    plain = found.to_dict()
    assert plain["gain_nats_by_row_pair_look"][0][-1][0] is None
    assert plain["written"] == list(found.written)


@pytest.mark.parametrize("mixer", ["comba", "titans", "attention"])
def test_asking_does_not_change_the_memory_and_chunks_do_not_change_the_answer(mixer):
    model = make(options(mixer))
    data = texts(90, 90, vocabulary=VOCABULARY)
    whole, pieces, fewer = (
        measure_retention(model, data, length=80, pairs=4, looks=looks, rows=2, key_tokens=2, chunk=chunk)
        for looks, chunk in ((4, 1000), (4, 7), (2, 1000))
    )
    assert np.allclose(whole.gain, pieces.gain, equal_nan=True, atol=1e-8)
    assert np.allclose(whole.gain[:, :, 1::2], fewer.gain, equal_nan=True, atol=1e-8)  # looking in between left no trace


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"length": 30, "pairs": 8}, "at most half"),
        ({"looks": 0}, "each number must be"),
        ({"pairs": 6, "key_tokens": 6}, "too few"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes, says):
    with pytest.raises(ValueError, match=says):
        measure_retention(Dictionary(11), texts(200), **{"length": 150, "pairs": 4, "key_tokens": 2, **sizes})


@pytest.mark.parametrize("task", [mqar_text(6, 40, 5, 24, seed=1), key_value_stream(6, 81, 5, 24, seed=1)], ids=["mqar", "stream"])
def test_recall_is_perfect_with_a_dictionary_and_by_age_with_one_that_forgets(task):
    assert task_recall(Dictionary(24), task).accuracy.mean == 1
    short = task_recall(Dictionary(24, span=12), task, batch_size=4, chunk=7)
    age = short.asked - short.written
    assert short.right[age <= 10].all()
    assert short.loss[age <= 10] == pytest.approx(-math.log(0.9))
    assert not short.right[age > 12].all()
    assert len(short.rows) == int((task.targets != IGNORED).sum())


def test_ages_are_tokens_since_the_key_stood_last():
    rows, asked, written = last_written(mqar_text(3, 40, 5, 24, seed=1))
    task = mqar_text(3, 40, 5, 24, seed=1)
    for row, a, w in zip(rows, asked, written):
        assert task.tokens[row, a] == task.tokens[row, w] and w < 10 <= a
        assert task.tokens[row, w + 1] == task.targets[row, a]


def test_recall_by_age_and_by_place_count_every_question_once():
    found = task_recall(Dictionary(24, span=20), key_value_stream(4, 200, 5, 24, seed=3))
    for parts in (found.by_age((0, 4, 16, 64)), found.by_written(5)):
        assert sum(e.tokens for _, _, e in parts) == len(found.rows)
    assert found.to_dict()["right"] == found.right.astype(int).tolist()


def test_tokens_the_model_does_not_know_are_refused():
    with pytest.raises(ValueError, match="outside the model's vocabulary of 11"):
        task_recall(Dictionary(11), mqar_text(2, 40, 5, 24, seed=1))


def test_pairs_of_a_task_have_its_ids_and_keys_the_row_does_not_use():
    rows = key_value_stream(3, 121, 5, 24, seed=4).tokens.numpy()

    class Rows:
        documents = 3

        def document(self, index):
            return rows[index]

    names = (range(1, 12), range(12, 24))
    found = measure_retention(Dictionary(24), Rows(), length=100, pairs=5, looks=5, rows=3, names=names)
    assert (found.right[~np.isnan(found.right)] == 1).all()  # no key of the row stands in a pair's way
    with pytest.raises(ValueError, match="7 pairs need as many values"):
        measure_retention(Dictionary(24), Rows(), length=100, pairs=7, looks=5, rows=3, names=names)
