"""transformers' gated delta rules under the schedule: numbers, positions, setting up, and what is refused."""

from __future__ import annotations

import copy
import json
import threading
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from proteus_lm import ActivationSchedule, ProteusConfig, ProteusForCausalLM
from proteus_lm.attach import attach, detach
from proteus_lm.attach.gate import Doorkeeper
from proteus_lm.data.tokenizer import byte_tokenizer
from proteus_lm.evals.language_model import LanguageModel
from tests.attach.foreign import (
    MODELS,
    build,
    cache_of,
    in_calls,
    llama,
    modeling,
    padded,
    reference_rule,
    run,
    use_torch,
    with_reference,
)
from tests.attach.memory import BLOCKS, CONTEXT, KEYS, VALUES, VOCAB, close, tokens


@pytest.fixture(autouse=True)
def torch_functions(monkeypatch):
    use_torch(monkeypatch)


# One block, and the whole against the reference


def test_one_block_changes_no_bit():
    model, ids = build(), tokens(2, 40)
    base, gradients = run(model, ids)
    text = model.generate(ids[:, :9], max_new_tokens=12, do_sample=False)
    assert attach(model, 1, CONTEXT) is model
    gated, gated_gradients = run(model, ids)
    assert torch.equal(gated, base)
    assert all(torch.equal(gated_gradients[n], g) for n, g in gradients.items())
    assert torch.equal(model.generate(ids[:, :9], max_new_tokens=12, do_sample=False), text)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("axis, norm_order", [("key", "norm_then_mask"), ("key", "mask_then_norm"), ("value", "norm_then_mask")])
def test_attached_model_computes_the_literal_gated_memory(monkeypatch, name, axis, norm_order):
    ids = tokens(2, 37)  # every boundary, and some tokens after the last
    base, _ = run(build(name), ids)
    with monkeypatch.context() as patch:
        with_reference(patch, name, reference_rule(ActivationSchedule(BLOCKS, CONTEXT), axis, norm_order))
        want, gradients = run(build(name), ids)
    model = attach(build(name), BLOCKS, CONTEXT, axis=axis, norm_order=norm_order)
    got, got_gradients = run(model, ids)
    close(got, want)
    assert (got - base).abs().max() > 1e-3  # the gate does something
    assert got_gradients.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        if gradient.abs().max() > 1e-9:  # the memory's first projection rows may get none
            close(got_gradients[parameter], gradient, 1e-4)  # sums of many terms of either sign


def test_locked_rows_of_the_state_stay_exactly_zero():
    model = attach(build(), BLOCKS, CONTEXT)
    _, cache = in_calls(model, tokens(2, 13), [13])  # tokens 0-12 opened three blocks of four
    state = cache.layers[0].recurrent_states[0]
    opened = 3 * (KEYS // BLOCKS)
    assert torch.equal(state[:, :, opened:], torch.zeros_like(state[:, :, opened:]))
    assert state[:, :, :opened].abs().amin(-1).gt(0).all()


# Positions: caches, padding, beams


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[40], [17, 23], [1] * 40, [5, 1, 1, 12, 21], [24, 16]], ids=str)
def test_any_split_into_calls_gives_what_one_call_gives(name, lengths):
    model, ids = attach(build(name), BLOCKS, CONTEXT), tokens(2, 40)
    with torch.no_grad():
        got, cache = in_calls(model, ids, lengths)
        close(got, model(ids, use_cache=False).logits)
    assert cache.layers[0].recurrent_states[1].tolist() == [40, 40]
    assert cache.has_previous_state(0)  # asked of all states of a layer, positions too (transformers 5.17 then continues them)


def test_left_padded_rows_stand_at_their_own_positions(monkeypatch):
    ids, mask = padded([tokens(1, n, seed=n)[0] for n in (31, 20, 7)], 31)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    options = {"attention_mask": mask, "position_ids": positions}
    with monkeypatch.context() as patch:
        first = torch.tensor([0, 20 - 31, 7 - 31])  # the index of the first column in the row's document
        with_reference(patch, "Qwen3Next", reference_rule(ActivationSchedule(BLOCKS, CONTEXT), first=first))
        want, _ = run(build(), ids, **options)
    got, _ = run(attach(build(), BLOCKS, CONTEXT), ids, **options)
    close(got, want)


@pytest.mark.parametrize("lengths", [[31], [12, 19], [31 - 3, 1, 1, 1]], ids=str)
def test_padded_batch_equals_each_row_alone(lengths):
    """Prompts padded on the left, in any split; the padding ends inside a call, or exactly at its end."""
    model, prompts = attach(build(), BLOCKS, CONTEXT), [tokens(1, n, seed=n)[0] for n in (31, 19, 4)]
    ids, mask = padded(prompts, 31)
    cache, start, logits = None, 0, []
    with torch.no_grad():
        for length in lengths:
            end = start + length
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:end]
            output = model(
                ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache, start = cache_of(output), end
            logits.append(output.logits)
        for row, prompt in enumerate(prompts):
            close(torch.cat(logits, 1)[row, 31 - len(prompt) :], model(prompt[None]).logits[0])
    assert cache.layers[2].recurrent_states[1].tolist() == [31, 19, 4]


def test_right_padding_changes_nothing_before_it():
    model, prompts = attach(build(), BLOCKS, CONTEXT), [tokens(1, n, seed=n)[0] for n in (31, 11)]
    ids = torch.zeros(2, 31, dtype=torch.int64)
    ids[0], ids[1, :11] = prompts[0], prompts[1]
    mask = (ids > 0).long()
    with torch.no_grad():
        close(model(ids, attention_mask=mask).logits[1, :11], model(prompts[1][None]).logits[0])


def test_a_decoding_step_without_a_mask_knows_its_rows_positions():
    """What transformers gives the layer after the prompt: one token, no mask. The cache alone says where rows stand."""
    model, hidden = attach(build(), BLOCKS, CONTEXT), torch.randn(2, 18, 32)
    layer, mask = model.model.layers[0].linear_attn, torch.ones(2, 17, dtype=torch.int64)
    mask[1, :11] = 0  # the next token of row 0 stands at 17, that of row 1 at 6
    cache, alone = (transformers.DynamicCache(config=model.config) for _ in range(2))
    with torch.no_grad():
        layer(hidden[:, :17], cache, mask)
        got = layer(hidden[:, 17:], cache)
        layer(hidden[1:, 11:17], alone)
        close(got[1:], layer(hidden[1:, 17:], alone))
    assert cache.layers[0].recurrent_states[1].tolist() == [18, 7]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear"])
def test_generation_with_a_cache_equals_recomputing(name, beams):
    model = attach(build(name), BLOCKS, CONTEXT)
    ids, mask = padded([tokens(1, n, seed=n)[0] for n in (14, 5)], 14)
    options = {"attention_mask": mask, "max_new_tokens": 16, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


def test_reordered_rows_take_their_positions_along():
    model = attach(build(), BLOCKS, CONTEXT)
    ids, mask = padded([tokens(1, n, seed=n)[0] for n in (14, 5)], 14)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    order, token = torch.tensor([1, 1]), torch.tensor([[7], [9]])
    with torch.no_grad():
        cache = cache_of(model(ids, attention_mask=mask, position_ids=positions, use_cache=True))
        cache.reorder_cache(order)
        assert cache.layers[0].recurrent_states[1].tolist() == [5, 5]
        longer = torch.cat((mask[order], torch.ones(2, 1, dtype=torch.int64)), 1)
        step = model(token, attention_mask=longer, position_ids=torch.tensor([[5], [5]]), past_key_values=cache).logits
        for row in range(2):
            close(step[row, 0], model(torch.cat((ids[1:, 9:], token[row : row + 1]), 1)).logits[0, -1])


def test_a_reset_or_copied_cache_has_its_own_positions():
    model, hidden = attach(build(), BLOCKS, CONTEXT), torch.randn(2, 29, 32)
    layer, cache = model.model.layers[0].linear_attn, transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        want = layer(hidden)
        first = layer(hidden[:, :20], cache)
        copied = copy.deepcopy(cache)
        close(torch.cat((first, layer(hidden[:, 20:], copied)), 1), want)
        assert cache.layers[0].recurrent_states[1].tolist() == [20, 20]
        cache.reset()
        assert not cache.has_previous_state(0)
        close(layer(hidden, cache), want)


def test_packed_documents_restart_in_the_rule(monkeypatch):
    """transformers keeps packed documents apart only with fla's kernels; the gate hands them masks that restart."""
    seen = {}

    def rule(query, key, value, g, beta, cu_seqlens=None, **_):
        seen["key"], seen["cu_seqlens"] = key, cu_seqlens
        return torch.zeros_like(value), None

    with_reference(monkeypatch, "Qwen3Next", rule)
    layer = attach(build(), BLOCKS, CONTEXT).model.layers[0].linear_attn
    boundaries = torch.tensor([0, 9, 30], dtype=torch.int32)
    layer(torch.randn(1, 30, 32), cu_seq_lens_q=boundaries)
    opened = (seen["key"] != 0).any(2).sum(-1)[0]
    schedule = ActivationSchedule(BLOCKS, CONTEXT)
    assert opened.tolist() == [schedule.active(KEYS, t) for t in [*range(9), *range(21)]]
    assert seen["cu_seqlens"] is boundaries


# One model among others; training; compiled


def test_other_models_of_the_class_are_left_alone_even_in_other_threads():
    model, other, ids = attach(build(), BLOCKS, CONTEXT), build(), tokens(1, 33)
    with torch.no_grad():
        gated, base = model(ids).logits, other(ids).logits
    assert not torch.equal(gated, base)
    wrong = []

    def work(which, want):
        with torch.no_grad():
            wrong.extend(not torch.equal(which(ids).logits, want) for _ in range(8))

    threads = [threading.Thread(target=work, args=pair) for pair in ((model, gated), (other, base), (model, gated))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 24 and not any(wrong)


def test_an_error_inside_a_gated_layer_leaves_nothing_behind():
    model, other, ids = attach(build(), BLOCKS, CONTEXT), build(), tokens(1, 12)
    with torch.no_grad():
        base = other(ids).logits
        with pytest.raises(RuntimeError):
            model.model.layers[0].linear_attn(torch.randn(1, 12, 31))  # a width that its projections do not have
        assert torch.equal(other(ids).logits, base)


def test_gradient_checkpointing_changes_no_gradient():
    model, ids = attach(build(), BLOCKS, CONTEXT).train(), tokens(2, 20)
    want, gradients = run(model, ids)
    model.gradient_checkpointing_enable()
    got, got_gradients = run(model, ids)
    assert torch.equal(got, want)
    assert all(torch.equal(got_gradients[n], g) for n, g in gradients.items())


def test_half_precision_keeps_its_type_and_its_meaning():
    model, ids = attach(build(), BLOCKS, CONTEXT), tokens(2, 37)
    with torch.no_grad():
        want = model(ids).logits
        got = model.bfloat16()(ids).logits
    assert got.dtype == torch.bfloat16
    close(got.float(), want, 5e-2)  # weights and activations rounded to 8 bits through three layers


def test_compiled_layer_equals_eager_and_does_not_compile_again_at_an_unlock():
    model = attach(build(), BLOCKS, CONTEXT)
    layer, hidden = model.model.layers[0].linear_attn, torch.randn(2, 30, 32)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for start, end in [(0, 3), *((t, t + 1) for t in range(3, 30))]:
            if start == 6:
                warm = len(graphs)
            got, want = (f(hidden[:, start:end], cache) for f, cache in zip((compiled, layer), caches))
            close(got, want)
    assert len(graphs) == warm  # blocks opened at 6, 12 and 18


# Setting up, saving, taking off


def test_the_set_up_is_saved_with_the_model_and_restored(tmp_path):
    model, ids = attach(build(), BLOCKS, CONTEXT, norm_order="mask_then_norm"), tokens(2, 30)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert not torch.equal(loaded(ids).logits, model(ids).logits)
        attach(loaded)
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.proteus == {"blocks": BLOCKS, "context": CONTEXT, "axis": "key", "norm_order": "mask_then_norm"}


def test_the_project_s_own_loader_restores_the_gate(tmp_path):
    model, ids = attach(build(), BLOCKS, CONTEXT), list(range(3, 33))
    model.save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)
    opened = LanguageModel.open(tmp_path)
    mine = LanguageModel(model, opened.tokenizer)
    scores = opened.rolling([ids], prefix=1)
    assert scores == mine.rolling([ids], prefix=1)
    assert scores != LanguageModel(detach(model), opened.tokenizer).rolling([ids], prefix=1)


def test_a_gate_that_cannot_be_restored_stops_the_project_s_own_loader(tmp_path):
    attach(build(), BLOCKS, CONTEXT).save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"proteus": {"blocks": 4}}))
    with pytest.raises(ValueError, match=r"cannot be loaded: config\.proteus is .*must hold blocks, context, axis"):
        LanguageModel.open(tmp_path)


def test_detaching_restores_every_bit_and_forgets_the_set_up(tmp_path):
    model, ids = build(), tokens(2, 30)
    base, gradients = run(model, ids)
    attach(model, BLOCKS, CONTEXT)
    copied = copy.deepcopy(model)
    gated, _ = run(model, ids)
    assert detach(model) is model
    got, got_gradients = run(model, ids)
    assert torch.equal(got, base) and all(torch.equal(got_gradients[n], g) for n, g in gradients.items())
    assert torch.equal(run(copied, ids)[0], gated)  # a copy has its own gates
    assert torch.equal(run(detach(copied), ids)[0], base)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no set-up to restore"):
        attach(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(run(attach(model, BLOCKS, CONTEXT), ids)[0], gated)


def mamba():
    config = transformers.Mamba2Config(
        vocab_size=VOCAB, hidden_size=16, state_size=8, num_heads=4, head_dim=8, n_groups=1, num_hidden_layers=1
    )
    return transformers.Mamba2ForCausalLM(config)


@pytest.mark.parametrize(
    "make, args, options, words",
    [
        (llama, (4, 24), {}, "LlamaAttention: softmax attention keeps every token"),
        (mamba, (4, 24), {}, "Mamba2.*not written under keys"),
        (lambda: nn.Linear(3, 3), (4, 24), {}, "its modules are Linear"),
        (lambda: ProteusForCausalLM(ProteusConfig()), (4, 24), {}, "memory_blocks"),
        (build, (KEYS + 1, 64), {}, "18 key coordinates, fewer than 19 blocks"),
        (build, (VALUES + 1, 64), {"axis": "value"}, "10 value coordinates, fewer than 11 blocks"),
        (build, (0, 24), {}, "blocks is 0"),
        (build, (4, -1), {}, "context is -1"),
        (build, (4,), {}, "give both"),
        (build, (), {}, "no set-up to restore"),
        (build, (4, 24), {"axis": "rows"}, "axis is 'rows'"),
        (build, (4, 24), {"norm_order": "none"}, "norm_order is 'none'"),
        (build, (4, 24), {"axis": "value", "norm_order": "mask_then_norm"}, "is about keys"),
        (lambda: attach(build(), 4, 24), (4, 24), {}, "already attached"),
        (lambda: attach(build(), 4, 24), (8, 24), {}, "was saved with"),
        (lambda: torch.compile(build()), (4, 24), {}, "compiled"),
    ],
)
def test_what_cannot_be_gated_raises_and_says_why(make, args, options, words):
    with pytest.raises(ValueError, match=words):
        attach(make(), *args, **options)


def test_a_refused_set_up_changes_nothing():
    model, ids = build(), tokens(1, 20)
    base, _ = run(model, ids)
    model.model.layers[2].linear_attn.head_k_dim = 3  # the second of two layers is refused
    with pytest.raises(ValueError, match=r"layers.2.linear_attn"):
        attach(model, BLOCKS, CONTEXT)
    model.model.layers[2].linear_attn.head_k_dim = KEYS
    assert not hasattr(model.config, "proteus")
    assert torch.equal(run(model, ids)[0], base)


def test_damaged_saved_set_up_raises():
    model = build()
    model.config.proteus = {"blocks": 4}
    with pytest.raises(ValueError, match="must hold blocks, context"):
        attach(model)


def test_detaching_nothing_raises():
    with pytest.raises(ValueError, match="nothing to detach"):
        detach(build())


def test_a_kernel_in_place_of_the_whole_forward_raises():
    model = attach(build(), BLOCKS, CONTEXT)
    layer = model.model.layers[0].linear_attn
    layer.forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(RuntimeError, match="did not call any of"):
        model(tokens(1, 8))


def test_a_layer_of_another_version_raises(monkeypatch):
    """transformers before 5.17 kept the rule on the layer: the gate would stand beside its way."""
    monkeypatch.setattr(modeling("Qwen3Next").Qwen3NextGatedDeltaNet, "forward", lambda self, hidden_states: hidden_states)
    with pytest.raises(ValueError, match=r"does not call torch_chunk_gated_delta_rule.*5\.17"):
        attach(build(), BLOCKS, CONTEXT)


def test_a_cache_filled_before_attaching_raises():
    model, ids = build(), tokens(1, 8)
    cache = cache_of(model(ids, use_cache=True))
    attach(model, BLOCKS, CONTEXT)
    with pytest.raises(ValueError, match="filled before"):
        model(ids, past_key_values=cache)


def test_caches_that_cannot_carry_positions_raise():
    model = attach(build(), BLOCKS, CONTEXT)
    layer, hidden = model.model.layers[0].linear_attn, torch.randn(2, 5, 32)
    cache = transformers.DynamicCache(config=model.config)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="assisted decoding"):
        layer(hidden, cache)
    with pytest.raises(TypeError, match=r"transformers 5\.17"):
        layer(hidden, SimpleNamespace(layers=[SimpleNamespace(recurrent_states=None)]))
    cache = transformers.DynamicCache(config=model.config)
    layer(hidden, cache)
    with pytest.raises(ValueError, match="positions of 2 rows"):
        layer(hidden[:1], cache)
    with pytest.raises(ValueError, match="attention mask of shape"):
        layer(hidden, attention_mask=torch.ones(2, 1, 5, 5))


def test_context_parallel_calls_raise(monkeypatch):
    with_reference(monkeypatch, "Qwen3Next", reference_rule(ActivationSchedule(1, 1)))
    model = attach(build(), BLOCKS, CONTEXT)
    with pytest.raises(ValueError, match="context parallel"):
        model.model.layers[0].linear_attn(torch.randn(1, 6, 32), cp_context=object())


def test_the_doorkeeper_is_set_once_a_function():
    attach(build(), BLOCKS, CONTEXT)
    attach(build(), BLOCKS, CONTEXT)
    rule = modeling("Qwen3Next").torch_chunk_gated_delta_rule
    assert isinstance(rule, Doorkeeper) and not isinstance(rule.rule, Doorkeeper)
