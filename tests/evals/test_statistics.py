import math

import numpy as np
import pytest

from proteus_lm.evals.statistics import Estimate, over_seeds, ratio_estimate, t95


def test_independent_windows_of_one_size_give_the_textbook_standard_error():
    losses = np.random.default_rng(0).normal(2.0, 0.3, 50)
    estimate = ratio_estimate(losses * 10, np.full(50, 10), range(50))
    assert estimate.mean == pytest.approx(losses.mean(), rel=1e-12)
    assert estimate.error == pytest.approx(losses.std(ddof=1) / math.sqrt(50), rel=1e-12)


def test_windows_of_one_document_do_not_count_as_independent():
    per_document = np.random.default_rng(1).normal(2.0, 0.3, 8)
    copies = np.repeat(per_document, 100)  # a hundred equal windows a document tell nothing new
    estimate = ratio_estimate(copies, np.ones(800), np.repeat(np.arange(8), 100))
    assert estimate.error == pytest.approx(per_document.std(ddof=1) / math.sqrt(8), rel=1e-12)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(2)
    hits = 0
    for _ in range(2000):  # documents of unequal length with an effect of their own
        sizes = random.integers(1, 6, 12)
        groups = np.repeat(np.arange(12), sizes)
        sums = (random.normal(0, 1, 12)[groups] + random.normal(0, 0.5, len(groups))) * 7
        hits += not ratio_estimate(sums, np.full(len(groups), 7), groups).beyond_noise
    # 95% of 2000; the linearised error is a little small at 12 unequal documents, hence the lower side.
    assert 0.90 < hits / 2000 < 0.97


def test_a_single_window_has_no_error_and_no_opinion():
    estimate = ratio_estimate(np.array([3.0]), np.array([2]), [0])
    assert (estimate.mean, estimate.error, estimate.beyond_noise) == (1.5, None, None)


def test_windows_of_a_single_document_say_that_they_are_windows():
    estimate = ratio_estimate(np.array([3.0, 4.0]), np.array([2, 2]), [5, 5])
    assert (estimate.groups, estimate.unit) == (2, "windows")
    assert ratio_estimate(np.array([3.0, 4.0]), np.array([2, 2]), [5, 6]).unit == "documents"


def test_bins_without_tokens_give_no_number():
    assert math.isnan(ratio_estimate(np.zeros(3), np.zeros(3), range(3)).mean)


def test_few_documents_ask_for_a_wider_margin():
    assert Estimate(2.5, 1.0, 100, 1).beyond_noise
    assert not Estimate(2.5, 1.0, 4, 1).beyond_noise


def test_students_t_is_continuous_where_the_table_ends():
    assert t95(30) > t95(31) > t95(1000) > 1.9599
    assert t95(31) == pytest.approx(2.0395, abs=1e-3)
    assert t95(120) == pytest.approx(1.9799, abs=1e-3)


def test_over_seeds_is_the_mean_with_students_interval():
    estimate = over_seeds([1.0, 2.0, 4.0])
    assert estimate.mean == pytest.approx(7 / 3)
    assert estimate.error == pytest.approx(np.std([1, 2, 4], ddof=1) / 3**0.5)
    assert estimate.half_width == pytest.approx(4.303 * estimate.error)
    assert (estimate.groups, estimate.unit) == (3, "seeds")
    assert estimate.beyond_noise is False
    assert over_seeds([1.0, 1.01, 0.99]).beyond_noise is True


def test_one_seed_gives_no_error_and_no_judgement_and_none_is_refused():
    estimate = over_seeds([1.5])
    assert (estimate.mean, estimate.error, estimate.half_width, estimate.beyond_noise) == (1.5, None, None, None)
    with pytest.raises(ValueError, match="no values"):
        over_seeds([])
