"""Our linear-memory kernels beside flash-linear-attention's on one CUDA GPU: correctness first, then tables and JSON.

    python benchmarks/ops.py                             # everything, into benchmarks/results/ops-<card>.json and .md
    python benchmarks/ops.py --only main decode          # some sections
    python benchmarks/ops.py --rules comba --heads 16    # one rule, one number of heads
    python benchmarks/ops.py --no-time                   # the checks alone
    python benchmarks/ops.py --brief                     # some rows are of two rules

Sections (bf16; every ratio within one run):
    main     B 4, T 8192, K = V = 128, H of --heads: fla, ours with E = 1, E = 16 of key rows and of value columns
    wide     the same of Comba's own K = 256, V = 512, H 6
    long     the same of B 1, T 32768, H 16
    masked   the masked form, which skips nothing: a mask folded into the norm of k or the SiLU of v, or alone, before our E = 1
             kernels; and before fla's (backend="fla")
    decode   one token, B 64, rows spread evenly over positions 0 .. 8191, which is the mean over those positions
    cold     seconds of the first forward + backward with an empty cache of kernels, one process a rule, beside each other

A kernel whose outputs, final state or gradients leave 1e-2 (bf16; fp32: 1e-3) of the fp64 chunk form (benchmarks/ops_right.py) is
not timed, and the run ends with status 1. Times are medians of CUDA-graph replays, inputs fresh and random, q, k, p of unit norm;
f is the forward without gradients, f + b with the gradients of all inputs. Peers: `pip install flash-linear-attention`; most of the
run is its autotuning. With Triton 3.4 to 3.7.0 on Hopper fla refuses its gated backward; `--bypass-guard` lifts that, for timing.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ops_right import GATES, RULES, check, check_steps, fla_cases, gate, inputs, our_cases, step_inputs
from proteus_lm import ActivationSchedule, ops
from proteus_lm.ops import triton as ours
from proteus_lm.ops.fla import KERNELS
from timing import kernels_ms, replayed_ms

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
    "swla": "fused_recurrent_simple_gla",
}
SECTIONS = ("main", "decode", "masked", "wide", "long", "cold")
BRIEF = ("gated_delta_rule", "comba")  # the rules of --brief, in masked and in long
BRIEF_HEADS = (*BRIEF, "delta_rule")  # and those of further numbers of heads
CONTEXT = 8192  # N of the schedules
WIDE, LONG = (4, 8192, 6, 256, 512), (1, 32768, 16, 128, 128)
SAID = ("ok ", "WRONG", "refused", "{")  # how the lines of a check begin

Row = dict[str, Any]
Size = Sequence[int]


def both(call: Callable[[dict[str, Tensor]], Tensor], tensors: dict[str, Tensor]) -> dict[str, float]:
    """Milliseconds of forward and of forward + backward."""

    def forward() -> Tensor:
        with torch.no_grad():
            return call(tensors)

    upstream = torch.randn_like(forward())
    whole = lambda: torch.autograd.grad(call(tensors), list(tensors.values()), upstream, allow_unused=True)  # noqa: E731
    return {"f_ms": replayed_ms(forward), "fb_ms": replayed_ms(whole)}


def timed_or_refused(row: Row, times: Callable[[], dict[str, float]]) -> Row:
    """The row with its times, or with `refused`: a peer that refuses is a result."""
    try:
        return {**row, **times()}
    except Exception as reason:
        return {**row, "refused": " ".join(str(reason).split())[:200]}


def peer(rule: str) -> Callable[[dict[str, Tensor]], Tensor]:
    """fla's operation on our tensors, as a user of it would call it."""
    import fla.ops

    operation = getattr(fla.ops, PEERS[rule])
    names = {"retention": ("q", "k", "v"), "swla": ("q", "k", "v", "g")}.get(rule)
    return lambda tensors: operation(**{n: x for n, x in tensors.items() if names is None or n in names})[0]


def our(rule: str, size: Size, blocks: int, axis: str) -> Callable[[dict[str, Tensor]], Tensor]:
    """Our kernels under E = blocks."""
    activation = gate(size, blocks, axis, CONTEXT)
    return lambda tensors: getattr(ours, rule)(**tensors, activation=activation, axis=axis)[0]


def ratios(rows: list[Row]) -> list[Row]:
    """Ratios to the first row (the peer, where it ran) and, of f + b, to our E = 1."""
    base = rows[0] if rows[0]["who"].startswith("fla") and "f_ms" in rows[0] else {}
    own = next((r for r in rows if r["who"] == "ours" and r.get("E") == 1), {})
    for row in rows:
        if row is not base and "f_ms" in base and "f_ms" in row:
            row |= {f"{n}_ratio": row[f"{n}_ms"] / base[f"{n}_ms"] for n in ("f", "fb") if f"{n}_ms" in row}
        if row is not own and row["who"] == "ours" and "fb_ms" in own:
            row["own_ratio"] = row["fb_ms"] / own["fb_ms"]
    return rows


def time_rule(section: str, rule: str, size: Size, with_peer: bool) -> list[Row]:
    """A peer and ours, ungated and scheduled, with the kernels that ours are made of."""
    rows: list[Row] = []
    shared = {"section": section, "rule": rule, "size": list(size)}
    if with_peer:
        rows.append(timed_or_refused({**shared, "who": f"fla {PEERS[rule]}"}, lambda: both(peer(rule), inputs(rule, size))))
    for blocks, axis in GATES:
        tensors, call = inputs(rule, size), our(rule, size, blocks, axis)
        row = {**shared, "who": "ours", "E": blocks, "axis": axis, **both(call, tensors)}
        upstream = torch.randn_like(tensors["v"])
        row["kernels_ms"] = kernels_ms(lambda: torch.autograd.grad(call(tensors), list(tensors.values()), upstream))  # noqa: B023
        rows.append(row)
    return ratios(rows)


def opened(size: int, active: Tensor) -> Tensor:
    """Which of `size` coordinates are open, of active (1, T): bool (1, T, 1, size)."""
    return (torch.arange(size, device=active.device) < active[..., None])[:, :, None]


def unit(x: Tensor, active: Tensor | None) -> Tensor:
    """The norm of k that a model computes anyway, and the mask of key rows folded in."""
    wide = x.float()
    y = wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return (y if active is None else torch.where(opened(x.shape[-1], active), y, 0)).to(x.dtype)


def gated(x: Tensor, seen: Tensor | None) -> Tensor:
    """The SiLU of v that a model computes anyway, and the mask of value columns folded in: `opened`, written down once for all
    layers of a forward, which is faster here than to compare (and slower in `unit`; H200)."""
    y = silu(x.float())
    return (y if seen is None else torch.where(seen, y, 0)).to(x.dtype)


def alone(x: Tensor, active: Tensor | None) -> Tensor:
    """The mask as a pass over memory of its own."""
    return x if active is None else torch.where(opened(x.shape[-1], active), x, 0)


def mask_of(maker: Callable[..., Tensor], active: Tensor, size: int) -> Tensor:
    """What `maker` wants to know about which of `size` coordinates are open."""
    return opened(size, active) if maker is gated else active


@cache
def compiled(maker: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One kernel of it."""
    return torch.compile(maker, dynamic=False)


def behind(maker: Callable[..., Tensor], rule: str, name: str, mask: Tensor | None) -> Callable[[dict[str, Tensor]], Tensor]:
    """Our ungated kernels behind `maker` of the input called `name`."""
    return lambda tensors: getattr(ours, rule)(**{**tensors, name: compiled(maker)(tensors[name], mask)})[0]


def time_masked(rule: str, size: Size, with_peer: bool, brief: bool) -> list[Row]:
    """The masked form before kernels that know no gate: k masked for key rows, v for value columns (spec/linear.md 2.3, 2.4).

    Args:
        brief: folded masks only.
    """
    rows: list[Row] = []
    for axis, name, fold, what in (("key", "k", unit, "the norm of k"), ("value", "v", gated, "the SiLU of v")):
        activation = gate(size, 16, axis, CONTEXT)
        assert activation is not None
        shared = {"section": "masked", "rule": rule, "size": list(size), "axis": axis}
        for kind, maker in ((f"in {what}", fold), ("alone", alone))[: 1 if brief else 2]:
            pair = []
            for blocks, mask in ((1, None), (16, mask_of(maker, activation.active, size[3 if axis == "key" else 4]))):
                row = {**shared, "who": f"ours, mask {kind}", "E": blocks}
                pair.append({**row, **both(behind(maker, rule, name, mask), inputs(rule, size))})
            rows += _against(pair)
        if with_peer and rule in KERNELS:
            rows += _time_backend(rule, size, axis, shared)
    return rows


def _against(pair: list[Row]) -> list[Row]:
    """The masked row's ratios to the one without a mask."""
    plain, masked = pair
    if "f_ms" in plain and "f_ms" in masked:
        masked |= {"mask_f": masked["f_ms"] / plain["f_ms"], "mask_fb": masked["fb_ms"] / plain["fb_ms"]}
    return pair


def _time_backend(rule: str, size: Size, axis: str, shared: Row) -> list[Row]:
    """fla through our backend, ungated and masked."""
    rows = []
    for blocks in (1, 16):
        keywords = {"activation": gate(size, blocks, axis, CONTEXT), "axis": axis, "backend": "fla"}
        call = lambda t, k=keywords: getattr(ops, rule)(**t, **k)[0]  # noqa: E731
        row = {**shared, "who": 'backend="fla"', "E": blocks}
        rows.append(timed_or_refused(row, lambda c=call: both(c, inputs(rule, size))))
    return _against(rows)


def our_steps(rule: str, size: Size) -> list[tuple[Row, Callable[[], Any]]]:
    """A decoding step of each gate, in place."""
    batch, _, heads, dim, _ = size
    step, state = step_inputs(rule, batch, heads, dim), torch.randn(batch, heads, dim, dim, device="cuda")
    positions = torch.linspace(0, CONTEXT - 1, batch, device="cuda").long()
    steps = []
    for blocks, axis in GATES:
        active = None if blocks == 1 else ActivationSchedule(blocks, CONTEXT).active(dim, positions)
        keywords = {"state": state, "active": active, "axis": axis, "inplace": True}
        work = lambda k=keywords: getattr(ours, f"{rule}_step")(**step.given, **k)  # noqa: E731
        steps.append(({"who": "ours", "E": blocks, "axis": axis}, work))
    return steps


def time_steps(rule: str, with_peer: bool, size: Size) -> list[Row]:
    """Decoding: one token a row."""
    shared = {"section": "decode", "rule": f"{rule} step", "size": list(size)}
    rows: list[Row] = []
    if with_peer:
        row = {**shared, "who": f"fla {STEP_PEERS[rule]}"}
        rows.append(timed_or_refused(row, lambda: {"f_ms": replayed_ms(_peer_step(rule, size), 40)}))
    return ratios(rows + [{**shared, **row, "f_ms": replayed_ms(work, 40)} for row, work in our_steps(rule, size)])


def _peer_step(rule: str, size: Size) -> Callable[[], Any]:
    import fla.ops

    batch, _, heads, dim, _ = size
    operation, left_out = getattr(fla.ops, STEP_PEERS[rule]), {"retention": ("g",), "swla": ("gamma",)}.get(rule, ())
    given = {n: x[:, None] for n, x in step_inputs(rule, batch, heads, dim).tensors.items() if n not in left_out}
    state = torch.randn(batch, heads, dim, dim, device="cuda")
    return lambda: operation(**given, initial_state=state, output_final_state=True)


def first_calls(rule: str, size: Size) -> list[Row]:
    """Seconds of the first forward + backward of each gate in this process, the import of the kernels in the first."""
    rows: list[Row] = []
    for blocks, axis in GATES:
        tensors, call = inputs(rule, size), our(rule, size, blocks, axis)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out = call(tensors)
        torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        rows.append(
            {"section": "cold", "rule": rule, "size": list(size), "who": "ours", "E": blocks, "axis": axis, "cold_s": seconds}
        )
    return rows


def time_cold(rules: Sequence[str], patience: float, most: int) -> list[Row]:
    """`first_calls` of each rule in a process of its own, with an empty cache of compiled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        answers = together({f"first:{rule}": {"TRITON_CACHE_DIR": f"{folder}/{rule}"} for rule in rules}, [], patience, most)
    rows = []
    for what, answer in answers.items():
        failed = {"section": "cold", "rule": what.split(":")[1], "who": "ours"}
        rows += [{**failed, "refused": answer}] if isinstance(answer, str) else answer
    return rows


def together(
    jobs: dict[str, dict[str, str]],
    flags: Sequence[str],
    patience: float,
    most: int,
    meanwhile: Callable[[], None] | None = None,
) -> dict[str, list[Row] | str]:
    """This script as a process for each job (what `child` does: environment), beside each other; their rows, or how one failed.

    What they say of checks is printed.

    Args:
        patience: seconds after which those that still run are ended.
        most: processes at once.
        meanwhile: what this process does beside them.
    """
    deadline = time.time() + patience
    with ThreadPoolExecutor(most) as pool:
        futures = {what: pool.submit(_process, what, more, flags, deadline) for what, more in jobs.items()}
        if meanwhile is not None:
            meanwhile()
        return {what: _answer(what, *future.result()) for what, future in futures.items()}


def _process(what: str, more: dict[str, str], flags: Sequence[str], deadline: float) -> tuple[int, list[str]]:
    """Status and lines of one process, ended at the deadline."""
    command, left = [sys.executable, __file__, "--child", what, *flags], deadline - time.time()
    if left <= 0:
        return -1, ["no time left to start it"]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=left, env={**os.environ, **more}
        )
    except subprocess.TimeoutExpired:
        return -1, ["not done in time"]
    return done.returncode, done.stdout.splitlines()


def _answer(what: str, status: int, lines: list[str]) -> list[Row] | str:
    """The rows that a child printed last, or the end of what it said."""
    for line in lines:
        if line.startswith(SAID):
            print(line, flush=True)
    if status == 0:
        return json.loads(next(x for x in reversed(lines) if x.startswith("[")))
    print(f"{what} failed, status {status}:", *lines[-8:], sep="\n", flush=True)
    return f"status {status}: {' '.join(lines[-1:])[:200]}"


def child(what: str, sections: Sequence[str]) -> list[Row]:
    """What a process of `together` does: first:RULE, check:WHO:RULE, warm:RULE:SIZE:GATE, step:RULE:SIZE, tune:RULE:SIZE."""
    kind, *rest = what.split(":")
    if kind == "first":
        return first_calls(rest[0], (4, 8192, 16, 128, 128))
    if kind == "check":
        who, rule = rest
        if who == "fla":
            return check(fla_cases([rule]))
        return check(our_cases([rule])) + (check_steps([rule]) if "decode" in sections else [])
    rule, size = rest[0], [int(x) for x in rest[1].split("x")]
    if kind == "step":
        for _, work in our_steps(rule, size):
            work()
        torch.cuda.synchronize()
        return []
    if kind == "warm":
        calls = [our(rule, size, *GATES[int(rest[2])])]
    else:
        calls = [peer(rule)]
        if rule == "retention" and "masked" in sections:  # which calls it with a decay a token
            calls.append(lambda t: ops.retention(*t.values(), backend="fla")[0])
    for call in calls:
        tensors = inputs(rule, size)
        with torch.no_grad():  # a forward that keeps nothing is another kernel
            call(tensors)
        out = call(tensors)
        torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out), allow_unused=True)
    return []


@cache
def machine() -> dict[str, str]:
    """Versions, card, command and time."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "fla"):
        try:
            versions[name] = __import__(name).__version__
        except (ImportError, AttributeError) as reason:
            versions[name] = f"absent ({reason})"
    card = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout
    command = " ".join(["python", "benchmarks/ops.py", *sys.argv[1:]])
    return {
        **versions,
        "card": next(iter(card.splitlines()), "unknown"),
        "command": command,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


COLUMNS = {
    "f ms": ("f_ms", 3),
    "f + b ms": ("fb_ms", 3),
    "f / fla": ("f_ratio", 3),
    "f + b / fla": ("fb_ratio", 3),
    "f + b / ours E = 1": ("own_ratio", 3),
    "f masked / not": ("mask_f", 3),
    "f + b masked / not": ("mask_fb", 3),
    "first call s": ("cold_s", 1),
}


def table(rows: list[Row]) -> str:
    """A Markdown table a section, of the columns that it has."""
    return "\n\n".join(_section(name, [r for r in rows if r["section"] == name]) for name in SECTIONS if _has(rows, name))


def _has(rows: list[Row], section: str) -> bool:
    return any(r["section"] == section for r in rows)


def _section(name: str, rows: list[Row]) -> str:
    columns = {title: column for title, column in COLUMNS.items() if any(column[0] in r for r in rows)}
    heads = ["operation", "B T H K V", "who", "E", *columns]
    lines = [f"### {name}", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for r in rows:
        scheduled = "" if "E" not in r else str(r["E"]) if r["E"] == 1 else f"{r['E']} {r['axis']}"
        cells = ["" if r.get(key) is None else f"{r[key]:.{digits}f}" for key, digits in columns.values()]
        if "refused" in r:
            cells[0] = f"refused: {r['refused'][:80]}"
        lines.append(f"| {' | '.join([r['rule'], ' '.join(map(str, r.get('size', ()))), r['who'], scheduled, *cells])} |")
    return "\n".join(lines)


def shorten_tuning() -> None:
    """Autotuners measure each configuration for 5 + 15 ms instead of 25 + 100."""
    import triton.testing

    whole = triton.testing.do_bench
    triton.testing.do_bench = lambda fn, warmup=0, rep=0, **rest: whole(fn, warmup=5, rep=15, **rest)


Item = tuple[str, str, tuple[int, ...]]


def plan(rules: Sequence[str], sections: Sequence[str], heads: Sequence[int], brief: bool) -> list[Item]:
    """What is timed, in order: section, rule, size (B, T, H, K, V)."""
    size = lambda h: (4, 8192, h, 128, 128)  # noqa: E731
    few = (
        [r for r in BRIEF if r in rules] if brief else [r for r in rules if r != "swla"]
    )  # spec/linear.md 2.8: no mask is exact there
    every: list[Item] = [("main", r, size(heads[0])) for r in rules]
    every += [("decode", r, (64, 1, 16, 128, 128)) for r in rules]
    every += [("masked", r, size(heads[0])) for r in few]
    every += [("wide", "comba", WIDE)] if "comba" in rules else []
    every += [("long", r, LONG) for r in few]
    every += [("main", r, size(h)) for h in heads[1:] for r in rules if not brief or r in BRIEF_HEADS]
    return [item for item in every if item[0] in sections]


def time_item(item: Item, peers: Sequence[str], backends: Sequence[str], brief: bool) -> list[Row]:
    """The rows of one part of the plan.

    Args:
        peers: rules of which fla's own operation is timed.  backends: those whose `backend="fla"` is.
    """
    section, rule, size = item
    if section == "masked":
        return time_masked(rule, size, rule in backends, brief)
    if section == "decode":
        return time_steps(rule, rule in peers, size)
    return time_rule(section, rule, size, rule in peers)


def prepare(
    items: Sequence[Item], rules: Sequence[str], peers: Sequence[str], arguments: argparse.Namespace
) -> tuple[list[Row], set[str]]:
    """Checks and compilation, all beside each other, before anything is timed.

    Returns:
        the rows of the checks; the rules whose peer was not tuned in time, which would then be done while others are timed.
    """
    begin, sections = time.time(), arguments.only
    jobs: list[str] = []
    if not arguments.skip_checks:  # these take longest
        jobs += [f"check:ours:{r}" for r in rules]
        jobs += [f"check:fla:{r}" for r in rules if r in KERNELS and r in peers and "masked" in sections]
    if not arguments.no_time:
        sized = [(section, f"{rule}:{'x'.join(map(str, size))}", rule) for section, rule, size in items]
        wanted = {name: rule for section, name, rule in sized if section != "decode"}
        kinds = {(rule, *name.split("x")[2:]): name for name, rule in reversed(wanted.items()) if rule in peers}
        jobs += [f"tune:{name}" for name in kinds.values()]  # B and T make no other kernels
        jobs += [f"warm:{name}:{g}" for name in wanted for g in range(len(GATES))]
        jobs += [f"step:{name}" for section, name, _ in sized if section == "decode"]
    flags = ["--only", *sections] + ["--bypass-guard"] * arguments.bypass_guard
    answers = together(
        {job: {} for job in jobs}, flags, arguments.patience, arguments.jobs, lambda: _beside(items, peers, arguments)
    )
    print(f"compiled and checked in {time.time() - begin:.0f} s, {len(jobs)} processes", flush=True)
    rows = []
    for job in (j for j in jobs if j.startswith("check")):  # what did not compile will show in its row
        answer, (_, who, rule) = answers[job], job.split(":")
        rows += [{"rule": rule, "who": who, "right": False, "failed": answer}] if isinstance(answer, str) else answer
    late = {job.split(":")[1] for job, answer in answers.items() if job.startswith("tune") and isinstance(answer, str)}
    return rows, late


def _beside(items: Sequence[Item], peers: Sequence[str], arguments: argparse.Namespace) -> None:
    """What this process has to import and compile for itself."""
    if peers:
        lift_guard(arguments.bypass_guard)
    for size in {size for section, _, size in items if section == "masked" and not arguments.no_time}:
        for maker, axis in ((unit, "key"), (gated, "value"), (alone, "key"))[: 2 if arguments.brief else 3]:
            activation, x = gate(size, 16, axis, CONTEXT), inputs("retention", size)["v"]
            for mask in (None, activation and mask_of(maker, activation.active, x.shape[-1])):
                compiled(maker)(x, mask).backward(x)
                with torch.no_grad():
                    compiled(maker)(x, mask)


def lift_guard(bypass: bool) -> None:
    """Import fla, and let its gated backward run where it would refuse."""
    import fla.ops.common.chunk_o as guarded

    if bypass:
        guarded.TRITON_ABOVE_3_7_1 = True


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the JSON and the tables")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION", help=" ".join(SECTIONS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES, metavar="RULE", help=" ".join(RULES))
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 12], help="of the section main; masked takes the first")
    parser.add_argument(
        "--peers", nargs="*", choices=RULES, default=RULES, metavar="RULE", help="whose peers are timed; none: ours alone"
    )
    brief = f"long and masked of {', '.join(BRIEF)} alone, further heads of {', '.join(BRIEF_HEADS)}"
    parser.add_argument("--brief", action="store_true", help=brief)
    parser.add_argument("--no-time", action="store_true", help="the checks alone")
    parser.add_argument("--skip-checks", action="store_true", help="never for published numbers, unless --no-time ran before")
    parser.add_argument("--bypass-guard", action="store_true", help="lift fla's refusal of its gated backward on Hopper")
    parser.add_argument(
        "--patience", type=float, default=420, help="seconds for all checks and compilation; what is left is dropped"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that check and compile at once")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # what the script calls itself with
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGTERM, chain=True)  # what it was at when the time was up
    if not torch.cuda.is_available():
        print("no CUDA device; this benchmark times GPU kernels", file=sys.stderr)
        return 2
    shorten_tuning()
    # torch.compile, if it comes first, moves Triton's cache for this process alone, which then tunes anew what others tuned for it.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"))
    if arguments.child:
        if arguments.child.startswith(("tune", "check:fla")):
            lift_guard(arguments.bypass_guard)
        print(json.dumps(child(arguments.child, arguments.only)))
        return 0
    rules, peers, begin = list(arguments.rules), list(arguments.peers), time.time()
    items = plan(rules, arguments.only, arguments.heads, arguments.brief)
    checks, late = prepare(items, rules, peers, arguments)
    gc.freeze()  # each capture of a graph collects garbage, and what is imported by now is none
    wrong = {who: {r["rule"] for r in checks if not r["right"] and r["who"] == who} for who in ("ours", "fla")}
    for who, names in wrong.items():
        for rule in sorted(names):
            print(f"{rule} of {who} is wrong or was not checked in time, and is not timed", file=sys.stderr)
    for rule in sorted(late):
        print(f"{rule} of fla was not tuned in time and is not timed", file=sys.stderr)
    right, peers = [r for r in rules if r not in wrong["ours"]], [r for r in peers if r not in late]
    backends = [r for r in peers if r not in wrong["fla"]]  # a check of fla is one of our call of it
    rows: list[Row] = []
    for item in () if arguments.no_time else items:
        print(f"{time.time() - begin:.0f} s: {item[0]} {item[1]}", flush=True)
        rows += time_item(item, peers, backends, arguments.brief) if item[1] in right else []
        save(arguments, checks, rows)  # what is timed stays, whatever comes
    if "cold" in arguments.only and not arguments.no_time:
        rows += time_cold(right, arguments.patience, arguments.jobs)
    print(save(arguments, checks, rows))
    gc.unfreeze()
    return 1 if any(wrong.values()) else 0


def save(arguments: argparse.Namespace, checks: list[Row], rows: list[Row]) -> str:
    """Write JSON and tables, named after the card; the tables."""
    result = {"machine": machine(), "guard_bypassed": arguments.bypass_guard, "checks": checks, "rows": rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"ops-{torch.cuda.get_device_name().replace(' ', '-')}"
    path.with_suffix(".json").write_text(json.dumps(result, indent=1))
    worst = max((e for c in checks for e in c.get("errors", {}).values()), default=0.0)
    ran, refused, failed = (sum(n in c for c in checks) for n in ("errors", "refused", "failed"))
    bad = sum("errors" in c and not c["right"] for c in checks)
    said = f"checks: {ran} ran, {bad} wrong, worst error {worst:.1e}; {refused} refused, {failed} failed to run"
    said = "not checked in this run" if arguments.skip_checks else said
    text = f"{json.dumps(result['machine'])}\n\n{said}; fla's guard bypassed: {arguments.bypass_guard}\n\n{table(rows)}\n"
    path.with_suffix(".md").write_text(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
