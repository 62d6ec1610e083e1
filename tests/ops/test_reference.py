"""The oracle equals the independent right values: outputs, final states and gradients of every file."""

from __future__ import annotations

import pytest
import torch

from proteus_lm.ops import reference
from tests.ops import vectors

ROWS = vectors.index()
pytestmark = pytest.mark.shared


def run(vector: vectors.Vector):
    operation = getattr(reference, vector.operation)
    if vector.operation == "titans_memory":
        return operation(*vector.inputs.values(), [vector.arrays[w] for w in vector.weights], **vector.keywords)
    return operation(*vector.inputs.values(), **vector.keywords)


@pytest.mark.parametrize("row", [r for r in ROWS if not r.get("gradients")], ids=lambda r: r["file"])
def test_oracle_equals_right_values(row):
    vector = vectors.load(row)
    out, state = run(vector)
    if vector.operation == "titans_memory":
        assert vectors.error(out, vector.arrays["y"]) < 1e-12
        weights, momentum = reference.titans_weights(state)
        for i in range(vector.depth):
            assert vectors.error(weights[i], vector.arrays[f"final_W{i + 1}"]) < 1e-12
            assert vectors.error(momentum[i], vector.arrays[f"final_S{i + 1}"]) < 1e-12
    else:
        assert vectors.error(out, vector.arrays["o"]) < 1e-12
        matrix = state.matrix if vector.operation == "swla" else state
        assert vectors.error(matrix, vector.arrays["final_state"]) < 1e-12


@pytest.mark.parametrize("row", [r for r in ROWS if r.get("gradients")], ids=lambda r: r["file"])
def test_oracle_gradients_equal_central_differences(row):
    vector = vectors.load(row)
    leaves = {n: x.requires_grad_() for n, x in vector.inputs.items()}
    leaves |= {w: vector.arrays[w].requires_grad_() for w in vector.weights}
    out, state = run(vector)
    loss = (out * vector.arrays["weight_o"]).sum()
    if "weight_state" in vector.arrays:
        matrix = state.matrix if vector.operation == "swla" else state
        loss = loss + (matrix * vector.arrays["weight_state"]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    for name, gradient in zip(leaves, gradients):
        assert vectors.error(gradient, vector.arrays[f"grad_{name}"]) < 1e-6, name


def test_every_operation_has_vectors(shared):
    assert {r["rule"] for r in ROWS} == set(vectors.OPERATIONS)


@pytest.mark.parametrize(
    ("depth", "function"), [*((d, f) for d in (1, 2, 3) for f in ("gelu_tanh", "silu")), *((d, "swiglu") for d in (2, 3, 4))]
)
def test_inner_gradient_equals_autograd(depth, function):
    torch.manual_seed(depth)
    sizes, arity = [5, *[7] * (depth - 1), 4], 2 if function == "swiglu" else 1
    *hidden, last = zip(sizes, sizes[1:])
    shapes = [*(shape for shape in hidden for _ in range(arity)), last]
    weights = [torch.randn(2, 3, a, b, dtype=torch.float64, requires_grad=True) for a, b in shapes]
    k, v = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    loss = 0.5 * (reference._apply(weights, k, function)[0] - v).square().sum()
    right = torch.autograd.grad(loss, weights)
    for ours, theirs in zip(reference.inner_gradient(weights, k, v, function), right):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_a_gated_memory_is_silu_of_the_gate_times_the_value():
    torch.manual_seed(0)
    shapes = [(5, 7), (5, 7), (7, 6), (7, 6), (6, 4)]
    a, b, c, d, e = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    x = torch.randn(5, dtype=torch.float64)
    silu = torch.nn.functional.silu
    hidden = silu(x @ a) * (x @ b)
    for weights, right in (([a, b, c], hidden @ c), ([a, b, c, d, e], (silu(hidden @ c) * (hidden @ d)) @ e)):
        got, _, _ = reference._apply([w[None, None] for w in weights], x[None, None], "swiglu")
        torch.testing.assert_close(got[0, 0], right, rtol=0, atol=1e-12)


def test_titans_oracle_continues_from_its_own_state():
    torch.manual_seed(0)
    from proteus_lm import ActivationSchedule

    B, T, H, D, F = 2, 23, 2, 4, 8
    q, k, v = (torch.randn(B, T, H, D, dtype=torch.float64) for _ in range(3))
    theta, alpha, eta = (torch.rand(B, T, H, dtype=torch.float64) * s for s in (0.2, 0.1, 0.9))
    weights = [torch.randn(H, D, F, dtype=torch.float64), torch.randn(H, F, D, dtype=torch.float64)]
    schedule = ActivationSchedule(4, 16)
    whole, final = reference.titans_memory(
        *(q, k, v, theta, alpha, eta, weights), chunk=5, activation=schedule.activation(F, T), output_final_state=True
    )
    state, outs = None, []
    for a, b in [(0, 3), (3, 4), (4, 13), (13, 23)]:
        out, state = reference.titans_memory(
            *(x[:, a:b] for x in (q, k, v, theta, alpha, eta)),
            weights,
            chunk=5,
            activation=schedule.activation(F, b - a, offset=a),
            initial_state=state,
            output_final_state=True,
        )
        outs.append(out)
    assert torch.allclose(torch.cat(outs, 1), whole, atol=1e-13)
    for ours, right in zip(state, final):
        for x, y in zip(*((ours, right) if isinstance(ours, tuple) else ([ours], [right]))):
            assert torch.allclose(x, y, atol=1e-13)
