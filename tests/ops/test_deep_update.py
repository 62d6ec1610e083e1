"""Options of Titans' memory: the clip of a token's inner gradient, what the weights decay to, and the residual form with a norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from proteus_lm.ops import _deep_scan, titans_memory, titans_weights
from proteus_lm.ops.deep import refusals
from proteus_lm.ops.deep_step import titans_step
from proteus_lm.ops.memory_activations import memory_function
from tests.ops import deep_cases
from tests.ops.deep_cases import (
    EXACT,
    HEAD,
    HIDDEN,
    Case,
    assert_compiled_once,
    assert_same_gradients,
    assert_same_state,
    bits,
    decode,
    floats,
    gradients,
    in_calls,
    make,
    schedule,
    with_floats,
)

CLIP = 0.4  # between the norms of the cases' gradients, so that some are clipped and some not
UPDATES = [
    pytest.param({"surprise_clip": CLIP}, id="clip"),
    pytest.param({"decay_target": "init"}, id="to the start"),
    pytest.param({"residual_norm": True}, id="norm"),
    pytest.param({"surprise_clip": CLIP, "decay_target": "init", "residual_norm": True}, id="all"),
]


def prepare(update: dict, *shape: int, **options) -> tuple[Case, dict, list[Tensor]]:
    """A case, the options of its calls, and gain and bias of the norm where there is one."""
    if "residual_norm" not in update:
        return make(*shape, **options), update, []
    case = make(*shape, value=HEAD, **options)
    shapes = case.weights[0].shape[0], HEAD
    generator = torch.Generator().manual_seed(5)
    norm = [torch.randn(shapes, generator=generator, dtype=torch.float64).to(case.weights[0].dtype) for _ in range(2)]
    norm = [t.requires_grad_(options.get("grad", False)) for t in norm]
    return case, update | {"residual_norm": tuple(norm)}, norm


def looser(update: dict) -> float:
    """A norm divides by the deviation of what the memory puts out, and so multiplies rounding, by 1e3 = EPS^(-1/2) at most."""
    return 1e3 if "residual_norm" in update else 1


def exact(update: dict) -> float:
    return looser(update) * EXACT


def compare(case: Case, leaves: list[Tensor], **options) -> None:
    """Output, final state and every gradient equal the oracle's, and the output is not that without the options."""
    y, _ = deep_cases.compare(case, leaves, looser=looser(options), **options)
    plain = {"surprise_clip": None, "decay_target": "zero", "residual_norm": None}
    plain, _ = titans_memory(*case.tokens, case.weights, **options | plain)
    assert (plain - y).abs().amax() > 1e-3 * plain.abs().amax()


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("read", ["post", "pre"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("blocks", "context", "offset", "bare"),
    [(1, 1, 0, False), (1, 1, 0, True), (3, 30, 0, False), (3, 22, 4, True), (5, 10, [3, 0, 8], True)],
    ids=["ungated", "ungated, bare state", "aligned", "unaligned", "many unlocks in a chunk"],
)
def test_every_depth_equals_the_oracle(blocks, context, offset, bare, depth, read, update):
    case, update, norm = prepare(update, 3, 23, depth=depth, heads=1, grad=True, seed=depth)
    activation = schedule(blocks, context).activation(case.units, 23, offset=offset)
    leaves = [*norm, *case.tokens, *case.weights, *case.state[0], *case.state[1]]
    if "surprise_clip" in update:
        update = update | {"surprise_clip": CLIP / depth}  # gradients of these cases are the shorter the deeper the memory
    state = case.state if bare else None
    compare(case, leaves, chunk=5, read=read, activation=activation, initial_state=state, **update)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("bounds", [[0, 31], [0, 1, 2, 19, 31]])
def test_packed_documents_equal_the_oracle(bounds, update):
    case, update, norm = prepare(update, 1, 31, rows=len(bounds) - 1, grad=True)
    cu_seqlens = torch.tensor(bounds)
    activation = schedule(4, 24).activation(HIDDEN, 31, offset=torch.arange(len(bounds) - 1) * 7, cu_seqlens=cu_seqlens)
    options = {"activation": activation, "cu_seqlens": cu_seqlens, **update}
    compare(case, [*case.tokens, *case.weights, *norm], chunk=5, **options)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_gradients_flow_through_a_carried_state_as_in_the_oracle(depth, update):
    first = prepare(update, 3, 11, depth=depth, seed=1)[0]
    case, update, norm = prepare(update, 3, 14, depth=depth, grad=True, seed=2)
    plan, offset = schedule(3, 22), torch.tensor([0, 3, 9])
    with torch.no_grad():
        options = {"activation": plan.activation(case.units, 11, offset=offset), "initial_state": first.state, **update}
        _, state = titans_memory(*first.tokens, case.weights, chunk=6, output_final_state=True, **options)
    state = with_floats(state, [t.detach().requires_grad_() for t in floats(state)])
    options = {"initial_state": state, "activation": plan.activation(case.units, 14, offset=state.position), **update}
    compare(case, [*case.tokens, *case.weights, *norm, *floats(state)], chunk=6, **options)


@pytest.mark.parametrize("kept", [0, 20_000, 1 << 28], ids=["nothing", "the first groups", "all"])
def test_what_is_kept_for_the_backward_is_enough_for_many_chunks(kept, monkeypatch):
    monkeypatch.setattr(_deep_scan, "KEPT", kept)
    every = {"surprise_clip": CLIP, "decay_target": "init", "residual_norm": True}
    case, update, norm = prepare(every, 1, 53, rows=3, heads=1, grad=True)
    bounds = torch.tensor([0, 7, 23, 53])
    activation = schedule(5, 40).activation(HIDDEN, 53, cu_seqlens=bounds)
    compare(case, [*case.tokens, *case.weights, *norm], chunk=2, activation=activation, cu_seqlens=bounds, **update)


def test_gradcheck_of_a_residual_memory_that_decays_to_its_start_with_unlocks():
    case, _, norm = prepare({"residual_norm": True}, 1, 8, heads=1, grad=True)
    activation = schedule(3, 7).activation(HIDDEN, 8)
    options = {"chunk": 3, "activation": activation, "decay_target": "init", "output_final_state": True}

    def run(gain, bias, *leaves):
        y, state = titans_memory(*leaves[:6], leaves[6:], residual_norm=(gain, bias), **options)
        return y, sum(t.square().sum() for t in floats(state))

    assert torch.autograd.gradcheck(run, [*norm, *case.tokens, *case.weights], fast_mode=True)


def clipped_by_autograd(case: Case, tau: float) -> Tensor:
    """One chunk of a memory of two layers, in which the inner gradient is PyTorch's own: outputs, (B, T, H, Dv)."""
    act = memory_function("gelu_tanh").act
    q, k, v, theta, alpha, eta = case.tokens
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for row in range(len(q)):
        for head in range(q.shape[2]):
            start = [w[head] for w in case.weights]
            now, momentum = start, [torch.zeros_like(w) for w in start]
            for t in range(q.shape[1]):
                leaves = [w.detach().requires_grad_() for w in start]
                loss = 0.5 * (act(k[row, t, head] @ leaves[0]) @ leaves[1] - v[row, t, head]).square().sum()
                grads = torch.autograd.grad(loss, leaves)
                scale = min(1.0, tau / torch.cat([g.flatten() for g in grads]).norm().item())
                momentum = [eta[row, t, head] * s - theta[row, t, head] * scale * g for s, g in zip(momentum, grads)]
                now = [(1 - alpha[row, t, head]) * w + s for w, s in zip(now, momentum)]
                out[row, t, head] = act(q[row, t, head] @ now[0]) @ now[1]
    return out


@pytest.mark.parametrize("tau", [0.05, CLIP, 1e3])
def test_the_norm_is_that_of_all_matrices_together(tau):
    case = make(2, 9)
    y, _ = titans_memory(*case.tokens, case.weights, chunk=9, surprise_clip=tau)
    torch.testing.assert_close(y, clipped_by_autograd(case, tau), rtol=0, atol=EXACT)


def test_a_limit_above_every_gradient_changes_nothing():
    case = make(2, 23, grad=True)
    leaves = [*case.tokens, *case.weights]
    results = []
    for tau in (None, 1e6):
        y, state = titans_memory(*case.tokens, case.weights, chunk=5, surprise_clip=tau, output_final_state=True)
        results.append([y, *floats(state), *gradients(y, state, leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("depth", [2, 4])
def test_a_memory_that_would_diverge_stays_finite_with_a_clip(depth):
    """spec/deep.md 5.1 (1) and 6: keys that are much alike, theta * chunk / (1 - eta) far above 2, bf16 inputs."""
    case = make(1, 512, depth=depth, dtype=torch.bfloat16)
    case.tokens[1][:] = torch.nn.functional.normalize(case.tokens[1] + 4, dim=-1)
    theta, alpha, eta, tau = 0.5, 0.01, 0.9, 0.1
    for tensor, value in zip(case.tokens[3:], (theta, alpha, eta)):
        tensor.fill_(value)
    for weight in case.weights:
        weight.mul_(2)
    plain, _ = titans_memory(*case.tokens, case.weights, chunk=64)
    leaves = [t.requires_grad_() for t in (*case.tokens, *case.weights)]
    clipped, state = titans_memory(*case.tokens, case.weights, chunk=64, surprise_clip=tau, output_final_state=True)
    assert not plain.isfinite().all()
    assert clipped.isfinite().all() and all(g.isfinite().all() for g in torch.autograd.grad(clipped.sum(), leaves))
    for weight, start in zip(state.weights, case.weights):
        bound = start.float().norm(dim=(-2, -1)) + theta * tau / (1 - eta) / alpha  # of the momentum, over the time alpha leaves it
        assert (weight[0].norm(dim=(-2, -1)) < bound).all()


def test_what_was_forgotten_whole_is_the_start_again():
    case = make(1, 12)
    case.tokens[3].zero_()
    case.tokens[4].fill_(1)
    options = {"chunk": 4, "initial_state": ([w + 1 for w in case.state[0]], [0 * s for s in case.state[1]])}
    y, state = titans_memory(*case.tokens, case.weights, decay_target="init", output_final_state=True, **options)
    for now, start in zip(state.weights, case.weights):
        torch.testing.assert_close(now[0], start, rtol=0, atol=EXACT)
    zero, _ = titans_memory(*case.tokens, case.weights, **options)
    assert y.abs().amin() > 1e-6 and zero.abs().amax() == 0


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_locked_units_keep_their_bits_and_their_nan_to_themselves(depth, update):
    case, update, norm = prepare(update, 2, 17, depth=depth)
    width = 2 * (case.units // 3)
    activation = schedule(3, 24).activation(case.units, 17, offset=-1)  # two of three blocks open, the second inside a chunk
    for tensors in (*case.state, case.weights):
        for layer, tensor in enumerate(tensors):
            if layer or depth == 1:
                tensor[..., width:, :] = float("nan")
            if layer < depth - 1:
                tensor[..., width:] = float("nan")
    leaves = [t.requires_grad_() for t in (*case.tokens, *case.weights, *case.state[0], *case.state[1], *norm)]
    options = {"chunk": 5, "activation": activation, "output_final_state": True, **update}
    for initial_state in (None, case.state):
        y, state = titans_memory(*case.tokens, case.weights, initial_state=initial_state, **options)
        assert y.isfinite().all()
        before = case.state[0] if initial_state else [w.expand(2, *w.shape) for w in case.weights]
        for old, new in zip(before, state.weights):
            locked = old.isnan()
            assert torch.equal(bits(old[locked]), bits(new[locked])) and new[~locked].isfinite().all()
        grads = torch.autograd.grad(y.sum(), leaves, materialize_grads=True)
        assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("update", UPDATES)
def test_any_split_into_calls_gives_what_one_call_gives(update):
    case, update, norm = prepare(update, 2, 30, depth=3, grad=True)
    plan, offset = schedule(4, 25), torch.tensor([0, 6])
    options = {"chunk": 7, "output_final_state": True, **update}
    whole, final = titans_memory(*case.tokens, case.weights, activation=plan.activation(case.units, 30, offset=offset), **options)
    y, state = in_calls(case, [1, 6, 20, 21, 30], plan, offset, **options)
    torch.testing.assert_close(y, whole, rtol=0, atol=exact(update))
    assert_same_state(state, final, exact(update))
    leaves = [*case.tokens, *case.weights, *norm]
    assert_same_gradients(gradients(y, state, leaves), gradients(whole, final, leaves), looser(update))


def stepping(update: dict, weights: list[Tensor]) -> dict:
    """The same options for a decoding step, or `titans_weights`."""
    same = {"surprise_clip": update.get("surprise_clip"), "residual_norm": update.get("residual_norm")}
    return {**same, "initial": weights if "decay_target" in update else None}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("read", ["post", "pre"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("blocks", "context", "chunk"), [(1, 1, 16), (5, 40, 7), (3, 12, 1)])
def test_steps_equal_the_chunk_form_at_every_token(blocks, context, chunk, depth, read, update):
    case, update, _ = prepare(update, 3, 40, depth=depth)
    plan, offset = schedule(blocks, context), torch.tensor([0, 5, 33])
    common = {"chunk": chunk, "initial_state": case.state, "read": read, "output_final_state": True, **update}
    whole, final = titans_memory(*case.tokens, case.weights, activation=plan.activation(case.units, 40, offset=offset), **common)
    _, state = titans_memory(*case.piece(0, 1), case.weights, activation=plan.activation(case.units, 1, offset=offset), **common)
    steps, state = decode(case, state, plan, 1, 40, read=read, **stepping(update, case.weights))
    torch.testing.assert_close(steps, whole[:, 1:], rtol=0, atol=exact(update))
    assert_same_state(state, final, exact(update))


@pytest.mark.parametrize("update", UPDATES)
def test_gradients_through_steps_are_those_of_the_chunk_form(update):
    (case, update, norm), plan = prepare(update, 2, 11, grad=True), schedule(3, 20)
    leaves = [*case.tokens, *case.weights, *norm]
    options = {"chunk": 4, "output_final_state": True, **update}
    whole, final = titans_memory(*case.tokens, case.weights, activation=plan.activation(HIDDEN, 11), **options)
    first, state = titans_memory(*case.piece(0, 1), case.weights, activation=plan.activation(HIDDEN, 1), **options)
    steps, state = decode(case, state, plan, 1, 11, **stepping(update, case.weights))
    ours, right = gradients(torch.cat([first, steps], 1), state, leaves), gradients(whole, final, leaves)
    assert_same_gradients(ours, right, looser(update))


@pytest.mark.parametrize("update", UPDATES)
def test_weights_of_the_open_chunk_are_those_that_chunks_of_one_call_end_with(update):
    """Gradients of a first chunk are taken at the start, so the end of a longer chunk's part is the end of a shorter chunk."""
    case, update, _ = prepare(update, 2, 5)
    _, ended = titans_memory(*case.tokens, case.weights, chunk=5, output_final_state=True, **update)
    _, opened = titans_memory(*case.tokens, case.weights, chunk=8, output_final_state=True, **update)
    for name, part in zip(("weights", "momentum"), titans_weights(opened, **stepping(update, case.weights))):
        for ours, right in zip(part, getattr(ended, name)):
            torch.testing.assert_close(ours, right, rtol=0, atol=exact(update))


@pytest.mark.parametrize("update", UPDATES)
def test_compiled_equals_eager_and_compiles_once_for_all_positions(update):
    def forward(tokens, weights, state, activation, update):
        options = {"initial_state": state, "activation": activation, "output_final_state": True}
        return titans_memory(*tokens, weights, chunk=4, **options, **update)

    def call(start):
        case, options, norm = prepare(update, 2, 21, grad=True, seed=start)
        activation = schedule(4, 30).activation(HIDDEN, 21, offset=torch.tensor([start, start + 5]))
        leaves = [*case.tokens, *case.weights, *case.state[0], *case.state[1], *norm]
        return (case.tokens, case.weights, case.state, activation, options), leaves

    assert_compiled_once(forward, map(call, (0, 3, 18)))


@pytest.mark.parametrize("update", UPDATES)
def test_operator_keeps_what_it_promises_to_torch(update):
    case, update, norm = prepare(update, 2, 9, grad=True)
    state = [[t.detach().requires_grad_() for t in part] for part in case.state]
    target = [w.detach().requires_grad_() for w in case.weights] if "decay_target" in update else []
    options = (torch.full((1, 9), HIDDEN), None, torch.tensor([0, 2]), None, None, 4, "post", "gelu_tanh")
    clip = update.get("surprise_clip")
    torch.library.opcheck(_deep_scan.titans_scan, (case.tokens, [], *state, target, norm, *options, clip, True, True))


def test_bf16_inputs_are_worked_on_in_fp32():
    every = {"surprise_clip": CLIP, "decay_target": "init", "residual_norm": True}
    case, update, norm = prepare(every, 2, 30, dtype=torch.bfloat16)
    wide = [t.float() for t in (*case.tokens, *case.weights)]
    right, right_state = titans_memory(
        *wide[:6], wide[6:], chunk=8, output_final_state=True, **update | {"residual_norm": tuple(t.float() for t in norm)}
    )
    with torch.autocast("cpu", torch.bfloat16):
        y, state = titans_memory(*case.tokens, case.weights, chunk=8, output_final_state=True, **update)
        stepped, _ = titans_step(*(t[:, 0] for t in case.tokens), state, **stepping(update, case.weights))
    assert torch.equal(y, right.bfloat16()) and stepped.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(floats(state), floats(right_state), strict=True))


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        ({"surprise_clip": 0.5}, "do not clip"),
        ({"decay_target": "init"}, "decay to zero"),
        ({"residual_norm": True}, "have no norm"),
    ],
)
def test_the_kernels_refuse_with_a_reason(update, reason):
    case, update, _ = prepare(update, 1, 9)
    assert reason in refusals(case.tokens, case.weights, 4, **update)["triton"]
    with pytest.raises(ValueError, match=reason):
        titans_memory(*case.tokens, case.weights, chunk=4, backend="triton", **update)
    _, state = titans_memory(*case.tokens, case.weights, chunk=4, output_final_state=True, **update)
    with pytest.raises(ValueError, match=reason):
        titans_step(*(t[:, 0] for t in case.tokens), state, backend="triton", **stepping(update, case.weights))


def test_bad_options_are_named():
    case = make(1, 5)
    for tau in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"surprise_clip is .*; it must be a number above 0"):
            titans_memory(*case.tokens, case.weights, chunk=4, surprise_clip=tau)
    with pytest.raises(ValueError, match="decay_target is 'one'; it must be one of zero, init"):
        titans_memory(*case.tokens, case.weights, chunk=4, decay_target="one")
    with pytest.raises(ValueError, match="keys of 6 and values of 5"):
        titans_memory(*case.tokens, case.weights, chunk=4, residual_norm=(torch.ones(2, 6), torch.ones(2, 6)))
    wide = make(1, 5, value=HEAD)
    with pytest.raises(ValueError, match="residual_norm has shapes"):
        titans_memory(*wide.tokens, wide.weights, chunk=4, residual_norm=(torch.ones(2, 6), torch.ones(6)))
    _, state = titans_memory(*case.tokens, case.weights, chunk=4, output_final_state=True)
    now = [t[:, 0] for t in case.tokens]
    with pytest.raises(ValueError, match="surprise_clip is 0"):
        titans_step(*now, state, surprise_clip=0)
    with pytest.raises(ValueError, match="initial has shapes"):
        titans_step(*now, state, initial=case.weights[:1])
    with pytest.raises(ValueError, match="surprise_clip is -2"):
        titans_weights(state, surprise_clip=-2)
