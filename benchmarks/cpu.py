"""Chunkwise PyTorch against the token-by-token reference, and scheduled against full capacity, on the CPU.

    python benchmarks/cpu.py [--threads 2] [--repeats 5] [--operations titans_memory ..] [--out benchmarks/results]

Every number is a ratio of medians taken in one run, the two sides in turn. A result is timed only after it was found equal to
the reference. Titans is measured as `auto` runs it and, where that is the C kernel, by the chunk form too. With `--operations` only
these are run, and nothing is written but to standard output.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proteus_lm import ActivationSchedule, ops
from proteus_lm.ops import backend, deep, reference
from proteus_lm.ops.memory_activations import memory_function

B, T, H, D, HIDDEN, CHUNK = 2, 2048, 4, 64, 256, 64
UPPER = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
ORACLE_T = {"titans_memory": 256}  # at 2048 tokens the oracle's graph takes more memory than the machine's 24 GiB
EXTRA = {
    "retention": ("g",),
    "swla": ("g", "gamma"),
    "delta_rule": ("beta",),
    "gated_delta_rule": ("g", "beta"),
    "comba": ("p", "g", "beta"),
    "titans_memory": ("theta", "alpha", "eta"),
}


def inputs(name: str, length: int = T) -> tuple[list[Tensor], dict[str, Any]]:
    """Random fp32 inputs of one operation, in its order, with the keywords it needs."""
    torch.manual_seed(0)
    name = name.partition(":")[0]
    unit = lambda: torch.nn.functional.normalize(torch.randn(B, length, H, D), dim=-1)  # noqa: E731
    gates = {
        "g": torch.nn.functional.logsigmoid(torch.randn(B, length, H) + 3),
        "beta": torch.rand(B, length, H),
        "gamma": torch.rand(B, length, H, 2),
        "p": 0.7 * unit(),
        "theta": torch.rand(B, length, H) * 0.1 / CHUNK,
        "alpha": torch.rand(B, length, H) * 0.02,
        "eta": torch.rand(B, length, H) * 0.2 + 0.7,
    }
    tensors = [unit(), unit(), torch.randn(B, length, H, D) / D**0.5, *(gates[n] for n in EXTRA[name])]
    if name != "titans_memory":
        return [x.requires_grad_() for x in tensors], {}
    weights = [torch.randn(H, D, HIDDEN) / D**0.5, torch.randn(H, HIDDEN, D) / HIDDEN**0.5]
    return [x.requires_grad_() for x in (*tensors, *weights)], {"chunk": CHUNK}


def call(module: Any, name: str, tensors: list[Tensor], keywords: dict[str, Any], blocks: int, axis: str) -> Tensor:
    """Outputs of one operation under E blocks over T positions. A name may end in a backend: titans_memory:chunk."""
    length = tensors[0].shape[1]
    schedule = ActivationSchedule(blocks, length)
    name, _, chosen = name.partition(":")
    if name == "titans_memory":
        activation = schedule.activation(HIDDEN, length)
        more = {"backend": chosen} if chosen and module is ops else {}
        return module.titans_memory(*tensors[:6], tensors[6:], activation=activation, **keywords, **more)[0]
    return getattr(module, name)(*tensors, activation=schedule.activation(D, length), axis=axis, **keywords)[0]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forward_backward(module: Any, name: str, blocks: int = 1, axis: str = "key", length: int = T) -> tuple[Callable, Callable]:
    """Two closures: the forward without gradients, and forward with the gradient of every input."""
    tensors, keywords = inputs(name, length)
    upstream = torch.randn(B, length, H, D)

    def forward() -> None:
        with torch.no_grad():
            call(module, name, tensors, keywords, blocks, axis)

    def both() -> None:
        torch.autograd.grad(call(module, name, tensors, keywords, blocks, axis), tensors, upstream)

    return forward, both


def plain_dual_form(tensors: list[Tensor]) -> Tensor:
    """Titans' dual form for two layers, all open, as spec/deep.md 2.1-2.2 prints it: what autograd differentiates by itself."""
    q, k, v, theta, alpha, eta = (x.transpose(1, 2) for x in tensors[:6])
    w1, w2 = (w.expand(B, *w.shape) for w in tensors[6:])
    s1, s2 = torch.zeros_like(w1), torch.zeros_like(w2)
    _, slope = memory_function("gelu_tanh")
    act = memory_function("gelu_tanh").act
    outs = []
    for at in range(0, T, CHUNK):
        x, keys, values, step, forget, keep = (t[:, :, at : at + CHUNK] for t in (q, k, v, theta, alpha, eta))
        logs = [t.log().cumsum(-1) for t in (1 - forget, keep)]
        a, p = ((t[..., :, None] - t[..., None, :]).masked_fill(UPPER, -torch.inf).exp() for t in logs)
        c0, p0 = (t.exp()[..., None] for t in logs)
        s0, mix, held = a @ p0, a @ p * step[..., None, :], p * step[..., None, :]
        z = keys @ w1
        hidden = act(z)
        g2 = hidden @ w2 - values
        g1 = g2 @ w2.mT * slope(z)
        read = act(c0 * (x @ w1) + s0 * (x @ s1) - (mix * (x @ keys.mT)) @ g1)
        outs.append(c0 * (read @ w2) + s0 * (read @ s2) - (mix * (read @ hidden.mT)) @ g2)
        end, kept = mix[..., -1, :, None], held[..., -1, :, None]
        c, s, m = c0[..., -1:, :], s0[..., -1:, :], p0[..., -1:, :]
        w1, s1 = c * w1 + s * s1 - (end * keys).mT @ g1, m * s1 - (kept * keys).mT @ g1
        w2, s2 = c * w2 + s * s2 - (end * hidden).mT @ g2, m * s2 - (kept * hidden).mT @ g2
    return torch.cat(outs, 2).transpose(1, 2)


def titans_forms() -> list[str]:
    """Titans with the backend that `auto` takes here, and with the chunk form."""
    tensors, keywords = inputs("titans_memory")
    known = deep.refusals(tensors[:6], tensors[6:], keywords["chunk"])
    choice = backend.explain("titans_memory", *tensors, refused=known)
    print(f"titans_memory: {choice.backend}; {choice.reason}", flush=True)
    return [f"titans_memory:{name}" for name in dict.fromkeys((choice.backend, "chunk"))]


def against_autograd(name: str, repeats: int) -> dict[str, float]:
    """Forward + backward, and backward alone, of Titans by hand against plain autograd through the same form (E = 1)."""
    tensors, keywords = inputs(name)
    upstream = torch.randn(B, T, H, D)
    forms = (lambda: call(ops, name, tensors, keywords, 1, "key"), lambda: plain_dual_form(tensors))
    error = ((forms[0]() - forms[1]()).square().mean() / forms[1]().square().mean()).sqrt().item()
    if not error < 1e-5:
        raise SystemExit(f"the plain dual form differs by {error:.1e}; not timed")
    whole = [lambda form=form: torch.autograd.grad(form(), tensors, upstream) for form in forms]
    ours, plain = medians(whole, repeats)
    backward = []
    for form in forms:
        times = []
        for _ in range(repeats):
            out = form()
            times.append(timed(lambda: torch.autograd.grad(out, tensors, upstream)))  # noqa: B023
        backward.append(statistics.median(times))
    return {"autograd_both": plain / ours, "autograd_backward": backward[1] / backward[0]}


def check(name: str, blocks: int, axis: str) -> None:
    """Refuse to time what is not equal to the reference (fp32, relative root mean square 1e-5)."""
    tensors, keywords = inputs(name)
    with torch.no_grad():
        ours, right = (call(m, name, tensors, keywords, blocks, axis) for m in (ops, reference))
    error = ((ours - right).square().mean() / right.square().mean()).sqrt().item()
    if not error < 1e-5:
        raise SystemExit(f"{name} E={blocks} {axis}: relative error {error:.1e}; not timed")


def medians(sides: list[Callable], repeats: int) -> list[float]:
    """Median seconds of each side, measured in turn after one warm-up."""
    for side in sides:
        side()
    rounds = [[timed(side) for side in sides] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--operations", nargs="+", choices=EXTRA, help="run only these, and write no file")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows, titans = [], {}
    chosen = [n for n in arguments.operations or EXTRA if n != "titans_memory"]
    forms = titans_forms() if "titans_memory" in (arguments.operations or EXTRA) else []
    for name in (*chosen, *forms):
        check(name, 1, "key")
        short = ORACLE_T.get(name.partition(":")[0], T)
        sides = [forward_backward(module, name, length=short) for module in (ops, reference)]
        f, sf = medians([side[0] for side in sides], max(2, arguments.repeats // 2))
        b, sb = medians([side[1] for side in sides], max(2, arguments.repeats // 2))
        ours = forward_backward(ops, name)
        whole = medians([*ours], arguments.repeats)
        row: dict[str, Any] = {"operation": name, "forward_ms": 1e3 * whole[0], "both_ms": 1e3 * whole[1], "reference_T": short}
        row |= {"reference_forward": sf / f, "reference_both": sb / b}
        for axis in ("key", "value") if name not in forms else ("key",):
            check(name, 16, axis)
            scheduled = forward_backward(ops, name, 16, axis)
            one, many, one_b, many_b = medians([ours[0], scheduled[0], ours[1], scheduled[1]], arguments.repeats)
            row |= {f"E16_{axis}_forward": many / one, f"E16_{axis}_both": many_b / one_b}
        rows.append(row)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    for name in forms:
        titans[name] = against_autograd(name, arguments.repeats)
        print(name, {k: round(v, 3) for k, v in titans[name].items()}, flush=True)
    if arguments.operations:
        return
    about = {
        "command": f"python benchmarks/cpu.py --threads {arguments.threads} --repeats {arguments.repeats}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "shape": f"fp32 B={B} T={T} H={H} K=V={D}, titans hidden {HIDDEN} chunk {CHUNK}; E=16 over N={T}",
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "cpu.json").write_text(json.dumps({"about": about, "rows": rows, "titans": titans}, indent=1) + "\n")
    (arguments.out / "cpu.md").write_text(table(about, rows, titans))


def table(about: dict[str, Any], rows: list[dict[str, Any]], titans: dict[str, dict[str, float]]) -> str:
    """The rows as Markdown, the command above them."""
    lines = [f"`{about['command']}`: torch {about['torch']}, {about['threads']} threads, {about['shape']}.", ""]
    heads = ["operation", "forward ms", "f+b ms", "reference / ours (Titans: at T = 256), forward", "f+b"]
    heads += ["E=16 / E=1 key rows (hidden units), forward", "f+b", "value columns, forward", "f+b"]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for r in rows:
        value = [f"{r[k]:.2f}" if k in r else "-" for k in ("E16_value_forward", "E16_value_both")]
        lines.append(
            f"| {r['operation']} | {r['forward_ms']:.1f} | {r['both_ms']:.1f} | {r['reference_forward']:.1f} x | "
            f"{r['reference_both']:.1f} x | {r['E16_key_forward']:.2f} | {r['E16_key_both']:.2f} | {value[0]} | {value[1]} |"
        )
    lines += ["", "Titans, plain autograd through the dual form / a hand-written backward (which keeps up to 256 MiB and works"]
    lines += ["out the rest again), E = 1:"]
    for name, ratio in titans.items():
        lines += [f"`{name}` forward + backward {ratio['autograd_both']:.2f}, backward alone {ratio['autograd_backward']:.2f}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
