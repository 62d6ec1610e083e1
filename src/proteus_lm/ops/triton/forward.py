# ruff: noqa: ANN001, ANN201 -- kernels: their arguments are pointers, tiles and constants, which Triton types itself
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Forward kernels of the linear memories, chunkwise, for the delta rules (DELTA) and for plain decayed writes alike.

Per head, with G the running sum of the log decay inside a chunk, P = G (decayed read) or G less the token's own g
(spec/linear.md 1.3):
    A = tril(beta p k^T e^(P_r - G_j), -1);  solve = (I + A)^-1;  attend = scale tril(q k^T e^(G_r - G_j))
    fresh = solve beta (v - e^P p S);  o = scale e^G q S + attend fresh;  S <- e^total S + (e^(total - G) k)^T fresh
`prepare` makes solve and attend of every chunk at once; `scan` walks the chunks with the state in registers, transposed (V, K),
so that each product's left operand is the accumulator of the one before and nothing passes through shared memory on the way.

Sliding-window linear attention with c = 2 (WINDOW; spec/linear.md 1.4) is the same walk. The state that a chunk meets has the first
token's decay and second write in it already, so G starts behind that token and ends behind the next chunk's first one:
    pair j lies behind token j + 1 with strength omega_j = gamma0_j e^{g_{j+1}} + gamma1_{j+1}, and R_j the log decay up to there;
    attend = scale q_t k_j (e^(P_t - R_j) omega_j for j < t, gamma0_t for j = t), P_t = R_{t-1};  S <- e^total S + ...omega...
No exponent is positive. A pair that meets an unlock is written into the new rows or columns (spec 2.8)
at the end of its chunk with gamma1 alone.

A gate shows as an open length R a chunk: loads stop there (key rows of q, k, p; value columns of v), and whole shut tiles are
not walked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from proteus_lm.ops.triton.addresses import below, lane_of, read_row, rows_at, store_columns, store_rows


@triton.jit
def merge(inverse, a, C: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of the blocks of 2 SIZE from that of the blocks of SIZE: (L + M)^-1 = L^-1 - L^-1 M L^-1 where M couples one way."""
    r = tl.arange(0, C)[:, None] // SIZE
    j = tl.arange(0, C)[None, :] // SIZE
    coupling = tl.where((r % 2 == 1) & (j == r - 1), a, 0.0)
    if HALF:
        left = inverse.to(tl.float16)
        product = tl.dot(coupling.to(tl.float16), left).to(tl.float16)
        return inverse - tl.dot(left, product)
    product = tl.dot(coupling, inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, product, input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(a, C: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 for strictly lower a (C, C): rows of the D x D diagonal blocks by substitution in fp32, then merged.

    HALF: products from fp16 operands (the 10 bits of tf32, at twice its speed), enough for a result kept in 16 bits.
    """
    if D == 2:
        r = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        inverse = tl.where(r == j, 1.0, tl.where(r // 2 == j // 2, -a, 0.0))
    else:
        N: tl.constexpr = C // D
        blocks = tl.reshape(a, [N, D, N, D])
        same = tl.arange(0, N)[:, None, None, None] == tl.arange(0, N)[None, None, :, None]
        diagonal = tl.sum(tl.where(same, blocks, 0.0), axis=2)  # (N, D, D)
        row = tl.arange(0, D)[None, :, None]
        x = tl.where(row == tl.arange(0, D)[None, None, :], 1.0, 0.0) + tl.zeros([N, D, D], tl.float32)
        for i in range(1, D):
            coefficients = tl.sum(tl.where(row == i, diagonal, 0.0), axis=1)
            solved = tl.sum(coefficients[:, :, None] * x, axis=1)
            x = tl.where(row == i, x - solved[:, None, :], x)
        inverse = tl.reshape(tl.where(same, x[:, :, None, :], 0.0), [C, C])
    if D < C:
        inverse = merge(inverse, a, C, D, HALF, PRECISION)
    if 2 * D < C:
        inverse = merge(inverse, a, C, 2 * D, HALF, PRECISION)
    if 4 * D < C:
        inverse = merge(inverse, a, C, 4 * D, HALF, PRECISION)
    if 8 * D < C:
        inverse = merge(inverse, a, C, 8 * D, HALF, PRECISION)
    if 16 * D < C:
        inverse = merge(inverse, a, C, 16 * D, HALF, PRECISION)
    return inverse


@triton.jit
def at_least(strength, FLOOR: tl.constexpr):
    """A strength that can be divided by."""
    return tl.where(tl.abs(strength) < FLOOR, FLOOR, strength)


@triton.jit
def rows_of(
    k, q, p, o, here, k0, limit, H: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, DELTA: tl.constexpr, HAS_P: tl.constexpr
):  # fmt: skip
    """Columns k0 .. k0 + KT of a chunk's rows of k, q and p (C, KT), zero from `limit` on; k for p where there is none."""
    col = k0 + tl.arange(0, KT)
    mask = here[:, None] & (col < limit)[None, :]
    b_k = tl.load(rows_at(k, 0, o, col, H * K), mask=mask, other=0.0)
    b_q = tl.load(rows_at(q, 0, o, col, H * K), mask=mask, other=0.0)
    b_p = b_k
    if DELTA and HAS_P:
        b_p = tl.load(rows_at(p, 0, o, col, H * K), mask=mask, other=0.0)
    return b_k, b_q, b_p


@triton.jit
def prepare(
    q, k, p, g, beta, chunks, gates, solve, attend, scale,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, KT: tl.constexpr, D: tl.constexpr,
    DELTA: tl.constexpr, HAS_G: tl.constexpr, HAS_P: tl.constexpr, DECAYED: tl.constexpr,
    KEY: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr,
    FLOOR: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: its running log decays, `attend`, and for the delta rules `solve`.

    gates: fp32 (chunks, H, 6, C) = scale e^G, e^(total - G), e^P, G, P, beta;
        with WINDOW scale e^P, e^(total - R) omega, gamma1 of the token after, R, P, gamma0, and beta is gamma (tokens, H, 2).
    solve, attend: (chunks, H, C, C); solve takes beta in.
    FLOOR: the least strength taken: dbeta is found from what beta multiplied, and a beta of 0 would hide it; domega likewise.
    """
    c = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    start, count, width, after = read_row(tl.load(chunks + c))
    if count == 0:
        return
    limit = K
    if KEY:
        limit = width // ALIGN * ALIGN  # what the compiler may assume of it
    o = tl.arange(0, C)
    here = o < count
    token = o * H  # offsets in a chunk are 32 bit; the chunk's own place is in the pointers
    first = start * H + h
    decay = tl.zeros([C], tl.float32)
    if WINDOW:  # what stands at the token after, that of the document's next chunk included
        follows = o < tl.where(after > 0, count, count - 1)
        decay = tl.load(g + first + H + token, mask=follows, other=0.0).to(tl.float32)
        own = tl.load(beta + (first + token) * 2, mask=here, other=0.0).to(tl.float32)
        again = tl.load(beta + (first + H + token) * 2 + 1, mask=follows, other=0.0).to(tl.float32)
        omega = at_least(own * tl.exp(decay) + again, FLOOR)
    elif HAS_G:
        decay = tl.load(g + first + token, mask=here, other=0.0).to(tl.float32)
    if DELTA:
        strength = at_least(tl.load(beta + first + token, mask=here, other=0.0).to(tl.float32), FLOOR)

    # Loads first: the running sum below has barriers, which loads behind it would wait for.
    dtype: tl.constexpr = q.dtype.element_ty
    WHOLE: tl.constexpr = K <= KT
    read = tl.zeros([C, C], tl.float32)
    a = tl.zeros([C, C], tl.float32)
    q += first * K
    k += first * K
    if HAS_P:
        p += first * K
    if WHOLE:
        b_k, b_q, b_p = rows_of(k, q, p, o, here, 0, limit, H, K, KT, DELTA, HAS_P)
        read = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    else:
        for k0 in range(0, limit, KT):
            b_k, b_q, b_p = rows_of(k, q, p, o, here, k0, limit, H, K, KT, DELTA, HAS_P)
            read = tl.dot(b_q, tl.trans(b_k), read, input_precision=PRECISION)
            if DELTA:
                a = tl.dot(b_p, tl.trans(b_k), a, input_precision=PRECISION)

    running = tl.cumsum(decay, 0)
    before = running if DECAYED else running - decay
    total = tl.sum(tl.where(o == C - 1, running, 0.0), 0)
    left = tl.exp(tl.minimum(total - running, 0.0))
    slot = (c * H + h) * 6 * C
    tl.store(gates + slot + 3 * C + o, running)
    if WINDOW:
        tl.store(gates + slot + o, tl.exp(before) * scale)
        tl.store(gates + slot + C + o, left * omega)
        tl.store(gates + slot + 2 * C + o, again)
        tl.store(gates + slot + 4 * C + o, before)
        tl.store(gates + slot + 5 * C + o, own)
    else:
        tl.store(gates + slot + o, tl.exp(running) * scale)
        tl.store(gates + slot + C + o, left)

    r = o[:, None]
    j = o[None, :]
    corner = (c * H + h) * C * C
    if WINDOW:
        kept = tl.exp(tl.where(r > j, before[:, None] - running[None, :], 0.0)) * omega[None, :]
        read *= tl.where(r > j, kept, own[:, None]) * scale
    else:
        read *= tl.exp(tl.where(r >= j, running[:, None] - running[None, :], 0.0)) * scale
    store_rows(attend, corner, tl.where(r >= j, read, 0.0).to(dtype), C, C, C)
    if DELTA:
        tl.store(gates + slot + 2 * C + o, tl.exp(before))
        tl.store(gates + slot + 4 * C + o, before)
        tl.store(gates + slot + 5 * C + o, strength)
        if WHOLE:
            a = tl.dot(b_p, tl.trans(b_k), input_precision=PRECISION)
        a *= tl.exp(tl.where(r > j, before[:, None] - running[None, :], 0.0)) * strength[:, None]
        a = tl.where(r > j, a, 0.0)
        inverse = unit_lower_inverse(a, C, D, HALF, PRECISION) * strength[None, :]
        store_rows(solve, corner, inverse.to(dtype), C, C, C)


@triton.jit
def fetch(x, place, o, here, limit, H: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, W: tl.constexpr):
    """The first W tiles (C, KT) of a chunk's rows of x (tokens, H, K), zero from column `limit` on; the rest repeat the first."""
    col = tl.arange(0, KT)
    at = rows_at(x, place, o, col, H * K)
    b0 = tl.load(at, mask=here[:, None] & (col < limit)[None, :], other=0.0)
    b1 = b0
    b2 = b0
    b3 = b0
    if W > 1:
        b1 = tl.load(at + KT, mask=here[:, None] & (col + KT < limit)[None, :], other=0.0)
    if W > 2:
        b2 = tl.load(at + 2 * KT, mask=here[:, None] & (col + 2 * KT < limit)[None, :], other=0.0)
    if W > 3:
        b3 = tl.load(at + 3 * KT, mask=here[:, None] & (col + 3 * KT < limit)[None, :], other=0.0)
    return b0, b1, b2, b3


@triton.jit
def project(s0, s1, s2, s3, b0, b1, b2, b3, W: tl.constexpr, PRECISION: tl.constexpr):
    """S b^T (BV, C) over the first W tiles of key rows; S four tiles (BV, KT), b four tiles (C, KT)."""
    out = tl.dot(s0.to(b0.dtype), tl.trans(b0), input_precision=PRECISION)
    if W > 1:
        out = tl.dot(s1.to(b0.dtype), tl.trans(b1), out, input_precision=PRECISION)
    if W > 2:
        out = tl.dot(s2.to(b0.dtype), tl.trans(b2), out, input_precision=PRECISION)
    if W > 3:
        out = tl.dot(s3.to(b0.dtype), tl.trans(b3), out, input_precision=PRECISION)
    return out


@triton.jit
def write(s0, s1, s2, s3, u, b0, b1, b2, b3, W: tl.constexpr, PRECISION: tl.constexpr):
    """S + u b over the first W tiles; u (BV, C)."""
    u = u.to(b0.dtype)
    s0 = tl.dot(u, b0, s0, input_precision=PRECISION)
    if W > 1:
        s1 = tl.dot(u, b1, s1, input_precision=PRECISION)
    if W > 2:
        s2 = tl.dot(u, b2, s2, input_precision=PRECISION)
    if W > 3:
        s3 = tl.dot(u, b3, s3, input_precision=PRECISION)
    return s0, s1, s2, s3


@triton.jit
def fade(
    s, factor, fresh, column, first, limit, soon, KT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CARRIED: tl.constexpr
):  # fmt: skip
    """Decay the open part of a tile (BV, KT) by `factor`, what opens with the next token (limit .. soon) by `fresh`.

    Only a state that was handed in can hold anything there or in the locked part.
    """
    out = s * factor
    if CARRIED and KEY:
        row = (first + tl.arange(0, KT))[None, :]
        out = tl.where(row < limit, out, tl.where(row < soon, s * fresh, s))
    if CARRIED and VALUE:
        out = tl.where((column < limit)[:, None], out, tl.where((column < soon)[:, None], s * fresh, s))
    return out


@triton.jit
def reopen(s, key, value, first, width, soon, K: tl.constexpr, KT: tl.constexpr, KEY: tl.constexpr):
    """Tile (BV, KT) with one more pair written where the next token opens it: rows width .. soon, or the columns left in value."""
    row = first + tl.arange(0, KT)
    inside = row < K
    if KEY:
        inside = (row >= width) & (row < soon)
    return s + value[:, None] * tl.load(key + row, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def put_tile(x, start, tile, rows, columns, STRIDE: tl.constexpr, LOCAL: tl.constexpr):
    """`store_rows`, or LOCAL not, the same in the layout in which Triton would load it."""
    if LOCAL:
        store_rows(x, start, tile, rows, columns, STRIDE)
    else:
        r = tl.arange(0, tile.shape[0])
        c = tl.arange(0, tile.shape[1])
        tl.store(rows_at(x, start, r, c, STRIDE), tile, mask=below(r, rows)[:, None] & (c < columns)[None, :])


@triton.jit
def put(out, place, s0, s1, s2, s3, keys, values, K: tl.constexpr, KT: tl.constexpr, W: tl.constexpr, LOCAL: tl.constexpr):
    """Store the open part, `keys` rows and `values` columns, of W tiles (BV, KT) of a transposed state (V, K) from `place` on.

    LOCAL: within each warp, by `store_rows`. The faster way in `scan` and the slower one in `reverse` (H200).
    """
    dtype: tl.constexpr = out.dtype.element_ty
    put_tile(out, place, s0.to(dtype), values, keys, K, LOCAL)
    if W > 1:
        put_tile(out, place + KT, s1.to(dtype), values, keys - KT, K, LOCAL)
    if W > 2:
        put_tile(out, place + 2 * KT, s2.to(dtype), values, keys - 2 * KT, K, LOCAL)
    if W > 3:
        put_tile(out, place + 3 * KT, s3.to(dtype), values, keys - 3 * KT, K, LOCAL)


@triton.jit
def carry_in(state, column, first, K: tl.constexpr, V: tl.constexpr, KT: tl.constexpr):
    """One tile (BV, KT), fp32, of a state (K, V) in memory."""
    row = first + tl.arange(0, KT)
    at = state + row[None, :] * V + column[:, None]
    return tl.load(at, mask=(row < K)[None, :] & (column < V)[:, None], other=0.0).to(tl.float32)


@triton.jit
def carry_out(state, s, column, first, K: tl.constexpr, V: tl.constexpr, KT: tl.constexpr):
    """`carry_in` the other way."""
    row = first + tl.arange(0, KT)
    at = state + row[None, :] * V + column[:, None]
    tl.store(at, s, mask=(row < K)[None, :] & (column < V)[:, None])


@triton.jit
def scan(
    q, k, p, v, gates, solve, attend, chunks, documents, initial, out, fresh, states, final, scale, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KT: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr,
    TILES: tl.constexpr, DELTA: tl.constexpr, HAS_P: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ALIGN: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One document, one head, BV value columns: the whole walk. The tile that opens first is the longest walk and starts first.

    With WINDOW a tile is walked from the chunk before the one that opens it, whose last pair it receives.

    initial, final: fp32 (N, H, K, V).  fresh: (chunks, H, V, C).  states: (chunks, H, V, K), the state before each chunk, what
    is open in it (with WINDOW, or opens behind it).
    """
    lane, tile = lane_of(N * H, tl.cdiv(V, BV), VALUE)
    document = lane // H
    h = (lane % H).to(tl.int64)
    column = tile * BV + tl.arange(0, BV)
    o = tl.arange(0, C)
    dtype: tl.constexpr = v.dtype.element_ty
    s0 = tl.zeros([BV, KT], tl.float32)
    s1 = s0
    s2 = s0
    s3 = s0
    where = (document * H + h).to(tl.int64) * K * V
    if HAS_INITIAL:
        s0 = carry_in(initial + where, column, 0, K, V, KT)
        if NK > 1:
            s1 = carry_in(initial + where, column, KT, K, V, KT)
        if NK > 2:
            s2 = carry_in(initial + where, column, 2 * KT, K, V, KT)
        if NK > 3:
            s3 = carry_in(initial + where, column, 3 * KT, K, V, KT)
    table = documents + document * (2 + TILES)
    low = tl.load(table)
    if VALUE:
        opens = tl.load(table + 2 + tile * (BV // 16))
        if WINDOW:
            opens = tl.maximum(opens - 1, low)
        for c in range(low, opens):
            start, count, _, _ = read_row(tl.load(chunks + c))
            here = o < count
            at = ((start + o) * H + h)[None, :] * V + column[:, None]
            tl.store(out + at, tl.zeros([BV, C], dtype), mask=here[None, :] & (column < V)[:, None])
        low = opens
    past = tl.load(table + 1)
    # A row of the table is read a chunk ahead: with an address that waits for a load of its own round Triton keeps no copies in
    # flight across rounds. It is one word: of several the compiler waited for one at the end of each round.
    row = tl.load(chunks + low, mask=low < past, other=0)
    for phase in tl.static_range(0, NK):
        high = past
        if phase < NK - 1:
            high = tl.load(table + 2 + (phase + 1) * (KT // 16))
            if WINDOW:
                high = tl.maximum(high - 1, low)
        for c in tl.range(low, high, num_stages=STAGES):
            start, tokens, width, soon = read_row(row)
            here = below(o, tokens)
            width = width // ALIGN * ALIGN  # a hint of divisibility would be lost on the way round the loop
            place = start * H + h
            row = tl.load(chunks + c + 1, mask=c + 1 < past, other=0)
            keys = width if KEY else K
            values = width if VALUE else V
            slot = c * H + h
            factor = tl.exp(tl.load(gates + slot * 6 * C + 4 * C - 1))
            fresh_factor = factor
            soon = soon // ALIGN * ALIGN if WINDOW and (KEY or VALUE) else width
            if WINDOW and (KEY or VALUE):
                end = gates + slot * 6 * C + tokens - 1
                if HAS_INITIAL:
                    fresh_factor = tl.exp(tl.load(end + 3 * C) - tl.load(end + 4 * C))
            k0, k1, k2, k3 = fetch(k, place * K, o, here, keys, H, K, KT, phase + 1)
            if SAVE:
                reach = width
                if WINDOW and (KEY or VALUE):
                    reach = tl.maximum(width, soon)
                kept = (reach if VALUE else V) - tile * BV
                put(states, (slot * V + tile * BV) * K, s0, s1, s2, s3, reach if KEY else K, kept, K, KT, phase + 1, True)
            inside = here[:, None] & (column < values)[None, :]
            u = tl.trans(tl.load(rows_at(v, place * V, o, column, H * V), mask=inside, other=0.0))
            if DELTA:
                p0, p1, p2, p3 = k0, k1, k2, k3
                if HAS_P:
                    p0, p1, p2, p3 = fetch(p, place * K, o, here, keys, H, K, KT, phase + 1)
                guess = project(s0, s1, s2, s3, p0, p1, p2, p3, phase + 1, PRECISION)
                guess *= -tl.load(gates + slot * 6 * C + 2 * C + o)[None, :]
                if VALUE and HAS_INITIAL:
                    guess = tl.where((column < values)[:, None], guess, 0.0)
                b_solve = tl.trans(tl.load(rows_at(solve, slot * C * C, o, o, C)))
                if HALF:  # two products in place of a difference: only what a product takes whole is copied ahead of its round
                    asked = tl.dot(u, b_solve, input_precision=PRECISION)
                    wrote = tl.dot(guess.to(dtype), b_solve, asked, input_precision=PRECISION)
                    u = wrote.to(dtype)
                else:
                    u = tl.dot(u + guess, b_solve, input_precision=PRECISION)
                    wrote = u
                if SAVE:
                    store_rows(fresh, (slot * V + tile * BV) * C, u, V - tile * BV, C, C)
            else:
                wrote = u.to(tl.float32)
            q0, q1, q2, q3 = fetch(q, place * K, o, here, keys, H, K, KT, phase + 1)
            y = project(s0, s1, s2, s3, q0, q1, q2, q3, phase + 1, PRECISION) * tl.load(gates + slot * 6 * C + o)[None, :]
            y = tl.dot(u, tl.trans(tl.load(rows_at(attend, slot * C * C, o, o, C))), y, input_precision=PRECISION)
            if VALUE and HAS_INITIAL:
                y = tl.where((column < values)[:, None], y, 0.0)
            store_columns(out, place * V + tile * BV, y.to(dtype), V - tile * BV, tokens, H * V)
            s0 = fade(s0, factor, fresh_factor, column, 0, width, soon, KT, KEY, VALUE, HAS_INITIAL)
            if phase > 0:
                s1 = fade(s1, factor, fresh_factor, column, KT, width, soon, KT, KEY, VALUE, HAS_INITIAL)
            if phase > 1:
                s2 = fade(s2, factor, fresh_factor, column, 2 * KT, width, soon, KT, KEY, VALUE, HAS_INITIAL)
            if phase > 2:
                s3 = fade(s3, factor, fresh_factor, column, 3 * KT, width, soon, KT, KEY, VALUE, HAS_INITIAL)
            wrote *= tl.load(gates + slot * 6 * C + C + o)[None, :]
            s0, s1, s2, s3 = write(s0, s1, s2, s3, wrote, k0, k1, k2, k3, phase + 1, PRECISION)
            if WINDOW and (KEY or VALUE):
                last = place + (tokens - 1) * H
                if soon > width:
                    mask = (column >= width) & (column < soon) if VALUE else column < V
                    value = tl.load(v + last * V + column, mask=mask, other=0.0).to(tl.float32) * tl.load(end + 2 * C)
                    s0 = reopen(s0, k + last * K, value, 0, width, soon, K, KT, KEY)
                    if phase > 0:
                        s1 = reopen(s1, k + last * K, value, KT, width, soon, K, KT, KEY)
                    if phase > 1:
                        s2 = reopen(s2, k + last * K, value, 2 * KT, width, soon, K, KT, KEY)
                    if phase > 2:
                        s3 = reopen(s3, k + last * K, value, 3 * KT, width, soon, K, KT, KEY)
        low = high
    if HAS_FINAL:
        carry_out(final + where, s0, column, 0, K, V, KT)
        if NK > 1:
            carry_out(final + where, s1, column, KT, K, V, KT)
        if NK > 2:
            carry_out(final + where, s2, column, 2 * KT, K, V, KT)
        if NK > 3:
            carry_out(final + where, s3, column, 3 * KT, K, V, KT)
