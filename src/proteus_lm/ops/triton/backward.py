# ruff: noqa: ANN001, ANN201 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""Backward kernels of the linear memories. Notation of `forward.py`; d marks a gradient, dS that of the state after the chunk.

    dfresh = attend^T do + e^(total - G) k dS;  dv = (solve beta)^T dfresh   (without DELTA: dv = dfresh)
    dS <- e^total dS + scale (e^G q)^T do - (e^P p)^T dv
    dq = scale e^G do S^T + [do fresh^T] k;  dp = -(e^P dv S^T + [dv fresh^T] k)
    dk = e^(total - G) fresh dS^T + [do fresh^T]^T q - [dv fresh^T]^T p     ([]: lower triangle times its decay, times scale for do)
    dbeta = (dv / beta) . (fresh / beta)
q, k, p meet the log decay only as e^G q, e^P p, e^-G k, so dG = q.dq - k.dk, dP = p.dp, and dtotal = <dS, S after the chunk>.
`reverse` is the one walk, from the last chunk to the first; `gradients` does everything else, all chunks at once.
Each product is made the way round it is needed: Triton 3.4 to 3.7.0 miscompiles a transposed accumulator as an operand on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from proteus_lm.ops.triton.forward import carry_in, carry_out, fade, fetch, project, put, write


@triton.jit
def reverse(
    q, k, p, gates, solve, attend, chunks, documents, do, dfinal, dv, dstates, dinitial, scale, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KT: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr,
    TILES: tl.constexpr, DELTA: tl.constexpr, HAS_P: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ALIGN: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One document, one head, BV value columns, last chunk first.

    dstates: (chunks, H, V, K), dS after each chunk.  dinitial, dfinal: fp32 (N, H, K, V).
    """
    lane = tl.program_id(0) % (N * H)
    tile = tl.program_id(0) // (N * H)
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
        for c in range(first, opens):
            start = tl.load(chunks + c * 4).to(tl.int64)
            here = o < tl.load(chunks + c * 4 + 1)
            at = ((start + o) * H + h)[None, :] * V + column[:, None]
            tl.store(dv + at, tl.zeros([BV, C], dtype), mask=here[None, :] & (column < V)[:, None])
        first = opens
    high = tl.load(table + 1)
    for phase in tl.static_range(0, NK):
        low = first
        if NK - phase > 1:
            low = tl.load(table + 2 + (NK - phase - 1) * (KT // 16))
        for i in tl.range(0, high - low, num_stages=STAGES):
            c = high - 1 - i
            start = tl.load(chunks + c * 4).to(tl.int64)
            here = o < tl.load(chunks + c * 4 + 1)
            width = tl.multiple_of(tl.load(chunks + c * 4 + 2), ALIGN)
            place = start * H + h
            keys = width if KEY else K
            values = width if VALUE else V
            slot = c * H + h
            factor = tl.exp(tl.load(gates + slot * 6 * C + 4 * C - 1))
            k0, k1, k2, k3 = fetch(k + place * K, o * H, here, keys, K, KT, NK - phase)
            put(dstates + slot * V * K, s0, s1, s2, s3, column, K, V, KT, NK - phase)
            at = (o * H)[None, :] * V + column[:, None]
            square = o[:, None] * C + o[None, :]
            dy = tl.load(do + place * V + at, mask=here[None, :] & (column < values)[:, None], other=0.0)
            du = project(s0, s1, s2, s3, k0, k1, k2, k3, NK - phase, PRECISION)
            du *= tl.load(gates + slot * 6 * C + C + o)[None, :]
            du = tl.dot(dy, tl.load(attend + slot * C * C + square), du, input_precision=PRECISION)
            if VALUE:
                du = tl.where((column < values)[:, None], du, 0.0)
            s0 = fade(s0, factor, column, 0, width, KT, KEY, VALUE, HAS_INITIAL)
            if NK - phase > 1:
                s1 = fade(s1, factor, column, KT, width, KT, KEY, VALUE, HAS_INITIAL)
            if NK - phase > 2:
                s2 = fade(s2, factor, column, 2 * KT, width, KT, KEY, VALUE, HAS_INITIAL)
            if NK - phase > 3:
                s3 = fade(s3, factor, column, 3 * KT, width, KT, KEY, VALUE, HAS_INITIAL)
            q0, q1, q2, q3 = fetch(q + place * K, o * H, here, keys, K, KT, NK - phase)
            asked = dy.to(tl.float32) * tl.load(gates + slot * 6 * C + o)[None, :]
            s0, s1, s2, s3 = write(s0, s1, s2, s3, asked, q0, q1, q2, q3, NK - phase, PRECISION)
            if DELTA:
                p0, p1, p2, p3 = k0, k1, k2, k3
                if HAS_P:
                    p0, p1, p2, p3 = fetch(p + place * K, o * H, here, keys, K, KT, NK - phase)
                du = tl.dot(du.to(dtype), tl.load(solve + slot * C * C + square), input_precision=PRECISION)
                missed = du * -tl.load(gates + slot * 6 * C + 2 * C + o)[None, :]
                s0, s1, s2, s3 = write(s0, s1, s2, s3, missed, p0, p1, p2, p3, NK - phase, PRECISION)
            tl.store(dv + place * V + at, du.to(dtype), mask=here[None, :] & (column < V)[:, None])
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
def columns_of(x, token, here, v0, values, V: tl.constexpr, BV: tl.constexpr):
    """Columns v0 .. v0 + BV of a chunk's rows of x (tokens, H, V): (C, BV), zero from `values` on."""
    col = v0 + tl.arange(0, BV)
    return tl.load(x + token[:, None] * V + col[None, :], mask=here[:, None] & (col < values)[None, :], other=0.0)


@triton.jit
def wrote_before(pairs, late, early, C: tl.constexpr, DIAGONAL: tl.constexpr, TURNED: tl.constexpr):
    """pairs times the decay e^(late_r - early_j) where token j wrote before token r read (or is r); zero elsewhere.

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
    return tl.where(seen, pairs * tl.exp(tl.where(seen, gap, 0.0)), 0.0)


@triton.jit
def gradients(
    q, k, p, gates, chunks, do, fresh, states, dstates, dq, dk, dp, dv, dg, dbeta, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KT: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, HAS_G: tl.constexpr, HAS_P: tl.constexpr, DECAYED: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: gradients of q, k, p, g, beta; zeros in locked coordinates, those of v included.

    dg, dbeta: fp32 (tokens, H). fresh is v without DELTA. With V <= BV everything is read from memory once; else do, fresh and dv
    are read again for each tile of key rows.
    """
    c = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    start = tl.load(chunks + c * 4).to(tl.int64)
    count = tl.load(chunks + c * 4 + 1)
    if count == 0:
        return
    width = tl.multiple_of(tl.load(chunks + c * 4 + 2), ALIGN)
    keys = width if KEY else K
    values = width if VALUE else V
    dtype: tl.constexpr = q.dtype.element_ty
    ONE: tl.constexpr = V <= BV
    o = tl.arange(0, C)
    here = o < count
    token = o * H
    first = start * H + h
    slot = c * H + h
    q += first * K
    k += first * K
    p += first * K
    dq += first * K
    dk += first * K
    do += first * V
    dv += first * V
    fresh += first * V
    states += slot * V * K
    dstates += slot * V * K
    if HAS_P:
        dp += first * K
    gate = gates + slot * 6 * C
    running = tl.load(gate + 3 * C + o)
    before = running
    if DELTA:
        before = tl.load(gate + 4 * C + o)

    diagonal = o
    if ONE:  # each product is finished before the next starts: accumulators are what this kernel is short of
        b_do = columns_of(do, token, here, 0, values, V, BV)
        b_u = columns_of(fresh, token, here, 0, values, V, BV)
        asked = tl.dot(b_do, tl.trans(b_u), input_precision=PRECISION)
        b_asked = (wrote_before(asked, running, running, C, True, False) * scale).to(dtype)
        asked_t = tl.dot(b_u, tl.trans(b_do), input_precision=PRECISION)
        b_asked_t = (wrote_before(asked_t, running, running, C, True, True) * scale).to(dtype)
        if DELTA:
            b_e = columns_of(dv, token, here, 0, values, V, BV)
            missed = tl.dot(b_e, tl.trans(b_u), input_precision=PRECISION)
            diagonal = tl.sum(tl.where(o[:, None] == o[None, :], missed, 0.0), 1)
            b_missed = (-wrote_before(missed, before, running, C, False, False)).to(dtype)
            missed_t = tl.dot(b_u, tl.trans(b_e), input_precision=PRECISION)
            b_missed_t = (-wrote_before(missed_t, before, running, C, False, True)).to(dtype)
    else:
        asked = tl.zeros([C, C], tl.float32)
        asked_t = tl.zeros([C, C], tl.float32)
        missed = tl.zeros([C, C], tl.float32)
        missed_t = tl.zeros([C, C], tl.float32)
        for v0 in tl.range(0, values, BV, num_stages=1):
            b_do = columns_of(do, token, here, v0, values, V, BV)
            b_u = columns_of(fresh, token, here, v0, values, V, BV)
            asked = tl.dot(b_do, tl.trans(b_u), asked, input_precision=PRECISION)
            asked_t = tl.dot(b_u, tl.trans(b_do), asked_t, input_precision=PRECISION)
            if DELTA:
                b_e = columns_of(dv, token, here, v0, values, V, BV)
                missed = tl.dot(b_e, tl.trans(b_u), missed, input_precision=PRECISION)
                missed_t = tl.dot(b_u, tl.trans(b_e), missed_t, input_precision=PRECISION)
        b_asked = (wrote_before(asked, running, running, C, True, False) * scale).to(dtype)
        b_asked_t = (wrote_before(asked_t, running, running, C, True, True) * scale).to(dtype)
        if DELTA:
            diagonal = tl.sum(tl.where(o[:, None] == o[None, :], missed, 0.0), 1)
            b_missed = (-wrote_before(missed, before, running, C, False, False)).to(dtype)
            b_missed_t = (-wrote_before(missed_t, before, running, C, False, True)).to(dtype)
    if DELTA:
        strength = tl.load(gate + 5 * C + o)
        tl.store(dbeta + first + token, diagonal / strength / strength, mask=here)

    d_running = tl.zeros([C], tl.float32)
    d_before = tl.zeros([C], tl.float32)
    d_total = tl.zeros([KT], tl.float32)
    for k0 in tl.range(0, keys, KT, num_stages=1):
        row = k0 + tl.arange(0, KT)
        x_q = tl.zeros([C, KT], tl.float32)
        x_k = tl.zeros([C, KT], tl.float32)
        x_p = tl.zeros([C, KT], tl.float32)
        held = tl.zeros([KT], tl.float32)
        if ONE:
            col = tl.arange(0, BV)
            place = col[:, None] * K + row[None, :]
            inside = (col < values)[:, None] & (row < keys)[None, :]
            b_s = tl.load(states + place, mask=inside, other=0.0)
            b_ds = tl.load(dstates + place, mask=inside, other=0.0)
            if HAS_G:
                held = tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 0)
            x_q = tl.dot(b_do, b_s, input_precision=PRECISION)
            x_k = tl.dot(b_u, b_ds, input_precision=PRECISION)
            if DELTA:
                x_p = tl.dot(b_e, b_s, input_precision=PRECISION)
        else:
            for v0 in tl.range(0, values, BV, num_stages=1):
                col = v0 + tl.arange(0, BV)
                place = col[:, None] * K + row[None, :]
                inside = (col < values)[:, None] & (row < keys)[None, :]
                b_s = tl.load(states + place, mask=inside, other=0.0)
                b_ds = tl.load(dstates + place, mask=inside, other=0.0)
                if HAS_G:
                    held += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 0)
                x_q = tl.dot(columns_of(do, token, here, v0, values, V, BV), b_s, x_q, input_precision=PRECISION)
                x_k = tl.dot(columns_of(fresh, token, here, v0, values, V, BV), b_ds, x_k, input_precision=PRECISION)
                if DELTA:
                    x_p = tl.dot(columns_of(dv, token, here, v0, values, V, BV), b_s, x_p, input_precision=PRECISION)
        at = token[:, None] * K + row[None, :]
        mask = here[:, None] & (row < keys)[None, :]
        inside = here[:, None] & (row < K)[None, :]
        b_q = tl.load(q + at, mask=mask, other=0.0)
        b_k = tl.load(k + at, mask=mask, other=0.0)
        x_q = tl.dot(b_asked, b_k, x_q * tl.load(gate + o)[:, None], input_precision=PRECISION)
        tl.store(dq + at, x_q.to(dtype), mask=inside)
        x_k *= tl.load(gate + C + o)[:, None]
        if HAS_G:
            d_total += held * tl.exp(tl.load(gate + 4 * C - 1)) + tl.sum(x_k * b_k.to(tl.float32), 0)
            d_running += tl.sum(x_q * b_q.to(tl.float32), 1)
        x_k = tl.dot(b_asked_t, b_q, x_k, input_precision=PRECISION)
        if DELTA:
            b_p = b_k
            if HAS_P:
                b_p = tl.load(p + at, mask=mask, other=0.0)
            x_k = tl.dot(b_missed_t, b_p, x_k, input_precision=PRECISION)
            x_p = tl.dot(b_missed, b_k, x_p * -tl.load(gate + 2 * C + o)[:, None], input_precision=PRECISION)
            if HAS_G:
                d_before += tl.sum(x_p * b_p.to(tl.float32), 1)
        if HAS_G:
            d_running -= tl.sum(x_k * b_k.to(tl.float32), 1)
        if DELTA:
            if HAS_P:
                tl.store(dp + at, x_p.to(dtype), mask=inside)
            else:
                x_k += x_p
        tl.store(dk + at, x_k.to(dtype), mask=inside)
    if KEY:
        for k0 in range((keys + KT - 1) // KT * KT, K, KT):
            row = k0 + tl.arange(0, KT)
            at = token[:, None] * K + row[None, :]
            inside = here[:, None] & (row < K)[None, :]
            zero = tl.zeros([C, KT], dtype)
            tl.store(dq + at, zero, mask=inside)
            tl.store(dk + at, zero, mask=inside)
            if HAS_P:
                tl.store(dp + at, zero, mask=inside)
    if HAS_G:
        if DELTA and DECAYED:
            d_running += d_before
        later = o[:, None] <= o[None, :]
        d_g = tl.sum(tl.where(later, d_running[None, :], 0.0), 1) + tl.sum(d_total, 0)
        if DELTA and not DECAYED:
            later = o[:, None] < o[None, :]
            d_g += tl.sum(tl.where(later, d_before[None, :], 0.0), 1)
        tl.store(dg + first + token, d_g, mask=here)
