"""The Hopper kernels of the linear memories: they compile and fit a GPU, are chosen where they should be, and are right (on a GPU).

Without a Hopper GPU `test_hopper_emulated.py` runs them, by an emulator. Compiling needs no GPU, but Triton without its
interpreter: a process of its own (`hopper_compile.py`), whose lines the tests read.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid

from proteus_lm import ActivationSchedule, ops
from tests.ops.hopper_compile import QUICK, Variant, every
from tests.ops.triton_linear_cases import NAMES, error, inputs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
SHARED = 227 * 1024  # bytes one program can have on Hopper; a kernel that wants more fails at its launch, not before
CPU = torch.device("cpu")
KERNELS = {"scan", "reverse", "gradients"}


def compiled(which: str, cache: Path) -> dict[str, dict[str, dict]]:
    """{variant: {kernel: what hopper_compile.py says of it}}."""
    import triton

    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not assembler.is_file() and "TRITON_PTXAS_PATH" not in os.environ:
        pytest.skip(f"this Triton comes without NVIDIA's assembler ({assembler})")
    script = Path(__file__).with_name("hopper_compile.py")
    environment = {n: x for n, x in os.environ.items() if n not in ("TRITON_INTERPRET", "PROTEUS_HOPPER")}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, dict]] = {}
    for line in map(json.loads, done.stdout.splitlines()):
        found.setdefault(line["variant"], {})[line["kernel"]] = line
    return found


def wrong(variant: Variant, found: dict[str, dict[str, dict]]) -> list[str]:
    """What is not as it should be of a variant: kernels that were not launched, do not compile, or want too much shared memory."""
    kernels = found[variant.name]
    wanted = {"gradients"} if variant.rule == "swla" else KERNELS if variant.save else {"scan"}
    lines = [f"launched {sorted(kernels)}, not {sorted(wanted)}"] if set(kernels) != wanted else []
    lines += [f"{name}: {x['raised']}" for name, x in kernels.items() if "raised" in x]
    return lines + [f"{name}: {x['shared']} bytes" for name, x in kernels.items() if x.get("shared", 0) > SHARED]


def test_the_kernels_compile_and_fit_a_multiprocessor(tmp_path):
    found = compiled("quick", tmp_path)
    assert {x.name: bad for x in QUICK if (bad := wrong(x, found))} == {}


@pytest.mark.slow
def test_all_kernels_compile_and_fit_a_multiprocessor(tmp_path):
    found = compiled("all", tmp_path)
    assert {x.name: bad for x in every() if (bad := wrong(x, found))} == {}


@pytest.fixture
def hopper(monkeypatch):
    """The package, on a machine that it refuses for no reason but those a test makes."""
    from proteus_lm.ops.triton import hopper

    monkeypatch.delenv(hopper.VARIABLE, raising=False)
    monkeypatch.setattr(hopper, "INTERPRETED", False)
    monkeypatch.setattr(hopper.triton, "__version__", hopper.TESTED + "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    hopper._refuse.cache_clear()
    yield hopper
    hopper._refuse.cache_clear()


def shape(keys=128, values=128, dtype=torch.bfloat16, axis="key", blocks=1):
    """Of a call on one row of 80 tokens and two heads."""
    from proteus_lm.ops.triton.shape import shape_of

    q, v = torch.empty(1, 80, 2, keys, dtype=dtype), torch.empty(1, 80, 2, values, dtype=dtype)
    return shape_of("comba", q, v, q, None, axis, blocks, True)


TAKEN = (
    {},
    {"keys": 64},
    {"values": 64},
    {"values": 512},
    {"dtype": torch.float16},
    {"blocks": 16},
    {"blocks": 8, "axis": "value"},
)
PASSED_OVER = {
    "float32": {"dtype": torch.float32, "keys": 64},
    "K 96": {"keys": 96},
    "K 256": {"keys": 256},
    "V 80": {"values": 80},
    "open lengths of 4 key rows": {"blocks": 32},
    "open lengths of 4 columns": {"blocks": 16, "values": 64, "axis": "value"},
}


@pytest.mark.parametrize("given", TAKEN, ids=str)
def test_calls_of_the_right_shape_are_taken(given, hopper):
    assert hopper.refuse() is None
    assert hopper.fits(shape(**given), CPU, torch.empty(16), None)


@pytest.mark.parametrize("name", PASSED_OVER)
def test_each_wrong_size_alone_is_passed_over(name, hopper):
    assert not hopper.fits(shape(**PASSED_OVER[name]), CPU)


@pytest.mark.parametrize("field", [{"half": False}, {"chunk": 32}, {"keys": 96}, {"values": 80}, {"align": 4}], ids=str)
def test_each_field_alone_is_looked_at(field, hopper):
    assert hopper.fits(shape(), CPU)
    assert not hopper.fits(shape()._replace(**field), CPU)


def test_an_address_that_is_no_multiple_of_16_is_passed_over(hopper):
    x = torch.empty(64, dtype=torch.bfloat16)
    assert x.data_ptr() % 16 == 0
    assert hopper.fits(shape(), CPU, x, x[8:])
    assert not hopper.fits(shape(), CPU, x, x[4:])


def no_gpu(monkeypatch, hopper):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return "9.x"


def another_gpu(monkeypatch, hopper):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    return "9.x"


def gpu_of_amd(monkeypatch, hopper):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    return "NVIDIA"


def interpreter(monkeypatch, hopper):
    monkeypatch.setattr(hopper, "INTERPRETED", True)
    return "interpreter"


def switched_off(monkeypatch, hopper):
    monkeypatch.setenv("PROTEUS_HOPPER", "off")
    return "PROTEUS_HOPPER is 'off'"


def another_triton(monkeypatch, hopper):
    monkeypatch.setattr(hopper.triton, "__version__", "9.8.7")
    return f"Triton is 9.8.7; these kernels were tested with {hopper.TESTED}x"


@pytest.mark.parametrize("machine", [no_gpu, another_gpu, gpu_of_amd, interpreter, switched_off, another_triton])
def test_a_machine_is_refused_for_a_reason_and_takes_no_call(machine, monkeypatch, hopper):
    assert hopper.fits(shape(), CPU)
    said = machine(monkeypatch, hopper)
    assert said in (hopper.refuse() or "")
    hopper._refuse.cache_clear()
    assert not hopper.fits(shape(), CPU)


def test_each_device_is_looked_at(monkeypatch, hopper):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 0 else (8, 0))
    assert [hopper.fits(shape(), torch.device("cuda", index)) for index in (0, 1, 0)] == [True, False, True]


def test_a_version_that_only_begins_alike_is_another_one(monkeypatch, hopper):
    monkeypatch.setattr(hopper.triton, "__version__", hopper.TESTED.rstrip(".") + "0.1")  # 3.60.1
    assert "3.60.1" in (hopper.refuse() or "")


def test_an_unknown_setting_is_an_error_that_says_what_is_allowed(monkeypatch, hopper):
    monkeypatch.setenv("PROTEUS_HOPPER", "no")
    with pytest.raises(ValueError, match=r"PROTEUS_HOPPER is 'no'.* 'auto' or 'off'"):
        hopper.refuse()
    with pytest.raises(ValueError, match="PROTEUS_HOPPER"):
        hopper.fits(shape(), CPU)


@pytest.fixture
def warned():
    """Fresh memory stays full of NaN (conftest.py), but sums on a GPU whose order is not fixed warn instead of raising."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(True)


@pytest.fixture
def counted(monkeypatch, warned) -> dict[str, int]:
    """How often each launch of the Hopper kernels ran; skips where they do not."""
    from proteus_lm.ops.triton import hopper

    reason = hopper.refuse()
    if reason is not None:
        pytest.skip(reason)
    calls = dict.fromkeys(KERNELS, 0)

    def count(name, launch):
        def launched(*arguments, **constants):
            calls[name] += 1
            return launch(*arguments, **constants)

        return launched

    for name in KERNELS:
        monkeypatch.setattr(hopper, name, count(name, getattr(hopper, name)))
    return calls


def like_a_model(rule, size):
    """Inputs whose gates are as at a model's start: decays of some 5 %, strengths of sigmoids, p a part of k."""
    tensors = inputs(rule, size)
    tensors |= {n: torch.randn_like(x).sigmoid() for n, x in tensors.items() if n in ("beta", "gamma")}
    if "g" in tensors:
        tensors["g"] = logsigmoid(torch.randn_like(tensors["g"]) + 3)
    if "p" in tensors:
        tensors["p"] = 0.7 * tensors["k"]
    return tensors


def leaves(tensors, dtype=None):
    """Copies that want gradients, in their own type or in `dtype`."""
    return {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in tensors.items()}


def matrix(state):
    """A state's matrix; sliding-window attention has its last token beside it."""
    return getattr(state, "matrix", state)


@pytest.mark.gpu
@pytest.mark.parametrize("carried", [False, True], ids=["alone", "states in and out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("blocks", "axis"), [(1, "key"), (4, "key"), (4, "value")])
@pytest.mark.parametrize("size", [(1, 200, 2, 128, 128), (2, 130, 2, 64, 64)], ids=str)
@pytest.mark.parametrize("rule", NAMES)
def test_outputs_states_and_all_gradients_agree_with_fp64_on_a_gpu(rule, size, blocks, axis, dtype, carried, counted):
    """Limit 1e-2: that of 16-bit types everywhere (bf16 has 8 bits, rounded after each of some four products in a row)."""
    torch.manual_seed(0)
    tensors = {n: (x.to(dtype) if n in "qkpv" else x).cuda() for n, x in like_a_model(rule, size).items()}
    dim = size[3] if axis == "key" else size[4]
    gate = ActivationSchedule(blocks, size[1]).activation(dim, size[1], device="cuda") if blocks > 1 else None
    keywords = {"activation": gate, "axis": axis, "output_final_state": carried}
    if carried:
        tensors["initial_state"] = torch.randn(size[0], *size[2:], device="cuda")
    found, upstream = [], None
    for backend, kind in (("triton", None), ("chunk", torch.float64)):
        given = leaves(tensors, kind)
        out, state = getattr(ops, rule)(**given, **keywords, backend=backend)
        results = {"out": out} | ({"final state": matrix(state)} if carried else {})
        if upstream is None:
            upstream = {name: torch.randn_like(x) for name, x in results.items()}
        gradients = torch.autograd.grad(
            list(results.values()), list(given.values()), [upstream[n].to(x.dtype) for n, x in results.items()]
        )
        found.append(results | {f"gradient of {name}": x for name, x in zip(given, gradients)})
    got, right = found
    assert {name: e for name in right if not (e := error(got[name], right[name])) < 1e-2} == {}
    locked = {name for name in right if name.startswith("gradient of") and name[-1] in "qkpv"}
    assert {name for name in locked if got[name][right[name] == 0].any()} == set()
    walks = 0 if rule == "swla" else 1  # its walks are Triton's
    assert counted == {"scan": walks, "reverse": walks, "gradients": 1}
