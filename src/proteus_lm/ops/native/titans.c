/* Titans' memory of two layers on a CPU, fp32: the exact dual form of spec/deep.md 2 and 3 by chunks, forward and backward.
 *
 * One item is a (row, head). A thread takes items one by one and walks their chunks; the state of an item stays in its cache. Sums
 * belong to one item, so results do not depend on the number of threads. Built by build.py at first use, called through ctypes.
 *
 * Names: n tokens of a chunk, w open hidden units, W1 (dk, w), W2 (w, dv), S1, S2 their momentum, A = f(Z) = f(K W1), G2 the error,
 * H = G2 W2', G1 = H f'(Z), X = f(Zq) the hidden layer of the reads, d* gradients. A segment is a range of units that opened at one
 * slot of the chunk: only they share the shares of the start state (3.4). A chunk in which nothing opens has one.
 *
 * Matrices are by rows with a padded step, an odd number of cache lines: a step of whole KiB would crowd into few sets of the cache.
 * Columns between w and the next 16 are worked on and never used: what is summed over hidden units is cut at w. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__SSE__)
#include <xmmintrin.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#define MR 8
#elif defined(__AVX__)
#define VL 8
#define MR 6
#else
#define VL 4
#define MR 4
#endif
typedef float V __attribute__((vector_size(4 * VL)));
typedef int32_t I __attribute__((vector_size(4 * VL)));
typedef V VU __attribute__((aligned(4), may_alias));
typedef int64_t L;

#define INLINE static inline __attribute__((always_inline))
#define GROUP 8 /* chunks between two states that are saved where a tape is not */

INLINE V load(const float *p) { return *(const VU *)p; }
INLINE void store(float *p, V x) { *(VU *)p = x; }
/* What is not read again soon goes past the cache: else each line is first read, and puts out one of the state's. */
INLINE void store_past(float *p, V x) {
#if defined(__AVX512F__)
  if (!((uintptr_t)p & 63)) _mm512_stream_ps(p, (__m512)x);
  else store(p, x);
#else
  store(p, x);
#endif
}
INLINE L round16(L x) { return (x + 15) & ~(L)15; }
INLINE L step_of(L x) { return round16(x) / 16 % 2 ? round16(x) : round16(x) + 16; }

/* What a call is given; `Arguments` in _operator.py has the same fields. Tensors are contiguous fp32 or int64; `all`: B * T. */
typedef struct {
  L rows, tokens, all, heads, chunk, dk, dv, hidden, pre, silu, threads, active_rows, save, limit, room;
  const float *q, *k, *v, *gate[3];        /* (B, T, H, .); theta, alpha, eta (B, T, H) */
  const float *open_k, *open_v, *open_gate[3]; /* (N, chunk, H, ...) of the open chunk, or NULL */
  const L *active, *open_active;           /* (B or 1, T), (N, chunk) or NULL: open units */
  const L *first, *length, *phase;         /* (N): first token among all, tokens, slot of the first */
  const float *start[4];                   /* W1, W2, S1, S2 (N, H, in, out) at the first boundary; NULL for zeros */
  L start_row[4];                          /* numbers from a row of `start` to the next; 0 where all have one memory */
  float *state[4], *y, *saved;             /* at the last boundary; (B, T, H, dv); `room` numbers, tapes up to `limit` */
  const float *dy, *d_end[4];              /* the backward: gradients of y and `state`, NULL for zeros */
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* OpenMP's, of the runtime that PyTorch uses, or NULL */
  float *d_state[4], *d_shared[4];         /* of `start`, NULL where not wanted; and its sum over rows, if that is */
  float *dq, *dk_, *dv_, *d_gate[3], *d_open_k, *d_open_v, *d_open_gate[3];
} Args;

/* ---- products ---------------------------------------------------------------------------------------------------------------- */

enum { SET, ADD, SUB, NEG };                /* C = AB, C += AB, C -= AB, C = -AB */
enum { FULL, LOWER, UPPER, OUT_LOWER };     /* A is lower or upper triangular; or only the lower triangle of C is wanted */

/* A block of m rows by nv vectors of C. m and nv are constants where this is used, so all of it stays in registers. */
INLINE void block(const int m, const int nv, L k0, L k1, const float *a, L rs, L cs, const float *b, L ldb, float *c, L ldc, int mode) {
  V acc[MR][2];
  for (int i = 0; i < m; i++)
    for (int j = 0; j < nv; j++) acc[i][j] = (V){0};
  for (L k = k0; k < k1; k++) {
    V x[2];
#pragma GCC unroll 2
    for (int j = 0; j < nv; j++) x[j] = load(b + k * ldb + j * VL);
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) {
      const float s = a[i * rs + k * cs];
#pragma GCC unroll 2
      for (int j = 0; j < nv; j++) acc[i][j] += s * x[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < m; i++)
#pragma GCC unroll 2
    for (int j = 0; j < nv; j++) {
      float *at = c + i * ldc + j * VL;
      V r = acc[i][j];
      if (mode == ADD) r = load(at) + r;
      if (mode == SUB) r = load(at) - r;
      if (mode == NEG) r = -r;
      store(at, r);
    }
}

#define ROWS(m) \
  case m: \
    if (nv == 2) block(m, 2, k0, k1, at, rs, cs, b + j, ldb, c + i * ldc + j, ldc, mode); \
    else block(m, 1, k0, k1, at, rs, cs, b + j, ldb, c + i * ldc + j, ldc, mode); \
    break;

/* C (M, N) from A (M, K), whose element (i, k) is a[i * rs + k * cs], and B (K, N). N is rounded up to whole vectors. */
static void product(L M, L N, L K, const float *a, L rs, L cs, const float *b, L ldb, float *c, L ldc, int mode, int shape) {
  for (L j = 0; j < N; j += 2 * VL) {
    for (L i = 0; i < M; i += MR) {
      const L m = M - i < MR ? M - i : MR;
      const float *at = a + i * rs;
      const L k0 = shape == UPPER ? i : 0, k1 = shape == LOWER && i + m < K ? i + m : K;
      const L wanted = shape == OUT_LOWER && i + m < N ? i + m : N; /* columns */
      const int nv = wanted - j > VL ? 2 : 1;
      if (j >= wanted) continue;
      switch (m) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if MR > 4
        ROWS(5) ROWS(6)
#endif
#if MR > 6
        ROWS(7) ROWS(8)
#endif
      }
    }
  }
}

#if VL == 16 && (defined(__clang__) || __GNUC__ >= 12)
#define ZIP(s, lo, hi) \
  for (int i = 0; i < 16; i++) \
    if (!(i & s)) { \
      V x = r[i], y = r[i + s]; \
      r[i] = __builtin_shufflevector(x, y, lo), r[i + s] = __builtin_shufflevector(x, y, hi); \
    }
#define LIST(...) __VA_ARGS__
/* A 16 by 16 block turned in registers: at each step, blocks of s off the diagonal change places. */
INLINE void turn_block(const float *a, L lda, float *b, L ldb) {
  V r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = load(a + i * lda);
#pragma GCC unroll 16
  ZIP(1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30), LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#pragma GCC unroll 16
  ZIP(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29), LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#pragma GCC unroll 16
  ZIP(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27), LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#pragma GCC unroll 16
  ZIP(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) store(b + i * ldb, r[i]);
}
#define TURN 16
#else
#define TURN 8
INLINE void turn_block(const float *a, L lda, float *b, L ldb) {
  for (int j = 0; j < 8; j++)
    for (int i = 0; i < 8; i++) b[j * ldb + i] = a[i * lda + j];
}
#endif

/* b (n, m) = a (m, n) turned. */
static void turn(const float *a, L m, L n, L lda, float *b, L ldb) {
  for (L i = 0; i < m; i += TURN)
    for (L j = 0; j < n; j += TURN) {
      if (i + TURN <= m && j + TURN <= n) {
        turn_block(a + i * lda + j, lda, b + j * ldb + i, ldb);
        continue;
      }
      for (L s = i; s < m && s < i + TURN; s++)
        for (L t = j; t < n && t < j + TURN; t++) b[t * ldb + s] = a[s * lda + t];
    }
}

/* ---- elementwise ------------------------------------------------------------------------------------------------------------- */

INLINE V clamp(V x, float low, float high) { /* NaN stays NaN */
  I over = x > high, under = x < low;
  x = (V)((I)x & ~over) + (V)((I)((V){0} + high) & over);
  return (V)((I)x & ~under) + (V)((I)((V){0} + low) & under);
}

/* exp(x) for |x| <= 88, to 1 unit in the last place: 2^i e^r, |r| <= log(2) / 2, by Taylor's terms to the seventh. */
INLINE V exponential(V x) {
  const float magic = 12582912.0f; /* adding it rounds to a whole number, which is then in the low bits */
  V shifted = x * 1.44269504088896341f + magic;
  V whole = shifted - magic;
  V r = x - whole * 0.693359375f;
  r = r + whole * 2.12194440e-4f;
  V p = r * 1.9841270e-4f + 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  I power = ((I)shifted - 0x4B400000 + 127) << 23;
  return p * (V)power;
}

/* f(z), f'(z), f''(z); both functions are z times a sigmoid (formulas: ops/memory_activations.py). */
INLINE V function(V z, V *slope, V *bend, L silu) {
  if (silu) {
    V c = clamp(z, -88, 88), s = 1.0f / (1.0f + exponential(-c)), rest = 1.0f - s;
    *slope = s * (1.0f + c * rest);
    *bend = s * rest * (2.0f + c * (1.0f - 2.0f * s));
    return z * s;
  }
  V c = clamp(z, -30, 30), square = c * c; /* behind 30 both derivatives are exactly those of 0 or z */
  V u = 1.5957691216057308f * c * (1.0f + 0.044715f * square); /* twice the argument of tanh */
  V s = 1.0f / (1.0f + exponential(clamp(-u, -88, 88)));
  V rise = 0.7978845608028654f * (1.0f + 0.134145f * square), bell = s * (1.0f - s);
  *slope = s + 2.0f * c * bell * rise;
  *bend = 4.0f * bell * (rise + 0.10703222440890037f * square - c * (2.0f * s - 1.0f) * rise * rise);
  return z * s;
}

INLINE float total(V x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float s = 0;
  for (int i = 0; i < VL; i++) s += x[i];
  return s;
#endif
}

INLINE float dot(const float *a, const float *b, L n) {
  V s = {0};
  L i = 0;
  for (; i + VL <= n; i += VL) s += load(a + i) * load(b + i);
  float r = total(s);
  for (; i < n; i++) r += a[i] * b[i];
  return r;
}

INLINE float sum(const float *a, L n) {
  V s = {0};
  L i = 0;
  for (; i + VL <= n; i += VL) s += load(a + i);
  float r = total(s);
  for (; i < n; i++) r += a[i];
  return r;
}

static void clear(float *p, L from, L to) {
  if (to > from) memset(p + from, 0, 4 * (to - from));
}

/* ---- plan -------------------------------------------------------------------------------------------------------------------- */

/* A chunk of a row: its tokens, its open units, whether it is filled, its tape's place in that of the row. */
typedef struct { L tokens, width, ends, tape; } Chunk;
/* A row: its chunks; numbers of its tapes, and of the states saved instead. */
typedef struct { Chunk *chunk; L chunks, tapes, states; } Row;
typedef struct { L at, whole; } Place; /* of an item in `saved`, and whether all its tapes are there */
typedef struct { Row *row; Chunk *chunks; Place *place; L used, scratch_tape; } Plan;

/* A chunk's tape: state at its start, Zq (n, w), X A' (n, n), G2 (n, dv). Z and H are one product each, which takes less time than to
 * write them to memory and read them back. Steps: `ld` of W1 and S1, `lw` of W2 and S2, `wp` of Zq, `lb` of X A'. */
typedef struct { float *w1, *w2, *s1, *s2, *zq, *alike, *g2; L ld, lw, wp, lb; } Tape;

static L state_numbers(const Args *c, L w) { return 2 * (c->dk * step_of(w) + w * round16(c->dv)); }

static L tape_numbers(const Args *c, L n, L w) {
  return state_numbers(c, w) + n * round16(w) + n * round16(n) + n * step_of(c->dv);
}

static Tape tape_at(const Args *c, float *p, L n, L w) {
  Tape t = {.ld = step_of(w), .lw = round16(c->dv), .wp = round16(w), .lb = round16(n)};
  t.w1 = p, t.s1 = t.w1 + c->dk * t.ld, t.w2 = t.s1 + c->dk * t.ld, t.s2 = t.w2 + w * t.lw;
  t.zq = t.s2 + w * t.lw, t.alike = t.zq + n * t.wp, t.g2 = t.alike + n * t.lb;
  return t;
}

static L open_at(const Args *c, L token) { return c->active[c->active_rows == 1 ? token % c->tokens : token]; }

/* The tokens of a chunk in order, and the units open to each, which never fall. Negative: slot -1 - i of the open rows. */
static L chunk_tokens(const Args *c, L row, L number, L widest, L *at, L *open) {
  L n = 0;
  for (L s = 0; s < c->chunk; s++) {
    const L pos = number * c->chunk + s - c->phase[row];
    L now;
    if (pos >= c->length[row]) break;
    if (pos >= 0) now = open_at(c, c->first[row] + pos), at[n] = c->first[row] + pos;
    else if (c->open_active && (now = c->open_active[row * c->chunk + s]) > 0) at[n] = -1 - s;
    else continue;
    now = now > c->hidden ? c->hidden : now;
    widest = now > widest ? now : widest;
    open[n++] = widest;
  }
  return n;
}

static void free_plan(Plan *p) { free(p->row), free(p->chunks), free(p->place); }

/* Returns 0 when there is no memory for it. */
static int make_plan(const Args *c, Plan *p) {
  L chunks = 0, used = 0, full = 0, largest = 0;
  memset(p, 0, sizeof *p);
  for (L r = 0; r < c->rows; r++) chunks += (c->phase[r] + c->length[r] + c->chunk - 1) / c->chunk;
  p->row = malloc(sizeof(Row) * c->rows), p->chunks = malloc(sizeof(Chunk) * chunks);
  p->place = malloc(sizeof(Place) * c->rows * c->heads);
  L *at = malloc(16 * c->chunk);
  if (!p->row || !p->chunks || !p->place || !at) return free(at), free_plan(p), 0;
  Chunk *next = p->chunks;
  for (L r = 0; r < c->rows; r++) {
    Row *row = p->row + r;
    *row = (Row){.chunk = next, .chunks = (c->phase[r] + c->length[r] + c->chunk - 1) / c->chunk};
    for (L i = 0, widest = 0, group = 0; i < row->chunks; i++, next++) {
      next->tokens = chunk_tokens(c, r, i, widest, at, at + c->chunk);
      next->width = widest = next->tokens ? at[c->chunk + next->tokens - 1] : widest;
      next->ends = (i + 1) * c->chunk <= c->phase[r] + c->length[r];
      next->tape = row->tapes;
      row->tapes += round16(tape_numbers(c, next->tokens, next->width));
      if (i && i % GROUP == 0) row->states += round16(state_numbers(c, next->width));
      group = (i % GROUP ? group : 0) + round16(tape_numbers(c, next->tokens, next->width));
      largest = group > largest ? group : largest;
    }
  }
  free(at);
  for (L i = 0; i < c->rows * c->heads; i++) {
    const Row *row = p->row + i / c->heads;
    const L whole = full + row->tapes <= c->limit;
    p->place[i] = (Place){used, whole};
    full = whole ? full + row->tapes : c->limit + 1; /* none after the first that does not fit */
    used += whole ? row->tapes : row->states;
  }
  p->used = used, p->scratch_tape = largest;
  return 1;
}

/* ---- a thread's working memory ----------------------------------------------------------------------------------------------- */

typedef struct { float *w1, *w2, *s1, *s2; L ld, lv; } State; /* (dk, ld), (w, lv) */

#define WIDE 12
typedef struct {
  L lh, lk, lv, lb, segments;             /* steps: by unit (of a chunk's open units), key, value, token */
  L *at, *open, *low, *high, *tau;
  float *q, *k, *v, *dy, *dq, *dk, *g2, *dg2, *ek, *dk_end, *eg, *dg_end, *t1, *t2; /* (chunk, dk or dv) */
  float *gate[3], *d_gate[3], *end_c, *end_d, *d_end_c, *d_end_d, *keep, *p_end, *d_p, *d_open;
  float *hist, *passed, *share, *qk, *alike, *near, *d_share, *s_a, *s_b, *small_t, *d_hist; /* (chunk + 1, chunk) */
  float *gam, *d_gam, *d_car;             /* (segments, chunk + 1) */
  float *row_gam, *row_car, *row_a, *row_b, *end_w, *car_w, *car_s, *d_end_w, *d_car_w, *d_car_s; /* by unit */
  float *wide[WIDE], *turned, *turned2, *tall, *tall2; /* (chunk, lh); (max(dk, dv), lh); (w, max(lk, lv, lb)) */
  State state;
  float *tape;
} Work;

INLINE float *take(float **p, L n) { /* from p on; with no memory behind p this only counts */
  float *r = *p;
  *p += round16(n);
  return r;
}

static L max2(L a, L b) { return a > b ? a : b; }

static L layout(const Args *c, Work *k, float *base, L tape) {
  float *p = base;
  const L b = c->chunk, h = c->hidden;
  k->lh = step_of(h), k->lk = step_of(c->dk), k->lv = step_of(c->dv), k->lb = step_of(b);
  const L ld = max2(k->lk, k->lv), tall = max2(ld, k->lb), square = (b + 1) * k->lb, by_gate = (b + 1) * (b + 1);
  L **ints[] = {&k->at, &k->open, &k->low, &k->high, &k->tau};
  for (int i = 0; i < 5; i++) *ints[i] = (L *)take(&p, 2 * (b + 1));
  float **rows[] = {&k->q, &k->k, &k->v, &k->dy, &k->dq, &k->dk, &k->g2, &k->dg2, &k->ek, &k->dk_end, &k->eg, &k->dg_end, &k->t1, &k->t2};
  for (int i = 0; i < 14; i++) *rows[i] = take(&p, b * ld);
  float **lines[] = {&k->gate[0], &k->gate[1], &k->gate[2], &k->d_gate[0], &k->d_gate[1], &k->d_gate[2], &k->end_c, &k->end_d,
                     &k->d_end_c, &k->d_end_d, &k->keep, &k->p_end, &k->d_p, &k->d_open};
  for (int i = 0; i < 14; i++) *lines[i] = take(&p, k->lb + 16);
  float **squares[] = {&k->hist, &k->passed, &k->share, &k->qk, &k->alike, &k->near, &k->d_share, &k->s_a, &k->s_b, &k->d_hist};
  for (int i = 0; i < 10; i++) *squares[i] = take(&p, square);
  k->small_t = take(&p, ld * k->lb);
  float **gates[] = {&k->gam, &k->d_gam, &k->d_car};
  for (int i = 0; i < 3; i++) *gates[i] = take(&p, by_gate);
  float **units[] = {&k->row_gam, &k->row_car, &k->row_a, &k->row_b, &k->end_w, &k->car_w, &k->car_s, &k->d_end_w, &k->d_car_w,
                     &k->d_car_s};
  for (int i = 0; i < 10; i++) *units[i] = take(&p, k->lh);
  for (int i = 0; i < WIDE; i++) k->wide[i] = take(&p, b * k->lh);
  k->turned = take(&p, ld * k->lh), k->turned2 = take(&p, ld * k->lh);
  k->tall = take(&p, h * tall), k->tall2 = take(&p, h * tall);
  k->state = (State){.ld = k->lh, .lv = k->lv};
  k->state.w1 = take(&p, c->dk * k->lh), k->state.s1 = take(&p, c->dk * k->lh);
  k->state.w2 = take(&p, h * k->lv), k->state.s2 = take(&p, h * k->lv);
  k->tape = take(&p, tape);
  return p - base;
}

/* Matrix i of an item in W1, W2, S1, S2, and its numbers. */
static L matrix_numbers(const Args *c, int i) { return (i % 2 ? c->dv : c->dk) * c->hidden; }
static const float *start_of(const Args *c, L item, int i) {
  return c->start[i] ? c->start[i] + item / c->heads * c->start_row[i] + item % c->heads * matrix_numbers(c, i) : NULL;
}

/* Units [low, high) between a matrix (dk, h) or (h, dv) and a working state; out: from the latter; from NULL: zeros into it. */
static void move_matrix(const Args *c, int i, const float *from, float *to, const State *s, L low, L high, int out) {
  const int second = i % 2;
  float *in = i == 0 ? s->w1 : i == 1 ? s->w2 : i == 2 ? s->s1 : s->s2;
  const L first = second ? low : 0, last = second ? high : c->dk, ld = second ? s->lv : s->ld, step = second ? c->dv : c->hidden;
  const L at = second ? 0 : low, size = second ? c->dv : high - low;
  for (L r = first; r < last; r++) {
    if (out) memcpy(to + r * step + at, in + r * ld + at, 4 * size);
    else if (from) memcpy(in + r * ld + at, from + r * step + at, 4 * size);
    else clear(in + r * ld, at, at + size);
  }
}

/* Bring in the start of units [low, high): what was locked so far has not changed. */
static void open_units(const Args *c, L item, const State *s, L low, L high) {
  for (int i = 0; i < 4 && high > low; i++) move_matrix(c, i, start_of(c, item, i), NULL, s, low, high, 0);
}

/* Write out units [low, high), of the matrices that are wanted. */
static void close_units(const Args *c, float *const tensors[4], L item, const State *s, L low, L high) {
  for (int i = 0; i < 4 && high > low; i++)
    if (tensors[i]) move_matrix(c, i, NULL, tensors[i] + item * matrix_numbers(c, i), s, low, high, 1);
}

/* Rows of n numbers, in whole vectors. */
static void copy_rows(L rows, L n, const float *from, L ldf, float *to, L ldt) {
  for (L r = 0; r < rows; r++)
    for (L i = 0; i < n; i += VL) store_past(to + r * ldt + i, load(from + r * ldf + i));
}

static void copy_state(const Args *c, const State *from, const State *to, L w) {
  copy_rows(c->dk, w, from->w1, from->ld, to->w1, to->ld), copy_rows(c->dk, w, from->s1, from->ld, to->s1, to->ld);
  copy_rows(w, c->dv, from->w2, from->lv, to->w2, to->lv), copy_rows(w, c->dv, from->s2, from->lv, to->s2, to->lv);
}

static State tape_state(const Tape *t) { return (State){t->w1, t->w2, t->s1, t->s2, t->ld, t->lw}; }

/* A state saved in place of tapes has the layout of a tape's start. */
static State saved_state(const Args *c, float *p, L w) {
  Tape t = tape_at(c, p, 0, w);
  return tape_state(&t);
}

/* ---- a chunk's tokens and gates ---------------------------------------------------------------------------------------------- */

INLINE void copy(L n, const float *from, float *to, const int past) {
  L i = 0;
  for (; i + VL <= n; i += VL) past ? store_past(to + i, load(from + i)) : store(to + i, load(from + i));
  for (; i < n; i++) to[i] = from[i];
}

static void gather_rows(const Args *c, L row, L head, const L *at, L n, const float *x, const float *open, L d, float *out, L ld) {
  for (L t = 0; t < n; t++) {
    const float *from = at[t] >= 0 ? x + (at[t] * c->heads + head) * d
                                   : open ? open + ((row * c->chunk - 1 - at[t]) * c->heads + head) * d : NULL;
    if (from) copy(d, from, out + t * ld, 0);
    else clear(out + t * ld, 0, d);
  }
}

static void scatter_rows(const Args *c, L row, L head, const L *at, L n, float *x, float *open, L d, const float *in, L ld) {
  for (L t = 0; t < n; t++) {
    float *to = at[t] >= 0 ? x + (at[t] * c->heads + head) * d
                           : open ? open + ((row * c->chunk - 1 - at[t]) * c->heads + head) * d : NULL;
    if (to) copy(d, in + t * ld, to, 1);
  }
}

/* Tokens, segments, and from the gates: what is left at each row of each earlier gradient (hist, without theta) and of the start
 * weights of each segment (gam). Row r is what holds after r tokens. No quotients and no logarithms: gates of 0 and 1 are exact. */
static void chunk_start(const Args *c, Work *k, L row, L head, L number, L widest) {
  const L n = chunk_tokens(c, row, number, widest, k->at, k->open), lb = k->lb, np = round16(n);
  gather_rows(c, row, head, k->at, n, c->q, NULL, c->dk, k->q, k->lk); /* tokens of earlier calls ask nothing */
  gather_rows(c, row, head, k->at, n, c->k, c->open_k, c->dk, k->k, k->lk);
  for (int g = 0; g < 3; g++) gather_rows(c, row, head, k->at, n, c->gate[g], c->open_gate[g], 1, k->gate[g], 1);
  const float *theta = k->gate[0], *eta = k->gate[2];
  clear(k->gate[0], n, np), clear(k->hist, 0, np); /* rows are worked on whole: above the diagonal they are 0 and stay so */
  for (L t = 0; t < n; t++) {
    float *p = k->passed + t * lb, *h = k->hist + (t + 1) * lb;
    const float *before = k->hist + t * lb, keep = k->keep[t] = 1.0f - k->gate[1][t];
    for (L i = 0; i < np; i += VL) store(p + i, t ? load(p + i - lb) * eta[t] : (V){0});
    p[t] = 1.0f;
    for (L i = 0; i < np; i += VL) store(h + i, keep * load(before + i) + load(p + i));
  }
  for (L t = 0; t < n; t++)
    for (L i = 0; i < np; i += VL)
      store(k->share + t * lb + i, load(k->hist + (t + 1 - c->pre) * lb + i) * load(theta + i));
  for (L i = 0; i < n; i++) {
    k->end_c[i] = k->hist[n * lb + i] * theta[i];
    k->end_d[i] = k->passed[(n - 1) * lb + i] * theta[i];
  }
  k->segments = 0;
  for (L t = 0, low = 0; t < n; t++) {
    if (k->open[t] <= low) continue;
    const L s = k->segments++;
    k->low[s] = low, low = k->high[s] = k->open[t], k->tau[s] = t;
    float *g = k->gam + s * (c->chunk + 1);
    for (L r = 0; r <= n; r++) g[r] = r <= t ? 1.0f : g[r - 1] * k->keep[r - 1];
    for (L j = k->low[s]; j < low; j++) {
      k->end_w[j] = g[n];
      k->car_w[j] = k->hist[n * lb + t] * eta[t];
      k->car_s[j] = k->passed[(n - 1) * lb + t] * eta[t];
    }
  }
}

/* By unit: shares of the start weights and of the start momentum at the read of token t. */
static void row_shares(const Args *c, Work *k, L t) {
  const L r = t + 1 - c->pre;
  for (L s = 0; s < k->segments; s++) {
    const float g = k->gam[s * (c->chunk + 1) + r], m = k->hist[r * k->lb + k->tau[s]] * k->gate[2][k->tau[s]];
    for (L j = k->low[s]; j < k->high[s]; j++) k->row_gam[j] = g, k->row_car[j] = m;
  }
}

/* out = a * b in the lower triangle, and 0 above it up to the next 16; or added to it. */
static void lower(L n, const float *a, const float *b, L lb, L ldb, float *out, int add) {
  I lane;
  for (int i = 0; i < VL; i++) lane[i] = i;
  for (L t = 0; t < n; t++)
    for (L i = 0; i < round16(n); i += VL) {
      V x = {0};
      if (i <= t) x = load(a + t * lb + i) * load(b + t * ldb + i);
      if (i <= t && i + VL > t) x = (V)((I)x & (lane <= (int32_t)(t - i)));
      store(out + t * lb + i, add ? load(out + t * lb + i) + x : x);
    }
}

/* Rows of x (n, d) by two scales each. */
static void scale_rows(L n, L d, const float *s1, const float *s2, const float *x, float *out1, float *out2, L ld) {
  for (L t = 0; t < n; t++)
    for (L i = t * ld; i < t * ld + d; i += VL) {
      const V y = load(x + i);
      store(out1 + i, s1[t] * y), store(out2 + i, s2[t] * y);
    }
}

/* ---- forward of a chunk ------------------------------------------------------------------------------------------------------ */

/* k->t1: y; k->g2, k->alike and, unless NULL, zq: the tape but for the state. Needs `chunk_start`. */
static void chunk_forward(const Args *c, Work *k, L n, L w, const State *s, float *zq_out) {
  const L lh = k->lh, lk = k->lk, lv = k->lv, lb = k->lb, wp = round16(w), dk = c->dk, dv = c->dv;
  float *a = k->wide[0], *g1 = k->wide[1], *p1 = k->wide[2], *p2 = k->wide[3], *x = k->wide[4], *z = k->wide[5], *h = k->wide[6];
  V slope, bend;
  product(n, w, dk, k->k, lk, 1, s->w1, s->ld, z, lh, SET, FULL);
  for (L t = 0; t < n; t++) {
    for (L j = 0; j < k->open[t]; j += VL) {
      store(a + t * lh + j, function(load(z + t * lh + j), &slope, &bend, c->silu));
      store(g1 + t * lh + j, slope);
    }
    clear(a + t * lh, k->open[t], wp), clear(g1 + t * lh, k->open[t], wp);
    for (L j = 0; j < dv; j++) k->g2[t * lv + j] = -k->v[t * lv + j];
  }
  product(n, dv, w, a, lh, 1, s->w2, s->lv, k->g2, lv, ADD, FULL);
  turn(s->w2, w, dv, s->lv, k->turned, lh);
  product(n, w, dv, k->g2, lv, 1, k->turned, lh, h, lh, SET, FULL);
  for (L t = 0; t < n; t++) {
    for (L j = 0; j < wp; j += VL) store(g1 + t * lh + j, load(g1 + t * lh + j) * load(h + t * lh + j));
    clear(g1 + t * lh, k->open[t], wp);
  }

  turn(k->k, n, dk, lk, k->small_t, lb);
  product(n, n, dk, k->q, lk, 1, k->small_t, lb, k->qk, lb, SET, OUT_LOWER);
  lower(n, k->share, k->qk, lb, lb, k->near, 0);
  product(n, w, dk, k->q, lk, 1, s->w1, s->ld, p1, lh, SET, FULL);
  product(n, w, dk, k->q, lk, 1, s->s1, s->ld, p2, lh, SET, FULL);
  product(n, w, n, k->near, lb, 1, g1, lh, x, lh, SET, LOWER);
  for (L t = 0; t < n; t++) {
    row_shares(c, k, t);
    for (L j = 0; j < wp; j += VL) {
      const V g = load(k->row_gam + j), m = load(k->row_car + j);
      const V zq = g * load(p1 + t * lh + j) + m * load(p2 + t * lh + j) - load(x + t * lh + j);
      const V value = function(zq, &slope, &bend, c->silu);
      if (zq_out) store_past(zq_out + t * wp + j, zq);
      store(x + t * lh + j, value), store(p1 + t * lh + j, g * value), store(p2 + t * lh + j, m * value);
    }
    clear(x + t * lh, k->open[t], wp), clear(p1 + t * lh, k->open[t], wp), clear(p2 + t * lh, k->open[t], wp);
  }
  turn(a, n, w, lh, k->tall, lb);
  product(n, n, w, x, lh, 1, k->tall, lb, k->alike, lb, SET, OUT_LOWER);
  lower(n, k->share, k->alike, lb, lb, k->s_a, 0);
  product(n, dv, w, p1, lh, 1, s->w2, s->lv, k->t1, lv, SET, FULL);
  product(n, dv, w, p2, lh, 1, s->s2, s->lv, k->t1, lv, ADD, FULL);
  product(n, dv, n, k->s_a, lb, 1, k->g2, lv, k->t1, lv, SUB, LOWER);
}

/* The state to the chunk's end; what chunk_forward left in k is needed. */
static void advance(const Args *c, Work *k, L n, L w, const State *s) {
  const L lh = k->lh, wp = round16(w);
  const float *a = k->wide[0], *g1 = k->wide[1];
  for (L i = 0; i < c->dk; i++)
    for (L j = 0; j < wp; j += VL) {
      float *pw = s->w1 + i * s->ld + j, *ps = s->s1 + i * s->ld + j;
      const V m = load(ps);
      store(pw, load(k->end_w + j) * load(pw) + load(k->car_w + j) * m), store(ps, load(k->car_s + j) * m);
    }
  for (L j = 0; j < w; j++)
    for (L i = 0; i < c->dv; i += VL) {
      float *pw = s->w2 + j * s->lv + i, *ps = s->s2 + j * s->lv + i;
      const V m = load(ps);
      store(pw, k->end_w[j] * load(pw) + k->car_w[j] * m), store(ps, k->car_s[j] * m);
    }
  scale_rows(n, c->dk, k->end_c, k->end_d, k->k, k->ek, k->dk_end, k->lk);
  scale_rows(n, c->dv, k->end_c, k->end_d, k->g2, k->eg, k->dg_end, k->lv);
  product(c->dk, w, n, k->ek, 1, k->lk, g1, lh, s->w1, s->ld, SUB, FULL);
  product(c->dk, w, n, k->dk_end, 1, k->lk, g1, lh, s->s1, s->ld, SUB, FULL);
  product(w, c->dv, n, a, 1, lh, k->eg, k->lv, s->w2, s->lv, SUB, FULL);
  product(w, c->dv, n, a, 1, lh, k->dg_end, k->lv, s->s2, s->lv, SUB, FULL);
}

/* Chunks [from, to) of an item from the state in k, leaving tapes from `tape` on (one after another, or all in one place). */
static void walk_forward(const Args *c, Work *k, const Row *row, L item, L from, L to, float *tape, int keep, int answer) {
  const L r = item / c->heads, head = item % c->heads;
  for (L i = from; i < to; i++) {
    const Chunk *now = row->chunk + i;
    const L before = i ? now[-1].width : 0, n = now->tokens, w = now->width;
    open_units(c, item, &k->state, before, w);
    if (!n) continue;
    Tape t = tape_at(c, keep ? tape + now->tape - row->chunk[from].tape : tape, n, w);
    State kept = tape_state(&t);
    k->lh = step_of(w);
    if (keep) copy_state(c, &k->state, &kept, w);
    chunk_start(c, k, r, head, i, before);
    gather_rows(c, r, head, k->at, n, c->v, c->open_v, c->dv, k->v, k->lv);
    chunk_forward(c, k, n, w, &k->state, keep ? t.zq : NULL);
    if (keep) copy_rows(n, n, k->alike, k->lb, t.alike, t.lb), copy_rows(n, c->dv, k->g2, k->lv, t.g2, k->lv);
    if (answer) scatter_rows(c, r, head, k->at, n, c->y, NULL, c->dv, k->t1, k->lv);
    if (now->ends) advance(c, k, n, w, &k->state);
  }
}

static void item_forward(const Args *c, const Plan *p, Work *k, L item) {
  const Row *row = p->row + item / c->heads;
  const Place place = p->place[item];
  float *at = c->saved + place.at;
  if (!c->save) walk_forward(c, k, row, item, 0, row->chunks, k->tape, 0, 1);
  else if (place.whole) walk_forward(c, k, row, item, 0, row->chunks, at, 1, 1);
  else
    for (L from = 0; from < row->chunks; from += GROUP) {
      const L to = from + GROUP < row->chunks ? from + GROUP : row->chunks;
      if (from) {
        const L w = row->chunk[from].width;
        open_units(c, item, &k->state, row->chunk[from - 1].width, w);
        State kept = saved_state(c, at, w);
        copy_state(c, &k->state, &kept, w);
        at += round16(state_numbers(c, w));
      }
      walk_forward(c, k, row, item, from, to, k->tape, 0, 1);
    }
  const L open = row->chunk[row->chunks - 1].width;
  for (int i = 0; i < 4 && open < c->hidden; i++) {
    const L size = matrix_numbers(c, i);
    const float *start = start_of(c, item, i);
    if (c->state[i] && start) memcpy(c->state[i] + item * size, start, 4 * size);
    else if (c->state[i]) memset(c->state[i] + item * size, 0, 4 * size);
  }
  close_units(c, c->state, item, &k->state, 0, open);
}

/* ---- backward of a chunk ----------------------------------------------------------------------------------------------------- */

/* From the gradients of share, the ends and the segments' shares to those of the gates, backwards through the recurrences. */
static void gates_backward(const Args *c, Work *k, L n, int ends) {
  const L lb = k->lb, np = round16(n), b1 = c->chunk + 1, first = 1 - c->pre;
  const float *theta = k->gate[0], *eta = k->gate[2];
  float *dt = k->d_gate[0], *da = k->d_gate[1], *de = k->d_gate[2], *dp = k->d_p;
  clear(dt, 0, np), clear(da, 0, np), clear(de, 0, np), clear(dp, 0, np);
  clear(k->d_hist + (first ? 0 : n) * lb, 0, np); /* the row that no read shows */
  for (L t = 0; t < n; t++)
    for (L i = 0; i < np; i += VL) {
      const V ds = -load(k->d_share + t * lb + i);
      store(k->d_hist + (t + first) * lb + i, ds * load(theta + i));
      store(dt + i, load(dt + i) + ds * load(k->hist + (t + first) * lb + i));
    }
  const float *last = k->hist + n * lb, *p_end = k->passed + (n - 1) * lb;
  if (ends)
    for (L i = 0; i < n; i++) {
      k->d_hist[n * lb + i] += k->d_end_c[i] * theta[i], dp[i] += k->d_end_d[i] * theta[i];
      dt[i] += k->d_end_c[i] * last[i] + k->d_end_d[i] * p_end[i];
    }
  for (L s = 0; s < k->segments; s++) {
    const L tau = k->tau[s], low = k->low[s], size = k->high[s] - low;
    float *dg = k->d_gam + s * b1, *g = k->gam + s * b1;
    for (L t = 0; t < n; t++) {
      const float d = k->d_car[s * b1 + t];
      k->d_hist[(t + first) * lb + tau] += d * eta[tau], de[tau] += d * k->hist[(t + first) * lb + tau];
    }
    for (L r = n; r > 0; r--) dg[r] = r - first >= 0 && r - first < n ? dg[r - first] : 0; /* from reads to rows, in place */
    if (first) dg[0] = 0;
    if (ends) {
      const float to_w = sum(k->d_car_w + low, size), to_s = sum(k->d_car_s + low, size);
      dg[n] += sum(k->d_end_w + low, size);
      k->d_hist[n * lb + tau] += to_w * eta[tau], dp[tau] += to_s * eta[tau];
      de[tau] += to_w * last[tau] + to_s * p_end[tau];
    }
    for (L r = n; r > tau; r--) da[r - 1] -= dg[r] * g[r - 1], dg[r - 1] += dg[r] * k->keep[r - 1];
  }
  for (L t = n - 1; t >= 0; t--) {
    const float *after = k->d_hist + (t + 1) * lb, keep = k->keep[t];
    float *here = k->d_hist + t * lb;
    for (L i = 0; i < np; i += VL) {
      store(dp + i, load(dp + i) + load(after + i));
      store(here + i, load(here + i) + keep * load(after + i));
    }
    da[t] -= dot(after, k->hist + t * lb, np);
    if (t) de[t] += dot(dp, k->passed + (t - 1) * lb, np);
    dp[t] = 0;
    for (L i = 0; i < np; i += VL) store(dp + i, load(dp + i) * eta[t]);
  }
}

/* x -= c by_w + d by_s by rows, and the gradients of c and d: less what x's own rows y have in common with by_w and by_s. */
static void end_rows(Work *k, L n, L d, const float *y, float *x, L ld, int add) {
  for (L t = 0; t < n; t++) {
    const float *by_w = k->t1 + t * ld, *by_s = k->t2 + t * ld;
    const float to_c = -dot(y + t * ld, by_w, d), to_d = -dot(y + t * ld, by_s, d);
    k->d_end_c[t] = (add ? k->d_end_c[t] : 0) + to_c, k->d_end_d[t] = (add ? k->d_end_d[t] : 0) + to_d;
    for (L i = 0; i < d; i += VL)
      store(x + t * ld + i, load(x + t * ld + i) - k->end_c[t] * load(by_w + i) - k->end_d[t] * load(by_s + i));
  }
}

/* Gradients of the units' end shares, and the state's own gradient through them. */
static void state_backward(const Args *c, Work *k, L w, const Tape *r, const State *d) {
  const L wp = round16(w);
  for (L j = 0; j < wp; j += VL) {
    const V ew = load(k->end_w + j), cw = load(k->car_w + j), cs = load(k->car_s + j);
    V to_e = {0}, to_w = {0}, to_s = {0};
    for (L i = 0; i < c->dk; i++) {
      float *pw = d->w1 + i * d->ld + j, *ps = d->s1 + i * d->ld + j;
      const V dw = load(pw), ds = load(ps), s = load(r->s1 + i * r->ld + j);
      to_e += load(r->w1 + i * r->ld + j) * dw, to_w += s * dw, to_s += s * ds;
      store(pw, ew * dw), store(ps, cw * dw + cs * ds);
    }
    store(k->d_end_w + j, to_e), store(k->d_car_w + j, to_w), store(k->d_car_s + j, to_s);
  }
  for (L j = 0; j < w; j++) {
    float *pw = d->w2 + j * d->lv, *ps = d->s2 + j * d->lv;
    const float *w2 = r->w2 + j * r->lw, *s2 = r->s2 + j * r->lw;
    k->d_end_w[j] += dot(w2, pw, c->dv), k->d_car_w[j] += dot(s2, pw, c->dv), k->d_car_s[j] += dot(s2, ps, c->dv);
    for (L i = 0; i < c->dv; i += VL) {
      const V dw = load(pw + i), ds = load(ps + i);
      store(pw + i, k->end_w[j] * dw), store(ps + i, k->car_w[j] * dw + k->car_s[j] * ds);
    }
  }
}

/* Adjoint of chunk_forward and advance: from k->dy and the gradient d of the end state to those of tokens, gates and d at the start
 * (spec/deep.md 2.4, second order terms included), but for what start_backward and gates_backward do. Needs `chunk_start`. */
static void chunk_backward(const Args *c, Work *k, L n, L w, const Tape *r, const State *d, int ends) {
  const L lh = k->lh, lk = k->lk, lv = k->lv, lb = k->lb, wp = r->wp, dk = c->dk, dv = c->dv, b1 = c->chunk + 1, ld = r->ld;
  float *a = k->wide[0], *sl = k->wide[1], *bd = k->wide[2], *g1 = k->wide[3], *x = k->wide[4], *xsl = k->wide[5];
  float *xw = k->wide[6], *xs = k->wide[7], *bw = k->wide[8], *bs = k->wide[9], *dz = k->wide[10], *da = k->wide[11];
  V slope, bend;
  product(n, w, dk, k->k, lk, 1, r->w1, ld, bs, lh, SET, FULL); /* Z */
  turn(r->w2, w, dv, r->lw, k->turned, lh);                     /* W2' is wanted twice more */
  product(n, w, dv, r->g2, lv, 1, k->turned, lh, bw, lh, SET, FULL); /* H */
  for (L t = 0; t < n; t++) {
    float *rows[] = {a + t * lh, sl + t * lh, bd + t * lh, g1 + t * lh, x + t * lh, xsl + t * lh, xw + t * lh, xs + t * lh};
    row_shares(c, k, t);
    for (L j = 0; j < k->open[t]; j += VL) {
      const V h = load(bw + t * lh + j);
      store(rows[0] + j, function(load(bs + t * lh + j), &slope, &bend, c->silu));
      store(rows[1] + j, slope), store(rows[2] + j, h * bend), store(rows[3] + j, h * slope);
      const V value = function(load(r->zq + t * wp + j), &slope, &bend, c->silu);
      store(rows[4] + j, value), store(rows[5] + j, slope);
      store(rows[6] + j, load(k->row_gam + j) * value), store(rows[7] + j, load(k->row_car + j) * value);
    }
    for (int i = 0; i < 8; i++) clear(rows[i], k->open[t], wp);
  }
  turn(k->k, n, dk, lk, k->small_t, lb);
  product(n, n, dk, k->q, lk, 1, k->small_t, lb, k->qk, lb, SET, OUT_LOWER);
  lower(n, k->share, k->qk, lb, lb, k->near, 0);

  /* the second layer's read */
  turn(r->g2, n, dv, lv, k->small_t, lb);
  product(n, n, dv, k->dy, lv, 1, k->small_t, lb, k->s_a, lb, SET, OUT_LOWER);
  lower(n, k->s_a, r->alike, lb, r->lb, k->d_share, 0); /* with the other sign, also in gates_backward */
  lower(n, k->share, k->s_a, lb, lb, k->s_b, 0);
  turn(r->s2, w, dv, r->lw, k->turned2, lh);
  product(n, w, dv, k->dy, lv, 1, k->turned2, lh, bs, lh, SET, FULL);
  product(n, w, dv, k->dy, lv, 1, k->turned, lh, bw, lh, SET, FULL);
  product(n, w, n, k->s_b, lb, 1, a, lh, dz, lh, SET, LOWER);
  product(n, w, n, k->s_b, 1, lb, x, lh, da, lh, NEG, UPPER);
  lower(n, k->share, r->alike, lb, r->lb, k->s_a, 0);
  product(n, dv, n, k->s_a, 1, lb, k->dy, lv, k->dg2, lv, NEG, UPPER);
  for (L t = 0; t < n; t++) {
    row_shares(c, k, t);
    for (L j = 0; j < wp; j += VL) {
      const L at = t * lh + j;
      const V g = load(k->row_gam + j), m = load(k->row_car + j), pw = load(bw + at), ps = load(bs + at), value = load(x + at);
      store(k->row_a + j, value * pw), store(k->row_b + j, value * ps);
      const V to = (g * pw + m * ps - load(dz + at)) * load(xsl + at);
      store(dz + at, to), store(bw + at, g * to), store(bs + at, m * to);
    }
    for (L s = 0; s < k->segments; s++) {
      const L low = k->low[s], size = k->high[s] - low;
      k->d_gam[s * b1 + t] = sum(k->row_a + low, size), k->d_car[s * b1 + t] = sum(k->row_b + low, size);
    }
  }

  /* the first layer's read */
  turn(g1, n, w, lh, k->tall, lb);
  product(n, n, w, dz, lh, 1, k->tall, lb, k->s_a, lb, SET, OUT_LOWER);
  lower(n, k->s_a, k->qk, lb, lb, k->d_share, 1);
  lower(n, k->share, k->s_a, lb, lb, k->s_b, 0);
  turn(r->s1, dk, w, ld, k->tall2, lk);
  turn(r->w1, dk, w, ld, k->tall, lk); /* W1' too */
  product(n, dk, n, k->s_b, lb, 1, k->k, lk, k->dq, lk, NEG, LOWER);
  product(n, dk, n, k->s_b, 1, lb, k->q, lk, k->dk, lk, NEG, UPPER);
  for (L s = 0; s < k->segments; s++) {
    const L low = k->low[s], size = k->high[s] - low;
    product(n, dk, size, dz + low, lh, 1, k->tall + low * lk, lk, k->t1, lk, SET, FULL);
    product(n, dk, size, dz + low, lh, 1, k->tall2 + low * lk, lk, k->t2, lk, SET, FULL);
    for (L t = 0; t < n; t++) {
      const L row = t + 1 - c->pre;
      const float g = k->gam[s * b1 + row], m = k->hist[row * lb + k->tau[s]] * k->gate[2][k->tau[s]];
      const float *q = k->q + t * lk, *p1 = k->t1 + t * lk, *p2 = k->t2 + t * lk;
      k->d_gam[s * b1 + t] += dot(q, p1, dk), k->d_car[s * b1 + t] += dot(q, p2, dk);
      float *to = k->dq + t * lk;
      for (L i = 0; i < dk; i += VL) store(to + i, load(to + i) + g * load(p1 + i) + m * load(p2 + i));
    }
  }

  /* the writes: first through the end state, of which xsl, no longer needed, becomes the gradient of G1 */
  float *dg1 = xsl;
  product(n, w, n, k->near, 1, lb, dz, lh, dg1, lh, NEG, UPPER);
  if (ends) {
    scale_rows(n, dk, k->end_c, k->end_d, k->k, k->ek, k->dk_end, lk);
    scale_rows(n, dv, k->end_c, k->end_d, r->g2, k->eg, k->dg_end, lv);
    turn(d->w2, w, dv, d->lv, k->turned2, lh);
    product(n, w, dv, k->eg, lv, 1, k->turned2, lh, da, lh, SUB, FULL);
    turn(d->s2, w, dv, d->lv, k->turned2, lh);
    product(n, w, dv, k->dg_end, lv, 1, k->turned2, lh, da, lh, SUB, FULL);
    product(n, w, dk, k->ek, lk, 1, d->w1, d->ld, dg1, lh, SUB, FULL);
    product(n, w, dk, k->dk_end, lk, 1, d->s1, d->ld, dg1, lh, SUB, FULL);
    product(n, dv, w, a, lh, 1, d->w2, d->lv, k->t1, lv, SET, FULL);
    product(n, dv, w, a, lh, 1, d->s2, d->lv, k->t2, lv, SET, FULL);
    end_rows(k, n, dv, r->g2, k->dg2, lv, 0);
    turn(d->w1, dk, w, d->ld, k->tall2, lk);
    product(n, dk, w, g1, lh, 1, k->tall2, lk, k->t1, lk, SET, FULL);
    turn(d->s1, dk, w, d->ld, k->tall2, lk);
    product(n, dk, w, g1, lh, 1, k->tall2, lk, k->t2, lk, SET, FULL);
    end_rows(k, n, dk, k->k, k->dk, lk, 1);
    state_backward(c, k, w, r, d);
  }
  float *dh = g1; /* second order: H's gradient takes the place of G1, Z's that of dG1 */
  for (L t = 0; t < n; t++)
    for (L j = 0; j < wp; j += VL) {
      const V to = load(dg1 + t * lh + j);
      store(dh + t * lh + j, to * load(sl + t * lh + j)), store(dg1 + t * lh + j, to * load(bd + t * lh + j));
    }
  product(n, dv, w, dh, lh, 1, r->w2, r->lw, k->dg2, lv, ADD, FULL);
  product(n, w, dv, k->dg2, lv, 1, k->turned, lh, da, lh, ADD, FULL);
  for (L t = 0; t < n; t++)
    for (L j = 0; j < wp; j += VL)
      store(dg1 + t * lh + j, load(dg1 + t * lh + j) + load(da + t * lh + j) * load(sl + t * lh + j));
  product(n, dk, w, dg1, lh, 1, k->tall, lk, k->dk, lk, ADD, FULL);
}

/* The rest: d at the start, as reads and writes see it, from what chunk_backward left in k. */
static void start_backward(const Args *c, const Work *k, L n, L w, const Tape *r, const State *d) {
  const L lh = k->lh, lk = k->lk, lv = k->lv, dk = c->dk, dv = c->dv;
  const float *a = k->wide[0], *dh = k->wide[3], *dz = k->wide[5], *xw = k->wide[6], *xs = k->wide[7];
  const float *dzq_w = k->wide[8], *dzq_s = k->wide[9];
  product(w, dv, n, xw, 1, lh, k->dy, lv, d->w2, d->lv, ADD, FULL);
  product(w, dv, n, dh, 1, lh, r->g2, lv, d->w2, d->lv, ADD, FULL);
  product(w, dv, n, a, 1, lh, k->dg2, lv, d->w2, d->lv, ADD, FULL);
  product(w, dv, n, xs, 1, lh, k->dy, lv, d->s2, d->lv, ADD, FULL);
  product(dk, w, n, k->q, 1, lk, dzq_w, lh, d->w1, d->ld, ADD, FULL);
  product(dk, w, n, k->k, 1, lk, dz, lh, d->w1, d->ld, ADD, FULL);
  product(dk, w, n, k->q, 1, lk, dzq_s, lh, d->s1, d->ld, ADD, FULL);
}

static void walk_backward(const Args *c, Work *k, const Row *row, L item, L from, L to, float *tape, const State *d) {
  const L r = item / c->heads, head = item % c->heads;
  for (L i = to - 1; i >= from; i--) {
    const Chunk *now = row->chunk + i;
    const L before = i ? now[-1].width : 0, n = now->tokens, w = now->width;
    if (n) {
      Tape t = tape_at(c, tape + now->tape - row->chunk[from].tape, n, w);
      k->lh = step_of(w);
      chunk_start(c, k, r, head, i, before);
      gather_rows(c, r, head, k->at, n, c->dy, NULL, c->dv, k->dy, k->lv);
      chunk_backward(c, k, n, w, &t, d, now->ends);
      start_backward(c, k, n, w, &t, d);
      gates_backward(c, k, n, now->ends);
      scatter_rows(c, r, head, k->at, n, c->dq, NULL, c->dk, k->dq, k->lk);
      scatter_rows(c, r, head, k->at, n, c->dk_, c->d_open_k, c->dk, k->dk, k->lk);
      for (L s = 0; s < n * k->lv; s++) k->dg2[s] = -k->dg2[s];
      scatter_rows(c, r, head, k->at, n, c->dv_, c->d_open_v, c->dv, k->dg2, k->lv);
      for (int g = 0; g < 3; g++) scatter_rows(c, r, head, k->at, n, c->d_gate[g], c->d_open_gate[g], 1, k->d_gate[g], 1);
    }
    close_units(c, c->d_state, item, d, before, w); /* units that opened here: what came before them is the start */
  }
}

static void item_backward(const Args *c, const Plan *p, Work *k, L item) {
  const Row *row = p->row + item / c->heads;
  const Place place = p->place[item];
  const L last = row->chunks - 1;
  float *scratch = k->tape;
  State d = {.ld = step_of(c->hidden), .lv = k->lv};
  d.w1 = take(&scratch, c->dk * d.ld), d.s1 = take(&scratch, c->dk * d.ld);
  d.w2 = take(&scratch, c->hidden * k->lv), d.s2 = take(&scratch, c->hidden * k->lv);
  for (int i = 0; i < 4; i++) {
    const L size = matrix_numbers(c, i), open = row->chunk[last].width;
    const float *end = c->d_end[i] ? c->d_end[i] + item * size : NULL;
    float *to = c->d_state[i] && open < c->hidden ? c->d_state[i] + item * size : NULL; /* through locked units it goes as it is */
    if (to && end) memcpy(to, end, 4 * size);
    else if (to) memset(to, 0, 4 * size);
    move_matrix(c, i, end, NULL, &d, 0, open, 0);
  }
  if (place.whole) {
    walk_backward(c, k, row, item, 0, row->chunks, c->saved + place.at, &d);
    return;
  }
  float *at = c->saved + place.at + row->states;
  for (L from = last / GROUP * GROUP; from >= 0; from -= GROUP) {
    const L to = from + GROUP < row->chunks ? from + GROUP : row->chunks, w = row->chunk[from].width;
    if (from) {
      at -= round16(state_numbers(c, w));
      State kept = saved_state(c, at, w);
      copy_state(c, &kept, &k->state, w);
    }
    walk_forward(c, k, row, item, from, to, scratch, 1, 0);
    walk_backward(c, k, row, item, from, to, scratch, &d);
  }
}

/* ---- threads and entry points ------------------------------------------------------------------------------------------------ */

typedef struct { const Args *c; const Plan *plan; float *memory; L size, next, worker; int backward; } Job;

static void work(void *given) {
  Job *job = given;
  const Args *c = job->c;
  Work k;
  const L me = __atomic_fetch_add(&job->worker, 1, __ATOMIC_RELAXED);
  layout(c, &k, job->memory + me * job->size, 0);
#if defined(__SSE__)
  const unsigned before = _mm_getcsr(); /* shares of old tokens sink below 1e-38, where arithmetic is a hundred times slower */
  _mm_setcsr(before | 0x8040);
#endif
  for (;;) {
    const L item = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
    if (item >= c->rows * c->heads) break;
    (job->backward ? item_backward : item_forward)(c, job->plan, &k, item);
  }
#if defined(__SSE__)
  _mm_sfence(); /* stores past the cache are done before another thread is told that this one is */
  _mm_setcsr(before);
#endif
}

static void *thread(void *job) { return work(job), NULL; }

/* Work in PyTorch's own pool: its threads wait for work by spinning, some 10 ms a time, and would do so beside ours. */
static void work_together(const Args *c, Job *job, L threads) {
  pthread_t others[256];
  L started = 0;
  if (c->parallel && threads > 1) {
    c->parallel(work, job, threads, 0);
    return;
  }
  while (started < threads - 1 && !pthread_create(others + started, NULL, thread, job)) started++;
  work(job);
  for (L i = 0; i < started; i++) pthread_join(others[i], NULL);
}

/* Ask for large pages: to touch new memory first, page by page, is else a tenth of the time; and a chunk's work lies in more small
 * pages than a processor knows the places of. */
static void large_pages(float *from, L size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = 1 << 21, low = ((uintptr_t)from + page - 1) & ~(page - 1), high = (uintptr_t)(from + size) & ~(page - 1);
  if (from && high > low) madvise((void *)low, high - low, MADV_HUGEPAGE);
#else
  (void)from, (void)size;
#endif
}

/* Working memory of the last call, for the next: to touch new memory first takes about as long as a chunk. */
static struct { float *memory; L size; } kept;
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;

static float *borrow(L *size) {
  void *memory = NULL;
  pthread_mutex_lock(&kept_lock);
  if (kept.size >= *size) memory = kept.memory, *size = kept.size, kept.memory = NULL, kept.size = 0;
  pthread_mutex_unlock(&kept_lock);
  if (memory) return memory;
  if (posix_memalign(&memory, 4 * *size < 1 << 21 ? 4096 : 1 << 21, 4 * *size)) return NULL;
  large_pages(memory, *size);
  return memory;
}

static void give_back(float *memory, L size) {
  pthread_mutex_lock(&kept_lock);
  if (size > kept.size && size <= 1 << 23) {
    float *smaller = kept.memory;
    kept.memory = memory, kept.size = size, memory = smaller;
  }
  pthread_mutex_unlock(&kept_lock);
  free(memory);
}

/* Gradients of a memory that all rows start from: always in the order of the rows. */
static void add_rows(const Args *c) {
  for (int i = 0; i < 4; i++) {
    const L size = matrix_numbers(c, i) * c->heads;
    float *sum = c->d_shared[i];
    if (!sum) continue;
    memcpy(sum, c->d_state[i], 4 * size);
    for (L r = 1; r < c->rows; r++)
      for (L j = 0; j < size; j++) sum[j] += c->d_state[i][r * size + j];
  }
}

static int run(const Args *c, int backward) {
  Plan plan;
  Work k;
  if (!make_plan(c, &plan)) return 1;
  if (c->save && plan.used > c->room) return free_plan(&plan), 2;
  const L gradient = 2 * (c->dk * step_of(c->hidden) + c->hidden * step_of(c->dv)); /* of the state */
  const L tape = plan.scratch_tape + (backward ? gradient : 0);
  Job job = {.c = c, .plan = &plan, .backward = backward, .size = layout(c, &k, NULL, tape)};
  L threads = c->threads < c->rows * c->heads ? c->threads : c->rows * c->heads;
  threads = threads < 1 ? 1 : threads > 256 ? 256 : threads;
  L size = job.size * threads;
  if (!(job.memory = borrow(&size))) return free_plan(&plan), 1;
  const L keys = c->all * c->heads * c->dk, values = c->all * c->heads * c->dv;
  if (backward) large_pages(c->dq, keys), large_pages(c->dk_, keys), large_pages(c->dv_, values);
  else large_pages(c->y, values), large_pages(c->saved, c->save ? plan.used : 0);
  work_together(c, &job, threads);
  if (backward) add_rows(c);
  give_back(job.memory, size), free_plan(&plan);
  return 0;
}

/* Numbers that `saved` must hold; negative: no memory. */
L titans_room(const Args *c) {
  Plan plan;
  if (!make_plan(c, &plan)) return -1;
  const L used = plan.used;
  free_plan(&plan);
  return used;
}

/* 0, or 1: no memory, or 2: `saved` has too little room. */
int titans_forward(const Args *c) { return run(c, 0); }
int titans_backward(const Args *c) { return run(c, 1); }
L titans_arguments(void) { return sizeof(Args); }
