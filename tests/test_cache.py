"""The cache under transformers' generation: every mixer, every way of decoding."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from proteus_lm import ProteusCache
from proteus_lm.mixers.state import named_tensors
from proteus_lm.model import CACHE_NAME
from tests.mixers.models import assert_near, cases, make, tensors, tokens

every = pytest.mark.parametrize("fields", cases())
LEFT = torch.tensor([[0] * 6 + [1] * 3, [1] * 9, [0] * 2 + [1] * 7])


def generate(model, ids, **changes):
    return model.generate(ids, **{"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, **changes})


def greedy(model, ids, count):
    """The most likely continuation without a cache."""
    for _ in range(count):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return ids


@every
def test_greedy_generation_equals_recomputing_the_whole_text_at_every_token(fields):
    model, ids = make(fields), tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(generate(model, ids), greedy(model, ids, 14))
        assert torch.equal(generate(model, ids, use_cache=False), greedy(model, ids, 14))


@every
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15])
def test_prompts_of_any_length_against_the_chunk_work(fields, length):
    model, ids = make(fields), tokens(1, length)
    with torch.no_grad():
        assert torch.equal(generate(model, ids, max_new_tokens=6), greedy(model, ids, 6))


@every
def test_a_batch_of_unequal_prompts_equals_each_alone(fields):
    model, ids = make(fields), tokens(3, 9)
    batch = generate(model, ids, attention_mask=LEFT)
    for row in range(3):
        alone = ids[row : row + 1, LEFT[row].bool()]
        assert torch.equal(batch[row, 9:], generate(model, alone)[0, alone.shape[1] :])


@every
def test_beams_equal_beams_without_a_cache(fields):
    model, ids = make(fields), tokens(3, 9)
    options = {"num_beams": 4, "num_return_sequences": 2, "attention_mask": LEFT, "max_new_tokens": 8, "eos_token_id": 7}
    assert torch.equal(generate(model, ids, **options), generate(model, ids, **options, use_cache=False))


@every
def test_sampling_several_sequences_equals_sampling_without_a_cache(fields):
    model, ids = make(fields), tokens(2, 9)
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        texts.append(generate(model, ids, do_sample=True, num_return_sequences=3, use_cache=use_cache))
    assert torch.equal(*texts)
    assert len({tuple(text) for text in texts[0].tolist()}) > 2


@every
@pytest.mark.parametrize("masked", [False, True])
def test_generation_continues_from_a_returned_cache(fields, masked):
    model, ids = make(fields), tokens(3, 9)
    mask = LEFT if masked else torch.ones_like(LEFT)
    first = generate(model, ids, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True)
    assert first[CACHE_NAME].get_seq_length() == 13  # the last token has not been fed
    whole = torch.cat((first.sequences, tokens(3, 2, seed=9)), 1)
    mask = torch.cat((mask, torch.ones(3, 7, dtype=mask.dtype)), 1)
    fresh = generate(model, whole, attention_mask=mask)
    assert torch.equal(generate(model, whole, attention_mask=mask, **{CACHE_NAME: first[CACHE_NAME]}), fresh)


@every
def test_a_long_prompt_can_be_read_in_pieces_by_generate(fields):
    model, ids = make(fields), tokens(3, 9)
    pieces = generate(model, ids, attention_mask=LEFT, prefill_chunk_size=4)
    assert torch.equal(pieces, generate(model, ids, attention_mask=LEFT))


@every
def test_rows_can_be_repeated_chosen_and_reordered(fields):
    model, ids = make(fields), tokens(3, 9)
    with torch.no_grad():
        cache = model(ids, attention_mask=LEFT, use_cache=True)[CACHE_NAME]
        step = tokens(3, 1, seed=4)
        wanted = model(step, past_key_values=cache.copy()).logits
        order = torch.tensor([2, 0, 0, 1])
        assert_near(model(step[order], past_key_values=cache.reorder(order)).logits, wanted[order])
        repeated = cache.copy()
        repeated.batch_repeat_interleave(2)
        assert_near(model(step.repeat_interleave(2, 0), past_key_values=repeated.copy()).logits, wanted.repeat_interleave(2, 0))
        repeated.batch_select_indices(torch.tensor([4]))
        assert_near(model(step[2:], past_key_values=repeated).logits, wanted[2:])
        assert repeated.batch_size == 1 and cache.batch_size == 3


def test_a_copy_is_not_changed_by_forwards_and_reset_forgets():
    model, ids = make(cases()[0].values[0]), tokens(2, 5)
    cache = model(ids, use_cache=True)[CACHE_NAME]
    kept = cache.copy()
    before = [x.clone() for x in tensors(tuple(kept.states))]
    model(ids, past_key_values=cache)
    assert (kept.get_seq_length(), cache.get_seq_length()) == (5, 10)
    assert all(torch.equal(one, two) for one, two in zip(before, tensors(tuple(kept.states))))
    cache.reset()
    assert cache.is_empty and torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits)


@every
def test_a_saved_cache_gives_the_same_next_tokens_and_no_other_model_takes_it(fields, tmp_path):
    model, ids = make(fields, torch.float32), tokens(3, 9)
    with torch.no_grad():
        cache = model(ids, attention_mask=LEFT, use_cache=True)[CACHE_NAME]
        cache.save(tmp_path / "cache.safetensors", model)
        loaded = ProteusCache.load(tmp_path / "cache.safetensors", model)
        assert (loaded.get_seq_length(), loaded.position.tolist()) == (9, [3, 9, 7])
        for part in (ids[:, :1], ids[:, :5]):
            assert torch.equal(model(part, past_key_values=cache).logits, model(part, past_key_values=loaded).logits)
        with pytest.raises(ValueError, match="the model that made it"):
            ProteusCache.load(tmp_path / "cache.safetensors", make({**fields, "num_heads": 4}))
        with pytest.raises(ValueError, match="empty"):
            ProteusCache().save(tmp_path / "cache.safetensors", model)
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_cut_cache_file_is_refused_with_its_path_and_what_to_do(share, tmp_path):
    model, ids = make(cases()[0].values[0]), tokens(2, 5)
    path = tmp_path / "cache.safetensors"
    model(ids, use_cache=True)[CACHE_NAME].save(path, model)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=r"cache\.safetensors cannot be read .* damaged or cut short.*run the model"):
        ProteusCache.load(path, model)
    with pytest.raises(FileNotFoundError, match="none"):
        ProteusCache.load(tmp_path / "none", model)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"use_cache": False}], ids=str)
def test_a_prompt_of_masked_tokens_alone_is_refused_by_generate(options):
    model, ids = make(cases()[0].values[0]), tokens(3, 9)
    mask = LEFT.clone()
    mask[1] = 0
    with pytest.raises(ValueError, match="prompt with no tokens"):
        generate(model, ids, attention_mask=mask, **options)
    ids[2] = 0  # the padding, left out where no mask is given
    with pytest.raises(ValueError, match="pad_token_id"):
        generate(model, ids, **options)


def test_what_a_memory_cannot_do_is_said():
    model, ids = make(cases()[0].values[0]), tokens(2, 5)
    cache = model(ids, use_cache=True)[CACHE_NAME]
    with pytest.raises(NotImplementedError, match=r"copy\(\)"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="cache has 2 rows and the input 3"):
        model(tokens(3, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="DynamicCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="two names"):
        model(ids, past_key_values=cache, cache=cache)
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(model, ids, cache_implementation="static")
    with pytest.raises(ValueError, match="empty"):
        model.memory_norms(ProteusCache())


@every
def test_both_names_of_the_cache_are_taken(fields):
    model, ids = make(fields), tokens(2, 5)
    one, two = ProteusCache(), ProteusCache()
    for part in (ids[:, :3], ids[:, 3:]):
        assert torch.equal(model(part, past_key_values=one).logits, model(part, cache=two).logits)


@every
@pytest.mark.parametrize("how", ["whole", "padded", "packed", "step by step"])
def test_a_cache_keeps_no_more_memory_alive_than_twice_what_it_holds(fields, how):
    model, ids = make(fields), tokens(1, 400)
    given = {"attention_mask": (torch.arange(400) >= 9).long()[None]} if how == "padded" else {}
    given |= {"cu_seqlens": torch.tensor([0, 150, 400])} if how == "packed" else {}
    with torch.no_grad():
        cache = model(ids, use_cache=True, **given).past_key_values
        for _ in range(3 if how == "step by step" else 0):
            cache = model(ids[:, :1], past_key_values=cache).past_key_values
    held = [x for state in cache.copy().states for x in named_tensors(state).values()]
    assert held
    assert all(x.untyped_storage().nbytes() <= 2 * x.numel() * x.element_size() for x in held if x.numel())
