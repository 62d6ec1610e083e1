"""Presets: every mixer has every size, counted exactly, near its name, and shaped for tiles and blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.mixers import registry
from proteus_lm.presets import SIZES, preset, preset_fields, table

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "sizes.md"
HOPE = {"channel": "chain", "update_blocks": 16}
CASES = [
    *(pytest.param(size, mixer, {}, id=f"{size}-{mixer}") for size in SIZES for mixer in sorted(registry)),
    *(pytest.param(size, "attention", HOPE, id=f"{size}-hope") for size in SIZES),
]


@pytest.mark.parametrize(("size", "mixer", "fields"), CASES)
def test_a_preset_has_the_parameters_of_its_name_as_counted(size, mixer, fields):
    config = preset(size, mixer, **fields)
    with torch.device("meta"):
        model = ProteusForCausalLM(config)
    count = ProteusForCausalLM.parameter_count(config)
    assert count == sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(SIZES[size], rel=0.03)
    assert (config.vocab_size, config.tie_word_embeddings) == (32_000, False)
    assert model.lm_head.weight is not model.embed_tokens.weight


@pytest.mark.parametrize(("size", "mixer", "fields"), CASES)
def test_shapes_fit_tiles_and_blocks(size, mixer, fields):
    config = preset(size, mixer, **fields)
    assert config.head_dim % 64 == 0 and (config.value_expansion or 1) in (1, 2)
    if config.channel == "chain":
        with torch.device("meta"):
            widths = [level.mlp.up.out_features for level in ProteusForCausalLM(config).layers[0].chain.levels]
    else:
        widths = [config.intermediate_size]
    assert all(width % 64 == 0 for width in widths)
    assert 1 <= config.intermediate_size / config.hidden_size <= 4  # an MLP, neither a stub nor all of the model
    kind = registry[mixer]
    if "memory_blocks" in kind.fields:
        dim = kind.memory_dim(preset(size, mixer, memory_blocks=16))
        assert dim is not None and dim % 16 == 0


def test_overrides_keep_the_size_unless_they_are_one():
    plain = preset("60M", "titans")
    deep = preset("60M", "titans", memory_depth=4, memory_blocks=16)
    assert deep.memory_depth == 4 and deep.intermediate_size < plain.intermediate_size
    assert ProteusForCausalLM.parameter_count(deep) == pytest.approx(60e6, rel=0.03)
    small = preset("60M", "titans", num_hidden_layers=1, vocab_size=257)
    assert small.intermediate_size == plain.intermediate_size and small.num_hidden_layers == 1
    assert preset("60M", "titans", intermediate_size=64).intermediate_size == 64
    assert ProteusConfig(**preset_fields("60M", "titans", memory_depth=4, memory_blocks=16)).to_dict() == deep.to_dict()


@pytest.mark.parametrize(
    ("size", "mixer", "fields", "words"),
    [
        ("750M", "comba", {}, "no preset of size '750M'; did you mean 760M"),
        ("760M", "retnett", {}, "no preset of mixer 'retnett'; did you mean retnet"),
        ("760M", "comba", {"window": 3}, "window"),
        ("20M", "titans", {"memory_expansion": 64}, "more than the 20,000,000 asked for"),
    ],
)
def test_what_is_no_preset_is_said(size, mixer, fields, words):
    with pytest.raises(ValueError, match=words):
        preset(size, mixer, **fields)


def test_the_documented_table_is_the_one_the_code_gives():
    assert table() in DOCUMENT.read_text(encoding="utf-8"), "run python -m proteus_lm.presets and put its output into docs/sizes.md"
