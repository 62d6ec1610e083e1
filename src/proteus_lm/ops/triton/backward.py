# ruff: noqa: ANN001, ANN201 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
"""Backward kernels of the linear memories. Notation of `forward.py`; d marks a gradient, dS that of the state after the chunk.

    dfresh = attend^T do + e^(total - G) k dS;  dv = (solve beta)^T dfresh   (without DELTA: dv = dfresh)
    dS <- e^total dS + scale (e^G q)^T do - (e^P p)^T dv
    dq = scale e^G do S^T + [do fresh^T] k;  dp = -(e^P dv S^T + [dv fresh^T] k)
    dk = e^(total - G) fresh dS^T + [do fresh^T]^T q - [dv fresh^T]^T p     ([]: lower triangle times its decay, times scale for do)
    dbeta = (dv / beta) . (fresh / beta)
q, k, p meet the log decay only as e^G q, e^P p, e^-G k, so dG = q.dq - k.dk, dP = p.dp, and dtotal = <dS, S after the chunk>.
With WINDOW, less the diagonal (a token with itself, which no decay meets): dP = q.dq, dR = -k.dk, domega = -dR / omega, and
`reopened` adds what a pair wrote again behind an unlock.
`reverse` is the one walk, from the last chunk to the first; `gradients` does everything else, all chunks at once.
Each product is made the way round it is needed: Triton 3.4 to 3.7.0 miscompiles a transposed accumulator as an operand on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from proteus_lm.ops.triton.addresses import below, bring, lane_of, read_row, rows_at, store_columns, store_rows
from proteus_lm.ops.triton.forward import at_least, carry_in, carry_out, fade, fetch, project, put, write


@triton.jit
def reverse(
    q, k, p, gates, solve, attend, chunks, documents, do, dfinal, dv, dstates, dinitial, scale, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KT: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr,
    TILES: tl.constexpr, DELTA: tl.constexpr, HAS_P: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ALIGN: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One document, one head, BV value columns, last chunk first.

    dstates: (chunks, H, V, K), dS after each chunk, as `states` of `scan`.  dinitial, dfinal: fp32 (N, H, K, V).
    """
    lane, tile = lane_of(N * H, tl.cdiv(V, BV), VALUE)
    document = lane // H
    h = (lane % H).to(tl.int64)
    column = tile * BV + tl.arange(0, BV)
    o = tl.arange(0, C)
    dtype: tl.constexpr = do.dtype.element_ty
    s0 = tl.zeros([BV, KT], tl.float32)
    s1 = s0
    s2 = s0
    s3 = s0
    where = (document * H + h).to(tl.int64) * K * V
    if HAS_FINAL:
        s0 = carry_in(dfinal + where, column, 0, K, V, KT)
        if NK > 1:
            s1 = carry_in(dfinal + where, column, KT, K, V, KT)
        if NK > 2:
            s2 = carry_in(dfinal + where, column, 2 * KT, K, V, KT)
        if NK > 3:
            s3 = carry_in(dfinal + where, column, 3 * KT, K, V, KT)
    table = documents + document * (2 + TILES)
    first = tl.load(table)
    if VALUE:
        opens = tl.load(table + 2 + tile * (BV // 16))
        if WINDOW:
            opens = tl.maximum(opens - 1, first)
        for c in range(first, opens):
            start, count, _, _ = read_row(tl.load(chunks + c))
            here = o < count
            at = ((start + o) * H + h)[None, :] * V + column[:, None]
            tl.store(dv + at, tl.zeros([BV, C], dtype), mask=here[None, :] & (column < V)[:, None])
        first = opens
    high = tl.load(table + 1)
    row = tl.load(chunks + high - 1, mask=first < high, other=0)  # a chunk ahead, as in `scan`
    for phase in tl.static_range(0, NK):
        low = first
        if NK - phase > 1:
            low = tl.load(table + 2 + (NK - phase - 1) * (KT // 16))
            if WINDOW:
                low = tl.maximum(low - 1, first)
        for i in tl.range(0, high - low, num_stages=STAGES):
            c = high - 1 - i
            start, tokens, width, soon = read_row(row)
            row = tl.load(chunks + c - 1, mask=c > first, other=0)
            here = below(o, tokens)
            width = width // ALIGN * ALIGN
            place = start * H + h
            keys = width if KEY else K
            values = width if VALUE else V
            slot = c * H + h
            factor = tl.exp(tl.load(gates + slot * 6 * C + 4 * C - 1))
            fresh_factor = factor
            reach = width
            soon = soon // ALIGN * ALIGN if WINDOW and (KEY or VALUE) else width
            if WINDOW and (KEY or VALUE):
                reach = tl.maximum(width, soon)
                if HAS_INITIAL:
                    end = gates + slot * 6 * C + tokens - 1
                    fresh_factor = tl.exp(tl.load(end + 3 * C) - tl.load(end + 4 * C))
            kept = (reach if VALUE else V) - tile * BV
            k0, k1, k2, k3 = fetch(k, place * K, o, here, keys, H, K, KT, NK - phase)
            put(dstates, (slot * V + tile * BV) * K, s0, s1, s2, s3, reach if KEY else K, kept, K, KT, NK - phase, False)
            inside = here[:, None] & (column < values)[None, :]
            dy = tl.trans(tl.load(rows_at(do, place * V, o, column, H * V), mask=inside, other=0.0))
            du = project(s0, s1, s2, s3, k0, k1, k2, k3, NK - phase, PRECISION)
            du *= tl.load(gates + slot * 6 * C + C + o)[None, :]
            du = tl.dot(dy, tl.load(rows_at(attend, slot * C * C, o, o, C)), du, input_precision=PRECISION)
            if VALUE:
                du = tl.where((column < values)[:, None], du, 0.0)
            s0 = fade(s0, factor, fresh_factor, column, 0, width, soon, KT, KEY, VALUE, HAS_INITIAL)
            if NK - phase > 1:
                s1 = fade(s1, factor, fresh_factor, column, KT, width, soon, KT, KEY, VALUE, HAS_INITIAL)
            if NK - phase > 2:
                s2 = fade(s2, factor, fresh_factor, column, 2 * KT, width, soon, KT, KEY, VALUE, HAS_INITIAL)
            if NK - phase > 3:
                s3 = fade(s3, factor, fresh_factor, column, 3 * KT, width, soon, KT, KEY, VALUE, HAS_INITIAL)
            q0, q1, q2, q3 = fetch(q, place * K, o, here, keys, H, K, KT, NK - phase)
            asked = dy.to(tl.float32) * tl.load(gates + slot * 6 * C + o)[None, :]
            s0, s1, s2, s3 = write(s0, s1, s2, s3, asked, q0, q1, q2, q3, NK - phase, PRECISION)
            if DELTA:
                p0, p1, p2, p3 = k0, k1, k2, k3
                if HAS_P:
                    p0, p1, p2, p3 = fetch(p, place * K, o, here, keys, H, K, KT, NK - phase)
                du = tl.dot(du.to(dtype), tl.load(rows_at(solve, slot * C * C, o, o, C)), input_precision=PRECISION)
                missed = du * -tl.load(gates + slot * 6 * C + 2 * C + o)[None, :]
                s0, s1, s2, s3 = write(s0, s1, s2, s3, missed, p0, p1, p2, p3, NK - phase, PRECISION)
            store_columns(dv, place * V + tile * BV, du.to(dtype), V - tile * BV, tokens, H * V)
        high = low
    if HAS_INITIAL:
        carry_out(dinitial + where, s0, column, 0, K, V, KT)
        if NK > 1:
            carry_out(dinitial + where, s1, column, KT, K, V, KT)
        if NK > 2:
            carry_out(dinitial + where, s2, column, 2 * KT, K, V, KT)
        if NK > 3:
            carry_out(dinitial + where, s3, column, 3 * KT, K, V, KT)


@triton.jit
def columns_of(x, o, here, v0, values, H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Columns v0 .. v0 + BV of a chunk's rows of x (tokens, H, V): (C, BV), zero from `values` on."""
    col = v0 + tl.arange(0, BV)
    return tl.load(rows_at(x, 0, o, col, H * V), mask=here[:, None] & (col < values)[None, :], other=0.0)


@triton.jit
def written(fresh, o, here, v0, values, H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr):
    """The same of what a chunk wrote: `fresh` (V, C) of `scan`, or without DELTA v."""
    if DELTA:
        col = tl.arange(0, BV)
        at = rows_at(fresh + v0 * C, 0, col, o, C)
        tile = tl.trans(tl.load(at, mask=(v0 + col < values)[:, None], other=0.0))
    else:
        tile = columns_of(fresh, o, here, v0, values, H, V, BV)
    return tile


@triton.jit
def wrote_before(pairs, late, early, C: tl.constexpr, DIAGONAL: tl.constexpr, TURNED: tl.constexpr, HAS_G: tl.constexpr):
    """pairs times the decay e^(late_r - early_j), if any, where token j wrote before token r read (or is r); zero elsewhere.

    Rows are r and columns j, or the other way round where TURNED.
    """
    rows = tl.arange(0, C)[:, None]
    columns = tl.arange(0, C)[None, :]
    if TURNED:
        seen = columns >= rows if DIAGONAL else columns > rows
        gap = late[None, :] - early[:, None]
    else:
        seen = rows >= columns if DIAGONAL else rows > columns
        gap = late[:, None] - early[None, :]
    if HAS_G:
        pairs *= tl.exp(tl.where(seen, gap, 0.0))
    return tl.where(seen, pairs, 0.0)


@triton.jit
def state_tile(states, row, keys, v0, values, K: tl.constexpr, BV: tl.constexpr):
    """Columns v0 .. v0 + BV of a chunk's state (V, K) in the key rows `row`: (BV, KT), zero where locked."""
    column = tl.arange(0, BV)
    mask = (v0 + column < values)[:, None] & (row < keys)[None, :]
    return tl.load(rows_at(states + v0 * K, 0, column, row, K), mask=mask, other=0.0)


@triton.jit
def bring_columns(
    do, fresh, dv, states, dstates, tokens, row, v0, values,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KT: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Ask for columns v0 .. v0 + BV, and of the states KT rows from `row` on, ahead of the loads; for none from `values` on."""
    if v0 < values:
        column = tl.minimum(v0 + tl.arange(0, BV), values - 1)
        bring(do + v0, tokens * V, V - v0, BV)
        if DELTA:
            bring(fresh, column * C, C, C)
            bring(dv + v0, tokens * V, V - v0, BV)
        else:
            bring(fresh + v0, tokens * V, V - v0, BV)
        bring(states + row, column * K, K - row, KT)
        bring(dstates + row, column * K, K - row, KT)


@triton.jit
def put_gradient(x, gradient, o, row, inside, count, tile, H: tl.constexpr, K: tl.constexpr, LOCAL: tl.constexpr):
    """Store tokens o (C,) and key rows `row` (KT,), tile number `tile`, of a chunk's gradient, where `inside`."""
    y = gradient.to(x.dtype.element_ty)
    if LOCAL:
        store_rows(x, tile * row.shape[0], y, count, K - tile * row.shape[0], H * K)
    else:
        tl.store(rows_at(x, 0, o, row, H * K), y, mask=inside)


@triton.jit
def gradients_of(
    q, k, p, gates, do, fresh, states, dstates, dq, dk, dp, dv, dg, dbeta, scale, span,
    tile, c, h, start, count, after, keys, values,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KT: tl.constexpr, BV: tl.constexpr, ONE: tl.constexpr,
    DELTA: tl.constexpr, HAS_G: tl.constexpr, HAS_P: tl.constexpr, DECAYED: tl.constexpr,
    KEY: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, FLOOR: tl.constexpr, BRING: tl.constexpr,
):  # fmt: skip
    """`gradients` of a tile of a chunk of which `keys` rows and `values` columns are open; ONE: these are within one tile of BV."""
    dtype: tl.constexpr = q.dtype.element_ty
    LOCAL: tl.constexpr = WINDOW or (DELTA and HAS_G and not HAS_P)  # faster there, slower elsewhere (H200)
    o = tl.arange(0, C)
    here = o < count
    token = o * H
    first = start * H + h
    slot = c * H + h
    row = tile * KT + tl.arange(0, KT)
    q += first * K
    k += first * K
    p += first * K
    dq += first * K
    dk += first * K
    if HAS_P:
        dp += first * K
    inside = here[:, None] & (row < K)[None, :]
    if KEY:
        zero = tl.zeros([C, KT], dtype)
        if tile * KT >= keys:
            tl.store(rows_at(dq, 0, o, row, H * K), zero, mask=inside)
            tl.store(rows_at(dk, 0, o, row, H * K), zero, mask=inside)
            if HAS_P:
                tl.store(rows_at(dp, 0, o, row, H * K), zero, mask=inside)
            return
    mask = here[:, None] & (row < keys)[None, :]
    do += first * V
    dv += first * V
    fresh += slot * V * C if DELTA else first * V
    states += slot * V * K
    dstates += slot * V * K
    dg += tile * span
    gate = gates + slot * 6 * C
    running = tl.load(gate + 3 * C + o)
    before = running
    if WINDOW or (DELTA and HAS_G and not DECAYED):
        before = tl.load(gate + 4 * C + o)
    late = before if WINDOW else running  # the log decay with which a token reads
    end = tl.load(gate + 4 * C - 1)
    tokens = tl.where(here, token, 0)
    if BRING:  # the compiler has registers for the first loads alone, and waits for those before it asks for the rest
        bring_columns(do, fresh, dv, states, dstates, tokens, tile * KT, 0, values, K, V, C, KT, BV, DELTA)
        bring(q + tile * KT, tokens * K, K - tile * KT, KT)
        bring(k + tile * KT, tokens * K, K - tile * KT, KT)
        if HAS_P:
            bring(p + tile * KT, tokens * K, K - tile * KT, KT)
    # What is small is fetched here: a wait for memory between two products is a wait of the whole program.
    reads = tl.load(gate + o)
    left = tl.load(gate + C + o)
    if DELTA:
        predicts = tl.load(gate + 2 * C + o)
        strength = tl.load(gate + 5 * C + o)
    if WINDOW:
        dbeta += tile * span * 2
        own = tl.load(gate + 5 * C + o)
        follows = tl.exp(running - before)
        omega = at_least(own * follows + tl.load(gate + 2 * C + o), FLOOR)

    x_q = tl.zeros([C, KT], tl.float32)
    x_k = tl.zeros([KT, C] if DELTA else [C, KT], tl.float32)
    x_p = tl.zeros([C, KT], tl.float32)
    held = 0.0
    if ONE:
        b_do = columns_of(do, o, here, 0, values, H, V, BV)
        b_u = written(fresh, o, here, 0, values, H, V, C, BV, DELTA)
        if DELTA:
            b_e = columns_of(dv, o, here, 0, values, H, V, BV)
        b_s = state_tile(states, row, keys, 0, values, K, BV)
        b_ds = state_tile(dstates, row, keys, 0, values, K, BV)
        b_q = tl.load(rows_at(q, 0, o, row, H * K), mask=mask, other=0.0)
        b_k = tl.load(rows_at(k, 0, o, row, H * K), mask=mask, other=0.0)
        if HAS_G:
            held = tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32))
    else:
        asked = tl.zeros([C, C], tl.float32)
        other = tl.zeros([C, C], tl.float32)  # missed, or asked turned
        for v0 in tl.range(0, values, BV, num_stages=1):
            if BRING:
                bring_columns(do, fresh, dv, states, dstates, tokens, tile * KT, v0 + BV, values, K, V, C, KT, BV, DELTA)
            b_do = columns_of(do, o, here, v0, values, H, V, BV)
            b_u = written(fresh, o, here, v0, values, H, V, C, BV, DELTA)
            b_s = state_tile(states, row, keys, v0, values, K, BV)
            b_ds = state_tile(dstates, row, keys, v0, values, K, BV)
            asked = tl.dot(b_do, tl.trans(b_u), asked, input_precision=PRECISION)
            x_q = tl.dot(b_do, b_s, x_q, input_precision=PRECISION)
            if DELTA:
                x_k = tl.dot(tl.trans(b_ds), tl.trans(b_u), x_k, input_precision=PRECISION)
                b_e = columns_of(dv, o, here, v0, values, H, V, BV)
                other = tl.dot(b_e, tl.trans(b_u), other, input_precision=PRECISION)
                x_p = tl.dot(b_e, b_s, x_p, input_precision=PRECISION)
            else:
                x_k = tl.dot(b_u, b_ds, x_k, input_precision=PRECISION)
                other = tl.dot(b_u, tl.trans(b_do), other, input_precision=PRECISION)
            if HAS_G:
                held += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32))
        b_q = tl.load(rows_at(q, 0, o, row, H * K), mask=mask, other=0.0)
        b_k = tl.load(rows_at(k, 0, o, row, H * K), mask=mask, other=0.0)

    same = o[:, None] == o[None, :]
    if ONE:  # each product is made where it is used: accumulators are what this kernel is short of
        asked = tl.dot(b_do, tl.trans(b_u), input_precision=PRECISION)
    pairs = wrote_before(asked, late, running, C, not WINDOW, False, HAS_G) * scale
    if WINDOW:
        near = tl.sum(tl.where(same, asked, 0.0), 1) * scale
        pairs *= omega[None, :]
    d_read = tl.zeros([C], tl.float32)  # of the log decays a token reads with, writes with, predicts with
    d_write = tl.zeros([C], tl.float32)
    b_pairs = pairs.to(dtype)
    if ONE:
        x_q = tl.dot(b_do, b_s, input_precision=PRECISION)
    x_q = tl.dot(b_pairs, b_k, x_q * reads[:, None], input_precision=PRECISION)
    if HAS_G:
        d_read = tl.sum(x_q * b_q.to(tl.float32), 1)
    if WINDOW:
        x_q += (own * near)[:, None] * b_k.to(tl.float32)
    put_gradient(dq, x_q, o, row, inside, count, tile, H, K, LOCAL)

    if DELTA:  # dk is worked out turned, so that what was asked and missed is used as it stands
        if ONE:
            x_k = tl.dot(tl.trans(b_ds), tl.trans(b_u), input_precision=PRECISION)
        x_k *= left[None, :]
        if HAS_G:
            d_total = tl.sum(x_k * tl.trans(b_k).to(tl.float32))
        x_k = tl.dot(tl.trans(b_q), b_pairs, x_k, input_precision=PRECISION)
        b_p = b_k
        if HAS_P:
            b_p = tl.load(rows_at(p, 0, o, row, H * K), mask=mask, other=0.0)
        if ONE:
            other = tl.dot(b_e, tl.trans(b_u), input_precision=PRECISION)
        if tile == 0:
            diagonal = tl.sum(tl.where(same, other, 0.0), 1)
            tl.store(dbeta + first + token, diagonal / strength / strength, mask=here)
        b_pairs = (-wrote_before(other, before, running, C, False, False, HAS_G)).to(dtype)
        x_k = tl.dot(tl.trans(b_p), b_pairs, x_k, input_precision=PRECISION)
        if ONE:
            x_p = tl.dot(b_e, b_s, input_precision=PRECISION)
        x_p = tl.dot(b_pairs, b_k, x_p * -predicts[:, None], input_precision=PRECISION)
        d_before = tl.sum(x_p * b_p.to(tl.float32), 1)
        if HAS_P:
            put_gradient(dp, x_p, o, row, inside, count, tile, H, K, LOCAL)
        x_k = tl.trans(x_k)
    else:  # with one product each way this is the faster
        if ONE:
            x_k = tl.dot(b_u, b_ds, input_precision=PRECISION)
            other = tl.dot(b_u, tl.trans(b_do), input_precision=PRECISION)
        x_k *= left[:, None]
        if HAS_G:
            d_total = tl.sum(x_k * b_k.to(tl.float32))
        pairs = wrote_before(other, late, running, C, not WINDOW, True, HAS_G) * scale
        if WINDOW:
            pairs *= omega[:, None]
        x_k = tl.dot(pairs.to(dtype), b_q, x_k, input_precision=PRECISION)
    if HAS_G:
        d_write = -tl.sum(x_k * b_k.to(tl.float32), 1)
    if WINDOW:
        d_omega = -d_write / omega
        x_k += (own * near)[:, None] * b_q.to(tl.float32)
        scores = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
        tl.store(dbeta + (first + token) * 2, near * scores + follows * d_omega, mask=here)
        here = o < tl.where(after > 0, count, count - 1)
        first += H  # the token after has the decay and the second weight that a pair meets
        tl.store(dbeta + (first + token) * 2 + 1, d_omega, mask=here)
    if DELTA and not HAS_P:
        x_k += x_p
    put_gradient(dk, x_k, o, row, inside, count, tile, H, K, LOCAL)

    if HAS_G:
        # A token's decay moves every log decay from its own on; those that start behind a token's decay, from the next on.
        upto = d_write
        behind = d_read
        if not WINDOW:
            upto += d_read
        if DELTA:
            if DECAYED:
                upto += d_before
            else:
                behind = d_before
        held = held * tl.exp(end) + d_total
        d_g = tl.cumsum(upto, 0, reverse=True) + held
        if WINDOW or (DELTA and not DECAYED):
            d_g += tl.cumsum(behind, 0, reverse=True) - behind
        if WINDOW:
            d_g += own * follows * d_omega
        tl.store(dg + first + token, d_g, mask=here)


@triton.jit
def gradients(
    q, k, p, gates, chunks, do, fresh, states, dstates, dq, dk, dp, dv, dg, dbeta, scale, span,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KT: tl.constexpr, NT: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, HAS_G: tl.constexpr, HAS_P: tl.constexpr, DECAYED: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
    FLOOR: tl.constexpr, BRING: tl.constexpr,
):  # fmt: skip
    """One of NT tiles of KT key rows of one chunk of one head: gradients of q, k, p, g, beta; zeros in locked coordinates.

    dg: fp32 (NT, tokens, H), each tile's part, `span` = tokens H apart; dbeta (tokens, H). fresh is v without DELTA.
    With WINDOW dbeta is dgamma (NT, tokens, H, 2), and what a document's first token does to the state handed in (dg, the second
    dgamma) is left alone: see window.py. A shut tile's part of dg and dgamma is left alone too: zeros must stand there.
    The tiles of a chunk are neighbours, so that do, fresh and dv come from memory once and from the cache after. With V <= BV every
    load is on its way before the first product waits for one; where at most half of the columns are open, tiles are half as wide.
    """
    program = tl.program_id(0)
    tile = program % NT
    c = (program // (NT * H)).to(tl.int64)
    h = (program // NT) % H
    start, count, width, after = read_row(tl.load(chunks + c))
    if count == 0:
        return
    width = width // ALIGN * ALIGN  # what the compiler may assume of it
    keys = width if KEY else K
    values = width if VALUE else V
    if VALUE and V <= BV and BV >= 32:  # noqa: SIM102 -- a question to the compiler, and one to the device
        if values <= BV // 2:
            gradients_of(
                q, k, p, gates, do, fresh, states, dstates, dq, dk, dp, dv, dg, dbeta, scale, span,
                tile, c, h, start, count, after, keys, values,
                H, K, V, C, KT, BV // 2, True, DELTA, HAS_G, HAS_P, DECAYED, KEY, PRECISION, WINDOW, FLOOR, BRING,
            )  # fmt: skip
            return
    gradients_of(
        q, k, p, gates, do, fresh, states, dstates, dq, dk, dp, dv, dg, dbeta, scale, span,
        tile, c, h, start, count, after, keys, values,
        H, K, V, C, KT, BV, V <= BV, DELTA, HAS_G, HAS_P, DECAYED, KEY, PRECISION, WINDOW, FLOOR, BRING,
    )  # fmt: skip


@triton.jit
def reopened(
    k, v, g, gamma, chunks, states, dstates, dk, dv, dg, dgamma,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KEY: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """Behind `gradients`, one chunk of one head of sliding-window attention that an unlock follows: the part of its last pair.

    Behind the unlock the rows (or columns) that opened hold e^g S + gamma1 k v^T of that pair, g and gamma1 of the token after.
    """
    c = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    start, count, width, soon = read_row(tl.load(chunks + c))
    if soon <= width:
        return
    after = (start + count) * H + h
    last = after - H
    weight = tl.load(gamma + after * 2 + 1).to(tl.float32)
    row = tl.arange(0, BK)
    rows = (row >= width) & (row < soon) if KEY else row < K
    b_k = tl.load(k + last * K + row, mask=rows, other=0.0).to(tl.float32)
    d_k = tl.zeros([BK], tl.float32)
    held = tl.zeros([BK], tl.float32)
    base = (c * H + h) * V * K
    for v0 in range(0, V, BV):
        column = v0 + tl.arange(0, BV)
        columns = column < V if KEY else (column >= width) & (column < soon)
        at = base + column[:, None] * K + row[None, :]
        mask = columns[:, None] & rows[None, :]
        b_ds = tl.load(dstates + at, mask=mask, other=0.0).to(tl.float32)
        b_v = tl.load(v + last * V + column, mask=columns, other=0.0).to(tl.float32)
        d_k += tl.sum(b_ds * b_v[:, None], 0)
        d_v = tl.load(dv + last * V + column, mask=columns, other=0.0).to(tl.float32)
        d_v += tl.sum(b_ds * b_k[None, :], 1) * weight
        tl.store(dv + last * V + column, d_v.to(dv.dtype.element_ty), mask=columns)
        if CARRIED:
            held += tl.sum(b_ds * tl.load(states + at, mask=mask, other=0.0).to(tl.float32), 0)
    d_weight = tl.load(dgamma + after * 2 + 1) + tl.sum(d_k * b_k, 0)
    tl.store(dgamma + after * 2 + 1, d_weight)
    d_k = tl.load(dk + last * K + row, mask=rows, other=0.0).to(tl.float32) + d_k * weight
    tl.store(dk + last * K + row, d_k.to(dk.dtype.element_ty), mask=rows)
    if CARRIED:
        decay = tl.exp(tl.load(g + after).to(tl.float32))
        tl.store(dg + after, tl.load(dg + after) + decay * tl.sum(held, 0))
