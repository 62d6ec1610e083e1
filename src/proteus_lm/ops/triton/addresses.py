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
def lane_of(lanes, tiles: tl.constexpr, LONGEST_FIRST: tl.constexpr):
    """Which document's head and which tile of value columns a program walks.

    The tiles of a lane are neighbours, so that what they share crosses between the halves of the L2 once; where they open one after
    the other, all first tiles come before all second ones.
    """
    if LONGEST_FIRST:
        lane, tile = tl.program_id(0) % lanes, tl.program_id(0) // lanes
    else:
        lane, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    return lane, tile


@triton.jit
def rows_at(x, start, r, c, STRIDE: tl.constexpr):
    """Pointers x + start + r STRIDE + c (R, C)."""
    M: tl.constexpr = 8 if c.shape[0] >= 128 else 16  # rows that 128 threads move at once, 16 bytes each
    return x + (start + ((r % M)[:, None] * STRIDE + c[None, :])) + ((r // M) * (M * STRIDE))[:, None]


@triton.jit
def below(r, limit):
    """r < limit, with the constants on the side of the limit."""
    return (r % 16) < limit - (r // 16) * 16


@triton.jit
def store_rows(x, start, tile, rows, columns, STRIDE: tl.constexpr):
    """tile (R, N), a product, at x + start + r STRIDE + c, as far as r < rows and c < columns.

    A product has 16 rows in each warp. With the rows in the order below a warp stores the rows it has: what crosses between its
    threads crosses without a barrier for all warps. A wide tile goes in two halves, which share the memory for that.
    """
    N: tl.constexpr = tile.shape[1]
    if N >= 128:
        left, right = tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, N // 2)), (0, 2, 1)))
        _store_rows(x, start, left, rows, columns, STRIDE)
        _store_rows(x, start + N // 2, right, rows, columns - N // 2, STRIDE)
    else:
        _store_rows(x, start, tile, rows, columns, STRIDE)


@triton.jit
def _store_rows(x, start, tile, rows, columns, STRIDE: tl.constexpr):
    R: tl.constexpr = tile.shape[0]
    N: tl.constexpr = tile.shape[1]
    BYTES: tl.constexpr = N * x.dtype.element_ty.primitive_bitwidth // 8
    L: tl.constexpr = 16 if BYTES <= 32 else 512 // BYTES  # rows that a warp stores at once
    P: tl.constexpr = 16 // L
    y = tl.permute(tl.reshape(tile, (R // 16, L, P, N)), (1, 0, 2, 3))
    lane = tl.arange(0, L)[:, None, None, None] * P
    warp = tl.arange(0, R // 16)[None, :, None, None] * 16
    more = tl.arange(0, P)[None, None, :, None]
    c = tl.arange(0, N)[None, None, None, :]
    at = x + (start + ((warp + lane) * STRIDE + c)) + more * STRIDE
    tl.store(at, y, mask=(warp + lane < rows - more) & (c < columns))


@triton.jit
def store_columns(x, start, tile, rows, columns, STRIDE: tl.constexpr):
    """tile (R, C), a product, at x + start + r + c STRIDE, as far as r < rows and c < columns; see `store_rows`."""
    R: tl.constexpr = tile.shape[0]
    C: tl.constexpr = tile.shape[1]
    y = tl.permute(tl.reshape(tile, (R // 16, 16, C // 8, 4, 2)), (2, 4, 0, 3, 1))
    eight = tl.arange(0, C // 8)[:, None, None, None, None] * 8
    one = tl.arange(0, 2)[None, :, None, None, None]
    warp = tl.arange(0, R // 16)[None, None, :, None, None] * 16
    more = tl.arange(0, 4)[None, None, None, :, None] * 2
    r = tl.arange(0, 16)[None, None, None, None, :]
    at = x + (start + ((eight + one) * STRIDE + warp + r)) + more * STRIDE
    tl.store(at, y, mask=(eight + one < columns - more) & (warp + r < rows))


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
