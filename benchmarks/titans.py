"""Titans' memory on one GPU: the Triton kernels against the fp64 oracle, then times, throughput and peak memory.

    python benchmarks/titans.py --out benchmarks/results      # everything; needs a CUDA device
    python benchmarks/titans.py --only main --no-check        # the cases whose name starts so, without the check

Correctness comes first, and a wrong kernel is not timed. Times are medians of CUDA events after warm-up, on random data; f+b is
`torch.autograd.grad` on every token input, gate and weight. Kernels are compiled ahead by a pool of processes: compiling one after
the other would take minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from proteus_lm.ops import reference, triton_deep
from proteus_lm.schedule import ActivationSchedule
from timing import captured, median_ms

KERNELS = {
    "_gates": ("gates_kernel", "gates_backward_kernel"),
    "_forward": ("write_kernel", "read_kernel"),
    "_backward": ("read_backward_kernel", "write_backward_kernel", "rest_backward_kernel"),
}


@dataclass(frozen=True)
class Case:
    """One call of the operation; `alpha`, `eta` are the largest gates, `theta` is its safe bound (1 - eta) / chunk times `step`."""

    name: str
    B: int = 1
    T: int = 200
    H: int = 2
    d: int = 64
    hidden: int = 256
    depth: int = 2
    chunk: int = 64
    dtype: str = "bfloat16"
    blocks: int = 1
    context: int = 1
    offset: int = 0
    read: str = "post"
    function: str = "gelu_tanh"
    alpha: float = 0.1
    eta: float = 0.95
    step: float = 1.0


CHECKS = [
    Case("bf16", T=256),
    Case("bf16 mixed", T=120, B=2, blocks=16, context=110, offset=70, alpha=0.99),
    Case("bf16 mixed mild", T=120, B=2, blocks=16, context=110),
    Case("tf32 mixed", T=120, B=2, blocks=16, context=110, offset=70, alpha=0.99, dtype="float32"),
    Case("bf16 aligned", T=320, blocks=5, context=320, read="pre", function="silu", eta=0.0, alpha=0.0),
    Case("tf32", T=200, dtype="float32"),
    Case("tf32 d32 chunk16", T=65, d=32, chunk=16, dtype="float32", function="silu"),
    Case("depth1 d128", T=120, H=16, d=128, depth=1, blocks=8, context=90),
    Case("bf16 d128", T=200, d=128, hidden=512),
    Case("bf16 chunk128", T=300, chunk=128),
    Case("bf16 one token", T=1),
]
TIMES = [
    Case("main E1", B=8, T=8192, H=12),
    Case("main E16", B=8, T=8192, H=12, blocks=16, context=8192),
    Case("wide E1", B=4, T=8192, H=24),
    Case("depth1", B=8, T=8192, H=16, d=128, depth=1),
    Case("B1", B=1, T=8192, H=12),
    Case("main tf32", B=8, T=8192, H=12, dtype="float32"),
]


def make(case: Case, device: str = "cuda") -> tuple[list[Tensor], list[Tensor]]:
    """Tokens q, k, v, theta, alpha, eta and weights (H, in, out), all leaves."""
    g = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    shape = (case.B, case.T, case.H)
    q, k = (torch.nn.functional.normalize(normal(*shape, case.d), dim=-1).to(dtype) for _ in range(2))
    v = (normal(*shape, case.d) * 2 / case.d**0.5).to(dtype)
    alpha, eta, theta = (torch.rand(shape, generator=g, device=device) for _ in range(3))
    alpha, eta = alpha * case.alpha, eta * case.eta
    theta = theta * (1 - eta) * (case.step / case.chunk)
    sides = [case.d, *[case.hidden] * (case.depth - 1), case.d]
    weights = [normal(case.H, a, b) / a**0.5 for a, b in zip(sides, sides[1:])]
    return [t.requires_grad_() for t in (q, k, v, theta, alpha, eta)], [w.requires_grad_() for w in weights]


def activation_of(case: Case):  # noqa: ANN201
    units = case.hidden if case.depth == 2 else case.d
    if case.blocks == 1:
        return None, units
    return ActivationSchedule(case.blocks, case.context).activation(units, case.T, offset=case.offset, device="cuda"), units


def run(case: Case, tokens: list[Tensor], weights: list[Tensor], active: Tensor) -> list[Tensor]:
    rows = [w.expand(case.B, *w.shape) for w in weights]
    start = [w.new_zeros(()).expand(case.B, *w.shape) for w in weights]
    return triton_deep.scan(
        *(tokens, [], rows, start, active, None, case.offset, None),
        chunk=case.chunk, read=case.read, memory_activation=case.function,
    )  # fmt: skip


def active_of(case: Case) -> Tensor:
    activation, units = activation_of(case)
    return torch.full((1, case.T), units, device="cuda") if activation is None else activation.active


def tune(text: str) -> None:
    """Override launch options or the segment: JSON such as {"write": {"num_warps": 4, "BH": 32}, "SEGMENT": 8}."""
    from proteus_lm.ops.triton_deep import _launch, _operator

    for name, value in json.loads(text or "{}").items():
        if name in _launch.LAUNCH:
            _launch.LAUNCH[name].update(value)
        else:
            setattr(_operator, name, value)


def warm(task: tuple[Case, str, str]) -> str:
    """Compile one kernel of one case, in a process of its own: the others are not run."""
    case, chosen, text = task
    tune(text)
    from importlib import import_module

    for module, names in KERNELS.items():
        for name in names:
            if name != chosen:
                getattr(import_module(f"proteus_lm.ops.triton_deep.{module}"), name).run = lambda *a, **k: None
            else:
                getattr(import_module(f"proteus_lm.ops.triton_deep.{module}"), name).__dict__.pop("run", None)
    small = Case(**{**asdict(case), "B": min(case.B, 2)})
    try:
        return _compile(small)
    except Exception as error:  # met again, and told, where the case is checked
        return f"{case.name}: {chosen}: {error}"


def _compile(small: Case) -> str:
    tokens, weights = make(small)
    out = run(small, tokens, weights, active_of(small))
    torch.autograd.grad(out[0].sum() + sum(t.sum() for t in out[1:]), [*tokens, *weights])
    torch.cuda.synchronize()
    return ""


def distinct(cases: list[Case]) -> list[Case]:
    """One case of each set that needs the same compiled kernels."""
    key = lambda c: (c.H % 16, c.d, c.hidden, c.depth, c.chunk, c.dtype, c.read, c.function)  # noqa: E731
    return list({key(c): c for c in reversed(cases)}.values())


def errors(case: Case) -> dict[str, float]:
    """Root mean square error over that of the right values, of y, the end state and every gradient."""
    tokens, weights = make(case)
    g = torch.Generator("cuda").manual_seed(1)
    dy = torch.randn(tokens[2].shape, generator=g, device="cuda")
    out = run(case, tokens, weights, active_of(case))
    to_state = [torch.randn(t.shape, generator=g, device="cuda") for t in out[1:]]
    loss = (out[0].float() * dy).sum() + sum((a * b).sum() for a, b in zip(out[1:], to_state))
    found = torch.autograd.grad(loss, [*tokens, *weights])
    exact, exact_w = ([t.detach().double().requires_grad_() for t in part] for part in (tokens, weights))
    activation, _ = activation_of(case)
    y, state = reference.titans_memory(
        *exact, exact_w, chunk=case.chunk, read=case.read, memory_activation=case.function, activation=activation,
        output_final_state=True,
    )  # fmt: skip
    ends = [*state.weights, *state.momentum]
    loss = (y * dy).sum() + sum((a * b).sum() for a, b in zip(ends, to_state))
    right = torch.autograd.grad(loss, [*exact, *exact_w])
    layers = range(1, case.depth + 1)
    names = ["y", *(f"W{i}" for i in layers), *(f"S{i}" for i in layers)]
    names += ["dq", "dk", "dv", "dtheta", "dalpha", "deta", *(f"dW{i}" for i in layers)]
    pairs = zip(names, [*out, *found], [y, *ends, *right])
    return {n: ((a.double() - b).norm() / b.norm().clamp(min=1e-12)).item() for n, a, b in pairs}


def measure(case: Case, profile: bool) -> dict:
    tokens, weights = make(case)
    active = active_of(case)
    dy = torch.randn_like(tokens[2])

    def forward() -> None:
        with torch.no_grad():
            run(case, tokens, weights, active)

    def both() -> None:
        torch.autograd.grad(run(case, tokens, weights, active)[0], [*tokens, *weights], dy)

    both()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30
    row = {"case": asdict(case), "f_ms": median_ms(forward, 7, warm=2), "fb_ms": median_ms(both, 7, warm=2), "peak_gib": peak}
    row["f_mtok"], row["fb_mtok"] = (case.B * case.T / row[k] / 1e3 for k in ("f_ms", "fb_ms"))
    row["fb_graph_ms"] = graph_ms(both)
    if profile:
        row["kernels_ms"] = kernels_ms(both)
    return row


def graph_ms(work) -> float | str:  # noqa: ANN001
    """Time of a replayed CUDA graph: without what the host needs between launches."""
    try:
        return median_ms(captured(work), 7, warm=2)
    except Exception as error:  # the eager time stands; say why there is no other
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {error}"[:160]


def kernels_ms(work) -> dict[str, float]:  # noqa: ANN001
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as prof:
        work()
        torch.cuda.synchronize()
    rows = [(e.key[:40], e.self_device_time_total / 1e3, e.count) for e in prof.key_averages()]
    return {f"{name} x{count}": round(ms, 3) for name, ms, count in sorted(rows, key=lambda r: -r[1])[:14]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for titans-<card>.json")
    parser.add_argument("--only", default="", help="time the cases whose name starts with this")
    parser.add_argument("--check", default="", help="check the cases whose name starts with this")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--tune", default="", help="JSON: other launch options of kernels, SEGMENT")
    parser.add_argument("--also", action="append", default=[], help="JSON as --tune: time the first case so too, last")
    options = parser.parse_args()
    import triton

    tune(options.tune)
    checks = [] if options.no_check else [c for c in CHECKS if c.name.startswith(options.check)]
    times = [] if options.no_time else [c for c in TIMES if c.name.startswith(options.only)]
    names = [name for part in KERNELS.values() for name in part]
    tasks = [(case, name, options.tune) for case in distinct([*times, *checks]) for name in names]
    tasks += [(times[0], name, text) for text in options.also for name in names if name.removesuffix("_kernel") in text]
    # Slow ones first.
    tasks.sort(key=lambda t: -("backward" in t[1]) - 2 * ("read_backward" in t[1]))
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        for message in filter(None, pool.map(warm, tasks)):
            print(message[:300], flush=True)
    card = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(card, flush=True)
    report: dict = {**card, "command": " ".join(sys.argv), "checks": [], "times": []}
    wrong = []
    for case in checks:
        try:
            found = errors(case)
        except Exception as error:
            print(f"FAILED {case.name}: {type(error).__name__}: {error}"[:400], flush=True)
            wrong.append(case.name)
            continue
        limit = 1e-3 if case.dtype == "float32" else 1e-2
        worst = max(found, key=lambda n: found[n] if found[n] == found[n] else 1e9)
        good = all(e <= limit for e in found.values())
        print(f"{'right' if good else 'WRONG'} {case.name}: worst {worst} {found[worst]:.1e} of {limit:.0e}", flush=True)
        if not good:
            print({n: f"{e:.1e}" for n, e in found.items()}, flush=True)
            wrong.append(case.name)
        report["checks"].append({"case": asdict(case), "errors": found, "limit": limit})
    for case in times:
        row = measure(case, profile=case.name.startswith(("main E", "depth1")))
        graph = row["fb_graph_ms"]
        graph = f"{graph:.2f}" if isinstance(graph, float) else graph
        print(
            f"{case.name}: f {row['f_ms']:.2f} ms ({row['f_mtok']:.2f} Mtok/s), f+b {row['fb_ms']:.2f} ms "
            f"({row['fb_mtok']:.2f} Mtok/s), graph {graph}, peak {row['peak_gib']:.2f} GiB", flush=True,
        )  # fmt: skip
        for name, ms in row.get("kernels_ms", {}).items():
            print(f"    {ms:8.3f} {name}", flush=True)
        report["times"].append(row)
    for text in options.also:
        tune(text)
        row = measure(times[0], profile=True)
        report["times"].append({**row, "tune": text})
        print(f"{text}: f {row['f_ms']:.2f} ms, f+b {row['fb_ms']:.2f} ms, {row['kernels_ms']}", flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        target = options.out / f"titans-{card['card'].replace(' ', '-')}.json"
        scratch = target.with_suffix(".tmp")
        scratch.write_text(json.dumps(report, indent=1))
        scratch.replace(target)
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
