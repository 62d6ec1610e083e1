# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Gluon types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false
"""`scan` and `reverse` of forward.py and backward.py for Hopper: notation, arguments and results are those of these files.

A walk is a chain of products, chunk after chunk. In Triton the same warps ask for what a chunk needs, wait for each product before
they issue the next, and store. Here four warps copy a chunk's operands to one of two places, four multiply, and four store what
these leave in shared memory; a barrier each tells when a place is full and when it is free.

A place holds tiles (64, 64): of k for each 64 key rows, of q, of p if it is not k, v (or do), attend and, for the delta rules,
solve.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from proteus_lm.ops.triton.hopper._tiles import (
    BARRIER,
    FLAT,
    ROWS,
    SHARED,
    C,
    copy_line,
    copy_square,
    copy_tile,
    place_of,
    read_row,
    store_tile,
)

PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 2))


@gluon.jit
def gate(buffer, number: gl.constexpr, LAYOUT: gl.constexpr):
    """One vector (C,) of a chunk's gates, from shared memory."""
    return buffer.slice(number * C, C).load(gl.SliceLayout(0, LAYOUT))


@gluon.jit
def decay(buffer):
    """e^total of a chunk, (1, 1)."""
    return gl.exp(buffer.slice(4 * C - 1, 1).load(gl.SliceLayout(0, PRODUCT)))[None, :]


@gluon.jit
def open_length(buffer, LAYOUT: gl.constexpr):
    """Open coordinates of a chunk, (1,), from its row of the table in shared memory."""
    return ((buffer.load(LAYOUT) >> 40) & 0xFFF).to(gl.int32)


@gluon.jit
def lane_of(N, H: gl.constexpr, tiles: gl.constexpr, LONGEST_FIRST: gl.constexpr):
    """Document, head and tile of value columns of a program, in the order of `lane_of` of addresses.py."""
    if LONGEST_FIRST:
        lane, tile = gl.program_id(0) % (N * H), gl.program_id(0) // (N * H)
    else:
        lane, tile = gl.program_id(0) // tiles, gl.program_id(0) % tiles
    return lane // H, (lane % H).to(gl.int64), tile


@gluon.jit
def bounds(documents, document, tile, TILES: gl.constexpr, NK: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr):
    """First chunk, the one that opens the walk's columns, the one that opens its second tile of key rows; chunks of the walk."""
    table = documents + document * (2 + TILES)
    low = gl.load(table)
    first = low
    if VALUE:
        first = gl.load(table + 2 + tile * (C // 16))
    second = first
    if KEY and NK > 1:
        second = gl.load(table + 2 + C // 16)
    return low, first, second, gl.load(table + 1) - first


@gluon.jit
def rooms(dtype: gl.constexpr, NK: gl.constexpr, DELTA: gl.constexpr, HAS_P: gl.constexpr):
    """Two places for a chunk's tiles, for four vectors of its gates, and for its row of the table."""
    EACH: gl.constexpr = (3 if HAS_P else 2) * NK + (3 if DELTA else 2)
    places = gl.allocate_shared_memory(dtype, [2 * EACH, C, C], SHARED)
    gate_places = gl.allocate_shared_memory(gl.float32, [2, 4 * C], FLAT)
    return places, gate_places, gl.allocate_shared_memory(gl.int64, [2, 1], FLAT)


@gluon.jit
def barriers():
    """`full` and `free` of every place; of the hand-over of states full and free, and the same of results."""
    full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for s in gl.static_range(2):
        mbarrier.init(full.index(s), count=128)  # each loading thread
        mbarrier.init(free.index(s), count=1)
    hand = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    for s in gl.static_range(4):
        mbarrier.init(hand.index(s), count=1)
    return full, free, hand


@gluon.jit
def load_operands(
    places, gate_places, row_places, full, free, tensors, chunks, first, second, count, h, tile,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, NK: gl.constexpr, DELTA: gl.constexpr, HAS_P: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, ALIGN: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """The loading warps: chunks first .. first + count, or BACK from the last to the first."""
    q, k, p, v, attend, solve, gates = tensors
    EACH: gl.constexpr = (3 if HAS_P else 2) * NK + (3 if DELTA else 2)
    REST: gl.constexpr = (3 if HAS_P else 2) * NK  # where v lies
    row = gl.load(chunks + (first + count - 1 if BACK else first), mask=count > 0, other=0)
    for i in range(count):
        c = first + count - 1 - i if BACK else first + i
        start, tokens, width = read_row(row)
        row = gl.load(chunks + (c - 1 if BACK else c + 1), mask=i + 1 < count, other=0)
        width = width // ALIGN * ALIGN  # what the compiler may assume of it
        keys = width if KEY else K
        values = width if VALUE else V
        at = (start * H + h) * K
        slot = c.to(gl.int64) * H + h
        s, turn = place_of(i)
        mbarrier.wait(free.index(s), turn ^ 1)
        for t in gl.static_range(NK):
            if t == 0 or c >= second:
                copy_tile(places.index(s * EACH + t), k, at + t * C, tokens, keys - t * C, H * K)
                if HAS_P:
                    copy_tile(places.index(s * EACH + 2 * NK + t), p, at + t * C, tokens, keys - t * C, H * K)
                copy_tile(places.index(s * EACH + NK + t), q, at + t * C, tokens, keys - t * C, H * K)
        copy_tile(places.index(s * EACH + REST), v, (start * H + h) * V + tile * C, tokens, values - tile * C, H * V)
        copy_square(places.index(s * EACH + REST + 1), attend, slot * C * C)
        if DELTA:
            copy_square(places.index(s * EACH + REST + 2), solve, slot * C * C)
        copy_line(gate_places.index(s), gates + slot * 6 * C)
        copy_line(row_places.index(s), chunks + c)
        async_copy.mbarrier_arrive(full.index(s), increment_count=False)


@gluon.jit
def begin(state, column, row, V: gl.constexpr, NK: gl.constexpr, GIVEN: gl.constexpr):
    """The tiles (columns of values, key rows), fp32, that a walk begins with: of a state (K, V) in memory, if one is GIVEN."""
    s0 = gl.zeros([C, C], gl.float32, PRODUCT)
    s1 = s0
    if GIVEN:
        s0 = gl.load(state + row[None, :] * V + column[:, None])
        if NK > 1:
            s1 = gl.load(state + (row + C)[None, :] * V + column[:, None])
    return s0, s1


@gluon.jit
def end_with(state, s0, s1, column, row, V: gl.constexpr, NK: gl.constexpr):
    """`begin` the other way."""
    gl.store(state + row[None, :] * V + column[:, None], s0)
    if NK > 1:
        gl.store(state + (row + C)[None, :] * V + column[:, None], s1)


@gluon.jit
def settle(s, column, row, buffer, factor, KEY: gl.constexpr, VALUE: gl.constexpr):
    """Decay the open part of a tile by `factor`; where a state is handed in, the locked part may hold something."""
    out = s * factor
    if KEY:
        out = gl.where((row < open_length(buffer, gl.SliceLayout(0, PRODUCT)))[None, :], out, s)
    if VALUE:
        out = gl.where((column < open_length(buffer, gl.SliceLayout(1, PRODUCT)))[:, None], out, s)
    return out


@gluon.jit
def scan_products(
    places, gate_places, row_places, full, free, states, results, fresh, hand,
    initial, final, first, second, count, tile,
    K: gl.constexpr, V: gl.constexpr, NK: gl.constexpr, DELTA: gl.constexpr, HAS_P: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, SAVE: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """The multiplying warps of `scan`. The state is (columns of values, key rows), in tiles of 64 x 64, in registers."""
    EACH: gl.constexpr = (3 if HAS_P else 2) * NK + (3 if DELTA else 2)
    REST: gl.constexpr = (3 if HAS_P else 2) * NK  # where v lies
    P: gl.constexpr = 2 * NK if HAS_P else 0
    column = tile * C + gl.arange(0, C, gl.SliceLayout(1, PRODUCT))
    row = gl.arange(0, C, gl.SliceLayout(0, PRODUCT))
    zero = gl.zeros([C, C], gl.float32, PRODUCT)
    s0, s1 = begin(initial, column, row, V, NK, HAS_INITIAL)
    i = 0
    for phase in gl.static_range(NK):
        end = count
        if phase < NK - 1:
            end = second - first
        while i < end:
            s, turn = place_of(i)
            mbarrier.wait(full.index(s), turn)
            fence_async_shared()  # a barrier for memory, too, behind which no load is left on its way
            if VALUE:
                here = (column < open_length(row_places.index(s), gl.SliceLayout(1, PRODUCT)))[:, None]
            b0 = s0.to(dtype)
            b1 = s1.to(dtype)
            a0 = gl.convert_layout(b0, LEFT)
            a1 = gl.convert_layout(b1, LEFT)
            tiles = s * EACH
            if DELTA:
                guess = warpgroup_mma(a0, places.index(tiles + P).permute((1, 0)), zero, use_acc=False, is_async=True)
                if phase > 0:
                    guess = warpgroup_mma(a1, places.index(tiles + P + 1).permute((1, 0)), guess, is_async=True)
                wrote = warpgroup_mma(
                    places.index(tiles + REST).permute((1, 0)), places.index(tiles + REST + 2).permute((1, 0)), zero,
                    use_acc=False, is_async=True,
                )  # fmt: skip
            if SAVE:
                mbarrier.wait(hand.index(1), (i & 1) ^ 1)
                states.index(0).store(b0)
                if phase > 0:
                    states.index(1).store(b1)
                mbarrier.arrive(hand.index(0), count=1)
            if DELTA:
                guess = warpgroup_mma_wait(1, deps=[guess])
                guess = guess * -gate(gate_places.index(s), 2, PRODUCT)[None, :]
                if VALUE and HAS_INITIAL:
                    guess = gl.where(here, guess, 0.0)
                a_guess = gl.convert_layout(guess.to(dtype), LEFT)
                wrote = warpgroup_mma(a_guess, places.index(tiles + REST + 2).permute((1, 0)), wrote, is_async=True)
            y = warpgroup_mma(a0, places.index(tiles + NK).permute((1, 0)), zero, use_acc=False, is_async=True)
            if phase > 0:
                y = warpgroup_mma(a1, places.index(tiles + NK + 1).permute((1, 0)), y, is_async=True)
            mbarrier.wait(hand.index(3), (i & 1) ^ 1)
            if DELTA:
                wrote = warpgroup_mma_wait(phase + 1, deps=[wrote])
                u = wrote.to(dtype)
                a_u = gl.convert_layout(u, LEFT)
                a_wrote = gl.convert_layout((wrote * gate(gate_places.index(s), 1, PRODUCT)[None, :]).to(dtype), LEFT)
            else:
                a_u = places.index(tiles + REST).permute((1, 0)).load(LEFT)
                a_wrote = (a_u.to(gl.float32) * gate(gate_places.index(s), 1, LEFT)[None, :]).to(dtype)
            factor = decay(gate_places.index(s))
            if HAS_INITIAL and (KEY or VALUE):
                s0 = settle(s0, column, row, row_places.index(s), factor, KEY, VALUE)
                if phase > 0:
                    s1 = settle(s1, column, row + C, row_places.index(s), factor, KEY, VALUE)
            else:
                s0 = s0 * factor
                if phase > 0:
                    s1 = s1 * factor
            n0 = warpgroup_mma(a_wrote, places.index(tiles), s0, is_async=True)
            if phase > 0:
                n1 = warpgroup_mma(a_wrote, places.index(tiles + 1), s1, is_async=True)
            own = warpgroup_mma(a_u, places.index(tiles + REST + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
            if DELTA and SAVE:
                fresh.store(u)
            y = warpgroup_mma_wait(phase + 2, deps=[y])
            y = y * gate(gate_places.index(s), 0, PRODUCT)[None, :]
            own = warpgroup_mma_wait(0, deps=[own])
            if phase > 0:
                s0, s1 = warpgroup_mma_wait(0, deps=[n0, n1])
            else:
                s0 = warpgroup_mma_wait(0, deps=[n0])
            mbarrier.arrive(free.index(s), count=1)
            y = y + own
            if VALUE and HAS_INITIAL:
                y = gl.where(here, y, 0.0)
            results.permute((1, 0)).store(y.to(dtype))
            mbarrier.arrive(hand.index(2), count=1)
            i += 1
    if HAS_FINAL:
        end_with(final, s0, s1, column, row, V, NK)


@gluon.jit
def scan_results(
    states, results, written, hand, out, fresh, kept, chunks, low, first, second, count, h, tile,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, NK: gl.constexpr, DELTA: gl.constexpr, KEY: gl.constexpr,
    VALUE: gl.constexpr, ALIGN: gl.constexpr, SAVE: gl.constexpr,
):  # fmt: skip
    """The storing warps of `scan`; what lies before the chunk that opens the columns is zero."""
    if VALUE:
        clear(out, chunks, low, first, h, tile, H, V)
    row = gl.load(chunks + first, mask=count > 0, other=0)
    for i in range(count):
        c = first + i
        start, tokens, width = read_row(row)
        row = gl.load(chunks + c + 1, mask=i + 1 < count, other=0)
        width = width // ALIGN * ALIGN  # what the compiler may assume of it
        keys = width if KEY else K
        values = width if VALUE else V
        slot = c.to(gl.int64) * H + h
        if SAVE:
            mbarrier.wait(hand.index(0), i & 1)
            at = (slot * V + tile * C) * K
            store_tile(kept, at, states.index(0), values - tile * C, keys, K)
            if NK > 1 and c >= second:
                store_tile(kept, at + C, states.index(1), values - tile * C, keys - C, K)
            mbarrier.arrive(hand.index(1), count=1)
        mbarrier.wait(hand.index(2), i & 1)
        if DELTA and SAVE:
            store_tile(fresh, (slot * V + tile * C) * C, written, V - tile * C, C, C)
        store_tile(out, (start * H + h) * V + tile * C, results, tokens, V - tile * C, H * V)
        mbarrier.arrive(hand.index(3), count=1)


@gluon.jit
def clear(x, chunks, low, first, h, tile, H: gl.constexpr, V: gl.constexpr):
    """Zeros in columns of values of chunks low .. first of x (tokens, H, V)."""
    r = gl.arange(0, C, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, C, gl.SliceLayout(0, ROWS))
    zero = gl.zeros([C, C], x.dtype.element_ty, ROWS)
    for c in range(low, first):
        start, tokens, _ = read_row(gl.load(chunks + c))
        at = x + (start * H + h) * V + tile * C + (r[:, None] * (H * V) + column[None, :])
        gl.store(at, zero, mask=(r < tokens)[:, None])


@gluon.jit
def scan(
    q, k, p, v, gates, solve, attend, chunks, documents, initial, out, fresh, states, final, N,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr, DELTA: gl.constexpr, HAS_P: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, ALIGN: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr,
    SAVE: gl.constexpr,
):  # fmt: skip
    """`scan` of forward.py: one document, one head, 64 value columns."""
    NK: gl.constexpr = K // C
    document, h, tile = lane_of(N, H, V // C, VALUE)
    low, first, second, count = bounds(documents, document, tile, TILES, NK, KEY, VALUE)
    dtype: gl.constexpr = v.dtype.element_ty
    places, gate_places, row_places = rooms(dtype, NK, DELTA, HAS_P)
    kept = gl.allocate_shared_memory(dtype, [NK if SAVE else 1, C, C], SHARED)
    written = gl.allocate_shared_memory(dtype, [C, C], SHARED)
    results = gl.allocate_shared_memory(dtype, [C, C], SHARED)
    full, free, hand = barriers()
    where = (document * H + h).to(gl.int64) * K * V
    gl.warp_specialize(
        [
            (
                scan_products,
                (
                    places, gate_places, row_places, full, free, kept, results, written, hand,
                    initial + where if HAS_INITIAL else initial, final + where, first, second, count, tile,
                    K, V, NK, DELTA, HAS_P, KEY, VALUE, SAVE, HAS_INITIAL, HAS_FINAL, dtype,
                ),
            ),
            (
                load_operands,
                (
                    places, gate_places, row_places, full, free, (q, k, p, v, attend, solve, gates), chunks, first, second, count,
                    h, tile, H, K, V, NK, DELTA, HAS_P, KEY, VALUE, ALIGN, False,
                ),
            ),
            (
                scan_results,
                (
                    kept, results, written, hand, out, fresh, states, chunks, low, first, second,
                    count, h, tile, H, K, V, NK, DELTA, KEY, VALUE, ALIGN, SAVE,
                ),
            ),
        ],
        [4, 4],
        [72, 72],
    )  # fmt: skip


@gluon.jit
def reverse_products(
    places, gate_places, row_places, full, free, states, results, hand,
    initial, final, first, second, count, tile,
    K: gl.constexpr, V: gl.constexpr, NK: gl.constexpr, DELTA: gl.constexpr, HAS_P: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """The multiplying warps of `reverse`; `initial` is what the walk starts from, the gradient of the final state."""
    EACH: gl.constexpr = (3 if HAS_P else 2) * NK + (3 if DELTA else 2)
    REST: gl.constexpr = (3 if HAS_P else 2) * NK  # where v lies
    P: gl.constexpr = 2 * NK if HAS_P else 0
    column = tile * C + gl.arange(0, C, gl.SliceLayout(1, PRODUCT))
    row = gl.arange(0, C, gl.SliceLayout(0, PRODUCT))
    zero = gl.zeros([C, C], gl.float32, PRODUCT)
    s0, s1 = begin(initial, column, row, V, NK, HAS_FINAL)
    i = 0
    for phase in gl.static_range(NK):
        end = count
        if phase < NK - 1:
            end = first + count - second
        while i < end:
            s, turn = place_of(i)
            mbarrier.wait(full.index(s), turn)
            fence_async_shared()
            if VALUE:
                here = (column < open_length(row_places.index(s), gl.SliceLayout(1, PRODUCT)))[:, None]
            b0 = s0.to(dtype)
            b1 = s1.to(dtype)
            tiles = s * EACH
            du = warpgroup_mma(gl.convert_layout(b0, LEFT), places.index(tiles).permute((1, 0)), zero, use_acc=False, is_async=True)
            if phase < NK - 1:
                du = warpgroup_mma(gl.convert_layout(b1, LEFT), places.index(tiles + 1).permute((1, 0)), du, is_async=True)
            dy = places.index(tiles + REST).permute((1, 0))
            own = warpgroup_mma(dy, places.index(tiles + REST + 1), zero, use_acc=False, is_async=True)
            mbarrier.wait(hand.index(1), (i & 1) ^ 1)
            states.index(0).store(b0)
            if phase < NK - 1:
                states.index(1).store(b1)
            mbarrier.arrive(hand.index(0), count=1)
            asked = dy.load(LEFT).to(gl.float32) * gate(gate_places.index(s), 0, LEFT)[None, :]
            asked = asked.to(dtype)
            factor = decay(gate_places.index(s))
            if HAS_INITIAL and (KEY or VALUE):
                s0 = settle(s0, column, row, row_places.index(s), factor, KEY, VALUE)
                s1 = settle(s1, column, row + C, row_places.index(s), factor, KEY, VALUE)
            else:
                s0 = s0 * factor
                s1 = s1 * factor
            du = warpgroup_mma_wait(1, deps=[du])
            du = du * gate(gate_places.index(s), 1, PRODUCT)[None, :]
            own = warpgroup_mma_wait(0, deps=[own])
            du = du + own
            if VALUE:
                du = gl.where(here, du, 0.0)
            if DELTA:
                a_du = gl.convert_layout(du.to(dtype), LEFT)
                du = warpgroup_mma(a_du, places.index(tiles + REST + 2), zero, use_acc=False, is_async=True)
            n0 = warpgroup_mma(asked, places.index(tiles + NK), s0, is_async=True)
            n1 = s1
            if phase < NK - 1:
                n1 = warpgroup_mma(asked, places.index(tiles + NK + 1), s1, is_async=True)
            if DELTA:
                du = warpgroup_mma_wait(NK - phase, deps=[du])
                missed = (du * -gate(gate_places.index(s), 2, PRODUCT)[None, :]).to(dtype)
                missed = gl.convert_layout(missed, LEFT)
                n0 = warpgroup_mma(missed, places.index(tiles + P), n0, is_async=True)
                if phase < NK - 1:
                    n1 = warpgroup_mma(missed, places.index(tiles + P + 1), n1, is_async=True)
            mbarrier.wait(hand.index(3), (i & 1) ^ 1)
            results.permute((1, 0)).store(du.to(dtype))
            mbarrier.arrive(hand.index(2), count=1)
            if phase < NK - 1:
                s0, s1 = warpgroup_mma_wait(0, deps=[n0, n1])
            else:
                s0 = warpgroup_mma_wait(0, deps=[n0])
            mbarrier.arrive(free.index(s), count=1)
            i += 1
    if HAS_INITIAL:
        end_with(final, s0, s1, column, row, V, NK)


@gluon.jit
def reverse_results(
    states, results, hand, dv, dstates, chunks, low, first, second, count, h, tile,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, NK: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
    ALIGN: gl.constexpr,
):  # fmt: skip
    """The storing warps of `reverse`."""
    if VALUE:
        clear(dv, chunks, low, first, h, tile, H, V)
    row = gl.load(chunks + first + count - 1, mask=count > 0, other=0)
    for i in range(count):
        c = first + count - 1 - i
        start, tokens, width = read_row(row)
        row = gl.load(chunks + c - 1, mask=i + 1 < count, other=0)
        width = width // ALIGN * ALIGN  # what the compiler may assume of it
        keys = width if KEY else K
        values = width if VALUE else V
        at = ((c.to(gl.int64) * H + h) * V + tile * C) * K
        mbarrier.wait(hand.index(0), i & 1)
        store_tile(dstates, at, states.index(0), values - tile * C, keys, K)
        if NK > 1 and c >= second:
            store_tile(dstates, at + C, states.index(1), values - tile * C, keys - C, K)
        mbarrier.arrive(hand.index(1), count=1)
        mbarrier.wait(hand.index(2), i & 1)
        store_tile(dv, (start * H + h) * V + tile * C, results, tokens, V - tile * C, H * V)
        mbarrier.arrive(hand.index(3), count=1)


@gluon.jit
def reverse(
    q, k, p, gates, solve, attend, chunks, documents, do, dfinal, dv, dstates, dinitial, N,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr, DELTA: gl.constexpr, HAS_P: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, ALIGN: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr,
):  # fmt: skip
    """`reverse` of backward.py: one document, one head, 64 value columns."""
    NK: gl.constexpr = K // C
    document, h, tile = lane_of(N, H, V // C, VALUE)
    low, first, second, count = bounds(documents, document, tile, TILES, NK, KEY, VALUE)
    dtype: gl.constexpr = do.dtype.element_ty
    places, gate_places, row_places = rooms(dtype, NK, DELTA, HAS_P)
    kept = gl.allocate_shared_memory(dtype, [NK, C, C], SHARED)
    results = gl.allocate_shared_memory(dtype, [C, C], SHARED)
    full, free, hand = barriers()
    where = (document * H + h).to(gl.int64) * K * V
    gl.warp_specialize(
        [
            (
                reverse_products,
                (
                    places, gate_places, row_places, full, free, kept, results, hand,
                    dfinal + where if HAS_FINAL else dfinal, dinitial + where if HAS_INITIAL else dinitial,
                    first, second, count, tile,
                    K, V, NK, DELTA, HAS_P, KEY, VALUE, HAS_INITIAL, HAS_FINAL, dtype,
                ),
            ),
            (
                load_operands,
                (
                    places, gate_places, row_places, full, free, (q, k, p, do, attend, solve, gates), chunks, first, second, count,
                    h, tile, H, K, V, NK, DELTA, HAS_P, KEY, VALUE, ALIGN, True,
                ),
            ),
            (
                reverse_results,
                (kept, results, hand, dv, dstates, chunks, low, first, second, count, h, tile, H, K, V, NK, KEY, VALUE, ALIGN),
            ),
        ],
        [4, 4],
        [72, 72],
    )  # fmt: skip
