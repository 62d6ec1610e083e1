"""Backward kernels of the linear memories. Notation of `forward.py`; d marks a gradient, dS that of the state after the chunk.

    dfresh = attend^T do + e^(total - G) k dS;  error = solve^T dfresh;  dv = beta error   (without DELTA: dv = dfresh)
    dS <- e^total dS + scale (e^G q)^T do - (beta e^P p)^T error
    dq = scale e^G do S^T + [do fresh^T] k;  -dp / beta = e^P error S^T + [error fresh^T] k
    dk = e^(total - G) fresh dS^T + [do fresh^T]^T q - [error fresh^T]^T beta p      ([]: lower triangle times its decay, times scale for q)
    dbeta = error . v + (dp / beta) . p
q, k, p meet the log decay only as e^G q, e^P p, e^-G k, so dG = q.dq - k.dk, dP = p.dp, and dtotal = <dS, S after the chunk>.
`reverse` is the one walk, from the last chunk to the first; `gradients` does everything else, all chunks at once.
Each product is made the way round it is needed: Triton 3.4 to 3.7.0 miscompiles a transposed accumulator as an operand on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from proteus_lm.ops.triton.forward import carry_in, carry_out, fade, project, put, write


@triton.jit
def reverse(
    q, k, p, gates, solve, attend, chunks, documents, do, dfinal, error, dstates, dinitial, scale, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KT: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr,
    TILES: tl.constexpr, DELTA: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ALIGN: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One document, one head, BV value columns, last chunk first.

    error: as v (dv itself without DELTA).  dstates: (chunks, H, V, K), dS after each chunk.  dinitial, dfinal: fp32 (N, H, K, V).
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
        first = tl.load(table + 2 + tile * (BV // 16))
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
            token = (start + o) * H + h
            keys = width if KEY else K
            values = width if VALUE else V
            slot = c * H + h
            running = tl.load(gates + slot * 3 * C + o)
            total = tl.load(gates + slot * 3 * C + C - 1)
            put(dstates + slot * V * K, s0, s1, s2, s3, column, K, V, KT, NK - phase)
            at = token[None, :] * V + column[:, None]
            square = slot * C * C + o[:, None] * C + o[None, :]
            dy = tl.load(do + at, mask=here[None, :] & (column < values)[:, None], other=0.0)
            du = project(s0, s1, s2, s3, k, token, here, keys, K, KT, NK - phase, PRECISION) * tl.exp(total - running)[None, :]
            du = tl.dot(dy, tl.load(attend + square), du, input_precision=PRECISION)
            if VALUE:
                du = tl.where((column < values)[:, None], du, 0.0)
            factor = tl.exp(total)
            s0 = fade(s0, factor, column, 0, width, KT, KEY, VALUE, HAS_INITIAL)
            if NK - phase > 1:
                s1 = fade(s1, factor, column, KT, width, KT, KEY, VALUE, HAS_INITIAL)
            if NK - phase > 2:
                s2 = fade(s2, factor, column, 2 * KT, width, KT, KEY, VALUE, HAS_INITIAL)
            if NK - phase > 3:
                s3 = fade(s3, factor, column, 3 * KT, width, KT, KEY, VALUE, HAS_INITIAL)
            asked = dy.to(tl.float32) * (tl.exp(running) * scale)[None, :]
            s0, s1, s2, s3 = write(s0, s1, s2, s3, asked, q, token, here, keys, K, KT, NK - phase, PRECISION)
            if DELTA:
                before = tl.load(gates + slot * 3 * C + C + o)
                strength = tl.load(gates + slot * 3 * C + 2 * C + o)
                du = tl.dot(du.to(dtype), tl.load(solve + square), input_precision=PRECISION)
                unread = du * (strength * -tl.exp(before))[None, :]
                s0, s1, s2, s3 = write(s0, s1, s2, s3, unread, p, token, here, keys, K, KT, NK - phase, PRECISION)
            tl.store(error + at, du.to(dtype), mask=here[None, :] & (column < V)[:, None])
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
def gradients(
    q, k, p, v, gates, chunks, do, fresh, error, states, dstates, dq, dk, dp, dv, dg, dbeta, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KT: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, HAS_G: tl.constexpr, HAS_P: tl.constexpr, DECAYED: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: gradients of q, k, p, g, beta, and of v for the delta rules; zeros in locked coordinates.

    dg, dbeta: fp32 (tokens, H). fresh is v without DELTA.
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
    o = tl.arange(0, C)
    here = o < count
    token = (start + o) * H + h
    slot = c * H + h
    running = tl.load(gates + slot * 3 * C + o)
    total = tl.load(gates + slot * 3 * C + C - 1)
    before = running
    strength = running
    if DELTA:
        before = tl.load(gates + slot * 3 * C + C + o)
        strength = tl.load(gates + slot * 3 * C + 2 * C + o)

    # Every pair of tokens: rows are readers r in `asked` and `missed`, writers j in `asked_t` and `missed_t`.
    asked = tl.zeros([C, C], tl.float32)
    asked_t = tl.zeros([C, C], tl.float32)
    missed = tl.zeros([C, C], tl.float32)
    missed_t = tl.zeros([C, C], tl.float32)
    d_strength = tl.zeros([C], tl.float32)
    for v0 in tl.range(0, values, BV, num_stages=STAGES):
        col = v0 + tl.arange(0, BV)
        at = token[:, None] * V + col[None, :]
        mask = here[:, None] & (col < values)[None, :]
        b_do = tl.load(do + at, mask=mask, other=0.0)
        b_u = tl.load(fresh + at, mask=mask, other=0.0)
        asked = tl.dot(b_do, tl.trans(b_u), asked, input_precision=PRECISION)
        asked_t = tl.dot(b_u, tl.trans(b_do), asked_t, input_precision=PRECISION)
        if DELTA:
            b_e = tl.load(error + at, mask=mask, other=0.0)
            missed = tl.dot(b_e, tl.trans(b_u), missed, input_precision=PRECISION)
            missed_t = tl.dot(b_u, tl.trans(b_e), missed_t, input_precision=PRECISION)
            b_e = b_e.to(tl.float32)
            d_strength += tl.sum(b_e * tl.load(v + at, mask=mask, other=0.0).to(tl.float32), 1)
            tl.store(dv + at, (b_e * strength[:, None]).to(dtype), mask=here[:, None] & (col < V)[None, :])
    if VALUE:
        for v0 in range((values + BV - 1) // BV * BV, V, BV):
            col = v0 + tl.arange(0, BV)
            zero = tl.zeros([C, BV], dtype)
            tl.store(dv + token[:, None] * V + col[None, :], zero, mask=here[:, None] & (col < V)[None, :])
    r = o[:, None]
    j = o[None, :]
    asked *= tl.exp(tl.where(r >= j, running[:, None] - running[None, :], 0.0)) * scale
    b_asked = tl.where(r >= j, asked, 0.0).to(dtype)
    asked_t *= tl.exp(tl.where(j >= r, running[None, :] - running[:, None], 0.0)) * scale
    b_asked_t = tl.where(j >= r, asked_t, 0.0).to(dtype)
    b_missed = b_asked
    b_missed_t = b_asked
    if DELTA:
        missed *= tl.exp(tl.where(r > j, before[:, None] - running[None, :], 0.0))
        b_missed = tl.where(r > j, -missed, 0.0).to(dtype)
        missed_t *= tl.exp(tl.where(j > r, before[None, :] - running[:, None], 0.0)) * strength[None, :]
        b_missed_t = tl.where(j > r, -missed_t, 0.0).to(dtype)

    d_running = tl.zeros([C], tl.float32)
    d_before = tl.zeros([C], tl.float32)
    d_total = tl.zeros([KT], tl.float32)
    for k0 in range(0, keys, KT):
        row = k0 + tl.arange(0, KT)
        x_q = tl.zeros([C, KT], tl.float32)
        x_p = tl.zeros([C, KT], tl.float32)
        x_k = tl.zeros([C, KT], tl.float32)
        held = tl.zeros([BV, KT], tl.float32)
        for v0 in tl.range(0, values, BV, num_stages=STAGES):
            col = v0 + tl.arange(0, BV)
            at = token[:, None] * V + col[None, :]
            mask = here[:, None] & (col < values)[None, :]
            place = slot * V * K + col[:, None] * K + row[None, :]
            inside = (col < values)[:, None] & (row < keys)[None, :]
            b_s = tl.load(states + place, mask=inside, other=0.0)
            b_ds = tl.load(dstates + place, mask=inside, other=0.0)
            x_q = tl.dot(tl.load(do + at, mask=mask, other=0.0), b_s, x_q, input_precision=PRECISION)
            x_k = tl.dot(tl.load(fresh + at, mask=mask, other=0.0), b_ds, x_k, input_precision=PRECISION)
            if DELTA:
                x_p = tl.dot(tl.load(error + at, mask=mask, other=0.0), b_s, x_p, input_precision=PRECISION)
            if HAS_G:
                held += b_s.to(tl.float32) * b_ds.to(tl.float32)
        at = token[:, None] * K + row[None, :]
        mask = here[:, None] & (row < keys)[None, :]
        inside = here[:, None] & (row < K)[None, :]
        b_q = tl.load(q + at, mask=mask, other=0.0)
        b_k = tl.load(k + at, mask=mask, other=0.0)
        x_q = tl.dot(b_asked, b_k, x_q * (tl.exp(running) * scale)[:, None], input_precision=PRECISION)
        tl.store(dq + at, x_q.to(dtype), mask=inside)
        x_k *= tl.exp(total - running)[:, None]
        if HAS_G:
            d_total += tl.sum(held, 0) * tl.exp(total) + tl.sum(x_k * b_k.to(tl.float32), 0)
        x_k = tl.dot(b_asked_t, b_q, x_k, input_precision=PRECISION)
        if DELTA:
            b_p = b_k
            if HAS_P:
                b_p = tl.load(p + at, mask=mask, other=0.0)
            x_p = tl.dot(b_missed, b_k, x_p * -tl.exp(before)[:, None], input_precision=PRECISION)
            x_k = tl.dot(b_missed_t, b_p, x_k, input_precision=PRECISION)
            along = tl.sum(x_p * b_p.to(tl.float32), 1)
            d_strength += along
            d_before += along * strength
        if HAS_G:
            d_running += tl.sum(x_q * b_q.to(tl.float32), 1) - tl.sum(x_k * b_k.to(tl.float32), 1)
        if DELTA:
            x_p *= strength[:, None]
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
    if DELTA:
        tl.store(dbeta + token, d_strength, mask=here)
    if HAS_G:
        if DELTA and DECAYED:
            d_running += d_before
        d_g = tl.sum(tl.where(r <= j, d_running[None, :], 0.0), 1) + tl.sum(d_total, 0)
        if DELTA and not DECAYED:
            d_g += tl.sum(tl.where(r < j, d_before[None, :], 0.0), 1)
        tl.store(dg + token, d_g, mask=here)
