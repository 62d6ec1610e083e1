"""A gated memory, f(x) = (silu(x W1) * (x U1)) W2 and deeper, in every way it is computed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize, silu

from proteus_lm.ops import _deep_scan, reference, titans_memory, titans_weights
from proteus_lm.ops._deep_activation import POINTWISE
from proteus_lm.ops._deep_walk import GROUP
from proteus_lm.ops.deep import refusals
from proteus_lm.ops.deep_step import titans_step
from proteus_lm.ops.memory_activations import matrix_names, memory_function, places
from proteus_lm.ops.memory_read import titans_read, titans_surprise
from tests.ops import deep_cases
from tests.ops.deep_cases import (
    EXACT,
    HEAD,
    HEADS,
    HIDDEN,
    Case,
    assert_compiled_once,
    assert_kept,
    assert_same_gradients,
    assert_same_state,
    decode,
    floats,
    gradients,
    in_calls,
    locked,
    make,
    plant,
    schedule,
    with_floats,
)

FUNCTION = {"memory_activation": "swiglu"}
DEPTHS = [2, 3, 4]
EVERY = {"surprise_clip": 0.3, "decay_target": "init"}


def gated(*shape: int, **options) -> Case:
    return make(*shape, function="swiglu", **options)


compare = partial(deep_cases.compare, **FUNCTION)


def by_autograd(case: Case, chunk: int) -> tuple[Tensor, list[Tensor]]:
    """Two layers, all open: torch's own gradient of the loss, one token, row and head at a time; y and the last weights."""
    q, k, v, theta, alpha, eta = (t.detach() for t in case.tokens)
    y, last = torch.zeros_like(v), [torch.zeros(len(q), *w.shape, dtype=w.dtype) for w in case.weights]

    def memory(weights, x):
        return (silu(x @ weights[0]) * (x @ weights[1])) @ weights[2]

    for row in range(len(q)):
        for head in range(HEADS):
            weights = [w[head].detach() for w in case.weights]
            momentum, frozen = [torch.zeros_like(w) for w in weights], weights
            for t in range(q.shape[1]):
                frozen = weights if t % chunk == 0 else frozen
                leaves = [w.clone().requires_grad_() for w in frozen]
                loss = 0.5 * (memory(leaves, k[row, t, head]) - v[row, t, head]).square().sum()
                u = torch.autograd.grad(loss, leaves)
                momentum = [eta[row, t, head] * s - theta[row, t, head] * g for s, g in zip(momentum, u)]
                weights = [(1 - alpha[row, t, head]) * w + s for w, s in zip(weights, momentum)]
                y[row, t, head] = memory(weights, q[row, t, head])
            for total, w in zip(last, weights):
                total[row, head] = w
    return y, last


@pytest.mark.parametrize("backend", ["chunk", "reference"])
def test_it_learns_by_gradient_descent(backend):
    case = gated(2, 13)
    y, state = titans_memory(*case.tokens, case.weights, chunk=4, output_final_state=True, backend=backend, **FUNCTION)
    right, weights = by_autograd(case, 4)
    torch.testing.assert_close(y, right, rtol=0, atol=EXACT)
    for ours, theirs in zip(titans_weights(state, **FUNCTION)[0], weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=EXACT)


@pytest.mark.parametrize("read", ["post", "pre"])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("blocks", "context", "offset"),
    [(1, 1, 0), (3, 30, 0), (5, 10, [3, 0, 8]), (4, 40, [1, 20, 39])],
    ids=["ungated", "aligned", "many unlocks in a chunk", "far apart"],
)
def test_a_bare_state_equals_the_oracle(depth, read, blocks, context, offset):
    case = gated(3, 23, depth=depth, heads=1, grad=True, seed=depth)
    leaves = [*case.tokens, *case.state[0], *case.state[1]]
    activation = schedule(blocks, context).activation(HIDDEN, 23, offset=offset)
    compare(case, leaves, chunk=5, read=read, activation=activation, initial_state=case.state)


@pytest.mark.parametrize("chunk", [1, 5, 16])
@pytest.mark.parametrize("tokens", [1, 15, 17, 33])
def test_every_length_and_chunk_equals_the_oracle(tokens, chunk):
    case = gated(2, tokens, grad=True, seed=tokens)
    compare(case, [*case.tokens, *case.weights], chunk=chunk, activation=schedule(4, 24).activation(HIDDEN, tokens))


@pytest.mark.parametrize("read", ["post", "pre"])
@pytest.mark.parametrize("bounds", [[0, 31], [0, 1, 2, 19, 31]])
def test_packed_documents_equal_the_oracle(bounds, read):
    case = gated(1, 31, rows=len(bounds) - 1, grad=True)
    cu_seqlens = torch.tensor(bounds)
    activation = schedule(4, 24).activation(HIDDEN, 31, offset=torch.arange(len(bounds) - 1) * 7, cu_seqlens=cu_seqlens)
    options = {"chunk": 5, "read": read, "activation": activation, "cu_seqlens": cu_seqlens, "initial_state": case.state}
    compare(case, [*case.tokens, *case.state[0], *case.state[1]], **options)


@pytest.mark.parametrize("update", [EVERY, {"residual_norm": True}, {**EVERY, "residual_norm": True}], ids=str)
@pytest.mark.parametrize("depth", [2, 3])
def test_options_of_the_update_equal_the_oracle(depth, update):
    case = gated(2, 19, depth=depth, value=HEAD, grad=True)
    leaves, looser = [*case.tokens, *case.weights], 1
    if "residual_norm" in update:
        norm = [torch.randn(HEADS, HEAD, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (5, 6)]
        update, looser = update | {"residual_norm": tuple(t.requires_grad_() for t in norm)}, 1000
        leaves += norm  # LN divides by a deviation, and so multiplies rounding, by EPS^(-1/2) = 1e3 at most
    compare(case, leaves, looser=looser, chunk=5, activation=schedule(4, 17).activation(HIDDEN, 19), **update)


@pytest.mark.parametrize("depth", [2, 3])
def test_gradients_flow_through_a_carried_state_as_in_the_oracle(depth):
    first, case = gated(3, 11, depth=depth, seed=1), gated(3, 14, depth=depth, grad=True, seed=2)
    plan, offset = schedule(3, 22), torch.tensor([0, 3, 9])
    with torch.no_grad():
        options = {"activation": plan.activation(HIDDEN, 11, offset=offset), "initial_state": first.state}
        _, state = titans_memory(*first.tokens, first.weights, chunk=6, output_final_state=True, **options, **FUNCTION)
    state = with_floats(state, [t.detach().requires_grad_() for t in floats(state)])
    options = {"initial_state": state, "activation": plan.activation(HIDDEN, 14, offset=state.position)}
    compare(case, [*case.tokens, *floats(state)], chunk=6, **options)


@pytest.mark.parametrize(
    ("depth", "update", "fast"),
    [(2, {}, True), (3, {}, True), (2, {"decay_target": "init"}, True), pytest.param(2, {}, False, marks=pytest.mark.slow)],
)
def test_gradcheck_over_three_chunks_with_unlocks(depth, update, fast):
    case = gated(1, 8, depth=depth, heads=1, grad=True)
    activation = schedule(3, 7).activation(6, 8)
    options = {"chunk": 3, "activation": activation, "output_final_state": True, **update, **FUNCTION}

    def run(*leaves):
        y, state = titans_memory(*leaves[:6], leaves[6:], **options)
        return y, sum(t.square().sum() for t in floats(state))

    units = 6  # fewer than in a case, for speed
    sides = zip(places(len(case.weights), 2), case.weights, strict=True)
    weights = [w[..., : w.shape[-2] if p == "first" else units, : w.shape[-1] if p == "last" else units] for p, w in sides]
    leaves = [*case.tokens, *(w.detach().requires_grad_() for w in weights)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=fast)  # fast: along random directions


@pytest.mark.parametrize("kept", [0, 20_000, 1 << 28], ids=["nothing", "the first groups", "all"])
def test_what_is_kept_for_the_backward_is_enough_for_many_chunks(kept, monkeypatch):
    monkeypatch.setattr(_deep_scan, "KEPT", kept)
    tokens = 2 * 2 * GROUP + 5
    case = gated(1, tokens, rows=3, heads=1, grad=True)
    bounds = torch.tensor([0, 7, 7 + GROUP, tokens])
    activation = schedule(5, 30).activation(HIDDEN, tokens, cu_seqlens=bounds)
    compare(case, [*case.tokens, *case.weights], chunk=2, activation=activation, cu_seqlens=bounds)


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 29), max_size=4, unique=True),
    chunk=st.sampled_from([1, 4, 7, 32]),
    read=st.sampled_from(["post", "pre"]),
    depth=st.sampled_from([2, 3]),
)
def test_any_split_into_calls_gives_what_one_call_gives(cuts, chunk, read, depth):
    case = gated(2, 30, depth=depth, grad=True)
    plan, offset = schedule(4, 25), torch.tensor([0, 6])
    options = {"chunk": chunk, "read": read, "output_final_state": True, **FUNCTION}
    whole, final = titans_memory(*case.tokens, case.weights, activation=plan.activation(HIDDEN, 30, offset=offset), **options)
    y, state = in_calls(case, [*sorted(cuts), 30], plan, offset, **options)
    torch.testing.assert_close(y, whole, rtol=0, atol=EXACT)
    assert_same_state(state, final)
    leaves = [*case.tokens, *case.weights]
    assert_same_gradients(gradients(y, state, leaves), gradients(whole, final, leaves))


@pytest.mark.parametrize("update", [{}, EVERY], ids=str)
@pytest.mark.parametrize("read", ["post", "pre"])
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize(("blocks", "context", "chunk"), [(1, 1, 16), (5, 40, 7), (3, 12, 1)])
def test_steps_equal_the_chunk_form_at_every_token(depth, read, update, blocks, context, chunk):
    case, plan, offset = gated(3, 41, depth=depth), schedule(blocks, context), torch.tensor([0, 5, 33])
    common = {"chunk": chunk, "read": read, "initial_state": case.state, "output_final_state": True, **update, **FUNCTION}
    whole, final = titans_memory(*case.tokens, case.weights, activation=plan.activation(HIDDEN, 41, offset=offset), **common)
    _, state = titans_memory(*case.piece(0, 1), case.weights, activation=plan.activation(HIDDEN, 1, offset=offset), **common)
    stepping = {"surprise_clip": update["surprise_clip"], "initial": case.weights} if update else {}
    steps, state = decode(case, state, plan, 1, 41, read=read, **stepping, **FUNCTION)
    torch.testing.assert_close(steps, whole[:, 1:], rtol=0, atol=EXACT)
    assert_same_state(state, final)


def test_gradients_through_steps_are_those_of_the_chunk_form():
    case, plan = gated(2, 11, grad=True), schedule(3, 20)
    options = {"chunk": 4, "output_final_state": True, **FUNCTION}
    whole, final = titans_memory(*case.tokens, case.weights, activation=plan.activation(HIDDEN, 11), **options)
    first, state = titans_memory(*case.piece(0, 1), case.weights, activation=plan.activation(HIDDEN, 1), **options)
    steps, state = decode(case, state, plan, 1, 11, **FUNCTION)
    leaves = [*case.tokens, *case.weights]
    assert_same_gradients(gradients(torch.cat([first, steps], 1), state, leaves), gradients(whole, final, leaves))


@pytest.mark.parametrize("depth", [2, 3])
def test_one_block_equals_no_schedule_bit_for_bit(depth):
    case = gated(2, 19, depth=depth, grad=True)
    results = []
    for activation in (None, schedule(1, 7).activation(HIDDEN, 19)):
        options = {"chunk": 4, "activation": activation, "output_final_state": True, **FUNCTION}
        y, state = titans_memory(*case.tokens, case.weights, **options)
        results.append([y, *floats(state), *gradients(y, state, [*case.tokens, *case.weights])])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("by_step", [False, True], ids=["chunks", "steps"])
@pytest.mark.parametrize("depth", [2, 3])
def test_locked_units_keep_their_bits_and_their_nan_to_themselves(depth, by_step):
    case, plan = gated(2, 17, depth=depth), schedule(3, 27)  # two of three blocks open
    masks = locked(case, 2 * (HIDDEN // 3), "swiglu")
    plant(case, masks)
    leaves = [*(t.requires_grad_() for t in case.tokens), *case.state[0], *case.state[1]]
    options = {"chunk": 4, "output_final_state": True, "initial_state": case.state, **FUNCTION}
    if by_step:
        with torch.no_grad():
            y, state = titans_memory(*case.piece(0, 1), case.weights, activation=plan.activation(HIDDEN, 1), **options)
            y, state = decode(case, state, plan, 1, 17, **FUNCTION)
    else:
        y, state = titans_memory(*case.tokens, case.weights, activation=plan.activation(HIDDEN, 17), **options)
        grads = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
        assert all(g.isfinite().all() for g in grads)
        for grad, mask in zip(grads[6:], [*masks, *masks]):
            assert (grad[:, :, mask] == 0).all() and (grad[:, :, ~mask] != 0).any()
    assert y.isfinite().all()
    assert_kept(case, state, masks)


def test_a_token_changes_nothing_before_it():
    case = gated(1, 26)
    options = {"chunk": 5, "activation": schedule(3, 21).activation(HIDDEN, 26), **FUNCTION}  # unlocks at 7, 14
    y, _ = titans_memory(*case.tokens, case.weights, **options)
    for token in (4, 5, 6, 7, 8, 13, 14, 20):
        tokens = [t.clone() for t in case.tokens]
        for tensor in tokens:
            tensor[:, token] = tensor[:, token] * 0.5 + 0.1
        changed, _ = titans_memory(*tokens, case.weights, **options)
        assert torch.equal(changed[:, :token], y[:, :token]) and not torch.equal(changed[:, token + 1], y[:, token + 1])


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_read_is_that_of_a_scan_without_momentum_and_steps(depth, blocks):
    case = gated(2, 7, depth=depth)
    activation = schedule(blocks, 8).activation(HIDDEN, 7, offset=[0, 3])
    still = torch.zeros(2, 7, HEADS, dtype=torch.float64)
    start = case.state[0], [torch.zeros_like(w) for w in case.state[0]]
    options = {"chunk": 3, "activation": activation, "initial_state": start, **FUNCTION}
    wanted, _ = titans_memory(*case.tokens[:3], still, still, still + 1, case.weights, **options)
    got = titans_read(case.state[0], case.tokens[0], activation.active, **FUNCTION)
    torch.testing.assert_close(got, wanted, rtol=0, atol=EXACT)


def test_reading_has_gradients_and_leaves_nan_where_it_is():
    case = gated(2, 4, depth=3, heads=1, grad=True)
    active = torch.tensor([[1, 2, 3, 5], [5, 5, 5, 5]])
    leaves = [*case.state[0], case.tokens[0]]
    assert torch.autograd.gradcheck(lambda *t: titans_read(t[:-1], t[-1], active, **FUNCTION), leaves)
    right = titans_read(leaves[:-1], leaves[-1], active, **FUNCTION)
    dirty = [torch.where(mask, torch.nan, w) for mask, w in zip(locked(case, 5, "swiglu"), case.state[0])]
    assert torch.equal(titans_read(dirty, leaves[-1], active, **FUNCTION), right)


@pytest.mark.parametrize("depth", DEPTHS)
def test_surprise_is_the_norm_of_the_inner_gradients_of_the_open_chunk(depth):
    case = gated(2, 7, depth=depth)
    options = {"chunk": 5, "activation": schedule(4, 8).activation(HIDDEN, 7, offset=[0, 3]), "output_final_state": True}
    _, state = titans_memory(*case.tokens, case.weights, **options, **FUNCTION)
    norms = []
    for i in range(2):  # positions 5 and 6 are open in the first row; the second ends at 10, a boundary
        masks = reference._layer_masks(state.active[:1, i], state.weights, "swiglu")
        opened = [torch.where(m, w[:1], 0.0) for m, w in zip(masks, state.weights)]
        parts = reference.inner_gradient(opened, state.k[:1, i], state.v[:1, i], "swiglu")
        norms.append(sum(torch.where(m, p, 0.0).square().sum((-1, -2)) for m, p in zip(masks, parts)).sqrt().mean())
    wanted = torch.stack([torch.stack(norms).mean(), torch.zeros((), dtype=torch.float64)])
    torch.testing.assert_close(titans_surprise(state, **FUNCTION), wanted, rtol=EXACT, atol=EXACT)


def test_the_functions_derivatives_are_those_of_automatic_differentiation():
    a, b = (x.flatten().clone() for x in torch.meshgrid(*2 * [torch.linspace(-8, 8, 41, dtype=torch.float64)], indexing="ij"))
    z, (to_gate, to_value) = [t.requires_grad_() for t in (a, b)], (a.detach().cos(), b.detach().sin())
    joined = silu(z[0]) * z[1]
    slopes = torch.autograd.grad(joined.sum(), z, create_graph=True)
    bends = torch.autograd.grad((slopes[0] * to_gate + slopes[1] * to_value).sum(), z)
    plain = [t.detach() for t in z]
    for function in (POINTWISE["swiglu"], memory_function("swiglu")):
        torch.testing.assert_close(function.join(plain), joined.detach(), rtol=0, atol=1e-13)
        for ours, right in zip(function.slopes(plain), slopes, strict=True):
            torch.testing.assert_close(ours, right.detach(), rtol=0, atol=1e-13)
    for ours, right in zip(POINTWISE["swiglu"].bends([to_gate, to_value], plain), bends, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=2e-12)  # f'' is right to 2e-13 (test_deep.py), times b of 8


def test_bf16_inputs_are_worked_on_in_fp32():
    case = gated(2, 20, dtype=torch.bfloat16)
    wide = [t.float() for t in (*case.tokens, *case.weights)]
    options = {"chunk": 8, "output_final_state": True, **FUNCTION}
    right, right_state = titans_memory(*wide[:6], wide[6:], **options)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = titans_memory(*case.tokens, case.weights, **options)
        stepped, _ = titans_step(*(t[:, 0] for t in case.tokens), state, **FUNCTION)
    assert torch.equal(y, right.bfloat16()) and stepped.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(floats(state), floats(right_state), strict=True))


def test_compiled_equals_eager_and_compiles_once_for_all_positions():
    def forward(tokens, weights, state, activation):
        return titans_memory(
            *tokens, weights, chunk=4, initial_state=state, activation=activation, output_final_state=True, **FUNCTION
        )

    def call(start):
        case = gated(2, 11, grad=True, seed=start)
        activation = schedule(4, 30).activation(HIDDEN, 11, offset=torch.tensor([start, start + 5]))
        return (case.tokens, case.weights, case.state, activation), [*case.tokens, *case.state[0], *case.state[1]]

    assert_compiled_once(forward, map(call, (0, 3, 18)))


def test_the_kernels_refuse_it_with_a_reason():
    torch.manual_seed(0)
    q, k, v = (normalize(torch.randn(1, 32, 1, 32), dim=-1) for _ in range(3))
    gates = [torch.full((1, 32, 1), x) for x in (0.01, 0.01, 0.9)]
    weights = [torch.randn(1, 32, 64), torch.randn(1, 32, 64), torch.randn(1, 64, 32)]
    reason = "memory_activation is 'swiglu', and the kernels have no gated hidden layer"
    assert refusals((q, k, v, *gates), weights, 16, memory_activation="swiglu")["triton"] == reason
    with pytest.raises(ValueError, match=reason):
        titans_memory(q, k, v, *gates, weights, chunk=16, backend="triton", **FUNCTION)
    y, state = titans_memory(q, k, v, *gates, weights, chunk=16, output_final_state=True, **FUNCTION)  # auto
    assert torch.equal(y, titans_memory(q, k, v, *gates, weights, chunk=16, backend="chunk", **FUNCTION)[0])
    with pytest.raises(ValueError, match=reason):
        titans_step(*(t[:, 0] for t in (q, k, v, *gates)), state, backend="triton", **FUNCTION)


def test_matrices_that_make_no_gated_memory_are_named():
    case = gated(1, 5, depth=3)
    w1, u1, w2, u2, w3 = case.weights
    for weights in ([w3[..., :HEAD, :]], [w1, w3], [w1, u1, w2, w3]):
        with pytest.raises(
            ValueError, match=rf"'swiglu' and the memory has {len(weights)} matrices.*2 in each hidden layer.*W1, U1, W2"
        ):
            titans_memory(*case.tokens, weights, chunk=4, **FUNCTION)
    with pytest.raises(ValueError, match="no hidden layer"):
        titans_memory(*case.tokens, [w3[..., :HEAD, :]], chunk=4, **FUNCTION)
    with pytest.raises(ValueError, match=r"U1 has shape .* must be \(H, in, out\) = \(2, 6, 13\)"):
        titans_memory(*case.tokens, [w1, w2, w3], chunk=4, **FUNCTION)
    with pytest.raises(ValueError, match="U2 has shape"):
        titans_memory(*case.tokens, [w1, u1, w2, u2[..., :4], w3], chunk=4, **FUNCTION)
    _, state = titans_memory(*case.tokens, case.weights, chunk=4, output_final_state=True, **FUNCTION)
    short = state._replace(weights=state.weights[:2], momentum=state.momentum[:2])
    for call in (
        lambda: titans_weights(short, **FUNCTION),
        lambda: titans_surprise(short, **FUNCTION),
        lambda: titans_step(*(t[:, 0] for t in case.tokens), short, **FUNCTION),
        lambda: titans_read(short.weights, case.tokens[0], **FUNCTION),
    ):
        with pytest.raises(ValueError, match="the memory has 2 matrices"):
            call()
    with pytest.raises(ValueError, match="U1 has shape"):
        titans_read([state.weights[0], state.weights[2], *state.weights[2:]], case.tokens[0], **FUNCTION)
    assert matrix_names(5, 2) == ["W1", "U1", "W2", "U2", "W3"] and matrix_names(2, 1) == ["W1", "W2"]
