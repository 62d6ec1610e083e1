"""Decoding Titans' memory one token at a time equals the chunk form."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from proteus_lm.ops import titans_memory
from proteus_lm.ops.deep_step import titans_step
from proteus_lm.ops.state import TitansState
from tests.ops.deep_cases import (
    EXACT,
    HIDDEN,
    assert_same_gradients,
    assert_same_state,
    bits,
    decode,
    floats,
    gradients,
    make,
    schedule,
)


def map_tensors(change, state):
    """A state with `change` of each tensor."""
    return TitansState._make([tuple(map(change, x)) if isinstance(x, tuple) else change(x) for x in state])


OFFSETS = torch.tensor([0, 5, 33])


@pytest.mark.parametrize("memory_activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize("read", ["post", "pre"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("blocks", "context", "chunk"), [(1, 1, 16), (4, 60, 16), (5, 40, 7), (3, 12, 1)])
def test_steps_equal_the_chunk_form_at_every_token(depth, read, memory_activation, blocks, context, chunk):
    case, plan = make(3, 71, depth=depth), schedule(blocks, context)
    options = {"read": read, "memory_activation": memory_activation}
    common = {"chunk": chunk, "initial_state": case.state, "output_final_state": True, **options}
    whole, final = titans_memory(*case.tokens, case.weights, activation=plan.activation(case.units, 71, offset=OFFSETS), **common)
    _, state = titans_memory(*case.piece(0, 1), case.weights, activation=plan.activation(case.units, 1, offset=OFFSETS), **common)
    steps, state = decode(case, state, plan, 1, 71, **options)
    torch.testing.assert_close(steps, whole[:, 1:], rtol=0, atol=EXACT)
    assert_same_state(state, final)


def test_no_open_length_means_all_units():
    case = make(2, 3)
    _, state = titans_memory(*case.piece(0, 2), case.weights, chunk=4, output_final_state=True)
    now = [t[:, 2] for t in case.tokens]
    y, after = titans_step(*now, state)
    right, right_after = titans_step(*now, state, active=torch.full((2,), HIDDEN))
    assert torch.equal(y, right)
    assert_same_state(after, right_after, 0)


def test_locked_units_keep_their_bits_and_their_nan_to_themselves():
    case, plan = make(2, 12), schedule(3, 60)
    width = HIDDEN // 3
    for part in case.state:
        part[0][..., width:] = float("nan")
        part[1][..., width:, :] = -0.0
    options = {"chunk": 4, "initial_state": case.state, "output_final_state": True}
    _, state = titans_memory(*case.piece(0, 1), case.weights, activation=plan.activation(HIDDEN, 1), **options)
    steps, state = decode(case, state, plan, 1, 12)
    assert steps.isfinite().all()
    for part, before in zip((state.weights, state.momentum), case.state):
        assert torch.equal(bits(part[0][..., width:]), bits(before[0][..., width:]))
        assert torch.equal(bits(part[1][..., width:, :]), bits(before[1][..., width:, :]))
        assert part[0][..., :width].isfinite().all()


def test_gradients_through_steps_are_those_of_the_chunk_form():
    case, plan = make(2, 11, grad=True), schedule(3, 20)
    leaves = [*case.tokens, *case.weights]
    options = {"chunk": 4, "output_final_state": True}
    whole, final = titans_memory(*case.tokens, case.weights, activation=plan.activation(HIDDEN, 11), **options)
    first, state = titans_memory(*case.piece(0, 1), case.weights, activation=plan.activation(HIDDEN, 1), **options)
    steps, state = decode(case, state, plan, 1, 11)
    assert_same_gradients(gradients(torch.cat([first, steps], 1), state, leaves), gradients(whole, final, leaves))


def test_output_has_the_type_of_v_and_the_state_that_of_fp32():
    case = make(2, 6, dtype=torch.bfloat16)
    _, state = titans_memory(*case.piece(0, 5), case.weights, chunk=4, output_final_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, after = titans_step(*(t[:, 5] for t in case.tokens), state)
    right, _ = titans_memory(*case.tokens, case.weights, chunk=4)
    assert y.dtype == torch.bfloat16 and all(t.dtype == torch.float32 for t in floats(after))
    torch.testing.assert_close(y, right[:, 5], rtol=0.01, atol=1e-6)  # one bit of bf16


def test_a_compiled_step_is_compiled_once_for_all_positions():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    case, plan = make(2, 14), schedule(3, 9)
    compiled = torch.compile(titans_step, fullgraph=True, backend=counter)
    _, state = titans_memory(
        *case.piece(0, 1), case.weights, chunk=4, activation=plan.activation(HIDDEN, 1), output_final_state=True
    )
    eager = state
    for token in range(1, 14):
        now = [t[:, token] for t in case.tokens]
        active = plan.active(HIDDEN, state.position)
        y, state = compiled(*now, state, active=active)
        right, eager = titans_step(*now, eager, active=active)
        assert torch.equal(y, right)
    assert_same_state(state, eager, 0)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [(0, torch.zeros(2, 2, 5), "q has shape"), (3, torch.zeros(2, 3), "theta has shape"), (2, torch.zeros(3, 2, 5), "v has shape")],
)
def test_bad_tokens_are_named(position, value, message):
    case = make(2, 2)
    _, state = titans_memory(*case.piece(0, 1), case.weights, chunk=4, output_final_state=True)
    now = [t[:, 1] for t in case.tokens]
    now[position] = value
    with pytest.raises(ValueError, match=message):
        titans_step(*now, state)


def test_options_and_states_of_another_kind_are_refused():
    case = make(2, 2)
    _, state = titans_memory(*case.piece(0, 1), case.weights, chunk=4, output_final_state=True)
    now = [t[:, 1] for t in case.tokens]
    with pytest.raises(ValueError, match="read is 'after'"):
        titans_step(*now, state, read="after")
    with pytest.raises(ValueError, match="memory_activation is 'relu'"):
        titans_step(*now, state, memory_activation="relu")
    with pytest.raises(ValueError, match="it must be the TitansState"):
        titans_step(*now, case.state)
