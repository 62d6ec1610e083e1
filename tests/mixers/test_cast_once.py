"""Several maps of one tensor cast it once under autocast; what computes in fp32 goes on seeing it as it came."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from proteus_lm import ActivationSchedule, ProteusConfig
from proteus_lm.mixers import base, registry, titans, titans_mag, titans_mal
from proteus_lm.mixers.base import cast_once
from proteus_lm.mlp import MLP
from proteus_lm.sequence import TokenSequence

BF16_EPS = 2.0**-8
"""What a rounding to bf16 may move, relative."""


class Casts(TorchDispatchMode):
    """Counts casts of tensors of `shape` from fp32 to bf16."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].shape, args[0].dtype) == (self.shape, torch.float32):
            self.count += out.dtype == torch.bfloat16
        return out


def autocast(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


@pytest.mark.parametrize(("dtype", "inside"), [
    (torch.float32, torch.bfloat16), (torch.float64, torch.float64), (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16), (torch.int64, torch.int64),
])  # fmt: skip
def test_the_type_inside_and_outside_autocast(dtype, inside):
    x = torch.ones(2, 3, dtype=dtype)
    assert cast_once(x) is x
    with autocast():
        assert cast_once(x).dtype == inside and (cast_once(x) is x) == (dtype == inside)
    with autocast(torch.float16):
        assert cast_once(x).dtype == (torch.float16 if dtype == torch.float32 else dtype)
        with torch.autocast("cpu", enabled=False):
            assert cast_once(x) is x
    meta = torch.empty(2, device="meta")  # has no autocast
    assert cast_once(meta) is meta


def gradients(module, function, x: Tensor, upstream: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    with autocast():
        y = function(x * 1)  # no leaf: autocast remembers what it made of those
    grads = torch.autograd.grad((y * upstream).sum(), [x, *module.parameters()], allow_unused=True)
    return [y.detach(), *(g for g in grads if g is not None)]


def uncast(monkeypatch) -> None:
    """Every map casts for itself, as without `cast_once`."""
    from proteus_lm import mlp

    for place in (base, titans, titans_mag, titans_mal, mlp):
        monkeypatch.setattr(place, "cast_once", lambda x: x)


def assert_close(ours: list[Tensor], right: list[Tensor]) -> None:
    """The value bit for bit; gradients but for roundings of a sum to bf16."""
    assert torch.equal(ours[0], right[0])
    for a, b in zip(ours[1:], right[1:], strict=True):
        assert a.dtype == b.dtype and (a - b).norm() <= 2 * BF16_EPS * b.norm()


def test_the_mlp_casts_its_input_once(monkeypatch):
    torch.manual_seed(0)
    module, x, upstream = MLP(16, 24), torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    with Casts((2, 9, 16)) as casts:
        ours = gradients(module, module, x, upstream)
    assert casts.count == 2  # the input, and the gradient of the output
    uncast(monkeypatch)
    with Casts((2, 9, 16)) as casts:
        right = gradients(module, module, x, upstream)
    assert casts.count == 3
    assert_close(ours, right)


MIXERS = [{"mixer": name} for name in registry] + [{"mixer": "titans", "titans_variant": form} for form in ("mag", "mal")]


@pytest.mark.parametrize("fields", MIXERS, ids=lambda fields: "-".join(fields.values()))
def test_a_mixer_casts_its_input_once_and_its_gates_see_it_in_fp32(fields, monkeypatch):
    torch.manual_seed(0)
    config = ProteusConfig(**fields, hidden_size=12, num_heads=2, head_dim=8)
    mixer, seen = config.mixer_class(config), []
    for module in [*mixer.modules()][::-1]:
        if callable(start := getattr(module, "init_weights", None)):
            start()
    for place in (base, titans):
        monkeypatch.setattr(place, "gate_values", lambda x, *given, run=base.gate_values: (seen.append(x.dtype), run(x, *given))[1])
    x, upstream = torch.randn(2, 11, 12), torch.randn(2, 11, 12)
    sequence = TokenSequence(ActivationSchedule(1, 8), 2, 11)
    with Casts((2, 11, 12)) as casts, torch.no_grad(), autocast():
        mixer(x, sequence)
    found = casts.count
    ours = gradients(mixer, lambda x: mixer(x, sequence)[0], x, upstream)
    assert set(seen) <= {torch.float32}
    uncast(monkeypatch)
    fed = []  # the maps of x itself that autocast would cast it for
    for module in mixer.modules():
        if isinstance(module, nn.Linear) and not isinstance(module, base.GateProjection):
            module.register_forward_pre_hook(lambda _, given: fed.append(given[0] is x))
    with Casts((2, 11, 12)) as casts, torch.no_grad(), autocast():
        mixer(x, sequence)
    assert sum(fed) > 0 and casts.count - found == sum(fed) - 1
    assert_close(ours, gradients(mixer, lambda x: mixer(x, sequence)[0], x, upstream))


def test_fp64_stays_as_it_is_under_autocast():
    module, x = MLP(16, 24).double(), torch.randn(2, 9, 16, dtype=torch.float64)
    with autocast():
        y = module(x)
    assert y.dtype == torch.float64 and torch.equal(y, module(x))


def test_the_compiler_meets_no_break():
    torch.manual_seed(0)
    module, x = MLP(16, 24), torch.randn(2, 9, 16)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for dtype in (torch.bfloat16, torch.float16):
        with autocast(dtype):
            assert compiled(x).dtype == dtype and torch.equal(compiled(x), module(x))
    assert compiled(x).dtype == torch.float32
