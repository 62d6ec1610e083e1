"""The parts mixers are made of: convolution, normalisation, rotation, gates."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import conv1d, silu

from proteus_lm import ActivationSchedule
from proteus_lm.mixers.base import GatedOutput, GateProjection, block_norms, mean_open
from proteus_lm.mixers.conv import ConvProjection, ShortConvolution
from proteus_lm.mixers.norm import RMSNorm, l2_normalize
from proteus_lm.mixers.rotary import rotary_angles, rotate
from proteus_lm.sequence import TokenSequence
from tests.mixers.models import assert_near

BASE = ActivationSchedule(1, 8)


def convolution(size, channels=3):
    torch.manual_seed(0)
    conv = ShortConvolution(channels, size)
    conv.init_weights()
    return conv.double()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_convolution_is_torch_s_causal_depthwise_one(size):
    conv, x = convolution(size), torch.randn(2, 9, 3, dtype=torch.float64)
    y, state = conv(x, TokenSequence(BASE, 2, 9))
    padded = torch.nn.functional.pad(x.mT, (size - 1, 0))
    assert_near(y, silu(conv1d(padded, conv.weight[:, None], groups=3)).mT)
    assert torch.equal(state, x[:, 9 - (size - 1) :])


@pytest.mark.parametrize("size", [1, 4])
def test_the_convolution_restarts_at_documents_and_continues_from_each_one_s_state(size):
    conv, x = convolution(size), torch.randn(1, 15, 3, dtype=torch.float64)
    lengths, past = [1, 2, 7, 5], torch.randn(4, size - 1, 3, dtype=torch.float64)
    packed = TokenSequence(BASE, 4, 15, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    for state in (None, past):
        y, after = conv(x, packed, state)
        for i, part in enumerate(x.split(lengths, 1)):
            alone = TokenSequence(BASE, 1, lengths[i])
            wanted, kept = conv(part, alone, None if state is None else state[i : i + 1])
            start = sum(lengths[:i])
            assert_near(y[:, start : start + lengths[i]], wanted)
            assert torch.equal(after[i : i + 1], kept)


def test_the_projection_cuts_channels_into_heads():
    torch.manual_seed(0)
    projection = ConvProjection(6, 2, (3, 5), 4)
    assert sum(p.numel() for p in projection.parameters()) == ConvProjection.parameter_count(6, 2, (3, 5), 4)
    projection.conv.init_weights()
    (q, v), state = projection(torch.randn(1, 4, 6), TokenSequence(BASE, 1, 4))
    assert q.shape == (1, 4, 2, 3) and v.shape == (1, 4, 2, 5) and state.shape == projection.init_state(1, "cpu", q.dtype).shape


def test_normalising_a_zero_key_gives_zero_and_a_finite_gradient():
    x = torch.zeros(2, 4, requires_grad=True)
    l2_normalize(x).sum().backward()
    assert torch.equal(l2_normalize(x), torch.zeros(2, 4)) and x.grad.isfinite().all()


def test_eps_stands_inside_the_root():
    x = torch.full((4,), 1e-3, dtype=torch.float64)
    assert_near(l2_normalize(x, 1e-6), x / math.sqrt(4e-6 + 1e-6))


def test_norms_compute_in_fp32_and_return_the_input_type():
    x = torch.full((2, 300), 300.0, dtype=torch.float16)  # its squares overflow fp16
    for y in (l2_normalize(x), RMSNorm(300, 1e-6)(x)):
        assert y.dtype == torch.float16 and y.isfinite().all() and (y > 0).all()
    assert_near(RMSNorm(300, 1e-6).double()(x.double()), torch.ones(2, 300, dtype=torch.float64), 1e-9)


def test_rotation_makes_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i, j):
        turned = [
            rotate(x, tuple(f(rotary_angles(torch.tensor([[p]]), 8, torch.float64)[:, :, None]) for f in (torch.cos, torch.sin)))
            for x, p in ((q, i), (k, j))
        ]
        return (turned[0] * turned[1]).sum()

    assert_near(score(7, 3), score(104, 100), 1e-9)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_a_gate_starts_at_its_value_and_stays_fp32_under_autocast():
    gate = GateProjection(4, 2, 0.9)
    torch.nn.init.zeros_(gate.weight)
    gate.init_weights()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = gate(torch.randn(1, 3, 4, dtype=torch.bfloat16))
    assert z.dtype == torch.float32
    assert_near(torch.sigmoid(z), torch.full((1, 3, 2), 0.9))


def test_the_output_is_norm_times_gate_through_the_map():
    torch.manual_seed(0)
    output = GatedOutput(6, 2, 3, 1e-6, torch.sigmoid).double()
    read, x = torch.randn(1, 4, 2, 3, dtype=torch.float64), torch.randn(1, 4, 6, dtype=torch.float64)
    normed = read / (read.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_near(output(read, x), output.out(normed.flatten(-2) * torch.sigmoid(output.gate(x))))
    assert sum(p.numel() for p in output.parameters()) == GatedOutput.parameter_count(6, 2, 3)


def test_the_open_share_is_the_mean_over_positions():
    schedule = ActivationSchedule(16, 8192)
    assert mean_open(schedule, 128, 8192) == pytest.approx((1 + 1 / 16) / 2)  # spec/linear.md 3
    assert mean_open(schedule, 128, 4 * 8192) == pytest.approx(0.8828125)
    uneven = ActivationSchedule(4, 24)
    assert mean_open(uneven, 18, 20, power=2) == pytest.approx(sum(uneven.active(18, t) ** 2 for t in range(20)) / 20 / 18**2)


def test_block_norms_leave_the_remainder_to_the_last_block():
    energy = torch.arange(1.0, 11.0)[None]
    assert_near(block_norms(energy, ActivationSchedule(4, 8)).square(), torch.tensor([[3.0, 7.0, 11.0, 34.0]]))
