"""Our linear-memory kernels beside flash-linear-attention's on one CUDA GPU: correctness first, then a table and JSON.

    python benchmarks/ops.py --out benchmarks/results          # the table of the README; 5 minutes, most of it fla's autotuning
    python benchmarks/ops.py --quick                           # gated delta rule only
    python benchmarks/ops.py --no-time                         # the checks alone

A kernel whose outputs, final state or gradients leave 1e-2 (bf16; fp32: 1e-3) of the fp64 chunk form, which the tests hold to the
oracle at 1e-10, is not timed, and the run ends with status 1. Times are medians of CUDA-graph replays, inputs fresh and random,
q, k, p of unit norm; f is the forward without gradients, f + b the gradients of all inputs. Peers: `pip install
flash-linear-attention`. With Triton 3.4 to 3.7.0 on Hopper fla refuses its gated backward; `--bypass-guard` lifts that, for timing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from proteus_lm import ActivationSchedule, ops
from proteus_lm.ops import triton as ours

NAMES = {
    "comba": "q k v p g beta",
    "gated_delta_rule": "q k v g beta",
    "delta_rule": "q k v beta",
    "retention": "q k v g",
    "swla": "q k v g gamma",
}
PEERS = {
    "comba": "chunk_comba",
    "gated_delta_rule": "chunk_gated_delta_rule",
    "delta_rule": "chunk_delta_rule",
    "retention": "chunk_retention",
    "swla": "chunk_simple_gla",
}
STEP_PEERS = {
    "comba": "fused_recurrent_comba",
    "gated_delta_rule": "fused_recurrent_gated_delta_rule",
    "delta_rule": "fused_recurrent_delta_rule",
    "retention": "fused_recurrent_retention",
}
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-3}
GATES = ((1, "key"), (16, "key"), (16, "value"))


def inputs(rule: str, size: Sequence[int], dtype: torch.dtype = torch.bfloat16, decay: float | None = None) -> dict[str, Tensor]:
    """Fresh random tensors of a rule; log decays of logsigmoid(N + 3), or uniform down to -decay."""
    rows, length, heads, keys, values = size
    randn = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)  # noqa: E731
    gate = torch.randn(rows, length, heads, device="cuda")
    k = normalize(randn(rows, length, heads, keys), dim=-1)
    every = {
        "q": normalize(randn(rows, length, heads, keys), dim=-1),
        "k": k,
        "p": (k.float() * torch.rand(heads, 1, device="cuda")).to(dtype),
        "v": randn(rows, length, heads, values),
        "g": logsigmoid(gate + 3) if decay is None else -decay * torch.rand_like(gate),
        "beta": randn(rows, length, heads).sigmoid(),
        "gamma": randn(rows, length, heads, 2).sigmoid(),
    }
    return {n: every[n].detach().requires_grad_() for n in NAMES[rule].split()}


def gate(size: Sequence[int], blocks: int, axis: str, context: int, **keywords: Any) -> Any:
    """The activation of E = blocks, or None for E = 1."""
    if blocks == 1:
        return None
    dim = size[3] if axis == "key" else size[4]
    return ActivationSchedule(blocks, context).activation(dim, size[1], device="cuda", **keywords)


def error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def verify(
    rule: str, size: Sequence[int], blocks: int, axis: str, dtype: torch.dtype, decay: float | None, initial: bool
) -> dict[str, float]:
    """The relative errors of out, final state and every gradient against the fp64 chunk form."""
    tensors = inputs(rule, size, dtype, decay)
    activation = gate(size, blocks, axis, 256)
    held = [torch.randn(size[0], *size[2:], device="cuda")] if initial and rule != "swla" else []
    results = []
    upstream: tuple[Tensor, Tensor] | None = None
    for module, kind in ((ours, None), (ops, torch.float64)):
        given = {n: x.detach().to(kind or x.dtype).requires_grad_() for n, x in tensors.items()}
        state = [x.to(kind or x.dtype).requires_grad_() for x in held]
        out, final = getattr(module, rule)(
            **given, activation=activation, axis=axis, initial_state=state[0] if state else None, output_final_state=True
        )  # float64 goes to the chunk form
        final = getattr(final, "matrix", final)
        if upstream is None:
            upstream = torch.randn_like(out), torch.randn_like(final)
        grads = torch.autograd.grad((out, final), [*given.values(), *state], [x.to(kind or x.dtype) for x in upstream])
        results.append((out, final, *grads))
    names = ["out", "state", *(f"d{n}" for n in tensors), *(["dinitial"] if held else [])]
    return {n: error(a, b) for n, a, b in zip(names, *results)}


def checks(quick: bool) -> list[dict[str, Any]]:
    """What is verified before anything is timed: every rule, gate and size that the table times, and the awkward ones."""
    rules = ["gated_delta_rule"] if quick else list(NAMES)
    cases = []
    for rule in rules:
        for blocks, axis in GATES:
            cases.append({"rule": rule, "size": (1, 200, 4, 128, 128), "blocks": blocks, "axis": axis})
        for length in (1, 63, 64, 65, 1000):
            cases.append({"rule": rule, "size": (2, length, 2, 96, 80), "blocks": 4, "axis": "key", "initial": True})
        # Enough tokens that the few with a decay near 1, which alone have gradients, make a mean.
        cases.append({"rule": rule, "size": (2, 1000, 16, 64, 64), "blocks": 1, "axis": "key", "decay": 50.0})
        cases.append({"rule": rule, "size": (1, 100, 2, 64, 128), "blocks": 8, "axis": "value", "dtype": torch.float32})
        cases.append({"rule": rule, "size": (1, 100, 2, 128, 64), "blocks": 8, "axis": "key", "dtype": torch.float32})
    if not quick:
        for blocks, axis in GATES:
            cases.append({"rule": "comba", "size": (1, 150, 2, 256, 512), "blocks": blocks, "axis": axis})
    return cases


def verify_step(rule: str, blocks: int, axis: str, inplace: bool) -> dict[str, float]:
    """The relative errors of a decoding step, rows spread over the window, against the fp64 step of PyTorch."""
    from proteus_lm.ops import recurrent

    dim, rows = 128, 8
    tensors = {n: x.detach()[:, 0].contiguous() for n, x in inputs(rule, (rows, 1, 4, dim, dim)).items()}
    state = torch.randn(rows, 4, dim, dim, device="cuda")
    positions = torch.linspace(0, 8191, rows, device="cuda").long()
    active = None if blocks == 1 else ActivationSchedule(blocks, 8192).active(dim, positions)
    wide = {n: x.double() for n, x in tensors.items()}
    right = getattr(recurrent, f"{rule}_step")(**wide, state=state.double(), active=active, axis=axis)
    found = getattr(ours, f"{rule}_step")(**tensors, state=state, active=active, axis=axis, inplace=inplace)
    return {n: error(a, b) for n, a, b in zip(("out", "state"), found, right)}


def run_checks(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for case in checks(quick):
        dtype = case.get("dtype", torch.bfloat16)
        torch.manual_seed(len(rows))
        errors = verify(
            case["rule"], case["size"], case["blocks"], case["axis"], dtype, case.get("decay"), case.get("initial", False)
        )
        right = all(x < LIMITS[dtype] for x in errors.values())  # NaN is not
        rows.append({**case, "dtype": str(dtype), "errors": errors, "right": right})
        worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else 1e9)
        print(f"{'ok ' if right else 'WRONG'} {worst} {errors[worst]:.1e} {case}", flush=True)
        if not right:
            print({n: f"{x:.1e}" for n, x in errors.items()}, flush=True)
    for rule in ["gated_delta_rule"] if quick else list(STEP_PEERS):
        for blocks, axis in GATES:
            for inplace in (False, True):
                errors = verify_step(rule, blocks, axis, inplace)
                right = all(x < LIMITS[torch.bfloat16] for x in errors.values())
                rows.append({"rule": rule, "step": True, "blocks": blocks, "axis": axis, "errors": errors, "right": right})
                print(f"{'ok ' if right else 'WRONG'} step {rule} {blocks} {axis} in place {inplace} {errors}", flush=True)
    return rows


def replayed(work: Callable[[], Any], repeats: int = 20) -> float:
    """Median milliseconds of a replay of `work` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def both(call: Callable[[dict[str, Tensor]], Tensor], tensors: dict[str, Tensor]) -> dict[str, float]:
    """Milliseconds of forward and of forward + backward."""

    def forward() -> Tensor:
        with torch.no_grad():
            return call(tensors)

    upstream = torch.randn_like(forward())
    used = [n for n in tensors if n != "unused"]
    whole = lambda: torch.autograd.grad(call(tensors), [tensors[n] for n in used], upstream, allow_unused=True)  # noqa: E731
    return {"f_ms": replayed(forward), "fb_ms": replayed(whole)}


def peer(rule: str) -> Callable[[dict[str, Tensor]], Tensor]:
    """fla's operation on our tensors."""
    import fla.ops

    operation = getattr(fla.ops, PEERS[rule])
    names = {"retention": "q k v", "swla": "q k v g"}.get(rule, NAMES[rule]).split()
    return lambda tensors: operation(**{n: tensors[n] for n in names})[0]


def profile(work: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Milliseconds a call of each kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    work()
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    events = [(e.key[:60], e.device_time_total / repeats / 1e3) for e in trace.key_averages() if e.device_time_total > 0]
    return {name: round(ms, 4) for name, ms in sorted(events, key=lambda x: -x[1])[:6]}


def time_rule(rule: str, size: Sequence[int], with_peer: bool, context: int) -> list[dict[str, Any]]:
    rows = []
    if with_peer:
        try:
            rows.append({"rule": rule, "who": f"fla {PEERS[rule]}", "size": size, **both(peer(rule), inputs(rule, size))})
        except Exception as reason:  # a refusing peer is a result
            rows.append({"rule": rule, "who": f"fla {PEERS[rule]}", "size": size, "refused": str(reason)[:200]})
    base = rows[0].get("f_ms") if rows else None
    for blocks, axis in GATES:
        tensors, activation = inputs(rule, size), gate(size, blocks, axis, context)
        call = lambda t, a=activation, x=axis: getattr(ours, rule)(**t, activation=a, axis=x)[0]  # noqa: E731
        row = {"rule": rule, "who": "ours", "E": blocks, "axis": axis, "size": size, **both(call, tensors)}
        if base is not None:
            row |= {"f_ratio": row["f_ms"] / base, "fb_ratio": row["fb_ms"] / rows[0]["fb_ms"]}
        upstream = torch.randn_like(tensors["v"])
        row["kernels_ms"] = profile(lambda: torch.autograd.grad(call(tensors), list(tensors.values()), upstream))  # noqa: B023
        rows.append(row)
    return rows


def time_steps(rule: str, with_peer: bool, batch: int = 64, heads: int = 16, dim: int = 128) -> list[dict[str, Any]]:
    """Decoding: rows spread evenly over positions 0 .. 8191, which is the mean over those positions."""
    rows = []
    tensors = {n: x.detach() for n, x in inputs(rule, (batch, 1, heads, dim, dim)).items()}
    state = torch.randn(batch, heads, dim, dim, device="cuda")
    if with_peer:
        try:
            import fla.ops

            operation = getattr(fla.ops, STEP_PEERS[rule])
            names = [n for n in tensors if not (rule == "retention" and n == "g")]
            work = lambda: operation(**{n: tensors[n] for n in names}, initial_state=state, output_final_state=True)  # noqa: E731
            rows.append({"rule": f"{rule} step", "who": f"fla {STEP_PEERS[rule]}", "f_ms": replayed(work, 40)})
        except Exception as reason:
            rows.append({"rule": f"{rule} step", "who": f"fla {STEP_PEERS[rule]}", "refused": str(reason)[:200]})
    token = {n: x[:, 0].contiguous() for n, x in tensors.items()}
    positions = torch.linspace(0, 8191, batch, device="cuda").long()
    for blocks in (1, 16):
        active = None if blocks == 1 else ActivationSchedule(blocks, 8192).active(dim, positions)
        work = lambda a=active: getattr(ours, f"{rule}_step")(**token, state=state, active=a, inplace=True)  # noqa: E731
        row = {"rule": f"{rule} step", "who": "ours", "E": blocks, "axis": "key", "f_ms": replayed(work, 40)}
        if rows and "f_ms" in rows[0]:
            row["f_ratio"] = row["f_ms"] / rows[0]["f_ms"]
        rows.append(row)
    return rows


def machine() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "fla"):
        try:
            versions[name] = __import__(name).__version__
        except (ImportError, AttributeError) as reason:
            versions[name] = f"absent ({reason})"
    card = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout
    return {**versions, "card": card.strip(), "command": " ".join(sys.argv), "time": time.strftime("%Y-%m-%d %H:%M:%S")}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| operation | size B T H K V | who | E | f ms | f + b ms | f / fla | f + b / fla |",
        "|---|---|---|---|---|---|---|---|",
    ]
    number = lambda x: "" if x is None else f"{x:.3f}"  # noqa: E731
    for r in rows:
        scheduled = "" if "E" not in r else str(r["E"]) if r["E"] == 1 else f"{r['E']} {r['axis']}"
        cells = [number(r.get(n)) for n in ("f_ms", "fb_ms", "f_ratio", "fb_ratio")]
        if "refused" in r:
            cells[0] = f"refused: {r['refused'][:60]}"
        lines.append(f"| {r['rule']} | {' '.join(map(str, r.get('size', ())))} | {r['who']} | {scheduled} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shorten_tuning() -> None:
    """Autotuners measure each configuration for 5 + 15 ms instead of 25 + 100."""
    import triton.testing

    whole = triton.testing.do_bench
    triton.testing.do_bench = lambda fn, warmup=0, rep=0, **rest: whole(fn, warmup=5, rep=15, **rest)


def warm_one(rule: str, size: Sequence[int], with_peer: bool) -> None:
    """Compile what will be timed of a rule, ours and the peer's."""
    calls = [(lambda t, g=g: getattr(ours, rule)(**t, activation=gate(size, *g, 8192), axis=g[1])[0]) for g in GATES]
    for call in [*calls, *([peer(rule)] if with_peer else [])]:
        tensors = inputs(rule, size)
        out = call(tensors)
        torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out), allow_unused=True)


def warm(rules: Sequence[str], arguments: argparse.Namespace) -> float:
    """Compile all rules in processes beside each other, into Triton's cache on disk; seconds taken."""
    begin = time.time()
    flags = [f"--{n.replace('_', '-')}" for n in ("no_peers", "bypass_guard") if getattr(arguments, n)]
    flags += ["--heads", *map(str, arguments.heads)]
    started = [subprocess.Popen([sys.executable, __file__, "--warm", rule, *flags], stdout=subprocess.DEVNULL) for rule in rules]
    for process in started:
        process.wait()
    return time.time() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--quick", action="store_true", help="the gated delta rule only")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--long", action="store_true", help="also B = 1, T = 32768 and Comba's own K = 256, V = 512")
    parser.add_argument("--heads", type=int, nargs="+", default=[16], help="of the table's rows; the issue asks for 16 and 12")
    parser.add_argument("--no-time", action="store_true", help="the checks alone")
    parser.add_argument("--bypass-guard", action="store_true", help="lift fla's refusal of its gated backward on Hopper")
    parser.add_argument("--warm", choices=list(NAMES), help="only compile this rule's kernels, then stop")
    parser.add_argument("--skip-checks", action="store_true", help="never for published numbers")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        print("no CUDA device; this benchmark times GPU kernels", file=sys.stderr)
        return 2
    with_peer = not arguments.no_peers
    if arguments.bypass_guard and with_peer:
        import fla.ops.common.chunk_o as guarded

        guarded.TRITON_ABOVE_3_7_1 = True
    shorten_tuning()
    rules = ["gated_delta_rule"] if arguments.quick else list(NAMES)
    sizes = [(4, 8192, heads, 128, 128) for heads in arguments.heads]
    if arguments.warm:
        for size in sizes:
            warm_one(arguments.warm, size, with_peer)
        return 0
    if not arguments.no_time:
        print(f"compiled in {warm(rules, arguments):.0f} s", flush=True)
    verified = [] if arguments.skip_checks else run_checks(arguments.quick)
    wrong = {r["rule"] for r in verified if not r["right"]}
    for rule in wrong:
        print(f"{rule} is wrong and is not timed", file=sys.stderr)
    rules = [] if arguments.no_time else [r for r in rules if r not in wrong]
    rows = [row for size in sizes for rule in rules for row in time_rule(rule, size, with_peer, 8192)]
    rows += [row for rule in rules if rule in STEP_PEERS for row in time_steps(rule, with_peer)]
    if arguments.long:
        rows += [row for r in rules if r != "swla" for row in time_rule(r, (1, 32768, 16, 128, 128), with_peer, 8192)]
        if "comba" in rules:
            rows += time_rule("comba", (4, 8192, 6, 256, 512), with_peer, 8192)
    result = {"machine": machine(), "guard_bypassed": arguments.bypass_guard, "checks": verified, "rows": rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "ops.json"
    path.write_text(json.dumps(result, indent=1, default=str))
    print(json.dumps(result["machine"]))
    print(table(rows))
    print(f"written to {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
