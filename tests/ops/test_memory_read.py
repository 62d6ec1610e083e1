"""Reading a memory that stands still equals what the scan reads where nothing is written."""

from __future__ import annotations

import pytest
import torch

from proteus_lm import ActivationSchedule
from proteus_lm.ops import reference, titans_memory
from proteus_lm.ops.memory_read import titans_read, titans_surprise

N, L, H, D, F = 2, 7, 3, 5, 8


def case(depth, dtype=torch.float64):
    generator = torch.Generator().manual_seed(depth)
    sides = [D, *[F] * (depth - 1), 4]
    weights = [torch.randn(N, H, i, o, dtype=dtype, generator=generator) for i, o in zip(sides, sides[1:])]
    return weights, torch.randn(N, L, H, D, dtype=dtype, generator=generator)


@pytest.mark.parametrize("memory_activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_read_is_that_of_a_scan_without_momentum_and_steps(depth, blocks, memory_activation):
    weights, q = case(depth)
    units = F if depth > 1 else D
    activation = ActivationSchedule(blocks, 8).activation(units, L, offset=[0, 3])
    still = torch.zeros(N, L, H, dtype=torch.float64)
    zeros = [torch.zeros_like(w) for w in weights]
    k, v = torch.randn(N, L, H, D, dtype=torch.float64), torch.randn(N, L, H, 4, dtype=torch.float64)
    wanted, _ = titans_memory(
        *(q, k, v, still, still, still + 1, [w[0] for w in weights]),
        chunk=3,
        activation=activation,
        initial_state=(weights, zeros),
        memory_activation=memory_activation,
    )
    got = titans_read(weights, q, activation.active, memory_activation=memory_activation)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    if blocks == 1:
        torch.testing.assert_close(titans_read(weights, q, memory_activation=memory_activation), got, rtol=0, atol=0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_no_query_of_a_row_sees_reaches_neither_result_nor_gradient(depth):
    results = []
    for value in (0.0, float("nan")):
        weights, q = case(depth)
        units = weights[-1].shape[2]
        active = torch.tensor([[1, 1, 2, 2, 2, 3, 3], [3] * 7])
        for i, w in enumerate(weights):
            if i > 0 or depth == 1:
                w[:, :, 3:] = value
            if i < depth - 1:
                w[..., 3:] = value
        q.requires_grad_()
        out = titans_read(weights, q, active.clamp(max=units))
        out.square().sum().backward()
        results.append((out.detach(), q.grad))
    assert all(torch.equal(one, two) for one, two in zip(*results))


def test_gradients_reach_weights_and_queries():
    weights, q = case(3)
    leaves = [t.requires_grad_() for t in (*weights, q)]
    active = torch.tensor([[1, 2, 3, 4, 5, 6, 8]])
    assert torch.autograd.gradcheck(lambda *t: titans_read(t[:-1], t[-1], active), leaves)


def test_a_read_is_in_fp32_under_autocast():
    weights, q = case(2, torch.float32)
    right = titans_read(weights, q)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(titans_read(weights, q), right)
    assert titans_read(weights, q.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w, q: (w, q[0], None), "must be"),
        (lambda w, q: ([], q, None), "at least one"),
        (lambda w, q: (w[::-1], q, None), "W1"),
        (lambda w, q: (w, q, torch.ones(3, L, dtype=torch.int64)), "active"),
        (lambda w, q: (w, q, torch.ones(1, L + 1, dtype=torch.int64)), "active"),
    ],
)
def test_shapes_that_do_not_fit_raise(change, words):
    with pytest.raises(ValueError, match=words):
        titans_read(*change(*case(2)))


@pytest.mark.parametrize("memory_activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_surprise_is_the_norm_of_the_inner_gradients_of_the_open_chunk(depth, memory_activation):
    weights, q = case(depth)
    v = torch.randn(N, L, H, 4, dtype=torch.float64)
    gates = [torch.full((N, L, H), x, dtype=torch.float64) for x in (0.05, 0.1, 0.5)]
    activation = ActivationSchedule(4, 8).activation(F if depth > 1 else D, L, offset=[0, 3])
    common = {"chunk": 5, "activation": activation, "output_final_state": True, "memory_activation": memory_activation}
    _, state = titans_memory(q, q, v, *gates, [w[0] for w in weights], **common)
    got = titans_surprise(state, memory_activation=memory_activation)
    for row, count in ((0, 2), (1, 0)):  # positions 5, 6 are open in row 0; row 1 ends at 10, a boundary
        norms = []
        for i in range(count):
            masks = reference._layer_masks(state.active[row : row + 1, i], state.weights, memory_activation)
            opened = [torch.where(m, w[row : row + 1], 0.0) for m, w in zip(masks, state.weights)]
            parts = reference.inner_gradient(opened, state.k[row : row + 1, i], state.v[row : row + 1, i], memory_activation)
            kept = [torch.where(m, p, 0.0).square().sum((-1, -2)) for m, p in zip(masks, parts)]
            norms.append(sum(kept).sqrt().mean())
        wanted = torch.stack(norms).mean() if norms else torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(got[row], wanted, rtol=1e-12, atol=1e-12)


def test_a_residual_memory_is_read_and_surprised_through_its_norm():
    """Its parts are checked against a read by hand and automatic differentiation of the loss."""
    weights, q = case(2)
    weights = [weights[0], torch.randn(N, H, F, D, dtype=torch.float64)]
    norm = torch.randn(H, D, dtype=torch.float64), torch.randn(H, D, dtype=torch.float64)

    def memory(leaves, x, head):
        z = torch.nn.functional.gelu(x @ leaves[0], approximate="tanh") @ leaves[1]
        return x + torch.nn.functional.layer_norm(z, (D,), norm[0][head], norm[1][head], eps=1e-6)

    got = titans_read(weights, q, residual_norm=norm)
    for row in range(N):
        for head in range(H):
            wanted = memory([w[row, head] for w in weights], q[row, :, head], head)
            torch.testing.assert_close(got[row, :, head], wanted, rtol=1e-12, atol=1e-12)
    gates = [torch.full((N, L, H), x, dtype=torch.float64) for x in (0.05, 0.1, 0.5)]
    v = torch.randn(N, L, H, D, dtype=torch.float64)
    start = [w[0] for w in weights]
    _, state = titans_memory(q, q, v, *gates, start, chunk=L + 1, residual_norm=norm, output_final_state=True)
    norms = torch.zeros(N, dtype=torch.float64)
    for row in range(N):
        for head in range(H):
            for i in range(L):
                leaves = [w[head].clone().requires_grad_() for w in start]
                loss = 0.5 * (memory(leaves, q[row, i, head], head) - v[row, i, head]).square().sum()
                parts = torch.autograd.grad(loss, leaves)
                norms[row] += sum(p.square().sum() for p in parts).sqrt() / (H * L)
    torch.testing.assert_close(titans_surprise(state, residual_norm=norm), norms, rtol=1e-10, atol=1e-10)
