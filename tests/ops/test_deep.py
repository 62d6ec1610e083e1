"""Titans' memory in chunks against the right values and the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu

from proteus_lm.ops import TitansState, _deep_scan, reference, titans_memory, titans_weights
from proteus_lm.ops._deep_activation import POINTWISE
from proteus_lm.ops._deep_scan import titans_scan
from proteus_lm.ops._deep_walk import GROUP
from proteus_lm.ops.memory_activations import memory_function
from proteus_lm.ops.native import build
from tests.ops import vectors
from tests.ops.deep_cases import (
    EXACT,
    HIDDEN,
    Case,
    assert_compiled_once,
    assert_kept,
    assert_same_gradients,
    assert_same_state,
    bits,
    compare,
    floats,
    gradients,
    in_calls,
    locked,
    make,
    plant,
    schedule,
    with_floats,
)

NATIVE = pytest.mark.skipif(bool(build.why_not()), reason=build.why_not() or "-")
BACKENDS = pytest.mark.parametrize("backend", ["chunk", pytest.param("native", marks=NATIVE)])


def as_computed(case: Case, backend: str) -> Case:
    """The case in the type that the backend computes in: the C kernel knows fp32 alone."""
    if backend != "native":
        return case
    given = case.tokens, case.weights, *case.state
    tokens, weights, *state = ([t.detach().float().requires_grad_(t.requires_grad) for t in part] for part in given)
    return Case(tokens, weights, (state[0], state[1]))


@pytest.mark.shared
@pytest.mark.parametrize("row", vectors.index("titans"), ids=lambda row: row["file"])
def test_right_values(row):
    vector = vectors.load(row)
    weights = [vector.arrays[name] for name in vector.weights]
    leaves = [t.requires_grad_(row.get("gradients", False)) for t in (*vector.inputs.values(), *weights)]
    y, state = titans_memory(*leaves[:6], leaves[6:], **vector.keywords)
    if "y" in vector.arrays:
        assert vectors.error(y, vector.arrays["y"]) < 1e-10
    if "final_W1" in vector.arrays:
        for name, part in zip("WS", titans_weights(state)):
            for layer, tensor in enumerate(part):
                assert vectors.error(tensor, vector.arrays[f"final_{name}{layer + 1}"]) < 1e-10
    if row.get("gradients"):
        (y * vector.arrays["weight_o"]).sum().backward()
        for name, leaf in zip([*vector.inputs, *vector.weights], leaves):
            assert vectors.error(leaf.grad, vector.arrays[f"grad_{name}"]) < 1e-6


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 65, 77])
def test_every_length_and_chunk_equals_the_oracle(tokens, chunk):
    case = make(2, tokens, grad=True, seed=tokens)
    leaves = [*case.tokens, *case.weights]
    compare(case, leaves, chunk=chunk, activation=schedule(4, 40).activation(HIDDEN, tokens))


@pytest.mark.parametrize("memory_activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize("read", ["post", "pre"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("blocks", "context", "offset"),
    [(1, 1, 0), (3, 30, 0), (3, 22, 4), (5, 10, [3, 0, 8]), (4, 40, [1, 20, 39])],
    ids=["ungated", "aligned", "unaligned", "many unlocks in a chunk", "far apart"],
)
def test_a_bare_state_of_every_depth_equals_the_oracle(depth, read, memory_activation, blocks, context, offset):
    case = make(3, 23, depth=depth, heads=1, grad=True, seed=depth)
    leaves = [*case.tokens, *case.state[0], *case.state[1]]
    activation = schedule(blocks, context).activation(case.units, 23, offset=offset)
    options = {"chunk": 5, "read": read, "memory_activation": memory_activation, "activation": activation}
    compare(case, leaves, initial_state=case.state, **options)


@pytest.mark.parametrize("read", ["post", "pre"])
@pytest.mark.parametrize("bounds", [[0, 31], [0, 1, 2, 19, 31], [0, 16, 31]])
def test_packed_documents_equal_the_oracle(bounds, read):
    case = make(1, 31, rows=len(bounds) - 1, grad=True)
    leaves = [*case.tokens, *case.state[0], *case.state[1]]
    cu_seqlens = torch.tensor(bounds)
    offset = torch.arange(len(bounds) - 1) * 7
    activation = schedule(4, 24).activation(HIDDEN, 31, offset=offset, cu_seqlens=cu_seqlens)
    compare(case, leaves, chunk=5, read=read, activation=activation, cu_seqlens=cu_seqlens, initial_state=case.state)


@pytest.mark.parametrize("read", ["post", "pre"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_gradients_flow_through_a_carried_state_as_in_the_oracle(depth, read):
    first, case = make(3, 11, depth=depth, seed=1), make(3, 14, depth=depth, grad=True, seed=2)
    plan, offset = schedule(3, 22), torch.tensor([0, 3, 9])
    with torch.no_grad():
        activation = plan.activation(case.units, 11, offset=offset)
        _, state = titans_memory(
            *first.tokens, first.weights, chunk=6, activation=activation, initial_state=first.state, output_final_state=True
        )
    state = with_floats(state, [t.detach().requires_grad_() for t in floats(state)])
    options = {"initial_state": state, "activation": plan.activation(case.units, 14, offset=state.position)}
    compare(case, [*case.tokens, *floats(state)], chunk=6, read=read, **options)


def test_gradcheck_over_three_chunks_with_unlocks():
    case = make(1, 8, heads=1, grad=True)
    activation = schedule(3, 7).activation(HIDDEN, 8)
    count = len(case.tokens)

    def run(*leaves):
        y, state = titans_memory(*leaves[:count], leaves[count:], chunk=3, activation=activation, output_final_state=True)
        return y, sum(t.square().sum() for t in floats(state))

    assert torch.autograd.gradcheck(run, [*case.tokens, *case.weights])


def plain_dual_form(tokens: list[Tensor], weights: list[Tensor], chunk: int) -> Tensor:
    """Spec 2.1-2.2 as printed, for two layers and all units open, differentiated by autograd."""
    q, k, v, *gates = (t.transpose(1, 2) for t in tokens)
    w1, w2 = (w.expand(len(q), *w.shape) for w in weights)
    s1, s2 = torch.zeros_like(w1), torch.zeros_like(w2)
    outputs = []
    for start in range(0, q.shape[2], chunk):
        x, keys, values, theta, alpha, eta = (t[:, :, start : start + chunk] for t in (q, k, v, *gates))
        size = x.shape[2]
        rows = []
        for gate in (1 - alpha, eta):
            between = [
                [gate[..., i + 1 : t + 1].prod(-1) if i <= t else 0 * gate[..., 0] for i in range(size)] for t in range(size)
            ]
            rows.append(torch.stack([torch.stack(row, -1) for row in between], -2))
        a, p = rows
        c0, p0 = ((1 - alpha).cumprod(-1)[..., None], eta.cumprod(-1)[..., None])
        s0, mix, kept = a @ p0, a @ p * theta[..., None, :], p * theta[..., None, :]
        z = keys @ w1
        hidden = gelu(z, approximate="tanh")
        slope = memory_function("gelu_tanh").slope(z)
        g2 = hidden @ w2 - values
        g1 = g2 @ w2.mT * slope
        read = gelu(c0 * (x @ w1) + s0 * (x @ s1) - (mix * (x @ keys.mT)) @ g1, approximate="tanh")
        outputs.append(c0 * (read @ w2) + s0 * (read @ s2) - (mix * (read @ hidden.mT)) @ g2)
        end, held = mix[..., -1, :, None], kept[..., -1, :, None]
        carry = (c0[..., -1:, :], s0[..., -1:, :], p0[..., -1:, :])
        w1, s1 = carry[0] * w1 + carry[1] * s1 - (end * keys).mT @ g1, carry[2] * s1 - (held * keys).mT @ g1
        w2, s2 = carry[0] * w2 + carry[1] * s2 - (end * hidden).mT @ g2, carry[2] * s2 - (held * hidden).mT @ g2
    return torch.cat(outputs, 2).transpose(1, 2)


def test_backward_equals_autograd_through_the_dual_form():
    case = make(2, 21, grad=True)
    leaves = [*case.tokens, *case.weights]
    right = plain_dual_form(case.tokens, case.weights, 5)
    y, _ = titans_memory(*case.tokens, case.weights, chunk=5)
    torch.testing.assert_close(y, right, rtol=0, atol=EXACT)
    assert_same_gradients(gradients(y, None, leaves), gradients(right, None, leaves))


@pytest.mark.parametrize("kept", [0, 20_000, 1 << 28], ids=["nothing", "the first groups", "all"])
def test_what_is_kept_for_the_backward_is_enough_for_many_chunks(kept, monkeypatch):
    """More chunks than lie between saved states, with unlocks in between, for rows that end in different chunks."""
    monkeypatch.setattr(_deep_scan, "KEPT", kept)
    tokens = 3 * 2 * GROUP + 5
    case = make(1, tokens, rows=3, heads=1, grad=True)
    bounds = torch.tensor([0, 7, 7 + 2 * GROUP, tokens])
    activation = schedule(5, 40).activation(HIDDEN, tokens, cu_seqlens=bounds)
    compare(case, [*case.tokens, *case.weights], chunk=2, activation=activation, cu_seqlens=bounds)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_memory_kept_for_the_backward_stays_within_its_limit(depth, monkeypatch):
    case = make(2, 2 * 3 * GROUP, depth=depth, grad=True)
    activation = schedule(3, 60).activation(case.units, 2 * 3 * GROUP)

    def kept(limit: int) -> int:
        monkeypatch.setattr(_deep_scan, "KEPT", limit)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            titans_memory(*case.tokens, case.weights, chunk=2, activation=activation)
        return sum(sizes)

    least, most = kept(0), kept(1 << 28)
    limit = (most - least) // 2
    gates = 2 * (2 + 1) * (2 * 2 * 3 * GROUP) * (2 + 2) * 8  # (chunk + 1, units, chunk + 2) twice
    assert least < kept(limit) <= least + limit + gates < most


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 29), max_size=5, unique=True),
    chunk=st.sampled_from([1, 4, 7, 32]),
    read=st.sampled_from(["post", "pre"]),
    depth=st.sampled_from([1, 2, 3]),
)
def test_any_split_into_calls_gives_what_one_call_gives(cuts, chunk, read, depth):
    case = make(2, 30, depth=depth, grad=True)
    plan, offset = schedule(4, 25), torch.tensor([0, 6])
    options = {"chunk": chunk, "read": read, "output_final_state": True}
    whole, final = titans_memory(*case.tokens, case.weights, activation=plan.activation(case.units, 30, offset=offset), **options)
    y, state = in_calls(case, [*sorted(cuts), 30], plan, offset, **options)
    torch.testing.assert_close(y, whole, rtol=0, atol=EXACT)
    assert_same_state(state, final)
    leaves = [*case.tokens, *case.weights]
    assert_same_gradients(gradients(y, state, leaves), gradients(whole, final, leaves))


def test_the_first_chunk_remembers_before_it_is_full():
    case, other = make(1, 10), make(1, 10)
    other.tokens[1][:, 0] *= -1
    y, changed = (titans_memory(*c.tokens, c.weights, chunk=64)[0] for c in (case, other))
    assert (y[:, 1:] - changed[:, 1:]).abs().amin() > 0


@BACKENDS
@pytest.mark.parametrize("read", ["post", "pre"])
def test_a_token_changes_nothing_before_it(read, backend):
    case = as_computed(make(1, 26), backend)
    activation = schedule(3, 21).activation(HIDDEN, 26)  # unlocks at 7 and 14, boundaries at 5, 10, ..
    options = {"chunk": 5, "read": read, "activation": activation, "backend": backend}
    y, _ = titans_memory(*case.tokens, case.weights, **options)
    for token in (4, 5, 6, 7, 8, 9, 10, 13, 14, 15, 20):
        tokens = [t.clone() for t in case.tokens]
        for tensor in tokens:
            tensor[:, token] = tensor[:, token] * 0.5 + 0.1
        changed, _ = titans_memory(*tokens, case.weights, **options)
        assert torch.equal(changed[:, :token], y[:, :token])
        assert not torch.equal(changed[:, token + 1], y[:, token + 1])


def test_rows_are_independent():
    case = make(3, 20)
    plan, offset = schedule(4, 18), torch.tensor([0, 5, 13])
    y, _ = titans_memory(*case.tokens, case.weights, chunk=4, activation=plan.activation(HIDDEN, 20, offset=offset))
    order = [2, 0, 1]
    moved, _ = titans_memory(
        *[t[order] for t in case.tokens],
        case.weights,
        chunk=4,
        activation=plan.activation(HIDDEN, 20, offset=offset[order]),
    )
    torch.testing.assert_close(moved, y[order], rtol=0, atol=EXACT)
    for row in range(3):
        alone, _ = titans_memory(
            *[t[row : row + 1] for t in case.tokens],
            case.weights,
            chunk=4,
            activation=plan.activation(HIDDEN, 20, offset=int(offset[row])),
        )
        torch.testing.assert_close(alone, y[row : row + 1], rtol=0, atol=EXACT)


@pytest.mark.parametrize("depth", [1, 2])
def test_one_block_equals_no_schedule_bit_for_bit(depth):
    case = make(2, 19, depth=depth, grad=True)
    leaves = [*case.tokens, *case.weights]
    results = []
    for activation in (None, schedule(1, 7).activation(case.units, 19)):
        y, state = titans_memory(*case.tokens, case.weights, chunk=4, activation=activation, output_final_state=True)
        results.append([y, *floats(state), *gradients(y, state, leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize(("depth", "backend"), [(1, "chunk"), (2, "chunk"), (3, "chunk"), pytest.param(2, "native", marks=NATIVE)])
def test_locked_units_keep_their_bits_and_their_nan_to_themselves(depth, backend):
    case = make(2, 17, depth=depth)
    activation = schedule(3, 27).activation(case.units, 17)  # two of three blocks open
    masks = locked(case, 2 * (case.units // 3))
    plant(case, masks)
    case = as_computed(case, backend)
    leaves = [*(t.requires_grad_() for t in case.tokens), *case.state[0], *case.state[1]]
    options = {"chunk": 4, "activation": activation, "output_final_state": True, "backend": backend}
    y, state = titans_memory(*case.tokens, case.weights, initial_state=case.state, **options)
    assert y.isfinite().all()
    assert_kept(case, state, masks)
    grads = torch.autograd.grad(y.sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    for grad, mask in zip(grads[6:], [*masks, *masks]):
        assert (grad[:, :, mask] == 0).all() and (grad[:, :, ~mask] != 0).any()


@BACKENDS
def test_a_unit_locked_to_one_row_and_open_to_another_keeps_its_nan_to_itself(backend):
    case = as_computed(make(2, 6), backend)
    width = HIDDEN // 3
    activation = schedule(3, 30).activation(HIDDEN, 6, offset=[0, 8])  # the second row's second block opens at its token 2
    for part in case.state:
        for tensor, mask in zip(part, locked(case, width)):
            tensor[0, :, mask] = float("nan")
    leaves = [t.requires_grad_() for t in (*case.tokens, *case.state[0], *case.state[1])]
    options = {"chunk": 4, "activation": activation, "output_final_state": True, "backend": backend}
    y, state = titans_memory(*case.tokens, case.weights, initial_state=case.state, **options)
    assert y.isfinite().all()
    for before, after, mask in zip(case.state[0], state.weights, locked(case, width)):
        assert torch.equal(bits(before[0, :, mask]), bits(after[0, :, mask]))
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), leaves))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("eta", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("theta", [0.0, 0.01])
def test_gates_at_their_ends_are_exact(alpha, eta, theta):
    case = make(1, 20)
    for tensor, value in zip(case.tokens[3:], (theta, alpha, eta)):
        tensor.fill_(value)
    leaves = [t.requires_grad_() for t in (*case.tokens, *case.state[0], *case.state[1])]
    compare(case, leaves, chunk=8, activation=schedule(3, 17).activation(HIDDEN, 20), initial_state=case.state)


@BACKENDS
def test_long_chunks_of_extreme_gates_stay_finite_in_fp32(backend):
    case = make(1, 200, dtype=torch.float32)
    case.tokens[3] *= 0.001  # the spec's bound on theta for this momentum
    case.tokens[4].copy_((torch.arange(200) % 3 == 0).float()[:, None].expand(1, 200, 2))
    case.tokens[5].fill_(0.95)
    leaves = [t.requires_grad_() for t in (*case.tokens, *case.weights)]
    y, _ = titans_memory(*case.tokens, case.weights, chunk=128, backend=backend)
    right, _ = reference.titans_memory(*[t.double() for t in case.tokens], [w.double() for w in case.weights], chunk=128)
    assert (y - right).norm() < 1e-5 * right.norm()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), leaves))


def test_shares_that_are_too_small_for_a_processor_to_be_quick_count_as_none(monkeypatch):
    """Of a token's gradient, of start weights and of start momentum, below tiny / eps; what they would add is below rounding."""
    case = make(2, 96, dtype=torch.float32, grad=True)
    with torch.no_grad():
        case.tokens[4].fill_(0.8)  # 0.2^63 and 0.1^63 are below 1e-31
        case.tokens[5].fill_(0.1)
    leaves = [*case.tokens, *case.state[0], *case.state[1]]
    options = {"chunk": 64, "initial_state": case.state, "output_final_state": True, "backend": "chunk"}
    y, state = titans_memory(*case.tokens, case.weights, **options)
    without = [y, *floats(state), *gradients(y, state, leaves)]
    small = []

    def count(shares: Tensor, limit: float, value: float) -> Tensor:
        small.append(int(((shares > 0) & (shares <= limit)).sum()))
        return shares

    monkeypatch.setattr(torch, "threshold_", count)
    y, state = titans_memory(*case.tokens, case.weights, **options)
    whole = [y, *floats(state), *gradients(y, state, leaves)]
    assert min(small) > 0
    for ours, right in zip(without, whole, strict=True):
        assert (ours - right).abs().amax() <= torch.finfo(torch.float32).eps * right.abs().amax()


@BACKENDS
def test_result_is_that_of_fp32_whatever_the_types_and_the_autocast(backend):
    case = make(2, 30, dtype=torch.bfloat16, grad=True)
    leaves = [*case.tokens, *case.weights]
    wide = [t.detach().float().requires_grad_() for t in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        y, state = titans_memory(*case.tokens, case.weights, chunk=8, output_final_state=True, backend=backend)
        grads = gradients(y, None, leaves)
    right, right_state = titans_memory(*wide[:6], wide[6:], chunk=8, output_final_state=True, backend=backend)
    assert y.dtype == torch.bfloat16 and all(t.dtype == torch.float32 for t in floats(state))
    assert torch.equal(y, right.bfloat16()) and all(torch.equal(a, b) for a, b in zip(floats(state), floats(right_state)))
    for ours, theirs in zip(grads, gradients(right, None, wide)):
        assert ours.dtype == torch.bfloat16 and (ours.float() - theirs).norm() < 0.01 * theirs.norm()  # bf16 has 8 bits


def test_results_do_not_depend_on_the_mode():
    case = make(2, 20)

    def run() -> Tensor:
        return titans_memory(*case.tokens, case.weights, chunk=8)[0]

    plain = run()
    with torch.no_grad():
        assert torch.equal(run(), plain)
    with torch.inference_mode():
        assert torch.equal(run(), plain)
    for tensor in case.tokens:
        tensor.requires_grad_()
    assert torch.equal(run(), plain)


@pytest.mark.parametrize("name", list(POINTWISE))
def test_activations_and_their_derivatives_are_those_of_the_oracle(name):
    z = torch.linspace(-8, 8, 801, dtype=torch.float64)
    g, function = z.cos(), POINTWISE[name]
    leaf = z.clone().requires_grad_()
    (curvature,) = torch.autograd.grad(memory_function(name).slope(leaf).sum(), leaf)
    for ours, right in (
        (function.value(z), memory_function(name).act(z)),
        (function.slope(g, z), g * memory_function(name).slope(z)),
    ):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-14)
    # f'' has p (1 - p), of a p near 1 with its rounding of 1e-16, times z u'^2, which is 1.5e3 at z = 8.
    torch.testing.assert_close(function.bend(g, z), g * curvature, rtol=0, atol=2e-13)
    expanded = [torch.empty_like(z) for _ in range(3)]
    function.expand(z.clone(), *expanded)
    for ours, right in zip(expanded, (function.value(z), function.slope(torch.ones_like(z), z))):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-14)


def test_operator_keeps_what_it_promises_to_torch():
    case = make(2, 9, grad=True)
    state = [[t.detach().requires_grad_() for t in part] for part in case.state]
    opened, offset = torch.full((1, 9), HIDDEN), torch.tensor([0, 2])
    options = (opened, None, offset, None, None, 4, "post", "gelu_tanh", None, True, True)
    torch.library.opcheck(titans_scan, (case.tokens, [], *state, [], [], *options))


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_equals_eager_and_compiles_once_for_all_positions(packed):
    def forward(tokens, weights, state, activation, cu_seqlens):
        return titans_memory(
            *tokens, weights, chunk=4, initial_state=state, activation=activation, cu_seqlens=cu_seqlens, output_final_state=True
        )

    def call(start):
        case = make(1 if packed else 2, 21, rows=2, grad=True, seed=start)
        cu_seqlens = torch.tensor([0, 2 + start % 16, 21]) if packed else None
        offset = torch.tensor([start, start + 5])
        activation = schedule(4, 30).activation(HIDDEN, 21, offset=offset, cu_seqlens=cu_seqlens)
        leaves = [*case.tokens, *case.state[0], *case.state[1]]
        return (case.tokens, case.weights, case.state, activation, cu_seqlens), leaves

    assert_compiled_once(forward, map(call, (0, 3, 7, 18, 1000)))


def test_backends_agree_and_an_unknown_one_is_refused():
    case = make(1, 9)
    results = [titans_memory(*case.tokens, case.weights, chunk=4, backend=name)[0] for name in ("auto", "chunk", "reference")]
    for y in results:
        torch.testing.assert_close(y, results[0], rtol=0, atol=EXACT)
    with pytest.raises(ValueError, match="backend is 'fast'"):
        titans_memory(*case.tokens, case.weights, chunk=4, backend="fast")


def wrong(**changes):
    """A call with some arguments replaced."""
    case = make(2, 6)
    named = dict(zip(("q", "k", "v", "theta", "alpha", "eta"), case.tokens)) | {"weights": case.weights, "chunk": 4} | changes
    return titans_memory(**named)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk": 0}, "chunk is 0"),
        ({"read": "after"}, "read is 'after'"),
        ({"memory_activation": "relu"}, "memory_activation is 'relu'"),
        ({"k": torch.zeros(2, 6, 2, 5)}, "they must be"),
        ({"v": torch.zeros(2, 5, 2, 5)}, "they must be"),
        ({"theta": torch.zeros(2, 6)}, "theta has shape"),
        ({"weights": []}, "no weights"),
        ({"weights": [torch.zeros(2, 6, 7), torch.zeros(2, 8, 5)]}, "W2 has shape"),
        ({"activation": schedule(2, 9).activation(12, 6)}, "12 coordinates and 6 tokens"),
        ({"activation": schedule(2, 9).activation(13, 7)}, "13 coordinates and 7 tokens"),
        ({"activation": schedule(2, 9).activation(13, 6, offset=[1, 2, 3])}, "3 offsets for 2 rows"),
        ({"cu_seqlens": torch.tensor([0, 6])}, "batch of 2 rows"),
        ({"initial_state": ([torch.zeros(2, 2, 6, 13)], [])}, "weights of shapes"),
        ({"initial_state": torch.zeros(2, 2, 6, 13)}, "initial_state is a Tensor"),
    ],
)
def test_bad_input_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        wrong(**changes)


def test_integers_and_empty_sequences_are_refused():
    with pytest.raises(TypeError, match=r"alpha is torch\.int64"):
        wrong(alpha=torch.zeros(2, 6, 2, dtype=torch.int64))
    case = make(2, 6)
    with pytest.raises(ValueError, match="at least one row and one token"):
        titans_memory(*case.piece(0, 0), case.weights, chunk=4)


def test_packing_that_does_not_fit_is_refused():
    case = make(1, 6)
    with pytest.raises(ValueError, match="must rise from 0 to the 6 tokens"):
        titans_memory(*case.tokens, case.weights, chunk=4, cu_seqlens=torch.tensor([0, 5]))
    activation = schedule(2, 9).activation(HIDDEN, 6, cu_seqlens=torch.tensor([0, 2, 6]))
    with pytest.raises(ValueError, match="only one of the call and its activation"):
        titans_memory(*case.tokens, case.weights, chunk=4, activation=activation)
    with pytest.raises(ValueError, match="give both the same cu_seqlens"):
        titans_memory(*case.tokens, case.weights, chunk=4, activation=activation, cu_seqlens=torch.tensor([0, 3, 6]))


def test_a_state_from_elsewhere_is_refused():
    case = make(2, 6)
    _, state = titans_memory(*case.tokens, case.weights, chunk=4, output_final_state=True)
    assert isinstance(state, TitansState)
    with pytest.raises(ValueError, match="made with chunk=4, this call has chunk=8"):
        wrong(initial_state=state, chunk=8)
    with pytest.raises(ValueError, match=r"stands at positions \[6, 6\] but the activation starts at \[5\]"):
        wrong(initial_state=state, activation=schedule(2, 9).activation(HIDDEN, 6, offset=5))
