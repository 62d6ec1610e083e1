"""The kernels of MAC's segments equal PyTorch in fp64, in Triton's interpreter (fp32 and fp16, no GPU), every gradient."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed")


from proteus_lm.mixers.attention import Prefix, softmax_read
from proteus_lm.mixers.rotary import rotary_angles, rotate
from proteus_lm.ops import triton_deep, triton_mac
from proteus_lm.ops.late_linear import LateSum
from proteus_lm.ops.memory_read import titans_read

TOLERANCE = 1e-5  # fp32 sums of some hundred terms; found: 4e-7


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def same(found, right, tolerance: float = TOLERANCE) -> None:
    """Root mean square error over that of the right values."""
    for a, b in zip(found, right, strict=True):
        assert a.shape == b.shape
        assert (a.detach().double() - b.detach()).norm() <= tolerance * b.detach().norm().clamp(min=1e-9)


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


HALF = 1e-3  # factors of products and results in fp16, 2^-11 each; found: 5e-4


def turn_of(rows: int, length: int, dim: int) -> tuple[Tensor, Tensor]:
    """fp64, of rows at positions of their own."""
    places = torch.arange(5, 5 + length)[None] + 7 * torch.arange(rows)[:, None]
    angles = rotary_angles(places, dim, torch.float64)[:, :, None]
    return angles.cos(), angles.sin()


def attended(turn: tuple[Tensor, Tensor], whole: Tensor, q: Tensor, made: Tensor, front: Tensor | None = None) -> Tensor:
    """By the kernel. `whole` (N, T + 4, 3, H, D) holds queries not turned, keys and values, from its place 2 on."""
    plain, k, v = (t[:, 2 : 2 + q.shape[1]] for t in whole.unbind(2))  # views, as of a segment of a longer forward
    cosine, sine = (t.float() for t in turn)
    return triton_mac.attend(q, plain, made, cosine, sine, k, v, None if front is None else LateSum(front))


def attended_by_torch(turn: tuple[Tensor, Tensor], whole: Tensor, q: Tensor, made: Tensor, front: Tensor | None = None) -> Tensor:
    """As `attended`, by `softmax_read`."""
    length, count = q.shape[1], 0 if front is None else len(front)
    plain, k, v = (t[:, 2 : 2 + length] for t in whole.unbind(2))
    keys, values = made.unbind(2)
    keys, values = torch.cat((rotate(keys, turn), k), 1), torch.cat((values, v), 1)
    mask = pad(torch.ones(length, length, dtype=torch.bool).tril().repeat(1, 2), (count, 0), value=True)[None, None]
    if front is None:
        return softmax_read(q, keys, values, mask)
    return softmax_read(torch.cat((q, plain), -1), keys, values, mask, Prefix(*front.unbind(1)))


def attention_leaves(rows: int, length: int, heads: int, dim: int, count: int) -> list[Tensor]:
    q, made = numbers(length, rows, heads, dim).transpose(0, 1), numbers(rows, length, 2, heads, dim)
    leaves = [numbers(rows, length + 4, 3, heads, dim), q, made]
    return [*leaves, numbers(count, 2, heads, dim)] if count else leaves


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "turned", "length", "heads", "dim", "count"),
    [
        (2, 2, 16, 2, 16, 3),
        (2, 1, 48, 1, 64, 0),
        (1, 1, 80, 2, 64, 17),  # tiles of queries, of places and of the prefix that end inside
        (2, 2, 128, 1, 16, 0),
        (1, 1, 96, 2, 24, 70),  # heads that are no power of two; more than one tile of prefix
        (1, 1, 20, 1, 128, 3),
    ],
)
def test_attention_of_a_segment_equals_softmax_read_with_every_gradient(rows, turned, length, heads, dim, count, dtype):
    turn, leaves = turn_of(turned, length, dim), attention_leaves(rows, length, heads, dim, count)
    leaves, results = [t.to(dtype) for t in leaves], []
    for function, kind in ((attended, dtype), (attended_by_torch, torch.float64)):
        given = [t.to(kind).requires_grad_() for t in leaves]
        y = function(turn, *given)
        assert y.shape == (rows, length, heads, dim) and y.dtype == kind
        results.append([y, *torch.autograd.grad(y, given, numbers(*y.shape, seed=9).to(dtype).to(kind))])
    assert results[0][0].is_contiguous()
    same(results[0], results[1], TOLERANCE if dtype == torch.float32 else HALF)


def test_attention_sees_no_later_token_and_no_other_row_bit_for_bit():
    rows, length, cut = 2, 48, 21
    turn, leaves = turn_of(rows, length, 16), [t.float() for t in attention_leaves(rows, length, 1, 16, 3)]
    grad = numbers(rows, length, 1, 16, seed=9).float()

    def results(leaves: list[Tensor], turn: tuple[Tensor, Tensor], grad: Tensor) -> list[Tensor]:
        given = [t.clone().requires_grad_() for t in leaves]
        y = attended(turn, *given)
        return [y, *torch.autograd.grad(y, given[:3], grad)]

    found = results(leaves, turn, grad)
    alone = results([*(t[1:] for t in leaves[:3]), leaves[3]], (turn[0][1:], turn[1][1:]), grad[1:])
    for a, b in zip(found, alone):
        assert torch.equal(a[1:], b)
    whole, q, made, front = (t.clone() for t in leaves)
    whole[:, 2 + cut :], q[:, cut:], made[:, cut:] = 3.0, -2.0, 5.0
    later = results([whole, q, made, front], turn, grad)
    assert torch.equal(later[0][:, :cut], found[0][:, :cut])
    grad[:, cut:] = 0.0
    before = results(leaves, turn, grad)
    for a in before[1:]:
        assert not a[:, cut + 2 if a is before[1] else cut :].any()


def test_attention_with_large_scores_has_no_nan_and_falls_on_one_place():
    turn, leaves = turn_of(1, 48, 16), [(300 * t).float() for t in attention_leaves(1, 48, 1, 16, 3)]
    given = [t.clone().requires_grad_() for t in leaves]
    y = attended(turn, *given)
    right = attended_by_torch(turn, *(t.double() for t in leaves))
    # Scores of 1e5 in fp32 err by some 1e-2, and so do shares; most queries have one place far ahead.
    assert (y.double() - right).norm() <= 2e-2 * right.norm()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), given))


def test_attention_gives_the_prefix_one_gradient_for_all_segments():
    turn, leaves = turn_of(2, 16, 16), [t.float() for t in attention_leaves(2, 16, 1, 16, 3)]
    whole, q, made = leaves[:3]
    front = leaves[3].half().requires_grad_()  # the sum is taken in fp32, and rounded once
    late = LateSum(front)
    plain, k, v = (t[:, 2:18].half() for t in whole.unbind(2))
    cosine, sine = (t.float() for t in turn)
    parts = [triton_mac.attend(q.half() * n, plain, made.half(), cosine, sine, k, v, late).float() for n in range(1, 5)]
    loss = torch.stack(parts).sum()
    (found,) = torch.autograd.grad(loss, front, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, front)[0], found)
    given = front.detach().double().requires_grad_()
    halves = [whole.half().double(), q.half().double(), made.half().double()]
    right = [attended_by_torch(turn, halves[0], halves[1] * n, halves[2], given) for n in range(1, 5)]
    same([found], torch.autograd.grad(torch.stack(right).sum(), given), HALF)
