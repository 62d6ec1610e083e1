# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""Launches: buffers of one segment of chunks, and the kernels over the segments, forwards and backwards.

Memory is the price of working out the reads of many chunks at once, so the sequence is cut into segments. Their buffers are used
again and again. For the backward either the start states of all chunks are kept as the products use them, where they fit in
`KEPT_BYTES`: what the writes left behind is then worked out for all chunks of a segment at once. Or only the state between segments
(fp32), and the backward walks each segment's writes once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from proteus_lm.ops.triton_deep._backward import read_backward_kernel, rest_backward_kernel, write_backward_kernel
from proteus_lm.ops.triton_deep._common import VECTORS
from proteus_lm.ops.triton_deep._forward import read_kernel, rows_kernel, write_kernel
from proteus_lm.ops.triton_deep._gates import gates_backward_kernel, gates_kernel, plan_kernel

SEGMENT = 16  # chunks whose start states are held at once
KEPT_BYTES = 2 << 30  # of start states that a call keeps for its backward
# Of each kernel: warps, pipeline stages, and hidden units worked on at once (BH): what a locked block saves comes in these steps.
# With one stage, triton 3.6 miscompiled two of them on Hopper.
LAUNCH = {
    "write": {"num_warps": 8, "num_stages": 2, "BH": 64},
    "rows": {"num_warps": 8, "num_stages": 2, "BH": 64},
    "read": {"num_warps": 4, "num_stages": 2, "BH": 32},
    "read_backward": {"num_warps": 4, "num_stages": 2, "BH": 32},
    "write_backward": {"num_warps": 8, "num_stages": 2, "BH": 64},
    "rest_backward": {"num_warps": 4, "num_stages": 2, "BH": 32},
    "gates_backward": {"BH": 32},
}


class Problem(NamedTuple):
    """Sizes of a call: rows, tokens (a multiple of `chunk`), heads, chunk, D, Dv, hidden units (D for depth 1), depth."""

    rows: int
    tokens: int
    heads: int
    chunk: int
    dk: int
    dv: int
    hidden: int
    depth: int
    function: str
    pre: int
    dtype: torch.dtype
    device: str
    segment: int

    @property
    def chunks(self) -> int:
        return self.tokens // self.chunk

    @property
    def programs(self) -> int:
        return self.rows * self.heads

    @property
    def segments(self) -> list[tuple[int, int]]:
        """(first chunk, chunks) of each segment."""
        return [(a, min(self.segment, self.chunks - a)) for a in range(0, self.chunks, self.segment)]

    @property
    def cells(self) -> int:
        """Numbers in the state of a program."""
        return 2 * self.dv * self.hidden + (2 * self.dk * self.hidden if self.depth == 2 else 0)

    @property
    def square_warps(self) -> int:
        """Warps of a program that holds numbers by slot and slot: 32 a thread of each."""
        return max(1, self.chunk**2 // 1024)

    @property
    def kept(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of what a forward keeps: (segments, programs, segment, cells), or (segments - 1, programs, cells) fp32."""
        shape = (len(self.segments), self.programs, self.segment, self.cells)
        if prod(shape) * self.dtype.itemsize <= KEPT_BYTES:
            return shape, self.dtype
        return (len(self.segments) - 1, self.programs, self.cells), torch.float32

    def options(self, kernel: str, **more: Any) -> dict[str, Any]:
        """Constants and launch options of a kernel with hidden tiles."""
        precision = "tf32" if self.dtype == torch.float32 and self.device == "cuda" else "ieee"
        chosen = LAUNCH[kernel]
        tile = min(chosen["BH"], max(16, triton.next_power_of_2(self.hidden)))
        sizes = {"B": self.chunk, "DK": self.dk, "DV": self.dv, "HID": self.hidden, "DEEP": self.depth == 2, "PREC": precision}
        return {**sizes, **chosen, "BH": tile, **more}


class Plan(NamedTuple):
    """What is open where: `active` int32 (rows or 1, T), and the tables of `_common`; `full` int32 (rows): chunks that end."""

    active: Tensor
    plan: Tensor
    opens: Tensor
    full: Tensor

    def strides(self) -> tuple[int, int]:
        """Steps from row to row in `active` and in the tables; 0 where all rows share one."""
        shared = self.active.shape[0] == 1
        return (0, 0) if shared else (self.active.shape[1], self.plan.shape[1])


def plan_tables(active: Tensor, chunk: int, hidden: int) -> list[Tensor]:
    """The first three of a `Plan`, from the open units of each slot, int64 (rows or 1, T), 0 without a token. One launch."""
    rows, length = active.shape
    chunks = length // chunk
    new = lambda *shape: torch.empty(rows, *shape, device=active.device, dtype=torch.int32)  # noqa: E731
    narrow, plan, opens = new(length), new(chunks, 2), new(chunks, hidden)
    tile = min(64, triton.next_power_of_2(hidden))
    plan_kernel[(chunks, rows)](active.contiguous(), narrow, plan, opens, length, HID=hidden, B=chunk, BH=tile, num_warps=4)
    return [narrow, plan, opens]


class Buffers:
    """What one segment needs between its kernels; see `_common` and `_backward`."""

    def __init__(self, problem: Problem, device: torch.device, *, backward: bool, states: Tensor | None = None) -> None:
        programs, g, b = problem.programs, problem.segment, problem.chunk
        deep = problem.depth == 2

        def new(*shape: int, dtype: torch.dtype = problem.dtype) -> Tensor:
            return torch.empty(programs, *shape, device=device, dtype=dtype)

        wide = torch.float32
        self.mix, self.vec = new(g, b, b, dtype=wide), new(g, VECTORS.value, b, dtype=wide)
        self.passed = new(g, b, b, dtype=wide) if backward else self.mix
        self.shadow = new(g, problem.cells) if states is None else states[0]  # or kept ones, a segment at a time
        self.act, self.err = new(g, b, problem.hidden), new(g, b, problem.dv)
        self.grad = new(g, b, problem.hidden) if deep else self.act
        kept = (g,) if backward else ()
        self.slope = new(*kept, b, problem.hidden) if deep else self.act
        self.bend = new(*kept, b, problem.hidden) if deep and backward else self.act
        if not backward:
            return
        self.to_act = new(g, b, problem.hidden)
        self.to_grad = new(g, b, problem.hidden) if deep else self.to_act
        self.to_state = new(g, problem.cells)
        self.to_err, self.to_k = new(g, b, problem.dv, dtype=wide), new(g, b, problem.dk, dtype=wide)
        self.d_mix, self.d_vec = new(g, b, b, dtype=wide), new(g, VECTORS.value, b, dtype=wide)
        self.unit, self.turned = new(g, 4, problem.hidden, dtype=wide), new(g, 4, b, b)
        self.d_shadow, self.to_z = new(g, problem.cells), new(g, b, problem.hidden)
        self.d_back, self.d_err = new(b, problem.hidden) if deep else self.to_z, new(b, problem.dv)


def _gates(problem: Problem, gates: Sequence[Tensor], plan: Plan, buffers: Buffers, first: int, count: int, keep: bool) -> None:
    gates_kernel[(count, problem.programs)](
        *gates, plan.active, buffers.mix, buffers.passed, buffers.vec,
        first, problem.tokens, problem.heads, problem.segment, plan.strides()[0],
        B=problem.chunk, PRE=problem.pre, KEEP=keep, num_warps=problem.square_warps,
    )  # fmt: skip


def _write(
    problem: Problem,
    tokens: Sequence[Tensor],
    plan: Plan,
    state: Tensor,
    buffers: Buffers,
    first: int,
    count: int,
    keep: bool,
) -> None:
    write_kernel[(problem.programs,)](
        tokens[1], tokens[2], buffers.vec, plan.plan, plan.opens, plan.full, state,
        buffers.shadow, buffers.act, buffers.slope, buffers.grad, buffers.bend, buffers.err,
        first, count, problem.tokens, problem.heads, problem.segment, plan.strides()[1],
        **problem.options("write", ACT=problem.function, KEEP=keep),
    )  # fmt: skip


def forward(
    problem: Problem, tokens: Sequence[Tensor], plan: Plan, state: Tensor, kinds: Sequence[int], save: bool
) -> tuple[Tensor, Tensor]:
    """y (rows, T, H, Dv), and what the backward needs, see `Problem.kept`; nothing without `save`.

    Args:
        tokens: q, k, v, theta, alpha, eta, contiguous.
        state: fp32 (programs, cells): W1, S1, W2, S2 of each program; brought to the last boundary in place.
        kinds: of chunks that there may be: 1 for mixed ones, 0 for others.
    """
    q, k, v, *gates = tokens
    y = torch.empty_like(v)
    shape, dtype = problem.kept
    saved = torch.empty(shape if save else (0,), dtype=dtype, device=q.device)
    whole = saved.dim() == 4
    buffers = Buffers(problem, q.device, backward=False, states=saved if whole else None)
    for number, (first, count) in enumerate(problem.segments):
        if whole:
            buffers.shadow = saved[number]
        elif save and number:
            saved[number - 1].copy_(state)
        _gates(problem, gates, plan, buffers, first, count, keep=False)
        _write(problem, tokens, plan, state, buffers, first, count, keep=False)
        for mixed in kinds:
            read_kernel[(count, problem.programs)](
                q, k, buffers.mix, buffers.vec, plan.plan, plan.opens, buffers.shadow, buffers.act, buffers.grad, buffers.err, y,
                first, problem.tokens, problem.heads, problem.segment, plan.strides()[1],
                **problem.options("read", ACT=problem.function, PRE=problem.pre, MIXED=mixed),
            )  # fmt: skip
    return y, saved


def backward(
    problem: Problem,
    tokens: Sequence[Tensor],
    plan: Plan,
    initial: Tensor,
    saved: Tensor,
    dy: Tensor,
    d_state: Tensor,
    kinds: Sequence[int],
) -> list[Tensor]:
    """Gradients to the tokens, in their types (gates: fp32).

    Args:
        initial, saved: the state at the start (unused where start states were kept), what `forward` saved; both stay as they are.
        d_state: gradients of the state at the end, brought to those of the start in place.
        kinds: as in `forward`.
    """
    q, k, v, *gates = tokens
    dq, dk, dv = (torch.zeros_like(t) if problem.depth == 1 else torch.empty_like(t) for t in (q, k, v))
    d_gates = [torch.empty(t.shape, device=t.device, dtype=torch.float32) for t in gates]
    whole = saved.dim() == 4
    buffers = Buffers(problem, q.device, backward=True, states=saved if whole else None)
    strides = plan.strides()
    sizes = (problem.tokens, problem.heads, problem.segment)
    for number, (first, count) in reversed(list(enumerate(problem.segments))):
        grid = (count, problem.programs)
        _gates(problem, gates, plan, buffers, first, count, keep=True)
        if whole:
            buffers.shadow = saved[number]
            rows_kernel[grid](
                k, v, plan.plan, plan.opens, buffers.shadow, buffers.act, buffers.slope, buffers.grad, buffers.bend, buffers.err,
                first, *sizes, strides[1], **problem.options("rows", ACT=problem.function),
            )  # fmt: skip
        else:
            state = (saved[number - 1] if number else initial).clone()
            _write(problem, tokens, plan, state, buffers, first, count, keep=True)
        for mixed in kinds:
            read_backward_kernel[grid](
                q, k, dy, buffers.mix, buffers.vec, plan.plan, plan.opens, buffers.shadow, buffers.act, buffers.grad, buffers.err,
                dq, buffers.to_act, buffers.to_grad, buffers.to_state, buffers.to_err, buffers.to_k, buffers.d_mix, buffers.d_vec,
                buffers.unit, buffers.turned, buffers.to_z, first, *sizes, strides[1],
                **problem.options("read_backward", ACT=problem.function, PRE=problem.pre, MIXED=mixed),
            )  # fmt: skip
        write_backward_kernel[(problem.programs,)](
            k, buffers.vec, plan.plan, plan.opens, plan.full, buffers.shadow, buffers.act, buffers.slope, buffers.bend, buffers.err,
            buffers.to_act, buffers.to_grad, buffers.to_state, buffers.to_err, d_state, buffers.d_shadow, dk, dv,
            buffers.d_vec, buffers.to_z, buffers.d_back, buffers.d_err, first, count, *sizes, strides[1],
            **problem.options("write_backward"),
        )  # fmt: skip
        rest_backward_kernel[grid](
            k, buffers.vec, plan.plan, plan.opens, plan.full, buffers.shadow, buffers.d_shadow, buffers.grad, buffers.to_z,
            buffers.to_k, dk, buffers.d_vec, buffers.unit, first, *sizes, strides[1],
            **problem.options("rest_backward"),
        )  # fmt: skip
        gates_backward_kernel[grid](
            *gates, plan.active, buffers.mix, buffers.passed, buffers.d_mix, buffers.d_vec, buffers.unit, plan.plan, plan.opens,
            *d_gates, first, *sizes, *strides, HID=problem.hidden, B=problem.chunk,
            PRE=problem.pre, num_warps=problem.square_warps, **LAUNCH["gates_backward"],
        )  # fmt: skip
    return [dq, dk, dv, *d_gates]
