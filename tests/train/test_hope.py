"""Hope in training: the gated optimiser is used, units not yet open keep their bits, and a run resumes bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from proteus_lm.hope import update_gates
from proteus_lm.model import ProteusForCausalLM
from proteus_lm.optim import GatedAdamW
from proteus_lm.train import trainer as module
from proteus_lm.train.checkpoint import checkpoint_bytes
from proteus_lm.train.loop import train
from proteus_lm.train.optimizer import decay_groups, make_adamw, make_optimizer, moments
from proteus_lm.train.recipe import RecipeError
from tests.mixers.models import make, options
from tests.train.test_loop import equal, learnt, spoil, weights

HOPE = {"channel": "chain", "intermediate_size": 32, "chain_periods": [1, 2, 4], "update_blocks": 4, "lr": 1e-2, "warmup": 2}


def test_the_optimiser_is_gated_where_the_model_is_and_adamw_elsewhere(recipe):
    kinds = {}
    for name, changes in {"hope": {"update_blocks": 2}, "periods": {}, "plain": {"chain_periods": [1, 1]}}.items():
        model = make(options("attention", channel="chain", **changes))
        options_ = recipe(decay_locked=True, **HOPE | {"bias_correction": "global"}).train
        kinds[name] = make_optimizer(model, decay_groups(model), options_)
    assert [type(kinds[name]) for name in ("hope", "periods", "plain")] == [GatedAdamW, GatedAdamW, torch.optim.AdamW]
    hope = kinds["hope"]
    assert (hope.decay_locked, hope.bias_correction) == (True, "global") and hope.masks and hope.periods
    assert not kinds["periods"].masks and set(kinds["periods"].periods.values()) == {2, 4, 8}
    assert [group["weight_decay"] for group in hope.param_groups] == [0.1, 0.0]


def test_units_not_yet_open_keep_their_bits_through_decay_and_clipping(recipe, tmp_path):
    options_ = {**HOPE, "steps": 12, "weight_decay": 0.5, "clip": 0.1, "save_every": 1, "keep": 20}
    run = train(recipe(**options_), tmp_path / "run")
    model = run.load_model()
    masks, periods = update_gates(model, model.config, 12)
    first, moved = weights(train(recipe(**options_ | {"lr": 1e-30}), tmp_path / "still"), 1), 0
    for step in range(1, 13):
        saved = weights(run, step)
        state = load_file(run.checkpoint(step) / "optimizer.safetensors")
        for name, parameter in model.named_parameters():
            if parameter not in masks:
                continue
            dim, schedule = masks[parameter]
            size, width = parameter.shape[dim], schedule.active(parameter.shape[dim], step - 1)
            locked = saved[name].narrow(dim, width, size - width)
            assert torch.equal(locked, first[name].narrow(dim, width, size - width)), (step, name)
            for moment in ("exp_avg", "exp_avg_sq"):
                assert not state[f"{moment}.{name}"].narrow(dim, width, size - width).any()
            if step >= periods.get(parameter, 1):
                moved += 1
                assert not torch.equal(saved[name].narrow(dim, 0, 1), first[name].narrow(dim, 0, 1)), (step, name)
    assert moved > 50


def test_a_level_stands_still_between_its_updates(recipe, tmp_path):
    run = train(recipe(**HOPE, steps=8, save_every=1, keep=20), tmp_path / "run")
    for step in range(1, 8):
        before, after = weights(run, step), weights(run, step + 1)
        for name in before:
            period = {"0": 1, "1": 2, "2": 4}[name.split(".levels.")[1][0]] if ".levels." in name else 1
            assert torch.equal(before[name], after[name]) == ((step + 1) % period != 0), (step, name)


@pytest.mark.parametrize("stops", [(5, 7), (1, 2, 3, 6)])
def test_stopping_inside_a_period_and_resuming_is_exact(recipe, tmp_path, stops):
    options_ = {**HOPE, "steps": 10, "mixer": "comba", "memory_blocks": 2, "schedule_frac": 0.8}
    whole = train(recipe(**options_), tmp_path / "whole")
    for stop in (*stops, None):
        run = train(recipe(**options_), tmp_path / "parts", stop_at=stop)
    assert learnt(run) == learnt(whole) and equal(weights(run), weights(whole))
    state, right = (load_file(r.checkpoint() / "optimizer.safetensors") for r in (run, whole))
    assert equal(state, right) and state["steps"] == 10
    assert sum(name.startswith("gradient_sum.") for name in state) == 8  # two levels with periods: three maps and a norm each
    assert {p.suffix for p in run.checkpoint().iterdir()} == {".json", ".safetensors"}


def test_masks_come_before_clipping(recipe, tmp_path, monkeypatch):
    """The norm that is clipped and reported is that of the open units: the first step's is smaller with blocks than without."""
    norms = {}
    for blocks in (1, 4):
        run = train(recipe(**HOPE | {"update_blocks": blocks, "warmup": 0}, steps=1), tmp_path / str(blocks))
        norms[blocks] = run.metrics()[0]["gradient_norm"]
    assert norms[4] < norms[1]
    seen, clip = [], module.torch.nn.utils.clip_grads_with_norm_

    def look(parameters, *arguments):
        seen.append([p.grad.clone() for p in parameters])
        clip(parameters, *arguments)

    monkeypatch.setattr(module.torch.nn.utils, "clip_grads_with_norm_", look)
    run = train(recipe(**HOPE | {"warmup": 0}, steps=1), tmp_path / "seen")
    names = [name for name, _ in run.load_model().named_parameters()]
    grads = dict(zip(names, seen[0], strict=True))
    for level, width in enumerate((11, 11, 10)):
        opened = width // 4
        for part, dim in (("gate", 0), ("up", 0), ("down", 1)):
            grad = grads[f"layers.0.chain.levels.{level}.mlp.{part}.weight"]
            assert not grad.narrow(dim, opened, width - opened).any() and grad.narrow(dim, 0, opened).any()
    total = torch.stack([g.double().square().sum() for g in seen[0]]).sum().sqrt().item()
    assert run.metrics()[0]["gradient_norm"] == pytest.approx(total, rel=1e-5)


def test_an_update_left_out_does_not_advance_the_schedule(recipe, tmp_path, monkeypatch):
    spoil(monkeypatch, 3, times=2)
    run = train(recipe(**HOPE, steps=8, skip_nonfinite=True, save_every=1, keep=10), tmp_path / "run")
    counts = [load_file(run.checkpoint(s) / "optimizer.safetensors")["steps"].item() for s in range(1, 9)]
    assert counts == [1, 2, 2, 2, 3, 4, 5, 6]
    assert json.loads((run.checkpoint() / "trainer.json").read_text())["step"] == 8


def test_decay_of_locked_units_and_bias_correction_reach_the_updates(recipe, tmp_path):
    found = [
        weights(train(recipe(**HOPE, **changes), tmp_path / str(number)))
        for number, changes in enumerate(({}, {"decay_locked": True}, {"bias_correction": "global"}))
    ]
    assert not equal(found[0], found[1]) and not equal(found[0], found[2]) and not equal(found[1], found[2])


@pytest.mark.parametrize("option", [{"decay_locked": True}, {"bias_correction": "global"}])
def test_options_of_the_gate_are_refused_without_blocks(recipe, option):
    with pytest.raises(RecipeError, match=rf"train\.{next(iter(option))}.*update_blocks"):
        recipe(**option)


def test_the_steps_of_a_run_with_update_blocks_cannot_change_on_the_way(recipe, tmp_path):
    train(recipe(**HOPE), tmp_path / "run", stop_at=2)
    with pytest.raises(RecipeError, match=r"train\.steps: 6 in the run, 9"):
        train(recipe(**HOPE, steps=9), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 40}, "update blocks: 4; the last opens at step 31 of 40"),
        ({"steps": 2}, "warning: only 2 of 4 update blocks open within the 2 steps"),
    ],
)
def test_where_the_last_block_opens_is_said(recipe, tmp_path, capsys, changes, words):
    train(recipe(**HOPE, **changes), tmp_path / "run", stop_at=1)
    assert words in capsys.readouterr().out


def test_a_checkpoints_size_counts_the_gradient_sums(recipe):
    model = make(options("attention", channel="chain", chain_periods=[1, 2]), torch.float32)
    groups = decay_groups(model)
    optimizer = make_optimizer(model, groups, recipe().train)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = sum(p.numel() for p in model.parameters()) + sum(
        t.numel() for n, t in moments(optimizer, groups).items() if n != "steps"
    )
    assert checkpoint_bytes(model, optimizer) == 4 * state + (1 << 20)


def test_the_state_of_a_plain_optimiser_is_refused(recipe):
    from proteus_lm.train.optimizer import load_moments

    model: ProteusForCausalLM = make(options("attention", channel="chain"))
    groups = decay_groups(model)
    with pytest.raises(ValueError, match="no count of steps"):
        load_moments(make_optimizer(model, groups, recipe().train), groups, moments(make_adamw(groups, recipe().train), groups))
