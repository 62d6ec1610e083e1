"""Every linear rule, on both axes, from one table: right values, agreement with the oracle, and what must hold everywhere."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from proteus_lm import ActivationSchedule
from proteus_lm.ops import _linear
from proteus_lm.ops._linear_operator import INPUTS, linear_chunk
from proteus_lm.ops.state import SWLAState
from tests.ops import vectors
from tests.ops.linear_rules import (
    AXES,
    HEADS,
    KEYS,
    READS,
    RULES,
    VALUES,
    WINDOW,
    assert_close,
    call,
    everything,
    leaves,
    like,
    make,
    make_state,
    matrix,
    rms,
)

DIM = {"key": KEYS, "value": VALUES}
FILES = [row for row in vectors.index() if row["rule"] != "titans"]
BLOCKS = 4
each_rule = pytest.mark.parametrize("rule", RULES)
each_axis = pytest.mark.parametrize("axis", AXES)
each_read = pytest.mark.parametrize("read", READS)


def schedule(context: int = 60) -> ActivationSchedule:
    return ActivationSchedule(BLOCKS, context)


@pytest.mark.shared
@pytest.mark.parametrize("tile", [32, 7])
@pytest.mark.parametrize("row", FILES, ids=lambda r: r["file"])
def test_equals_right_values(row, tile, monkeypatch):
    monkeypatch.setitem(_linear.TILES, "cpu", tile)
    vector = vectors.load(row)
    inputs = {n: x.requires_grad_() for n, x in vector.inputs.items()}
    out, state = call(vector.operation, inputs, **vector.keywords)
    if not row.get("gradients"):
        assert vectors.error(out, vector.arrays["o"]) < 1e-10
        assert vectors.error(matrix(state), vector.arrays["final_state"]) < 1e-10
        return
    loss = (out * vector.arrays["weight_o"]).sum() + (matrix(state) * vector.arrays["weight_state"]).sum()
    for name, gradient in zip(inputs, torch.autograd.grad(loss, list(inputs.values()))):
        assert vectors.error(gradient, vector.arrays[f"grad_{name}"]) < 1e-6, name  # theirs are central differences


@each_rule
@each_axis
@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 63, 64, 65, 130])
@each_read
def test_equals_the_oracle_with_every_gradient(rule, read, axis, tokens):
    inputs, state = make(rule, 2, tokens), make_state(rule, 2)
    activation = schedule().activation(DIM[axis], tokens, offset=torch.tensor([7, 0]))  # unlocks at 15, 30, 45: inside a tile
    ours = everything(rule, inputs, state, activation=activation, axis=axis, read=read)
    assert_close(ours, everything(rule, inputs, state, activation=activation, axis=axis, backend="reference", read=read), 1e-10)


@each_rule
@pytest.mark.parametrize("tile", [1, 2, 5, 16, 64])
@each_read
def test_equals_the_oracle_whatever_the_tile(rule, read, tile, monkeypatch):
    monkeypatch.setitem(_linear.TILES, "cpu", tile)
    inputs, state = make(rule, 3, 37), make_state(rule, 3)
    activation = schedule().activation(KEYS, 37)
    ours = everything(rule, inputs, state, activation=activation, read=read)
    assert_close(ours, everything(rule, inputs, state, activation=activation, backend="reference", read=read), 1e-10)


@each_rule
@each_read
def test_equals_the_oracle_without_activation_and_state(rule, read):
    inputs = make(rule, 2, 70)
    assert_close(
        everything(rule, inputs, None, scale=0.3, read=read),
        everything(rule, inputs, None, scale=0.3, backend="reference", read=read),
        1e-10,
    )


@each_rule
@each_axis
@each_read
def test_fp32_is_within_its_tolerance_of_fp64(rule, read, axis):
    inputs, state = make(rule, 2, 130, dtype=torch.float32), make_state(rule, 2, dtype=torch.float32)
    activation = schedule(100).activation(DIM[axis], 130)
    right = everything(
        *(rule, {n: x.double() for n, x in inputs.items()}, like(state, [x.double() for x in leaves(state)])),
        activation=activation,
        axis=axis,
        backend="reference",
        read=read,
    )
    ours = everything(rule, inputs, state, activation=activation, axis=axis, read=read)
    assert all(x.dtype == torch.float32 for x in ours.values())
    assert_close(ours, right, 1e-5)


@each_rule
@pytest.mark.parametrize("autocast", [False, True])
@each_read
def test_bf16_inputs_are_computed_in_fp32(rule, read, autocast):
    inputs = make(rule, 2, 130, dtype=torch.bfloat16)
    activation = schedule(100).activation(KEYS, 130)
    right, right_state = call(rule, {n: x.float() for n, x in inputs.items()}, activation=activation, read=read)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, state = call(rule, inputs, activation=activation, read=read)
        gradients = everything(rule, inputs, None, activation=activation, read=read)
    assert out.dtype == torch.bfloat16 and matrix(state).dtype == torch.float32
    assert torch.equal(out, right.bfloat16()) and torch.equal(matrix(state), matrix(right_state))
    wide = everything(rule, {n: x.float() for n, x in inputs.items()}, None, activation=activation, read=read)
    assert_close(gradients, wide, 1e-2)


@each_rule
@each_axis
@pytest.mark.parametrize("offset", [5, torch.tensor([5, 21])], ids=["together", "apart"])
@each_read
def test_any_split_gives_what_one_call_gives(rule, read, axis, offset):
    tokens = 90
    inputs, state = make(rule, 2, tokens), make_state(rule, 2)
    whole, final = call(
        rule, inputs, initial_state=state, axis=axis, activation=schedule().activation(DIM[axis], tokens, offset=offset), read=read
    )
    outs = []
    for first, last in [(0, 1), (1, 10), (10, 11), (11, 25), (25, 64), (64, 90)]:  # on, beside and across unlocks
        part = {n: x[:, first:last] for n, x in inputs.items()}
        activation = schedule().activation(DIM[axis], last - first, offset=offset + first)
        out, state = call(rule, part, initial_state=state, axis=axis, activation=activation, read=read)
        outs.append(out)
    assert rms(torch.cat(outs, 1), whole) < 1e-12
    assert all(rms(x, y) < 1e-12 for x, y in zip(leaves(state), leaves(final)))


@each_rule
@each_axis
@pytest.mark.parametrize("token", [1, 14, 15, 63, 64, 76, 77])
@each_read
def test_a_token_changes_nothing_before_it_and_something_behind(rule, read, axis, token):
    inputs = make(rule, 1, 80)
    activation = schedule().activation(DIM[axis], 80)
    before, _ = call(rule, inputs, axis=axis, activation=activation, read=read)
    other = make(rule, 1, 80, seed=3)
    changed = {n: torch.cat((x[:, :token], other[n][:, token : token + 1], x[:, token + 1 :]), 1) for n, x in inputs.items()}
    after, _ = call(rule, changed, axis=axis, activation=activation, read=read)
    assert torch.equal(before[:, :token], after[:, :token])
    assert not torch.equal(before[:, -1], after[:, -1])


def poison(x: torch.Tensor, first: int, dim: int = -1) -> torch.Tensor:
    """NaN in the coordinates from `first` on."""
    x.narrow(dim, first, x.shape[dim] - first).fill_(torch.nan)
    return x


@each_rule
@each_axis
@pytest.mark.parametrize("offset", [0, torch.tensor([0, 3])], ids=["together", "apart"])
@each_read
def test_nothing_locked_is_read_or_changed(rule, read, axis, offset):
    """NaN in a block that stays locked, in the state and in the tokens, reaches no output, no gradient, no open coordinate."""
    tokens, dim = 33, DIM[axis]
    width = 3 * (dim // BLOCKS)
    inputs, state = make(rule, 2, tokens), make_state(rule, 2)
    activation = schedule().activation(dim, tokens, offset=offset)
    assert int(activation.active.max()) == width
    clean = everything(rule, inputs, state, activation=activation, axis=axis, read=read)
    poison(matrix(state), width, -2 if axis == "key" else -1)
    for name in ("q", "k", "p") if axis == "key" else ("v",):
        if name in inputs:
            poison(inputs[name], width)
    if isinstance(state, SWLAState):
        poison(state.keys if axis == "key" else state.values, width)
    poisoned = everything(rule, inputs, state, activation=activation, axis=axis, read=read)
    right = poison(clean["state 0"].clone(), width, -2 if axis == "key" else -1)
    assert torch.equal(poisoned["state 0"].nan_to_num(7.0), right.nan_to_num(7.0))
    for name in clean.keys() - {"state 0", "state 1", "state 2"}:
        assert torch.equal(poisoned[name], clean[name]), name


@each_rule
@each_axis
@each_read
def test_a_block_that_opens_later_is_not_read_before(rule, read, axis):
    inputs, state = make(rule, 1, 40), make_state(rule, 1)
    activation = schedule().activation(DIM[axis], 40)
    clean, _ = call(rule, inputs, initial_state=state, activation=activation, axis=axis, read=read)
    poison(matrix(state), DIM[axis] // BLOCKS, -2 if axis == "key" else -1)
    out, _ = call(rule, inputs, initial_state=state, activation=activation, axis=axis, read=read)
    assert torch.equal(out[:, :15], clean[:, :15])
    assert out[:, 15].isnan().any()


@each_rule
@each_axis
@each_read
def test_one_block_is_the_base_rule_bit_for_bit(rule, read, axis):
    inputs, state = make(rule, 2, 70, dtype=torch.float32), make_state(rule, 2, dtype=torch.float32)
    one = ActivationSchedule(1, 50).activation(DIM[axis], 70, offset=torch.tensor([0, 9]))
    gated, base = everything(rule, inputs, state, activation=one, axis=axis, read=read), everything(rule, inputs, state, read=read)
    assert all(torch.equal(x, base[n]) for n, x in gated.items())
    open_all = ActivationSchedule(BLOCKS, 50).activation(DIM[axis], 70, offset=50)
    gated = everything(rule, inputs, state, activation=open_all, axis=axis, read=read)
    assert all(torch.equal(x, base[n]) for n, x in gated.items())


@each_rule
@each_axis
@pytest.mark.parametrize("offset", [None, torch.tensor([0, 20, 3, 0, 44])], ids=["together", "apart"])
@each_read
def test_packed_documents_equal_separate_ones(rule, read, axis, offset):
    bounds = [0, 17, 18, 88, 90, 131]
    cu_seqlens = torch.tensor(bounds)
    inputs, state = make(rule, 1, bounds[-1]), make_state(rule, 5)
    packed = everything(
        *(rule, inputs, state),
        axis=axis,
        cu_seqlens=cu_seqlens,
        activation=schedule().activation(DIM[axis], bounds[-1], cu_seqlens=cu_seqlens, offset=offset),
        read=read,
    )
    right = everything(
        *(rule, inputs, state),
        axis=axis,
        cu_seqlens=cu_seqlens,
        activation=schedule().activation(DIM[axis], bounds[-1], cu_seqlens=cu_seqlens, offset=offset),
        backend="reference",
        read=read,
    )
    assert_close(packed, right, 1e-10)
    for i, (first, last) in enumerate(zip(bounds, bounds[1:])):
        part = {n: x[:, first:last] for n, x in inputs.items()}
        activation = schedule().activation(DIM[axis], last - first, offset=0 if offset is None else offset[i : i + 1])
        start = like(state, [x[i : i + 1] for x in leaves(state)])
        out, final = call(rule, part, initial_state=start, axis=axis, activation=activation, read=read)
        assert rms(packed["out"][:, first:last], out) < 1e-12
        assert all(rms(packed[f"state {j}"][i : i + 1], x) < 1e-12 for j, x in enumerate(leaves(final)))


@each_rule
@each_read
def test_a_row_does_not_depend_on_its_batch(rule, read):
    inputs = make(rule, 4, 50)
    offset, order = torch.tensor([30, 0, 44, 0]), torch.tensor([2, 0, 3, 1])
    whole, _ = call(rule, inputs, activation=schedule().activation(KEYS, 50, offset=offset), read=read)
    activation = schedule().activation(KEYS, 50, offset=offset[order])
    shuffled, _ = call(rule, {n: x[order] for n, x in inputs.items()}, activation=activation, read=read)
    assert rms(shuffled, whole[order]) < 1e-14


@pytest.mark.parametrize("rule", [r for r in RULES if "g" in _linear.ARGUMENTS[r]])
@pytest.mark.parametrize("decay", [-50.0, -1000.0, -torch.inf])
@each_read
def test_strong_decay_stays_finite_and_right(rule, read, decay):
    inputs = make(rule, 1, 130, dtype=torch.float32)
    inputs["g"][:, ::3] = decay  # every third token forgets all; between them decays are mild
    ours = everything(rule, inputs, None, read=read)
    assert all(x.isfinite().all() for x in ours.values())
    right = everything(rule, {n: x.double() for n, x in inputs.items()}, None, backend="reference", read=read)
    mild = torch.arange(130) % 3 != 0
    for values in (ours, right):  # where nothing is left the gradient of g is all but 0, and has no digits to compare
        values["gradient of g"] = values["gradient of g"][:, mild]
    assert_close(ours, right, 1e-5)


@each_rule
@each_read
def test_keys_that_repeat_in_a_small_open_block_stay_stable(rule, read):
    """Strong writes (beta 2) of equal keys: the worst case of the small inverse (spec/linear.md 5.3)."""
    inputs = make(rule, 1, 128, dtype=torch.float32)
    inputs["k"] = inputs["k"][:, :1].expand(-1, 128, -1, -1)
    if "beta" in inputs:
        inputs["beta"] = inputs["beta"] * 2
    activation = schedule(1000).activation(KEYS, 128)
    ours = everything(rule, inputs, None, activation=activation, read=read)
    right = everything(
        rule, {n: x.double() for n, x in inputs.items()}, None, activation=activation, backend="reference", read=read
    )
    assert_close(ours, right, 1e-5)


@each_axis
def test_swla_writes_the_token_before_an_unlock_into_the_new_block(axis):
    c, tokens = 2, 16  # the second block opens at token 15
    inputs, state = make("swla", 1, tokens, c=c), None
    inputs["gamma"][:, 15, :, 0] = 0  # token 15 writes nothing of its own, only token 14 again
    activation = schedule().activation(DIM[axis], tokens)
    _, state = call("swla", inputs, activation=activation, axis=axis)
    width = DIM[axis] // BLOCKS
    right = inputs["gamma"][:, 15, :, 1, None, None] * inputs["k"][:, 14, :, :, None] * inputs["v"][:, 14, :, None, :]
    dim = -2 if axis == "key" else -1
    assert rms(state.matrix.narrow(dim, width, width), right.narrow(dim, width, width)) < 1e-14


@each_axis
def test_swla_in_one_pass_equals_one_pass_a_window_slot(axis):
    """With all open, a window of two is retention of (k, gamma_0 v) plus retention of the pairs before (spec/linear.md 1.4)."""
    inputs = make("swla", 2, 100, c=2)
    q, k, v, g, gamma = inputs.values()
    out, _ = call("swla", inputs, axis=axis)
    before_k, before_v = (torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1) for x in (k, v))
    current, _ = call("retention", {"q": q, "k": k, "v": gamma[..., :1] * v, "g": g}, axis=axis)
    previous, _ = call("retention", {"q": q, "k": before_k, "v": gamma[..., 1:] * before_v, "g": g}, axis=axis)
    assert rms(out, current + previous) < 1e-12


@pytest.mark.parametrize("c", [1, 2, 5])
@each_read
def test_swla_windows_of_any_length_cross_tiles_and_documents(read, c, monkeypatch):
    monkeypatch.setitem(_linear.TILES, "cpu", 3)  # shorter than the window
    inputs, state = make("swla", 1, 40, c=c), make_state("swla", 3, c=c)
    cu_seqlens = torch.tensor([0, 2, 23, 40])
    keywords = {"cu_seqlens": cu_seqlens, "activation": schedule(20).activation(KEYS, 40, cu_seqlens=cu_seqlens)}
    ours = everything("swla", inputs, state, **keywords, read=read)
    assert_close(ours, everything("swla", inputs, state, backend="reference", **keywords, read=read), 1e-10)


def test_swla_takes_a_bare_matrix_as_a_state_with_an_empty_window():
    inputs, state = make("swla", 2, 9), make_state("swla", 2)
    empty = SWLAState(state.matrix, torch.zeros_like(state.keys), torch.zeros_like(state.values))
    (bare, bare_final), (full, full_final) = (call("swla", inputs, initial_state=s) for s in (state.matrix, empty))
    assert torch.equal(bare, full) and all(torch.equal(x, y) for x, y in zip(bare_final, full_final))


@each_rule
def test_inputs_may_be_views_and_stay_as_they_are(rule):
    inputs, state = make(rule, 2, 21), make_state(rule, 2)
    views = {n: x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for n, x in inputs.items()}
    out, final = call(rule, views, initial_state=state)
    out.sum().backward()
    right, right_final = call(rule, inputs, initial_state=make_state(rule, 2))
    assert torch.equal(out, right) and all(torch.equal(x, y) for x, y in zip(leaves(final), leaves(right_final)))
    assert all(torch.equal(x, inputs[n]) for n, x in views.items())
    assert all(torch.equal(x, y) for x, y in zip(leaves(state), leaves(make_state(rule, 2))))


@each_rule
def test_gradients_pass_gradcheck(rule):
    inputs, state = make(rule, 2, 4, keys=3, values=2), make_state(rule, 2, keys=3, values=2)
    activation = ActivationSchedule(2, 6).activation(3, 4, offset=torch.tensor([0, 1]))
    tensors = [x.requires_grad_() for x in (*inputs.values(), *leaves(state))]

    def flat(*xs):
        start = like(state, list(xs[len(inputs) :]))
        out, final = call(rule, dict(zip(inputs, xs)), initial_state=start, activation=activation)
        return (out, *leaves(final))

    assert torch.autograd.gradcheck(flat, tensors)


@pytest.mark.parametrize("rule", list(INPUTS))
@pytest.mark.parametrize("pre", [False, True])
def test_operator_keeps_what_it_promises_to_torch(rule, pre):
    inputs, state = make(rule, 2, 9), make_state(rule, 2)
    named = inputs | dict(zip(("state", "window_k", "window_v"), leaves(state)))
    tensors = [named[n].requires_grad_() for n in INPUTS[rule]]
    torch.library.opcheck(linear_chunk, (tensors, torch.full((1, 9), 4), None, rule, True, pre, 0.5, 4))


@each_rule
@each_read
def test_compiled_equals_eager_and_compiles_once_for_all_positions(rule, read):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def forward(inputs, state, activation):
        return call(rule, inputs, initial_state=state, activation=activation, read=read)

    compiled = torch.compile(forward, fullgraph=True, backend=counter)
    for offset in (0, 7, 30, 58, 1000):
        inputs = {n: x.requires_grad_() for n, x in make(rule, 2, 33, seed=offset).items()}
        state = make_state(rule, 2)
        activation = schedule().activation(KEYS, 33, offset=torch.tensor([offset, offset + 3]))
        (right, right_final), (out, final) = forward(inputs, state, activation), compiled(inputs, state, activation)
        assert torch.equal(out, right) and all(torch.equal(x, y) for x, y in zip(leaves(final), leaves(right_final)))
        ours, theirs = (torch.autograd.grad(x.square().sum(), list(inputs.values())) for x in (out, right))
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs))
    assert counter.frame_count == 1


@each_rule
def test_compiled_with_packed_documents_equals_eager(rule):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def forward(inputs, cu_seqlens, activation):
        return call(rule, inputs, cu_seqlens=cu_seqlens, activation=activation)

    compiled = torch.compile(forward, fullgraph=True, backend=counter)
    for bounds in ([0, 5, 40, 70], [0, 1, 2, 70]):
        inputs, cu_seqlens = make(rule, 1, 70), torch.tensor(bounds)
        arguments = (inputs, cu_seqlens, schedule().activation(KEYS, 70, cu_seqlens=cu_seqlens))
        (right, right_final), (out, final) = forward(*arguments), compiled(*arguments)
        assert torch.equal(out, right) and all(torch.equal(x, y) for x, y in zip(leaves(final), leaves(right_final)))
    assert counter.frame_count == 1


def wrong(rule="comba", **changes):
    """A call with some arguments replaced."""
    inputs = make(rule, 2, 6)
    return lambda: call(rule, {n: changes.pop(n, x) for n, x in inputs.items()}, **changes)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (wrong(axis="rows"), ValueError, "axis is 'rows'.*key, value"),
        (wrong(read="before"), ValueError, "read is 'before'.*post, pre"),
        (wrong(backend="fast"), ValueError, "backend is 'fast'.*auto, "),
        (wrong(q=torch.randn(2, 6, KEYS)), ValueError, r"q is of shape \(2, 6, 10\)"),
        (wrong(k=torch.randn(2, 6, HEADS, 3)), ValueError, r"k is of shape .*must be \(2, 6, 2, 10\)"),
        (wrong(p=torch.randn(2, 5, HEADS, KEYS)), ValueError, "p is of shape"),
        (wrong(g=torch.randn(2, 6)), ValueError, r"g is of shape \(2, 6\).*must be \(2, 6, 2\)"),
        (wrong(beta=torch.ones(2, 6, HEADS, dtype=torch.int64)), TypeError, "beta is torch.int64"),
        (wrong("swla", gamma=torch.ones(2, 6, HEADS)), ValueError, "gamma is of shape"),
        (wrong("swla", gamma=torch.ones(2, 6, HEADS, 0)), ValueError, "gamma is of shape"),
        (wrong(v=torch.randn(2, 6, HEADS, VALUES, device="meta")), ValueError, "v is on meta and q on cpu"),
        (wrong(q=torch.randn(2, 0, HEADS, KEYS)), ValueError, "q is of shape"),
        (wrong(cu_seqlens=torch.tensor([0, 3, 6])), ValueError, "cu_seqlens with a batch of 2"),
        (wrong(cu_seqlens=torch.tensor([0.0, 6.0])), ValueError, "cu_seqlens"),
        (
            wrong(initial_state=torch.zeros(2, HEADS, VALUES, KEYS)),
            ValueError,
            r"initial_state is of shape .*must be \(2, 2, 10, 9\)",
        ),
        (wrong(initial_state=make_state("swla", 2)), TypeError, "initial_state is a SWLAState; comba carries a matrix"),
        (wrong("swla", initial_state=make_state("swla", 2, c=5)), ValueError, "initial_state.keys is of shape"),
        (wrong(activation=schedule().activation(VALUES, 6)), ValueError, "activation is of 9 coordinates; axis='key' has 10"),
        (wrong(axis="value", activation=schedule().activation(KEYS, 6)), ValueError, "activation is of 10 coordinates"),
        (wrong(activation=schedule().activation(KEYS, 5)), ValueError, "activation is of 5 tokens and q of 6"),
        (wrong(activation=schedule().activation(KEYS, 6, offset=[0, 1, 2])), ValueError, "3 offsets for 2 rows"),
    ],
)
def test_bad_arguments_are_named(bad, error, message):
    with pytest.raises(error, match=message):
        bad()


@pytest.mark.parametrize("bounds", [[0, 3, 7], [1, 6], [0, 4, 4, 6], [0, 5]])
def test_boundaries_that_do_not_fit_the_tokens_are_refused(bounds):
    with pytest.raises(ValueError, match="must rise from 0 to the 6 tokens"):
        call("comba", make("comba", 1, 6), cu_seqlens=torch.tensor(bounds))


def test_an_activation_packed_differently_is_refused():
    inputs, cu_seqlens = make("comba", 1, 6), torch.tensor([0, 2, 6])
    for other in (None, torch.tensor([0, 3, 6]), torch.tensor([0, 2, 4, 6])):
        with pytest.raises(ValueError, match="same cu_seqlens"):
            call("comba", inputs, cu_seqlens=cu_seqlens, activation=schedule().activation(KEYS, 6, cu_seqlens=other))
    equal = schedule().activation(KEYS, 6, cu_seqlens=cu_seqlens.clone())
    call("comba", inputs, cu_seqlens=cu_seqlens, activation=equal)


def test_no_state_is_returned_unless_asked_for():
    for rule in RULES:
        assert call(rule, make(rule, 1, 3), output_final_state=False)[1] is None
        assert len(leaves(call(rule, make(rule, 1, 3))[1])) == (3 if rule == "swla" else 1)


def test_a_window_of_one_is_retention():
    inputs = make("swla", 2, 40, c=1)
    inputs["gamma"].fill_(1)
    out, state = call("swla", inputs)
    right, matrix_ = call("retention", {n: inputs[n] for n in ("q", "k", "v", "g")})
    assert rms(out, right) < 1e-14 and rms(state.matrix, matrix_) < 1e-14
    assert state.keys.shape == (2, 0, HEADS, KEYS) and WINDOW > 1


@each_rule
@each_axis
def test_read_before_the_write_finds_the_state_of_the_token_before(rule, axis):
    """Equation 11 to the letter: o_t = scale (g_t S_{t-1})^T q_t, S_{t-1} the state that the tokens before t leave behind."""
    tokens = 21
    inputs, start = make(rule, 2, tokens), make_state(rule, 2)
    activation = schedule(28).activation(DIM[axis], tokens)
    mask = activation.mask()[0]
    for backend in ("reference", "chunk"):
        out, final = call(rule, inputs, initial_state=start, axis=axis, activation=activation, read="pre", backend=backend)
        state = start
        for t in range(tokens):
            opened = mask[t][:, None] if axis == "key" else mask[t]
            held = torch.where(opened, matrix(state), 0.0)
            assert rms(out[:, t], KEYS**-0.5 * torch.einsum("bhk,bhkv->bhv", inputs["q"][:, t], held)) < 1e-12, (backend, t)
            now = schedule(28).activation(DIM[axis], 1, offset=t)
            part = {n: x[:, t : t + 1] for n, x in inputs.items()}
            _, state = call(rule, part, initial_state=state, axis=axis, activation=now, backend="reference")
        assert all(rms(x, y) < 1e-12 for x, y in zip(leaves(final), leaves(state)))


@each_rule
def test_read_before_the_write_does_not_see_the_tokens_own_write(rule):
    inputs, other, token = make(rule, 1, 40), make(rule, 1, 40, seed=3), 17
    base, _ = call(rule, inputs, read="pre")
    for name in inputs.keys() - {"q"}:
        x = inputs[name].clone()
        x[:, token] = other[name][:, token]
        out, _ = call(rule, inputs | {name: x}, read="pre")
        assert torch.equal(out[:, : token + 1], base[:, : token + 1]), name
        assert not torch.equal(out[:, token + 1], base[:, token + 1]), name


def test_triton_has_no_read_before_the_write_and_auto_does_without_it(monkeypatch):
    monkeypatch.setattr("proteus_lm.ops.triton.refuse", lambda operation, tensors: None)
    inputs = make("comba", 1, 6)
    with pytest.raises(ValueError, match="backend 'triton' cannot run comba: its kernels have no read 'pre'; use backend='auto'"):
        call("comba", inputs, read="pre", backend="triton")
    right, _ = call("comba", inputs, read="pre", backend="chunk")
    assert torch.equal(call("comba", inputs, read="pre")[0], right)
