"""What must hold everywhere (design.md), over every mixer of the registry."""

from __future__ import annotations

from functools import cache as kept

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proteus_lm import ProteusCache
from proteus_lm.mixers.base import GateProjection
from proteus_lm.sequence import TokenSequence
from tests.mixers.models import (
    assert_near,
    assert_states_near,
    cases,
    make,
    scheduled_cases,
    tensors,
    tokens,
    train_finitely,
)

every = pytest.mark.parametrize("fields", cases())
scheduled = pytest.mark.parametrize("fields", scheduled_cases())
LENGTH = 23  # no multiple of a chunk, past every unlock (6, 12, 18)


def run(model, ids, splits=None, **inputs):
    """Logits and cache of `ids` given in pieces."""
    cache = ProteusCache()
    parts = [ids] if splits is None else ids.split(splits, 1)
    return torch.cat([model(part, past_key_values=cache, **inputs).logits for part in parts], 1), cache


# 1. One block is the base model.


@every
def test_one_block_equals_the_ungated_model_bit_for_bit(fields, monkeypatch):
    model = make({**fields, "memory_blocks": 1, "memory_axis": "key"}, torch.float32)
    ids = tokens(2, LENGTH)

    def everything():
        model.zero_grad()
        out = model(ids, labels=ids, use_cache=True)
        out.loss.backward()
        step = model(ids[:, :1], past_key_values=out.past_key_values.copy())
        text = model.generate(ids[:, :5], max_new_tokens=8, do_sample=False, pad_token_id=0)
        grads = [p.grad.clone() for p in model.parameters()]
        return [out.logits, *tensors(tuple(out.past_key_values.states)), *grads, step.logits, text]

    ungated = everything()
    # By default one block is passed to the operations as "no schedule": now pass the schedule of one block itself.
    monkeypatch.setattr(TokenSequence, "activation", TokenSequence._activation)
    for base, gated in zip(ungated, everything(), strict=True):
        assert torch.equal(base, gated)


@scheduled
def test_four_blocks_are_another_model_from_the_first_token_read_on(fields):
    four, one = make(fields), make({**fields, "memory_blocks": 1, "memory_axis": "key"})
    ids = tokens(1, LENGTH)
    first = int(fields.get("read") == "pre")  # the first token itself reads an empty memory then
    assert (four(ids).logits - one(ids).logits)[:, first].abs().max() > 1e-6


# 2. Locked blocks.


@scheduled
def test_a_block_holds_nothing_before_it_opens_and_something_after(fields):
    model, ids = make(fields), tokens(2, LENGTH)
    schedule = model.config.schedule
    for length in (1, 5, 6, 7, 12, 13, 18, 19, LENGTH):
        norms = model.memory_norms(run(model, ids[:, :length])[1])
        opened = schedule.active_blocks(length - 1)
        assert (norms[..., opened:] == 0).all() and (norms[..., :opened] > 0).all(), f"after {length} tokens"
        assert torch.equal(norms[..., opened:], model.memory_norms(run(model, ids[:, :length], 1)[1])[..., opened:])


@scheduled
@pytest.mark.parametrize("length", [1, 4], ids=["step", "chunks"])
def test_nan_in_a_locked_block_reaches_neither_output_nor_gradient_and_keeps_its_bits(fields, length):
    fields = {**fields, "memory_context": 48}  # the second block opens at 12, behind every token of this test
    model, base, ids = make(fields), make({**fields, "memory_blocks": 1, "memory_axis": "key"}), tokens(2, 9)
    with torch.no_grad():
        cache = run(model, ids[:, :5])[1]
        used = tensors(tuple(run(base, ids[:, :5])[1].states))
    config = model.config
    fresh = tensors(tuple(layer.mixer.init_state(2, "cpu", torch.float64) for layer in model.layers))
    # Locked: what the ungated model has written by now, and this one has not.
    locked = [(now == new) & (other != new) for now, new, other in zip(tensors(tuple(cache.states)), fresh, used, strict=True)]
    assert sum(int(mask.sum()) for mask in locked) > 0, f"{config.mixer} has no locked coordinate"
    results = []
    for planted in (None, float("nan")):
        given = cache.copy()
        for tensor, mask in zip(tensors(tuple(given.states)), locked):
            if planted is not None and tensor.is_floating_point():
                tensor[mask] = planted
        model.zero_grad()
        logits = model(ids[:, 5 : 5 + length], past_key_values=given).logits
        logits.square().sum().backward()
        results.append([logits, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        for tensor, mask, before in zip(tensors(tuple(given.states)), locked, tensors(tuple(cache.states)), strict=True):
            assert tensor[mask].isnan().all() if planted is not None else torch.equal(tensor[mask], before[mask])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


# 3. Causality and memory.


@every
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_changing_a_token_changes_no_earlier_logit_bit_and_changes_its_own(fields, training):
    model, ids = make(fields, torch.float32).train(training), tokens(2, LENGTH)
    base = model(ids).logits
    for at in (1, 3, 4, 5, 6, 7, 11, 12, 17, 18, 20, LENGTH - 1):
        changed = ids.clone()
        changed[:, at:] = (ids[:, at:] + 1) % 31
        logits = model(changed).logits
        assert torch.equal(base[:, :at], logits[:, :at]), f"token {at} leaks backwards"
        assert (base[:, at] - logits[:, at]).abs().max() > 1e-3


@every
def test_the_first_token_is_remembered_far_beyond_the_convolution(fields):
    model, ids = make(fields), tokens(1, LENGTH)
    config = model.config
    kept = config.window is None or config.mixer_class.memory_dim(config) is not None
    reach = LENGTH - 1 if kept else config.num_hidden_layers * (config.window - 1)
    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] + 1) % 31
    # Two layers of four taps see six tokens back. Rounding in fp64 is 1e-15; a memory that is used is far above it.
    assert reach > 6
    assert (model(ids).logits - model(changed).logits)[:, reach].abs().max() > 1e-9


@every
def test_training_evaluation_and_inference_mode_compute_the_same(fields):
    model, ids = make(fields, torch.float32), tokens(2, LENGTH)
    base = model(ids).logits
    assert torch.equal(model.train()(ids).logits, base)
    with torch.inference_mode():
        assert torch.equal(model.eval()(ids).logits, base)


# 4. Any split into calls.


@every
@pytest.mark.parametrize(
    "splits",
    [[1] * LENGTH, [5, 1, 1, 9, 6, 1], [4, 4, 8, 7], [6, 6, 6, 5], [1, 22], [22, 1]],
    ids=["one by one", "off the grid", "at chunks", "at unlocks", "1 + rest", "rest + 1"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_any_split_into_calls_gives_what_one_call_gives(fields, splits, dtype):
    model, ids = make(fields, dtype), tokens(2, LENGTH)
    with torch.no_grad():
        whole, end = run(model, ids)
        pieces, cache = run(model, ids, splits)
    assert_near(pieces, whole)
    assert_states_near(cache, end)
    assert_near(whole, model(ids, use_cache=False).logits)


@every
def test_any_split_gives_what_one_call_gives_in_bf16(fields):
    model, ids = make(fields, torch.float32), tokens(2, LENGTH)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        whole, _ = run(model, ids)
        pieces, _ = run(model, ids, [5, 1, 1, 9, 6, 1])
    assert_near(pieces.float(), whole.float(), 1e-2)  # design.md's for bf16: products of other shapes are rounded otherwise


@every
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8])
def test_short_sequences_work_in_training_and_evaluation(fields, length):
    model, ids = make(fields), tokens(2, length)
    base = model(ids).logits
    assert_near(model.train()(ids).logits, base)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# 5. A row does not depend on its batch.

MASKS = {
    "left": [[0] * 9 + [1] * 10, [0] * 2 + [1] * 17, [1] * 19],
    "right": [[1] * 10 + [0] * 9, [1] * 17 + [0] * 2, [1] * 19],
    "inner": [[1] * 3 + [0] * 4 + [1] * 12, [0, 1] * 9 + [1], [1] * 8 + [0] * 3 + [1] * 6 + [0] * 2],
    "equal counts": [[0] * 3 + [1] * 16, [1] * 16 + [0] * 3, [1] * 5 + [0] * 3 + [1] * 11],
}


@every
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", MASKS)
def test_masked_tokens_change_nothing_and_rows_equal_themselves_alone(fields, kind, rows):
    model, ids = make(fields), tokens(rows, 19)
    mask = torch.tensor(MASKS[kind][:rows])
    with torch.no_grad():
        out = model(ids, attention_mask=mask, use_cache=True)
        other = model(torch.where(mask.bool(), ids, (ids + 7) % 31), attention_mask=mask, use_cache=True)
        following = model(ids[:, :6], past_key_values=out.past_key_values.copy()).logits
        assert torch.equal(out.logits, other.logits)
        for one, two in zip(tensors(tuple(out.past_key_values.states)), tensors(tuple(other.past_key_values.states))):
            assert torch.equal(one, two)
        for row in range(rows):
            kept = mask[row].bool()
            alone = model(ids[row : row + 1, kept], use_cache=True)
            assert_near(out.logits[row, kept], alone.logits[0])
            assert out.past_key_values.position[row] == kept.sum()
            assert_near(following[row], model(ids[row : row + 1, :6], past_key_values=alone.past_key_values).logits[0])


@every
def test_masked_tokens_get_no_gradient_and_are_not_scored(fields):
    model, ids = make(fields), tokens(3, 19)
    mask = torch.tensor(MASKS["inner"])
    embeddings = model.embed_tokens(ids).detach().requires_grad_()
    out = model(inputs_embeds=embeddings, attention_mask=mask, labels=ids)
    out.logits[mask == 1].square().sum().backward()
    assert (embeddings.grad[mask == 0] == 0).all() and (embeddings.grad[mask == 1].abs().amax(-1) > 0).all()
    sums, count = 0.0, 0
    for row in range(3):
        alone = ids[row : row + 1, mask[row].bool()]
        scored = alone.shape[1] - 1
        sums, count = sums + model(alone, labels=alone).loss * scored, count + scored
    assert_near(out.loss, sums / count)


@every
def test_masks_work_in_every_call_of_a_split_even_for_rows_without_a_token(fields):
    model, ids = make(fields), tokens(3, 19)
    mask = torch.tensor([[0] * 9 + [1] * 10, [1] * 4 + [0] * 5 + [1, 0] + [0, 1] * 4, [1] * 19])
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=True)
        for splits in ([1] * 19, [4, 5, 1, 9], [9, 10]):
            cache, parts, seen = ProteusCache(), [], 0
            for part in ids.split(splits, 1):
                seen += part.shape[1]
                parts.append(model(part, attention_mask=mask[:, :seen], past_key_values=cache).logits)
            assert_near(torch.cat(parts, 1), whole.logits)
            assert_states_near(cache, whole.past_key_values)


@every
def test_a_call_whose_mask_is_zero_everywhere_changes_no_state(fields):
    model, ids = make(fields), tokens(2, 7)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        before = cache.copy()
        out = model(ids, attention_mask=torch.zeros(2, 7), past_key_values=cache)
        assert_states_near(cache, before, 1e-30)
        assert out.logits.shape == (2, 7, 31) and cache.get_seq_length() == 14
        first = model(ids, attention_mask=torch.zeros(2, 7), use_cache=True)
        assert_near(model(ids, past_key_values=first.past_key_values).logits, model(ids).logits)


@every
def test_packed_documents_equal_separate_ones_in_loss_gradient_and_state(fields):
    model = make(fields)
    lengths = [1, 7, 4, 13, 8]
    ids = tokens(1, sum(lengths))
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = model(ids, labels=ids, cu_seqlens=bounds, use_cache=True)
    packed.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = 0.0
    for i, document in enumerate(ids.split(lengths, 1)):
        alone = model(document, labels=document, use_cache=True)
        assert_near(packed.logits[:, bounds[i] : bounds[i + 1]], alone.logits)
        rows = packed.past_key_values.reorder(torch.tensor([i]))
        step = document[:, -1:]
        assert_near(model(step, past_key_values=rows).logits, model(step, past_key_values=alone.past_key_values.copy()).logits)
        total = total + alone.loss * (lengths[i] - 1)
    loss = total / (sum(lengths) - len(lengths))
    assert_near(packed.loss, loss)
    loss.backward()
    for name, one, two in zip(dict(model.named_parameters()), gradients, (p.grad for p in model.parameters())):
        assert (one - two).norm() <= 1e-9 * (two.norm() + 1e-3), name


@every
def test_the_order_of_a_batch_changes_nothing(fields):
    model, ids = make(fields), tokens(3, 19)
    mask, order = torch.tensor(MASKS["left"]), torch.tensor([2, 0, 1])
    assert_near(model(ids[order], attention_mask=mask[order]).logits, model(ids, attention_mask=mask).logits[order])


# 4 and 5 at once, by chance: what a person did not think of.


@kept
def made(fields: tuple):
    """The model of some fields, made once for all examples."""
    return make(dict(fields))


def frozen(fields):
    """Fields as a key."""
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in fields.items())


@st.composite
def calls(draw):
    """Sizes of the calls a text is given in, and a mask (rows, tokens): padding anywhere, rows without a token too."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    row = st.lists(st.booleans(), min_size=sum(sizes), max_size=sum(sizes))
    return sizes, draw(st.lists(row, min_size=1, max_size=3))


def check_rows_in_calls(model, sizes, mask):
    """Rows given with padding and in pieces equal themselves alone and whole, and so do their states."""
    mask = torch.tensor(mask)
    ids, cache, parts, seen = tokens(*mask.shape), ProteusCache(), [], 0
    with torch.no_grad():
        for part in ids.split(sizes, 1):
            seen += part.shape[1]
            parts.append(model(part, attention_mask=mask[:, :seen], past_key_values=cache).logits)
        logits = torch.cat(parts, 1)
        for row, held in enumerate(mask):
            if not held.any():
                continue
            alone = model(ids[row : row + 1, held], use_cache=True)
            assert_near(logits[row, held], alone.logits[0])
            own = cache.reorder(torch.tensor([row]))
            step = ids[row : row + 1, :1]
            assert own.position.item() == held.sum()
            assert_near(model(step, past_key_values=own).logits, model(step, past_key_values=alone.past_key_values).logits)


def check_packing(model, lengths):
    """Documents packed in one row equal themselves alone, and so do their states."""
    ids = tokens(1, sum(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    with torch.no_grad():
        packed = model(ids, cu_seqlens=bounds, use_cache=True)
        for i, document in enumerate(ids.split(lengths, 1)):
            alone = model(document, use_cache=True)
            assert_near(packed.logits[:, bounds[i] : bounds[i + 1]], alone.logits)
            own = packed.past_key_values.reorder(torch.tensor([i]))
            step = document[:, :1]
            assert_near(model(step, past_key_values=own).logits, model(step, past_key_values=alone.past_key_values).logits)


documents = st.lists(st.integers(1, 26), min_size=1, max_size=5)


@every
@settings(max_examples=6, deadline=None)
@given(drawn=calls())
def test_any_split_with_any_padding_equals_each_row_alone(fields, drawn):
    check_rows_in_calls(made(frozen(fields)), *drawn)


@every
@settings(max_examples=6, deadline=None)
@given(lengths=documents)
def test_any_packing_equals_each_document_alone(fields, lengths):
    check_packing(made(frozen(fields)), lengths)


@pytest.mark.slow
@every
@settings(max_examples=100, deadline=None)
@given(drawn=calls(), lengths=documents)
def test_any_split_padding_and_packing_a_hundred_times(fields, drawn, lengths):
    check_rows_in_calls(made(frozen(fields)), *drawn)
    check_packing(made(frozen(fields)), lengths)


# 7. Precision.


@every
def test_gates_and_memory_are_fp32_whatever_the_autocast(fields):
    model, ids = make(fields, torch.float32), tokens(2, 9)
    seen = []
    for module in model.modules():
        if isinstance(module, GateProjection):
            module.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], past_key_values=cache)
    assert set(seen) <= {torch.float32}
    memories = list(memory_tensors(tuple(cache.states)))
    assert {memory.dtype for memory in memories} <= {torch.float32}
    assert bool(memories) == (model.config.mixer_class.memory_dim(model.config) is not None)


def memory_tensors(state):
    """What the memories of states hold: matrices, Titans' weights and momentum; not the layers' inputs kept beside them."""
    for name, part in zip(getattr(state, "_fields", [""] * len(state)), state, strict=True):
        if isinstance(part, tuple):
            yield from part if name in ("weights", "momentum") else memory_tensors(part)
        elif name in ("memory", "matrix"):
            yield part


@pytest.mark.slow
@every
def test_training_in_bf16_stays_finite_for_five_hundred_steps(fields):
    torch.manual_seed(0)
    train_finitely(fields, steps=500, length=48)


@every
def test_training_in_bf16_stays_finite(fields):
    train_finitely(fields, steps=30, length=23)


# State as a value.


@every
def test_every_parameter_gets_a_gradient(fields):
    model, ids = make(fields), tokens(2, LENGTH)
    model(ids, labels=ids).loss.backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]


@every
@pytest.mark.parametrize("length", [1, 5])
def test_gradient_flows_through_a_state_and_stops_at_detach(fields, length):
    model, ids = make(fields), tokens(2, 9)
    embeddings = model.embed_tokens(ids).detach().requires_grad_()
    cache = model(inputs_embeds=embeddings, use_cache=True).past_key_values
    cut = cache.detach()
    following = tokens(2, length, seed=5)
    model(following, past_key_values=cache).logits.square().sum().backward()
    assert (embeddings.grad.abs().amax(-1)[:, -4:] > 0).all()
    embeddings.grad = None
    model(following, past_key_values=cut).logits.square().sum().backward()
    assert embeddings.grad is None


@every
def test_a_cache_is_a_value_the_same_call_twice_gives_the_same(fields):
    model, ids = make(fields), tokens(2, 9)
    cache = model(ids, use_cache=True).past_key_values
    first = model(ids[:, :3], past_key_values=cache.copy()).logits
    assert torch.equal(first, model(ids[:, :3], past_key_values=cache.copy()).logits)
    assert cache.get_seq_length() == 9


@every
def test_the_state_is_as_large_as_the_mixer_says_and_a_memory_does_not_grow(fields):
    model, ids = make(fields), tokens(3, LENGTH)
    mixer = model.config.mixer_class
    sizes = []
    for length in (1, 6, LENGTH):
        cache = run(model, ids[:, :length])[1]
        assert cache.size == 3 * 2 * mixer.state_size(model.config, length)
        sizes.append(cache.size)
    if mixer.memory_dim(model.config) is not None or model.config.window is not None:
        assert len(set(sizes)) == 1
