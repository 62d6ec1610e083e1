# ruff: noqa: ANN001 -- the fake implementations repeat the signature above them
"""The linear memories' chunkwise core on Triton: one opaque operation for every rule, forward and backward, and its launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
import triton
from torch import Tensor

from proteus_lm.ops.triton import backward, forward, hopper, shared_memory
from proteus_lm.ops.triton.plan import TILE, Plan, build, capacity, regular
from proteus_lm.ops.triton.shape import INTERPRETED, RULES, Shape, floor, shape_of

# Launching a kernel is outside what its signature says.
_PREPARE, _SCAN, _REVERSE, _GRADIENTS, _REOPENED = cast(
    "tuple[Any, Any, Any, Any, Any]",
    (forward.prepare, forward.scan, backward.reverse, backward.gradients, backward.reopened),
)
PREFETCHES = not INTERPRETED and torch.version.hip is None  # by an instruction of NVIDIA's


def _plan(
    s: Shape,
    active: Tensor | None,
    segments: Sequence[int] | None,
    cu_seqlens: Tensor | None,
    blocks: int,
    device: torch.device,
) -> Plan:
    dim = (s.keys if s.key_gate else s.values) if s.key_gate or s.value_gate else TILE
    if active is None and cu_seqlens is None:
        whole = tuple(segments) if segments is not None and blocks > 1 else (0, s.length, dim)
        return regular(s.rows, s.length, whole, dim, s.chunk, device)
    bounds = torch.arange(s.rows + 1, device=device) * s.length if cu_seqlens is None else cu_seqlens
    flat = None if active is None else active.expand(s.rows, s.length).reshape(-1)
    return build(bounds, flat, s.tokens, dim, s.chunk, _chunks(s, active, segments, cu_seqlens, blocks))


def _chunks(s: Shape, active: Tensor | None, segments: Sequence[int] | None, cu_seqlens: Tensor | None, blocks: int) -> int:
    if active is None and cu_seqlens is None and (segments is None or blocks == 1):
        segments = (0, s.length, 0)
    return capacity(s.tokens, s.documents, blocks, None if cu_seqlens is not None else segments, s.chunk)


def _flags(s: Shape, g: Tensor | None) -> dict[str, Any]:
    return {"DELTA": s.delta, "HAS_G": g is not None, "HAS_P": s.with_p, "DECAYED": RULES[s.rule][1], "WINDOW": s.window}


def _gate(s: Shape) -> dict[str, Any]:
    # For fp32 inputs. One tf32 product after another loses 1.5e-3 to 3.5e-3 (measured); split in three, 1e-6.
    precision = "ieee" if INTERPRETED else "tf32x3"
    return {"KEY": s.key_gate, "ALIGN": s.align, "PRECISION": precision}


@cache
def _stages(keys: int, chunk: int, half: bool, device: torch.device) -> int:
    """Stages of the walks' pipeline: three, two chunks ahead of their use, where the device has the 226 KiB that Comba's take; for
    more than 128 key rows two, of chunks of 32, where it has 128 KiB."""
    if not half or (keys > 128 and chunk > 32):
        return 1
    most, least, kib = (2, 1, 128) if keys > 128 else (3, 2, 226)
    return most if INTERPRETED or shared_memory(device) >= kib * 1024 else least


def _walk(s: Shape, device: torch.device) -> dict[str, Any]:
    return {
        "H": s.heads,
        "K": s.keys,
        "V": s.values,
        "C": s.chunk,
        "KT": s.key_tile,
        "NK": s.key_tiles,
        "BV": s.value_tile,
        "TILES": s.tiles,
        "DELTA": s.delta,
        "HAS_P": s.with_p,
        "VALUE": s.value_gate,
        "WINDOW": s.window,
        **_gate(s),
        "STAGES": _stages(s.keys, s.chunk, s.half, device),
        "num_warps": 8 if s.value_tile == 128 else 4,
    }


@torch.library.custom_op("proteus_triton::linear", mutates_args=())
def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    active: Tensor | None,
    cu_seqlens: Tensor | None,
    segments: Sequence[int] | None,
    blocks: int,
    rule: str,
    axis: str,
    scale: float,
    output_final_state: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The whole forward. All of q, k, v, p in one type, contiguous; initial_state fp32 (N, H, K, V).

    Args:
        beta: (B, T, H); for swla its gamma, (B, T, H, 2).
        active: int (1 or B, T), open coordinates, where the host does not know them; else None.
        segments: flat (first token, past the last, open) of every stage where all rows agree; None for all open.
        save: keep what the backward needs.

    Returns:
        out, final state, then gates, solve, attend, fresh, states, chunks, documents (see `forward`); empty where not asked for.
    """
    s = shape_of(rule, q, v, p, cu_seqlens, axis, blocks, save)
    plan = _plan(s, active, segments, cu_seqlens, blocks, q.device)
    n, delta = len(plan.chunks), s.delta
    f32 = {"device": q.device, "dtype": torch.float32}
    gates = torch.empty(n, s.heads, 6, s.chunk, **f32)
    attend = q.new_empty(n, s.heads, s.chunk, s.chunk)
    solve = torch.empty_like(attend) if delta else q.new_empty(0)
    out = torch.empty_like(v)
    fresh = q.new_empty(n, s.heads, s.values, s.chunk) if save and delta else q.new_empty(0)
    states = q.new_empty(n, s.heads, s.values, s.keys) if save else q.new_empty(0)
    final = torch.empty(s.documents, s.heads, s.keys, s.values, **f32) if output_final_state else torch.empty(0, **f32)
    _PREPARE[(n * s.heads,)](
        *(q, k, p, g, beta, plan.chunks, gates, solve, attend, scale),
        H=s.heads,
        K=s.keys,
        C=s.chunk,
        KT=min(128 if s.half else 64, s.key_tile * s.key_tiles),
        D=2 if s.half else 16,
        **_flags(s, g),
        **_gate(s),
        HALF=s.half,
        FLOOR=floor(q.dtype),
        num_warps=4,
    )
    inputs = (q, k, k if p is None else p, v, gates, solve, attend, plan.chunks, plan.documents)
    outputs = (initial_state, out, fresh, states, final)
    if not s.window and hopper.fits(s, q.device, q, k, p, v):
        given = {"has_initial": initial_state is not None, "has_final": output_final_state, "save": save}
        hopper.scan(s, *inputs, *outputs, s.documents, **given)
    else:
        _SCAN[(s.documents * s.heads * -(-s.values // s.value_tile),)](
            *(*inputs, *outputs, scale, s.documents),
            HAS_INITIAL=initial_state is not None,
            HAS_FINAL=output_final_state,
            SAVE=save,
            HALF=s.half,
            **_walk(s, q.device),
        )
    return out, final, gates, solve, attend, fresh, states, plan.chunks, plan.documents


@linear.register_fake
def _(q, k, v, p, g, beta, initial_state, active, cu_seqlens, segments, blocks, rule, axis, scale, output_final_state, save):
    s = shape_of(rule, q, v, p, cu_seqlens, axis, blocks, save)
    n, delta = _chunks(s, active, segments, cu_seqlens, blocks), s.delta
    f32 = {"device": q.device, "dtype": torch.float32}
    i32 = {"device": q.device, "dtype": torch.int32}
    square = q.new_empty(n, s.heads, s.chunk, s.chunk)
    return (
        torch.empty_like(v),
        torch.empty(s.documents, s.heads, s.keys, s.values, **f32) if output_final_state else torch.empty(0, **f32),
        torch.empty(n, s.heads, 6, s.chunk, **f32),
        torch.empty_like(square) if delta else q.new_empty(0),
        square,
        q.new_empty(n, s.heads, s.values, s.chunk) if save and delta else q.new_empty(0),
        q.new_empty(n, s.heads, s.values, s.keys) if save else q.new_empty(0),
        torch.empty(n, device=q.device, dtype=torch.int64),
        torch.empty(s.documents, 2 + s.tiles, **i32),
    )


@torch.library.custom_op("proteus_triton::linear_backward", mutates_args=())
def linear_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    has_initial: bool,
    gates: Tensor,
    solve: Tensor,
    attend: Tensor,
    fresh: Tensor,
    states: Tensor,
    chunks: Tensor,
    documents: Tensor,
    do: Tensor,
    dfinal: Tensor | None,
    cu_seqlens: Tensor | None,
    blocks: int,
    rule: str,
    axis: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, p, g, beta and the initial state; empty where there was no such input."""
    s = shape_of(rule, q, v, p, cu_seqlens, axis, blocks, True)
    f32 = {"device": q.device, "dtype": torch.float32}
    empty = torch.empty(0, **f32)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dp = torch.empty_like(k) if p is not None else q.new_empty(0)
    dstates = torch.empty_like(states)
    dinitial = torch.empty(s.documents, s.heads, s.keys, s.values, **f32) if has_initial else torch.empty_like(empty)
    asked = k if p is None else p
    inputs = (q, k, asked, gates, solve, attend, chunks, documents, do, dfinal)
    fast = hopper.fits(s, q.device, q, k, p, v, do)
    if fast and not s.window:
        given = {"has_initial": has_initial, "has_final": dfinal is not None}
        hopper.reverse(s, *inputs, dv, dstates, dinitial, s.documents, **given)
    else:
        _REVERSE[(s.documents * s.heads * -(-s.values // s.value_tile),)](
            *(*inputs, dv, dstates, dinitial, scale, s.documents),
            HAS_INITIAL=has_initial,
            HAS_FINAL=dfinal is not None,
            **_walk(s, q.device),
        )
    fast = fast and s.values <= 128
    tile = min(s.key_tile, 64 if s.half else 32)
    tiles = -(-s.keys // tile)
    parts = 1 if fast else tiles  # of dg and dgamma, to be summed
    make = torch.zeros if s.window or (s.key_gate and not fast) else torch.empty  # what the kernel leaves alone
    dg = make(parts, s.rows, s.length, s.heads, **f32) if g is not None else empty
    dbeta = make(*([parts] if s.window else []), *beta.shape, **f32) if beta is not None else torch.empty_like(empty)
    inputs = (q, k, asked, gates, chunks, do, fresh if s.delta else v, states, dstates)
    outputs = (dq, dk, dk if p is None else dp, dv, dg, dbeta, scale)
    if fast:
        hopper.gradients(s, len(chunks), *inputs, *outputs, has_g=g is not None)
    else:
        _GRADIENTS[(len(chunks) * s.heads * tiles,)](
            *(*inputs, *outputs, s.tokens * s.heads),
            H=s.heads,
            K=s.keys,
            V=s.values,
            C=s.chunk,
            KT=tile,
            NT=tiles,
            BV=min(triton.next_power_of_2(max(16, s.values)), 128 if s.values <= 128 and s.half else 64),
            VALUE=s.value_gate,
            FLOOR=floor(q.dtype),
            BRING=PREFETCHES and not s.window,  # for sliding-window attention 0.81 ms with it, 0.77 without (H200)
            num_warps=4,
            **_flags(s, g),
            **_gate(s),
        )
    dg = (dg[0] if parts == 1 else dg.sum(0)) if g is not None else dg
    dbeta = (dbeta[0] if parts == 1 else dbeta.sum(0)) if s.window else dbeta
    if s.window and blocks > 1:
        _REOPENED[(len(chunks) * s.heads,)](
            *(k, v, g, beta, chunks, states, dstates, dk, dv, dg, dbeta),
            H=s.heads,
            K=s.keys,
            V=s.values,
            BK=triton.next_power_of_2(s.keys),
            BV=32,
            KEY=s.key_gate,
            CARRIED=has_initial,
            num_warps=4,
        )
    return dq, dk, dv, dp, dg, dbeta, dinitial


@linear_backward.register_fake
def _(
    q,
    k,
    v,
    p,
    g,
    beta,
    has_initial,
    gates,
    solve,
    attend,
    fresh,
    states,
    chunks,
    documents,
    do,
    dfinal,
    cu_seqlens,
    blocks,
    rule,
    axis,
    scale,
):
    s = shape_of(rule, q, v, p, cu_seqlens, axis, blocks, True)
    f32 = {"device": q.device, "dtype": torch.float32}
    row = (s.rows, s.length, s.heads)
    return (
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
        torch.empty_like(k) if p is not None else q.new_empty(0),
        torch.empty(row if g is not None else (0,), **f32),
        torch.empty(beta.shape if beta is not None else (0,), **f32),
        torch.empty((s.documents, s.heads, s.keys, s.values) if has_initial else (0,), **f32),
    )


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, p, g, beta, initial, _, cu_seqlens, _, blocks, rule, axis, scale, has_final, _ = inputs
    ctx.save_for_backward(q, k, v, p, g, beta, cu_seqlens, *output[2:])
    ctx.rest = (blocks, rule, axis, scale)
    ctx.has_initial, ctx.has_final = initial is not None, has_final
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: Tensor) -> tuple:
    q, k, v, p, g, beta, cu_seqlens, *saved = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(v)
    dfinal = dfinal.float().contiguous() if ctx.has_final and dfinal is not None else None
    dq, dk, dv, dp, dg, dbeta, dinitial = linear_backward(
        *(q, k, v, p, g, beta, ctx.has_initial, *saved, do.to(v.dtype).contiguous(), dfinal, cu_seqlens, *ctx.rest)
    )
    return (
        *(dq, dk, dv, dp if p is not None else None),
        dg.to(g.dtype) if g is not None else None,
        dbeta.to(beta.dtype) if beta is not None else None,
        dinitial if ctx.has_initial else None,
        *(None,) * 9,
    )


linear.register_autograd(_backward, setup_context=_setup)
