import numpy as np
import pytest
import torch

from proteus_lm import ActivationSchedule, ProteusCache, ProteusConfig, ProteusForCausalLM
from proteus_lm.report.memory import look_points, trace_memory

from ..evals.doubles import texts


@pytest.fixture(scope="module")
def model() -> ProteusForCausalLM:
    torch.manual_seed(0)
    config = ProteusConfig(
        vocab_size=11, hidden_size=32, num_heads=2, chunk_size=8, memory_expansion=2, memory_blocks=4, memory_context=32
    )
    return ProteusForCausalLM(config).train()


def test_memory_is_looked_at_when_each_stage_of_the_finest_schedule_ends():
    one, four = ActivationSchedule(1, 32), ActivationSchedule(4, 32)
    assert look_points([one, four], 64) == (8, 16, 24, 32, 64)
    assert look_points([one], 20) == (20,)
    assert look_points([ActivationSchedule(4, 32)], 20) == (8, 16, 20)
    many = look_points([ActivationSchedule(64, 6400)], 12800)
    assert len(many) == 16
    assert (many[0], many[-1]) == (100, 12800)


def test_the_trace_is_the_memory_after_one_forward_over_as_many_tokens(model):
    data = texts(70, 70, 70)
    trace = trace_memory(model, data, model.config.schedule, (5, 8, 21, 32, 64), windows=3)
    assert trace.windows == 3
    assert model.training  # as it was
    for i, tokens in enumerate(trace.tokens):
        ids = torch.stack([torch.from_numpy(data.document(d)[:tokens].astype(np.int64)) for d in range(3)])
        cache = ProteusCache()
        with torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            expected = model.memory_norms(cache).double().mean(1).numpy()
        assert np.allclose(trace.norms[i], expected, rtol=1e-4, atol=1e-6)


def test_a_block_is_empty_until_it_opens_and_fills_afterwards(model):
    trace = trace_memory(model, texts(70), model.config.schedule, look_points([model.config.schedule], 64))
    assert trace.open == (1, 2, 3, 4, 4)
    assert trace.unlocks == (0, 8, 16, 24)
    for norms, opened in zip(trace.norms, trace.open):
        assert (norms[:, :opened] > 0).all()
        assert (norms[:, opened:] == 0).all()


def test_documents_too_short_for_the_trace_are_an_error(model):
    with pytest.raises(ValueError, match="no document holds 65 tokens"):
        trace_memory(model, texts(30), model.config.schedule, (64,))
