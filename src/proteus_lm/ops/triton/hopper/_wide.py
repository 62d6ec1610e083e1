# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Gluon types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false
"""`scan` and `reverse` for K = 256: 128 value columns a program, notation and results of `_walks.py`.

Eight warps walk, four load, four read (in `scan`) and store. Shared memory holds one chunk: k, q, p and the rest each have a
barrier for full and one for free, and come for the next chunk as soon as they were used in this one. Key rows are in two tiles of
128.
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
    SHARED,
    C,
    copy_line,
    copy_square,
    copy_tile,
    read_row,
    store_tile,
)
from proteus_lm.ops.triton.hopper._walks import PRODUCT, bounds, clear, decay, gate, lane_of, open_length, settle

W = gl.constexpr(128)  # key rows a tile, value columns a program
STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))
WALK = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, WALK, 2))
# What is loaded together: places of k, q, p, and of v (or do) with solve; what else a user needs comes with the last it waits for.
AT_K, AT_Q, AT_P, AT_V = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)


@gluon.jit
def rooms(dtype: gl.constexpr, K: gl.constexpr, HAS_P: gl.constexpr):
    """Places of one chunk: k, q, p; v; attend and solve; gates and row of the table, twice."""
    keys_at = gl.allocate_shared_memory(dtype, [3 if HAS_P else 2, C, K], SHARED)
    values_at = gl.allocate_shared_memory(dtype, [1, C, W], SHARED)
    squares_at = gl.allocate_shared_memory(dtype, [2, C, C], SHARED)
    gates_at = gl.allocate_shared_memory(gl.float32, [2, 4 * C], FLAT)
    return keys_at, values_at, squares_at, gates_at, gl.allocate_shared_memory(gl.int64, [2, 1], FLAT)


@gluon.jit
def barriers(V_USERS: gl.constexpr):
    """`full` and `free` of every place; states full and free, results full and free."""
    full = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    for s in gl.static_range(4):
        mbarrier.init(full.index(s), count=128)  # each loading thread
    mbarrier.init(free.index(AT_K), count=1)
    mbarrier.init(free.index(AT_Q), count=1)
    mbarrier.init(free.index(AT_P), count=1)
    mbarrier.init(free.index(AT_V), count=V_USERS)
    hand = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    for s in gl.static_range(4):
        mbarrier.init(hand.index(s), count=1)
    return full, free, hand


@gluon.jit
def load_keys(place, x, at, tokens, keys, both, STRIDE: gl.constexpr):
    """A chunk's (tokens, keys) of q, k or p: the first tile, and the second if it is open."""
    copy_tile(place.slice(0, W, dim=1), x, at, tokens, keys, STRIDE)
    if both:
        copy_tile(place.slice(W, W, dim=1), x, at + W, tokens, keys - W, STRIDE)


@gluon.jit
def load_operands(
    places, full, free, tensors, chunks, first, second, count, h, tile,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr, HAS_P: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, ALIGN: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """The loading warps: chunks first .. first + count, or BACK from the last to the first; places in the order of their use."""
    q, k, p, v, attend, solve, gates = tensors
    keys_at, values_at, squares_at, gates_at, row_at = places
    row = gl.load(chunks + (first + count - 1 if BACK else first), mask=count > 0, other=0)
    for i in range(count):
        c = first + count - 1 - i if BACK else first + i
        start, tokens, width = read_row(row)
        row = gl.load(chunks + (c - 1 if BACK else c + 1), mask=i + 1 < count, other=0)
        width = width // ALIGN * ALIGN  # what the compiler may assume of it
        keys = width if KEY else K
        values = (width if VALUE else V) - tile * W
        both = c >= second
        at = (start * H + h) * K
        at_v = (start * H + h) * V + tile * W
        slot = c.to(gl.int64) * H + h
        old = (i & 1) ^ 1
        if HAS_P and not BACK:
            mbarrier.wait(free.index(AT_P), old)
            load_keys(keys_at.index(2), p, at, tokens, keys, both, H * K)
            async_copy.mbarrier_arrive(full.index(AT_P), increment_count=False)
        if BACK or not HAS_P:
            mbarrier.wait(free.index(AT_K), old)
            load_keys(keys_at.index(0), k, at, tokens, keys, both, H * K)
            async_copy.mbarrier_arrive(full.index(AT_K), increment_count=False)
        mbarrier.wait(free.index(AT_V), old)
        copy_tile(values_at.index(0), v, at_v, tokens, values, H * V)
        if DELTA:
            copy_square(squares_at.index(1), solve, slot * C * C)
        if BACK:
            copy_square(squares_at.index(0), attend, slot * C * C)
        copy_line(gates_at.index(0), gates + slot * 6 * C)
        copy_line(row_at.index(0), chunks + c)
        async_copy.mbarrier_arrive(full.index(AT_V), increment_count=False)
        mbarrier.wait(free.index(AT_Q), old)
        load_keys(keys_at.index(1), q, at, tokens, keys, both, H * K)
        if not BACK:
            copy_square(squares_at.index(0), attend, slot * C * C)
            copy_line(gates_at.index(1), gates + slot * 6 * C)
            copy_line(row_at.index(1), chunks + c)
        async_copy.mbarrier_arrive(full.index(AT_Q), increment_count=False)
        if HAS_P and not BACK:
            mbarrier.wait(free.index(AT_K), old)
            load_keys(keys_at.index(0), k, at, tokens, keys, both, H * K)
            async_copy.mbarrier_arrive(full.index(AT_K), increment_count=False)
        if HAS_P and BACK:
            mbarrier.wait(free.index(AT_P), old)
            load_keys(keys_at.index(2), p, at, tokens, keys, both, H * K)
            async_copy.mbarrier_arrive(full.index(AT_P), increment_count=False)


@gluon.jit
def begin(state, column, row, V: gl.constexpr, GIVEN: gl.constexpr):
    """`begin` of `_walks.py` for tiles (W, W)."""
    s0 = gl.zeros([W, W], gl.float32, STATE)
    s1 = s0
    if GIVEN:
        s0 = gl.load(state + row[None, :] * V + column[:, None])
        s1 = gl.load(state + (row + W)[None, :] * V + column[:, None])
    return s0, s1


@gluon.jit
def scan_products(
    places, full, free, states, written, hand, initial, final, first, second, count, tile,
    V: gl.constexpr, DELTA: gl.constexpr, HAS_P: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
    HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The warps of `scan` that walk; `second` opens the second tile of key rows."""
    keys_at, values_at, squares_at, gates_at, row_at = places
    gates, open_at, at_k = gates_at.index(0), row_at.index(0), keys_at.index(0)
    at_p = keys_at.index(2 if HAS_P else 0)
    full_p = full.index(AT_P if HAS_P else AT_K)
    state, turned = states.index(0), squares_at.index(1).permute((1, 0))
    at_v = values_at.index(0).permute((1, 0))
    column = tile * W + gl.arange(0, W, gl.SliceLayout(1, STATE))
    row = gl.arange(0, W, gl.SliceLayout(0, STATE))
    zero = gl.zeros([W, C], gl.float32, WALK)
    s0, s1 = begin(initial, column, row, V, HAS_INITIAL)
    past = 0
    for phase in gl.static_range(2):
        end = count
        if phase == 0:
            end = second - first
        for i in range(past, end):
            now = i & 1
            mbarrier.wait(hand.index(1), now ^ 1)
            state.slice(0, W, dim=1).store(s0.to(dtype))
            if phase == 1:
                state.slice(W, W, dim=1).store(s1.to(dtype))
            if DELTA:
                mbarrier.wait(full_p, now)
            fence_async_shared()
            mbarrier.arrive(hand.index(0), count=1)
            if DELTA:
                at_s = state.slice(0, W + phase * W, dim=1)
                asked = at_p.slice(0, W + phase * W, dim=1).permute((1, 0))
                guess = warpgroup_mma(at_s, asked, zero, use_acc=False, is_async=True)
            mbarrier.wait(full.index(AT_V), now)
            fence_async_shared()
            if DELTA:
                guess = warpgroup_mma_wait(0, deps=[guess])
                if HAS_P:
                    mbarrier.arrive(free.index(AT_P), count=1)
                guess = guess * -gate(gates, 2, WALK)[None, :]
                if VALUE and HAS_INITIAL:
                    held = tile * W + gl.arange(0, W, gl.SliceLayout(1, WALK))
                    guess = gl.where((held < open_length(open_at, gl.SliceLayout(1, WALK)))[:, None], guess, 0.0)
                wrote = warpgroup_mma(at_v, turned, zero, use_acc=False, is_async=True)
                a_guess = gl.convert_layout(guess.to(dtype), LEFT)
                wrote = warpgroup_mma(a_guess, turned, wrote, is_async=True)
            factor = decay(gates, STATE)
            if HAS_INITIAL and (KEY or VALUE):
                s0 = settle(s0, column, row, open_at, factor, KEY, VALUE, STATE)
                if phase == 1:
                    s1 = settle(s1, column, row + W, open_at, factor, KEY, VALUE, STATE)
            else:
                s0 = s0 * factor
                if phase == 1:
                    s1 = s1 * factor
            if DELTA:
                mbarrier.wait(hand.index(3), now ^ 1)
                wrote = warpgroup_mma_wait(0, deps=[wrote])
                written.index(0).store(wrote.to(dtype))
                a_wrote = gl.convert_layout((wrote * gate(gates, 1, WALK)[None, :]).to(dtype), LEFT)
                fence_async_shared()
                mbarrier.arrive(hand.index(2), count=1)
            else:
                a_u = at_v.load(LEFT)
                a_wrote = (a_u.to(gl.float32) * gate(gates, 1, LEFT)[None, :]).to(dtype)
            mbarrier.arrive(free.index(AT_V), count=1)
            if HAS_P or not DELTA:
                mbarrier.wait(full.index(AT_K), now)
                fence_async_shared()
            n0 = warpgroup_mma(a_wrote, at_k.slice(0, W, dim=1), s0, is_async=True)
            if phase == 1:
                n1 = warpgroup_mma(a_wrote, at_k.slice(W, W, dim=1), s1, is_async=True)
                s0, s1 = warpgroup_mma_wait(0, deps=[n0, n1])
            else:
                s0 = warpgroup_mma_wait(0, deps=[n0])
            mbarrier.arrive(free.index(AT_K), count=1)
        past = end
    if HAS_FINAL:
        gl.store(final + row[None, :] * V + column[:, None], s0)
        gl.store(final + (row + W)[None, :] * V + column[:, None], s1)


@gluon.jit
def store_state(x, start, buffer, rows, columns, both, K: gl.constexpr):
    """Store 64 columns of states (C, K) of shared memory at x + start: the first tile of key rows, and the second if it is open."""
    for t in gl.static_range(K // C):
        if t < W // C or both:
            store_tile(x, start + t * C, buffer.slice(t * C, C, dim=1), rows, columns - t * C, K)


@gluon.jit
def scan_results(
    places, full, free, states, written, results, hand, out, fresh, kept, chunks, low, first, second, count, h, tile,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
    ALIGN: gl.constexpr, HAS_INITIAL: gl.constexpr, SAVE: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The warps of `scan` that read: they make outputs, and store; what lies before the chunk that opens the columns is zero."""
    keys_at, values_at, squares_at, gates_at, row_at = places
    if VALUE:
        for part in gl.static_range(2):
            clear(out, chunks, low, first, h, 2 * tile + part, H, V)
    zero = gl.zeros([C, C], gl.float32, PRODUCT)
    row = gl.load(chunks + first, mask=count > 0, other=0)
    past = 0
    for phase in gl.static_range(2):
        end = count
        if phase == 0:
            end = second - first
        for i in range(past, end):
            now = i & 1
            c = first + i
            start, tokens, width = read_row(row)
            row = gl.load(chunks + c + 1, mask=i + 1 < count, other=0)
            width = width // ALIGN * ALIGN  # what the compiler may assume of it
            keys = width if KEY else K
            values = width if VALUE else V
            slot = c.to(gl.int64) * H + h
            asked = keys_at.index(1).slice(0, W + phase * W, dim=1).permute((1, 0))
            mbarrier.wait(full.index(AT_Q), now)
            if not DELTA:
                mbarrier.wait(full.index(AT_V), now)
            mbarrier.wait(hand.index(0), now)
            fence_async_shared()
            for part in gl.static_range(2):
                column = tile * W + part * C
                state = states.index(0).slice(part * C, C)
                y = warpgroup_mma(state.slice(0, W + phase * W, dim=1), asked, zero, use_acc=False, is_async=True)
                if SAVE:
                    store_state(kept, (slot * V + column) * K, state, values - column, keys, phase == 1, K)
                y = warpgroup_mma_wait(0, deps=[y])
                if part == 1:
                    mbarrier.arrive(hand.index(1), count=1)
                y = y * gate(gates_at.index(1), 0, PRODUCT)[None, :]
                if DELTA:
                    if part == 0:
                        mbarrier.wait(hand.index(2), now)
                    u = written.index(0).slice(part * C, C)
                else:
                    u = values_at.index(0).slice(part * C, C, dim=1).permute((1, 0))
                y = warpgroup_mma(u, squares_at.index(0).permute((1, 0)), y, is_async=True)
                if DELTA and SAVE:
                    store_tile(fresh, (slot * V + column) * C, u, V - column, C, C)
                y = warpgroup_mma_wait(0, deps=[y])
                if VALUE and HAS_INITIAL:
                    held = column + gl.arange(0, C, gl.SliceLayout(1, PRODUCT))
                    y = gl.where((held < open_length(row_at.index(1), gl.SliceLayout(1, PRODUCT)))[:, None], y, 0.0)
                if part == 1:
                    mbarrier.arrive(hand.index(3) if DELTA else free.index(AT_V), count=1)
                    mbarrier.arrive(free.index(AT_Q), count=1)
                results.permute((1, 0)).store(y.to(dtype))
                store_tile(out, (start * H + h) * V + column, results, tokens, V - column, H * V)
        past = end


@gluon.jit
def scan(
    q, k, p, v, gates, solve, attend, chunks, documents, initial, out, fresh, states, final, N,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr, DELTA: gl.constexpr, HAS_P: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, ALIGN: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr,
    SAVE: gl.constexpr,
):  # fmt: skip
    """`scan` of forward.py: one document, one head, 128 value columns."""
    document, h, tile = lane_of(N, H, V // W, VALUE)
    low, first, second, count = bounds(documents, document, tile, W, TILES, 2, KEY, VALUE)
    dtype: gl.constexpr = v.dtype.element_ty
    places = rooms(dtype, K, HAS_P)
    kept = gl.allocate_shared_memory(dtype, [1, W, K], SHARED)
    written = gl.allocate_shared_memory(dtype, [1, W if DELTA else C, C], SHARED)
    results = gl.allocate_shared_memory(dtype, [C, C], SHARED)
    full, free, hand = barriers(1 if DELTA else 2)
    where = (document * H + h).to(gl.int64) * K * V
    gl.warp_specialize(
        [
            (
                scan_products,
                (
                    places, full, free, kept, written, hand, initial + where if HAS_INITIAL else initial, final + where,
                    first, second, count, tile,
                    V, DELTA, HAS_P, KEY, VALUE, HAS_INITIAL, HAS_FINAL, dtype,
                ),
            ),
            (
                load_operands,
                (
                    places, full, free, (q, k, p, v, attend, solve, gates), chunks, first, second, count, h, tile,
                    H, K, V, DELTA, HAS_P, KEY, VALUE, ALIGN, False,
                ),
            ),
            (
                scan_results,
                (
                    places, full, free, kept, written, results, hand, out, fresh, states, chunks, low, first, second, count, h,
                    tile, H, K, V, DELTA, KEY, VALUE, ALIGN, HAS_INITIAL, SAVE, dtype,
                ),
            ),
        ],
        [4, 4],
        [32, 64],
    )  # fmt: skip


@gluon.jit
def reverse_products(
    places, full, free, states, results, hand, initial, final, first, second, count, tile,
    V: gl.constexpr, DELTA: gl.constexpr, HAS_P: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
    HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The warps of `reverse` that walk; `initial` is what the walk starts from, the gradient of the final state."""
    keys_at, values_at, squares_at, gates_at, row_at = places
    gates, open_at, at_k, at_q = gates_at.index(0), row_at.index(0), keys_at.index(0), keys_at.index(1)
    at_p = keys_at.index(2 if HAS_P else 0)
    state = states.index(0)
    column = tile * W + gl.arange(0, W, gl.SliceLayout(1, STATE))
    row = gl.arange(0, W, gl.SliceLayout(0, STATE))
    zero = gl.zeros([W, C], gl.float32, WALK)
    s0, s1 = begin(initial, column, row, V, HAS_FINAL)
    past = 0
    for phase in gl.static_range(2):
        end = count
        if phase == 0:
            end = first + count - second
        for i in range(past, end):
            now = i & 1
            mbarrier.wait(hand.index(1), now ^ 1)
            state.slice(0, W, dim=1).store(s0.to(dtype))
            if phase == 0:
                state.slice(W, W, dim=1).store(s1.to(dtype))
            mbarrier.wait(full.index(AT_K), now)
            fence_async_shared()
            mbarrier.arrive(hand.index(0), count=1)
            at_s = state.slice(0, 2 * W - phase * W, dim=1)
            du = warpgroup_mma(at_s, at_k.slice(0, 2 * W - phase * W, dim=1).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(full.index(AT_V), now)
            fence_async_shared()
            factor = decay(gates, STATE)
            if HAS_INITIAL and (KEY or VALUE):
                s0 = settle(s0, column, row, open_at, factor, KEY, VALUE, STATE)
                s1 = settle(s1, column, row + W, open_at, factor, KEY, VALUE, STATE)
            else:
                s0 = s0 * factor
                s1 = s1 * factor
            dy = values_at.index(0).permute((1, 0))
            du = warpgroup_mma_wait(0, deps=[du])
            if HAS_P or not DELTA:
                mbarrier.arrive(free.index(AT_K), count=1)
            du = du * gate(gates, 1, WALK)[None, :]
            du = warpgroup_mma(dy, squares_at.index(0), du, is_async=True)
            du = warpgroup_mma_wait(0, deps=[du])
            if VALUE:
                held = tile * W + gl.arange(0, W, gl.SliceLayout(1, WALK))
                du = gl.where((held < open_length(open_at, gl.SliceLayout(1, WALK)))[:, None], du, 0.0)
            if DELTA:
                a_du = gl.convert_layout(du.to(dtype), LEFT)
                du = warpgroup_mma(a_du, squares_at.index(1), zero, use_acc=False, is_async=True)
            mbarrier.wait(full.index(AT_Q), now)
            fence_async_shared()
            asked = (dy.load(LEFT).to(gl.float32) * gate(gates, 0, LEFT)[None, :]).to(dtype)
            n0 = warpgroup_mma(asked, at_q.slice(0, W, dim=1), s0, is_async=True)
            n1 = s1
            if phase == 0:
                n1 = warpgroup_mma(asked, at_q.slice(W, W, dim=1), s1, is_async=True)
            if DELTA:
                du = warpgroup_mma_wait(2 - phase, deps=[du])
                missed = gl.convert_layout((du * -gate(gates, 2, WALK)[None, :]).to(dtype), LEFT)
                if HAS_P:
                    mbarrier.wait(full.index(AT_P), now)
                    fence_async_shared()
                n0 = warpgroup_mma(missed, at_p.slice(0, W, dim=1), n0, is_async=True)
                if phase == 0:
                    n1 = warpgroup_mma(missed, at_p.slice(W, W, dim=1), n1, is_async=True)
            mbarrier.wait(hand.index(3), now ^ 1)
            results.index(0).permute((1, 0)).store(du.to(dtype))
            mbarrier.arrive(hand.index(2), count=1)
            mbarrier.arrive(free.index(AT_V), count=1)
            if phase == 0:
                s0, s1 = warpgroup_mma_wait(0, deps=[n0, n1])
            else:
                s0 = warpgroup_mma_wait(0, deps=[n0])
            mbarrier.arrive(free.index(AT_Q), count=1)
            if DELTA:
                mbarrier.arrive(free.index(AT_P if HAS_P else AT_K), count=1)
        past = end
    if HAS_INITIAL:
        gl.store(final + row[None, :] * V + column[:, None], s0)
        gl.store(final + (row + W)[None, :] * V + column[:, None], s1)


@gluon.jit
def reverse_results(
    states, results, hand, dv, dstates, chunks, low, first, second, count, h, tile,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr, ALIGN: gl.constexpr,
):  # fmt: skip
    """The storing warps of `reverse`."""
    if VALUE:
        for part in gl.static_range(2):
            clear(dv, chunks, low, first, h, 2 * tile + part, H, V)
    row = gl.load(chunks + first + count - 1, mask=count > 0, other=0)
    for i in range(count):
        now = i & 1
        c = first + count - 1 - i
        start, tokens, width = read_row(row)
        row = gl.load(chunks + c - 1, mask=i + 1 < count, other=0)
        width = width // ALIGN * ALIGN  # what the compiler may assume of it
        keys = width if KEY else K
        values = width if VALUE else V
        slot = c.to(gl.int64) * H + h
        mbarrier.wait(hand.index(0), now)
        for part in gl.static_range(2):
            column = tile * W + part * C
            state = states.index(0).slice(part * C, C)
            store_state(dstates, (slot * V + column) * K, state, values - column, keys, c >= second, K)
        mbarrier.arrive(hand.index(1), count=1)
        mbarrier.wait(hand.index(2), now)
        store_tile(dv, (start * H + h) * V + tile * W, results.index(0), tokens, V - tile * W, H * V)
        mbarrier.arrive(hand.index(3), count=1)


@gluon.jit
def reverse(
    q, k, p, gates, solve, attend, chunks, documents, do, dfinal, dv, dstates, dinitial, N,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr, DELTA: gl.constexpr, HAS_P: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, ALIGN: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr,
):  # fmt: skip
    """`reverse` of backward.py: one document, one head, 128 value columns."""
    document, h, tile = lane_of(N, H, V // W, VALUE)
    low, first, second, count = bounds(documents, document, tile, W, TILES, 2, KEY, VALUE)
    dtype: gl.constexpr = do.dtype.element_ty
    places = rooms(dtype, K, HAS_P)
    kept = gl.allocate_shared_memory(dtype, [1, W, K], SHARED)
    results = gl.allocate_shared_memory(dtype, [1, C, W], SHARED)
    full, free, hand = barriers(1)
    where = (document * H + h).to(gl.int64) * K * V
    gl.warp_specialize(
        [
            (
                reverse_products,
                (
                    places, full, free, kept, results, hand, dfinal + where if HAS_FINAL else dfinal,
                    dinitial + where if HAS_INITIAL else dinitial, first, second, count, tile,
                    V, DELTA, HAS_P, KEY, VALUE, HAS_INITIAL, HAS_FINAL, dtype,
                ),
            ),
            (
                load_operands,
                (
                    places, full, free, (q, k, p, do, attend, solve, gates), chunks, first, second, count, h, tile,
                    H, K, V, DELTA, HAS_P, KEY, VALUE, ALIGN, True,
                ),
            ),
            (
                reverse_results,
                (kept, results, hand, dv, dstates, chunks, low, first, second, count, h, tile, H, K, V, KEY, VALUE, ALIGN),
            ),
        ],
        [4, 4],
        [24, 40],
    )  # fmt: skip
