"""When blocks open, by policy: what a model does with it, over the mixers that have a memory."""

from __future__ import annotations

import pytest
import torch

from proteus_lm import ActivationSchedule, ProteusCache, ProteusForCausalLM
from tests.mixers.models import CONTEXT, assert_near, make, scheduled_cases, tokens

LENGTH = 2 * CONTEXT - 1
scheduled = pytest.mark.parametrize("fields", scheduled_cases())
stretch = {"memory_policy": "stretch"}


@scheduled
def test_stretched_to_another_length_a_model_is_that_of_the_other_context(fields):
    model, other = make({**fields, **stretch}), make({**fields, "memory_context": LENGTH})
    ids = tokens(2, LENGTH)
    before = model(ids).logits
    model.set_context(LENGTH)
    assert torch.equal(model(ids).logits, other(ids).logits)
    assert (model(ids).logits - before).abs().max() > 1e-9
    text = model.generate(ids[:, :9], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(text, other.generate(ids[:, :9], max_new_tokens=8, do_sample=False, pad_token_id=0))
    model.set_context(None)
    assert torch.equal(model(ids).logits, before)


@scheduled
def test_custom_positions_that_say_what_the_uniform_rule_says_change_no_bit(fields):
    uniform = make(fields)
    unlocks = [uniform.schedule.unlock_position(block) for block in range(4)]
    custom = make({**fields, "memory_policy": "custom", "memory_unlocks": unlocks})
    ids = tokens(2, CONTEXT)
    assert torch.equal(custom(ids).logits, uniform(ids).logits)


@scheduled
def test_blocks_hold_something_from_their_given_position_on(fields):
    unlocks = [0, 1, 11, 11]
    model, ids = make({**fields, "memory_policy": "custom", "memory_unlocks": unlocks}), tokens(2, 14)
    for length in (1, 2, 11, 12, 14):
        cache = model(ids[:, :length], use_cache=True).past_key_values
        opened = sum(unlock < length for unlock in unlocks)
        norms = model.memory_norms(cache)
        assert (norms[..., opened:] == 0).all() and (norms[..., :opened] > 0).all(), f"after {length} tokens"


@scheduled
def test_with_custom_positions_any_split_gives_what_one_call_gives(fields):
    model = make({**fields, "memory_policy": "custom", "memory_unlocks": [0, 1, 11, 11]})
    ids, cache = tokens(2, 14), ProteusCache()
    pieces = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([1, 1, 8, 1, 3], 1)], 1)
    assert_near(pieces, model(ids).logits)


def test_a_trained_model_is_loaded_to_be_stretched_and_its_file_stays_as_it_was(tmp_path):
    fields = scheduled_cases()[0].values[0]
    trained = make(fields, torch.float32)
    trained.save_pretrained(tmp_path)
    model = ProteusForCausalLM.from_pretrained(tmp_path, memory_policy="stretch")
    model.set_context(96)
    assert model.schedule == ActivationSchedule(4, 96)
    model.save_pretrained(tmp_path / "again")
    assert ProteusForCausalLM.from_pretrained(tmp_path / "again").schedule == trained.schedule


@pytest.mark.parametrize("policy", [{}, {"memory_policy": "custom", "memory_unlocks": [0, 1, 2, 3]}])
def test_only_the_policy_stretch_stretches(policy):
    model = make({**scheduled_cases()[0].values[0], **policy})
    with pytest.raises(ValueError, match="load the model with memory_policy='stretch'"):
        model.set_context(48)


def test_a_length_below_one_is_refused():
    with pytest.raises(ValueError, match="context is 0"):
        make({**scheduled_cases()[0].values[0], **stretch}).set_context(0)


def test_a_document_keeps_one_schedule(tmp_path):
    model, ids = make({**scheduled_cases()[0].values[0], **stretch}), tokens(1, 9)
    cache = model(ids, use_cache=True).past_key_values
    cache.save(tmp_path / "memory.safetensors", model)
    model.set_context(96)
    opened = r"opened at \[0, 6, 12, 18\], and the model opens them at \[0, 24, 48, 72\]"
    with pytest.raises(ValueError, match=opened):
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=opened):
        ProteusCache.load(tmp_path / "memory.safetensors", model)
    with pytest.raises(ValueError, match=opened):
        cache.save(tmp_path / "again.safetensors", model)
    cache.reset()
    assert model(ids, past_key_values=cache).logits.isfinite().all()
