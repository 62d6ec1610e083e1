# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Gluon types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false
"""What the kernels of this package share: layouts, and tiles between memory and shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # its name from 3.7 on, and before
C = gl.constexpr(64)  # tokens a chunk, and key rows a tile
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes a thread, a row of 64 to 8 threads
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def read_whole_row(row):
    """First token, tokens and open coordinates of a chunk, and open coordinates of its document's next one: see plan.py."""
    opened, after = (row >> 40) & 0xFFF, (row >> 52) & 0xFFF
    return row & 0xFFFFFFFF, ((row >> 32) & 0xFF).to(gl.int32), opened.to(gl.int32), after.to(gl.int32)


@gluon.jit
def read_row(row):
    """The first three of these."""
    start, tokens, opened, _after = read_whole_row(row)
    return start, tokens, opened


@gluon.jit
def place_of(i):
    """Which of two places round i uses, and the parity of its turn there."""
    return i % 2, (i // 2) & 1


@gluon.jit
def copy_tile(buffer, x, start, rows, columns, STRIDE: gl.constexpr):
    """Have x + start + r STRIDE + c copied to a tile, zero where r >= rows or c >= columns."""
    r = gl.arange(0, buffer.shape[0], gl.SliceLayout(1, ROWS))
    c = gl.arange(0, buffer.shape[1], gl.SliceLayout(0, ROWS))
    at = x + start + (r[:, None] * STRIDE + c[None, :])
    copy(buffer, at, (r < rows)[:, None] & (c < columns)[None, :])


@gluon.jit
def copy_square(buffer, x, start):
    """`copy_tile` of a whole matrix (C, C)."""
    r = gl.arange(0, C, gl.SliceLayout(1, ROWS))
    c = gl.arange(0, C, gl.SliceLayout(0, ROWS))
    copy(buffer, x + start + (r[:, None] * C + c[None, :]))


@gluon.jit
def copy_line(buffer, x):
    """Have as many numbers as the buffer holds copied from x on."""
    COUNT: gl.constexpr = buffer.shape[0]
    i = gl.arange(0, COUNT, gl.BlockedLayout([COUNT // 128 if COUNT > 128 else 1], [32], [4], [0]))
    copy(buffer, x + i)


@gluon.jit
def store_tile(x, start, buffer, rows, columns, STRIDE: gl.constexpr):
    """Store a tile of shared memory at x + start + r STRIDE + c, as far as r < rows and c < columns."""
    r = gl.arange(0, buffer.shape[0], gl.SliceLayout(1, ROWS))
    c = gl.arange(0, buffer.shape[1], gl.SliceLayout(0, ROWS))
    at = x + start + (r[:, None] * STRIDE + c[None, :])
    gl.store(at, buffer.load(ROWS), mask=(r < rows)[:, None] & (c < columns)[None, :])
