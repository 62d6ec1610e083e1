"""Which parameters decay, how the learning rate moves, and that the optimiser's state travels by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from proteus_lm.config import ProteusConfig
from proteus_lm.mixers import registry
from proteus_lm.model import ProteusForCausalLM
from proteus_lm.optim import GatedAdamW
from proteus_lm.train.optimizer import decay_groups, learning_rate, load_moments, make_adamw, moments
from proteus_lm.train.recipe import TrainRecipe


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.gate = nn.Linear(4, 2, bias=False)
        self.gate.weight._no_weight_decay = True
        self.memory = nn.Parameter(torch.zeros(2, 4, 4))
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def test_marks_norms_biases_and_embeddings_do_not_decay():
    groups = decay_groups(Marked())
    assert set(groups.decay) == {"linear.weight", "memory"}
    assert set(groups.no_decay) == {"table.weight", "linear.bias", "norm.weight", "norm.bias", "gate.weight"}
    assert groups.reasons["gate.weight"] == "marked by its module"
    assert groups.reasons["table.weight"] == "embedding"
    assert "frozen" not in groups.decay | groups.no_decay


def test_the_log_lists_every_group_with_layers_folded():
    model = nn.Sequential(nn.Sequential(Marked(), Marked()))
    decay, no_decay = decay_groups(model).lines()
    assert decay.startswith("weight decay: 4 tensors") and "linear.weight" in decay and "0.0.linear.weight" not in decay
    assert "gate.weight" in no_decay and "table.weight" in no_decay


@pytest.mark.parametrize("mixer", sorted(registry))
def test_gates_a_log_norms_biases_and_embeddings_of_every_mixer_do_not_decay(mixer):
    config = ProteusConfig(mixer=mixer, vocab_size=17, hidden_size=16, num_hidden_layers=1, num_heads=2, head_dim=8)
    model = ProteusForCausalLM(config)
    groups = decay_groups(model)
    assert set(groups.decay) | set(groups.no_decay) == {name for name, _ in model.named_parameters()}
    for name in groups.decay:
        assert not any(word in name for word in ("norm", "bias", "A_log", "dt_", "embed", ".D"))


def test_only_the_decay_group_shrinks_without_a_gradient():
    model = Marked()
    groups = decay_groups(model)
    optimizer = make_adamw(groups, TrainRecipe(steps=1, lr=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in (*groups.decay.values(), *groups.no_decay.values()):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.linear.weight, before["linear.weight"] * (1 - 0.1 * 0.5))
    for name in groups.no_decay:
        assert torch.equal(model.get_parameter(name), before[name])


def test_the_learning_rate_warms_up_and_falls_along_a_cosine():
    recipe = TrainRecipe(steps=110, lr=1.0, warmup=10, min_lr_ratio=0.1)
    rates = [learning_rate(recipe, step) for step in range(1, 111)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[59] == pytest.approx(0.55)  # half way: the mean of the peak and its tenth
    assert rates[109] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))


def test_a_constant_schedule_stays_at_the_peak_and_no_warmup_starts_there():
    recipe = TrainRecipe(steps=5, lr=0.3, schedule="constant", warmup=2)
    assert [learning_rate(recipe, step) for step in range(1, 6)] == [0.15, 0.3, 0.3, 0.3, 0.3]
    assert learning_rate(TrainRecipe(steps=1, lr=0.3), 1) == pytest.approx(0.03)  # one step alone is also the last


def test_moments_travel_by_name_and_strangers_are_refused():
    torch.manual_seed(0)
    model, other = Marked(), Marked()
    other.load_state_dict(model.state_dict())
    pairs = []
    for m in (model, other):
        groups = decay_groups(m)
        pairs.append((m, groups, make_adamw(groups, TrainRecipe(steps=1, lr=0.1))))

    def step(m, groups, optimizer):
        for number, parameter in enumerate((groups.decay | groups.no_decay).values()):
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
        optimizer.step()

    step(*pairs[0])
    other.load_state_dict(model.state_dict())
    load_moments(pairs[1][2], pairs[1][1], moments(pairs[0][2], pairs[0][1]))
    step(*pairs[0])
    step(*pairs[1])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    with pytest.raises(ValueError, match=r"exp_avg\.stranger"):
        load_moments(pairs[1][2], pairs[1][1], {"exp_avg.stranger": torch.zeros(2)})


def test_the_moments_of_a_gated_optimiser_know_what_updates_a_parameter_missed():
    torch.manual_seed(0)
    model, other = Marked(), Marked()
    other.load_state_dict(model.state_dict())
    first, second = ((decay_groups(m), GatedAdamW(list(m.parameters()), 0.1)) for m in (model, other))

    def step(groups, optimizer, alone):
        for number, parameter in enumerate((groups.decay | groups.no_decay).values()):
            parameter.grad = None if alone and number else torch.full_like(parameter, 0.1 * (number + 1))
        optimizer.step()

    for number in range(4):
        step(*first, alone=number < 3)
    saved = moments(first[1], first[0])
    assert {key for key in saved if key.startswith("missed.")}
    other.load_state_dict(model.state_dict())
    load_moments(second[1], second[0], saved)
    for pair in (first, second):
        step(*pair, alone=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
