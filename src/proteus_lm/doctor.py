"""What is installed, what would run, and whether it computes the right thing on this machine.

A silent wrong result is the worst fault a kernel can have (it happened to others on new GPUs), so every operation is compared with
the token-by-token reference on each device: output, final state and the gradient of every input.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from proteus_lm import ops
from proteus_lm.ops import backend, deep, reference, triton, triton_neighbours
from proteus_lm.schedule import ActivationSchedule

PACKAGES = (
    *("proteus-lm", "torch", "transformers", "tokenizers", "safetensors", "datasets", "numpy", "tyro"),
    *("triton", "flash-linear-attention", "matplotlib", "tensorboard", "lm-eval"),
)
NEIGHBOURS = "norms, convolution, rotary positions, SwiGLU, step sizes, attention in a segment"
"""Fused kernels beside the memories: `proteus_lm.ops.triton_neighbours` and `triton_mac`."""
# Root mean square over a whole tensor, relative to the reference (design.md); the inputs are rounded before both sides.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Check:
    """One operation on one device in one type: which backend ran, and its worst relative error against the reference.

    Args:
        worst: where that error is: "output", "state" or "gradient of <input>".
        error: root mean square of the difference over that of the reference; None when the operation raised.
        message: what was raised, empty otherwise.
    """

    operation: str
    device: str
    dtype: str
    backend: str
    reason: str
    worst: str
    error: float | None
    tolerance: float
    message: str = ""

    @property
    def passed(self) -> bool:
        """Within the tolerance; an error that is not a number fails."""
        return self.error is not None and self.error <= self.tolerance


def versions() -> list[tuple[str, str]]:
    """(package, version or "not installed") of everything that matters here, Python first."""
    rows = [("python", platform.python_version())]
    for name in PACKAGES:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def devices() -> list[tuple[str, str]]:
    """(device, description) of each device PyTorch can compute on here, the CPU first."""
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    rows = [("cpu", f"{platform.machine()}, {threads}, {torch.backends.cpu.get_cpu_capability()}")]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        p = torch.cuda.get_device_properties(index)
        size = f"{p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} multiprocessors"
        rows.append((f"cuda:{index}", f"{p.name}, {size}, capability {p.major}.{p.minor}, CUDA {torch.version.cuda}"))
    return rows


def self_check(device: str, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Iterator[Check]:
    """Compare each operation with the reference on `device`: an odd length, four blocks, two of them unlocking inside a chunk.

    Yields:
        A check for each of `proteus_lm.ops.backend.OPERATIONS`. An operation that raises is a failed check, not an exception.
    """
    for operation in backend.OPERATIONS:
        inputs, keywords = _inputs(operation, device, dtype, seed)
        tensors = tuple(t for x in inputs.values() for t in (x if isinstance(x, tuple) else (x,)))
        titans = operation == "titans_memory"
        refused = deep.refusals(tensors[:6], inputs["weights"], keywords["chunk"]) if titans else None
        tensors = tuple(x.detach().requires_grad_() for x in tensors)  # the check wants gradients, which some backends refuse
        choice = backend.explain(operation, *tensors, refused=refused)
        worst, error, message = "", None, ""
        try:
            worst, error = _compare(getattr(ops, operation), getattr(reference, operation), inputs, keywords)
        except Exception as raised:  # any failure of a kernel is the finding itself
            message = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
        name = str(dtype).removeprefix("torch.")
        reason = "; ".join([choice.reason, *_behind(backend.verdicts(operation, *tensors, refused=refused), choice.backend)])
        yield Check(operation, device, name, choice.backend, reason, worst, error, TOLERANCE[dtype], message)


def _behind(verdicts: dict[str, str | None], chosen: str) -> Iterator[str]:
    """What stands behind the backend chosen, of those with kernels: the others run everywhere."""
    names = list(verdicts)
    for name in names[names.index(chosen) + 1 : names.index("chunk")]:
        refusal = verdicts[name]
        yield f"then {name}" if refusal is None else f"not {name}: {refusal}"


def neighbours(device: str) -> str:
    """What runs of the kernels beside the memories on this device in eager mode, and why."""
    x = torch.empty(1, device=device)
    if triton_neighbours.runs(x):
        return "triton"
    if not triton_neighbours.reached(x):
        return "torch: the kernels are for a GPU"
    if not triton_neighbours.installed():
        return "torch: triton is not installed"
    return f"torch: {triton_neighbours.VARIABLE} is torch"


def hopper() -> str:
    """Whether the linear memories' kernels for Hopper stand in for the Triton kernels in the calls they take, or why not.

    Raises:
        ValueError: for a value of PROTEUS_HOPPER that is not known.
    """
    if not triton.installed():
        return "no: the package triton is not installed"
    from proteus_lm.ops.triton import hopper as kernels  # imports triton

    reason = kernels.refuse()
    return "run" if reason is None else f"no: {reason}"


def doctor(write: Callable[[str], Any] = print) -> int:
    """Write the whole report, line by line; the exit code: 0 when every check passes, 1 otherwise."""
    write("Versions")
    for name, version in versions():
        write(f"  {name:<24} {version}")
    write("Devices")
    found = devices()
    for name, description in found:
        write(f"  {name:<24} {description}")
    write(f"Beside the memories ({NEIGHBOURS}), in eager mode (torch.compile fuses PyTorch itself)")
    for device, _ in found[1:] or found:
        write(f"  on {device:<21} {neighbours(device)}")
    write("Linear memories: kernels for Hopper GPUs in the place of Triton's (docs/kernels.md)")
    write(f"  {'hopper':<24} {hopper()}")
    failed = 0
    write("Operations: backend that would run, worst relative error against the reference (output, state, gradients)")
    for name, _ in found:
        for dtype in (torch.float32,) if name == "cpu" else (torch.float32, torch.bfloat16):
            write(f"  on {name}, {str(dtype).removeprefix('torch.')} (tolerance {TOLERANCE[dtype]:.0e})")
            for check in self_check(name, dtype):
                failed += not check.passed
                write(f"    {_line(check)}")
    write("All checks pass." if not failed else f"{failed} checks FAIL: do not trust results of these operations here.")
    return int(failed > 0)


def _line(check: Check) -> str:
    verdict = "pass" if check.passed else "FAIL"
    found = check.message if check.error is None else f"{check.error:.1e} ({check.worst})"
    return f"{verdict} {check.operation:<18} {check.backend:<10} {found}; {check.reason}"


def _inputs(operation: str, device: str, dtype: torch.dtype, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Random inputs by argument name, made on the CPU so that every device sees the same, and the keywords that go with them."""
    generator = torch.Generator().manual_seed(seed)
    batch, length, heads, width, hidden = 2, 83, 2, 32, 64  # no narrower than the kernels' heads

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def token(size: int) -> Tensor:
        return noise(batch, length, heads, size)

    gate = (batch, length, heads)
    x: dict[str, Any] = {"q": normalize(token(width), dim=-1), "k": normalize(token(width), dim=-1), "v": token(width)}
    if operation == "comba":
        x["p"] = 0.7 * x["k"]
    if operation in ("retention", "swla", "gated_delta_rule", "comba"):
        x["g"] = logsigmoid(noise(*gate) + 3)
    if operation == "swla":
        x["gamma"] = noise(*gate, 2).sigmoid()
    if operation in ("delta_rule", "gated_delta_rule", "comba"):
        x["beta"] = noise(*gate).sigmoid()
    keywords: dict[str, Any] = {}
    dim = width
    if operation == "titans_memory":
        x |= {"theta": 0.02 * noise(*gate).sigmoid(), "alpha": 0.02 * noise(*gate).sigmoid(), "eta": 0.9 * noise(*gate).sigmoid()}
        x["weights"] = (noise(heads, width, hidden) / width**0.5, noise(heads, hidden, width) / hidden**0.5)
        keywords["chunk"], dim = 16, hidden
    # Only data are rounded: gates and learned weights stay in fp32 in every model (spec/linear.md 5).
    move: dict[str, Any] = {n: t.to(device, dtype) for n, t in x.items() if n in ("q", "k", "v", "p")}
    move |= {n: t.to(device) for n, t in x.items() if isinstance(t, Tensor) and n not in move}
    if "weights" in x:
        move["weights"] = tuple(w.to(device) for w in x["weights"])
    keywords["activation"] = ActivationSchedule(4, 80).activation(dim, length, device=device)
    return move, keywords | {"output_final_state": True}


def _compare(
    fast: Callable[..., Any], slow: Callable[..., Any], inputs: dict[str, Any], keywords: dict[str, Any]
) -> tuple[str, float]:
    """Where the two differ most, and by how much; the reference gets the same rounded inputs in fp64, on the CPU."""
    mine = _run(fast, inputs, keywords)
    exact = keywords["activation"]
    exact = exact.schedule.activation(exact.dim, exact.length)
    wide = {n: tuple(w.cpu().double() for w in x) if isinstance(x, tuple) else x.cpu().double() for n, x in inputs.items()}
    theirs = _run(slow, wide, keywords | {"activation": exact})
    errors = {name: _error(mine[name], theirs[name]) for name in theirs}
    # A NaN compares as false with everything; it must come out as the worst.
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return worst, errors[worst]


def _run(operation: Callable[..., Any], inputs: dict[str, Any], keywords: dict[str, Any]) -> dict[str, Tensor]:
    """Output, state and gradients of sum(output * a fixed random tensor), by name."""
    leaves = {n: tuple(w.detach().requires_grad_() for w in x) if isinstance(x, tuple) else x.detach().requires_grad_()
              for n, x in inputs.items()}  # fmt: skip
    out, state = operation(**leaves, **keywords)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device, out.dtype)
    (out * weight).sum().backward()
    results = {"output": out.detach()}
    for number, part in enumerate(_floats(state)):
        results[f"state {number}"] = part.detach()
    for name, x in leaves.items():
        for number, leaf in enumerate(x if isinstance(x, tuple) else (x,)):
            assert leaf.grad is not None, f"no gradient reaches {name}"
            results[f"gradient of {name}" + (f"[{number}]" if isinstance(x, tuple) else "")] = leaf.grad
    return results


def _floats(state: Any) -> Iterator[Tensor]:
    """Floating-point tensors of a state, whatever tuples it is made of."""
    if isinstance(state, Tensor):
        if state.is_floating_point():
            yield state
    else:
        for part in state:
            yield from _floats(part)


def _error(mine: Tensor, theirs: Tensor) -> float:
    """Root mean square of the difference over that of the reference; 0 where both are zero."""
    if mine.numel() == 0:
        return 0.0
    difference = (mine.detach().cpu().double() - theirs).square().mean().sqrt().item()
    size = theirs.square().mean().sqrt().item()
    return difference / size if size > 0 else (0.0 if difference == 0 else float("inf"))


if __name__ == "__main__":
    sys.exit(doctor())
