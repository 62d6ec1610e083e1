# ruff: noqa: ANN001 -- the fake implementations repeat the signature above them
"""The kernels as operators that torch.compile does not look into: what opens where, the memory, and its gradient.

The state goes in and comes out as one tensor, in the kernels' own order: so a walk over segments neither packs nor unpacks it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from proteus_lm.ops.triton_deep._launch import SEGMENT, Plan, Problem, backward, forward, plan_tables

PLAIN, MIXED = 1, 2
"""Kinds of chunks that a call may have, added up: all units open before the chunk, or some within it."""


def problem_of(tokens: list[Tensor], plan: list[Tensor], depth: int, chunk: int, read: str, function: str) -> Problem:
    """Sizes from the tensors of a call; q, k, v of one type, fp32 or bf16, which is that of the matrix products."""
    q, _, v = tokens[:3]
    rows, length, heads, dk = q.shape
    segment = min(SEGMENT, length // chunk)
    return Problem(
        rows,
        length,
        heads,
        chunk,
        dk,
        v.shape[3],
        plan[2].shape[2],
        depth,
        function,
        int(read == "pre"),
        q.dtype,
        q.device.type,
        segment,
    )


def _kinds(bits: int) -> list[int]:
    return [mixed for mixed, bit in enumerate((PLAIN, MIXED)) if bits & bit]


@torch.library.custom_op("proteus_lm::titans_plan", mutates_args=())
def titans_plan(active: Tensor, chunk: int, hidden: int) -> list[Tensor]:
    """The tables of `_launch.Plan` from the open units of each slot, int64 (N or 1, T), 0 for a slot without a token."""
    return plan_tables(active, chunk, hidden)


@titans_plan.register_fake
def _(active, chunk, hidden):
    rows, length = active.shape
    shapes = (length,), (length // chunk, 2), (length // chunk, hidden)
    return [active.new_empty(rows, *shape, dtype=torch.int32) for shape in shapes]


@torch.library.custom_op("proteus_lm::titans_kernels", mutates_args=())
def titans_kernels(
    tokens: list[Tensor],
    state: Tensor,
    plan: list[Tensor],
    depth: int,
    chunk: int,
    read: str,
    memory_activation: str,
    kinds: int,
    save: bool,
) -> list[Tensor]:
    """Read and write an MLP memory of one or two layers along rows that start on the chunk grid.

    Args:
        tokens: q, k (N, T, H, D), v (N, T, H, Dv), of one type (fp32 or bf16); theta, alpha, eta (N, T, H). T is whole chunks.
        state: fp32 (N * H, cells): W1, S1, W2, S2 of each row and head.
        plan: as `_launch.Plan`.
        kinds: PLAIN, MIXED or their sum.
        save: keep what the backward needs.

    Returns:
        y (N, T, H, Dv), the state at each row's last boundary, and the states kept (`Problem.kept`).
    """
    problem = problem_of(tokens, plan, depth, chunk, read, memory_activation)
    end = state.clone(memory_format=torch.contiguous_format)
    y, saved = forward(problem, [t.contiguous() for t in tokens], Plan(*plan), end, _kinds(kinds), save)
    return [y, end, saved]


@titans_kernels.register_fake
def _(tokens, state, plan, depth, chunk, read, memory_activation, kinds, save):
    shape, dtype = problem_of(tokens, plan, depth, chunk, read, memory_activation).kept
    y, end = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (tokens[2], state))
    return [y, end, tokens[0].new_empty(shape if save else (0,), dtype=dtype)]


@torch.library.custom_op("proteus_lm::titans_kernels_backward", mutates_args=())
def titans_kernels_backward(
    dy: Tensor | None,
    d_end: Tensor | None,
    tokens: list[Tensor],
    state: Tensor,
    saved: Tensor,
    plan: list[Tensor],
    depth: int,
    chunk: int,
    read: str,
    memory_activation: str,
    kinds: int,
) -> list[Tensor]:
    """Gradients to `tokens` and `state` of `titans_kernels`, in this order, from those to y and to the end state (None: zero)."""
    problem = problem_of(tokens, plan, depth, chunk, read, memory_activation)
    tokens = [t.contiguous() for t in tokens]
    dy = torch.zeros_like(tokens[2]) if dy is None else dy.contiguous()
    shape = problem.programs, problem.cells
    d_state = saved.new_zeros(shape, dtype=torch.float32) if d_end is None else d_end.clone(memory_format=torch.contiguous_format)
    out = backward(problem, tokens, Plan(*plan), state, saved, dy, d_state, _kinds(kinds))
    return [*(g.to(t.dtype) for g, t in zip(out, tokens)), d_state]


@titans_kernels_backward.register_fake
def _(dy, d_end, tokens, state, saved, plan, depth, chunk, read, memory_activation, kinds):
    problem = problem_of(tokens, plan, depth, chunk, read, memory_activation)
    made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tokens]
    return [*made, saved.new_empty(problem.programs, problem.cells, dtype=torch.float32)]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tokens, state, plan, *ctx.options, _ = inputs
    saved = output[-1]
    walks = saved.dim() != 4  # start states that were kept make the start of no use
    ctx.save_for_backward(*tokens, state if walks else state.new_empty(0), saved, *plan)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple:
    flat = list(ctx.saved_tensors)
    tokens, state, saved, plan = flat[:6], flat[6], flat[7], flat[8:]
    out = titans_kernels_backward(grads[0], grads[1], tokens, state, saved, plan, *ctx.options)
    return out[:6], out[6], [None] * len(plan), *[None] * 6


titans_kernels.register_autograd(_gradients, setup_context=_setup)
