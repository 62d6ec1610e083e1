import subprocess
import sys

import pytest
import torch

from proteus_lm import doctor, ops
from proteus_lm.ops import reference, triton, triton_neighbours
from proteus_lm.ops.backend import OPERATIONS


def test_every_operation_passes_on_this_machine_and_the_exit_code_says_so():
    lines = []
    assert doctor.doctor(lines.append) == 0
    for operation in OPERATIONS:
        assert any(line.strip().startswith(f"pass {operation} ") for line in lines), operation
    assert lines[-1] == "All checks pass."


@pytest.mark.parametrize("where", ["output", "state", "gradient"])
def test_a_wrong_kernel_is_found_wherever_it_is_wrong(monkeypatch, where):
    def wrong(q, k, v, beta, **keywords):
        if where == "gradient":  # right values, wrong gradient of k
            k = 1.01 * k - (0.01 * k).detach()
        out, state = reference.delta_rule(q, k, v, beta, **keywords)
        return (out * 1.001 if where == "output" else out), (state * 1.001 if where == "state" else state)

    monkeypatch.setattr(ops, "delta_rule", wrong)
    checks = {check.operation: check for check in doctor.self_check("cpu")}
    assert not checks["delta_rule"].passed
    assert where in checks["delta_rule"].worst or where == "output"  # a wrong output makes its gradients wrong too
    assert all(check.passed for name, check in checks.items() if name != "delta_rule")
    assert doctor.doctor(lambda line: None) == 1


def test_a_kernel_that_gives_no_number_fails(monkeypatch):
    def nothing(*args, **keywords):
        out, state = reference.comba(*args, **keywords)
        return out, state * torch.nan

    monkeypatch.setattr(ops, "comba", nothing)
    check = next(c for c in doctor.self_check("cpu") if c.operation == "comba")
    assert (check.passed, check.worst) == (False, "state 0")


def test_a_kernel_that_raises_is_a_failed_check_with_its_message(monkeypatch):
    def broken(*args, **keywords):
        raise RuntimeError("shared memory\nis too small")

    monkeypatch.setattr(ops, "retention", broken)
    check = next(c for c in doctor.self_check("cpu") if c.operation == "retention")
    assert not check.passed
    assert check.message == "RuntimeError: shared memory is too small"


def test_it_says_what_stands_behind_the_backend_chosen_and_why():
    verdicts = {"triton": None, "fla": "K = 300", "chunk": None, "reference": None}
    assert list(doctor._behind(verdicts, "triton")) == ["not fla: K = 300"]
    assert list(doctor._behind(verdicts | {"fla": None}, "triton")) == ["then fla"]
    assert list(doctor._behind(verdicts, "chunk")) == []  # its reason names those before it already
    check = next(doctor.self_check("cpu"))
    assert check.backend == "chunk" and "not triton: " in check.reason and "not fla: " in check.reason


def test_it_says_whether_fused_kernels_run_and_why_not(monkeypatch):
    assert doctor.neighbours("cpu") == "torch: the kernels are for a GPU"
    monkeypatch.setattr(triton_neighbours, "reached", lambda x: True)
    monkeypatch.setattr(triton_neighbours, "installed", lambda: True)
    assert doctor.neighbours("cpu") == "triton"
    monkeypatch.setenv("PROTEUS_NEIGHBOURS", "torch")
    assert doctor.neighbours("cpu") == "torch: PROTEUS_NEIGHBOURS is torch"
    monkeypatch.setattr(triton_neighbours, "installed", lambda: False)
    assert doctor.neighbours("cpu") == "torch: triton is not installed"


def test_it_says_whether_the_kernels_for_hopper_run_and_why_not(monkeypatch):
    kernels = pytest.importorskip("proteus_lm.ops.triton.hopper", reason="the package triton is not installed")
    monkeypatch.setenv("PROTEUS_HOPPER", "off")
    assert doctor.hopper() == "no: PROTEUS_HOPPER is 'off'"
    monkeypatch.setattr(kernels, "refuse", lambda: None)
    assert doctor.hopper() == "run"
    monkeypatch.setattr(kernels, "refuse", lambda: "no GPU of capability 9")
    monkeypatch.setattr(doctor, "self_check", lambda *_: iter(()))
    lines = []
    assert doctor.doctor(lines.append) == 0
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("  hopper ")] == ["no: no GPU of capability 9"]
    monkeypatch.setattr(triton, "installed", lambda: False)
    assert doctor.hopper() == "no: the package triton is not installed"


def test_packages_that_are_not_there_are_named():
    rows = dict(doctor.versions())
    assert rows["torch"] == torch.__version__
    assert rows["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert all(rows.values())


def test_the_package_imports_and_checks_without_triton():
    code = "import sys; sys.modules['triton'] = None; import proteus_lm; from proteus_lm.doctor import doctor; sys.exit(doctor())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
