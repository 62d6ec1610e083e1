"""The loss by pieces equals that of whole logits: value and gradients, in every type, eager, compiled, and by the GPU kernel.

The kernel runs in Triton's interpreter where no GPU is; `tests/conftest.py` asks for it.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from proteus_lm.ops import cross_entropy as pieces
from proteus_lm.ops import triton_neighbours
from proteus_lm.ops.cross_entropy import linear_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Root mean square, relative. fp64 and fp32: roundings of sums of some hundred terms. 16 bits: logits and gradients are rounded to
# 10 or 8 bits, by the whole logits as well; the loss is compared at the same logits, where its sum is fp32.
LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of 8 tokens or so, so that few tokens make several."""
    monkeypatch.setattr(pieces, "CPU_BYTES", 1)
    monkeypatch.setattr(pieces, "CPU_TOKENS", 8)
    monkeypatch.setattr(pieces, "GPU_BYTES", 1)
    monkeypatch.setattr(pieces, "ROUND", 8)


def given(tokens: int, words: int, dtype: torch.dtype = torch.float64, dim: int = 16, ignored: int = 3):
    """Hidden states, weight, targets of which every third is ignored."""
    random = torch.Generator().manual_seed(tokens + words)
    hidden, weight = torch.randn(tokens, dim, generator=random), torch.randn(words, dim, generator=random)
    targets = torch.randint(0, words, (tokens,), generator=random)
    targets[::ignored] = -100
    return hidden.to(DEVICE, dtype).requires_grad_(), weight.to(DEVICE, dtype).requires_grad_(), targets.to(DEVICE)


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """The same from all logits."""
    logits = linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction="sum")


def loss_and_gradients(function, hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> list[Tensor]:
    loss = function(hidden, weight, targets, **options) / 7
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


def assert_near(ours: list[Tensor], right: list[Tensor], limit: float) -> None:
    for one, two in zip(ours, right, strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype
        assert (one.double() - two.double()).norm() <= limit * two.double().norm(), (one, two)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tokens", [1, 8, 21])
def test_it_is_the_loss_of_whole_logits_and_so_are_its_gradients(tokens, dtype):
    inputs = given(tokens, 31, dtype, ignored=2 + tokens)
    assert_near(loss_and_gradients(linear_cross_entropy, *inputs), loss_and_gradients(whole, *inputs), LIMITS[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_only_products_are_of_16_bits(dtype):
    inputs = given(21, 31, torch.float32)
    with torch.autocast(DEVICE, dtype):
        ours, right = loss_and_gradients(linear_cross_entropy, *inputs), loss_and_gradients(whole, *inputs)
        wide = given(21, 31)
        assert_near(loss_and_gradients(linear_cross_entropy, *wide), loss_and_gradients(whole, *wide), LIMITS[torch.float64])
    assert_near(ours[:1], right[:1], LIMITS[torch.float32])  # of the same logits, rounded as `linear` rounds them
    assert_near(ours, right, LIMITS[dtype])


def test_a_gradient_of_16_bits_is_scaled_in_fp32():
    """1 / 3 rounded to bf16 is 0.2 % off, in every number alike."""
    hidden, weight, targets = given(21, 31, torch.bfloat16)
    one = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    third = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets) / 3, (hidden, weight))
    for a, b in zip(one, third):
        assert abs((3 * b.double()).norm() / a.double().norm() - 1) < 5e-4


def test_hidden_states_of_any_shape():
    hidden, weight, targets = given(24, 31)
    shaped = linear_cross_entropy(hidden.view(2, 3, 4, 16).transpose(0, 1), weight, targets.view(2, 3, 4).transpose(0, 1))
    assert_near([shaped.detach()], [whole(hidden, weight, targets).detach()], 1e-13)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_gradients_that_are_wanted_are_made(wanted, monkeypatch):
    hidden, weight, targets = given(21, 31)
    right = loss_and_gradients(whole, hidden, weight, targets)
    made, by_pieces = [], pieces._by_pieces
    monkeypatch.setattr(pieces, "_by_pieces", lambda *x: made.append(by_pieces(*x)) or made[-1])
    leaves = [x.detach().requires_grad_(w) for x, w in zip((hidden, weight), wanted)]
    loss = linear_cross_entropy(*leaves, targets) / 7
    asked = [x for x, w in zip(leaves, wanted) if w]
    assert len(made[0]) == 1 + len(asked) and loss.requires_grad == any(wanted)
    ours = [loss.detach(), *(torch.autograd.grad(loss, asked) if asked else [])]
    assert_near(ours, [right[0], *(g for g, w in zip(right[1:], wanted) if w)], 1e-13)
    with torch.no_grad():
        quiet = linear_cross_entropy(hidden, weight, targets) / 7
    assert len(made[1]) == 1 and not quiet.requires_grad
    assert_near([quiet], right[:1], 1e-13)


def test_where_nothing_is_scored_loss_and_gradients_are_zero():
    for tokens in (9, 0):
        for x in loss_and_gradients(linear_cross_entropy, *given(tokens, 31, ignored=1)):
            assert x.isfinite().all() and not x.any()


def test_another_index_is_ignored_when_asked():
    hidden, weight, targets = given(21, 31)
    targets[targets == -100] = 4
    ours = loss_and_gradients(linear_cross_entropy, hidden, weight, targets, ignore_index=4)
    assert_near(ours, loss_and_gradients(whole, hidden, weight, targets, ignore_index=4), 1e-13)


def test_large_logits_stay_finite_and_right():
    hidden, weight, targets = given(21, 31)
    inputs = (hidden.detach() * 1e4).requires_grad_(), weight, targets
    assert_near(loss_and_gradients(linear_cross_entropy, *inputs), loss_and_gradients(whole, *inputs), 1e-12)


def test_a_weight_shared_with_the_embedding_gets_both_gradients():
    _, weight, targets = given(21, 31)
    ids = targets.clamp(min=0)
    ours = linear_cross_entropy(weight[ids].tanh(), weight, targets)
    right = whole(weight[ids].tanh(), weight, targets)
    assert_near(list(torch.autograd.grad(ours, weight)), list(torch.autograd.grad(right, weight)), 1e-13)


def test_a_loss_used_twice_and_read_back_twice_gives_the_same_gradients():
    hidden, weight, targets = given(21, 31)
    right = torch.autograd.grad(whole(hidden, weight, targets), (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets)
    twice = torch.autograd.grad(loss + loss, (hidden, weight), retain_graph=True)
    assert_near([g / 2 for g in twice], list(right), 1e-13)
    assert_near(list(torch.autograd.grad(loss, (hidden, weight))), list(right), 1e-13)


def test_second_derivatives_are_refused_and_not_left_out():
    hidden, weight, targets = given(21, 31)
    loss = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(RuntimeError, match=r"first derivatives only.*create_graph=True.*skip_logits"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda h, w, t: (h[:, 1:], w, t), r"hidden \(9, 15\), weight \(31, 16\)"),
        (lambda h, w, t: (h, w, t[1:]), r"targets \(8,\)"),
        (lambda h, w, t: (h.float(), w, t), "float32 and weight torch.float64"),
        (lambda h, w, t: (h, w[:0], t), r"weight is \(0, 16\): no words"),
        (lambda h, w, t: (h, w, t.int()), r"torch.int32; give int64"),
        (lambda h, w, t: (h, w.to("meta"), t), "hidden is on .*, weight on meta"),
    ],
)
def test_what_does_not_fit_together_is_named(change, named):
    with pytest.raises(ValueError, match=named):
        linear_cross_entropy(*change(*given(9, 31)))


@pytest.mark.parametrize("bad", [31, -1])
def test_a_target_outside_the_vocabulary_is_named_on_a_cpu(bad):
    hidden, weight, targets = (x.cpu() for x in given(9, 31))
    targets[4] = bad
    with pytest.raises(ValueError, match=f"hold {bad}; give 0 to 30, or -100"):
        linear_cross_entropy(hidden, weight, targets)


@pytest.mark.parametrize("half", [False, True])
def test_compiled_it_is_one_operator_without_a_break(half):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: linear_cross_entropy(2 * x[0], *x[1:]) / 7, backend="aot_eager", fullgraph=True)
    for tokens in (9, 10, 21):
        hidden, weight, targets = given(tokens, 31, torch.float32)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            ours, right = compiled(hidden, weight, targets), linear_cross_entropy(2 * hidden, weight, targets) / 7
        assert torch.equal(ours, right)
        for one, two in zip(torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(right, (hidden, weight))):
            assert torch.equal(one, two)
        with torch.no_grad():
            assert not compiled(hidden, weight, targets).requires_grad
    torch._dynamo.reset()


def test_the_operator_is_what_torch_asks_of_one():
    hidden, weight, targets = (x.detach() for x in given(9, 31, torch.float32))
    for wanted in ((True, True), (False, True), (False, False)):
        torch.library.opcheck(
            pieces._operator, (hidden, weight, targets, -100, torch.float32, *wanted), test_utils=["test_schema", "test_faketensor"]
        )


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_head_under_gradient_checkpointing(reentrant):
    hidden, weight, targets = given(21, 31)
    right = loss_and_gradients(linear_cross_entropy, hidden, weight, targets)
    loss = torch.utils.checkpoint.checkpoint(linear_cross_entropy, hidden, weight, targets, use_reentrant=reentrant) / 7
    loss.backward()
    assert_near([loss.detach(), hidden.grad, weight.grad], right, 0)


def test_pieces_are_even_on_a_gpu_and_fit_the_caches_on_a_cpu(monkeypatch):
    monkeypatch.undo()
    gpu, cpu, half = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    assert pieces._piece_tokens(65536, 32000, half, gpu) == 8192  # 500 MiB of logits
    assert pieces._piece_tokens(65536, 32000, torch.float32, gpu) == 4096
    assert pieces._piece_tokens(9000, 32000, half, gpu) == 4608  # two pieces, not 8192 and a rest
    assert pieces._piece_tokens(100, 32000, half, gpu) == 128
    assert pieces._piece_tokens(100, 10**9, half, gpu) == 128
    assert pieces._piece_tokens(65536, 32000, torch.float32, cpu) == 256
    assert pieces._piece_tokens(65536, 257, torch.float32, cpu) == 4080


# The kernel.


@pytest.fixture
def kernel(monkeypatch):
    """The kernel takes every type but fp64, which stays the reference; several tiles a row."""
    from proteus_lm.ops.triton_neighbours import cross_entropy as module  # imports triton

    monkeypatch.setattr(triton_neighbours, "reached", lambda x: True)
    monkeypatch.setattr(module, "TILE", 16)
    calls, run = [], module.softmax_gradients
    monkeypatch.setattr(module, "softmax_gradients", lambda *x: calls.append(x) or run(*x))
    return calls


@needs_triton
@pytest.mark.parametrize("words", [1, 16, 37, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_gives_loss_and_gradients(words, dtype, kernel):
    inputs = given(13, words, dtype)
    ours = loss_and_gradients(linear_cross_entropy, *inputs)
    right = loss_and_gradients(whole, *(x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs))
    assert len(kernel) == 2  # pieces
    scale = [r.norm() for r in right]
    for one, two, size in zip(ours, right, scale):
        assert (one.double() - two).norm() <= LIMITS[dtype] * max(size, 1e-3), words
    with torch.no_grad():
        assert_near([linear_cross_entropy(*inputs) / 7], ours[:1], 1e-6)
    assert len(kernel) == 4 and not kernel[-1][-1]


@needs_triton
def test_the_kernel_stays_finite_where_logits_are_large_or_minus_infinity(kernel):
    from proteus_lm.ops.triton_neighbours import cross_entropy as module

    logits = torch.tensor([[1e37, -1e37] + [0.0] * 30, [float("-inf")] * 20 + [1.0] * 12, [-1e4] * 32], device=DEVICE)
    targets = torch.tensor([0, 31, 5], device=DEVICE)
    right = cross_entropy(logits.double(), targets, reduction="none")
    kept = logits.clone()
    assert torch.allclose(module.softmax_gradients(kept, targets, -100, True).double(), right, atol=1e-6)
    exact = logits.double().softmax(-1)
    exact[range(3), targets] -= 1
    assert torch.allclose(kept.double(), exact, atol=1e-6)


@needs_triton
def test_the_kernel_gives_nan_for_targets_outside_and_for_logits_that_are_nan(kernel):
    from proteus_lm.ops.triton_neighbours import cross_entropy as module

    logits = torch.randn(6, 20, device=DEVICE)
    logits[4:, 3] = float("nan")
    targets = torch.tensor([20, -1, 19, -100, 2, -100], device=DEVICE)
    losses = module.softmax_gradients(logits, targets, -100, True)
    assert losses.isnan().tolist() == [True, True, False, False, True, False]
    assert logits.isnan().any(1).tolist()[:5] == [True, True, False, False, True]
    assert not losses[3] and not logits[3].any()


@pytest.mark.parametrize("words", [257, 8192])
def test_in_bf16_it_is_as_near_to_fp64_as_whole_logits(words):
    inputs = given(1037, words, torch.float32, dim=64)
    right = loss_and_gradients(whole, *(x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs))
    found = []
    for form in (linear_cross_entropy, whole):
        with torch.autocast(DEVICE, torch.bfloat16):
            found.append(loss_and_gradients(form, *inputs))
    # Logits of some hundred rounded factors: how far bf16 stands from fp64 is measured, not set.
    for ours, theirs, exact in zip(*found, right):
        assert (ours.double() - exact).norm() <= 1.1 * (theirs.double() - exact).norm() + 1e-4 * exact.norm()


@pytest.mark.gpu
@needs_cuda
def test_on_a_gpu_it_is_captured_by_a_graph():
    hidden, weight, targets = given(300, 257, torch.float32)

    def work() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            return loss_and_gradients(linear_cross_entropy, hidden, weight, targets)

    right = work()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = work()
    graph.replay()
    for one, two in zip(kept, right):
        assert torch.equal(one, two)
