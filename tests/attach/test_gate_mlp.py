"""The door of GatedAdamW: hidden units of any model's MLP blocks, found by name."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from proteus_lm import ActivationSchedule
from proteus_lm.attach import gate_mlp
from proteus_lm.optim import GatedAdamW
from tests.attach.foreign import llama
from tests.attach.memory import VOCAB, tokens


def neox(**options):
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, **options))


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_inner=24, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    )


MLPS = {
    "llama": (
        lambda: llama(mlp_bias=True),
        {"gate_proj.weight": 0, "gate_proj.bias": 0, "up_proj.weight": 0, "up_proj.bias": 0, "down_proj.weight": 1},
    ),
    "neox": (neox, {"dense_h_to_4h.weight": 0, "dense_h_to_4h.bias": 0, "dense_4h_to_h.weight": 1}),
    "gpt2": (gpt2, {"c_fc.weight": 1, "c_fc.bias": 0, "c_proj.weight": 0}),
}


@pytest.mark.parametrize("which", MLPS)
def test_mlp_masks_cover_the_hidden_units_of_every_map(which):
    make, dimensions = MLPS[which]
    model = make()
    masks = gate_mlp(model, "*.mlp", 4, 100)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {names[parameter]: gate for parameter, gate in masks.items()}
    assert len(found) == 2 * len(dimensions)  # of two layers
    for name, (dimension, schedule) in found.items():
        leaf = ".".join(name.split(".")[-2:])
        assert dimension == dimensions[leaf] and model.get_parameter(name).shape[dimension] == 24
        assert schedule == ActivationSchedule(4, 100)


@pytest.mark.parametrize("which", MLPS)
def test_gated_step_keeps_the_bits_of_locked_units_and_what_they_compute(which):
    """With 1 of 4 blocks open the first 6 of 24 units move; each other unit still computes, and returns, what it did."""
    make, _ = MLPS[which]
    torch.manual_seed(0)
    model = make()
    masks = gate_mlp(model, ["*.mlp"], 4, 100)
    before = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    optimizer = GatedAdamW(model.parameters(), lr=0.1, masks=masks)
    ids = tokens(2, 12)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    for parameter, old in before.items():
        if parameter in masks:
            dimension = masks[parameter][0]
            moved, kept = ((x.narrow(dimension, 0, 6), x.narrow(dimension, 6, 18)) for x in (parameter.detach(), old))
            assert torch.equal(moved[1], kept[1])
            assert (moved[0] != kept[0]).any()
        elif parameter.grad is not None and parameter.grad.abs().max() > 1e-6:
            assert not torch.equal(parameter, old)


def test_patterns_name_blocks_maps_or_parameters():
    model = llama()
    names = {parameter: name for name, parameter in model.named_parameters()}

    def named(patterns):
        return {names[p].removeprefix("model.layers.") for p in gate_mlp(model, patterns, 4, 100)}

    assert named("model.layers.1.mlp") == {"1.mlp.gate_proj.weight", "1.mlp.up_proj.weight", "1.mlp.down_proj.weight"}
    assert named(["*.0.mlp.up_proj", "*.0.mlp.down_proj.weight"]) == {"0.mlp.up_proj.weight", "0.mlp.down_proj.weight"}


@pytest.mark.parametrize(
    "make, pattern, blocks, words",
    [
        (llama, "*.feed_forward", 4, r"matches no parameter with hidden units; MLP blocks here: model.layers.0.mlp"),
        (llama, "model.layers.0", 4, r"q_proj.weight of Linear, which no MLP block holds"),
        (gpt2, "*.c_proj", 4, r"attn.c_proj.weight of Conv1D, which no MLP block holds"),
        (gpt2, "*.mlp.c_proj.bias", 4, "matches no parameter with hidden units"),
        (llama, "*.mlp", 25, "24 hidden units, fewer than 25 blocks"),
        (llama, "*.mlp", 0, "blocks is 0"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "0", 2, "MLP blocks here: none that is known"),
    ],
)
def test_patterns_that_name_no_mlp_raise(make, pattern, blocks, words):
    with pytest.raises(ValueError, match=words):
        gate_mlp(make(), pattern, blocks, 100)


def test_fused_maps_raise():
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, pad_token_id=0))
    with pytest.raises(ValueError, match="holds two maps in one tensor"):
        gate_mlp(model, "*.mlp", 4, 100)


def test_maps_of_another_class_raise():
    class Quantised(nn.Linear):
        pass

    model = llama()
    model.model.layers[1].mlp.up_proj = Quantised(16, 24)
    with pytest.raises(ValueError, match=r"1.mlp.up_proj.weight of Quantised, which is not a plain nn.Linear"):
        gate_mlp(model, "*.mlp", 4, 100)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_a_number_of_steps_that_opens_nothing_is_refused_by_its_own_name(steps):
    with pytest.raises(ValueError, match=f"^steps is {steps}; it must be a whole number of optimiser steps"):
        gate_mlp(llama(), "*.mlp", 4, steps)
