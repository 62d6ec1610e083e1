"""Inputs of 16 bits, states beyond what 16 bits hold: the memory itself stays in fp32."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from proteus_lm import ActivationSchedule, ops
from proteus_lm.ops.backend import OPERATIONS

LENGTH, WIDTH = 70, 8
LARGEST = torch.finfo(torch.float16).max


def inputs(operation):
    """Values of 30,000 written again and again at nearly one key, with hardly any decay and a momentum of 0.99.

    Titans' step size keeps its memory stable; its inner gradients, sums of 16 such values, are what fp16 does not hold.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (1, LENGTH, 2, WIDTH)
    k = normalize(1 + 0.1 * torch.randn(shape, generator=generator), dim=-1)
    v = 3e4 * torch.randn(shape, generator=generator).sign()
    v[..., 0] = 3e4
    gate = torch.ones(1, LENGTH, 2)
    rest = {
        "retention": [-1e-3 * gate],
        "swla": [-1e-3 * gate, torch.ones(1, LENGTH, 2, 2)],
        "delta_rule": [1.9 * gate],
        "gated_delta_rule": [-1e-3 * gate, 1.9 * gate],
        "comba": [0.1 * k, -1e-3 * gate, gate],
        "titans_memory": [1e-9 * gate, 1e-4 * gate, 0.99 * gate],
    }[operation]
    weights = ()
    if operation == "titans_memory":
        w1, w2 = torch.randn(2, WIDTH, 16, generator=generator), torch.randn(2, 16, WIDTH, generator=generator)
        weights = (w1 / WIDTH**0.5, w2 / 4)
    return [k, k, v, *rest], weights


def run(operation, tensors, weights):
    dim, keywords = (16, {"chunk": 16}) if weights else (WIDTH, {})
    activation = ActivationSchedule(4, 40).activation(dim, LENGTH)
    more = (weights,) if weights else ()
    out, state = getattr(ops, operation)(*tensors, *more, activation=activation, output_final_state=True, **keywords)
    grads = torch.autograd.grad(out.float().nan_to_num(0.0, 0.0, 0.0).sum(), tensors)
    parts = [state] if torch.is_tensor(state) else [*state.momentum, *state.weights] if weights else [state.matrix]
    return out, parts, grads


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_state_beyond_fp16_is_that_of_fp32_inputs_and_gradients_are_finite(operation, dtype):
    tensors, weights = inputs(operation)
    narrow = [t.to(dtype).requires_grad_() for t in tensors]
    wide = [t.detach().float().requires_grad_() for t in narrow]
    out, state, grads = run(operation, narrow, weights)
    wanted, right, _ = run(operation, wide, weights)
    if weights:
        assert all((part - start).norm() > 1e-3 for part, start in zip(right[2:], weights, strict=True))
    elif operation in ("retention", "swla"):  # a delta rule holds what it was given, and does not grow
        assert max(part.abs().max() for part in right) > LARGEST
    for part, other in zip(state, right, strict=True):
        assert part.dtype == torch.float32 and part.isfinite().all() and torch.equal(part, other)
    assert out.dtype == dtype and torch.equal(out, wanted.to(dtype))
    assert all(grad.dtype == dtype for grad in grads)
    if dtype == torch.bfloat16:  # its range is that of fp32
        assert all(grad.isfinite().all() for grad in grads)
