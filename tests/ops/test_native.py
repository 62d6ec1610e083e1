"""The C kernel of Titans' memory equals the fp64 oracle, and itself whatever the threads; where it is not built, `chunk` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from proteus_lm.ops import TitansState, backend, native, reference, titans_memory
from proteus_lm.ops.deep import refusals
from proteus_lm.ops.native import _call, _memory, build
from tests.ops.deep_cases import (
    HIDDEN,
    Case,
    assert_compiled_once,
    bits,
    floats,
    gradients,
    in_calls,
    make,
    schedule,
    with_floats,
)

pytestmark = pytest.mark.skipif(bool(build.why_not()), reason=build.why_not() or "-")

TOLERANCE = 1e-5  # of root mean squares: fp32 rounds to 6e-8, in sums of up to some hundred terms through many chunks; found: 1e-6


def worst(ours: list[Tensor], right: list[Tensor]) -> float:
    """Largest root mean square error over that of the right values; over 1e-6 where those are smaller."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(ours, right, strict=True)]
    return max(((a - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in pairs)


def narrow(part: Any) -> Any:
    """The same of fp32 leaves, whatever lists it is made of."""
    if isinstance(part, Tensor):
        return part.detach().float().requires_grad_() if part.is_floating_point() else part
    if isinstance(part, TitansState):
        return with_floats(part, narrow(floats(part)))
    return None if part is None else type(part)(narrow(p) for p in part)


def compare(case: Case, state: Any = None, **options: Any) -> None:
    """Output, final state and every gradient against the oracle, which gets the same numbers in fp64."""
    results = []
    for function, given in ((titans_memory, narrow((case.tokens, case.weights, state))), (reference.titans_memory, None)):
        tokens, weights, start = given or (case.tokens, case.weights, state)
        more = {"backend": "native"} if given else {}
        y, final = function(*tokens, weights, initial_state=start, output_final_state=True, **options, **more)
        leaves = [*tokens, *weights]
        if start is not None:
            leaves = [*tokens, *(floats(start) if isinstance(start, TitansState) else [*start[0], *start[1]])]
        results.append([y, *floats(final), *gradients(y, final, leaves)])
    assert worst(*results) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
@pytest.mark.parametrize("tokens", [1, 2, 15, 17, 63, 65])
def test_every_length_and_chunk_equals_the_oracle(tokens, chunk):
    compare(make(2, tokens, grad=True, seed=tokens), chunk=chunk, activation=schedule(4, 40).activation(HIDDEN, tokens))


@pytest.mark.parametrize("memory_activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize("read", ["post", "pre"])
@pytest.mark.parametrize(
    ("blocks", "context", "offset"),
    [(1, 1, 0), (3, 30, 0), (3, 22, 4), (5, 10, [3, 0, 8]), (4, 40, [1, 20, 39])],
    ids=["ungated", "aligned", "unaligned", "many unlocks in a chunk", "far apart"],
)
def test_a_moving_state_equals_the_oracle(read, memory_activation, blocks, context, offset):
    case = make(3, 23, heads=1, grad=True)
    activation = schedule(blocks, context).activation(case.units, 23, offset=offset)
    compare(case, case.state, chunk=5, read=read, memory_activation=memory_activation, activation=activation)


@pytest.mark.parametrize("read", ["post", "pre"])
@pytest.mark.parametrize("bounds", [[0, 31], [0, 1, 2, 19, 31], [0, 16, 31]])
def test_packed_documents_equal_the_oracle(bounds, read):
    case = make(1, 31, rows=len(bounds) - 1, grad=True)
    cu_seqlens = torch.tensor(bounds)
    offset = torch.arange(len(bounds) - 1) * 7
    activation = schedule(4, 24).activation(HIDDEN, 31, offset=offset, cu_seqlens=cu_seqlens)
    compare(case, case.state, chunk=5, read=read, activation=activation, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("read", ["post", "pre"])
def test_gradients_flow_through_a_carried_state(read):
    first, case = make(3, 11, seed=1), make(3, 14, grad=True, seed=2)
    plan, offset = schedule(3, 22), torch.tensor([0, 3, 9])
    activation = plan.activation(case.units, 11, offset=offset)
    _, state = reference.titans_memory(
        *first.tokens, first.weights, chunk=6, activation=activation, initial_state=first.state, output_final_state=True
    )
    state = with_floats(state, [t.detach().requires_grad_() for t in floats(state)])
    compare(case, state, chunk=6, read=read, activation=plan.activation(case.units, 14, offset=state.position))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("eta", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("theta", [0.0, 0.01])
def test_gates_at_their_ends_are_exact(alpha, eta, theta):
    case = make(1, 20)
    for tensor, value in zip(case.tokens[3:], (theta, alpha, eta)):
        tensor.fill_(value)
    for tensor in (*case.tokens, *case.state[0], *case.state[1]):
        tensor.requires_grad_()
    compare(case, case.state, chunk=8, activation=schedule(3, 17).activation(HIDDEN, 20))


def large(tokens: int, grad: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """fp64 tokens and weights of the sizes of a model: heads of 64, 256 hidden units; theta within its safe bound."""
    g = torch.Generator().manual_seed(3)
    normal = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    gate = lambda low, high: low + (high - low) * torch.rand(1, tokens, 1, generator=g, dtype=torch.float64)  # noqa: E731
    q, k = (torch.nn.functional.normalize(normal(1, tokens, 1, 64), dim=-1) for _ in range(2))
    leaves = [q, k, normal(1, tokens, 1, 64) / 8, gate(0, 0.1 / 64), gate(0, 0.02), gate(0.7, 0.9)]
    weights = [normal(1, 64, 256) / 8, normal(1, 256, 64) / 16]
    return [t.requires_grad_(grad) for t in leaves], [t.requires_grad_(grad) for t in weights]


@pytest.mark.parametrize(("blocks", "context"), [(1, 1), (16, 200), (16, 256)])
def test_a_model_s_sizes_equal_the_oracle(blocks, context):
    tokens, weights = large(200)
    compare(Case(tokens, weights, ([], [])), chunk=64, activation=schedule(blocks, context).activation(256, 200))


@pytest.mark.parametrize("function", ["gelu_tanh", "silu"])
def test_pre_activations_of_any_size_have_right_values(function):
    """Of one token with one hidden unit, what is read before the write is f(z)."""
    z = torch.tensor([-100.0, -30.5, -29.5, -8.0, -1.0, -1e-4, -0.0, 0.0, 1e-4, 0.3, 2.0, 12.0, 88.5, 1e4])
    tokens = [torch.ones(1, 1, len(z), 1)] * 3 + [torch.zeros(1, 1, len(z))] * 3
    weights = [z.view(-1, 1, 1), torch.ones(len(z), 1, 1)]
    options = {"chunk": 1, "read": "pre", "memory_activation": function}
    ours, _ = titans_memory(*tokens, weights, backend="native", **options)
    wide = z.double()
    u = wide if function == "silu" else 2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    right = wide * u.sigmoid()  # the oracle's 1 + tanh loses small values even in fp64
    torch.testing.assert_close(ours.flatten().double(), right, rtol=2e-6, atol=1e-30)  # rounding of u, times u, to 1e-6


def test_an_odd_head_and_value_width_equal_the_oracle():
    case = make(2, 40, value=17, heads=3, grad=True)
    compare(case, case.state, chunk=16, activation=schedule(4, 50).activation(HIDDEN, 40, offset=3))


@pytest.mark.parametrize("kept", [0, 60_000, 1 << 28], ids=["nothing", "the first rows", "all"])
def test_what_is_kept_for_the_backward_is_enough_for_many_chunks(kept, monkeypatch):
    """More chunks than lie between saved states, with unlocks in between, for rows that end in different chunks."""
    monkeypatch.setattr(_call, "TAPES", kept)
    group = _call.GROUP
    tokens = 3 * 2 * group + 5
    case = make(1, tokens, rows=3, grad=True)
    bounds = torch.tensor([0, 7, 7 + 2 * group, tokens])
    activation = schedule(5, 40).activation(HIDDEN, tokens, cu_seqlens=bounds)
    compare(case, chunk=2, activation=activation, cu_seqlens=bounds)


@pytest.mark.parametrize(("batch", "heads", "tokens", "chunk"), [(1, 1, 1, 64), (3, 2, 77, 16), (2, 1, 200, 2), (1, 4, 130, 64)])
def test_the_room_a_compiled_graph_takes_is_enough(batch, heads, tokens, chunk):
    case = make(batch, tokens, heads=heads, dtype=torch.float32)
    for offset in (0, chunk - 1):
        opened = torch.full((1, tokens), HIDDEN)
        state = [*case.state[0], *case.state[1]]
        walk = _call.walk(case.tokens[0], batch, offset, None, chunk, "post", "silu")
        call = _call.Call(_call.Inputs(case.tokens, [], state, opened, None, walk), True)
        assert 0 < call.room() <= _call.most_room(batch, case.tokens[0], case.tokens[2], HIDDEN, chunk)


def run(case: Case, threads: int, carried: bool, **options: Any) -> list[Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tokens, weights, state = narrow((case.tokens, case.weights, case.state))
        start = state if carried else None
        y, final = titans_memory(*tokens, weights, initial_state=start, output_final_state=True, **options)
        return [y, *floats(final), *gradients(y, final, [*tokens, *((*state[0], *state[1]) if carried else weights)])]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("carried", [False, True])
def test_results_have_the_same_bits_whatever_the_threads_and_from_call_to_call(carried):
    case = make(3, 50, heads=3, dtype=torch.float32)
    options = {"chunk": 8, "activation": schedule(4, 40).activation(HIDDEN, 50), "backend": "native"}
    one = run(case, 1, carried, **options)
    for threads in (1, 2, 5):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(one, run(case, threads, carried, **options), strict=True))


def test_memory_of_tapes_is_used_again_but_not_while_a_graph_may_need_it(monkeypatch):
    monkeypatch.setattr(_memory, "LARGE", 50_000)  # a tape of this case has twice as many bytes, no other tensor as many
    monkeypatch.setattr(_memory, "_free", [])
    tokens, weights = narrow((make(2, 70, grad=True).tokens, make(2, 70, grad=True).weights))
    other = [t.detach() * 0.5 for t in tokens]

    def run(given: list[Tensor]) -> Tensor:
        return titans_memory(*given, weights, chunk=16, backend="native")[0]

    y = run(tokens)
    first = torch.autograd.grad(y.sum(), tokens, retain_graph=True)
    again = run([t.requires_grad_() for t in other])
    second = torch.autograd.grad(y.sum(), tokens)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    del y, again
    sizes = [len(memory) for memory in _memory._free]
    assert len(sizes) == 2
    run(tokens)
    assert [len(memory) for memory in _memory._free] == sizes[1:] + sizes[:1]


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("blocks", [1, 4])
def test_what_memory_held_before_shows_nowhere(blocks, carried, monkeypatch):
    """All tensors of a call in memory that is full of NaN."""
    monkeypatch.setattr(_memory, "LARGE", 0)
    monkeypatch.setattr(_memory, "_taken", lambda size: bytearray(b"\xff" * size))
    case = make(2, 37, grad=True)
    compare(case, case.state if carried else None, chunk=8, activation=schedule(blocks, 50).activation(HIDDEN, 37))


def test_memory_is_kept_up_to_a_limit_and_goes_to_tensors_of_about_its_size(monkeypatch):
    monkeypatch.setattr(_memory, "LARGE", 0)
    monkeypatch.setattr(_memory, "KEPT", 7_000)
    monkeypatch.setattr(_memory, "_free", [])
    sizes = lambda: [len(memory) // 4 for memory in _memory._free]  # noqa: E731
    held = [_memory.uncleared((numbers,)) for numbers in (600, 900, 800)]
    while held:
        del held[0]
    assert sizes() == [900, 800]  # the oldest went
    pair = [_memory.uncleared((20, 25)) for _ in range(2)]
    assert sizes() == []
    assert [t.untyped_storage().nbytes() // 4 for t in pair] == [500, 500] and pair[0].data_ptr() != pair[1].data_ptr()
    assert pair[0].is_contiguous() and not pair[0]._is_view()


def test_rows_and_modes_do_not_change_a_bit():
    case = make(3, 30, dtype=torch.float32)
    call = lambda tokens: titans_memory(*tokens, case.weights, chunk=8, backend="native")[0]  # noqa: E731
    whole = call(case.tokens)
    for row in range(3):
        assert torch.equal(call([t[row : row + 1] for t in case.tokens]), whole[row : row + 1])
    with torch.inference_mode():
        assert torch.equal(call(case.tokens), whole)
    assert torch.equal(call(narrow(case.tokens)), whole)


def test_any_split_into_calls_gives_what_one_call_gives():
    case = make(2, 30, dtype=torch.float32)
    plan, offset = schedule(4, 25), torch.tensor([0, 6])
    options = {"chunk": 7, "backend": "native"}
    whole, final = titans_memory(
        *case.tokens, case.weights, activation=plan.activation(HIDDEN, 30, offset=offset), output_final_state=True, **options
    )
    y, state = in_calls(case, [1, 6, 7, 20, 30], plan, offset, **options)
    assert worst([y, *floats(state)], [whole, *floats(final)]) < TOLERANCE


def test_compiled_equals_eager_and_compiles_once_for_all_positions():
    def forward(tokens, weights, state, activation):
        options = {"chunk": 4, "initial_state": state, "activation": activation, "output_final_state": True}
        return titans_memory(*tokens, weights, **options)

    def call(start):
        case = make(2, 21, dtype=torch.float32, grad=True, seed=start)
        activation = schedule(4, 30).activation(HIDDEN, 21, offset=torch.tensor([start, start + 5]))
        return (case.tokens, case.weights, case.state, activation), [*case.tokens, *case.state[0], *case.state[1]]

    assert_compiled_once(forward, map(call, (0, 3, 18, 1000)))


def test_operator_keeps_what_it_promises_to_torch():
    from proteus_lm.ops.native._operator import titans_native

    case = make(2, 9, dtype=torch.float32, grad=True)
    state = [[t.detach().requires_grad_() for t in part] for part in case.state]
    options = (torch.full((1, 9), HIDDEN), None, torch.tensor([0, 2]), None, None, 4, "post", "gelu_tanh", True)
    # Not the fourth, which compares results of eager and traced calls: what is kept for the backward has room that nobody fills.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(titans_native, (case.tokens, [], *state, *options), test_utils=tests)


def test_what_looks_on_sees_an_operator_with_the_same_results():
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    case = make(2, 21, dtype=torch.float32, grad=True)
    options = {"chunk": 4, "activation": schedule(4, 30).activation(HIDDEN, 21, offset=3), "output_final_state": True}
    results = []
    for mode in (nullcontext(), Calls()):
        with mode:
            y, state = titans_memory(*case.tokens, case.weights, backend="native", **options)
            results.append([y, *floats(state), *gradients(y, state, [*case.tokens, *case.weights])])
    assert {"proteus_lm.titans_native.default", "proteus_lm.titans_native_backward.default"} <= set(seen)
    assert worst(*results) < TOLERANCE


def test_a_second_derivative_is_refused_and_not_silently_wrong():
    case = make(1, 9, dtype=torch.float32, grad=True)
    for power in (1, 2):  # of 1, what comes to the backward is a constant
        y, _ = titans_memory(*case.tokens, case.weights, chunk=4, backend="native")
        (first,) = torch.autograd.grad((y**power).sum(), case.tokens[0], create_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(first.square().sum() + case.tokens[1].sum(), case.tokens[1])


def chosen(case: Case, state: Any = None, **options: Any) -> backend.Choice:
    known = refusals(case.tokens, case.weights, 4, state=state, **options)
    return backend.explain("titans_memory", *case.tokens, *case.weights, refused=known)


def test_auto_takes_it_for_what_it_can_run_and_says_why_not():
    case = make(1, 6, dtype=torch.float32)
    assert chosen(case).backend == "native"
    for other, options, reason in (
        (make(1, 6), {}, "float64 tensors"),
        (make(1, 6, depth=1, dtype=torch.float32), {}, "1 layer; the C kernel has memories of 2"),
        (make(1, 6, depth=3, dtype=torch.float32), {}, "3 layers"),
        (case, {"state": make(1, 6).state}, "float64 tensors"),
        (case, {"surprise_clip": 1.0}, "surprise_clip is 1.0"),
        (case, {"decay_target": "init"}, "decay_target is 'init'"),
        (case, {"memory_activation": "swiglu"}, "memory_activation is 'swiglu'"),
    ):
        choice = chosen(other, **options)
        assert choice.backend == "chunk" and f"not native: {reason}" in choice.reason
    with pytest.raises(ValueError, match="backend 'native' cannot run titans_memory: float64"):
        titans_memory(*make(1, 6).tokens, make(1, 6).weights, chunk=4, backend="native")
    q = torch.zeros(1, 3, 1, 16)
    with pytest.raises(ValueError, match="backend 'native' cannot run retention"):
        backend.choose("retention", "native", q, q, q, q[..., 0])


QUICK = ("-O0", *build.FLAGS[1:])


@pytest.fixture
def unbuilt(tmp_path, monkeypatch):
    """An empty cache folder, and no memory of an earlier build in this process; builds that do not take long."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", QUICK)
    build.library.cache_clear()
    build.why_not.cache_clear()
    yield tmp_path / "proteus-lm"
    build.library.cache_clear()
    build.why_not.cache_clear()


def compiler(folder: Path, script: str) -> None:
    """A `cc` of our own, first on the PATH."""
    (folder / "cc").write_text(f"#!{sys.executable}\n{script}\n")
    (folder / "cc").chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


def test_without_a_compiler_the_chunk_form_runs_and_the_reason_is_told(unbuilt, monkeypatch, tmp_path):
    case = make(1, 6, dtype=torch.float32)
    monkeypatch.setenv("PATH", str(tmp_path))
    choice = chosen(case)
    assert choice.backend == "chunk" and "no C compiler" in choice.reason
    y, _ = titans_memory(*case.tokens, case.weights, chunk=4)
    assert torch.equal(y, titans_memory(*case.tokens, case.weights, chunk=4, backend="chunk")[0])


def test_a_compiler_that_fails_is_quoted(unbuilt, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", os.environ["PATH"])
    compiler(tmp_path, "import sys; sys.exit('no such instruction')")
    choice = chosen(make(1, 6, dtype=torch.float32))
    assert choice.backend == "chunk" and "failed on the C kernel (exit 1): no such instruction" in choice.reason
    assert not list(unbuilt.glob("*.so")) and not list(unbuilt.glob("build-*"))


def test_a_cache_folder_that_cannot_be_written_is_named(unbuilt, tmp_path):
    (tmp_path / "proteus-lm").write_text("a file in its place")
    choice = chosen(make(1, 6, dtype=torch.float32))
    assert choice.backend == "chunk" and "cannot write the C kernel to" in choice.reason and "XDG_CACHE_HOME" in choice.reason


@pytest.mark.parametrize("damage", ["cut short", "other bytes", "no digest"])
def test_a_broken_library_is_built_anew(unbuilt, damage):
    assert not build.why_not()
    (place,) = unbuilt.glob("*.so")
    whole = place.read_bytes()
    place.unlink()  # the file may be mapped: a new one takes its place
    place.write_bytes({"cut short": whole[:5000], "other bytes": whole[:-1] + b"!", "no digest": whole}[damage])
    if damage == "no digest":
        place.with_suffix(".sha256").unlink()
    build.library.cache_clear()
    build.why_not.cache_clear()
    assert not build.why_not()
    assert build._whole(place) and len(place.read_bytes()) == len(whole)


def test_processes_that_build_at_once_all_get_a_library(unbuilt):
    script = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('build', sys.argv[1]);"
        "build = importlib.util.module_from_spec(spec); spec.loader.exec_module(build); build.FLAGS = tuple(sys.argv[2:]);"
        "print(build.library().titans_arguments())"
    )
    command = [sys.executable, "-c", script, build.__file__, *QUICK]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    sizes = {process.communicate(timeout=300)[0] for process in started}
    assert len(sizes) == 1 and all(process.returncode == 0 for process in started)
    assert len(list(unbuilt.glob("*.so"))) == 1 and not list(unbuilt.glob("build-*"))


def test_the_structure_has_the_size_that_c_gives_it():
    import ctypes

    build.library().titans_arguments.restype = ctypes.c_int64
    assert build.library().titans_arguments() == ctypes.sizeof(_call.Arguments)


def test_the_package_ships_the_source():
    import tomllib

    root = Path(__file__).parents[2]
    shipped = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["proteus_lm"]
    assert str(build.SOURCE.relative_to(Path(native.__file__).parents[2])) in shipped
