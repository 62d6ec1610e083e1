# ruff: noqa: ANN001, RUF005 -- Triton's constants have no annotation that a reader needs; it unpacks no tuples
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
"""Short causal depthwise convolution with SiLU, its result cut into parts that are each contiguous.

Forward: tiles of tokens by channels, a shifted load a tap (all but one of them from the cache). Backward: a program walks along a
chunk of tokens with the last inputs, the gradients still to be written and the sums of the weights' gradients in registers, so that
each number is read once and written once; the activation is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from proteus_lm.ops.triton_neighbours.norms import processors, ready

if TYPE_CHECKING:
    from proteus_lm.ops.triton_neighbours import Documents

FORWARD = {"BT": 16, "BC": 128, "num_warps": 4}
"""Tokens and channels of a program, and its warps: many small programs, so that some load while others compute."""
BACKWARD = {"AHEAD": 3, "BC": 128, "num_warps": 1}
"""Tokens loaded ahead, channels of a program, and its warps. 119 registers: 17 programs a multiprocessor, with 26 KB on the way."""
CHUNK, SHORT = 64, 16
"""Tokens of a program of the backward pass; fewer where there would be less than BUSY programs a multiprocessor."""
BUSY = 8


@triton.jit
def _part(block, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, BC: tl.constexpr):
    """Of a block of channels: its part, the part's width, its first channel, and the block's channels within the part."""
    n0: tl.constexpr = (W0 + BC - 1) // BC
    n1: tl.constexpr = (W1 + BC - 1) // BC
    part = (block >= n0).to(tl.int32) + (block >= n0 + n1).to(tl.int32)
    width = tl.where(part == 0, W0, tl.where(part == 1, W1, W2))
    first = tl.where(part == 0, 0, tl.where(part == 1, W0, W0 + W1))
    within = block - tl.where(part == 0, 0, tl.where(part == 1, n0, n0 + n1))
    return part, width, first, within * BC + tl.arange(0, BC)


@triton.jit
def _silu_slope(u):
    """Derivative of u sigmoid(u)."""
    s = tl.sigmoid(u)
    return s * (1 + u * (1 - s))


@triton.jit(do_not_specialize=["length"])
def conv_forward(
    x, weight, state, document, bounds, y0, y1, y2, length,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, SIZE: tl.constexpr,
    STATE: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """y = SiLU(sum_j w_j x_{t-j}): BT tokens of one row, BC channels of one part."""
    C: tl.constexpr = W0 + W1 + W2
    blocks: tl.constexpr = (W0 + BC - 1) // BC + (W1 + BC - 1) // BC + (W2 + BC - 1) // BC
    past: tl.constexpr = SIZE - 1
    part, width, first, within = _part(tl.program_id(0) % blocks, W0, W1, W2, BC)
    tiles = (length + BT - 1) // BT
    row = (tl.program_id(0) // blocks // tiles).to(tl.int64)
    t = (tl.program_id(0) // blocks % tiles) * BT + tl.arange(0, BT)
    here, real = within < width, t < length
    c = first + within
    start = tl.zeros([BT], tl.int32)
    number = start + row
    if PACKED:
        number = tl.load(document + t, mask=real, other=0).to(tl.int64)
        start = tl.load(bounds + number)
    u = tl.zeros([BT, BC], tl.float32)
    for j in tl.static_range(SIZE):
        inside = real & (t - j >= start)
        b_x = tl.load(x + (row * length + t - j)[:, None] * C + c[None, :], mask=inside[:, None] & here[None, :], other=0.0)
        if STATE and j > 0:
            slot = number * past + past + t - j - start
            before = real & (t - j < start)
            b_x += tl.load(state + slot[:, None] * C + c[None, :], mask=before[:, None] & here[None, :], other=0.0)
        u += b_x.to(tl.float32) * tl.load(weight + c * SIZE + past - j, mask=here, other=0.0).to(tl.float32)[None, :]
    y = y0
    if part == 1:
        y = y1
    if part == 2:
        y = y2
    at = (row * length + t)[:, None] * width + within[None, :]
    tl.store(y + at, (u * tl.sigmoid(u)).to(y.dtype.element_ty), mask=real[:, None] & here[None, :])


@triton.jit(do_not_specialize=["length"])
def conv_backward(
    x, weight, state, document, bounds, dy0, dy1, dy2, dx, sums, length,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, SIZE: tl.constexpr,
    STATE: tl.constexpr, PACKED: tl.constexpr, L: tl.constexpr, AHEAD: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """dx of L tokens of one row, and their share of the gradient of the weights, to `sums` (rows * chunks, C, SIZE) fp32."""
    C: tl.constexpr = W0 + W1 + W2
    blocks: tl.constexpr = (W0 + BC - 1) // BC + (W1 + BC - 1) // BC + (W2 + BC - 1) // BC
    past: tl.constexpr = SIZE - 1
    part, width, first, within = _part(tl.program_id(0) % blocks, W0, W1, W2, BC)
    chunk = tl.program_id(0) // blocks
    chunks = (length + L - 1) // L
    row = (chunk // chunks).to(tl.int64)
    begin = (chunk % chunks) * L
    end = tl.minimum(begin + L, length)
    here = within < width
    c = first + within
    dy = dy0
    if part == 1:
        dy = dy1
    if part == 2:
        dy = dy2
    x_row = x + row * length * C + c
    dy_row = dy + row * length * width + within
    dx_row = dx + row * length * C + c
    zero = tl.zeros([BC], tl.float32)
    lanes = tl.zeros([BC], tl.int32)  # the interpreter wants conditions on tokens as blocks
    w, total, window, waiting = (), (), (), ()
    for j in tl.static_range(SIZE):
        w = w + (tl.load(weight + c * SIZE + past - j, mask=here, other=0.0).to(tl.float32),)
        total = total + (zero,)
    for j in tl.static_range(past):  # the inputs before the chunk, the newest first
        t = lanes + begin - 1 - j
        b_x = tl.load(x_row + t.to(tl.int64) * C, mask=here & (t >= 0), other=0.0).to(tl.float32)
        if STATE and not PACKED:
            slot = row * past + past + t
            b_x += tl.load(state + slot * C + c, mask=here & (t < 0), other=0.0).to(tl.float32)
        window = window + (b_x,)
        waiting = waiting + (zero,)
    # Loaded some tokens ahead, or the walk would wait for memory at each; unrolled as far, or it would wait to pass them on.
    last = tl.minimum(end + past, length)
    next_x, next_dy = (), ()
    for j in tl.static_range(AHEAD):
        t = lanes + begin + j
        next_x = next_x + (tl.load(x_row + t.to(tl.int64) * C, mask=here & (t < last), other=0.0),)
        next_dy = next_dy + (tl.load(dy_row + t.to(tl.int64) * width, mask=here & (t < last), other=0.0),)
    for step in tl.range(0, end + past - begin, loop_unroll_factor=AHEAD):
        now, d = next_x[0].to(tl.float32), next_dy[0].to(tl.float32)
        t = lanes + begin + step + AHEAD
        next_x = next_x[1:] + (tl.load(x_row + t.to(tl.int64) * C, mask=here & (t < last), other=0.0),)
        next_dy = next_dy[1:] + (tl.load(dy_row + t.to(tl.int64) * width, mask=here & (t < last), other=0.0),)
        t = lanes + begin + step
        seen = (now,) + window
        window = seen[:past]
        number, start = lanes, lanes
        if PACKED:
            place = tl.minimum(begin + step, length - 1)
            number += tl.load(document + place)
            start += tl.load(bounds + tl.load(document + place))
        taps = (now,)
        u = w[0] * now
        for j in tl.static_range(1, SIZE):
            tap = seen[j]
            if PACKED:
                before = t - j < start
                tap = tl.where(before, 0.0, tap)
                if STATE:
                    slot = number.to(tl.int64) * past + past + t - j - start
                    tap += tl.load(state + slot * C + c, mask=here & before & (t < length), other=0.0).to(tl.float32)
            taps = taps + (tap,)
            u += w[j] * tap
        g = d * _silu_slope(u)
        own = tl.where(t < end, g, 0.0)  # tokens behind the chunk belong to another program's sums
        new_total, new_waiting = (), ()
        for j in tl.static_range(SIZE):
            new_total = new_total + (total[j] + own * taps[j],)
            back = g * w[j]
            if PACKED:
                back = tl.where(t - j < start, 0.0, back)
            if j > 0:
                back += waiting[j - 1]
            new_waiting = new_waiting + (back,)
        total, waiting = new_total, new_waiting[:past]
        done = t - past
        tl.store(dx_row + done.to(tl.int64) * C, new_waiting[past].to(dx.dtype.element_ty), mask=here & (done >= begin))
    for j in tl.static_range(SIZE):
        tl.store(sums + (chunk.to(tl.int64) * C + c) * SIZE + past - j, total[j], mask=here)


@triton.jit(do_not_specialize=["length"])
def conv_state_backward(
    x, weight, state, bounds, dy0, dy1, dy2, d_state, length,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """Gradient to the state (N, SIZE - 1, C) of one row or document: through its first SIZE - 1 tokens."""
    C: tl.constexpr = W0 + W1 + W2
    past: tl.constexpr = SIZE - 1
    part, width, first, within = _part(tl.program_id(0), W0, W1, W2, BC)
    number = tl.program_id(1).to(tl.int64)
    start, end = number * length, number * length + length
    lanes = tl.zeros([BC], tl.int64)
    if PACKED:
        start, end = tl.load(bounds + number).to(tl.int64), tl.load(bounds + number + 1).to(tl.int64)
    here = within < width
    c = first + within
    dy = dy0
    if part == 1:
        dy = dy1
    if part == 2:
        dy = dy2
    w, inputs, grads = (), (), ()
    for j in tl.static_range(SIZE):
        w = w + (tl.load(weight + c * SIZE + past - j, mask=here, other=0.0).to(tl.float32),)
    for i in tl.static_range(2 * past):  # the state, then the first tokens
        if i < past:
            b = tl.load(state + (number * past + i) * C + c, mask=here, other=0.0)
        else:
            b = tl.load(x + (start + i - past) * C + c, mask=here & (lanes + start + i - past < end), other=0.0)
        inputs = inputs + (b.to(tl.float32),)
    for i in tl.static_range(past):
        u = tl.zeros([BC], tl.float32)
        for j in tl.static_range(SIZE):
            u += w[j] * inputs[past + i - j]
        d = tl.load(dy + (start + i) * width + within, mask=here & (lanes + start + i < end), other=0.0).to(tl.float32)
        grads = grads + (d * _silu_slope(u),)
    for slot in tl.static_range(past):
        total = tl.zeros([BC], tl.float32)
        for i in tl.static_range(slot + 1):  # token i meets slot s at tap past + i - s
            total += grads[i] * w[past + i - slot]
        tl.store(d_state + (number * past + slot) * C + c, total.to(d_state.dtype.element_ty), mask=here)


def _three(parts: Sequence[Any], fill: Any) -> list[Any]:
    return [*parts, *[fill] * (3 - len(parts))]


def _blocks(widths: Sequence[int], size: int) -> int:
    return sum(triton.cdiv(width, size) for width in widths)


class Convolution(torch.autograd.Function):
    """As `proteus_lm.ops.triton_neighbours.convolve`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        state: Tensor | None,
        documents: Documents | None,
        widths: tuple[int, ...],
    ) -> tuple[Tensor, ...]:
        x, weight = ready(x), weight.contiguous()
        size = weight.shape[1]
        state = None if state is None or size == 1 else ready(state.to(x.dtype))
        index = (None, None) if documents is None else (documents.document, documents.bounds)
        ctx.save_for_backward(x, weight, state, *index)
        w0, w1, w2 = _three(widths, 0)
        ctx.widths = widths
        ctx.options = {"W0": w0, "W1": w1, "W2": w2, "SIZE": size, "PACKED": documents is not None}
        rows, length, _ = x.shape
        parts = tuple(x.new_empty(rows, length, width) for width in widths)
        grid = (_blocks(widths, FORWARD["BC"]) * triton.cdiv(length, FORWARD["BT"]) * rows,)
        given = [x if t is None else t for t in (state, *index)]
        conv_forward[grid](x, weight, *given, *_three(parts, parts[0]), length, STATE=state is not None, **ctx.options, **FORWARD)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, state, *index = ctx.saved_tensors
        rows, length, channels = x.shape
        grads = tuple(ready(g) for g in grads)
        dy = _three(grads, grads[0])
        dx = torch.empty_like(x)
        blocks = _blocks(ctx.widths, BACKWARD["BC"])
        chunk = CHUNK if rows * triton.cdiv(length, CHUNK) * blocks >= BUSY * processors(x.device) else SHORT
        chunks = rows * triton.cdiv(length, chunk)
        sums = torch.empty(chunks, channels, weight.shape[1], device=x.device, dtype=torch.float32)
        given = [x if t is None else t for t in (state, *index)]
        conv_backward[(blocks * chunks,)](
            x, weight, *given, *dy, dx, sums, length, STATE=state is not None, L=chunk, **ctx.options, **BACKWARD
        )
        d_state = None
        if state is not None and ctx.needs_input_grad[2]:
            d_state = torch.empty_like(state)
            launch = {"BC": BACKWARD["BC"], "num_warps": BACKWARD["num_warps"]}
            conv_state_backward[(blocks, len(state))](x, weight, state, given[2], *dy, d_state, length, **ctx.options, **launch)
        return dx, sums.sum(0).to(weight.dtype), d_state, None, None
