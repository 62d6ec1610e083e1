"""RetNet, DeltaNet, Gated DeltaNet and SWLA against their formulas, with the memory's rule read from the oracle."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu, softplus

from proteus_lm import ActivationSchedule, ProteusConfig
from proteus_lm.mixers import RetNetMixer, SWLAMixer, registry
from proteus_lm.mixers.rotary import rotary_angles, rotate
from proteus_lm.ops import reference
from proteus_lm.sequence import TokenSequence
from tests.mixers.models import CONTEXT, assert_near, make, options

T = 11


def inputs(rows=2, length=T):
    return torch.randn(rows, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def norm(x, visible=None):
    x = x if visible is None else x * visible[:, :, None]
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def convolved(mixer, x):
    """q, k, v as fla computes them: a linear map, torch's depthwise convolution, SiLU."""
    weight = mixer.projection.conv.weight
    channels = pad((x @ mixer.projection.linear.weight.T).mT, (weight.shape[1] - 1, 0))
    return heads_of(mixer, silu(conv1d(channels, weight[:, None], groups=len(weight)).mT))


def heads_of(mixer, y):
    keys, _, values = mixer.projection.widths
    return [part.unflatten(-1, (2, -1)) for part in y.split([2 * keys, 2 * keys, 2 * values], -1)]


def turned(x):
    """Coordinates 2i and 2i + 1 as one complex number, times e^(i position / 10000^(2i / K))."""
    rate = 10_000.0 ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * rate
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.view_as_real(z).flatten(-2)


def written_out(mixer, x, config):
    """What the rule of the oracle gets, and its name."""
    visible = config.schedule.activation(config.head_dim, x.shape[1]).mask() if config.norm_order == "mask_then_norm" else None
    if config.mixer == "retnet":
        q, k, v = heads_of(mixer, x @ mixer.projection.linear.weight.T)
        g = torch.log(1 - torch.tensor([2.0**-5, 2.0**-6], dtype=torch.float64))
        return "retention", (turned(q), turned(k), v, g.expand(*x.shape[:2], 2))
    q, k, v = convolved(mixer, x)
    q, k = norm(q, visible), norm(k, visible)
    z = x @ mixer.gates.weight.T
    if config.mixer == "deltanet":
        return "delta_rule", (q, k, v, torch.sigmoid(z))
    g = -mixer.A_log.exp() * softplus(z[..., -2:] + mixer.dt_bias)
    if config.mixer == "gated_deltanet":
        return "gated_delta_rule", (q, k, v, g, torch.sigmoid(z[..., :2]))
    c = config.swla_window
    gamma = torch.stack([torch.sigmoid(z[..., head * c : (head + 1) * c]) for head in (0, 1)], 2)
    return "swla", (q, k, v, g, gamma)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"value_expansion": 3},
        {"memory_blocks": 4},
        {"memory_blocks": 2, "memory_axis": "value"},
        {"memory_blocks": 4, "norm_order": "mask_then_norm"},
        {"swla_window": 1},
        {"swla_window": 4, "memory_blocks": 4},
        {"conv_size": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["retnet", "deltanet", "gated_deltanet", "swla"])
def test_a_mixer_is_its_formula(name, changes):
    fields = {k: v for k, v in changes.items() if k in registry[name].fields}
    config = ProteusConfig(**options(name, memory_context=9, **fields))
    mixer, x = make(options(name, memory_context=9, **fields)).layers[0].mixer, inputs()
    with torch.no_grad():
        rule, arguments = written_out(mixer, x, config)
        dim = mixer.memory_dim(config)
        read, memory = getattr(reference, rule)(
            *arguments, activation=config.schedule.activation(dim, T), axis=config.memory_axis, output_final_state=True
        )
        normed = read / (read.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.output.norm.weight
        gate = 1 if name == "deltanet" else silu(x @ mixer.output.gate.weight.T)
        y, state = mixer(x, TokenSequence(config.schedule, 2, T), use_state=True)
    assert_near(y, (normed.flatten(-2) * gate) @ mixer.output.out.weight.T)
    assert_near(state.matrix, memory[0] if name == "swla" else memory)
    if name == "swla":
        assert_near(state.memory.keys, memory.keys)
        assert_near(state.memory.values, memory.values)


# RetNet's rotation.


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_scores_in_the_open_rows_depend_on_the_distance_alone_whatever_is_open(blocks):
    mixer = make(options("retnet", memory_blocks=blocks)).layers[0].mixer
    same = inputs(1, 1).expand(1, T, 16)  # one input everywhere: only positions differ
    x, sequence = torch.randn(1, 1, 2, 8, dtype=torch.float64).expand(1, T, 2, 8), TokenSequence(ActivationSchedule(1, 8), 1, T)
    with torch.no_grad():
        q, k, _, _ = mixer.arguments(same, x, x.flip(-1), x, sequence)
    angles = rotary_angles(torch.arange(T)[None], 8, torch.float64)[:, :, None]
    halves = [rotate(part, (angles.cos(), angles.sin())) for part in (x, x.flip(-1))]
    for rows in range(8 // blocks, 9, 8 // blocks):
        scores, split = (torch.einsum("bthk,bshk->bhts", a[..., :rows], b[..., :rows]) for a, b in ((q, k), halves))
        assert_near(scores[..., 1:, 1:], scores[..., :-1, :-1])
        assert (scores[..., 0, 0] - scores[..., 1, 0]).abs().min() > 1e-3
        if rows < 8:  # half-split pairs, as fla turns them, would lie in two blocks
            assert (split[..., 1:, 1:] - split[..., :-1, :-1]).abs().max() > 1e-2


def test_a_head_forgets_half_as_fast_as_the_one_before():
    mixer = RetNetMixer(ProteusConfig(mixer="retnet", hidden_size=48, num_heads=12, head_dim=4))
    x = torch.randn(1, 3, 12, 4)
    g = mixer.arguments(x, x, x, x, TokenSequence(ActivationSchedule(1, 8), 1, 3))[3]
    assert g.dtype == torch.float32 and g.shape == (1, 3, 12)
    assert_near(-torch.expm1(g), (2.0 ** (-5 - torch.arange(12))).expand(1, 3, 12))


def test_positions_of_a_row_count_from_its_own_start():
    mixer = make(options("retnet")).layers[0].mixer
    x = inputs(1, 7)
    q, k, v = mixer.projection(x, TokenSequence(ActivationSchedule(1, 8), 1, 7))[0]
    base = mixer.arguments(x, q, k, v, TokenSequence(ActivationSchedule(1, 8), 1, 7))
    packed = TokenSequence(ActivationSchedule(1, 8), 2, 7, cu_seqlens=torch.tensor([0, 3, 7]))
    behind = TokenSequence(ActivationSchedule(1, 8), 1, 4, offset=torch.tensor([3]))
    again = mixer.arguments(x, q, k, v, packed)
    late = mixer.arguments(x[:, 3:], q[:, 3:], k[:, 3:], v[:, 3:], behind)
    early = mixer.arguments(x[:, 3:], q[:, 3:], k[:, 3:], v[:, 3:], TokenSequence(ActivationSchedule(1, 8), 1, 4))
    for i in (0, 1):
        assert_near(again[i][:, :3], base[i][:, :3])
        assert_near(again[i][:, 3:], early[i])
        assert_near(late[i], base[i][:, 3:])


# SWLA's window.


@pytest.mark.parametrize("axis", ["key", "value"])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("by_steps", [False, True], ids=["one call", "steps"])
def test_the_first_token_of_a_stage_writes_the_window_before_it_into_the_new_block(axis, window, by_steps):
    fields = options("swla", swla_window=window, memory_blocks=4, memory_context=CONTEXT, memory_axis=axis)
    mixer, schedule = make(fields).layers[0].mixer, ProteusConfig(**fields).schedule
    x, opens = inputs(2, 7), 6
    whole = TokenSequence(schedule, 2, 7)
    with torch.no_grad():
        _, k, v, _, gamma = mixer.arguments(x, *mixer.projection(x, whole)[0], whole)
        if by_steps:
            state = mixer.init_state(2, "cpu", torch.float64)
            for t in range(7):
                step = TokenSequence(schedule, 2, 1, offset=torch.tensor([t, t]))
                _, state = mixer(x[:, t : t + 1], step, state, True)
        else:
            _, state = mixer(x, whole, use_state=True)
    wanted = sum(
        gamma[:, opens, :, j, None, None] * k[:, opens - j, :, :, None] * v[:, opens - j, :, None, :] for j in range(window)
    )
    new = (slice(None), slice(None), slice(2, 4)) if axis == "key" else (..., slice(2, 4))
    locked = (slice(None), slice(None), slice(4, None)) if axis == "key" else (..., slice(4, None))
    assert_near(state.matrix[new], wanted[new])
    assert (state.matrix[locked] == 0).all()


def test_a_window_of_one_is_linear_attention_with_a_gate_on_the_values():
    mixer = make(options("swla", swla_window=1)).layers[0].mixer
    x, sequence = inputs(), TokenSequence(ActivationSchedule(1, 8), 2, T)
    with torch.no_grad():
        q, k, v, g, gamma = mixer.arguments(x, *mixer.projection(x, sequence)[0], sequence)
        read, matrix = reference.retention(q, k, gamma * v, g, output_final_state=True)
        y, state = mixer(x, sequence, use_state=True)
        assert_near(y, mixer.output(read, x))
    assert_near(state.matrix, matrix)
    assert state.memory.keys.shape == (2, 0, 2, 8)


# Sizes.


@pytest.mark.parametrize(
    ("name", "sizes", "squares", "gates"),
    [
        # (heads, keys, value expansion), d^2 of the maps as in spec/linear.md 1, parameters of gates
        ("retnet", (4, 16, 2), 8, 0),
        ("deltanet", (4, 16, 1), 4, 4 * 64),
        ("gated_deltanet", (3, 16, 2), 6, 2 * 3 * 64 + 2 * 3),
        ("comba", (3, 16, 2), 6, 2 * 3 * 64 + 4 * 3),
        ("swla", (4, 16, 1), 5, 3 * 4 * 64 + 2 * 4),
    ],
)
def test_parameters_are_those_of_the_papers(name, sizes, squares, gates):
    heads, keys, expansion = sizes
    config = ProteusConfig(mixer=name, hidden_size=64, num_heads=heads, head_dim=keys, value_expansion=expansion)
    taps = 0 if name == "retnet" else 4 * heads * keys * (2 + expansion)
    wanted = squares * 64**2 + taps + gates + keys * expansion
    assert registry[name].parameter_count(config) == wanted
    assert sum(p.numel() for p in registry[name](config).parameters()) == wanted


def test_operations_are_those_of_the_table_of_spec_linear_3():
    assert RetNetMixer.memory_flops(128, 128) == SWLAMixer.memory_flops(128, 128) == 98_304
    assert RetNetMixer.memory_flops(128 * 17 / 32, 128) == 59_904  # E = 16 over N tokens, rows
    assert registry["deltanet"].memory_flops(128, 128) == pytest.approx(182_955, abs=1)
    assert registry["gated_deltanet"].memory_flops(96, 96) == pytest.approx(119_467, abs=1)
