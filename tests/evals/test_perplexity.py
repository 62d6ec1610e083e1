import math

import numpy as np
import pytest
import torch

from proteus_lm.evals import compare, evaluate
from proteus_lm.evals.perplexity import bin_edges

from .doubles import Recurrent, Texts, direct_losses, texts

# fp32 sums in another order (batched or not, cut or whole); the losses are of order 1.
CLOSE = 1e-5


def test_loss_is_that_of_each_window_read_alone_from_position_zero():
    model, data = Recurrent(), texts(25, 17, 40)
    result = evaluate(model, data, context=8, batch_size=3, bins=4)
    for window, sums in zip(result.windows, result.sums):
        alone = direct_losses(model, data.document(window.document)[window.start : window.start + window.length + 1])
        assert np.allclose(sums, alone.reshape(4, 2).sum(1), atol=CLOSE)
    mean = result.sums.sum() / sum(w.length for w in result.windows)
    assert result.whole.mean == pytest.approx(mean, abs=1e-12)
    assert result.perplexity == pytest.approx(math.exp(mean), rel=1e-12)


@pytest.mark.parametrize("chunk", [1, 5, 16, 31])
def test_state_carried_through_a_document_equals_one_long_forward(chunk):
    model, data = Recurrent(), texts(32, 50, 9)
    whole = evaluate(model, data, context=None, chunk=1000)
    pieces = evaluate(model, data, context=None, chunk=chunk)
    assert set(model.lengths[1:]) == {min(chunk, 49), 49 % chunk} - {0}  # after the first call, which read all at once
    assert np.allclose(whole.sums, pieces.sums, atol=CLOSE)
    assert (whole.counts == pieces.counts).all()
    losses = direct_losses(model, data.document(1))
    assert pieces.sums[1].sum() == pytest.approx(losses.sum(), abs=50 * CLOSE)


def test_documents_of_unequal_length_in_one_batch_do_not_touch_each_other():
    model, data = Recurrent(), texts(12, 40, 3, 25)
    together = evaluate(model, data, context=None, batch_size=4, chunk=7)
    alone = evaluate(model, data, context=None, batch_size=1, chunk=7)
    assert np.allclose(together.sums, alone.sums, atol=CLOSE)
    assert together.counts.sum() == 12 + 40 + 3 + 25 - 4


def test_position_bins_have_an_edge_at_the_training_context_and_go_on_past_it():
    assert bin_edges(64, 4, 32) == (0, 8, 16, 24, 32, 40, 48, 56, 64)
    assert bin_edges(32, 4, 64) == (0, 8, 16, 24, 32)
    assert bin_edges(40, 3, 32) == (0, 10, 21, 32, 40)
    assert bin_edges(2, 16) == (0, 1, 2)
    assert bin_edges(100, 4) == (0, 25, 50, 75, 100)
    with pytest.raises(ValueError, match="bins is 0"):
        bin_edges(10, 0)


def test_loss_past_the_training_context_is_apart_from_the_loss_within():
    model, data = Recurrent(), texts(65, 65, 65)
    result = evaluate(model, data, context=32, bins=4, training_context=16)
    losses = np.stack([direct_losses(model, data.document(w.document)[w.start : w.start + 33]) for w in result.windows])
    assert result.within_training.mean == pytest.approx(losses[:, :16].mean(), abs=CLOSE)
    assert result.past_training.mean == pytest.approx(losses[:, 16:].mean(), abs=CLOSE)
    assert evaluate(model, data, context=16, training_context=16).past_training is None
    assert evaluate(model, data, context=8, training_context=16).within_training is None


def test_the_training_flag_comes_back_and_no_gradient_is_kept():
    for training in (True, False):
        model = Recurrent().train(training)
        evaluate(model, texts(20), context=4)
        assert model.training is training
        assert set(model.modes) == {(False, False)}


def test_the_training_flag_comes_back_after_an_error_too():
    model = Recurrent(vocabulary=5).train()
    with pytest.raises(ValueError, match="another tokenizer"):
        evaluate(model, texts(20), context=4)
    assert model.training


def test_two_evaluations_are_equal_bit_for_bit():
    model, data = Recurrent(), texts(40, 41, 42)
    first, second = (evaluate(model, data, context=8, max_tokens=64) for _ in range(2))
    assert (first.sums == second.sums).all()
    assert first.to_dict() == second.to_dict()


def test_a_loss_that_is_not_finite_is_an_error_that_says_where():
    model = Recurrent()
    with torch.no_grad():
        model.head.bias[3] = math.nan
    with pytest.raises(ValueError, match="not finite in 4 of 4 windows, first in document 0"):
        evaluate(model, texts(17, 17), context=8)


def test_bits_per_byte_of_a_byte_model_is_its_loss_in_bits():
    result = evaluate(Recurrent(), texts(33), context=8, bytes_per_token=1.0)
    assert result.bits_per_byte(result.whole.mean) == pytest.approx(result.whole.mean / math.log(2))
    wide = evaluate(Recurrent(), texts(33), context=8, bytes_per_token=4.0)
    assert wide.bits_per_byte(1.0) == pytest.approx(1 / math.log(2) / 4)
    assert evaluate(Recurrent(), texts(33), context=8).bits_per_byte(1.0) is None


def test_progress_ends_at_all_tokens():
    seen = []
    evaluate(Recurrent(), texts(33, 20), context=8, batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (48, 48)
    assert seen == sorted(seen)


def test_comparison_finds_a_small_difference_that_unpaired_errors_would_hide():
    data = texts(*[65] * 12)
    base, other = Recurrent(seed=0), Recurrent(seed=0)
    with torch.no_grad():  # the same model with a little less certainty
        other.head.weight.mul_(0.98)
        other.head.bias.mul_(0.98)
    a, b = (evaluate(m, data, context=64, bins=4) for m in (base, other))
    difference = compare(a, b, names=("E = 1", "E = 8"))
    assert abs(difference.whole.mean) < a.whole.error
    assert difference.whole.beyond_noise
    better = "better" if b.whole.mean < a.whole.mean else "worse"
    size = f"{abs(difference.whole.mean):.4f} ± {difference.whole.error:.4f}"
    assert difference.verdict().startswith(f"E = 8 is {better} than E = 1 by {size} nats per token")
    total = sum(e.mean * e.tokens for e in difference.bins) / difference.whole.tokens
    assert total == pytest.approx(difference.whole.mean, abs=1e-12)


def test_comparison_can_say_worse_better_and_no_difference():
    data = texts(*[33] * 10)
    a = evaluate(Recurrent(seed=0), data, context=16, bins=4)

    def shifted(by: np.ndarray):
        return type(a)(**{**a.__dict__, "sums": a.sums + by[:, None] * a.counts})

    noise = np.random.default_rng(0).normal(0, 0.1, len(a.windows))
    noise -= noise.mean()
    names = ("base", "gated")
    assert "gated is worse than base by 0.2" in compare(a, shifted(noise + 0.2), names=names).verdict()
    assert "gated is better than base by 0.2" in compare(a, shifted(noise - 0.2), names=names).verdict()
    assert "No difference beyond the noise: gated minus base is" in compare(a, shifted(noise), names=names).verdict()
    assert compare(a, a, names=names).whole.mean == 0.0
    assert "No difference" in compare(a, a, names=names).verdict()


def test_a_comparison_can_be_of_the_later_positions_only():
    data = texts(*[65] * 6)
    a, b = (evaluate(Recurrent(seed=s), data, context=64, bins=4) for s in (0, 1))
    late = compare(a, b, names=("a", "b"), start=32)
    assert late.whole.mean == pytest.approx(b.between(32, 64).mean - a.between(32, 64).mean, abs=1e-12)
    assert late.bins == compare(a, b, names=("a", "b")).bins
    with pytest.raises(ValueError, match="start is 33; it must be an edge"):
        compare(a, b, names=("a", "b"), start=33)


def test_comparison_of_results_on_other_windows_is_refused():
    a = evaluate(Recurrent(), texts(33, 33), context=8)
    b = evaluate(Recurrent(), texts(33, 33), context=16)
    with pytest.raises(ValueError, match="not evaluated on the same windows"):
        compare(a, b, names=("a", "b"))


def test_a_single_window_gives_a_difference_but_no_verdict():
    a, b = (evaluate(Recurrent(seed=s), Texts(np.arange(9)), context=8) for s in (0, 1))
    assert "no verdict" in compare(a, b, names=("a", "b")).verdict()


@pytest.mark.parametrize("name", ["batch_size", "chunk"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        evaluate(Recurrent(), texts(20), context=4, **{name: 0})
