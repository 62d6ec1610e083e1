"""The kernels beside the memories (norms, convolution, rotary positions, SwiGLU) equal PyTorch in fp64, in Triton's interpreter
where no GPU is.

`tests/conftest.py` asks for the interpreter before anything imports Triton.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from proteus_lm import ActivationSchedule, ProteusConfig
from proteus_lm.mixers import registry
from proteus_lm.mixers.attention import AttentionMixer
from proteus_lm.mixers.combine import COMBINE, Combine
from proteus_lm.mixers.conv import ShortConvolution
from proteus_lm.mixers.norm import RMSNorm, l2_normalize
from proteus_lm.mixers.rotary import rotate, turn_at
from proteus_lm.mixers.state import named_tensors
from proteus_lm.mlp import MLP
from proteus_lm.ops import triton_neighbours
from proteus_lm.sequence import TokenSequence

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BASE = ActivationSchedule(1, 8)
# Largest difference, relative to the largest value. fp32: roundings of sums of at most a few hundred terms. fp16: results and
# gradients are rounded to 10 bits, the sums inside are fp32.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3}
TYPES = [torch.float32, torch.float16]
WIDTHS = [1, 5, 96, 130]


@pytest.fixture
def kernels(monkeypatch):
    """The mixers' parts take the kernels for every type but fp64, which stays the reference."""
    monkeypatch.setattr(triton_neighbours, "reached", lambda x: True)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_same(ours: list[Tensor], right: list[Tensor], limit: float) -> None:
    for number, (a, b) in enumerate(zip(ours, right, strict=True)):
        assert a.shape == b.shape and a.isfinite().all()
        if b.numel():
            assert (a.double() - b).abs().max() <= limit * b.abs().max().clamp(min=1), number


def compare(function, tensors: list[Tensor], limit: float) -> None:
    """`function` of the tensors and of their fp64 copies: results, and gradients to every tensor that there is."""
    both = []
    weights: list[Tensor] = []
    for kind in (None, torch.float64):
        given = [x.detach().to(kind or x.dtype).requires_grad_() for x in tensors]
        out = function(*given)
        outs = [out] if isinstance(out, Tensor) else list(out)
        weights = weights or [normal(*x.shape, seed=9 + i) for i, x in enumerate(outs)]
        total = torch.stack([(x.to(kind or torch.float32) * w).sum() for x, w in zip(outs, weights)]).sum()
        both.append([*outs, *torch.autograd.grad(total, given)])
    assert_same(both[0], both[1], limit)


def convolution(channels: int, size: int) -> ShortConvolution:
    torch.manual_seed(channels + size)
    module = ShortConvolution(channels, size)
    module.init_weights()
    return module.to(DEVICE)


def shorten(monkeypatch, short: bool) -> None:
    """Chunks of 8 tokens where `short`, so that few tokens make several; else those of long texts."""
    from proteus_lm.ops.triton_neighbours import convolution as kernels  # imports triton

    monkeypatch.setattr(kernels, "BUSY", 10**9 if short else 0)
    if short:
        monkeypatch.setitem(kernels.FORWARD, "BT", 8)
        monkeypatch.setattr(kernels, "SHORT", 8)


def parts_of(module: ShortConvolution, sequence: TokenSequence, widths: list[int]):
    """The module as a function of x, its weight and a state, which gives all parts and the state after."""

    def function(x: Tensor, weight: Tensor, state: Tensor | None = None) -> list[Tensor]:
        module.weight.data = module.weight.data.to(weight.dtype)
        held = {"weight": weight}
        parts, after = torch.func.functional_call(
            _Parts(module), {f"module.{k}": v for k, v in held.items()}, (x, sequence, state, widths)
        )
        return [*parts, after]

    return function


class _Parts(torch.nn.Module):
    def __init__(self, module: ShortConvolution) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments):
        return self.module.parts(*arguments)


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize(
    ("length", "widths", "size", "dtype"),
    [
        (1, [1], 4, torch.float32),
        (1, [2, 3, 5], 8, torch.float16),
        (3, [5], 1, torch.float32),
        (3, [96, 34], 2, torch.float32),
        (3, [130], 4, torch.float16),
        (9, [130, 1, 5], 3, torch.float32),
        (17, [5], 8, torch.float32),
        (17, [5], 4, torch.float16),
        (65, [5], 4, torch.float32),
    ],
)
def test_the_convolution(length, widths, size, stateful, dtype, kernels, monkeypatch):
    shorten(monkeypatch, length < 65)
    channels = sum(widths)
    given = [normal(2, length, channels, dtype=dtype), convolution(channels, size).weight.data]
    if stateful and size > 1:
        given.append(normal(2, size - 1, channels, dtype=dtype, seed=1))
    sequence = TokenSequence(BASE, 2, length, device=DEVICE)
    compare(parts_of(convolution(channels, size), sequence, widths), given, LIMITS[dtype])


@pytest.mark.parametrize(
    ("size", "stateful", "dtype"), [(2, True, torch.float32), (4, False, torch.float16), (4, True, torch.float32)]
)
def test_the_convolution_of_packed_documents_shorter_and_longer_than_its_taps(size, stateful, dtype, kernels, monkeypatch):
    shorten(monkeypatch, True)
    lengths = [1, 2, 7, 12, 1, 3]
    given = [normal(1, sum(lengths), 5, dtype=dtype), convolution(5, size).weight.data]
    if stateful:
        given.append(normal(len(lengths), size - 1, 5, dtype=dtype, seed=1))
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    sequence = TokenSequence(BASE, len(lengths), sum(lengths), cu_seqlens=bounds, device=DEVICE)
    compare(parts_of(convolution(5, size), sequence, [5]), given, LIMITS[dtype])


def run(module: ShortConvolution, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return module(x, TokenSequence(BASE, len(x), x.shape[1], device=DEVICE), state)


@pytest.mark.parametrize("dtype", TYPES)
def test_any_split_of_a_convolution_gives_the_same_bits(dtype, kernels):
    module, x = convolution(5, 4), normal(2, 40, 5, dtype=dtype)
    whole, end = run(module, x)
    for at in (1, 2, 33):
        first, state = run(module, x[:, :at])
        second, after = run(module, x[:, at:], state)
        assert torch.equal(torch.cat((first, second), 1), whole) and torch.equal(after, end)


def test_a_row_and_a_document_have_the_bits_they_have_alone(kernels):
    module, x = convolution(5, 4), normal(3, 20, 5)
    whole, _ = run(module, x)
    bounds = torch.arange(4, device=DEVICE) * 20
    packed, _ = module(x.reshape(1, 60, 5), TokenSequence(BASE, 3, 60, cu_seqlens=bounds, device=DEVICE))
    alone = torch.cat([run(module, row[None])[0] for row in x])
    assert torch.equal(whole, alone) and torch.equal(packed.view(3, 20, 5), alone)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_l2_norm(width, dtype, kernels):
    x = normal(2, 17, 3, width, dtype=dtype)
    x[0, 3] = 0  # a zero vector has a zero norm and a finite gradient
    x[1, 4] *= 1e-4  # near eps
    compare(l2_normalize, [x], LIMITS[dtype] * 1e3)  # gradients of the zero vector are 1 / sqrt(eps) = 1000 times as large
    x[0, 3], x[1, 4] = 1, 1
    compare(l2_normalize, [x], LIMITS[dtype])


@pytest.mark.parametrize("shared", [False, True])
def test_the_l2_norm_of_open_coordinates_sees_no_other(shared, kernels):
    x = normal(2, 9, 3, 30)
    active = torch.tensor([[1, 1, 4, 4, 30, 17, 17, 16, 30], [2, 2, 2, 2, 5, 5, 30, 30, 30]], device=DEVICE)[: 1 if shared else 2]
    compare(lambda x: l2_normalize(x, active=active), [x], LIMITS[torch.float32])
    shut = torch.arange(30, device=DEVICE) >= active[..., None, None].expand(2, -1, -1, -1)
    poisoned = torch.where(shut, float("nan"), x).requires_grad_()
    y = l2_normalize(poisoned, active=active)
    y.backward(normal(*y.shape))
    assert torch.equal(y, l2_normalize(x, active=active)) and not y[shut.expand_as(y)].any()
    assert poisoned.grad is not None and poisoned.grad.isfinite().all() and not poisoned.grad[shut.expand_as(y)].any()


def weighted(width: int) -> RMSNorm:
    module = RMSNorm(width, 1e-6).to(DEVICE)
    module.weight.data = normal(width, seed=5)
    return module


def as_function(module: torch.nn.Module, method=None):
    """A module as a function of its inputs, then its parameters."""
    names = [name for name, _ in module.named_parameters()]

    def function(*tensors: Tensor) -> Tensor:
        inputs, held = tensors[: -len(names)], dict(zip(names, tensors[-len(names) :]))
        return torch.func.functional_call(_Method(module, method), {f"module.{n}": x for n, x in held.items()}, inputs)

    return function


class _Method(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, method) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *inputs):
        return self.module(*inputs) if self.method is None else self.method(self.module, *inputs)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 65])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_rms_norm(width, rows, dtype, kernels):
    module = weighted(width)
    x = normal(rows, width, dtype=dtype)
    compare(as_function(module), [x, module.weight.data], LIMITS[dtype] * 3)  # the weight's gradient sums 65 rows


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", [torch.nn.functional.silu, torch.sigmoid])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_gated_rms_norm(width, activation, dtype, kernels):
    module = weighted(width)
    x, gate = normal(2, 17, 2, width, dtype=dtype), normal(2, 17, 2 * width, dtype=dtype, seed=1)
    function = as_function(module, lambda module, x, gate: module.gated(x, gate, activation))
    compare(function, [x, gate, module.weight.data], LIMITS[dtype] * 3)


@pytest.mark.parametrize("kind", COMBINE)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [5, 130])
def test_two_norms_combined(width, dtype, kind, kernels):
    module = Combine(width, 1e-6, kind).to(DEVICE)
    a, b = normal(2, 33, width, dtype=dtype), normal(2, 33, width, dtype=dtype, seed=1)
    compare(as_function(module), [a, b, normal(width, seed=2), normal(width, seed=3)], LIMITS[dtype] * 3)


@pytest.mark.parametrize(("dtype", "corrected", "first", "masked"), [
    (torch.float32, True, False, False), (torch.float32, True, True, True), (torch.float32, False, False, True),
    (torch.float32, False, True, False), (torch.float16, True, False, True),
])  # fmt: skip
def test_comba_s_vectors(dtype, corrected, first, masked):
    active = torch.tensor([[1, 1, 4, 4, 30, 17, 17, 16, 30]], device=DEVICE) if masked else None

    def function(q: Tensor, k: Tensor, decay: Tensor, correction: Tensor | None = None) -> tuple[Tensor, ...]:
        if q.dtype != torch.float64:
            return triton_neighbours.comba_vectors(q, k, decay, correction, 1e-6, first, active)
        if correction is not None:
            q = q - (correction * decay)[:, None] * k
        unit = l2_normalize(k, active=active)
        p = l2_normalize(decay[:, None] * k, active=active) if first else decay[:, None] * unit
        return l2_normalize(q, active=active), unit, p

    given = [normal(2, 9, 3, 30, dtype=dtype), normal(2, 9, 3, 30, dtype=dtype, seed=1), normal(3, seed=2).sigmoid()]
    compare(function, [*given, normal(3, seed=3)] if corrected else given, LIMITS[dtype] * 3)


def turned_to(x: Tensor, apart: bool, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Cosine and sine for tokens (B, T, .., D); `apart`: each row stands at its own position."""
    offset = torch.arange(len(x), device=DEVICE) * 3 if apart else None
    return turn_at(TokenSequence(BASE, len(x), x.shape[1], offset=offset, device=DEVICE), x, interleaved=interleaved)


ROTARY = [
    (2, False, False, torch.float32), (6, True, True, torch.float32), (6, False, True, torch.float16),
    (64, False, False, torch.float32), (64, True, False, torch.float16), (130, False, True, torch.float16),
    (130, True, False, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(("dim", "interleaved", "apart", "dtype"), ROTARY)
def test_rotary_positions(dim, interleaved, apart, dtype, kernels):
    """Of heads between others, with a gradient whose heads stand before its tokens."""

    def function(parts: Tensor) -> Tensor:
        turn = turned_to(parts, apart, interleaved)
        return rotate(parts[:, :, 1], turn, interleaved=interleaved).transpose(1, 2)

    compare(function, [normal(2, 7, 3, 3, dim, dtype=dtype)], LIMITS[dtype])


@pytest.mark.parametrize(("dim", "interleaved", "apart", "dtype"), ROTARY)
@pytest.mark.parametrize("used", ["q k v plain", "q", "k", "v", "plain", "q plain", "k v"])
def test_rotary_positions_of_a_projection_whichever_of_its_parts_are_used(used, dim, interleaved, apart, dtype):
    def function(x: Tensor) -> list[Tensor]:
        parts = x.unflatten(-1, (3, -1, dim))
        turn = turned_to(parts, apart, interleaved)
        if x.dtype == torch.float64:
            plain, k, v = parts.unbind(2)
            q, k = (rotate(t, turn, interleaved=interleaved) for t in (plain, k))
        else:
            q, k, v, plain = triton_neighbours.turned_parts(parts, *turn, interleaved)
            assert q.is_contiguous() and k.is_contiguous() and {t.dtype for t in (q, k, v, plain)} == {dtype}
        named = {"q": q, "k": k, "v": v.transpose(1, 2), "plain": plain}
        return [named[name] for name in used.split()]

    compare(function, [normal(2, 7, 9 * dim, dtype=dtype)], LIMITS[dtype])


def test_a_gradient_that_is_spread_over_its_heads_reaches_a_turned_tensor(kernels):
    x = normal(2, 5, 3, 6).requires_grad_()  # a sum's gradient has strides of zero
    (ours,) = torch.autograd.grad(rotate(x, turned_to(x, False, False)).sum(), x)
    wide = x.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(rotate(wide, turned_to(wide, False, False)).sum(), wide)
    assert_same([ours], [right], LIMITS[torch.float32])


def test_cosine_and_sine_may_be_slices_of_longer_ones(kernels):
    x = normal(2, 9, 3, 6)
    turn = turned_to(x, False, False)
    longer = [t.expand(2, -1, -1, -1)[:, 4:] for t in turn]
    assert torch.equal(rotate(x[:, 4:], (longer[0], longer[1])), rotate(x, turn)[:, 4:])
    with pytest.raises(RuntimeError, match="expand"):
        rotate(x, (longer[0], longer[1]))  # of five tokens, for nine


def test_a_turned_token_has_the_bits_it_has_alone(kernels):
    x = normal(2, 70, 3, 64)
    turn = turned_to(x, True, False)
    whole = rotate(x, turn)
    alone = [
        rotate(x[i : i + 1, t : t + 1], (turn[0][i : i + 1, t : t + 1], turn[1][i : i + 1, t : t + 1]))
        for i, t in ((0, 0), (1, 69))
    ]
    assert torch.equal(torch.cat(alone), torch.stack((whole[0, :1], whole[1, 69:])))


def test_rows_may_lie_further_apart_than_31_bits_count(kernels, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    far, x = 2**31 + 8, normal(2, 1, 1, 4, dtype=torch.float16)
    apart = torch.empty(far + 4, device=DEVICE, dtype=torch.float16).as_strided(x.shape, (far, 4, 4, 1))  # two pages are touched
    apart.copy_(x)
    turn = turned_to(x, True, False)
    assert torch.equal(rotate(apart, turn), rotate(x, turn))


def test_attention_takes_its_projection_in_one_launch_each_way(kernels, monkeypatch):
    from proteus_lm.ops.triton_neighbours import rotary  # imports triton

    launches = []
    monkeypatch.setattr(rotary, "_launch", lambda *given, run=rotary._launch: (launches.append(len(given[2])), run(*given)))
    mixer = AttentionMixer(ProteusConfig(mixer="attention", hidden_size=12, num_heads=2, head_dim=6)).to(DEVICE)
    x = normal(2, 5, 12)
    for tensor in mixer.project(x, TokenSequence(BASE, 2, 5, device=DEVICE)):
        tensor.sum().backward(retain_graph=True)
    assert launches == [2, 3, 3, 3, 3]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 130), (7, 293), (4, 512)])
def test_the_product_of_a_swiglu(shape, dtype):
    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.silu(a) * b if a.dtype == torch.float64 else triton_neighbours.swiglu_product(a, b)

    given = [normal(*shape, dtype=dtype) * 4, normal(*shape, dtype=dtype, seed=1)]
    compare(function, given, LIMITS[dtype])
    compare(lambda a, b: function(a.T, b.T), given, LIMITS[dtype]) if len(shape) == 2 else None


def test_the_product_of_a_swiglu_far_from_zero():
    a = torch.tensor([-80.0, -30.0, 0.0, 30.0, 80.0, 200.0, 6e4], device=DEVICE)  # the interpreter warns of e^89
    compare(
        lambda a, b: torch.nn.functional.silu(a) * b if a.dtype == torch.float64 else triton_neighbours.swiglu_product(a, b),
        [a, normal(7)], LIMITS[torch.float32],
    )  # fmt: skip


def test_the_mlp_takes_the_kernel(kernels, monkeypatch):
    from proteus_lm import mlp

    calls = []
    monkeypatch.setattr(mlp, "swiglu_product", lambda a, b: (calls.append(a.shape), triton_neighbours.swiglu_product(a, b))[1])
    torch.manual_seed(0)
    module, x = MLP(6, 10).to(DEVICE), normal(2, 9, 6)
    compare(as_function(module), [x, *(p.data for p in module.parameters())], LIMITS[torch.float32])
    assert calls == [(2, 9, 10)]


def test_a_norm_has_the_bits_of_its_row_alone_wherever_it_lies(kernels):
    module, x = weighted(130), normal(40, 130)
    for function in (module, l2_normalize):
        whole = function(x)
        assert torch.equal(torch.cat([function(x[i : i + 1]) for i in range(40)]), whole)  # rows off a boundary of 16 bytes


def test_a_gate_of_another_type_and_a_transposed_input(kernels):
    module = weighted(6)
    x, gate = normal(2, 4, 3, 6).transpose(1, 2), normal(2, 3, 24, dtype=torch.float16)
    y = module.gated(x, gate, torch.sigmoid)
    right = module.double().gated(x.double(), gate.double(), torch.sigmoid)
    assert y.dtype == torch.float16
    assert_same([y], [right], LIMITS[torch.float16])


@pytest.mark.parametrize(
    "function",
    [
        l2_normalize,
        lambda x: rotate(x[:, None, None], turned_to(x[:, None], False, False)),
        lambda x: torch.cat(triton_neighbours.turned_parts(parts := x.view(2, 1, 3, 1, 2), *turned_to(parts, False, False), False)),
        lambda x: triton_neighbours.swiglu_product(x, x),
    ],
)  # fmt: skip
def test_second_derivatives_are_refused(function, kernels):
    x = normal(2, 6).requires_grad_()
    (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("mixer", registry)
def test_every_mixer_agrees_with_itself_in_fp64(mixer, kernels):
    """Values, state and every gradient, in two calls of which the second continues the first."""
    config = ProteusConfig(mixer=mixer, hidden_size=16, num_heads=2, head_dim=8)
    model = registry[mixer](config).to(DEVICE)
    for module in [*model.modules()][::-1]:
        if callable(start := getattr(module, "init_weights", None)):
            start()
    x, upstream = normal(2, 12, 16, seed=1), normal(2, 12, 16, seed=2)
    found = []
    for kind in (torch.float32, torch.float64):
        model = model.to(kind)
        given = x.to(kind).requires_grad_()
        y, state = model(given[:, :7], TokenSequence(BASE, 2, 7, device=DEVICE, start=0), None, True)
        offset = torch.full((2,), 7, device=DEVICE)
        rest, state = model(given[:, 7:], TokenSequence(BASE, 2, 5, offset=offset, device=DEVICE, start=7), state, True)
        y = torch.cat((y, rest), 1)
        grads = torch.autograd.grad(y, [given, *model.parameters()], upstream.to(kind), allow_unused=True)
        found.append([y, *named_tensors(state).values(), *(g for g in grads if g is not None)])
    assert_same(found[0], found[1], 1e-4)  # fp32 through a whole layer


def test_the_kernels_run_on_a_gpu_alone_and_can_be_turned_off(monkeypatch):
    x, runs = torch.zeros(2, 4), triton_neighbours.runs
    monkeypatch.delenv("PROTEUS_NEIGHBOURS", raising=False)
    assert not runs(x)
    monkeypatch.setattr(triton_neighbours, "reached", lambda x: True)
    for wanted in ("auto", "torch"):
        monkeypatch.setenv("PROTEUS_NEIGHBOURS", wanted)
        assert runs(x, None) == (wanted == "auto")
        assert not runs(x.double()) and not runs(x[:0])
    monkeypatch.setenv("PROTEUS_NEIGHBOURS", "on")
    with pytest.raises(ValueError, match="'auto' or 'torch'"):
        runs(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not runs(x)


def test_the_compiler_sees_pytorch_alone(kernels):
    module, sequence = convolution(5, 4), TokenSequence(BASE, 2, 9, device=DEVICE)

    def function(x: Tensor) -> Tensor:
        return l2_normalize(module(x, sequence)[0])

    x = normal(2, 9, 5)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")  # a kernel would break the graph
    assert_same([compiled(x)], [function(x).double()], LIMITS[torch.float32])
    mixer, mlp = AttentionMixer(ProteusConfig(mixer="attention", hidden_size=12, num_heads=2, head_dim=6)).to(DEVICE), MLP(12, 5)

    def layer(x: Tensor) -> Tensor:
        return mlp.to(DEVICE)(mixer(x, TokenSequence(BASE, 2, 9, device=DEVICE))[0])

    x = normal(2, 9, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same([compiled(x)], [layer(x).double()], LIMITS[torch.float32])
