"""The decoding step's kernels in Triton's interpreter, fp32: against the fp64 step, and against the chunk form."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from proteus_lm.ops import titans_memory
from proteus_lm.ops.deep_step import titans_step
from proteus_lm.ops.state import TitansState
from proteus_lm.ops.triton_deep import refuse_step, unchecked_step
from tests.ops.deep_cases import assert_same_state, bits, floats, schedule
from tests.ops.test_deep_step import map_tensors

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
    reason="needs triton's interpreter: triton, and no GPU",
)

CHUNK, DIM = 16, 32
NEAR = 2e-6  # fp32 sums of about a hundred products, of numbers of about 1
TWO_ROWS = torch.tensor([0, 5])  # which end their chunks at different tokens


class Memory:
    """Tokens of `rows` documents, one head, and what the chunk form makes of the first `start` of them.

    Args:
        depth: layers; 80 hidden units with two, which is a tile and a part of one.
        blocks, context: of the schedule.
        offsets: position of each row's first token, (rows,).
    """

    def __init__(
        self,
        depth: int,
        blocks: int,
        context: int,
        start: int,
        length: int,
        offsets: Tensor = TWO_ROWS,
        chunk: int = CHUNK,
        **options: str,
    ) -> None:
        g = torch.Generator().manual_seed(depth)
        self.units, rows = (80 if depth == 2 else DIM), len(offsets)
        vectors = [torch.nn.functional.normalize(torch.randn(rows, length, 1, DIM, generator=g), dim=-1) for _ in range(3)]
        gates = [torch.rand(rows, length, 1, generator=g) * scale for scale in (0.05, 0.1, 0.9)]
        self.tokens, self.options, self.blocks, self.chunk = [*vectors, *gates], options, blocks, chunk
        sides = [DIM, *[self.units] * (depth - 1), DIM]
        self.weights = [torch.randn(1, a, b, generator=g) / a**0.5 for a, b in zip(sides, sides[1:])]
        self.plan, self.offsets = schedule(blocks, context), offsets
        with torch.no_grad():
            self.whole, self.final = self.parallel(length)
            state = self.parallel(start)[1]
        self.start, self.length = start, length
        self.state = map_tensors(lambda t: t.clone(memory_format=torch.contiguous_format), state)

    def parallel(self, length: int) -> tuple[Tensor, TitansState]:
        y, state = titans_memory(
            *[t[:, :length] for t in self.tokens], self.weights, chunk=self.chunk, output_final_state=True, **self.options,
            activation=self.plan.activation(self.units, length, offset=self.offsets),
        )  # fmt: skip
        assert state is not None
        return y, state

    def step(self, token: int, state: TitansState, inplace: bool = False) -> tuple[Tensor, TitansState]:
        """By the kernels, or in fp64 by PyTorch where the state is fp64."""
        wide = state.weights[0].dtype == torch.float64
        now = [t[:, token].to(state.weights[0].dtype) for t in self.tokens]
        active = None if self.blocks == 1 else self.plan.active(self.units, state.position)
        backend = "chunk" if wide else "triton"
        with torch.no_grad():
            return titans_step(*now, state, active=active, backend=backend, inplace=inplace, **self.options)


def wide(state: TitansState) -> TitansState:
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t.clone(), state)


def near(ours: TitansState, right: TitansState) -> None:
    assert torch.equal(ours.active, right.active) and torch.equal(ours.position, right.position)
    for a, b in zip(floats(ours), floats(right)):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=NEAR)


@pytest.mark.parametrize(
    ("depth", "blocks", "inplace", "options"),
    [
        (2, 1, True, {}),
        (2, 4, False, {}),
        (2, 4, True, {"read": "pre", "memory_activation": "silu"}),
        (1, 4, False, {"read": "pre"}),
        (1, 1, True, {}),
    ],
)
def test_steps_are_those_of_fp64_and_of_the_chunk_form(depth, blocks, inplace, options):
    """Over the end of a chunk in each row; with 4 blocks in 24 tokens a block opens inside every chunk."""
    memory = Memory(depth, blocks, 24, start=9, length=18, **options)
    mine, exact = memory.state, wide(memory.state)
    for token in range(memory.start, memory.length):
        given, before = mine, map_tensors(torch.clone, mine)
        y, mine = memory.step(token, mine, inplace)
        right, exact = memory.step(token, exact)
        torch.testing.assert_close(y.double(), right, rtol=0, atol=NEAR)
        torch.testing.assert_close(y, memory.whole[:, token], rtol=0, atol=NEAR)
        near(mine, exact)
        if inplace:
            assert mine is given
        else:
            assert_same_state(given, before, 0)
    near(mine, memory.final)


@pytest.mark.parametrize("inplace", [False, True])
def test_steps_in_a_longer_chunk(inplace):
    """A block opens at token 24, the chunk ends with token 31."""
    memory = Memory(2, 4, 48, start=23, length=32, offsets=torch.zeros(1, dtype=torch.int64), chunk=32)
    mine, exact = memory.state, wide(memory.state)
    for token in range(23, 32):
        y, mine = memory.step(token, mine, inplace)
        right, exact = memory.step(token, exact)
        torch.testing.assert_close(y.double(), right, rtol=0, atol=NEAR)
        near(mine, exact)
    near(mine, memory.final)


@pytest.mark.parametrize("start", [1, 15, 16, 17])
def test_steps_go_on_behind_a_prompt_of_any_length(start):
    memory = Memory(2, 4, 24, start=start, length=start + 2, offsets=torch.zeros(1, dtype=torch.int64))
    mine = memory.state
    for token in range(start, start + 2):
        y, mine = memory.step(token, mine, inplace=True)
        torch.testing.assert_close(y, memory.whole[:, token], rtol=0, atol=NEAR)
    near(mine, memory.final)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_locked_units_keep_their_bits_and_their_nan_to_themselves(depth, inplace):
    """The last step ends the chunk; 20 of 80 units are open, so the border lies inside a group of 16."""
    memory = Memory(depth, 4, 4000, start=14, length=16, offsets=torch.zeros(1, dtype=torch.int64))
    width, mine = memory.units // 4, memory.state
    for part in (mine.weights, mine.momentum):
        part[0][..., width:] = float("nan") if depth == 2 else part[0][..., width:]
        part[-1][..., width:, :] = float("nan")
    mine.momentum[-1][..., width:, :] = -0.0
    before = map_tensors(torch.clone, mine)
    for token in range(14, 16):
        y, mine = memory.step(token, mine, inplace)
        torch.testing.assert_close(y, memory.whole[:, token], rtol=0, atol=NEAR)
    for part, old in ((mine.weights, before.weights), (mine.momentum, before.momentum)):
        if depth == 2:
            assert torch.equal(bits(part[0][..., width:]), bits(old[0][..., width:]))
            assert not torch.equal(part[0][..., :width], old[0][..., :width])
        assert torch.equal(bits(part[-1][..., width:, :]), bits(old[-1][..., width:, :]))
        assert not torch.equal(part[-1][..., :width, :], old[-1][..., :width, :])
    assert not mine.active.any() and not mine.k.any()


def test_gates_of_0_and_1_are_exact():
    memory = Memory(2, 1, 1, start=12, length=16)
    theta, alpha, eta = memory.tokens[3:]
    alpha[:, 13], eta[:, 14], alpha[:, 15], theta[:, 12] = 1.0, 0.0, 0.0, 0.0
    mine, exact = memory.state, wide(memory.state)
    for token in range(12, 16):
        y, mine = memory.step(token, mine)
        right, exact = memory.step(token, exact)
        torch.testing.assert_close(y.double(), right, rtol=0, atol=NEAR)
    near(mine, exact)


def test_refusals_name_what_the_step_cannot_do():
    memory = Memory(2, 1, 1, start=1, length=2)
    now, state = [t[:, 1] for t in memory.tokens], memory.state

    def refused(weights=state.weights, tokens=now, momentum=state.momentum) -> str | None:
        return refuse_step(tokens, weights, momentum, CHUNK)

    assert refused() is None
    assert "not fp32" in str(refused(momentum=[t.bfloat16() for t in state.momentum]))
    assert "gradient" in str(refused(tokens=[t.clone().requires_grad_() for t in now]))
    narrow = Memory(1, 1, 1, start=1, length=2).state.weights
    assert "wrong kernel" in str(refused(weights=narrow, tokens=[t.bfloat16() for t in now]))
    turned = state._replace(k=state.k.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(ValueError, match="not contiguous"):
        memory.step(1, turned, inplace=True)


@pytest.mark.parametrize(
    ("heads", "layers", "chunk", "taken"), [(64, 2, 64, True), (128, 2, 64, False), (64, 1, 64, False), (64, 2, 16, False)]
)
def test_auto_takes_on_a_gpu_what_a_gpu_has_checked(heads, layers, chunk, taken):
    """Tensors are stood in for: there is no GPU here."""
    token = SimpleNamespace(is_cuda=True, shape=(1, 1, heads))
    reason = unchecked_step([token] * 3, [token] * layers, chunk)
    assert (reason is None) is taken
    assert unchecked_step([SimpleNamespace(is_cuda=False, shape=(1, 1, heads))] * 3, [token] * layers, chunk) is None
