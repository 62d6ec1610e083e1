# ruff: noqa: ANN001, ANN201 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
"""Where tiles lie: addresses, masks and hints that leave the registers to the tiles.

Triton makes an address for each 16 bytes a thread moves, and the compiler keeps what does not change from round to round: two
registers an address. A walk, whose state fills the registers, spilled them, and waited for them a fifth of its time (ncu, H200). So
an address is made of a part that is one value a thread, added to what changes, and a part that is a constant in each register.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_row(row):
    """First token, tokens and open coordinates of a chunk, and open coordinates of its document's next one: see plan.py."""
    opened, after = (row >> 40) & 0xFFF, (row >> 52) & 0xFFF
    return row & 0xFFFFFFFF, ((row >> 32) & 0xFF).to(tl.int32), opened.to(tl.int32), after.to(tl.int32)


@triton.jit
def rows_at(x, start, r, c, STRIDE: tl.constexpr):
    """Pointers x + start + r STRIDE + c (R, C)."""
    M: tl.constexpr = 8 if c.shape[0] >= 128 else 16  # rows that 128 threads move at once, 16 bytes each
    return x + (start + ((r % M)[:, None] * STRIDE + c[None, :])) + ((r // M) * (M * STRIDE))[:, None]


@triton.jit
def columns_at(x, start, r, c, STRIDE: tl.constexpr):
    """Pointers x + start + r + c STRIDE (R, C)."""
    return x + (start + (r[:, None] + (c % 16)[None, :] * STRIDE)) + ((c // 16) * (16 * STRIDE))[None, :]


@triton.jit
def below(r, limit):
    """r < limit, with the constants on the side of the limit."""
    return (r % 16) < limit - (r // 16) * 16


@triton.jit
def within(column, V: tl.constexpr, BV: tl.constexpr):
    """column < V in a tile of BV; nothing to compare where V is whole tiles."""
    if V % BV == 0:
        inside = tl.full(column.shape, 1, tl.int1)
    else:
        inside = column < V
    return inside


@triton.jit
def bring(x, rows, width, WIDTH: tl.constexpr):
    """Ask for rows of `width` elements, at most WIDTH, at x + rows (R,) to be brought to the L2 cache. Nothing waits, no
    register is taken, and no address lies outside of the rows.

    Not for the interpreter, which knows no assembly.
    """
    LINE: tl.constexpr = 1024 // x.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    LINES: tl.constexpr = WIDTH // LINE if WIDTH > LINE else 1
    at = x + rows[:, None] + tl.minimum(tl.arange(0, LINES) * LINE, width - 1)[None, :]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)
