"""The kernels around MAC's memory equal PyTorch in fp64, in Triton's interpreter (fp32, no GPU), every gradient."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed")


from proteus_lm.mixers.rotary import rotary_angles, rotate
from proteus_lm.ops import triton_deep, triton_mac
from proteus_lm.ops.memory_read import titans_read

TOLERANCE = 1e-5  # fp32 sums of some hundred terms; found: 4e-7


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def same(found, right) -> None:
    """Root mean square error over that of the right values."""
    for a, b in zip(found, right, strict=True):
        assert a.shape == b.shape
        assert (a.detach().double() - b.detach()).norm() <= TOLERANCE * b.detach().norm().clamp(min=1e-9)


def both(ours, theirs, leaves: list[Tensor]) -> None:
    """Outputs and gradients of `ours` in fp32 against `theirs` in fp64."""
    results = []
    for function, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        given = [t.to(dtype).clone().requires_grad_() for t in leaves]
        out = function(*given)
        loss = torch.stack([(t * numbers(*t.shape, seed=9).to(dtype)).sum() for t in out]).sum()
        results.append([*out, *torch.autograd.grad(loss, given)])
    same(*results)


@pytest.mark.parametrize(("rows", "opened"), [(2, None), (1, "shared"), (2, "each")])
@pytest.mark.parametrize(("hidden", "function"), [(48, "gelu_tanh"), (160, "silu")])
def test_a_still_read_equals_titans_read_and_adds_to_the_gradient_that_passes(rows, opened, hidden, function):
    length, heads, dim, chunk = 32, 2, 32, 16
    weights = [numbers(rows, heads, dim, hidden) / 6, numbers(rows, heads, hidden, dim) / 6]
    momentum = [numbers(*w.shape, seed=3) for w in weights]
    active = torch.full((1, length), hidden)
    if opened is not None:
        active = (20 + torch.arange(length) // 5)[None]
    if opened == "each":
        active = torch.cat([active, active + 4])

    def ours(q, *parts):
        cells = triton_deep.pack(parts[:2], parts[2:])
        y, cells = triton_mac.still_read(q, cells, active.int(), hidden, dim, chunk, function)
        return [y, *triton_deep.unpack(cells, parts)]

    def theirs(q, *parts):
        return [titans_read(parts[:2], q, active, memory_activation=function), *parts]

    both(ours, theirs, [numbers(rows, length, heads, dim), *weights, *momentum])


def test_a_still_read_takes_what_gradients_there_are():
    weights = [numbers(1, 1, 32, 48) / 6, numbers(1, 1, 48, 32) / 6]
    active = torch.full((1, 16), 48)

    def ours(q, *weights):
        cells = triton_deep.pack(weights, [torch.zeros_like(w) for w in weights])
        return triton_mac.still_read(q, cells, active.int(), 48, 32, 16, "silu")

    leaves = [numbers(1, 16, 1, 32), *weights]
    both(
        lambda *given: ours(*given)[:1], lambda *given: [titans_read(given[1:], given[0], active, memory_activation="silu")], leaves
    )
    passed = lambda q, *weights: [q, triton_deep.pack(weights, [torch.zeros_like(w) for w in weights]).to(q.dtype)]  # noqa: E731
    both(lambda *given: [given[0], ours(*given)[1]], passed, leaves)


def test_a_still_read_leaves_what_is_locked_to_all_queries_alone():
    hidden, length = 48, 32
    weights = [numbers(1, 1, 32, hidden).float(), numbers(1, 1, hidden, 32).float()]
    weights[0][..., 20:], weights[1][:, :, 20:] = float("nan"), float("nan")
    cells = triton_deep.pack(weights, [torch.zeros_like(w) for w in weights]).requires_grad_()
    q = numbers(1, length, 1, 32).float().requires_grad_()
    y, _ = triton_mac.still_read(q, cells, torch.full((1, length), 20, dtype=torch.int32), hidden, 32, 16, "silu")
    assert y.isfinite().all() and all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (q, cells)))


@pytest.mark.parametrize(("alpha", "eta"), [(True, True), (True, False), (False, True), (False, False)])
def test_step_sizes_equal_sigmoids(alpha, eta):
    heads, scale = 3, 0.25

    def theirs(z):
        theta, *rest = z.split(heads, -1)
        found = [scale * theta.sigmoid(), torch.zeros_like(theta), torch.zeros_like(theta)]
        if alpha:
            found[1] = rest[0].sigmoid()
        if eta:
            found[0], found[2] = found[0] * torch.sigmoid(-rest[-1]), rest[-1].sigmoid()
        return found

    both(lambda z: triton_mac.step_sizes(z, heads, alpha, eta, scale), theirs, [3 * numbers(2, 211, heads * (1 + alpha + eta))])


@pytest.mark.parametrize("front", [0, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_places_are_those_that_attention_would_put_together(rows, front):
    length, heads, dim = 7, 3, 8
    angles = rotary_angles(torch.arange(5, 5 + length)[None], dim, torch.float64)[:, :, None].expand(rows, -1, -1, -1)

    turn = angles.cos(), angles.sin()

    def ours(whole, made, front=None):
        k, v = (t[:, 2 : 2 + length] for t in whole.unbind(2))  # as a segment of a longer forward
        cosine, sine = (t.to(made.dtype) for t in turn)
        return triton_mac.places(made, cosine, sine, k, v, front)

    def theirs(whole, made, front=None):
        k, v = (t[:, 2 : 2 + length] for t in whole.unbind(2))
        keys, values = made.unbind(2)
        keys, values = torch.cat((rotate(keys, turn), k), 1), torch.cat((values, v), 1)
        if front is None:
            return keys, values
        first, second = (t.expand(rows, -1, -1, -1) for t in front.unbind(1))
        return torch.cat((pad(first, (dim, 0)), pad(keys, (0, dim))), 1), torch.cat((second, values), 1)

    leaves = [numbers(rows, length + 4, 2, heads, dim), numbers(rows, length, 2, heads, dim)]
    both(ours, theirs, [*leaves, numbers(front, 2, heads, dim)] if front else leaves)
