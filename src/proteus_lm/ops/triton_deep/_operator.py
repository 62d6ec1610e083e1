# ruff: noqa: ANN001 -- the fake implementations repeat the signature above them
"""The kernels as one operator that torch.compile does not look into, and its gradient as another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from proteus_lm.ops.triton_deep._launch import SEGMENT, Problem, backward, forward, make_plan, pack, unpack


def problem_of(tokens: list[Tensor], weights: list[Tensor], chunk: int, read: str, function: str) -> Problem:
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
        weights[-1].shape[-2],
        len(weights),
        function,
        int(read == "pre"),
        q.dtype,
        q.device.type,
        segment,
    )


@torch.library.custom_op("proteus_lm::titans_kernels", mutates_args=())
def titans_kernels(
    tokens: list[Tensor],
    weights: list[Tensor],
    momentum: list[Tensor],
    active: Tensor,
    full: Tensor,
    chunk: int,
    read: str,
    memory_activation: str,
    save: bool,
) -> list[Tensor]:
    """Read and write an MLP memory of one or two layers along rows that start on the chunk grid.

    Args:
        tokens: q, k (N, T, H, D), v (N, T, H, Dv), of one type (fp32 or bf16); theta, alpha, eta (N, T, H). T is whole chunks.
        weights, momentum: fp32 (N, H, in, out) each.
        active: int64 (N or 1, T), open units at each slot, 0 for a slot without a token.  full: int64 (N), chunks that end.
        save: keep what the backward needs.

    Returns:
        y (N, T, H, Dv), weights and momentum at each row's last boundary, and the states kept (`Problem.kept`).
    """
    problem = problem_of(tokens, weights, chunk, read, memory_activation)
    plan = make_plan(active, full, problem)
    state = pack([*weights, *momentum])
    y, saved = forward(problem, [t.contiguous() for t in tokens], plan, state, save)
    return [y, *unpack(state, [*weights, *momentum]), saved]


@titans_kernels.register_fake
def _(tokens, weights, momentum, active, full, chunk, read, memory_activation, save):
    problem = problem_of(tokens, weights, chunk, read, memory_activation)
    state = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*weights, *momentum)]
    shape, dtype = problem.kept
    y = torch.empty_like(tokens[2], memory_format=torch.contiguous_format)
    return [y, *state, tokens[0].new_empty(shape if save else (0,), dtype=dtype)]


@torch.library.custom_op("proteus_lm::titans_kernels_backward", mutates_args=())
def titans_kernels_backward(
    grads: list[Tensor],
    tokens: list[Tensor],
    weights: list[Tensor],
    momentum: list[Tensor],
    saved: Tensor,
    active: Tensor,
    full: Tensor,
    chunk: int,
    read: str,
    memory_activation: str,
) -> list[Tensor]:
    """Gradients to `tokens`, `weights` and `momentum` of `titans_kernels`, in this order, from those to y and to the end state."""
    problem = problem_of(tokens, weights, chunk, read, memory_activation)
    plan = make_plan(active, full, problem)
    d_state = pack(grads[1:])
    tokens = [t.contiguous() for t in tokens]
    out = backward(problem, tokens, plan, pack([*weights, *momentum]), saved, grads[0].contiguous(), d_state)
    return [*(g.to(t.dtype) for g, t in zip(out, tokens)), *unpack(d_state, [*weights, *momentum])]


@titans_kernels_backward.register_fake
def _(grads, tokens, weights, momentum, saved, active, full, chunk, read, memory_activation):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*tokens, *weights, *momentum)]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tokens, weights, momentum, active, full, *ctx.options = inputs
    lists = [tokens, weights, momentum]
    ctx.counts = [len(part) for part in lists]
    ctx.save_for_backward(*(t for part in lists for t in part), output[-1], active, full)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple:
    flat = list(ctx.saved_tensors)
    tokens, weights, momentum = ([flat.pop(0) for _ in range(count)] for count in ctx.counts)
    given = [torch.zeros_like(t) if g is None else g for g, t in zip(grads[:-1], [tokens[2], *weights, *momentum])]
    out = iter(titans_kernels_backward(given, tokens, weights, momentum, *flat, *ctx.options[:3]))
    return (*([next(out) for _ in range(count)] for count in ctx.counts), *[None] * 6)


titans_kernels.register_autograd(_gradients, setup_context=_setup)
