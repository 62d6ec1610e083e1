"""One decoding step of every mixer: rows at their own positions, no compilation by position."""

from __future__ import annotations

import pytest
import torch

from proteus_lm import ProteusConfig
from proteus_lm.sequence import TokenSequence
from tests.mixers.models import assert_near, cases, make, tensors

every = pytest.mark.parametrize("fields", cases())


@every
def test_a_step_is_compiled_once_for_all_positions(fields):
    model = make(fields, torch.float32)
    mixer, schedule = model.layers[0].mixer, model.schedule
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(x, position, state):
        return mixer(x, TokenSequence(schedule, 2, 1, offset=position, device=x.device), state, True)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    position, counts = torch.tensor([0, 3]), []
    state = other = mixer.init_state(2, "cpu", torch.float32)
    x = torch.randn(200, 2, 1, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for t in range(200):
            y, state = compiled(x[t], position + t, state)
            wanted, other = step(x[t], position + t, other)
            assert_near(y, wanted)
            counts.append(len(graphs))
    torch._dynamo.reset()
    # A state that grows (attention without a window) is compiled once more, for any length; nothing after that.
    assert counts[4] == counts[-1]


@every
def test_rows_of_a_step_stand_at_their_own_positions(fields):
    mixer, schedule = make(fields).layers[0].mixer, ProteusConfig(**fields).schedule
    x = torch.randn(3, 22, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lengths = [5, 17, 11]
    with torch.no_grad():
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        packed = torch.cat([x[i, :n] for i, n in enumerate(lengths)])[None]
        sequence = TokenSequence(schedule, 3, sum(lengths), cu_seqlens=cu_seqlens)
        _, state = mixer(packed, sequence, use_state=True)
        for t in range(5):
            now = torch.stack([x[i, n + t] for i, n in enumerate(lengths)])[:, None]
            y, state = mixer(now, TokenSequence(schedule, 3, 1, offset=torch.tensor(lengths) + t), state, True)
            for i, n in enumerate(lengths):
                whole, _ = mixer(x[i : i + 1, : n + t + 1], TokenSequence(schedule, 1, n + t + 1))
                assert_near(y[i], whole[0, -1:])


@every
def test_the_initial_state_is_the_absence_of_a_state(fields):
    mixer, schedule = make(fields).layers[0].mixer, ProteusConfig(**fields).schedule
    x = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = mixer.init_state(2, "cpu", torch.float64)
    zero = torch.zeros(2, dtype=torch.int64)
    for length in (1, 7):
        plain, after = mixer(x[:, :length], TokenSequence(schedule, 2, length), None, True)
        same, after_too = mixer(x[:, :length], TokenSequence(schedule, 2, length, offset=zero), start, True)
        assert_near(same, plain)
        for one, two in zip(tensors(after), tensors(after_too), strict=True):
            assert_near(one, two)
    assert (mixer.memory_norm(start, schedule) == 0).all()
