"""Which implementation runs, and why: asked for by name, or chosen with a reason."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from proteus_lm import ActivationSchedule, ops
from proteus_lm.ops import backend, deep, reference


@pytest.mark.parametrize("operation", backend.OPERATIONS)
def test_auto_gives_a_reason_for_each_operation(operation):
    choice = backend.explain(operation)
    assert choice.backend in backend.NAMES and choice.operation == operation
    assert "not triton:" in choice.reason


def test_an_unknown_backend_names_the_choices():
    with pytest.raises(ValueError, match="backend is 'cuda'; it must be one of auto, triton, fla, native, chunk, reference"):
        backend.choose("comba", "cuda")


def test_a_backend_that_cannot_run_the_inputs_says_why():
    q = torch.randn(1, 3, 1, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run retention: .*float64|triton"):
        ops.retention(q, q, q, -torch.rand(1, 3, 1, dtype=torch.float64), backend="triton")


def titans(dtype):
    torch.manual_seed(0)
    B, T, H, D, F = 2, 37, 2, 32, 64
    q, k, v = (torch.nn.functional.normalize(torch.randn(B, T, H, D), dim=-1).to(dtype) for _ in range(3))
    theta, alpha, eta = ((torch.rand(B, T, H) * s).to(dtype) for s in (0.05, 0.1, 0.9))
    weights = [(torch.randn(H, D, F) / D**0.5).to(dtype), (torch.randn(H, F, D) / F**0.5).to(dtype)]
    activation = ActivationSchedule(4, 32).activation(F, T)
    return (q, k, v, theta, alpha, eta, weights), {"chunk": 16, "activation": activation, "output_final_state": True}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_titans_by_its_kernels_equals_the_oracle_state_included():
    arguments, keywords = titans(torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [x.to(device) for x in arguments[:6]]
    keywords["activation"] = ActivationSchedule(4, 32).activation(64, 37, device=device)
    out, state = ops.titans_memory(*tensors, [w.to(device) for w in arguments[6]], backend="triton", **keywords)
    right, right_state = reference.titans_memory(*titans(torch.float64)[0], **titans(torch.float64)[1])
    torch.testing.assert_close(out.cpu().double(), right, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(state.weights, right_state.weights):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-3, atol=1e-3)


def test_titans_kernels_refuse_with_a_reason():
    arguments, keywords = titans(torch.float64)
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run titans_memory: .*; use backend='auto'"):
        ops.titans_memory(*arguments, backend="triton", **keywords)


def test_auto_multiplies_in_tf32_only_where_pytorch_may():
    (q, k, v, theta, alpha, eta, weights), keywords = titans(torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = [t.to(device) for t in (q, k, v, theta, alpha, eta)]
    weights = [w.to(device) for w in weights]
    assert "tf32" in deep.refusals(tokens, weights, keywords["chunk"])["triton"]
    assert deep.refusals(tokens, weights, keywords["chunk"], backend="triton")["triton"] is None
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert deep.refusals(tokens, weights, keywords["chunk"])["triton"] is None
    finally:
        torch.set_float32_matmul_precision(before)


def test_auto_keeps_the_interpreter_for_those_who_ask_by_name():
    q = torch.randn(1, 3, 1, 16)
    choice = backend.explain("retention", q, q, q, q[..., 0])
    assert choice.backend == "chunk"
    assert "tensors are on cpu" in choice.reason
