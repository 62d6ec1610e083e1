"""A map with a late gradient equals `linear`, used once or many times, whatever needs a gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from proteus_lm.ops.late_linear import LateLinear, LateSum


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (1, 2)])
def test_every_gradient_of_a_chain_of_uses(bias, frozen):
    leaves = [numbers(2, 3, 5), numbers(5, 5) / 3, numbers(5)]
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i not in frozen and (i < 2 or bias))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    results = []
    for late in (True, False):
        x, weight, b = leaves[0], leaves[1], leaves[2] if bias else None
        of = LateLinear(weight, b, torch.float64) if late else lambda x, w=weight, b=b: linear(x, w, b)
        first = of(x)
        third = of(of(first.sin()).cos()) + first
        results.append([third, *torch.autograd.grad(third.square().sum(), wanted)])
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)  # fp64; sums in another order


def test_a_second_backward_of_a_kept_graph_gives_the_same():
    x, weight = numbers(4, 5).requires_grad_(), numbers(3, 5).requires_grad_()
    loss = LateLinear(weight, None, torch.float64)(x).square().sum()
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, (x, weight))):
        assert torch.equal(a, b)


def test_sixty_four_uses_round_the_sum_once():
    x, weight = numbers(64, 8, 16), numbers(16, 16)
    right = torch.einsum("sti,sto->oi", x.bfloat16().double(), torch.ones(64, 8, 16, dtype=torch.float64))
    given = weight.float().requires_grad_()
    of = LateLinear(given, None, torch.bfloat16)
    (found,) = torch.autograd.grad(sum((of(part.float()).sum() for part in x), torch.zeros(())), given)
    assert found.dtype == torch.float32
    # One rounding to bf16 of a sum taken in fp32: half of 2^-8. Sixty-four sums in bf16 err several times that.
    assert ((found.double() - right).abs() <= 2.0**-8 * right.abs() + 1e-6).all()


def test_no_gradient_is_kept_where_none_is_wanted():
    of = LateLinear(numbers(3, 5).requires_grad_(), None, torch.float64)
    with torch.no_grad():
        assert not of(numbers(4, 5)).requires_grad
        assert not LateLinear(numbers(3, 5).requires_grad_(), None, torch.float64)(numbers(4, 5).requires_grad_()).requires_grad


def test_a_backward_to_inputs_alone_leaves_nothing_behind_for_the_next():
    weight, x = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    late = LateLinear(weight, None, torch.float32)
    y = late(x).sum() + late(2 * x).sum()
    right = torch.autograd.grad(linear(3 * x, weight).sum(), weight)[0]
    torch.autograd.grad(y, x, retain_graph=True)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(y, weight, retain_graph=True)[0], right)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_narrow_input_of_a_wide_map_has_its_gradient_from_narrow_factors_and_the_weight_a_wide_one(narrow):
    x, weight, bias, dy = numbers(64, 32).to(narrow), numbers(12, 32), numbers(12), numbers(64, 12)
    given = [x.clone(), weight.float(), bias.float()]
    for leaf in given:
        leaf.requires_grad_()
    y = LateLinear(given[1], given[2], torch.float32)(given[0])
    assert y.dtype == torch.float32
    found = torch.autograd.grad(y, given, dy.float())
    right = [dy @ weight, dy.mT @ x.double(), dy.sum(0)]
    assert [g.dtype for g in found] == [narrow, torch.float32, torch.float32]
    # The product and its two factors are rounded to the narrow type: half of eps each, at worst all one way. The others are fp32.
    for a, b, tolerance in zip(found, right, (1.5 * torch.finfo(narrow).eps, 1e-6, 1e-6)):
        assert (a.double() - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wide_input_is_multiplied_in_its_own_type_bit_for_bit(dtype):
    x, weight, bias, dy = (t.to(dtype) for t in (numbers(64, 32), numbers(12, 32), numbers(12), numbers(64, 12)))
    given = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = LateLinear(given[1], given[2], dtype)(given[0])
    assert torch.equal(y, linear(x, weight, bias))
    for a, b in zip(torch.autograd.grad(y, given, dy), (dy @ weight, dy.mT @ x, dy.sum(0)), strict=True):
        assert torch.equal(a, b)


class _Times(torch.autograd.Function):
    """x (rows, 3) times a late tensor (3,), which gets its gradient from `add`."""

    @staticmethod
    def forward(ctx, x, late, end):
        ctx.late, ctx.node = late, None if end is None else end.grad_fn
        ctx.save_for_backward(x)
        return x * late.value

    @staticmethod
    def backward(ctx, dy):
        ctx.late.add(dy * ctx.saved_tensors[0], ctx.node)
        return dy * ctx.late.value, None, None


def test_a_late_sum_gets_its_gradient_once_and_beside_that_of_other_uses():
    parts, given = numbers(5, 4, 3).requires_grad_(), numbers(3).requires_grad_()
    late = LateSum(given)
    y = torch.stack([_Times.apply(x, late, late.end) for x in parts]).sum() + (2 * given).sum()
    (alone,) = torch.autograd.grad(y, parts, retain_graph=True)  # leaves nothing behind for the next
    torch.testing.assert_close(alone, given.detach().expand_as(parts))
    for _ in range(2):
        (found,) = torch.autograd.grad(y, given, retain_graph=True)
        torch.testing.assert_close(found, parts.detach().sum((0, 1)) + 2, rtol=1e-12, atol=1e-12)  # fp64; another order


def test_a_late_sum_rounds_once_and_waits_for_nothing_where_no_gradient_is_wanted():
    given = numbers(3).bfloat16().requires_grad_()
    late = LateSum(given)
    x = numbers(64, 4, 3).float()
    (found,) = torch.autograd.grad(torch.stack([_Times.apply(part.requires_grad_(), late, late.end) for part in x]).sum(), given)
    assert found.dtype == torch.bfloat16 and torch.equal(found, x.flatten(0, 1).sum(0).bfloat16())
    assert LateSum(given.detach()).end is None
    with torch.no_grad():
        assert LateSum(given).end is None


class _Fails(torch.autograd.Function):
    """Whose first backward fails, as one does that finds no memory."""

    @staticmethod
    def forward(ctx, x, tries):
        ctx.tries = tries
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.tries.append(1)
        if len(ctx.tries) == 1:
            raise MemoryError
        return dy, None


@pytest.mark.parametrize("kind", ["linear", "sum"])
def test_a_backward_that_failed_leaves_nothing_behind_for_the_next(kind):
    given = (numbers(3, 3) if kind == "linear" else numbers(3)).requires_grad_()
    late = LateLinear(given, None, torch.float64) if kind == "linear" else LateSum(given)
    use = late if isinstance(late, LateLinear) else lambda x: _Times.apply(x, late, late.end)
    y = use(_Fails.apply(use(numbers(5, 3).requires_grad_()), []))  # the second use has had its backward when the first cannot
    with pytest.raises(MemoryError):
        y.sum().backward(retain_graph=True)
    (found,) = torch.autograd.grad(y.sum(), given, retain_graph=True)
    assert given.grad is None and torch.equal(torch.autograd.grad(y.sum(), given)[0], found)
