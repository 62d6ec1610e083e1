# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAssignmentType=false
"""What the kernels of the MLP memory share: the pointwise function with its derivatives, tiles of a matrix, the scales of a read.

Layout of the buffers, all contiguous; P = rows * heads programs, g = chunks of a segment, b = slots of a chunk:
    mix (P, g, b, b) fp32: R of spec/deep.md 2.1, row = read, without theta.
    vec (P, g, VECTORS, b) fp32: see the rows below.      unit (P, g, 4, hidden) fp32: gradients a hidden unit, see `_backward`.
    shadow (P, g, 2 * depth, d * hidden), operands' type: W1, S1, W2, S2 at each chunk's start (depth 1: W, S).
    act, slope, grad, bend (P, g, b, hidden), operands' type: act(Z), act'(Z), G1, and H act''(Z).      err (P, g, b, dv): G2.
    plan int32 (rows or 1, chunks, 2): open width of a chunk, and 1 where some of it is locked to some of its tokens.
    opens int32 (rows or 1, chunks, hidden): slot at which a unit opens, 0 if before the chunk, b if not in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Rows of `vec`: log of the start weights' share at each read; the same before each slot; what of each token's gradient is in W and
# in S at the chunk's end; start momentum in W and in S at the end, by opening slot; the log share of W at the end; theta; eta.
LOG_READ, LOG_BEFORE, END_W, END_S, CARRY_W, CARRY_S, LOG_END, THETA, ETA = (tl.constexpr(i) for i in range(9))
VECTORS = tl.constexpr(9)


@triton.jit
def pointwise(z, ACT: tl.constexpr):
    """f(z), f'(z), f''(z) of tanh-GELU ("gelu_tanh") or SiLU; both are z times a sigmoid. Formulas: ops/memory_activations.py."""
    if ACT == "silu":
        s = 1.0 / (1.0 + tl.exp(-z))
        rest = 1.0 - s
        value = z * s
        slope = s * (1.0 + z * rest)
        curve = s * rest * (2.0 + z * (1.0 - 2.0 * s))
    else:
        square = z * z
        u = 1.5957691216057308 * z * (1.0 + 0.044715 * square)  # twice the argument of tanh
        s = 1.0 / (1.0 + tl.exp(-u))
        u1 = 0.7978845608028654 * (1.0 + 0.134145 * square)
        bell = s * (1.0 - s)
        value = z * s
        slope = s + 2.0 * z * bell * u1
        curve = 4.0 * bell * (u1 + 0.10703222440890037 * square - z * (2.0 * s - 1.0) * u1 * u1)
    return value, slope, curve


@triton.jit
def operand(x, TYPE: tl.constexpr, PREC: tl.constexpr):
    """x in the type of the matrix products. What tf32 would cut off is rounded instead, which halves the error."""
    x = x.to(TYPE)
    if PREC == "tf32" and tl.float32 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)
    return x


@triton.jit
def mul(a, b, PREC: tl.constexpr):
    """Product of two matrices in the operands' type, summed in fp32."""
    return tl.dot(a, b, input_precision=PREC)


@triton.jit
def sixteens(width):
    """Whole groups of 16 units that hold `width`: a mask that the compiler knows to be alike for 16 units keeps accesses wide.

    What lies between is 0 in every buffer, and in the state, which alone holds locked values, it is written back unchanged.
    """
    return (width + 15) // 16 * 16


@triton.jit
def open_slots(opens, cols, width, B: tl.constexpr):
    """The slot at which each unit of a tile opens; b for what is not open in this chunk."""
    return tl.load(opens + cols, mask=cols < width, other=B)


@triton.jit
def read_scales(vec, mix, opened, MIXED: tl.constexpr, PRE: tl.constexpr, B: tl.constexpr, BH: tl.constexpr):
    """Shares of the start weights and of the start momentum at each read, (b, tile): of all units alike, or by opening slot."""
    t = tl.arange(0, B)
    log_read = tl.load(vec + LOG_READ * B + t)
    if MIXED:
        at = tl.minimum(opened, B - 1)
        before = tl.load(vec + LOG_BEFORE * B + at)
        eta = tl.load(vec + ETA * B + at)
        own = t[:, None] - PRE >= opened[None, :]
        decay = tl.where(own, tl.exp(tl.where(own, log_read[:, None] - before[None, :], 0.0)), 1.0)
        carry = tl.where(own, tl.load(mix + t[:, None] * B + at[None, :]) * eta[None, :], 0.0)
    else:
        eta0 = tl.load(vec + ETA * B)
        decay = tl.broadcast_to(tl.exp(log_read)[:, None], (B, BH))
        carry = tl.broadcast_to((tl.load(mix + t * B) * eta0)[:, None], (B, BH))
    return decay, carry
