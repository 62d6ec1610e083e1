"""Hope's chain: equal to its equation, counted exactly, never masked in the forward, and gated where the paper gates."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import silu

from proteus_lm import ActivationSchedule, ProteusConfig, ProteusForCausalLM
from proteus_lm.hope import Chain, level_widths, update_gates, update_schedule
from proteus_lm.mixers import registry
from tests.mixers.models import assert_near, make, options, tokens


def chain(**changes):
    return options("attention", **{"channel": "chain", "intermediate_size": 30, **changes})


def test_a_chain_is_its_equation():
    model = make(chain(chain_periods=[1, 2, 5]))
    block, x = model.layers[0].chain, torch.randn(2, 3, 16, dtype=torch.float64)
    expected = x
    for level in block.levels:
        normed = expected / (expected.square().mean(-1, keepdim=True) + 1e-6).sqrt() * level.norm.weight
        up, gate, down = (getattr(level.mlp, name).weight for name in ("up", "gate", "down"))
        expected = expected + (silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    assert_near(block(x), expected)


@pytest.mark.parametrize(("levels", "widths"), [(1, [30]), (3, [10, 10, 10]), (4, [8, 8, 7, 7])])
def test_levels_share_the_width_of_the_mlp_they_replace(levels, widths):
    config = ProteusConfig(**chain(chain_periods=[1] * levels))
    assert level_widths(config) == widths and sum(widths) == config.intermediate_size
    assert [level.mlp.up.out_features for level in Chain(config).levels] == widths


def test_a_chain_left_to_itself_has_four_levels_and_says_so_in_its_file(tmp_path):
    config = ProteusConfig(**chain())
    assert config.chain_periods == (1, 2, 4, 8)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["chain_periods"] == [1, 2, 4, 8]
    assert ProteusConfig.from_pretrained(tmp_path).chain_periods == (1, 2, 4, 8)
    assert ProteusConfig().chain_periods is None


@pytest.mark.parametrize("mixer", sorted(registry))
def test_a_chain_goes_with_every_mixer_and_is_counted(mixer):
    fields = options(mixer, channel="chain", chain_periods=[1, 2, 4], intermediate_size=26)
    model, base = make(fields), ProteusConfig(**options(mixer, intermediate_size=26))
    config = model.config
    assert model.parameter_count(config) == sum(p.numel() for p in model.parameters())
    assert model.parameter_count(config) - model.parameter_count(base) == 2 * 2 * 16  # two more norms in two layers
    assert model.flops_per_token(config, 9) == model.flops_per_token(base, 9)
    ids = tokens(2, 9)
    whole = model(ids, labels=ids)
    whole.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in model.parameters())
    first = model(ids[:, :5], use_cache=True)
    second = model(ids[:, 5:], past_key_values=first.past_key_values)
    assert_near(torch.cat((first.logits, second.logits), 1), whole.logits)


def test_residual_maps_start_smaller_with_every_branch_of_a_layer():
    torch.manual_seed(0)
    fields = {"hidden_size": 128, "num_heads": 4, "head_dim": 32, "intermediate_size": 512, "num_hidden_layers": 3}
    model = ProteusForCausalLM(ProteusConfig(**chain(**fields, chain_periods=[1, 1])))
    for level in model.layers[1].chain.levels:
        assert level.mlp.down.weight.std().item() == pytest.approx(0.02 / 3, rel=0.05)  # sqrt(3 layers x 3 branches)


def test_the_forward_is_not_masked():
    """Only updates are gated (spec/deep.md 4.3 C): blocks and periods change no output."""
    ids = tokens(2, 9)
    plain, gated = make(chain(chain_periods=[1, 1])), make(chain(chain_periods=[1, 8], update_blocks=4))
    assert torch.equal(plain(ids).logits, gated(ids).logits)


def test_gates_cover_rows_of_up_and_gate_and_columns_of_down_and_nothing_else():
    model = make(chain(chain_periods=[1, 2], update_blocks=4))
    masks, periods = update_gates(model, model.config, 40)
    named = {name: masks[p] for name, p in model.named_parameters() if p in masks}
    schedule = ActivationSchedule(4, 40)
    assert named == {
        f"layers.{layer}.chain.levels.{level}.mlp.{part}.weight": (dim, schedule)
        for layer in range(2)
        for level in range(2)
        for part, dim in (("gate", 0), ("up", 0), ("down", 1))
    }
    for name, parameter in model.named_parameters():
        if parameter in masks:
            assert parameter.shape[masks[parameter][0]] == 15, name
        assert periods.get(parameter, 1) == (2 if ".levels.1." in name else 1), name


@pytest.mark.parametrize(("steps", "part", "context"), [(100, 1.0, 100), (100, 0.5, 50), (7, 0.5, 4), (3, 0.1, 1), (100, 0.29, 29)])
def test_blocks_open_over_a_part_of_the_steps(steps, part, context):
    config = ProteusConfig(**chain(update_blocks=2, schedule_frac=part))
    assert update_schedule(config, steps) == ActivationSchedule(2, context)


@pytest.mark.parametrize("fields", [options("attention"), chain(chain_periods=[1, 1])], ids=["mlp", "plain chain"])
def test_a_model_without_periods_or_blocks_gates_nothing(fields):
    model = make(fields)
    assert update_gates(model, model.config, 10) == ({}, {})
