"""The configuration: every field changes the model or raises, and errors say what to do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from proteus_lm import ActivationSchedule, ProteusConfig, ProteusForCausalLM
from proteus_lm.hope import update_gates
from proteus_lm.mixers import registry
from tests.mixers.models import cases, make, options, tokens

OWN = [f.name for f in dataclasses.fields(ProteusConfig) if f.name in ProteusConfig.__annotations__]
OTHER = {
    "mixer": "comba",
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "head_dim": 16,
    "value_expansion": 3,
    "intermediate_size": 40,
    "conv_size": 3,
    "norm_eps": 1e-2,
    "tie_word_embeddings": True,
    "memory_blocks": 2,
    "memory_context": 48,
    "memory_axis": "value",
    "memory_policy": "stretch",
    "memory_unlocks": [0, 1],
    "norm_order": "mask_then_norm",
    "positions": "window",
    "window": 3,
    "swla_window": 3,
    "memory_depth": 3,
    "memory_expansion": 3,
    "memory_activation": "silu",
    "memory_residual_norm": True,
    "chunk_size": 5,
    "read": "pre",
    "use_momentum": False,
    "use_forgetting": False,
    "decay_target": "init",
    "surprise_clip": 0.01,
    "theta_scale": 0.5,
    "titans_variant": "mag",
    "persistent_tokens": 2,
    "segment_length": 12,
    "mag_combine": "add",
    "inner_decay": "before_norm",
    "output_correction": 0.25,
    "channel": "chain",
    "chain_periods": [1, 1],
    "update_blocks": 2,
    "schedule_frac": 0.5,
    "use_cache": False,
    "bos_token_id": 3,
    "eos_token_id": 4,
    "pad_token_id": 5,
}

SECOND = {"read": "post", "memory_depth": 2, "mixer": "attention", "memory_axis": "key", "channel": "mlp", "titans_variant": "mal"}
SECOND |= {"decay_target": "zero", "memory_residual_norm": False}
"""Where a case has the first."""


def fingerprint(fields):
    """All that a configuration decides: weights' shapes, logits, schedules, what is accepted, what generation uses."""
    model = make(fields)
    ids = tokens(1, 23)
    out = model(ids)
    try:
        model(ids, cu_seqlens=torch.tensor([0, 9, 23]))
        packed = True
    except ValueError:
        packed = False
    try:
        model.set_context(40)
        stretched = model.schedule
        model.set_context(None)
    except ValueError:
        stretched = None
    generation = model.generation_config
    masks, periods = update_gates(model, model.config, 10)
    return (
        [(masks.get(p), periods.get(p)) for p in model.parameters()],
        [tuple(p.shape) for p in model.parameters()],
        out.logits.tolist(),
        model.schedule,
        stretched,
        out.past_key_values is not None,
        packed,
        (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id),
    )


def test_every_field_has_another_value_to_test():
    assert set(OTHER) == set(OWN)


@pytest.mark.parametrize("fields", cases())
@pytest.mark.parametrize("name", OWN)
def test_a_field_changes_the_model_or_raises(fields, name):
    here = fields.get(name, ProteusConfig.default(name))
    other = OTHER[name] if here != OTHER[name] else SECOND[name]
    changed = {**fields, name: other}
    try:
        ProteusConfig(**changed)
    except ValueError as error:
        assert name in str(error)
        return
    assert fingerprint(changed) != fingerprint(fields)


def test_the_defaults_make_a_small_working_model():
    model = ProteusForCausalLM(ProteusConfig())
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    assert model(torch.arange(20)[None]).logits.shape == (1, 20, 257)


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(ValueError, match=r"memory_block'.*'memory_blocks'"):
        ProteusConfig(memory_block=4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mixer": "combo"}, ["combo", "did you mean comba"]),
        ({"mixer": "attention", "memory_blocks": 4}, ["memory_blocks", "attention", "titans"]),
        ({"mixer": "comba", "theta_scale": 2.0}, ["theta_scale", "comba", "default, 1.0"]),
        ({"memory_blocks": 129}, ["129", "128 coordinates"]),
        ({"mixer": "comba", "memory_blocks": 33}, ["33", "32 coordinates"]),
        ({"mixer": "comba", "memory_axis": "value"}, ["memory_axis", "memory_blocks 1"]),
        ({"mixer": "comba", "memory_blocks": 2, "memory_axis": "value", "norm_order": "mask_then_norm"}, ["norm_order", "key"]),
        ({"hidden_size": 30}, ["30", "num_heads 4", "head_dim"]),
        ({"mixer": "attention", "head_dim": 5}, ["head_dim", "even"]),
        ({"mixer": "retnet", "head_dim": 5}, ["head_dim", "even"]),
        ({"mixer": "retnet", "head_dim": 12, "memory_blocks": 4}, ["memory_blocks is 4", "blocks of 3 rows", "'value'"]),
        ({"mixer": "retnet", "conv_size": 3}, ["conv_size", "retnet", "default, 4"]),
        ({"mixer": "retnet", "norm_order": "mask_then_norm"}, ["norm_order", "retnet"]),
        ({"mixer": "swla", "swla_window": 0}, ["swla_window is 0", "at least 1"]),
        ({"mixer": "titans", "value_expansion": 1}, ["value_expansion", "default, None"]),
        ({"memory_depth": 1, "memory_expansion": 2}, ["memory_expansion", "memory_depth 1"]),
        ({"memory_depth": 1, "memory_activation": "swiglu"}, ["memory_activation is 'swiglu'", "no hidden layer", "2 or more"]),
        ({"memory_activation": "swigl"}, ["memory_activation is 'swigl'", "gelu_tanh, silu, swiglu", "did you mean swiglu"]),
        ({"theta_scale": 65.0}, ["theta_scale", "chunk_size 64"]),
        ({"surprise_clip": 0}, ["surprise_clip is 0", "number above 0, or None"]),
        ({"mixer": "comba", "surprise_clip": 1.0}, ["surprise_clip", "comba", "default, None"]),
        ({"decay_target": "one"}, ["decay_target is 'one'", "zero, init"]),
        ({"decay_target": "init", "use_forgetting": False}, ["decay_target is 'init'", "use_forgetting False", "'zero'"]),
        ({"theta_scale": float("nan")}, ["theta_scale", "nan"]),
        ({"channel": "chian"}, ["channel is 'chian'", "did you mean chain"]),
        ({"update_blocks": 2}, ["update_blocks", "channel 'mlp'", "'chain'"]),
        ({"chain_periods": (1, 2)}, ["chain_periods", "channel 'mlp'"]),
        ({"channel": "chain", "chain_periods": [1, 0]}, ["chain_periods is (1, 0)", "at least 1"]),
        ({"channel": "chain", "chain_periods": []}, ["chain_periods is ()"]),
        ({"channel": "chain", "schedule_frac": 0.5}, ["schedule_frac", "update_blocks 1"]),
        ({"channel": "chain", "update_blocks": 2, "schedule_frac": 1.5}, ["schedule_frac is 1.5", "at most 1"]),
        ({"channel": "chain", "intermediate_size": 30, "update_blocks": 8}, ["30", "4 levels", "7 hidden units", "is 8"]),
        ({"norm_eps": "1e-6"}, ["norm_eps", "number above 0"]),
        ({"num_heads": 0}, ["num_heads is 0", "at least 1"]),
        ({"hidden_size": True}, ["hidden_size is True"]),
        ({"use_momentum": 1}, ["use_momentum is 1", "true or false"]),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder", "change nothing"]),
        ({"chunk_size_feed_forward": 8}, ["chunk_size_feed_forward"]),
        ({"num_labels": 5}, ["num_labels is 5"]),
        ({"memory_policy": "custom"}, ["memory_policy", "memory_blocks 1"]),
        ({"mixer": "attention", "memory_policy": "stretch"}, ["memory_policy", "attention", "titans"]),
        ({"memory_blocks": 2, "memory_policy": "streched"}, ["memory_policy is 'streched'", "did you mean stretch"]),
        ({"memory_blocks": 2, "memory_policy": "custom"}, ["custom", "memory_unlocks", "2 positions"]),
        ({"memory_blocks": 2, "memory_unlocks": [0, 5]}, ["memory_unlocks", "'uniform'", "'custom'"]),
        ({"memory_blocks": 2, "memory_policy": "stretch", "memory_unlocks": [0, 5]}, ["memory_unlocks", "'stretch'"]),
        ({"memory_blocks": 2, "memory_policy": "custom", "memory_unlocks": [0]}, ["memory_unlocks", "1 unlock positions for 2"]),
        ({"memory_blocks": 2, "memory_policy": "custom", "memory_unlocks": [1, 2]}, ["memory_unlocks", "must open at position 0"]),
        ({"memory_blocks": 3, "memory_policy": "custom", "memory_unlocks": [0, 9, 3]}, ["memory_unlocks", "must not decrease"]),
        ({"memory_blocks": 2, "memory_policy": "custom", "memory_unlocks": [0, 2.5]}, ["memory_unlocks", "whole numbers"]),
        ({"memory_blocks": 2, "memory_policy": "custom", "memory_unlocks": 7}, ["memory_unlocks is 7", "list"]),
    ],
)
def test_wrong_values_are_refused_in_words(fields, words):
    with pytest.raises(ValueError) as error:
        ProteusConfig(**fields)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_memory_that_the_blocks_do_not_divide_leaves_the_rest_to_the_last_block():
    config = ProteusConfig(**options("comba", head_dim=10, memory_blocks=4))
    assert config.schedule.block_bounds(10) == [(0, 2), (2, 4), (4, 6), (6, 10)]


def test_a_field_set_after_construction_is_checked_when_the_model_is_made():
    config = ProteusConfig()
    config.memory_blocks = 500
    with pytest.raises(ValueError, match="500"):
        ProteusForCausalLM(config)


def test_sizes_left_out_follow_from_the_width():
    config = ProteusConfig(hidden_size=96, num_heads=3)
    assert (config.head_dim, config.intermediate_size) == (32, 256)
    assert config.schedule == ActivationSchedule(1, 8192)


@pytest.mark.parametrize(("mixer", "expansion"), [("retnet", 2), ("deltanet", 1), ("comba", 1), ("titans", None)])
def test_value_expansion_left_out_is_the_mixers_own_and_written_to_the_file(mixer, expansion):
    config = ProteusConfig(mixer=mixer)
    assert config.value_expansion == config.to_dict()["value_expansion"] == expansion
    assert expansion is None or ProteusConfig(mixer=mixer, value_expansion=4).value_expansion == 4


@pytest.mark.parametrize("fields", cases())
def test_a_configuration_survives_its_file_and_dict(fields, tmp_path):
    config = ProteusConfig(**fields, eos_token_id=[3, 4], dtype="bfloat16")
    config.save_pretrained(tmp_path)
    for again in (ProteusConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path), ProteusConfig(**config.to_dict())):
        assert {name: getattr(again, name) for name in OWN} == {name: getattr(config, name) for name in OWN}
        assert again.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="500"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path, memory_blocks=500))


@pytest.mark.parametrize("mixer", ["titans", "comba"])
def test_custom_unlocks_are_read_from_a_list_or_a_function_and_kept_in_the_file(mixer, tmp_path):
    fields = {"mixer": mixer, "memory_blocks": 4, "memory_policy": "custom"}
    config = ProteusConfig(**fields, memory_unlocks=lambda block: 0 if block == 0 else 4 * 2**block)
    assert config.schedule == ActivationSchedule(4, 8192, (0, 8, 16, 32))
    config.save_pretrained(tmp_path)
    for again in (AutoConfig.from_pretrained(tmp_path), ProteusConfig(**fields, memory_unlocks=[0, 8, 16, 32])):
        assert again.memory_unlocks == (0, 8, 16, 32)
        assert ProteusForCausalLM(again).schedule == config.schedule


def test_fields_are_those_the_mixers_declare():
    common = {f.name for f in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}
    for mixer in registry.values():
        assert mixer.fields <= set(OWN) - common
