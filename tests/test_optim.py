"""Gated AdamW: right against independent values, equal to AdamW where nothing is gated, locked bits kept, exact resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from proteus_lm import ActivationSchedule, optim
from proteus_lm.optim import GatedAdamW
from tests.ops.vectors import FOLDER

WHOLE = optim._whole


@pytest.fixture(autouse=True, params=[False, True], ids=["slices", "masks"])
def form(request, monkeypatch):
    """Every test in both forms: open parts as slices (the CPU's), and whole tensors with a mask (the GPU's)."""
    monkeypatch.setattr(optim, "_whole", lambda tensor: request.param)


def rows():
    index = FOLDER / "index.json"
    return [r for r in json.loads(index.read_text()) if r["rule"] == "gated_adamw"] if index.is_file() else []


@pytest.mark.shared
@pytest.mark.parametrize("row", rows(), ids=lambda r: r["file"])
def test_trace_equals_right_values(row):
    with np.load(FOLDER / row["file"]) as file:
        arrays = {n: torch.from_numpy(file[n]) for n in file.files}
    p = torch.nn.Parameter(arrays["theta"].clone())
    schedule = ActivationSchedule(row["blocks"], row["context"])
    optimizer = GatedAdamW(
        [p],
        betas=tuple(row["betas"]),
        eps=row["eps"],
        weight_decay=row["weight_decay"],
        masks={p: (0, schedule)},
        decay_locked=row["decay_locked"],
        bias_correction=row["bias_correction"],
    )
    for step, (grad, lr) in enumerate(zip(arrays["grads"], arrays["lrs"])):
        assert schedule.activation(len(p), 1, offset=step).mask()[0, 0].equal(arrays["active"][step])
        p.grad = grad.clone()
        optimizer.param_groups[0]["lr"] = lr.item()
        optimizer.step()
        assert (p - arrays["trace"][step]).abs().max() < 1e-12


def train(make, steps, shape=(12, 6), seed=0, resume_at=None):
    torch.manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape)), torch.nn.Parameter(torch.randn(shape[0]))]
    optimizer = make(params)
    gradients = torch.Generator().manual_seed(1)
    for step in range(steps):
        if step == resume_at:
            saved = optimizer.state_dict()
            optimizer = make(params)
            optimizer.load_state_dict(saved)
        for p in params:
            p.grad = torch.randn(p.shape, generator=gradients)
        optimizer.step()
    return [p.detach() for p in params]


def test_one_block_equals_torch_adamw():
    ours = train(lambda ps: GatedAdamW(ps, 1e-2, masks={ps[0]: (0, ActivationSchedule(1, 9))}), 20)
    right = train(lambda ps: torch.optim.AdamW(ps, 1e-2, (0.9, 0.95), 1e-8, 0.1, foreach=True), 20)
    for a, b in zip(ours, right):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_locked_blocks_keep_their_bits_and_nan_gradients_do_not_reach_them(dim):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(12, 12))
    before, schedule = p.detach().clone(), ActivationSchedule(4, 40)
    optimizer = GatedAdamW([p], 1e-2, masks={p: (dim, schedule)})
    for step in range(25):
        width = schedule.active(12, step)
        p.grad = torch.randn(12, 12)
        p.grad.narrow(dim, width, 12 - width).fill_(float("nan"))
        optimizer.mask_gradients()
        assert torch.isfinite(torch.nn.utils.clip_grad_norm_([p], 1.0))
        optimizer.step()
        locked = slice(width, None)
        for tensor, right in ((p, before), *((optimizer.state[p][m], 0 * before) for m in ("exp_avg", "exp_avg_sq"))):
            view = tensor.detach().movedim(dim, 0)[locked]
            assert torch.equal(view, right.movedim(dim, 0)[locked])
    assert not torch.equal(p.detach().movedim(dim, 0)[:9], before.movedim(dim, 0)[:9])


def test_first_step_after_an_unlock_is_the_learning_rate():
    p = torch.nn.Parameter(torch.zeros(8))
    optimizer = GatedAdamW([p], 1e-2, weight_decay=0.0, masks={p: (0, ActivationSchedule(2, 100))}, betas=(0.9, 0.999))
    for _ in range(50):
        p.grad = torch.ones(8)
        optimizer.step()
    assert torch.equal(p[4:], torch.zeros(4))
    p.grad = torch.tensor([1.0] * 4 + [3.0, -3.0, 0.5, -0.5])
    optimizer.step()
    torch.testing.assert_close(p[4:].detach(), 1e-2 * torch.tensor([-1.0, 1.0, -1.0, 1.0]), rtol=1e-4, atol=0)


def test_stock_adamw_decays_what_we_keep():
    """The trap the gate is for: a zero gradient is not a missing one (spec/deep.md 4.3 A)."""
    p, r = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    ours = GatedAdamW([p], 1e-2, masks={p: (0, ActivationSchedule(2, 1000))})
    literal = GatedAdamW([r], 1e-2, masks={r: (0, ActivationSchedule(2, 1000))}, decay_locked=True)
    for _ in range(50):
        p.grad, r.grad = torch.zeros(4), torch.zeros(4)
        ours.step()
        literal.step()
    assert torch.equal(p[2:], torch.ones(2))
    torch.testing.assert_close(r[2:].detach(), torch.full((2,), (1 - 1e-3) ** 50))


def test_a_period_updates_with_the_mean_gradient():
    torch.manual_seed(0)
    p, r = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(6))
    ours, right = GatedAdamW([p], 1e-2, periods={p: 3}), GatedAdamW([r], 1e-2)
    gradients = torch.randn(4, 3, 6)
    for window in gradients:
        for i, gradient in enumerate(window):
            p.grad = gradient.clone()
            before = p.detach().clone()
            ours.step()
            assert torch.equal(p, before) == (i < 2)
        r.grad = window.mean(0)
        right.step()
    torch.testing.assert_close(p, r, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_both_forms_give_the_same_bits(monkeypatch, dtype):
    """Blocks that open, a decay that moves, parameters of two periods; a locked -0.0 and an infinite gradient among them."""
    schedule, trained = ActivationSchedule(4, 20), []
    for whole in (False, True):
        monkeypatch.setattr(optim, "_whole", lambda tensor, whole=whole: whole)
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(9, 12).to(dtype)) for _ in range(4)]
        with torch.no_grad():
            params[1][:, 11] = -0.0
        masks = {p: (dim, schedule) for p, dim in zip(params, (0, 1, 1))}
        optimizer = GatedAdamW(params, 1e-2, masks=masks, periods={params[2]: 3})
        for step in range(30):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step // 4)
            for p in params:
                p.grad = torch.randn(9, 12).to(dtype)
                if step < 15 and p is params[1]:
                    p.grad[:, 11] = float("inf")
            optimizer.step()
            if step == 14:
                assert torch.signbit(params[1][:, 11]).all() and not params[1][:, 11].any()
        trained.append([p.detach() for p in params])
    for a, b in zip(*trained):
        assert torch.equal(a, b)


def test_bf16_decays_by_the_factor_of_fp32(monkeypatch):
    """In bf16 a factor of 0.997 would be 0.996; and where half is locked as where all is open."""
    monkeypatch.setattr(optim, "_whole", WHOLE)
    ours, right = (torch.nn.Parameter(torch.full((4, 4), 1.5, dtype=torch.bfloat16)) for _ in range(2))
    gated = GatedAdamW([ours], 1e-2, weight_decay=0.3, masks={ours: (1, ActivationSchedule(2, 100))})
    plain = GatedAdamW([right], 1e-2, weight_decay=0.3)
    for _ in range(40):
        ours.grad, right.grad = torch.ones_like(ours), torch.ones_like(right)
        gated.step()
        plain.step()
        assert torch.equal(ours[:, :2], right[:, :2])
    assert torch.equal(ours[:, 2:], torch.full((4, 2), 1.5, dtype=torch.bfloat16))


def test_a_step_is_few_calls(form):
    """Launches are what a step costs on a GPU: a hundred gated parameters, some waiting, as many calls as a few."""

    def calls(count):
        params = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(count)]
        masks = {p: (i % 2, ActivationSchedule(4, 20)) for i, p in enumerate(params[1:])}
        optimizer = GatedAdamW(params, masks=masks, periods=dict.fromkeys(params[::2], 2))
        for p in params:
            p.grad = torch.randn(8, 8)
        for _ in range(10):
            optimizer.step()
        with torch.profiler.profile() as seen:
            optimizer.step()
            optimizer.step()
        views = {"aten::view", "aten::narrow", "aten::slice", "aten::detach"}
        top = [e.name for e in seen.events() or () if e.cpu_parent is not None and e.cpu_parent.name.startswith("Optimizer.step")]
        return sum(name not in views for name in top)

    few, many = calls(12), calls(100)
    assert 0 < few == many


@pytest.mark.gpu
def test_on_a_gpu_as_on_a_cpu(monkeypatch):
    """To the rounding of fp32 (a GPU divides by a number as it multiplies by its inverse); locked bits are kept."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(optim, "_whole", WHOLE)  # of each device its own
    schedule, trained = ActivationSchedule(4, 20), []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        start = [torch.randn(130, 72) for _ in range(6)]
        params = [torch.nn.Parameter(x.to(device)) for x in start]
        masks = {p: (dim, schedule) for p, dim in zip(params, (0, 1, 0, 1))}
        optimizer = GatedAdamW(params, 1e-2, masks=masks, periods={params[2]: 3, params[4]: 2})
        for step in range(30):
            width = schedule.active(72, step)
            for p in params:
                p.grad = torch.randn(130, 72).to(device)
                if p is params[1]:
                    p.grad[:, width:] = float("nan")
            optimizer.step()
            assert torch.equal(params[1][:, width:].cpu(), start[1][:, width:])
        trained.append([p.detach().cpu() for p in params])
    for a, b in zip(*trained):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_gate_along_columns_is_that_along_rows_of_the_transpose():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(5, 12))
    r = torch.nn.Parameter(p.detach().T.clone())
    schedule = ActivationSchedule(4, 20)
    optimizers = [GatedAdamW([q], 1e-2, masks={q: (dim, schedule)}) for q, dim in ((p, 1), (r, 0))]
    for _ in range(30):
        p.grad = torch.randn(5, 12)
        r.grad = p.grad.T.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(p.T, r)


def test_a_block_that_opens_inside_a_period_learns_from_the_rest_of_it():
    """It then goes on as a parameter of its own would whose optimiser began with that period."""
    torch.manual_seed(0)
    gradients, schedule = torch.randn(20, 4, dtype=torch.float64), ActivationSchedule(2, 10)
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    r = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    assert schedule.unlock_position(1) == 5
    ours = GatedAdamW([p], 1e-2, masks={p: (0, schedule)}, periods={p: 4})
    alone = GatedAdamW([r], 1e-2, periods={r: 4})
    for step, gradient in enumerate(gradients):
        p.grad, r.grad = gradient.clone(), gradient[2:].clone()
        ours.step()
        if step == 4:
            r.grad.zero_()
        if step >= 4:
            alone.step()
        torch.testing.assert_close(p[2:], r, rtol=1e-14, atol=0)
    assert not torch.equal(r, torch.ones_like(r))


def sometimes(make, calls, steps=30, resume_at=None):
    """Four matrices, of which each has a gradient at some steps only: calls(step, number)."""
    random = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(3, 2, generator=random, dtype=torch.float64)) for _ in range(4)]
    optimizer = make(params)
    for step in range(steps):
        if step == resume_at:
            saved = optimizer.state_dict()
            optimizer = make(params)
            optimizer.load_state_dict(saved)
        for number, p in enumerate(params):
            gradient = torch.randn(p.shape, generator=random, dtype=torch.float64)
            p.grad = gradient if calls(step, number) else None
        optimizer.step()
    return [p.detach() for p in params]


SOMETIMES = {
    "late": lambda step, number: step >= 7 * number,
    "by turns": lambda step, number: step % 4 == number,
    "late, with gaps": lambda step, number: step >= 3 * number and step % (number + 2) > 0,
}


@pytest.mark.parametrize("calls", SOMETIMES.values(), ids=SOMETIMES)
@pytest.mark.parametrize("resume_at", [None, 13])
def test_a_parameter_counts_the_updates_for_which_it_had_a_gradient(calls, resume_at):
    betas = (0.9, 0.999)
    ours = sometimes(lambda ps: GatedAdamW(ps, 1e-2, betas), calls, resume_at=resume_at)
    right = sometimes(lambda ps: torch.optim.AdamW(ps, 1e-2, betas, 1e-8, 0.1), calls)
    for a, b in zip(ours, right):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_gated_parameter_that_begins_late_counts_from_there_and_its_later_blocks_from_their_own_step():
    def make(blocks):
        schedule = ActivationSchedule(blocks, 15)
        return lambda ps: GatedAdamW(ps, 1e-2, (0.9, 0.999), weight_decay=0.0, masks=dict.fromkeys(ps, (0, schedule)))

    late = lambda step, _: step >= 8  # noqa: E731
    whole, gated = (sometimes(make(blocks), late, steps=9) for blocks in (1, 3))
    for a, b in zip(
        whole, gated
    ):  # blocks open at 0, 5 and 10: two are open at the first gradient, and move like an open parameter
        assert torch.equal(a[:2], b[:2])
        assert not torch.equal(a[2:], b[2:])
    every = sometimes(make(3), lambda step, _: True, steps=11)
    begun = sometimes(make(3), late, steps=11)
    start = sometimes(make(3), late, steps=0)
    for a, b, c in zip(every, begun, start):  # the block that opens at 10 takes its first step there in both
        assert torch.equal(a[2:], b[2:])
        assert not torch.equal(b[2:], c[2:])


@pytest.mark.parametrize("at", [1, 7, 10])
def test_resume_continues_bit_for_bit(at):
    def make(ps):
        return GatedAdamW(ps, 1e-2, masks={ps[0]: (1, ActivationSchedule(3, 15))}, periods={ps[0]: 2, ps[1]: 4})

    for a, b in zip(train(make, 20, resume_at=at), train(make, 20)):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": -1.0}, "must not be negative"),
        ({"betas": (0.9, 1.0)}, r"in \[0, 1\)"),
        ({"bias_correction": "none"}, "bias_correction is 'none'"),
        ({"masks": {torch.ones(3): (0, ActivationSchedule(1, 1))}}, "not among the parameters"),
    ],
)
def test_bad_options_raise(options, says):
    with pytest.raises(ValueError, match=says):
        GatedAdamW([torch.nn.Parameter(torch.ones(4))], **options)


def test_gates_that_do_not_fit_raise():
    p = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="eps is 0 with masks"):
        GatedAdamW([p], eps=0.0, masks={p: (0, ActivationSchedule(2, 9))})
    with pytest.raises(ValueError, match="dimension 1"):
        GatedAdamW([p], masks={p: (1, ActivationSchedule(2, 9))})
    with pytest.raises(ValueError, match="cannot be cut into 5 blocks"):
        GatedAdamW([p], masks={p: (0, ActivationSchedule(5, 9))})
    with pytest.raises(ValueError, match="period is 0"):
        GatedAdamW([p], periods={p: 0})
