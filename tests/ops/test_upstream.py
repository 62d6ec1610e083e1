"""Against other people's code: equal where it is right; where it is not (spec/deep.md 5, spec/linear.md 1.3), how much it differs.

Small cases on the CPU, on code that shares nothing with ours. A test of the second kind fails when upstream mends its code: then
it belongs to the first kind.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, silu

from proteus_lm import ops
from proteus_lm.ops.state import TitansState
from tests.ops.linear_rules import HEADS, call, make, make_state, matrix, rms

FUNCTIONS = {"gelu_tanh": lambda x: gelu(x, approximate="tanh"), "silu": silu}
DIM = 6


def upstream(module: str, package: str):
    """A module of another package; skips with a reason where it is not installed."""
    return pytest.importorskip(module, reason=f"compares with {package}, which is not installed: pip install {package}")


# titans-pytorch: NeuralMemory with one token a chunk, and its batch_size as our chunk.


class MemoryMLP(nn.Module):
    """f(x) = act(... act(x W1) ...) WL."""

    def __init__(self, depth, function):
        super().__init__()
        widths = [DIM, *[4 * DIM] * (depth - 1), DIM]
        shapes = zip(widths, widths[1:])
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(i, o) / i**0.5) for i, o in shapes)
        self.function = FUNCTIONS[function]

    def forward(self, x):
        for i, weight in enumerate(self.weights):
            x = (self.function(x) if i else x) @ weight
        return x


def neural_memory(depth=2, function="gelu_tanh", chunk=4, **options):
    titans = upstream("titans_pytorch", "titans-pytorch")
    torch.manual_seed(depth)
    plain = {"mem_model_norm_add_residual": False, "pre_rmsnorm": False, "default_step_transform_max_lr": 0.5}
    memory = titans.NeuralMemory(DIM, 1, chunk, model=MemoryMLP(depth, function), **plain, **options)
    return memory.double()


def ours(memory, x, chunk, function="gelu_tanh", **options):
    """Their module's projections and gates, our operation."""
    q, k, v = (projection(x)[:, :, None] for projection in (memory.to_queries, memory.to_keys, memory.to_values))
    step = memory.adaptive_step_transform(memory.to_adaptive_step(x))  # (B, T), of the mean over DIM of the squared error
    theta = 2 / DIM * step[..., None]
    alpha = memory.to_decay_factor(x).sigmoid()
    eta = torch.zeros_like(alpha) if memory.to_momentum is None else memory.to_momentum(x)[0].sigmoid()
    weights = tuple(memory.memory_model_parameters)
    y, state = ops.titans_memory(
        *(q, k, v, theta, alpha, eta, weights), chunk=chunk, memory_activation=function, output_final_state=True, **options
    )
    return y[:, :, 0], state


@pytest.mark.parametrize(
    ("depth", "function", "chunk"),
    [(1, "silu", 5), (2, "gelu_tanh", 1), (2, "gelu_tanh", 16), (2, "silu", 5), (3, "gelu_tanh", 5), (4, "silu", 5)],
)
def test_titans_equals_titans_pytorch_in_reads_end_state_and_gradients(depth, function, chunk):
    memory = neural_memory(depth, function, chunk)
    x = torch.randn(2, 23, DIM, dtype=torch.float64, requires_grad=True)  # a chunk of 16 and a part, four of 5 and a part
    theirs, their_state = memory(x)
    y, state = ours(memory, x, chunk, function)
    assert rms(y, theirs) < 1e-12
    assert isinstance(state, TitansState)
    weights, momentum = ops.titans_weights(state, memory_activation=function)
    last, last_momentum = their_state.states
    for name, w, s in zip(memory.memory_model_parameter_names, weights, momentum, strict=True):
        assert rms(w[:, 0], last[name]) < 1e-12 and rms(s[:, 0], last_momentum[name][0]) < 1e-12
    tensors = [x, *(p for p in memory.parameters() if p.requires_grad)]
    loss = torch.randn(theirs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((out * loss).sum(), tensors, allow_unused=True) for out in (y, theirs)]
    used = [(a, b) for a, b in zip(*grads, strict=True) if a is not None or b is not None]
    assert len(used) >= 7 + depth and all(rms(a, b) < 1e-10 for a, b in used)


def test_titans_without_momentum_equals_titans_pytorch_without():
    memory = neural_memory(momentum=False)
    x = torch.randn(2, 19, DIM, dtype=torch.float64)
    assert rms(ours(memory, x, 4)[0], memory(x)[0]) < 1e-12


def test_titans_pytorch_never_refreshes_its_gradients_by_default():
    """Without batch_size their gradients are all taken at the initial weights: ours with one chunk for the whole text."""
    memory = neural_memory(chunk=None)
    x = torch.randn(2, 37, DIM, dtype=torch.float64)
    theirs = memory(x)[0]
    assert rms(ours(memory, x, 37)[0], theirs) < 1e-12
    assert rms(ours(memory, x, 4)[0], theirs) > 1e-2


def test_titans_pytorch_lets_a_masked_token_decay_and_push_on():
    """Their mask sets the step to 0 alone; ours leaves the token out, as the text without it shows."""
    memory = neural_memory()
    x = torch.randn(1, 12, DIM, dtype=torch.float64)
    kept = torch.ones(1, 12, dtype=torch.bool)
    kept[:, 5:9] = False
    without, _ = ours(memory, x[:, kept[0]], 4)
    assert rms(memory(x, store_mask=kept)[0][:, 9:], without[:, 5:]) > 1e-2


# flash-linear-attention: its references in plain PyTorch (all in fp32, so 1e-5).


def fla(path: str):
    upstream("fla", "flash-linear-attention")
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(f"fla.ops.{module}"), name)


def heads_first(inputs):
    return {name: x.transpose(1, 2) for name, x in inputs.items()}


@pytest.mark.parametrize("tokens", [1, 63, 64, 130])
@pytest.mark.parametrize(
    ("rule", "path"),
    [
        ("comba", "comba.naive.naive_chunk_comba"),
        ("gated_delta_rule", "gated_delta_rule.naive.naive_chunk_gated_delta_rule"),
        ("gated_delta_rule", "gated_delta_rule.naive.naive_recurrent_gated_delta_rule"),
        ("retention", "simple_gla.naive.naive_chunk_simple_gla"),
        ("retention", "simple_gla.naive.naive_recurrent_simple_gla"),
    ],
)
def test_linear_rules_equal_flas_references_in_outputs_state_and_gradients(rule, path, tokens):
    inputs, start = make(rule, 2, tokens, dtype=torch.float32), make_state(rule, 2, dtype=torch.float32)
    tensors = [x.requires_grad_() for x in (*inputs.values(), start)]
    theirs, their_state = fla(path)(**inputs, initial_state=start, output_final_state=True)
    out, state = call(rule, inputs, initial_state=start)
    assert rms(out, theirs) < 1e-5 and rms(state, their_state) < 1e-5
    losses = [(o.square().sum() + s.square().sum()) for o, s in ((out, state), (theirs, their_state))]
    for name, a, b in zip([*inputs, "state"], *(torch.autograd.grad(x, tensors) for x in losses), strict=True):
        assert rms(a, b) < 1e-4, name  # theirs sums decays in fp32


@pytest.mark.parametrize("name", ["delta_rule_recurrence", "delta_rule_chunkwise"])
def test_the_delta_rule_equals_flas_references(name):
    inputs = make("delta_rule", 2, 64, dtype=torch.float32)
    theirs, their_state = fla(f"delta_rule.naive.{name}")(**heads_first(inputs))
    out, state = call("delta_rule", inputs)
    assert rms(out, theirs.transpose(1, 2)) < 1e-5 and rms(state, their_state) < 1e-5


def test_retention_equals_flas_reference_with_retnets_decays():
    inputs = make("retention", 2, 50, dtype=torch.float32)
    inputs["g"] = torch.log1p(-(2.0 ** (-5 - torch.arange(HEADS)))).expand(2, 50, HEADS)
    theirs = fla("retention.naive.naive_retention")(*(inputs[n].transpose(1, 2) for n in ("q", "k", "v")))
    assert rms(call("retention", inputs)[0], theirs.transpose(1, 2)) < 1e-5


def test_swla_equals_two_of_flas_linear_attentions():
    """c = 2 is the attention of each pair beside that of the pair before (spec/linear.md 1.4)."""
    inputs = make("swla", 2, 70, dtype=torch.float32, c=2)
    q, k, v, g, gamma = inputs.values()
    naive = fla("simple_gla.naive.naive_recurrent_simple_gla")
    before_k, before_v = (torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1) for x in (k, v))
    parts = [naive(q, k, gamma[..., :1] * v, g), naive(q, before_k, gamma[..., 1:] * before_v, g)]
    out, state = call("swla", inputs)
    assert rms(out, parts[0][0] + parts[1][0]) < 1e-5 and rms(matrix(state), parts[0][1] + parts[1][1]) < 1e-5


def test_flas_recurrent_comba_takes_its_error_against_the_decayed_state():
    """Trap C3: it is the gated delta rule with p, and neither Comba's kernels nor its authors' code; without decay all agree."""
    naive = fla("comba.naive.naive_recurrent_comba")
    inputs = make("comba", 2, 40, dtype=torch.float32)
    theirs, _ = naive(**inputs)
    assert rms(call("comba", inputs)[0], theirs) > 1e-2
    mended = inputs | {"p": inputs["p"] * inputs["g"].exp()[..., None]}  # p^T (e^g S) = (e^g p)^T S
    assert rms(call("comba", mended)[0], theirs) < 1e-5
    still = inputs | {"g": torch.zeros_like(inputs["g"])}
    assert rms(call("comba", still)[0], naive(**still)[0]) < 1e-5


def test_flas_titans_has_another_inner_gradient_than_automatic_differentiation():
    """A missing bracket in the gradient of its layer norm, in both of its paths alike; so it is no oracle for Titans."""
    reference = fla("titans.naive.chunk_titans_linear_ref")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 1, 8)
    start = torch.randn(1, 1, 8, 8, requires_grad=True)
    one, zero = torch.ones(1, 1, 8), torch.zeros(1, 1, 8)
    gate = torch.full((1, 1, 1, 1), 0.1)
    for use_chunk in (False, True):
        _, after = reference(
            *(q, k, v, one, zero, gate, torch.zeros_like(gate), torch.zeros_like(gate)),
            chunk_size=1, initial_state=start.detach(), output_final_state=True, use_chunk=use_chunk,
        )  # fmt: skip
        error = layer_norm(k[:, :, 0] @ start[:, 0], (8,), eps=1e-6) - (v - k)[:, :, 0]
        (right,) = torch.autograd.grad(error.square().sum(), start)
        assert rms((start.detach() - after) / 0.1, right) > 1
