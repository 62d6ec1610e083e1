"""The kernels beside the memories (convolution, norms, rotary positions, SwiGLU) on one CUDA GPU: correctness first, then times.

    python benchmarks/neighbours.py --out benchmarks/results     # 80 s; peers: `pip install flash-linear-attention`
    python benchmarks/neighbours.py --no-time                    # the checks alone
    python benchmarks/neighbours.py --only rotary,SwiGLU         # of these alone

Each is compared with our own PyTorch in fp64 (values and every gradient; 1e-2 in bf16, 1e-4 in fp32, relative root mean square),
and asked for the same bits whatever the batch, the split and the packing; a wrong one ends the run with status 1. Times are forward
+ backward in bf16, gradients of inputs and weights, medians: a CUDA graph's replay (the device alone) and eager calls (what a step
waits for where it is bound by launches). Beside the kernels: our PyTorch eager, the same under torch.compile, and fla's modules.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from proteus_lm import ActivationSchedule
from proteus_lm.mixers.combine import Combine
from proteus_lm.mixers.conv import ShortConvolution
from proteus_lm.mixers.norm import RMSNorm, l2_normalize
from proteus_lm.mixers.rotary import rotate, turn_at
from proteus_lm.ops.triton_neighbours import comba_vectors, runs, swiglu_product, turned_parts
from proteus_lm.sequence import TokenSequence
from timing import captured, median_ms

BASE = ActivationSchedule(1, 8)
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
BANDWIDTH = 4.29e9
"""Bytes a millisecond that one H200 copies, for the floor."""
WHO = ("kernels", "PyTorch", "compiled", "fla")
Function = Callable[..., Any]


class Case:
    """Something to check and to time.

    Args:
        name: in the table.
        module: with the parameters, or None.
        function: of the module and the inputs, gives a tensor or several.
        shapes: of the inputs.
        passes: numbers that forward + backward must move at least, for each of the first input.
        peer: fla's function of `peer_shapes` (those of the inputs and parameters if None); None for none.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        function: Function,
        shapes: Sequence[Sequence[int]],
        passes: float,
        peer: Function | None,
        peer_shapes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.name, self.module, self.function, self.shapes = name, module.cuda(), function, shapes
        self.passes, self.peer = passes, peer
        self.peer_shapes = peer_shapes or [*shapes, *(p.shape for p in module.parameters())]

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        return [random(shape, dtype) for shape in self.shapes]

    def peer_inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """Parameters, which are vectors and the taps of channels, in fp32 as ours."""
        return [random(shape, dtype if len(shape) > 2 else torch.float32) for shape in self.peer_shapes]

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.module.parameters())


def random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def fla(module: str, name: str) -> Function:
    """A function of flash-linear-attention's modules, imported where it is called."""
    return getattr(importlib.import_module(f"fla.modules.{module}"), name)


def sequence_of(x: Tensor, bounds: Tensor | None = None) -> TokenSequence:
    rows = len(x) if bounds is None else len(bounds) - 1
    return TokenSequence(BASE, rows, x.shape[1], cu_seqlens=bounds, device="cuda")


def conv_case(rows: int, length: int, width: int) -> Case:
    module = ShortConvolution(width, 4)
    module.init_weights()

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        return fla("causal_conv1d", "causal_conv1d")(x, weight, activation="silu")[0]

    return Case(f"convolution + SiLU, {width}", module, lambda m, x: m(x, sequence_of(x))[0], [(rows, length, width)], 5, theirs)


def projection_case(rows: int, length: int, width: int, dim: int) -> Case:
    """What stands between the projection and the memory: convolution of q, k, v; q and k to unit length."""
    module = ShortConvolution(3 * width, 4)
    module.init_weights()

    def ours(m: ShortConvolution, x: Tensor) -> list[Tensor]:
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in m.parts(x, sequence_of(x), None, [width] * 3)[0])
        return [l2_normalize(q), l2_normalize(k), v.contiguous()]  # the memory's kernels want them so

    def theirs(*given: Tensor) -> list[Tensor]:
        """As its layers: q, k and v each with a convolution of its own."""
        l2norm = fla("norm.l2norm", "l2norm")
        q, k, v = (fla("causal_conv1d", "causal_conv1d")(x, w, activation="silu")[0] for x, w in zip(given[:3], given[3:]))
        return [l2norm(q.unflatten(-1, (-1, dim))), l2norm(k.unflatten(-1, (-1, dim))), v.unflatten(-1, (-1, dim))]

    return Case(
        f"q, k, v: convolution, norm of q, k; 3 x {width}", module, ours, [(rows, length, 3 * width)], 5, theirs,
        [*[(rows, length, width)] * 3, *[(width, 4)] * 3],
    )  # fmt: skip


def l2_case(rows: int, length: int, heads: int, dim: int) -> Case:
    def theirs(x: Tensor) -> Tensor:
        return fla("norm.l2norm", "l2norm")(x)

    return Case(
        f"L2 norm, {heads} heads of {dim}", nn.Module(), lambda m, x: l2_normalize(x), [(rows, length, heads, dim)], 5, theirs
    )


class CombaVectors(nn.Module):
    """What the Comba mixer makes of q and k (`mixers/comba.py`), by the kernel or in PyTorch."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.inner, self.D = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.rand(heads))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay = torch.sigmoid(self.inner)
        if runs(q, k):
            return comba_vectors(q, k, decay, self.D, 1e-6, False)
        p = (decay[:, None] * k).to(k.dtype)
        q, unit = (q - self.D[:, None] * p).to(q.dtype), l2_normalize(k)
        return l2_normalize(q), unit, (decay[:, None] * unit).to(k.dtype)


def comba_case(rows: int, length: int, heads: int, dim: int) -> Case:
    shape = (rows, length, heads, dim)
    return Case(f"Comba's q, k, p, {heads} heads of {dim}", CombaVectors(heads), lambda m, q, k: m(q, k), [shape] * 2, 12, None)


def rms_case(rows: int, length: int, width: int) -> Case:
    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        return fla("norm.layernorm", "rms_norm")(x, weight, None, eps=1e-6)

    return Case(f"RMS norm, {width}", RMSNorm(width, 1e-6), lambda m, x: m(x), [(rows, length, width)], 5, theirs)


def gated_case(rows: int, length: int, heads: int, dim: int) -> Case:
    def theirs(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return fla("norm.fused_norm_gate", "rms_norm_gated")(x, gate.view_as(x), weight, None, "swish").flatten(-2)

    shapes = [(rows, length, heads, dim), (rows, length, heads * dim)]
    return Case(
        f"RMS norm x SiLU gate, {heads} heads of {dim}", RMSNorm(dim, 1e-6), lambda m, x, g: m.gated(x, g, silu), shapes, 8, theirs
    )


def combine_case(rows: int, length: int, width: int) -> Case:
    return Case(
        f"two norms, sigmoid gate, {width}", Combine(width, 1e-6, "sigmoid_gate"), lambda m, a, b: m(a, b),
        [(rows, length, width)] * 2, 8, None,
    )  # fmt: skip


def rotary_case(rows: int, length: int, heads: int, dim: int, interleaved: bool = False) -> Case:
    """Queries and keys of one projection turned to their positions (`mixers/attention.py`); the angles are made before."""
    sequence = TokenSequence(BASE, rows, length, device="cuda")

    def ours(m: nn.Module, parts: Tensor) -> tuple[Tensor, ...]:
        turn = turn_at(sequence, parts, interleaved=interleaved)
        if runs(parts, *turn):
            return turned_parts(parts, *turn, interleaved)[:3]
        q, k, v = parts.unbind(2)
        return rotate(q, turn, interleaved=interleaved), rotate(k, turn, interleaved=interleaved), v

    # Forward q and k come and go, 4 of the 3 parts; backward all come and go, 6.
    name = f"rotary q, k of q, k, v, {heads} heads of {dim}{', interleaved' * interleaved}"
    return Case(name, nn.Module(), ours, [(rows, length, 3, heads, dim)], 10 / 3, None)


def swiglu_case(rows: int, length: int, width: int) -> Case:
    def ours(m: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        return swiglu_product(a, b) if runs(a, b) else silu(a) * b

    def theirs(a: Tensor, b: Tensor) -> Tensor:
        return fla("activations", "swiglu")(a, b)

    return Case(f"SwiGLU, {width}", nn.Module(), ours, [(rows, length, width)] * 2, 8, theirs)


def cases(rows: int, length: int, full: bool) -> list[Case]:
    every = [
        conv_case(rows, length, 1536),
        projection_case(rows, length, 1536, 64),
        l2_case(rows, length, 24, 64),
        comba_case(rows, length, 24, 64),
        gated_case(rows, length, 24, 64),
        rms_case(rows, length, 1536),
        combine_case(rows, length, 1536),
        rotary_case(rows, length, 16, 128),
        swiglu_case(rows, length, 4096),
    ]
    wider = [
        conv_case(rows, length, 2048),
        projection_case(rows, length, 2048, 128),
        l2_case(rows, length, 16, 128),
        gated_case(rows, length, 16, 128),
        rms_case(rows, length, 2048),
        rotary_case(rows, length, 12, 64, True),
    ]
    return [*every, *wider] if full else every


def error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item()


def errors_of(case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Of the results and of every gradient against fp64."""
    given = case.inputs(dtype)
    upstream: list[Tensor] = []
    found = []
    for kind in (None, torch.float64):
        module = case.module if kind is None else case.module.double()
        inputs = [x.detach().to(kind or dtype).requires_grad_() for x in given]
        outs = tensors(case.function(module, *inputs))
        upstream = upstream or [torch.randn_like(x) for x in outs]
        grads = torch.autograd.grad(outs, [*inputs, *module.parameters()], [u.to(x.dtype) for u, x in zip(upstream, outs)])
        found.append([*(x.detach() for x in outs), *grads])
    case.module.float()
    names = [*(f"out{i}" for i in range(len(upstream))), *(f"d{i}" for i in range(len(found[0]) - len(upstream)))]
    return {n: error(a, b) for n, a, b in zip(names, *found)}


def bits() -> dict[str, bool]:
    """The same bits whatever the batch, the split, the packing and the place in memory."""
    results = {}
    for dtype in (torch.bfloat16, torch.float32):
        conv = ShortConvolution(130, 4)
        conv.init_weights()
        conv.cuda()
        x = torch.randn(3, 150, 130, device="cuda", dtype=dtype)
        whole, end = conv(x, sequence_of(x))
        for at in (1, 2, 64, 77):
            first, state = conv(x[:, :at], sequence_of(x[:, :at]))
            second, after = conv(x[:, at:], sequence_of(x[:, at:]), state)
            results[f"convolution split at {at}, {dtype}"] = torch.equal(torch.cat((first, second), 1), whole) & torch.equal(
                after, end
            )
        bounds = torch.arange(4, device="cuda") * 150
        flat = x.reshape(1, 450, 130)
        results[f"convolution packed, {dtype}"] = torch.equal(conv(flat, sequence_of(flat, bounds))[0].view_as(whole), whole)
        for width in (5, 130, 1536):
            norm, rows = RMSNorm(width, 1e-6).cuda(), torch.randn(200, width, device="cuda", dtype=dtype)
            for function in (norm, l2_normalize):
                alone = torch.cat([function(rows[i : i + 1]) for i in (0, 1, 77, 199)])
                results[f"{type(function).__name__} {width}, {dtype}"] = torch.equal(alone, function(rows)[[0, 1, 77, 199]])
    return results


def turn_bits() -> dict[str, bool]:
    """A token's turn has the bits that it has alone, and attention reaches the turn of what it projects."""
    results = {}
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(3, 150, 5, 96, device="cuda", dtype=dtype)
        turn = turn_at(sequence_of(x), x)
        whole = rotate(x, turn)
        alone = [rotate(x[2:, t : t + 1], (turn[0][:, t : t + 1], turn[1][:, t : t + 1])) for t in (0, 1, 149)]
        results[f"rotary alone, {dtype}"] = torch.equal(torch.cat(alone, 1), whole[2:, [0, 1, 149]])
        parts = torch.stack((x, x, x), 2)
        results[f"rotary of parts, {dtype}"] = all(torch.equal(y, whole) for y in turned_parts(parts, *turn, False)[:2])
    return results


def packed_errors(dtype: torch.dtype, stateful: bool) -> dict[str, float]:
    """Documents shorter than the taps, with and without a state before each."""
    lengths = [1, 2, 300, 3, 64, 1]
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    conv = ShortConvolution(130, 4)
    conv.init_weights()
    shapes = [(1, sum(lengths), 130), *([(len(lengths), 3, 130)] if stateful else [])]
    function = lambda m, x, *s: m(x, sequence_of(x, bounds), *s)  # noqa: E731
    return errors_of(Case("", conv, function, shapes, 5, None), dtype)


def chosen(case: Case, only: Sequence[str]) -> bool:
    return not only or any(part in case.name for part in only)


def check(only: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
    rows: list[dict[str, Any]] = []
    for dtype, limit in LIMITS.items():
        small = [
            l2_case(1, 9, 3, 5),
            rms_case(3, 65, 130),
            gated_case(2, 33, 3, 96),
            conv_case(2, 65, 5),
            combine_case(2, 9, 770),
            comba_case(2, 9, 3, 40),
            *(rotary_case(2, 33, 3, dim, pairs) for dim in (2, 40, 256) for pairs in (False, True)),
            *(swiglu_case(2, 9, width) for width in (5, 1000)),
        ]
        if dtype == torch.bfloat16:
            small += cases(2, 100, True)  # what is timed
        found = [(case.name, errors_of(case, dtype)) for case in small if chosen(case, only)]
        if not only:
            found += [(f"packed, state {s}", packed_errors(dtype, s)) for s in (False, True)]
        rows += [{"case": n, "dtype": str(dtype), "errors": e, "right": all(x < limit for x in e.values())} for n, e in found]
    rows += [{"case": name, "right": bool(same)} for name, same in (turn_bits() | ({} if only else bits())).items()]
    for row in rows:
        if not row["right"]:
            print("WRONG", row, flush=True)
    print(f"{sum(r['right'] for r in rows)} of {len(rows)} checks right", flush=True)
    return rows, all(r["right"] for r in rows)


def eager_ms(work: Callable[[], Any], calls: int = 10) -> float:
    """Median milliseconds of a call among several in a row, launches included."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times)


def timed(function: Function, inputs: list[Tensor], wanted: list[Tensor]) -> dict[str, Any]:
    upstream = [torch.randn_like(x) for x in tensors(function(*inputs))]

    def work() -> None:
        torch.autograd.grad(tensors(function(*inputs)), wanted, upstream)

    def forward() -> None:
        with torch.no_grad():
            function(*inputs)

    for _ in range(3):
        work()
    row: dict[str, Any] = {"eager_ms": eager_ms(work)}
    for name, what in (("fb_ms", work), ("f_ms", forward)):
        try:
            row[name] = median_ms(captured(what), 15, 2)
        except Exception as reason:
            torch.cuda.synchronize()
            row[f"no {name}"] = f"{type(reason).__name__}: {reason}"[:120]
    return row


def time_one(case: Case, who: str) -> dict[str, Any]:
    os.environ["PROTEUS_NEIGHBOURS"] = "auto" if who == "kernels" else "torch"
    inputs = case.inputs(torch.bfloat16)
    wanted, function = [*inputs, *case.parameters], lambda *x: case.function(case.module, *x)
    if who == "compiled":
        torch.compiler.reset()
        function = torch.compile(function)
    if who == "fla" and case.peer is not None:
        function, inputs = case.peer, case.peer_inputs(torch.bfloat16)
        wanted = inputs
    row: dict[str, Any] = {"case": case.name, "shape": list(case.shapes[0]), "who": who}
    start = time.perf_counter()
    try:
        row |= timed(function, inputs, wanted)
    except Exception as reason:  # a failing peer is a result
        row["failed"] = f"{type(reason).__name__}: {reason}"[:200]
    row["seconds"] = time.perf_counter() - start
    if who == "kernels":
        row["floor_ms"] = case.passes * math.prod(case.shapes[0]) * 2 / BANDWIDTH
    os.environ["PROTEUS_NEIGHBOURS"] = "auto"
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def plan(who: Sequence[str], only: Sequence[str]) -> list[tuple[Case, str]]:
    """What is timed, the quick first: fla's convolution is tuned for half a minute."""
    large, small = cases(4, 8192, True), cases(1, 128, False)
    few = {case.name for case in small}
    order = [case for case in large if case.name in few] + small + [case for case in large if case.name not in few]
    rows = [(case, name) for case in order for name in ("kernels", "PyTorch")]
    rows += [(case, "compiled") for case in large if case.name in few]
    rows += [(case, "fla") for case in sorted(large, key=lambda case: "convolution" in case.name) if case.peer]
    return [(case, name) for case, name in rows if name in who and chosen(case, only)]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| what | who | f + b, ms | f, ms | eager f + b, ms | f + b / floor |", "|---|---|---|---|---|---|"]
    floors = {(r["case"], *r["shape"]): r["floor_ms"] for r in rows if "floor_ms" in r}
    order = list(dict.fromkeys((r["case"], *r["shape"]) for r in rows))
    for row in sorted(rows, key=lambda r: (-r["shape"][0] * r["shape"][1], order.index((r["case"], *r["shape"])))):
        cells = [f"{row[k]:.3f}" if k in row else "—" for k in ("fb_ms", "f_ms", "eager_ms")]
        floor = floors.get((row["case"], *row["shape"]))
        cells.append(f"{row['fb_ms'] / floor:.2f}" if floor and "fb_ms" in row else "—")
        lines.append(f"| {row['case']}, {row['shape'][0]} x {row['shape'][1]} | {row['who']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(folder: Path, report: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"neighbours-{report['card'].replace(' ', '-')}"
    text = f"# What stands beside a memory, on one {report['card']}\n\ntorch {report['torch']}, triton {report['triton']}, bf16, "
    text += f"forward + backward, `{report['command']}`. Numbers: `{stem}.json`.\n"
    checks = report.get("checks")
    text += f"Checks right: {sum(c['right'] for c in checks)} of {len(checks)}.\n" if checks else "Checked by another run.\n"
    text += f"\n{table(report['times'])}\n"
    for name, content in ((f"{stem}.json", json.dumps(report, indent=1)), (f"{stem}.md", text)):
        scratch = folder / f"{name}.tmp"
        scratch.write_text(content)
        scratch.replace(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for neighbours-<card>.json and .md")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="time what another run has checked")
    parser.add_argument("--who", default=",".join(WHO), help="what is timed: some of these, with commas")
    parser.add_argument("--only", default="", help="cases whose name holds one of these, with commas; else all")
    parser.add_argument("--seconds", type=float, default=75.0, help="start no other case after this many seconds")
    options = parser.parse_args()
    import triton

    only = [part for part in options.only.split(",") if part]
    begin = time.perf_counter()
    report: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    report["command"] = " ".join(["python", *sys.argv])
    if not options.no_check:
        report["checks"], right = check(only)
        print(f"checked after {time.perf_counter() - begin:.0f} s", flush=True)
        if not right or options.no_time:
            raise SystemExit(not right)
    report["times"] = []
    for case, who in plan(options.who.split(","), only):
        if time.perf_counter() - begin > options.seconds:
            print(f"out of time before {case.name}, {who}", flush=True)
            continue
        report["times"].append(time_one(case, who))
        torch.cuda.empty_cache()
    report["seconds"] = time.perf_counter() - begin
    if options.out:
        write(options.out, report)
    print(f"{report['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
