"""The evaluation on the real models: carried state is one long forward, for every mixer there is."""

import math

import numpy as np
import pytest
import torch

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.evals import evaluate
from proteus_lm.mixers import registry

from .doubles import texts


def tiny(mixer: str) -> ProteusForCausalLM:
    special = {"chunk_size": 8, "memory_expansion": 2, "memory_blocks": 4, "memory_context": 32}
    fields = {name: value for name, value in special.items() if name in registry[mixer].fields | {"memory_context"}}
    torch.manual_seed(0)
    model = ProteusForCausalLM(ProteusConfig(mixer=mixer, vocab_size=11, hidden_size=32, num_heads=2, **fields))
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # far from uniform
    return model


@pytest.mark.parametrize("chunk", [1, 5, 32, 41])
@pytest.mark.parametrize("mixer", registry)
def test_state_carried_through_a_document_equals_one_long_forward(mixer, chunk):
    model, data = tiny(mixer), texts(90, 50, 71)
    whole = evaluate(model, data, context=None, chunk=1000, training_context=32)
    pieces = evaluate(model, data, context=None, chunk=chunk, training_context=32)
    # Losses are of order 3; fp32 states summed in another order, over bins of 2 tokens.
    assert np.allclose(whole.sums, pieces.sums, atol=1e-4)


@pytest.mark.parametrize("mixer", registry)
def test_the_loss_is_the_models_own_loss_on_each_document(mixer):
    model, data = tiny(mixer).eval(), texts(60, 60)
    result = evaluate(model, data, context=None, batch_size=2)
    for document in range(2):
        ids = torch.from_numpy(data.document(document).astype(np.int64))[None]
        with torch.no_grad():
            expected = model(input_ids=ids, labels=ids).loss.item()
        assert result.sums[document].sum() / 59 == pytest.approx(expected, abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.whole.mean))


@pytest.mark.parametrize("mixer", registry)
def test_evaluation_in_training_mode_gives_the_same_and_keeps_the_mode(mixer):
    data = texts(60)
    training, evaluating = tiny(mixer).train(), tiny(mixer).eval()
    assert (evaluate(training, data, context=20).sums == evaluate(evaluating, data, context=20).sums).all()
    assert training.training
    assert not evaluating.training
