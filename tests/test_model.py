"""The backbone: loss, files, initialisation, checkpointing, compilation, counts and errors."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from proteus_lm import ProteusCache, ProteusConfig, ProteusForCausalLM
from proteus_lm.mixers import MACMixer, titans_mac
from proteus_lm.mixers.base import ResidualLinear
from proteus_lm.mixers.norm import RMSNorm
from proteus_lm.ops import cross_entropy as cross_entropy_pieces
from tests.mixers.models import assert_near, cases, make, options, tokens

every = pytest.mark.parametrize("fields", cases())


# Loss.


def test_the_loss_is_the_mean_over_next_tokens_without_those_ignored():
    model, ids = make(options("comba")), tokens(2, 7)
    labels = ids.clone()
    labels[0, 3:5] = -100
    out = model(ids, labels=labels)
    scores = cross_entropy(out.logits[:, :-1].reshape(-1, 31), ids[:, 1:].flatten(), reduction="none").view(2, 6)
    kept = torch.ones(2, 6, dtype=torch.bool)
    kept[0, 2:4] = False
    assert_near(out.loss, scores[kept].mean())


def test_the_loss_is_fp32_under_autocast_and_zero_where_nothing_is_scored():
    model, ids = make(options("comba"), torch.float32), tokens(2, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(ids, labels=ids)
    assert out.loss.dtype == torch.float32
    nothing = model(ids, labels=torch.full_like(ids, -100))
    nothing.loss.backward()
    assert nothing.loss == 0 and all(p.grad.isfinite().all() for p in model.parameters())


def learnt(model, *inputs, **more):
    """Loss and the gradient of every parameter."""
    model.zero_grad()
    out = model(*inputs, **more)
    out.loss.backward()
    return [out.loss.detach(), *(p.grad.clone() for p in model.parameters())]


MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1, 0]])


def never_called(module, monkeypatch):
    whole = torch.nn.Linear.forward

    def forward(self, x):
        assert self is not module, "the head was called"
        return whole(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("rows", "more"),
    [(2, {}), (2, {"attention_mask": MASK}), (1, {"cu_seqlens": torch.tensor([0, 2, 6, 9])})],
    ids=["rows", "mask", "packed"],
)
def test_a_loss_without_logits_is_the_loss_with_them(tied, rows, more, monkeypatch):
    monkeypatch.setattr(cross_entropy_pieces, "CPU_TOKENS", 4)  # so that nine tokens are several pieces
    monkeypatch.setattr(cross_entropy_pieces, "CPU_BYTES", 1)
    model, ids = make(options("comba", tie_word_embeddings=tied)), tokens(rows, 9)
    labels = ids.clone()
    labels[0, 4] = -100
    right = learnt(model, ids, labels=labels, **more)
    never_called(model.lm_head, monkeypatch)
    assert model(ids, labels=labels, skip_logits=True, **more).logits is None
    assert len(model(ids, labels=labels, skip_logits=True, return_dict=False, use_cache=False, **more)) == 1
    for one, two in zip(learnt(model, ids, labels=labels, skip_logits=True, **more), right, strict=True):
        assert_near(one, two)


@pytest.mark.parametrize("skip", [False, True])
def test_shifted_labels_are_scored_as_they_stand_and_divided_by_the_number_that_is_given(skip):
    model, ids = make(options("comba")), tokens(2, 9)
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    mean = model(ids, labels=ids).loss
    assert_near(model(ids, shift_labels=labels, skip_logits=skip).loss, mean)
    assert_near(model(ids, shift_labels=labels, skip_logits=skip, num_items_in_batch=4).loss, mean * 16 / 4)
    assert_near(model(ids, labels=ids, skip_logits=skip, num_items_in_batch=torch.tensor(4)).loss, mean * 16 / 4)
    masked = model(ids, shift_labels=labels, attention_mask=MASK, skip_logits=skip).loss
    scores = cross_entropy(model(ids, attention_mask=MASK).logits.flatten(0, 1), labels.flatten(), reduction="none")
    assert_near(masked, scores[(MASK.bool() & (labels != -100)).flatten()].mean())


def test_without_logits_nothing_scored_is_a_loss_of_zero_and_autocast_keeps_fp32():
    model, ids = make(options("comba"), torch.float32), tokens(2, 7)
    loss, *grads = learnt(model, ids, labels=torch.full_like(ids, -100), skip_logits=True)
    assert loss == 0 and not any(g.any() for g in grads)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids, skip_logits=True).loss
        right = model(ids, labels=ids).loss
    assert loss.dtype == torch.float32
    assert_near(loss, right)  # of the same logits


def test_a_model_in_bf16_has_a_loss_without_logits():
    model, ids = make(options("comba"), torch.bfloat16), tokens(2, 7)
    right = learnt(model, ids, labels=ids)
    for one, two in zip(learnt(model, ids, labels=ids, skip_logits=True), right, strict=True):
        assert one.dtype == two.dtype
        assert_near(one.float(), two.float(), 3e-2)  # 8 bits, rounded in other places


def test_a_head_with_hooks_or_a_forward_of_its_own_is_not_skipped(monkeypatch):
    """Offload, pruning and patches work through these, and a weight that is read hears nothing of them."""
    model, ids = make(options("comba")), tokens(2, 7)
    for add in (model.lm_head.register_forward_hook, model.lm_head.register_forward_pre_hook):
        handle = add(lambda *_: None)
        with pytest.raises(ValueError, match="lm_head has hooks or another forward"):
            model(ids, labels=ids, skip_logits=True)
        handle.remove()
    assert model(ids, labels=ids, skip_logits=True).loss.isfinite()
    monkeypatch.setattr(model.lm_head, "forward", lambda x: x)
    with pytest.raises(ValueError, match="leave skip_logits out"):
        model(ids, labels=ids, skip_logits=True)


def test_a_head_that_is_more_than_its_weight_is_not_skipped():
    model, ids = make(options("comba")), tokens(2, 7)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="skip_logits reads the weight of a plain linear head"):
        model(ids, labels=ids, skip_logits=True)


# Files.


@every
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_saved_model_loads_with_equal_logits_as_safetensors(fields, tied, tmp_path):
    model = make({**fields, "tie_word_embeddings": tied}, torch.float32)
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118 - not a dict
    ids = tokens(2, 9)
    for loader in (ProteusForCausalLM, AutoModelForCausalLM):
        loaded, report = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values())
        weights = loaded.state_dict()
        assert all(torch.equal(weights.pop(name), x) for name, x in model.state_dict().items()) and not weights
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-5)  # a file's weights lie at other addresses
        assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == tied
        assert no_decay_names(loaded) == no_decay_names(model)


@every
def test_auto_classes_make_the_model_from_a_configuration(fields):
    assert isinstance(AutoModelForCausalLM.from_config(ProteusConfig(**fields)), ProteusForCausalLM)


@every
def test_a_model_loaded_in_bf16_keeps_gates_norms_and_memories_in_fp32_and_runs(fields, tmp_path):
    model = make(fields, torch.float32)
    model.save_pretrained(tmp_path)
    loaded = ProteusForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    small = no_decay_names(model) - {"embed_tokens.weight"}
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == (torch.float32 if name in small else torch.bfloat16), name
    ids = tokens(2, 9)
    out = loaded(ids, labels=ids)
    assert out.loss.dtype == torch.float32
    assert_near(out.logits.float(), model(ids).logits, 5e-2)  # weights and activations of two layers rounded to 8 bits
    assert loaded.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 13)


# Initialisation.


@every
def test_no_parameter_is_left_uninitialised_after_a_start_on_the_meta_device(fields):
    config = ProteusConfig(**fields, tie_word_embeddings=True)
    torch.manual_seed(5)
    direct = ProteusForCausalLM(config)
    with torch.device("meta"):
        model = ProteusForCausalLM(config)
    model.to_empty(device="cpu")
    assert not list(model.buffers())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    torch.manual_seed(5)
    model.reset_parameters()
    assert no_decay_names(model) == no_decay_names(direct)
    assert model.lm_head.weight is model.embed_tokens.weight
    for (name, one), (_, two) in zip(model.named_parameters(), direct.named_parameters(), strict=True):
        assert one.isfinite().all() and torch.equal(one, two), name


@every
def test_the_first_memory_is_never_zero_and_gates_start_where_they_should(fields):
    torch.manual_seed(5)
    model = ProteusForCausalLM(ProteusConfig(**fields))
    for name, parameter in model.named_parameters():
        # sigmoid(0) = 0.5, the start of the step size; a layer norm's bias
        zeros = name.endswith(("theta.bias", "mixer.bias"))
        assert (parameter.abs().max() == 0) == zeros, name


def test_residual_maps_start_smaller_by_the_root_of_twice_the_layers():
    torch.manual_seed(0)
    model = ProteusForCausalLM(ProteusConfig(num_hidden_layers=8, memory_expansion=1))
    for module in model.modules():
        if isinstance(module, ResidualLinear):
            assert module.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)


def no_decay_names(model):
    return {name for name, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)}


@every
def test_gates_norms_biases_and_embeddings_are_marked_and_maps_are_not(fields):
    model = make(fields)
    marked = no_decay_names(model)
    kinds = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        module = kinds[name.rpartition(".")[0]]
        small = parameter.dim() < 2 or isinstance(module, RMSNorm | torch.nn.Embedding)
        gate = any(
            part in name
            for part in (".gates.", ".theta.", ".alpha.", ".eta.", "mixer.W", "mixer.U", ".persistent", "mixer.gain", "mixer.bias")
        )
        assert (name in marked) == (small or gate), name


# Running.


@every
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(fields, reentrant):
    model, ids = make(fields).train(), tokens(2, 19)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def gradients():
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    for one, two in zip(plain, gradients(), strict=True):
        assert_near(two, one)


@every
def test_a_state_is_trained_through_with_gradient_checkpointing(fields):
    model, ids = make(fields).train(), tokens(2, 12)

    def gradients():
        model.zero_grad()
        cache = ProteusCache()
        sum(model(part, past_key_values=cache).logits.square().mean() for part in ids.split(4, 1)).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable()
    for one, two in zip(plain, gradients(), strict=True):
        assert_near(two, one)


@contextlib.contextmanager
def counting_compiler():
    """torch.compile's front end with a back end that counts the graphs it is given and runs them as they are.

    MAC compiles the work on a segment by itself; so it is given the same back end.
    """
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    pieces = titans_mac.Pieces(*(torch.compile(piece, backend=backend) for piece in titans_mac.EAGER))
    with mock.patch.object(titans_mac, "_compiled", lambda: pieces):
        yield backend, graphs
    torch._dynamo.reset()


@every
def test_compiled_training_equals_eager_and_compiles_once(fields):
    model = make({**fields, "num_hidden_layers": 1}, torch.float32).train()
    with counting_compiler() as (backend, graphs):
        compiled = torch.compile(model, backend=backend)
        counts = []
        for step in range(3):
            ids = tokens(2, 23, seed=step)
            model.zero_grad()
            loss = compiled(ids, labels=ids).loss
            loss.backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            eager = model(ids, labels=ids).loss
            eager.backward()
            assert_near(loss, eager)
            for one, two in zip(gradients, (p.grad for p in model.parameters()), strict=True):
                assert_near(one, two)
            counts.append(len(graphs))
    assert counts[0] >= 1 and len(set(counts)) == 1


def test_compiled_training_without_logits_equals_eager_in_one_graph():
    model = make(options("comba"), torch.float32).train()
    with counting_compiler() as (backend, graphs):
        compiled = torch.compile(model, backend=backend)
        for step in range(2):
            ids = tokens(2, 23, seed=step)
            inputs = {"shift_labels": ids.roll(-1, 1), "num_items_in_batch": 46, "skip_logits": True}
            for one, two in zip(learnt(compiled, ids, **inputs), learnt(model, ids, **inputs), strict=True):
                assert_near(one, two)
    assert len(graphs) == 1


@every
def test_every_layer_sees_the_position_that_the_model_read_once(fields, monkeypatch):
    model, ids = make(fields), tokens(2, 5)
    seen = []
    for block in model.layers:
        block.mixer.register_forward_pre_hook(lambda mixer, inputs: seen.append(inputs[1]))
    cache = ProteusCache()
    for length, start in ((3, 0), (1, 3), (1, 4)):
        model(ids[:, start : start + length], past_key_values=cache)
        assert len(seen) == 2 and seen[0] is seen[1]
        assert seen[0].positions.expand(2, -1).tolist() == [list(range(start, start + length))] * 2
        seen.clear()


@every
def test_output_forms_and_columns_to_keep(fields):
    model, ids = make(fields), tokens(2, 9)
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(out.hidden_states) == 3 and out.hidden_states[0].shape == (2, 9, 16)
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    for columns in (torch.tensor([7, 8]), torch.tensor([8, 3])):  # near: the last bits of a product follow its size on some CPUs
        assert_near(model(ids, attention_mask=mask, logits_to_keep=columns).logits, out.logits[:, columns])
    assert_near(model(ids, attention_mask=mask, logits_to_keep=2).logits, out.logits[:, -2:])
    assert torch.equal(model(ids, attention_mask=mask, return_dict=False, use_cache=False)[0], out.logits)
    assert torch.equal(model(inputs_embeds=model.embed_tokens(ids), attention_mask=mask).logits, out.logits)


@every
def test_a_cache_is_given_outside_training_or_when_one_was_given(fields):
    model, ids = make(fields), tokens(1, 4)
    assert model(ids).past_key_values is not None and model(ids, use_cache=False).past_key_values is None
    model.train()
    assert model(ids).past_key_values is None
    assert model(ids, past_key_values=ProteusCache()).past_key_values.get_seq_length() == 4


# Counts.


@every
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_as_many_as_counted(fields, tied):
    config = ProteusConfig(**{**fields, "tie_word_embeddings": tied, "head_dim": 16, "hidden_size": 20})
    model = ProteusForCausalLM(config)
    assert model.parameter_count(config) == sum(p.numel() for p in model.parameters())
    mixer = sum(p.numel() for p in model.layers[0].mixer.parameters())
    assert config.mixer_class.parameter_count(config) == mixer


@every
def test_floating_point_operations_of_linear_maps_are_those_counted_by_torch(fields):
    """With one token the memories' own work is known in closed form elsewhere; here all that a linear map does."""
    config = ProteusConfig(**fields)
    model = ProteusForCausalLM(config)

    def dense(rows):
        with FlopCounterMode(display=False) as counter:
            model(tokens(rows, 8), use_cache=False)
        counts = counter.get_flop_counts()["Global"]
        return sum(count for op, count in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))

    linear = applied(model)
    # What is done once a forward, the maps of persistent tokens, is not counted for a token.
    assert dense(6) - dense(3) == 2 * linear * 3 * 8
    rest = model.flops_per_token(config, 8) - 2 * linear
    assert 0 < rest == 2 * (config.mixer_class.flops_per_token(config, 8) - 2 * applied(model.layers[0].mixer))


def applied(module):
    """Weights that multiply a token: every map's once, and MAC's keys and values also for what the token recalled."""
    maps = sum(m.weight.numel() for m in module.modules() if isinstance(m, torch.nn.Linear))
    return maps + sum(m.attention.linear.weight.numel() * 2 // 3 for m in module.modules() if isinstance(m, MACMixer))


# Errors.


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, ["input_ids or inputs_embeds"]),
        ({"input_ids": tokens(2, 5)[:, :0]}, ["no tokens", "(2, 0)"]),
        ({"input_ids": tokens(2, 5), "cu_seqlens": torch.tensor([0, 5])}, ["batch of 2 rows"]),
        (
            {"input_ids": tokens(1, 5), "cu_seqlens": torch.tensor([0, 5]), "attention_mask": torch.ones(1, 5)},
            ["attention_mask and cu_seqlens"],
        ),
        ({"input_ids": tokens(1, 5), "cu_seqlens": torch.tensor([0, 4])}, ["[0, 4]", "5 tokens"]),
        ({"input_ids": tokens(1, 5), "cu_seqlens": torch.tensor([0, 3, 3, 5])}, ["[0, 3, 3, 5]"]),
        ({"input_ids": tokens(2, 5), "attention_mask": torch.ones(2, 4)}, ["(2, 4)", "(2, 5)"]),
        ({"input_ids": tokens(2, 5), "attention_mask": torch.ones(2, 1, 5, 5)}, ["(2, 1, 5, 5)"]),
        ({"input_ids": tokens(2, 5), "labels": tokens(2, 4)}, ["(2, 4)", "(2, 5)"]),
        ({"input_ids": tokens(2, 5), "labels": tokens(2, 5), "logits_to_keep": 1}, ["logits_to_keep"]),
        ({"input_ids": tokens(2, 5), "labels": tokens(2, 5), "logits_to_keep": torch.tensor([1])}, ["logits_to_keep"]),
        ({"input_ids": tokens(2, 5), "logits_to_keep": -1}, ["logits_to_keep is -1", "0 for all"]),
        ({"input_ids": tokens(2, 5), "logits_to_keep": torch.tensor([[1.0]])}, ["(1, 1)", "float32", "indices"]),
        ({"input_ids": tokens(2, 5), "labels": torch.rand(2, 5)}, ["labels are torch.float32", "integers"]),
        ({"input_ids": tokens(1, 5), "cu_seqlens": [0, 5]}, ["cu_seqlens is a list", "tensor of integers"]),
        ({"input_ids": tokens(2, 5), "shift_labels": tokens(2, 4)}, ["(2, 4)", "(2, 5)"]),
        (
            {"input_ids": tokens(2, 5), "labels": tokens(2, 5), "shift_labels": tokens(2, 5)},
            ["labels and shift_labels", "give one"],
        ),
        ({"input_ids": tokens(2, 5), "skip_logits": True}, ["skip_logits", "give labels"]),
        ({"input_ids": tokens(2, 5), "num_items_in_batch": 5}, ["num_items_in_batch", "give labels"]),
        *(
            ({"input_ids": tokens(2, 5), "labels": tokens(2, 5), "num_items_in_batch": number}, ["num_items_in_batch", "above 0"])
            for number in (0, -3, "4", torch.tensor([4]), torch.tensor(0))
        ),
        ({"input_ids": tokens(1, 2), "shift_labels": torch.tensor([[3, 99]])}, ["shift_labels holds 99,", "-100"]),
        ({"input_ids": torch.tensor([[3, 31]])}, ["input_ids holds 31,", "vocabulary of 31", "0 to 30"]),
        ({"input_ids": torch.tensor([[3, -1]])}, ["input_ids holds -1,", "vocabulary of 31"]),
        ({"input_ids": torch.tensor([[3, -100]])}, ["input_ids holds -100,"]),
        ({"input_ids": tokens(1, 2), "labels": torch.tensor([[3, 99]])}, ["labels holds 99,", "vocabulary of 31", "-100"]),
        ({"input_ids": tokens(1, 2), "labels": torch.tensor([[3, -1]])}, ["labels holds -1,"]),
        ({"input_ids": tokens(1, 2), "attention_mask": torch.tensor([[0.5, 1.0]])}, ["attention_mask holds 0.5;", "0 for"]),
        ({"input_ids": tokens(1, 2), "attention_mask": torch.tensor([[0, -1]])}, ["attention_mask holds -1;"]),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_words(inputs, words):
    with pytest.raises(ValueError) as error:
        make(options("comba"))(**inputs)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(("name", "remedy"), [("position_ids", "cu_seqlens"), ("output_attentions", "leave"), ("lables", "leave")])
def test_an_argument_that_is_not_taken_is_named_with_its_remedy(name, remedy):
    model, ids = make(options("comba")), tokens(1, 3)
    with pytest.raises(TypeError, match=f"no {name}: .*{remedy}"):
        model(ids, **{name: torch.arange(3)[None]})
    assert torch.equal(model(ids, **{name: None}).logits, model(ids).logits)  # what transformers hands on when it is off


def test_labels_of_any_integer_type_give_one_loss():
    model, ids = make(options("comba")), tokens(2, 5)
    right = model(ids, labels=ids).loss
    for name, given in (("labels", ids), ("shift_labels", ids.roll(-1, 1).index_fill(1, torch.tensor(4), -100))):
        for skip in (False, True):
            assert_near(model(ids, **{name: given.int()}, skip_logits=skip).loss, right)


def test_masked_tokens_may_hold_any_id_and_label():
    model, ids = make(options("comba")), torch.tensor([[-1, 3, 4, 5, 99]])
    out = model(ids, labels=ids, attention_mask=torch.tensor([[0, 1, 1, 1, 0]]))
    alone = model(ids[:, 1:4], labels=ids[:, 1:4])
    assert_near(out.loss, alone.loss)


def test_documents_cannot_be_packed_where_positions_run_through_the_window_or_behind_a_cache():
    model, ids = make(options("comba", positions="window")), tokens(1, 5)
    with pytest.raises(ValueError, match="positions 'window'"):
        model(ids, cu_seqlens=torch.tensor([0, 2, 5]))
    model = make(options("comba"))
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="start anew"):
        model(ids, past_key_values=cache, cu_seqlens=torch.tensor([0, 2, 5]))


def test_a_type_too_narrow_to_compute_with_is_refused():
    model = make(options("comba"), torch.float32).to(dtype=torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="float8_e4m3fn; it must be a floating type: float16"):
        model(tokens(1, 4))
