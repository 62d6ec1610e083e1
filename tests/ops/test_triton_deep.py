"""The Triton kernels of Titans' memory equal the fp64 oracle, in Triton's interpreter (fp32, no GPU).

The interpreter is chosen when Triton's functions are defined, so this file asks for it before they are imported; where Triton was
imported without it and there is no GPU, or is not installed, there is nothing to run.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed")

from proteus_lm import ActivationSchedule
from proteus_lm.ops import reference, triton_deep
from proteus_lm.ops.state import TitansState

H, D, F, CHUNK = 1, 32, 48, 16
TOLERANCE = 1e-4  # fp32 sums of a few hundred terms through three chunks; found: 6e-7


def make(batch: int, length: int, depth: int, *, alpha: float = 0.1, eta: float = 0.95) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens q, k, v, theta, alpha, eta in fp64, theta within the safe bound (1 - eta) / chunk; weights (H, in, out)."""
    g = torch.Generator().manual_seed(batch * 100 + length)
    normal = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    q, k = (torch.nn.functional.normalize(normal(batch, length, H, D), dim=-1) for _ in range(2))
    alphas, etas, thetas = (torch.rand(batch, length, H, generator=g, dtype=torch.float64) for _ in range(3))
    alphas, etas = alphas * alpha, etas * eta
    sides = [D, *[F] * (depth - 1), D]
    weights = [normal(H, a, b) / a**0.5 for a, b in zip(sides, sides[1:])]
    return [q, k, normal(batch, length, H, D) / D**0.5, thetas * (1 - etas) / CHUNK, alphas, etas], weights


def state_of(weights: list[Tensor], batch: int, *, moving: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Bare weights and momentum of each row; `moving`: both differ from what learning starts with, in locked units too."""
    g = torch.Generator().manual_seed(5)
    rows = [w.expand(batch, *w.shape) for w in weights]
    noise = [torch.randn(w.shape, generator=g, dtype=w.dtype) for w in rows]
    if not moving:
        return rows, [torch.zeros_like(w) for w in rows]
    return [w + 0.1 * n for w, n in zip(rows, noise)], [0.05 * n for n in noise]


def leaves(tensors, dtype: torch.dtype) -> list[Tensor]:
    return [t.detach().to(dtype).clone().requires_grad_() for t in tensors]


def worst(found, right) -> float:
    """Largest root mean square error over that of the right values."""
    pairs = [(a.detach().double(), b.detach()) for a, b in zip(found, right, strict=True)]
    return max(((a - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in pairs)


def compare(tokens, weights, momentum, activation, cu_seqlens=None, **options) -> None:
    """Outputs, end state and every gradient against the oracle."""
    shared = len(weights[0]) != (len(tokens[0]) if cu_seqlens is None else len(cu_seqlens) - 1)
    exact = leaves([*tokens, *weights, *momentum], torch.float64)
    depth = len(weights)
    parts = exact[:6], exact[6 : 6 + depth], exact[6 + depth :]
    initial = None if shared else (parts[1], parts[2])
    y, state = reference.titans_memory(
        *parts[0], [w[0] for w in parts[1]], activation=activation, initial_state=initial, cu_seqlens=cu_seqlens,
        output_final_state=True, **options,
    )  # fmt: skip
    right = [y, *state.weights, *state.momentum]
    g = torch.Generator().manual_seed(7)
    sent = [torch.randn(t.shape, generator=g, dtype=torch.float64) for t in right]
    right += torch.autograd.grad(sum((a * b).sum() for a, b in zip(right, sent)), exact)
    ours = leaves([*tokens, *weights, *momentum], torch.float32)
    units = F if depth == 2 else D
    active = torch.full((1, tokens[0].shape[1]), units) if activation is None else activation.active
    offset = 0 if activation is None else activation.offset
    out = triton_deep.scan(
        ours[:6], [], ours[6 : 6 + depth], ours[6 + depth :], active, None, offset, cu_seqlens,
        **{"read": "post", "memory_activation": "gelu_tanh", **options},
    )  # fmt: skip
    found = [*out, *torch.autograd.grad(sum((a * b.float()).sum() for a, b in zip(out, sent)), ours)]
    assert worst(found, right) < TOLERANCE


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 15, 33])
def test_full_memory_equals_oracle_with_every_gradient(depth, length):
    tokens, weights = make(1, length, depth)
    compare(tokens, *state_of(weights, 1, moving=False), None, chunk=CHUNK)


@pytest.mark.parametrize("read", ["post", "pre"])
@pytest.mark.parametrize(("depth", "function"), [(2, "silu"), (1, "gelu_tanh"), (2, "gelu_tanh")])
def test_unlocks_inside_a_chunk_from_a_moving_state_equal_oracle(depth, function, read):
    tokens, weights = make(2, 40, depth, alpha=0.99)
    activation = ActivationSchedule(4, 36).activation(F if depth == 2 else D, 40, offset=5)
    state = state_of(weights, 2, moving=True)
    compare(tokens, *state, activation, chunk=CHUNK, read=read, memory_activation=function)


def test_unlocks_on_the_grid_equal_oracle():
    tokens, weights = make(1, 65, 2)
    compare(tokens, *state_of(weights, 1, moving=False), ActivationSchedule(4, 64).activation(F, 65), chunk=CHUNK)


@pytest.mark.parametrize(("alpha", "eta"), [(0.0, 0.0), (0.0, 0.95), (0.99, 0.0)])
def test_gates_at_their_ends_have_exact_gradients(alpha, eta):
    tokens, weights = make(1, 33, 2, alpha=alpha, eta=eta)
    compare(tokens, *state_of(weights, 1, moving=True), None, chunk=CHUNK)


def test_many_segments_equal_one(monkeypatch):
    from proteus_lm.ops.triton_deep import _operator

    monkeypatch.setattr(_operator, "SEGMENT", 1)
    tokens, weights = make(1, 40, 2)
    compare(tokens, *state_of(weights, 1, moving=True), ActivationSchedule(4, 36).activation(F, 40), chunk=CHUNK)


@pytest.mark.parametrize("segment", [1, 16])
def test_walking_the_writes_again_gives_the_gradients_of_kept_states(segment, monkeypatch):
    from proteus_lm.ops.triton_deep import _launch, _operator

    monkeypatch.setattr(_operator, "SEGMENT", segment)
    monkeypatch.setattr(_launch, "KEPT_BYTES", 0)
    tokens, weights = make(1, 40, 2)
    compare(tokens, *state_of(weights, 1, moving=True), ActivationSchedule(4, 36).activation(F, 40), chunk=CHUNK)


@pytest.mark.parametrize("offsets", [None, [3, 20, 7]])
def test_packed_documents_of_unequal_length_equal_oracle(offsets):
    tokens, weights = make(1, 60, 2)
    cu_seqlens = torch.tensor([0, 33, 40, 60])
    offset = None if offsets is None else torch.tensor(offsets)
    activation = ActivationSchedule(4, 40).activation(F, 60, cu_seqlens=cu_seqlens, offset=offset)
    compare(tokens, *state_of(weights, 3, moving=True), activation, cu_seqlens, chunk=CHUNK)


def test_a_call_goes_on_from_the_open_chunk_of_the_call_before():
    tokens, weights = make(1, 45, 2)
    schedule = ActivationSchedule(4, 40)
    whole, _ = reference.titans_memory(*tokens, weights, chunk=CHUNK, activation=schedule.activation(F, 45))
    cut = 21
    first = [t[:, :cut] for t in tokens]
    _, state = reference.titans_memory(
        *first, weights, chunk=CHUNK, activation=schedule.activation(F, cut), output_final_state=True
    )
    assert isinstance(state, TitansState)
    rest = [t[:, cut:].float() for t in tokens]
    wide = [[t.float() for t in part] for part in (state.weights, state.momentum)]
    earlier = [t.float() for t in (state.k, state.v, state.theta, state.alpha, state.eta)]
    active = schedule.activation(F, 45 - cut, offset=cut).active
    for offset in (cut, state.position):  # known on the host, and not
        y, *_ = triton_deep.scan(
            rest, earlier, *wide, active, state.active, offset, None, chunk=CHUNK, read="post", memory_activation="gelu_tanh"
        )
        assert worst([y], [whole[:, cut:]]) < TOLERANCE


def test_locked_units_keep_their_bits_and_their_nan_to_themselves():
    tokens, weights = make(1, 30, 2)
    activation = ActivationSchedule(4, 160).activation(F, 30)  # one block of 12 units is open throughout
    rows, momentum = state_of([w.float() for w in weights], 1, moving=False)
    rows[0] = torch.where(torch.arange(F) >= 12, float("nan"), rows[0])
    rows[1] = torch.where(torch.arange(F)[:, None] >= 12, float("nan"), rows[1])
    ours = leaves([t.float() for t in tokens], torch.float32)
    y, w1, w2, s1, s2 = triton_deep.scan(
        ours, [], rows, momentum, activation.active, None, torch.tensor([0]), None,
        chunk=CHUNK, read="post", memory_activation="gelu_tanh",
    )  # fmt: skip
    gradients = torch.autograd.grad(y.sum() + w1[..., :12].sum(), ours)
    assert y.isfinite().all() and all(g.isfinite().all() for g in gradients)
    for new, old in ((w1[..., 12:], rows[0][..., 12:]), (w2[..., 12:, :], rows[1][..., 12:, :])):
        assert torch.equal(new.view(torch.int32), old.contiguous().view(torch.int32))
    assert not s1[..., 12:].any() and not s2[..., 12:, :].any()
    assert not torch.equal(w1[..., :12], rows[0][..., :12])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chunk": 24}, "chunk of 24"),
        ({"dtype": torch.float64}, "fp64"),
        ({"dtype": torch.bfloat16}, "bf16 in Triton's interpreter"),
        ({"head": 48}, "heads of 48"),
        ({"layers": 3}, "3 layers"),
        ({"chunk": 128}, "more shared memory"),
        ({"hidden": 40}, "40 hidden units"),
        ({"hidden": 1024}, "1024 hidden units"),
        ({}, None),
    ],
)
def test_refusals_name_what_the_kernels_cannot_do(change, reason):
    head, hidden, layers = change.get("head", 32), change.get("hidden", 128), change.get("layers", 2)
    tokens = [torch.zeros(1, 4, 1, head, dtype=change.get("dtype", torch.float32))] * 3
    tokens = [*tokens, *[torch.zeros(1, 4, 1, dtype=tokens[0].dtype)] * 3]
    sides = [head, *[hidden] * (layers - 1), head]
    weights = [torch.zeros(1, a, b) for a, b in zip(sides, sides[1:])]
    found = triton_deep.refuse(tokens, weights, change.get("chunk", 64))
    assert found is None if reason is None else reason in found
