# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Gluon types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false
"""`gradients` of backward.py for Hopper: as many programs as there are multiprocessors, which take chunks in turn.

In Triton a program waits for 100 KiB, works, stores and goes: two share a multiprocessor, and neither memory nor tensor cores are
busy half of the time. Here four warps fetch the next chunk while four or eight multiply, and four make the next chunk's pairs and
store. Notation of backward.py. An item is a chunk, a head and a tile of up to 128 key rows; the value columns of an item come in
steps of up to 128.

Shared memory holds do, dv and what was written of two steps, but states and their gradients of one; the gates of two items, but
q, k and p of one. Each place has a barrier for full and one for free.
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
    copy_tile,
    place_of,
    read_row,
    read_whole_row,
    store_tile,
)

# Numbers of the places: of two steps, of states, of keys, and of two items' gates.
AT_STATES, AT_KEYS, AT_GATES = gl.constexpr(2), gl.constexpr(3), gl.constexpr(4)


@gluon.jit
def add(a, b):
    """Of a sum over later tokens."""
    return a + b


@gluon.jit
def add_two(a, b, c, d):
    """Of two sums at once: (a, b) and (c, d)."""
    return a + c, b + d


@gluon.jit
def split(item, H: gl.constexpr, NKT: gl.constexpr):
    """Chunk, head and tile of key rows of an item."""
    return item // (H * NKT), item // NKT % H, item % NKT


@gluon.jit
def steps_of(width, V: gl.constexpr, VT: gl.constexpr, VALUE: gl.constexpr):
    """Steps of VT value columns in which any is open."""
    steps = (V + VT - 1) // VT
    if VALUE:
        steps = (width + VT - 1) // VT
    return steps


@gluon.jit
def is_open(tokens, width, tile, KT: gl.constexpr, KEY: gl.constexpr):
    """Whether an item has anything to do: a chunk with tokens, and an open key row in its tile."""
    there = tokens > 0
    if KEY:
        there = there & (width > tile * KT)
    return there


@gluon.jit
def load_items(
    places, bars, q, k, p, do, fresh, dv, states, dstates, gates, chunks, items,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, KT: gl.constexpr, VT: gl.constexpr, DELTA: gl.constexpr,
    HAS_P: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr, ALIGN: gl.constexpr,
):  # fmt: skip
    """The loading warps: all that an item needs, ahead of its use."""
    values_at, written_at, states_at, keys_at, gates_at = places
    full, free, _ = bars
    NKT: gl.constexpr = K // KT
    i = 0
    j = 0
    row = gl.load(chunks + gl.program_id(0) // (H * NKT))
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        chunk, head, tile = split(item, H, NKT)
        start, tokens, width = read_row(row)
        width = width // ALIGN * ALIGN  # what the compiler may assume of it
        ahead = item + gl.num_programs(0)
        row = gl.load(chunks + ahead // (H * NKT), mask=ahead < items, other=0)
        if is_open(tokens, width, tile, KT, KEY):
            h = head.to(gl.int64)
            keys = (width if KEY else K) - tile * KT
            values = width if VALUE else V
            slot = chunk.to(gl.int64) * H + h
            for step in range(steps_of(width, V, VT, VALUE)):
                s, turn = place_of(j)
                column = step * VT
                left = values - column
                at = (start * H + h) * V + column
                mbarrier.wait(free.index(s), turn ^ 1)
                copy_tile(values_at.index(2 * s), do, at, tokens, left, H * V)
                if DELTA:
                    copy_tile(written_at.index(s), fresh, (slot * V + column) * C, left, C, C)
                    copy_tile(values_at.index(2 * s + 1), dv, at, tokens, left, H * V)
                else:
                    copy_tile(values_at.index(2 * s + 1), fresh, at, tokens, left, H * V)
                async_copy.mbarrier_arrive(full.index(s), increment_count=False)
                if step == 0:
                    g, again = place_of(i)
                    mbarrier.wait(free.index(AT_GATES + g), again ^ 1)
                    copy_line(gates_at.index(g), gates + (slot * 6 + 2) * C)
                    async_copy.mbarrier_arrive(full.index(AT_GATES + g), increment_count=False)
                mbarrier.wait(free.index(AT_STATES), (j & 1) ^ 1)
                at = (slot * V + column) * K + tile * KT
                copy_tile(states_at.index(0), states, at, left, keys, K)
                copy_tile(states_at.index(1), dstates, at, left, keys, K)
                async_copy.mbarrier_arrive(full.index(AT_STATES), increment_count=False)
                j += 1
            mbarrier.wait(free.index(AT_KEYS), (i & 1) ^ 1)
            at = (start * H + h) * K + tile * KT
            copy_tile(keys_at.index(0), q, at, tokens, keys, H * K)
            copy_tile(keys_at.index(1), k, at, tokens, keys, H * K)
            if HAS_P:
                copy_tile(keys_at.index(2), p, at, tokens, keys, H * K)
            async_copy.mbarrier_arrive(full.index(AT_KEYS), increment_count=False)
            i += 1


@gluon.jit
def at_least(strength, FLOOR: gl.constexpr):
    """A strength that can be divided by."""
    return gl.where(gl.abs(strength) < FLOOR, FLOOR, strength)


@gluon.jit
def operands(places, s, VALUES: gl.constexpr, DELTA: gl.constexpr):
    """do, the error (or v), and what was written, turned (columns, tokens): a step's first VALUES columns."""
    values_at, written_at, _states_at, _keys_at, _gates_at = places
    at_e = values_at.index(2 * s + 1).slice(0, VALUES, dim=1)
    if DELTA:
        at_u = written_at.index(s).slice(0, VALUES)
    else:
        at_u = at_e.permute((1, 0))
    return values_at.index(2 * s).slice(0, VALUES, dim=1), at_e, at_u


@gluon.jit
def pair_up(
    places, pairs, near_at, bars, dbeta, start, tokens, head, tile, i, j, steps, scale,
    H: gl.constexpr, VALUES: gl.constexpr, MULTI: gl.constexpr, DELTA: gl.constexpr, HAS_G: gl.constexpr, DECAYED: gl.constexpr,
    WINDOW: gl.constexpr, FLOOR: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The matrices of pairs of the i-th item, and what is found from them alone; VALUES columns a step, the first of which is j."""
    _, _, _, _, gates_at = places
    full, free, hand = bars
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    r = gl.arange(0, C, gl.SliceLayout(1, PAIRS))
    m = gl.arange(0, C, gl.SliceLayout(0, PAIRS))
    asked = gl.zeros([C, C], gl.float32, PAIRS)
    missed = asked
    if MULTI:
        for _step in range(1, steps):
            s, turn = place_of(j)
            mbarrier.wait(full.index(s), turn)
            fence_async_shared()
            at_do, at_e, at_u = operands(places, s, VALUES, DELTA)
            asked = warpgroup_mma(at_do, at_u, asked, is_async=True)
            if DELTA:
                missed = warpgroup_mma(at_e, at_u, missed, is_async=True)
                asked, missed = warpgroup_mma_wait(0, deps=[asked, missed])
            else:
                asked = warpgroup_mma_wait(0, deps=[asked])
            mbarrier.arrive(free.index(s), count=1)
            j += 1
    s, turn = place_of(j)
    g, again = place_of(i)
    mbarrier.wait(full.index(s), turn)
    mbarrier.wait(full.index(AT_GATES + g), again)
    fence_async_shared()
    vectors = gates_at.index(g)  # again, G, P, strength
    at_do, at_e, at_u = operands(places, s, VALUES, DELTA)
    asked = warpgroup_mma(at_do, at_u, asked, use_acc=MULTI, is_async=True)
    if HAS_G:
        early = vectors.slice(C, C).load(gl.SliceLayout(0, PAIRS))
        late = vectors.slice((2 if WINDOW else 1) * C, C).load(gl.SliceLayout(1, PAIRS))
    asked = warpgroup_mma_wait(0, deps=[asked])
    if not DELTA:
        mbarrier.arrive(free.index(s), count=1)
    if WINDOW:
        near = gl.sum(gl.where(r[:, None] == m[None, :], asked, 0.0), 1) * scale
        seen = r[:, None] > m[None, :]
        reach = gl.exp(early - vectors.slice(2 * C, C).load(gl.SliceLayout(0, PAIRS)))
        own = vectors.slice(3 * C, C).load(gl.SliceLayout(0, PAIRS))
        again_ = vectors.slice(0, C).load(gl.SliceLayout(0, PAIRS))
        asked = asked * at_least(own * reach + again_, FLOOR)[None, :]
    else:
        seen = r[:, None] >= m[None, :]
    if HAS_G:
        asked = asked * gl.exp(gl.where(seen, late[:, None] - early[None, :], 0.0))
    asked = gl.where(seen, asked * scale, 0.0).to(dtype)
    mbarrier.wait(hand.index(2), (i & 1) ^ 1)
    pairs.index(0).store(asked)
    if WINDOW:
        near_at.store(near)
    if DELTA:
        missed = warpgroup_mma(at_e, at_u, missed, use_acc=MULTI, is_async=True)
        missed = warpgroup_mma_wait(0, deps=[missed])
        mbarrier.arrive(free.index(s), count=1)
        strength = vectors.slice(3 * C, C).load(gl.SliceLayout(1, PAIRS))
        d_beta = (missed * (1.0 / (strength * strength))[:, None]).to(dbeta.dtype.element_ty)
        to = dbeta + start * H + head + r[:, None] * H + 0 * m[None, :]
        gl.store(to, d_beta, mask=(r[:, None] == m[None, :]) & (r < gl.where(tile > 0, 0, tokens))[:, None])
        seen = r[:, None] > m[None, :]
        if HAS_G:
            before = vectors.slice((1 if DECAYED else 2) * C, C).load(gl.SliceLayout(1, PAIRS))
            missed = missed * gl.exp(gl.where(seen, before[:, None] - early[None, :], 0.0))
        pairs.index(1).store(gl.where(seen, -missed, 0.0).to(dtype))
    fence_async_shared()
    mbarrier.arrive(hand.index(1), count=1)


@gluon.jit
def multiply_item(
    places, pairs, near_at, bars, dbeta, start, tokens, after, head, i, j, steps, scale,
    H: gl.constexpr, KT: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr, MULTI: gl.constexpr, DELTA: gl.constexpr,
    HAS_G: gl.constexpr, HAS_P: gl.constexpr, DECAYED: gl.constexpr, WINDOW: gl.constexpr, FLOOR: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """The first KEYS key rows of the tile of the i-th item, and VALUES columns of each step; the others are shut.

    For the storing warps dq, dk and dp take the places of q, k and p, whose shut part is zero, and the parts of the log decays'
    gradient those of the gates.
    """
    _, _, states_at, keys_at, gates_at = places
    full, free, hand = bars
    GROUPS: gl.constexpr = KT // C
    ALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, KEYS // GROUPS, 16])
    TO: gl.constexpr = gl.SliceLayout(1, ALL)
    x_q = gl.zeros([C, KEYS], gl.float32, ALL)
    x_k = x_q
    x_p = x_q
    whole = x_q
    at_s = states_at.index(0).slice(0, VALUES).slice(0, KEYS, dim=1)
    at_ds = states_at.index(1).slice(0, VALUES).slice(0, KEYS, dim=1)
    if MULTI:
        for _step in range(1, steps):
            s, turn = place_of(j)
            mbarrier.wait(full.index(s), turn)
            mbarrier.wait(full.index(AT_STATES), j & 1)
            fence_async_shared()
            at_do, at_e, at_u = operands(places, s, VALUES, DELTA)
            x_q = warpgroup_mma(at_do, at_s, x_q, is_async=True)
            x_k = warpgroup_mma(at_u.permute((1, 0)), at_ds, x_k, is_async=True)
            if DELTA:
                x_p = warpgroup_mma(at_e, at_s, x_p, is_async=True)
            if HAS_G:
                for v in gl.static_range(VALUES // C):
                    b_s = at_s.slice(v * C, C).load(ALL).to(gl.float32)
                    whole += b_s * at_ds.slice(v * C, C).load(ALL).to(gl.float32)
            if DELTA:
                x_q, x_k, x_p = warpgroup_mma_wait(0, deps=[x_q, x_k, x_p])
            else:
                x_q, x_k = warpgroup_mma_wait(0, deps=[x_q, x_k])
            mbarrier.arrive(free.index(s), count=1)
            mbarrier.arrive(free.index(AT_STATES), count=1)
            j += 1
    s, turn = place_of(j)
    g, again = place_of(i)
    mbarrier.wait(full.index(s), turn)
    mbarrier.wait(full.index(AT_STATES), j & 1)
    mbarrier.wait(full.index(AT_GATES + g), again)
    fence_async_shared()
    vectors = gates_at.index(g)  # again, G, P, strength
    at_do, at_e, at_u = operands(places, s, VALUES, DELTA)
    x_q = warpgroup_mma(at_do, at_s, x_q, use_acc=MULTI, is_async=True)
    x_k = warpgroup_mma(at_u.permute((1, 0)), at_ds, x_k, use_acc=MULTI, is_async=True)
    if DELTA:
        x_p = warpgroup_mma(at_e, at_s, x_p, use_acc=MULTI, is_async=True)
    if HAS_G:
        running = vectors.slice(C, C).load(TO)
        end = vectors.slice(2 * C - 1, 1).load(TO)
        before = vectors.slice((1 if DECAYED else 2) * C, C).load(TO)
        reads = gl.exp(before if WINDOW else running) * scale
        left = gl.exp(end - running)
        if WINDOW:
            own = vectors.slice(3 * C, C).load(TO)
            follows = gl.exp(running - before)
            omega = at_least(own * follows + vectors.slice(0, C).load(TO), FLOOR)
            left = left * omega
        for v in gl.static_range(VALUES // C):
            b_s = at_s.slice(v * C, C).load(ALL).to(gl.float32)
            whole += b_s * at_ds.slice(v * C, C).load(ALL).to(gl.float32)
        whole = whole * gl.exp(end)[:, None]
    x_q = warpgroup_mma_wait(2 if DELTA else 1, deps=[x_q])
    x_k = warpgroup_mma_wait(1 if DELTA else 0, deps=[x_k])
    if DELTA:
        x_p = warpgroup_mma_wait(0, deps=[x_p])
    mbarrier.arrive(free.index(s), count=1)
    mbarrier.arrive(free.index(AT_STATES), count=1)
    mbarrier.wait(full.index(AT_KEYS), i & 1)
    mbarrier.wait(hand.index(1), i & 1)
    fence_async_shared()
    at_q = keys_at.index(0).slice(0, KEYS, dim=1)
    at_k = keys_at.index(1).slice(0, KEYS, dim=1)
    at_p = keys_at.index(2 if HAS_P else 1).slice(0, KEYS, dim=1)
    if HAS_G:
        x_q = x_q * reads[:, None]
        x_k = x_k * left[:, None]
        whole += x_k * at_k.load(ALL).to(gl.float32)
    else:
        x_q = x_q * scale
    x_q = warpgroup_mma(pairs.index(0), at_k, x_q, is_async=True)
    x_k = warpgroup_mma(pairs.index(0).permute((1, 0)), at_q, x_k, is_async=True)
    if DELTA:
        x_k = warpgroup_mma(pairs.index(1).permute((1, 0)), at_p, x_k, is_async=True)
        if HAS_G:
            x_p = x_p * -gl.exp(before)[:, None]
        else:
            x_p = -x_p
        x_p = warpgroup_mma(pairs.index(1), at_k, x_p, is_async=True)
    x_q = warpgroup_mma_wait(3 if DELTA else 1, deps=[x_q])
    if HAS_G:
        b_q = at_q.load(ALL).to(gl.float32)
        upto = x_q * b_q
    x_k = warpgroup_mma_wait(1 if DELTA else 0, deps=[x_k])
    b_k = at_k.load(ALL).to(gl.float32)
    if WINDOW:
        near = near_at.load(TO)
        d_read = gl.sum(upto, 1)
        d_write = -gl.sum(x_k * b_k, 1)
        d_omega = -d_write / omega
        scores = gl.sum(b_q * b_k, 1)
        x_q += (own * near)[:, None] * b_k
        x_k += (own * near)[:, None] * b_q
    elif HAS_G:
        upto -= x_k * b_k
    if DELTA:
        x_p = warpgroup_mma_wait(0, deps=[x_p])
    mbarrier.arrive(hand.index(2), count=1)
    if DELTA:
        if HAS_G:
            if HAS_P:
                b_p = at_p.load(ALL).to(gl.float32)
            else:
                b_p = b_k
            if DECAYED:
                upto += x_p * b_p
            else:
                vectors.slice(3 * C, C).store(gl.sum(x_p * b_p, 1))
        if not HAS_P:
            x_k += x_p
    if WINDOW:
        vectors.slice(C, C).store(d_write)
        vectors.slice(2 * C, C).store(gl.sum(whole, 1))
        vectors.slice(3 * C, C).store(d_read)
        to = dbeta + (start * H + head + gl.arange(0, C, TO) * H) * 2
        gl.store(to, near * scores + follows * d_omega, mask=gl.arange(0, C, TO) < tokens)
        more = gl.arange(0, C, TO) < gl.where(after > 0, tokens, tokens - 1)
        gl.store(to + 2 * H + 1, d_omega, mask=more)
        # what the token after has of a decay of its own
        vectors.slice(0, C).store(own * follows * d_omega)
    elif HAS_P:  # one by one: no shared memory is left for two at once
        vectors.slice(C, C).store(gl.sum(upto, 1))
        vectors.slice(2 * C, C).store(gl.sum(whole, 1))
    elif HAS_G:
        upto, whole = gl.reduce((upto, whole), 1, add_two)
        vectors.slice(C, C).store(upto)
        vectors.slice(2 * C, C).store(whole)
    at_q.store(x_q.to(dtype))
    at_k.store(x_k.to(dtype))
    if HAS_P:
        at_p.store(x_p.to(dtype))
    mbarrier.arrive(hand.index(0), count=1)


@gluon.jit
def multiply(
    places, pairs, near_at, bars, dbeta, chunks, items, span, scale,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, KT: gl.constexpr, VT: gl.constexpr, DELTA: gl.constexpr,
    HAS_G: gl.constexpr, HAS_P: gl.constexpr, DECAYED: gl.constexpr, WINDOW: gl.constexpr, FLOOR: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The multiplying warps, four for 64 key rows: whole items, or, while no more than 64 coordinates are open, those alone."""
    NKT: gl.constexpr = K // KT
    MULTI: gl.constexpr = V > VT
    NARROW: gl.constexpr = (KEY and KT > C) or (VALUE and V == 2 * C)
    i = 0
    j = 0
    row = gl.load(chunks + gl.program_id(0) // (H * NKT))
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _chunk, head, tile = split(item, H, NKT)
        start, tokens, width, after = read_whole_row(row)
        ahead = item + gl.num_programs(0)
        if is_open(tokens, width, tile, KT, KEY):
            steps = steps_of(width, V, VT, VALUE)
            part = dbeta + tile * span * 2 if WINDOW else dbeta
            if NARROW and width - (tile * KT if KEY else 0) <= C:
                multiply_item(
                    places, pairs, near_at, bars, part, start, tokens, after, head, i, j, steps, scale,
                    H, KT, C if KEY else KT, C if VALUE else VT, MULTI, DELTA, HAS_G, HAS_P, DECAYED, WINDOW, FLOOR, dtype,
                )  # fmt: skip
            else:
                multiply_item(
                    places, pairs, near_at, bars, part, start, tokens, after, head, i, j, steps, scale,
                    H, KT, KT, VT, MULTI, DELTA, HAS_G, HAS_P, DECAYED, WINDOW, FLOOR, dtype,
                )  # fmt: skip
            i += 1
            j += steps
            row = gl.load(chunks + ahead // (H * NKT), mask=ahead < items, other=0)  # behind the fences: barriers for memory
        else:
            row = gl.load(chunks + ahead // (H * NKT), mask=ahead < items, other=0)


@gluon.jit
def store_item(
    keys_at, gates_at, bars, dq, dk, dp, dg, start, tokens, after, head, tile, i, span,
    H: gl.constexpr, K: gl.constexpr, KT: gl.constexpr, DELTA: gl.constexpr, HAS_G: gl.constexpr, HAS_P: gl.constexpr,
    DECAYED: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Store the gradients of the i-th item; those of the log decays are sums over later tokens as well."""
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # a vector (C,), whole in each warp
    line = gl.arange(0, C, LINE)
    _, free, hand = bars
    at = (start * H + head) * K + tile * KT
    mbarrier.wait(hand.index(0), i & 1)
    vectors = gates_at.index(i % 2)
    if HAS_G:
        upto = vectors.slice(C, C).load(LINE)
        whole = vectors.slice(2 * C, C).load(LINE)
        if WINDOW or (DELTA and not DECAYED):
            behind = vectors.slice(3 * C, C).load(LINE)
        if WINDOW:
            alone = vectors.slice(0, C).load(LINE)
    mbarrier.arrive(free.index(AT_GATES + i % 2), count=1)
    store_tile(dq, at, keys_at.index(0), tokens, KT, H * K)
    store_tile(dk, at, keys_at.index(1), tokens, KT, H * K)
    if HAS_P:
        store_tile(dp, at, keys_at.index(2), tokens, KT, H * K)
    mbarrier.arrive(free.index(AT_KEYS), count=1)
    if HAS_G:
        # A token's decay moves every log decay from its own on; those that start behind it, from the next on.
        d_g = gl.associative_scan(upto, 0, add, reverse=True) + gl.sum(whole, 0)
        if WINDOW or (DELTA and not DECAYED):
            d_g += gl.associative_scan(behind, 0, add, reverse=True) - behind
        to = dg + tile * span + start * H + head
        count = tokens
        if WINDOW:
            d_g += alone
            to += H  # the token after has the decay that a pair meets
            count = gl.where(after > 0, tokens, tokens - 1)
        gl.store(to + line * H, d_g, mask=line < count)


@gluon.jit
def clear(x, at, tokens, KT: gl.constexpr, STRIDE: gl.constexpr):
    """Zeros in a tile of key rows of a chunk."""
    r = gl.arange(0, C, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, KT, gl.SliceLayout(0, ROWS))
    zero = gl.zeros([C, KT], x.dtype.element_ty, ROWS)
    gl.store(x + at + (r[:, None] * STRIDE + column[None, :]), zero, mask=(r < tokens)[:, None])


@gluon.jit
def pair_and_store(
    places, pairs, near_at, bars, dq, dk, dp, dg, dbeta, chunks, items, span, scale,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, KT: gl.constexpr, VT: gl.constexpr, DELTA: gl.constexpr,
    HAS_G: gl.constexpr, HAS_P: gl.constexpr, DECAYED: gl.constexpr, WINDOW: gl.constexpr, FLOOR: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The storing warps: the pairs of an item while the one before is multiplied, then the gradients of that one."""
    _, _, _, keys_at, gates_at = places
    NKT: gl.constexpr = K // KT
    MULTI: gl.constexpr = V > VT
    i = 0
    j = 0
    row = gl.load(chunks + gl.program_id(0) // (H * NKT))
    _chunk, last_head, last_tile = split(gl.program_id(0), H, NKT)
    last_start, last_tokens, _width, last_after = read_whole_row(row)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _chunk, head, tile = split(item, H, NKT)
        start, tokens, width, after = read_whole_row(row)
        ahead = item + gl.num_programs(0)
        row = gl.load(chunks + ahead // (H * NKT), mask=ahead < items, other=0)
        if is_open(tokens, width, tile, KT, KEY):
            steps = steps_of(width, V, VT, VALUE)
            if VALUE and V == 2 * C and width <= C:
                pair_up(
                    places, pairs, near_at, bars, dbeta, start, tokens, head, tile, i, j, steps, scale,
                    H, C, MULTI, DELTA, HAS_G, DECAYED, WINDOW, FLOOR, dtype,
                )  # fmt: skip
            else:
                pair_up(
                    places, pairs, near_at, bars, dbeta, start, tokens, head, tile, i, j, steps, scale,
                    H, VT, MULTI, DELTA, HAS_G, DECAYED, WINDOW, FLOOR, dtype,
                )  # fmt: skip
            if i > 0:
                store_item(
                    keys_at, gates_at, bars, dq, dk, dp, dg, last_start, last_tokens, last_after, last_head, last_tile, i - 1, span,
                    H, K, KT, DELTA, HAS_G, HAS_P, DECAYED, WINDOW,
                )  # fmt: skip
            last_start = start
            last_tokens = tokens
            last_after = after
            last_head = head
            last_tile = tile
            i += 1
            j += steps
        elif KEY and NKT > 1:
            at = (start * H + head) * K + tile * KT
            clear(dq, at, tokens, KT, H * K)
            clear(dk, at, tokens, KT, H * K)
            if HAS_P:
                clear(dp, at, tokens, KT, H * K)
    if i > 0:
        store_item(
            keys_at, gates_at, bars, dq, dk, dp, dg, last_start, last_tokens, last_after, last_head, last_tile, i - 1, span,
            H, K, KT, DELTA, HAS_G, HAS_P, DECAYED, WINDOW,
        )  # fmt: skip


@gluon.jit
def gradients(
    q, k, p, gates, chunks, do, fresh, states, dstates, dq, dk, dp, dv, dg, dbeta, scale, items, span,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr, HAS_G: gl.constexpr, HAS_P: gl.constexpr,
    DECAYED: gl.constexpr, WINDOW: gl.constexpr, FLOOR: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, ALIGN: gl.constexpr, LOADING: gl.constexpr, STORING: gl.constexpr,
):  # fmt: skip
    """`gradients` of backward.py; `items`: see above. dg: fp32 (tiles of key rows, `span`, which is tokens times H); of sliding
    windows dbeta is so, too."""
    dtype: gl.constexpr = q.dtype.element_ty
    KT: gl.constexpr = K if K < 2 * C else 2 * C
    VT: gl.constexpr = V if V < 2 * C else 2 * C
    values_at = gl.allocate_shared_memory(dtype, [4, C, VT], SHARED)
    written_at = gl.allocate_shared_memory(dtype, [2 if DELTA else 1, VT if DELTA else C, C], SHARED)
    states_at = gl.allocate_shared_memory(dtype, [2, VT, KT], SHARED)
    keys_at = gl.allocate_shared_memory(dtype, [3 if HAS_P else 2, C, KT], SHARED)
    gates_at = gl.allocate_shared_memory(gl.float32, [2, 4 * C], FLAT)
    pairs = gl.allocate_shared_memory(dtype, [2 if DELTA else 1, C, C], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [6, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [6, 1], BARRIER)
    hand = gl.allocate_shared_memory(gl.int64, [3, 1], BARRIER)  # gradients made; pairs made; pairs used
    near_at = gl.allocate_shared_memory(gl.float32, [C if WINDOW else 1], FLAT)
    for s in gl.static_range(6):
        mbarrier.init(full.index(s), count=128)  # each loading thread
        mbarrier.init(free.index(s), count=2 if s < 2 else 1)
    for s in gl.static_range(3):
        mbarrier.init(hand.index(s), count=1)
    places = (values_at, written_at, states_at, keys_at, gates_at)
    bars = (full, free, hand)
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    places, pairs, near_at, bars, dbeta, chunks, items, span, scale,
                    H, K, V, KT, VT, DELTA, HAS_G, HAS_P, DECAYED, WINDOW, FLOOR, KEY, VALUE, dtype,
                ),
            ),
            (
                load_items,
                (
                    places, bars, q, k, p, do, fresh, dv, states, dstates, gates, chunks, items,
                    H, K, V, KT, VT, DELTA, HAS_P, KEY, VALUE, ALIGN,
                ),
            ),
            (
                pair_and_store,
                (
                    places, pairs, near_at, bars, dq, dk, dp, dg, dbeta, chunks, items, span, scale,
                    H, K, V, KT, VT, DELTA, HAS_G, HAS_P, DECAYED, WINDOW, FLOOR, KEY, VALUE, dtype,
                ),
            ),
        ],
        [4, 4],
        [LOADING, STORING],
    )  # fmt: skip
