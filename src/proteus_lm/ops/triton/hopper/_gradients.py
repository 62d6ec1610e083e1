# ruff: noqa: ANN001 -- kernels: their arguments are pointers, tiles and constants, which Gluon types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false
"""`gradients` of backward.py for Hopper: as many programs as there are multiprocessors, which take chunks in turn.

In Triton a program waits for 100 KiB, works, stores and goes: two share a multiprocessor, and neither memory nor tensor cores are
busy half of the time. Here four warps fetch the next chunk while four or eight multiply, and four store. What a chunk's tiles of
key rows share (do, what was written, dv, and the pairs made of them) is fetched and made once. Notation of backward.py.

Shared memory holds do, dv and what was written of two chunks, with their gates, but states and their gradients, q, k and p of one:
each place has a barrier for full (numbers 0 and 1 for the two, 2 for states, 3 for q, k and p) and one for free.
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
    copy_tile,
    place_of,
    read_row,
    read_whole_row,
    store_tile,
)


@gluon.jit
def add(a, b):
    """Of a sum over later tokens."""
    return a + b


@gluon.jit
def add_two(a, b, c, d):
    """Of two sums at once: (a, b) and (c, d)."""
    return a + c, b + d


@gluon.jit
def load_chunks(
    places, bars, q, k, p, do, fresh, dv, states, dstates, gates, chunks, items,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr, HAS_P: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, ALIGN: gl.constexpr,
):  # fmt: skip
    """The loading warps: all that a chunk of a head needs, a chunk ahead of its use."""
    values_at, written_at, states_at, keys_at, gates_at = places
    full, free, _ = bars
    i = 0
    row = gl.load(chunks + gl.program_id(0) // H)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        start, tokens, width = read_row(row)
        width = width // ALIGN * ALIGN  # what the compiler may assume of it
        ahead = item + gl.num_programs(0)
        row = gl.load(chunks + ahead // H, mask=ahead < items, other=0)
        if tokens > 0:
            h = (item % H).to(gl.int64)
            keys = width if KEY else K
            values = width if VALUE else V
            slot = (item // H).to(gl.int64) * H + h
            s, turn = place_of(i)
            mbarrier.wait(free.index(s), turn ^ 1)
            at = (start * H + h) * V
            copy_tile(values_at.index(2 * s), do, at, tokens, values, H * V)
            if DELTA:
                copy_tile(written_at.index(s), fresh, slot * V * C, values, C, C)
                copy_tile(values_at.index(2 * s + 1), dv, at, tokens, values, H * V)
            else:
                copy_tile(values_at.index(2 * s + 1), fresh, at, tokens, values, H * V)
            copy_line(gates_at.index(s), gates + (slot * 6 + 2) * C)
            async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            mbarrier.wait(free.index(2), (i & 1) ^ 1)
            copy_tile(states_at.index(0), states, slot * V * K, values, keys, K)
            copy_tile(states_at.index(1), dstates, slot * V * K, values, keys, K)
            async_copy.mbarrier_arrive(full.index(2), increment_count=False)
            mbarrier.wait(free.index(3), (i & 1) ^ 1)
            at = (start * H + h) * K
            copy_tile(keys_at.index(0), q, at, tokens, keys, H * K)
            copy_tile(keys_at.index(1), k, at, tokens, keys, H * K)
            if HAS_P:
                copy_tile(keys_at.index(2), p, at, tokens, keys, H * K)
            async_copy.mbarrier_arrive(full.index(3), increment_count=False)
            i += 1


@gluon.jit
def at_least(strength, FLOOR: gl.constexpr):
    """A strength that can be divided by."""
    return gl.where(gl.abs(strength) < FLOOR, FLOOR, strength)


@gluon.jit
def multiply(
    places, pairs, bars, dbeta, chunks, items, scale,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr, HAS_G: gl.constexpr, HAS_P: gl.constexpr,
    DECAYED: gl.constexpr, WINDOW: gl.constexpr, FLOOR: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The multiplying warps, four for 64 key rows.

    For the storing warps dq, dk and dp take the places of q, k and p, and the parts of the log decays' gradient those of the gates.
    """
    values_at, written_at, states_at, keys_at, gates_at = places
    full, free, done = bars
    GROUPS: gl.constexpr = K // C
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, C // GROUPS, 16])
    ALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, C, 16])
    TO: gl.constexpr = gl.SliceLayout(1, ALL)
    r = gl.arange(0, C, gl.SliceLayout(1, PAIRS))
    j = gl.arange(0, C, gl.SliceLayout(0, PAIRS))
    nothing = gl.zeros([C, C], gl.float32, PAIRS)
    zero = gl.zeros([C, K], gl.float32, ALL)
    i = 0
    row = gl.load(chunks + gl.program_id(0) // H)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        start, tokens, _width, after = read_whole_row(row)
        ahead = item + gl.num_programs(0)
        if tokens > 0:
            s, turn = place_of(i)
            mbarrier.wait(full.index(s), turn)
            fence_async_shared()
            vectors = gates_at.index(s)  # again, G, P, strength
            at_do = values_at.index(2 * s)
            at_e = values_at.index(2 * s + 1)
            if DELTA:
                at_u = written_at.index(s)
            else:
                at_u = at_e.permute((1, 0))
            asked = warpgroup_mma(at_do, at_u, nothing, use_acc=False, is_async=True)
            if DELTA:
                missed = warpgroup_mma(at_e, at_u, nothing, use_acc=False, is_async=True)
            mbarrier.wait(full.index(2), i & 1)
            fence_async_shared()
            x_q = warpgroup_mma(at_do, states_at.index(0), zero, use_acc=False, is_async=True)
            x_k = warpgroup_mma(at_u.permute((1, 0)), states_at.index(1), zero, use_acc=False, is_async=True)
            if DELTA:
                x_p = warpgroup_mma(at_e, states_at.index(0), zero, use_acc=False, is_async=True)
            if HAS_G:
                early = vectors.slice(C, C).load(gl.SliceLayout(0, PAIRS))
                late = vectors.slice((2 if WINDOW else 1) * C, C).load(gl.SliceLayout(1, PAIRS))
                if DELTA:
                    before = vectors.slice((1 if DECAYED else 2) * C, C).load(gl.SliceLayout(1, PAIRS))
            asked = warpgroup_mma_wait(4 if DELTA else 2, deps=[asked])
            if WINDOW:
                near = gl.sum(gl.where(r[:, None] == j[None, :], asked, 0.0), 1) * scale
                seen = r[:, None] > j[None, :]
                reach = gl.exp(
                    vectors.slice(C, C).load(gl.SliceLayout(0, PAIRS)) - vectors.slice(2 * C, C).load(gl.SliceLayout(0, PAIRS))
                )
                own = vectors.slice(3 * C, C).load(gl.SliceLayout(0, PAIRS))
                again = vectors.slice(0, C).load(gl.SliceLayout(0, PAIRS))
                asked = asked * at_least(own * reach + again, FLOOR)[None, :]
            else:
                seen = r[:, None] >= j[None, :]
            if HAS_G:
                asked = asked * gl.exp(gl.where(seen, late[:, None] - early[None, :], 0.0))
            pairs.index(0).store(gl.where(seen, asked * scale, 0.0).to(dtype))
            if DELTA:
                missed = warpgroup_mma_wait(3, deps=[missed])
                strength = vectors.slice(3 * C, C).load(gl.SliceLayout(1, PAIRS))
                d_beta = (missed * (1.0 / (strength * strength))[:, None]).to(dbeta.dtype.element_ty)
                at = dbeta + start * H + item % H + r[:, None] * H + 0 * j[None, :]
                gl.store(at, d_beta, mask=(r[:, None] == j[None, :]) & (r < tokens)[:, None])
                seen = r[:, None] > j[None, :]
                if HAS_G:
                    missed = missed * gl.exp(gl.where(seen, before[:, None] - early[None, :], 0.0))
                pairs.index(1).store(gl.where(seen, -missed, 0.0).to(dtype))
            fence_async_shared()
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
                    near = gl.convert_layout(near, TO)
                whole = zero
                for v in gl.static_range(V // C):
                    b_s = states_at.index(0).slice(v * C, C).load(ALL).to(gl.float32)
                    whole += b_s * states_at.index(1).slice(v * C, C).load(ALL).to(gl.float32)
                whole = whole * gl.exp(end)[:, None]
            x_q = warpgroup_mma_wait(2 if DELTA else 1, deps=[x_q])
            x_k = warpgroup_mma_wait(1 if DELTA else 0, deps=[x_k])
            if DELTA:
                x_p = warpgroup_mma_wait(0, deps=[x_p])
            mbarrier.arrive(free.index(2), count=1)
            mbarrier.wait(full.index(3), i & 1)
            fence_async_shared()
            at_q = keys_at.index(0)
            at_k = keys_at.index(1)
            at_p = keys_at.index(2 if HAS_P else 1)
            b_k = at_k.load(ALL).to(gl.float32)
            if HAS_G:
                x_q = x_q * reads[:, None]
                x_k = x_k * left[:, None]
                whole += x_k * b_k
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
            if WINDOW:
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
                at = dbeta + (start * H + item % H + gl.arange(0, C, TO) * H) * 2
                gl.store(at, near * scores + follows * d_omega, mask=gl.arange(0, C, TO) < tokens)
                more = gl.arange(0, C, TO) < gl.where(after > 0, tokens, tokens - 1)
                gl.store(at + 2 * H + 1, d_omega, mask=more)
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
            mbarrier.arrive(done.index(0), count=1)
            i += 1
            row = gl.load(chunks + ahead // H, mask=ahead < items, other=0)  # behind the fences, which are barriers for memory
        else:
            row = gl.load(chunks + ahead // H, mask=ahead < items, other=0)


@gluon.jit
def store_gradients(
    keys_at, gates_at, bars, dq, dk, dp, dg, chunks, items,
    H: gl.constexpr, K: gl.constexpr, DELTA: gl.constexpr, HAS_G: gl.constexpr, HAS_P: gl.constexpr, DECAYED: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """The storing warps, which sum the log decays' gradient over later tokens as well."""
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # a vector (C,), whole in each warp
    line = gl.arange(0, C, LINE)
    _, free, done = bars
    i = 0
    row = gl.load(chunks + gl.program_id(0) // H)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        start, tokens, _width, after = read_whole_row(row)
        ahead = item + gl.num_programs(0)
        row = gl.load(chunks + ahead // H, mask=ahead < items, other=0)
        if tokens > 0:
            at = (start * H + item % H) * K
            mbarrier.wait(done.index(0), i & 1)
            vectors = gates_at.index(i % 2)
            if HAS_G:
                upto = vectors.slice(C, C).load(LINE)
                whole = vectors.slice(2 * C, C).load(LINE)
                if WINDOW or (DELTA and not DECAYED):
                    behind = vectors.slice(3 * C, C).load(LINE)
                if WINDOW:
                    alone = vectors.slice(0, C).load(LINE)
            mbarrier.arrive(free.index(i % 2), count=1)
            store_tile(dq, at, keys_at.index(0), tokens, K, H * K)
            store_tile(dk, at, keys_at.index(1), tokens, K, H * K)
            if HAS_P:
                store_tile(dp, at, keys_at.index(2), tokens, K, H * K)
            mbarrier.arrive(free.index(3), count=1)
            if HAS_G:
                # A token's decay moves every log decay from its own on; those that start behind it, from the next on.
                d_g = gl.associative_scan(upto, 0, add, reverse=True) + gl.sum(whole, 0)
                if WINDOW or (DELTA and not DECAYED):
                    d_g += gl.associative_scan(behind, 0, add, reverse=True) - behind
                to = dg + start * H + item % H
                count = tokens
                if WINDOW:
                    d_g += alone
                    to += H  # the token after has the decay that a pair meets
                    count = gl.where(after > 0, tokens, tokens - 1)
                gl.store(to + line * H, d_g, mask=line < count)
            i += 1


@gluon.jit
def gradients(
    q, k, p, gates, chunks, do, fresh, states, dstates, dq, dk, dp, dv, dg, dbeta, scale, items,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr, HAS_G: gl.constexpr, HAS_P: gl.constexpr,
    DECAYED: gl.constexpr, WINDOW: gl.constexpr, FLOOR: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, ALIGN: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """`gradients` of backward.py; `items` chunks and heads. dg: fp32 (tokens, H), summed over key rows."""
    dtype: gl.constexpr = q.dtype.element_ty
    values_at = gl.allocate_shared_memory(dtype, [4, C, V], SHARED)
    written_at = gl.allocate_shared_memory(dtype, [2 if DELTA else 1, V if DELTA else C, C], SHARED)
    states_at = gl.allocate_shared_memory(dtype, [2, V, K], SHARED)
    keys_at = gl.allocate_shared_memory(dtype, [3 if HAS_P else 2, C, K], SHARED)
    gates_at = gl.allocate_shared_memory(gl.float32, [2, 4 * C], FLAT)
    pairs = gl.allocate_shared_memory(dtype, [2 if DELTA else 1, C, C], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for s in gl.static_range(4):
        mbarrier.init(full.index(s), count=128)  # each loading thread
        mbarrier.init(free.index(s), count=1)
    mbarrier.init(done.index(0), count=1)
    places = (values_at, written_at, states_at, keys_at, gates_at)
    bars = (full, free, done)
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    places, pairs, bars, dbeta, chunks, items, scale,
                    H, K, V, DELTA, HAS_G, HAS_P, DECAYED, WINDOW, FLOOR, dtype,
                ),
            ),
            (
                load_chunks,
                (
                    places, bars, q, k, p, do, fresh, dv, states, dstates, gates, chunks, items,
                    H, K, V, DELTA, HAS_P, KEY, VALUE, ALIGN,
                ),
            ),
            (
                store_gradients,
                (keys_at, gates_at, bars, dq, dk, dp, dg, chunks, items, H, K, DELTA, HAS_G, HAS_P, DECAYED, WINDOW),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
