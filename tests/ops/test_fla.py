"""The backend "fla": what it refuses and why, and that its masks and stages give Proteus, whatever kernel is below them.

fla's Triton kernels run on no CPU, so its references in PyTorch stand in for them here; benchmarks/ops.py checks
the kernels on a GPU.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types

import pytest
import torch

from proteus_lm import ActivationSchedule, ops
from proteus_lm.ops import backend, fla
from tests.ops.linear_rules import AXES, HEADS, KEYS, VALUES, assert_close, everything, make, make_state

RULES = tuple(fla.KERNELS)
TOKENS = 70  # more than a chunk of fla's


def naive(rule):
    """fla's reference, called as its kernel is: packed documents one by one, one constant decay a head, no decay."""
    package, name = {
        "retention": ("simple_gla", "naive_recurrent_simple_gla"),
        "comba": ("comba", "naive_chunk_comba"),
    }.get(rule, ("gated_delta_rule", "naive_recurrent_gated_delta_rule"))
    reference = getattr(importlib.import_module(f"fla.ops.{package}.naive"), name)

    def call(*, cu_seqlens=None, initial_state=None, output_final_state, scale, g_gamma=None, **tensors):
        shape = tensors["q"].shape[:3]
        if g_gamma is not None:
            tensors["g"] = g_gamma.expand(shape)
        if rule == "delta_rule":
            tensors["g"] = torch.zeros(shape)
        bounds = [0, shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
        outputs, finals = [], []
        for i, (a, b) in enumerate(zip(bounds, bounds[1:])):
            start = initial_state if cu_seqlens is None or initial_state is None else initial_state[i : i + 1]
            part = {n: x[:, a:b] for n, x in tensors.items()}
            out, final = reference(**part, scale=scale, initial_state=start, output_final_state=True)
            outputs.append(out)
            finals.append(final)
        return torch.cat(outputs, 1).to(tensors["v"].dtype), torch.cat(finals) if output_final_state else None

    return call


@pytest.fixture
def stand_in(monkeypatch):
    """fla's references for its kernels, and no refusal of the CPU."""
    pytest.importorskip("fla", reason="wants flash-linear-attention: pip install flash-linear-attention")
    monkeypatch.setattr(fla, "kernel", naive)
    taken = [b._replace(refuse=lambda *_: None) if b.name == "fla" else b for b in backend._BACKENDS]
    monkeypatch.setattr(backend, "_BACKENDS", tuple(taken))


def compare(rule, inputs, state, **keywords):
    """fla's form in fp32 (as its references compute) against the oracle in fp64: outputs, state and all gradients."""
    single = {n: x.float() for n, x in inputs.items()}
    mine = everything(rule, single, None if state is None else state.float(), backend="fla", **keywords)
    assert_close(mine, everything(rule, inputs, state, backend="reference", **keywords), 1e-4)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("axis", [None, *AXES])
@pytest.mark.parametrize("rule", RULES)
def test_masks_and_stages_equal_the_oracle(stand_in, rule, axis, state):
    """Unlocks inside a chunk, the last block larger than the others, one row of several open past the whole schedule."""
    dim = KEYS if axis == "key" else VALUES
    activation = None if axis is None else ActivationSchedule(4, 60).activation(dim, TOKENS, offset=3)
    keywords = {} if axis is None else {"activation": activation, "axis": axis}
    compare(rule, make(rule, 2, TOKENS), make_state(rule, 2) if state else None, scale=0.4, **keywords)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("rule", RULES)
def test_packed_documents_equal_the_oracle(stand_in, rule, axis):
    bounds = torch.tensor([0, 17, 18, TOKENS], dtype=torch.int32)
    dim = KEYS if axis == "key" else VALUES
    activation = ActivationSchedule(4, 40).activation(dim, TOKENS, cu_seqlens=bounds)
    compare(rule, make(rule, 1, TOKENS), None, activation=activation, axis=axis, cu_seqlens=bounds)
    compare(rule, make(rule, 1, TOKENS), make_state(rule, 3), cu_seqlens=bounds)  # ungated, a state is taken


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("rule", RULES)
def test_a_locked_part_of_the_state_keeps_its_bits_and_is_read_by_nothing(stand_in, rule, axis):
    """NaN stands there; the state that opens later starts undecayed, which one masked call would get wrong."""
    dim = KEYS if axis == "key" else VALUES
    activation = ActivationSchedule(4, 200).activation(dim, TOKENS)
    closed = int(activation.active[0, -1])
    assert closed < dim
    start = make_state(rule, 2).float()
    part = (..., slice(closed, None), slice(None)) if axis == "key" else (..., slice(closed, None))
    start[part] = torch.nan
    inputs = {n: x.float().requires_grad_() for n, x in make(rule, 2, TOKENS).items()}
    call = getattr(ops, rule)
    out, state = call(
        *inputs.values(), activation=activation, axis=axis, initial_state=start, output_final_state=True, backend="fla"
    )
    assert torch.isnan(state[part]).all() and torch.isfinite(out).all()
    grads = torch.autograd.grad(out.square().sum(), list(inputs.values()))
    assert all(torch.isfinite(x).all() for x in grads)


def test_a_schedule_that_is_over_runs_as_the_ungated_rule(stand_in, monkeypatch):
    calls = []
    monkeypatch.setattr(fla, "kernel", lambda rule: lambda **given: calls.append(given) or naive(rule)(**given))
    activation = ActivationSchedule(4, 60).activation(KEYS, TOKENS, offset=60)
    inputs, start = make("comba", 2, TOKENS, dtype=torch.float32), make_state("comba", 2, dtype=torch.float32)
    ops.comba(*inputs.values(), activation=activation, initial_state=start, backend="fla")
    assert len(calls) == 1 and calls[0]["k"] is inputs["k"] and not calls[0]["output_final_state"]


def test_a_constant_decay_goes_as_one_number_a_head(stand_in):
    """RetNet's: fla has a path for it that its guard on Hopper leaves alone."""
    inputs = make("retention", 2, TOKENS)
    inputs["g"] = torch.log1p(-(2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64)))).expand(2, TOKENS, HEADS)
    assert "g_gamma" in fla._arguments("retention", inputs)
    assert "g_gamma" not in fla._arguments("retention", {**inputs, "g": inputs["g"].clone()})
    with torch.no_grad():
        activation = ActivationSchedule(4, 60).activation(KEYS, TOKENS)
        single = [x.float() if n != "g" else x[0, 0].float().expand(2, TOKENS, HEADS) for n, x in inputs.items()]
        for start in (None, make_state("retention", 2)):
            given = None if start is None else start.float()
            out, _ = ops.retention(*single, activation=activation, initial_state=given, backend="fla")
            right, _ = ops.retention(*inputs.values(), activation=activation, initial_state=start, backend="reference")
            torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_flas_kernels_take_the_names_we_give_them(rule):
    """Its signatures, read from the package: a renamed argument would be found here and not on somebody's GPU."""
    pytest.importorskip("fla", reason="wants flash-linear-attention: pip install flash-linear-attention")
    names = set(inspect.signature(fla.kernel(rule)).parameters)
    arguments = fla._arguments(rule, make(rule, 1, 2, dtype=torch.bfloat16))
    assert "g" not in arguments or arguments["g"].dtype == torch.float32  # their sum over a chunk
    given = set(arguments)
    assert given | {"scale", "initial_state", "output_final_state", "cu_seqlens"} <= names
    assert rule != "retention" or "g_gamma" in names


# Refusals: each before anything is computed, with a reason.


def test_asked_for_by_name_it_refuses_with_its_reason():
    inputs = make("comba", 1, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"backend 'fla' cannot run comba: (tensors are on cpu|the package)"):
        ops.comba(*inputs.values(), backend="fla")
    with pytest.raises(ValueError, match="backend 'fla' cannot run swla: flash-linear-attention has no swla"):
        ops.swla(*make("swla", 1, 3).values(), backend="fla")


def test_the_read_before_the_write_is_refused(stand_in):
    inputs = make("delta_rule", 1, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="cannot run delta_rule: its kernels have no read 'pre'"):
        ops.delta_rule(*inputs.values(), read="pre", backend="fla")


def test_a_package_that_is_absent_is_named(monkeypatch):
    monkeypatch.setattr(fla, "installed", lambda: False)
    assert fla.refuse("comba", ()) == "the package flash-linear-attention is not installed"


@pytest.mark.parametrize(
    ("rule", "change", "reason"),
    [
        ("comba", {"dtype": torch.float64}, "float64"),
        ("delta_rule", {"dtype": torch.float32}, "float16 and bfloat16 alone"),
        ("gated_delta_rule", {"dtype": torch.bfloat16, "keys": 257}, "K = 257; .* at most 256"),
        ("comba", {"dtype": torch.bfloat16, "keys": 300}, "K = 300"),
        ("retention", {"dtype": torch.bfloat16, "values": 9}, "V = 9; .* even"),
    ],
)
def test_types_and_sizes_its_kernels_do_not_hold(rule, change, reason):
    inputs = tuple(x.requires_grad_() for x in make(rule, 1, 2, **change).values())
    refusal = fla.refuse_shapes(rule, inputs)
    assert refusal is not None and re.search(reason, refusal)


def test_sizes_that_matter_to_others_alone_pass():
    wide = make("retention", 1, 2, dtype=torch.bfloat16, keys=320)
    assert fla.refuse_shapes("retention", tuple(wide.values())) is None  # V = 9 is odd, but no gradient is wanted
    mixed = make("comba", 1, 2, dtype=torch.bfloat16)
    mixed["beta"] = mixed["beta"].float()
    assert fla.refuse_shapes("comba", tuple(mixed.values())) is None
    mixed["p"] = mixed["p"].float()
    assert "several types" in str(fla.refuse_shapes("comba", tuple(mixed.values())))


def test_a_state_whose_stages_the_host_does_not_know_is_refused(stand_in):
    inputs, start = make("comba", 2, TOKENS, dtype=torch.float32), make_state("comba", 2, dtype=torch.float32)
    activation = ActivationSchedule(4, 60).activation(KEYS, TOKENS, offset=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="an offset a row the host does not know the stages"):
        ops.comba(*inputs.values(), activation=activation, initial_state=start, backend="fla")
    compare("comba", make("comba", 2, TOKENS), None, activation=activation)  # from zeros, rows may differ
    wide = tuple(make("comba", 2, TOKENS).values())
    assert "float64" in str(fla.refuse_state("comba", wide, start.double(), None))
    assert fla.refuse_state("comba", wide, start, None) is None


def test_auto_leaves_float32_to_others(monkeypatch):
    monkeypatch.setattr(fla, "LEFT_OUT", {})
    assert "tf32" in str(fla.held("comba", tuple(make("comba", 1, 2, dtype=torch.float32).values())))
    assert fla.held("comba", tuple(make("comba", 1, 2, dtype=torch.bfloat16).values())) is None


def test_auto_leaves_a_compiled_graph_whole(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "torch.compile" in str(fla.held("comba", tuple(make("comba", 1, 2, dtype=torch.bfloat16).values())))


def guarded(monkeypatch, hopper, since, mended, tilelang=False):
    """A machine as fla sees it."""
    modules = {
        "common.chunk_o": {"IS_NVIDIA_HOPPER": hopper, "TRITON_ABOVE_3_4_0": since, "TRITON_ABOVE_3_7_1": mended},
        "common.backends.tilelang": {
            "CommonTileLangBackend": lambda: types.SimpleNamespace(is_available=lambda: tilelang, is_enabled=lambda: True)
        },
    }
    monkeypatch.setattr(fla, "_load", lambda name: types.SimpleNamespace(**modules[name]))


@pytest.mark.parametrize("rule", RULES)
def test_the_miscompiled_gated_backward_on_hopper_is_refused_beforehand(monkeypatch, rule):
    leaves = tuple(x.requires_grad_() for x in make(rule, 1, 2, dtype=torch.bfloat16).values())
    plain = tuple(x.detach() for x in leaves)
    guarded(monkeypatch, hopper=True, since=True, mended=False)
    refusal = fla._guard(rule, leaves)
    assert (refusal is None) == (rule == "delta_rule")
    assert refusal is None or "upgrade Triton to 3.7.1" in refusal
    assert fla._guard(rule, plain) is None  # the forward is right
    with torch.no_grad():
        assert fla._guard(rule, leaves) is None
    guarded(monkeypatch, hopper=True, since=True, mended=True)
    assert fla._guard(rule, leaves) is None
    guarded(monkeypatch, hopper=False, since=True, mended=False)
    assert fla._guard(rule, leaves) is None
    guarded(monkeypatch, hopper=True, since=True, mended=False, tilelang=True)
    assert (fla._guard(rule, leaves) is None) == (rule != "retention")


def test_flas_guard_is_where_we_look_for_it():
    """The names that `_guard` reads are there: a moved guard would be found here."""
    pytest.importorskip("fla", reason="wants flash-linear-attention: pip install flash-linear-attention")
    module = importlib.import_module("fla.ops.common.chunk_o")
    assert all(hasattr(module, n) for n in ("IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1"))
    assert fla._tilelang() in (True, False)


def test_auto_takes_it_where_our_kernels_cannot(stand_in, monkeypatch):
    inputs = tuple(make("comba", 1, 2, dtype=torch.bfloat16).values())
    monkeypatch.setattr(fla, "LEFT_OUT", {})
    off_cpu = [b._replace(cuda=False) if b.name == "fla" else b for b in backend._BACKENDS]
    monkeypatch.setattr(backend, "_BACKENDS", tuple(off_cpu))
    choice = backend.explain("comba", *inputs)
    assert choice.backend == "fla" and "not triton: " in choice.reason
    assert list(backend.verdicts("comba", *inputs)) == list(backend.NAMES[1:])
    monkeypatch.setattr(fla, "LEFT_OUT", {"comba": "not checked here"})
    choice = backend.explain("comba", *inputs)
    assert choice.backend == "chunk" and "not fla: not checked here" in choice.reason
    assert backend.choose("comba", "fla", *inputs) == "fla"  # by name it runs
