"""Are the linear memories' kernels right on this GPU? What benchmarks/ops.py asks before it takes a time.

A case is right when outputs, final state and the gradients of all inputs lie within LIMITS of the fp64 chunk form, which the tests
hold to the oracle at 1e-10; as root mean square over a tensor, inputs rounded before both sides, fresh and random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from proteus_lm import ActivationSchedule, ops
from proteus_lm.activation import Activation
from proteus_lm.ops import _linear, fla, recurrent
from proteus_lm.ops import triton as ours
from proteus_lm.ops.state import SWLAState

RULES = ("comba", "gated_delta_rule", "delta_rule", "retention", "swla")
GATES = ((1, "key"), (16, "key"), (16, "value"))
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-3}
PACKED = (0, 70, 71, 200)  # boundaries of documents: one of a single token, the others no multiple of a chunk


def inputs(rule: str, size: Sequence[int], dtype: torch.dtype = torch.bfloat16, decay: float | None = None) -> dict[str, Tensor]:
    """Fresh random tensors of a rule, wanting gradients: q, k of unit norm, log decays of logsigmoid(N + 3).

    Args:
        size: rows, tokens, heads, K, V.
        decay: log decays uniform down to -decay instead.
    """
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
    return {n: every[n].detach().requires_grad_() for n in _linear.ARGUMENTS[rule]}


def gate(size: Sequence[int], blocks: int, axis: str, context: int, cu_seqlens: Tensor | None = None) -> Activation | None:
    """The activation of E = blocks, or None for E = 1."""
    if blocks == 1:
        return None
    dim = size[3] if axis == "key" else size[4]
    return ActivationSchedule(blocks, context).activation(dim, size[1], device="cuda", cu_seqlens=cu_seqlens)


def error(a: Tensor, b: Tensor) -> float:
    """Root mean square of the difference over that of the right b."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


@dataclass(frozen=True)
class Case:
    """One call to verify. `who`: "ours", or "fla" for the backend of that name. `packed`: documents at PACKED.

    `final`: with a gradient of the final state, too; without one a walk back begins with nothing.
    """

    rule: str
    size: tuple[int, int, int, int, int]
    blocks: int = 1
    axis: str = "key"
    dtype: torch.dtype = torch.bfloat16
    decay: float | None = None
    initial: bool = False
    packed: bool = False
    final: bool = True
    who: str = "ours"


def verify(case: Case) -> dict[str, float]:
    """The relative errors of out, with and without gradients, final state and every gradient against the fp64 chunk form."""
    tensors = inputs(case.rule, case.size, case.dtype, case.decay)
    bounds = torch.tensor(PACKED, device="cuda") if case.packed else None
    keywords: dict[str, Any] = {"activation": gate(case.size, case.blocks, case.axis, 256, bounds), "axis": case.axis}
    keywords |= {"cu_seqlens": bounds, "output_final_state": True}
    documents = len(PACKED) - 1 if case.packed else case.size[0]
    held = [torch.randn(documents, *case.size[2:], device="cuda")] if case.initial and case.rule != "swla" else []
    results = []
    upstream: tuple[Tensor, Tensor] | None = None
    alone = tensors["v"]
    for call, kind in ((_call(case), None), (getattr(ops, case.rule), torch.float64)):  # float64 goes to the chunk form
        given = {n: x.detach().to(kind or x.dtype).requires_grad_() for n, x in tensors.items()}
        state = [x.to(kind or x.dtype).requires_grad_() for x in held]
        out, final = call(**given, **keywords, initial_state=state[0] if state else None)
        final = getattr(final, "matrix", final)
        if upstream is None:
            upstream = torch.randn_like(out), torch.randn_like(final)
            with torch.no_grad():  # a forward that keeps nothing is another kernel
                alone, _ = call(**given, **keywords, initial_state=state[0] if state else None)
        ends = (out, final) if case.final else (out,)
        grads = torch.autograd.grad(ends, [*given.values(), *state], [x.to(kind or x.dtype) for x in upstream[: len(ends)]])
        results.append((out, final, *grads))
    names = ["out", "state", *(f"d{n}" for n in tensors), *(["dinitial"] if held else [])]
    return {n: error(a, b) for n, a, b in zip(names, *results)} | {"out alone": error(alone, results[1][0])}


def _call(case: Case) -> Callable[..., Any]:
    if case.who == "ours":
        return getattr(ours, case.rule)
    return lambda **keywords: getattr(ops, case.rule)(**keywords, backend=case.who)


def our_cases(rules: Sequence[str]) -> list[Case]:
    """Every rule, gate and size that the table times, and the awkward ones."""
    cases = []
    for rule in rules:
        cases += [Case(rule, (1, 200, 4, 128, 128), blocks, axis) for blocks, axis in GATES]
        cases += [Case(rule, (1, 200, 4, 128, 128), 16, axis, final=False) for axis in ("key", "value")]
        cases += [Case(rule, (2, length, 2, 128, 128), 4, initial=True) for length in (1, 63, 64, 65, 1000)]
        cases.append(Case(rule, (2, 130, 2, 96, 80), 4, initial=True))  # no multiples of 64, which Hopper's kernels do not take
        cases.append(Case(rule, (1, 130, 2, 128, 256), 8, "value", initial=True))
        cases.append(Case(rule, (1, PACKED[-1], 2, 128, 128), 4, dtype=torch.float16, packed=True))
        # Enough tokens that the few with a decay near 1, which alone have gradients, make a mean.
        cases.append(Case(rule, (2, 1000, 16, 64, 64), decay=50.0))
        cases.append(Case(rule, (1, 100, 2, 64, 128), 8, "value", torch.float32))
        cases.append(Case(rule, (1, 100, 2, 128, 64), 8, "key", torch.float32))
    if "comba" in rules:
        cases += [Case("comba", (1, 150, 2, 256, 512), blocks, axis) for blocks, axis in GATES]
    return cases


def fla_cases(rules: Sequence[str]) -> list[Case]:
    """The backend "fla": ungated and masked at the sizes that are timed (so that it tunes once), by stages, and packed."""
    cases = []
    for rule in rules:
        if rule in fla.KERNELS:
            cases += [Case(rule, (1, 200, 16, 128, 128), blocks, axis, who="fla") for blocks, axis in GATES]
            cases += [Case(rule, (2, 130, 16, 128, 128), 4, axis, initial=True, who="fla") for axis in ("key", "value")]
            cases.append(Case(rule, (1, PACKED[-1], 16, 128, 128), 4, packed=True, who="fla"))
    # What `auto` leaves to fla, since our kernels do not hold it.
    wide = (Case("retention", (1, 200, 2, 320, 64), 4, who="fla"), Case("gated_delta_rule", (1, 200, 2, 64, 640), 4, who="fla"))
    return cases + [case for case in wide if case.rule in rules]


class Step(NamedTuple):
    """One token a row: the rule's tensors (N, H, ...), SWLA's pair before (keys, values), and what the kernel takes of them."""

    tensors: dict[str, Tensor]
    window: tuple[Tensor, ...]
    given: dict[str, Tensor]


def step_inputs(rule: str, rows: int, heads: int, dim: int) -> Step:
    """Fresh random tensors of a decoding step."""
    tensors = {n: x.detach()[:, 0].contiguous() for n, x in inputs(rule, (rows, 1, heads, dim, dim)).items()}
    if rule != "swla":
        return Step(tensors, (), tensors)
    window = tuple(torch.randn(rows, 1, heads, dim, device="cuda") for _ in range(2))
    pairs = {n: torch.cat((x, tensors[n[0]][:, None].to(x.dtype)), 1) for n, x in zip(("keys", "values"), window)}
    return Step(tensors, window, {n: tensors[n] for n in ("q", "v", "g", "gamma")} | pairs)


def verify_step(rule: str, blocks: int, axis: str, inplace: bool) -> dict[str, float]:
    """The relative errors of a decoding step, rows spread over the window, against the fp64 step of PyTorch."""
    dim, rows = 128, 8
    step, state = step_inputs(rule, rows, 4, dim), torch.randn(rows, 4, dim, dim, device="cuda")
    positions = torch.linspace(0, 8191, rows, device="cuda").long()
    active = None if blocks == 1 else ActivationSchedule(blocks, 8192).active(dim, positions)
    wide = {n: x.double() for n, x in step.tensors.items()}
    held = SWLAState(*(x.double() for x in (state, *step.window))) if step.window else state.double()
    out, right = getattr(recurrent, f"{rule}_step")(**wide, state=held, active=active, axis=axis)
    found = getattr(ours, f"{rule}_step")(**step.given, state=state, active=active, axis=axis, inplace=inplace)
    return {n: error(a, b) for n, a, b in zip(("out", "state"), found, (out, getattr(right, "matrix", right)))}


def check(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Verify cases, a line each; a row with `right` for each, or with `refused` where a peer says why it does not run."""
    rows = []
    for number, case in enumerate(cases):
        torch.manual_seed(number)
        row = {n: str(x) if isinstance(x, torch.dtype) else x for n, x in asdict(case).items()}
        brief = {n: x for n, x in row.items() if x not in (None, False)}
        try:
            errors = verify(case)
        except Exception as reason:
            if case.who == "ours":
                raise
            said = f"{type(reason).__name__}: {' '.join(str(reason).split())}"
            right = isinstance(reason, ValueError)  # a refusal before work is lost, and not a failure in the middle of it
            rows.append({**row, "refused": said, "right": right})
            print(f"{'refused' if right else 'WRONG'} {brief}: {said[:300]}", flush=True)
        else:
            rows.append(_judged(row, errors, LIMITS[case.dtype], str(brief)))
    return rows


def check_steps(rules: Sequence[str]) -> list[dict[str, Any]]:
    """As `check`, for the decoding steps."""
    rows = []
    for rule in rules:
        for blocks, axis in GATES:
            for inplace in (False, True):
                row = {"rule": rule, "step": True, "blocks": blocks, "axis": axis, "inplace": inplace, "who": "ours"}
                rows.append(_judged(row, verify_step(rule, blocks, axis, inplace), LIMITS[torch.bfloat16], f"step {row}"))
    return rows


def _judged(row: dict[str, Any], errors: dict[str, float], limit: float, name: str) -> dict[str, Any]:
    right = all(x < limit for x in errors.values())  # NaN is not
    worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else 1e9)
    print(f"{'ok ' if right else 'WRONG'} {worst} {errors[worst]:.1e} {name}", flush=True)
    if not right:
        print({n: f"{x:.1e}" for n, x in errors.items()}, flush=True)
    return {**row, "errors": errors, "right": right}
