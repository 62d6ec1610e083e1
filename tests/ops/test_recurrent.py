"""Decoding steps of the linear rules: token by token they give what the chunk form gives."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from proteus_lm import ActivationSchedule
from tests.ops.linear_rules import AXES, KEYS, READS, RULES, VALUES, call, leaves, like, make, make_state, matrix, rms, step

DIM = {"key": KEYS, "value": VALUES}
each_rule = pytest.mark.parametrize("rule", RULES)
each_axis = pytest.mark.parametrize("axis", AXES)
each_read = pytest.mark.parametrize("read", READS)


def schedule() -> ActivationSchedule:
    return ActivationSchedule(4, 24)


@each_rule
@each_axis
@each_read
def test_steps_of_rows_at_different_positions_equal_the_chunk_form(rule, axis, read):
    tokens, offset = 20, torch.tensor([0, 11, 100])
    inputs, state = make(rule, 3, tokens), make_state(rule, 3)
    activation = schedule().activation(DIM[axis], tokens, offset=offset)
    right, final = call(rule, inputs, initial_state=state, axis=axis, activation=activation, read=read)
    for t in range(tokens):
        active = schedule().active(DIM[axis], offset + t)
        out, state = step(rule, {n: x[:, t] for n, x in inputs.items()}, state, active=active, axis=axis, read=read)
        assert rms(out, right[:, t]) < 1e-12
    assert all(rms(x, y) < 1e-12 for x, y in zip(leaves(state), leaves(final)))


@each_rule
@each_axis
@each_read
def test_a_step_with_all_open_is_the_base_step_bit_for_bit(rule, axis, read):
    inputs, state = {n: x[:, 0] for n, x in make(rule, 2, 1).items()}, make_state(rule, 2)
    out, new = step(rule, inputs, state, active=torch.full((2,), DIM[axis]), axis=axis, read=read)
    base, base_new = step(rule, inputs, state, read=read)
    assert torch.equal(out, base) and all(torch.equal(x, y) for x, y in zip(leaves(new), leaves(base_new)))


@each_rule
@each_axis
@each_read
def test_a_step_reads_and_changes_nothing_locked(rule, axis, read):
    inputs, state = {n: x[:, 0] for n, x in make(rule, 2, 1).items()}, make_state(rule, 2)
    active, width = torch.tensor([4, 2]), 4
    clean, clean_new = step(rule, inputs, state, active=active, axis=axis, read=read)
    dim = -2 if axis == "key" else -1
    old = matrix(state).clone()
    tail = matrix(state).narrow(dim, width, DIM[axis] - width)
    tail.fill_(torch.nan)
    for name in ("q", "k", "p") if axis == "key" else ("v",):
        if name in inputs:
            inputs[name][..., width:] = torch.nan
    out, new = step(rule, inputs, state, active=active, axis=axis, read=read)
    assert torch.equal(out, clean)
    assert torch.equal(matrix(new).narrow(dim, 0, width), matrix(clean_new).narrow(dim, 0, width))
    assert matrix(new).narrow(dim, width, DIM[axis] - width).isnan().all()
    assert torch.equal(matrix(new)[1].narrow(dim - 0, 2, 2), old[1].narrow(dim, 2, 2))  # locked in the second row only
    assert not torch.equal(matrix(new)[0].narrow(dim, 2, 2), old[0].narrow(dim, 2, 2))


@each_rule
def test_a_bf16_step_carries_its_state_in_fp32(rule):
    inputs = {n: x[:, 0] for n, x in make(rule, 2, 1, dtype=torch.bfloat16).items()}
    state = make_state(rule, 2, dtype=torch.float32)
    right, right_new = step(rule, {n: x.float() for n, x in inputs.items()}, state)
    with torch.autocast("cpu", torch.bfloat16):
        out, new = step(rule, inputs, state)
    assert out.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in leaves(new))
    assert torch.equal(out, right.bfloat16()) and all(torch.equal(x, y) for x, y in zip(leaves(new), leaves(right_new)))


@each_rule
@each_read
def test_gradients_flow_through_steps(rule, read):
    inputs, state = {n: x[:, 0].requires_grad_() for n, x in make(rule, 1, 1).items()}, make_state(rule, 1)
    tensors = [*inputs.values(), *(x.requires_grad_() for x in leaves(state))]
    active = torch.tensor([4])

    def flat(*xs):
        out, new = step(rule, dict(zip(inputs, xs)), like(state, list(xs[len(inputs) :])), active=active, read=read)
        return (out, *leaves(new))

    assert torch.autograd.gradcheck(flat, tensors)


@each_rule
@each_read
def test_a_compiled_step_compiles_once_for_all_positions(rule, read):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def forward(inputs, state, position):
        return step(rule, inputs, state, active=schedule().active(KEYS, position), read=read)

    compiled = torch.compile(forward, fullgraph=True, backend=counter)
    inputs, state = make(rule, 2, 30), make_state(rule, 2)
    for t in range(30):
        token, position = {n: x[:, t] for n, x in inputs.items()}, torch.tensor([t, 2 * t])
        right, _ = forward(token, state, position)
        out, state = compiled(token, state, position)
        assert rms(out, right) < 1e-14
    assert counter.frame_count == 1


@pytest.mark.parametrize(("name", "value"), [("axis", "rows"), ("read", "before")])
def test_an_unknown_choice_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name} is '{value}'"):
        step("retention", {n: x[:, 0] for n, x in make("retention", 1, 1).items()}, make_state("retention", 1), **{name: value})
