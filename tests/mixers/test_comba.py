"""Comba: its recurrence from the equations, its options, and what is locked."""

from __future__ import annotations

import pytest
import torch

from proteus_lm import ActivationSchedule, ProteusConfig
from proteus_lm.mixers import CombaMixer
from proteus_lm.mixers.norm import l2_normalize
from proteus_lm.sequence import TokenSequence
from tests.mixers.models import CONTEXT, assert_near, make, options

T = 11


def inputs(rows=2):
    return torch.randn(rows, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_hand(mixer, x, schedule, config):
    """spec/linear.md 1.3 and 2.2, one token at a time."""
    (q, k, v), _ = mixer.projection(x, TokenSequence(ActivationSchedule(1, 8), len(x), T))
    beta, rate = mixer.gates(x).chunk(2, -1)
    g = -mixer.A_log.exp() * torch.nn.functional.softplus(rate + mixer.dt_bias)
    b, K, V = torch.sigmoid(mixer.inner)[:, None], q.shape[-1], v.shape[-1]
    correction = mixer.D[:, None] if mixer.D is not None else 0.0
    S, reads = x.new_zeros(len(x), q.shape[2], K, V), []
    for t in range(T):
        rows, columns = (torch.arange(n) < schedule.active(n, t) for n in (K, V))
        opened = rows[:, None].expand(K, V) if config.memory_axis == "key" else columns.expand(K, V)
        first = (lambda z, m=rows: z * m) if config.norm_order == "mask_then_norm" else (lambda z: z)
        raw_q = q[:, t] - correction * b * k[:, t]
        unit_q, unit_k = l2_normalize(first(raw_q)), l2_normalize(first(k[:, t]))
        p = l2_normalize(first(b * k[:, t])) if config.inner_decay == "before_norm" else b * unit_k
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S * opened, p)
        wanted = g[:, t].exp()[..., None, None] * S
        wanted = wanted + torch.sigmoid(beta[:, t])[..., None, None] * unit_k[..., None] * error[..., None, :]
        S = torch.where(opened, wanted, S)
        reads.append(K**-0.5 * torch.einsum("bhkv,bhk->bhv", S * opened, unit_q))
    return mixer.output(torch.stack(reads, 1), x), S


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"inner_decay": "before_norm"},
        {"output_correction": 0.0},
        {"value_expansion": 2},
        {"memory_blocks": 4},
        {"memory_blocks": 4, "memory_axis": "value", "value_expansion": 2},
        {"memory_blocks": 4, "norm_order": "mask_then_norm", "inner_decay": "before_norm"},
        {"memory_blocks": 3, "norm_order": "mask_then_norm"},
    ],
    ids=str,
)
def test_comba_is_its_recurrence_by_chunks_and_by_steps(changes):
    fields = options("comba", memory_context=9, **changes)
    model, config = make(fields), ProteusConfig(**fields)
    mixer, x = model.layers[0].mixer, inputs()
    with torch.no_grad():
        wanted, S = by_hand(mixer, x, config.schedule, config)
        y, state = mixer(x, TokenSequence(config.schedule, 2, T), use_state=True)
        assert_near(y, wanted)
        assert_near(state.matrix, S)
        state = mixer.init_state(2, "cpu", torch.float64)
        for t in range(T):
            step = TokenSequence(config.schedule, 2, 1, offset=torch.tensor([t, t]))
            y, state = mixer(x[:, t : t + 1], step, state, True)
            assert_near(y, wanted[:, t : t + 1])
        assert_near(state.matrix, S)


@pytest.mark.parametrize("axis", ["key", "value"])
@pytest.mark.parametrize("length", [1, 5])
def test_locked_coordinates_of_a_state_keep_their_bits_and_reach_nothing(axis, length):
    fields = options("comba", memory_blocks=4, memory_context=CONTEXT, memory_axis=axis)
    mixer, schedule = make(fields).layers[0].mixer, ProteusConfig(**fields).schedule
    x, zero = inputs()[:, :length].requires_grad_(), torch.zeros(2, dtype=torch.int64)
    results = []
    for planted in (0.0, 1e30, float("nan")):
        state = mixer.init_state(2, "cpu", torch.float64)
        (state.matrix[:, :, 2:] if axis == "key" else state.matrix[..., 2:]).fill_(planted)
        y, after = mixer(x, TokenSequence(schedule, 2, length, offset=zero), state, True)
        locked = after.matrix[:, :, 2:] if axis == "key" else after.matrix[..., 2:]
        assert torch.equal(locked, torch.full_like(locked, planted)) or (locked.isnan().all() and planted != planted)
        x.grad = None
        mixer.zero_grad()
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in mixer.parameters())])
    for planted in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], planted, strict=True))


def test_the_two_norm_orders_are_different_models_until_all_is_open():
    makers = [options("comba", memory_blocks=4, memory_context=8, norm_order=o) for o in ("norm_then_mask", "mask_then_norm")]
    one, two = (make(fields).layers[0].mixer for fields in makers)
    x, schedule = inputs(), ActivationSchedule(4, 8)
    difference = (one(x, TokenSequence(schedule, 2, T))[0] - two(x, TokenSequence(schedule, 2, T))[0]).abs().amax((0, 2))
    assert (difference[:6] > 1e-4).all()
    late = TokenSequence(schedule, 2, T, offset=torch.tensor([8, 8]))
    states = [m.init_state(2, "cpu", torch.float64) for m in (one, two)]
    assert torch.equal(one(x, late, states[0])[0], two(x, late, states[1])[0])


def test_operations_are_those_of_the_table_of_spec_linear_3():
    assert CombaMixer.memory_flops(256, 512) == pytest.approx(1_018_539, abs=1)
    assert CombaMixer.memory_flops(256 * 17 / 32, 512) == pytest.approx(603_819, abs=1)  # E = 16 over N tokens, rows
    config = ProteusConfig(**options("comba", memory_blocks=4, memory_axis="value"))
    base = ProteusConfig(**options("comba"))
    saved = CombaMixer.flops_per_token(base, 8192) - CombaMixer.flops_per_token(config, 8192)
    assert saved == pytest.approx(2 * (CombaMixer.memory_flops(8, 8) - CombaMixer.memory_flops(8, 8 * 5 / 8)))


def test_decay_and_step_start_as_in_mamba():
    torch.manual_seed(0)
    mixer = CombaMixer(ProteusConfig(mixer="comba", hidden_size=512, num_heads=256, output_correction=0.02))
    mixer.init_weights()
    assert 0 < mixer.A_log.exp().min() < 1 and 14 < mixer.A_log.exp().max() <= 16.001
    step = torch.nn.functional.softplus(mixer.dt_bias)
    assert 0.9e-3 < step.min() < 2e-3 and 0.05 < step.max() < 0.101
    assert (mixer.D == 0.02).all() and (mixer.inner == 1).all()
