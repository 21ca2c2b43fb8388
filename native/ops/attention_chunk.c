/* Attention of one query head over one chunk of at most 64 positions, and the merge of two chunks.
 *
 * The arithmetic, which every tier reproduces bit for bit:
 *   s_j    = scale * (q . k_j); the dot product has 16 lanes over d (FMA, absent dimensions +0) and the fixed tree.
 *   max    = the largest s_j.
 *   e_j    = exp(s_j - max), v16_exp.
 *   sum    = 16 lanes, e_j goes to lane j mod 16 in ascending j, then the fixed tree. j counts from the first row that
 *            is passed in, so a window that starts inside a chunk is defined by (position, window) alone.
 *   out[d] = fma(e_j, v_j[d], out[d]) over ascending j, from +0.
 * Keys have D numbers and values V, both multiples of 8; a latent cache holds one row of D numbers per position, whose
 * first V are the value.
 * A NaN score makes its own e_j NaN whatever max is, hence sum and out. A weight of 0 still multiplies its value, so a
 * NaN in a visible value is never hidden either.
 *
 * Source: the split into chunks and the merge are those of FlashAttention (Dao et al. 2022) and its decode variant.
 * Error: relative to float64 attention of the same keys and values, sum|a-b| / sum|b| <= 2e-6. */
#include "vec16.h"

/* Keys and groups of 16 dimensions handled together: enough independent FMA chains to hide their latency, few enough
 * to stay in registers (a v16 is two of AVX2's sixteen). */
#if MOE_TIER_ID == MOE_AVX512
enum { KEYS = 8, GROUPS = 8 };
#else
enum { KEYS = 4, GROUPS = 4 };
#endif

/* Eight elements in lanes 0..7, +0 in the others: head_dim is a multiple of 8, not always of 16. */
#if MOE_TIER_ID == MOE_AVX512
MOE_INLINE v16 widen8(__m256 x) { return _mm512_insertf32x8(_mm512_setzero_ps(), x, 0); }
#elif MOE_TIER_ID == MOE_AVX2
MOE_INLINE v16 widen8(__m256 x) { v16 r; r.lo = x; r.hi = _mm256_setzero_ps(); return r; }
#endif
#if MOE_TIER_ID == MOE_AVX512 || MOE_TIER_ID == MOE_AVX2
MOE_INLINE v16 load8(const float *p) { return widen8(_mm256_loadu_ps(p)); }
MOE_INLINE v16 load8_f16(const uint16_t *p) { return widen8(_mm256_cvtph_ps(_mm_loadu_si128((const void *)p))); }
#else
MOE_INLINE v16 load8(const float *p) { return v16_load_n(p, 8); }
MOE_INLINE v16 load8_f16(const uint16_t *p) {
    uint16_t t[16] = {0};
    for (int i = 0; i < 8; i++) t[i] = p[i];
    return v16_load_f16(t);
}
#endif
/* Elements i .. i+15 (or i .. i+7) of a key or value array. */
MOE_INLINE v16 load_kv(const void *p, size_t i, int is_f32, int eight) {
    const float *f = (const float *)p + i;
    const uint16_t *h = (const uint16_t *)p + i;
    if (eight) return is_f32 ? load8(f) : load8_f16(h);
    return is_f32 ? v16_load(f) : v16_load_f16(h);
}

/* v16_reduce_add of four registers at once; the same tree, transposed so that one add serves several keys. */
#if MOE_TIER_ID == MOE_AVX512 || MOE_TIER_ID == MOE_AVX2
#if MOE_TIER_ID == MOE_AVX512
MOE_INLINE __m256 fold8(v16 a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
#else
MOE_INLINE __m256 fold8(v16 a) { return _mm256_add_ps(a.lo, a.hi); }
#endif
MOE_INLINE void reduce4(float *s, const v16 *acc) {
    __m256 a = fold8(acc[0]), b = fold8(acc[1]), c = fold8(acc[2]), d = fold8(acc[3]);
    __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    __m256 lo = _mm256_shuffle_ps(ab, cd, 0x44), hi = _mm256_shuffle_ps(ab, cd, 0xee);
    __m256 x = _mm256_add_ps(lo, hi); /* a0+a2 a1+a3 c0+c2 c1+c3 | the same of b, d */
    x = _mm256_add_ps(_mm256_shuffle_ps(x, x, 0x88), _mm256_shuffle_ps(x, x, 0xdd));
    _mm_storeu_ps(s, _mm_unpacklo_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
#else
MOE_INLINE void reduce4(float *s, const v16 *acc) {
    for (int i = 0; i < 4; i++) s[i] = v16_reduce_add(acc[i]);
}
#endif

/* Largest lane. Of two zeros, or with a NaN, the second operand of each step wins, as v16_max does on every tier. */
MOE_INLINE float reduce_max(v16 a) {
#if MOE_TIER_ID == MOE_AVX512 || MOE_TIER_ID == MOE_AVX2
#if MOE_TIER_ID == MOE_AVX512
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
#else
    __m256 h = _mm256_max_ps(a.lo, a.hi);
#endif
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
#else
    float t[16];
    v16_store(t, a);
    for (int h = 8; h; h /= 2) for (int i = 0; i < h; i++) t[i] = t[i] > t[i + h] ? t[i] : t[i + h];
    return t[0];
#endif
}

/* Dot products of q with `num` consecutive keys, num = 1 or a multiple of 4. */
MOE_INLINE void dot_keys(float *s, const float *q, const void *k, size_t first, int num, int head_dim, int is_f32) {
    v16 acc[KEYS];
    int d = 0;
#pragma GCC unroll 8
    for (int i = 0; i < num; i++) acc[i] = v16_zero();
    for (; d + 16 <= head_dim; d += 16) {
        const v16 x = v16_load(q + d);
#pragma GCC unroll 8
        for (int i = 0; i < num; i++)
            acc[i] = v16_fma(x, load_kv(k, first + (size_t)i * (size_t)head_dim + (size_t)d, is_f32, 0), acc[i]);
    }
    if (d < head_dim) {
        const v16 x = load8(q + d);
#pragma GCC unroll 8
        for (int i = 0; i < num; i++)
            acc[i] = v16_fma(x, load_kv(k, first + (size_t)i * (size_t)head_dim + (size_t)d, is_f32, 1), acc[i]);
    }
    if (num == 1) s[0] = v16_reduce_add(acc[0]);
    for (int i = 0; i + 4 <= num; i += 4) reduce4(s + i, acc + i);
}

/* out[d .. d + 16 * groups) = sum_j e_j v_j; with `eight`, only the first eight of a single group. */
MOE_INLINE void add_values(float *out, const float *e, const void *v, int n, int d, int groups, int stride, int is_f32,
                           int eight) {
    v16 acc[GROUPS];
#pragma GCC unroll 8
    for (int g = 0; g < groups; g++) acc[g] = v16_zero();
    for (int j = 0; j < n; j++) {
        const v16 w = v16_set1(e[j]);
        const size_t row = (size_t)j * (size_t)stride + (size_t)d;
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) acc[g] = v16_fma(w, load_kv(v, row + (size_t)g * 16, is_f32, eight), acc[g]);
    }
    if (eight) { v16_store_n(out + d, acc[0], 8); return; }
#pragma GCC unroll 8
    for (int g = 0; g < groups; g++) v16_store(out + d + g * 16, acc[g]);
}

MOE_INLINE void chunk_of(float *out, float *max_out, float *sum_out, const float *q, const struct moe_kv_rows *rows,
                         int n, int is_f32, float scale) {
    const void *k = rows->k, *v = rows->v;
    const int head_dim = rows->head_dim, value_dim = rows->value_dim, stride = rows->value_stride;
    float s[MOE_ATTENTION_CHUNK] = {0};
    const int padded = (n + 15) & ~15;
    int j = 0, d = 0;
    for (; j + KEYS <= n; j += KEYS) dot_keys(s + j, q, k, (size_t)j * (size_t)head_dim, KEYS, head_dim, is_f32);
    for (; j < n; j++) dot_keys(s + j, q, k, (size_t)j * (size_t)head_dim, 1, head_dim, is_f32);

    const v16 factor = v16_set1(scale);
    for (j = 0; j < padded; j += 16) v16_store(s + j, v16_mul(factor, v16_load(s + j)));
    for (j = n; j < padded; j++) s[j] = -__builtin_inff(); /* neutral for the maximum, weight exactly 0 */
    v16 m = v16_load(s);
    for (j = 16; j < padded; j += 16) m = v16_max(m, v16_load(s + j));
    const float max = reduce_max(m);
    const v16 offset = v16_set1(max);
    v16 sum = v16_zero();
    *max_out = max;
    for (j = 0; j < padded; j += 16) {
        v16 e = v16_exp(v16_sub(v16_load(s + j), offset));
        sum = v16_add(sum, e);
        v16_store(s + j, e);
    }
    *sum_out = v16_reduce_add(sum);

    for (; d + 16 * GROUPS <= value_dim; d += 16 * GROUPS) add_values(out, s, v, n, d, GROUPS, stride, is_f32, 0);
    if (GROUPS > 4 && d + 64 <= value_dim) { add_values(out, s, v, n, d, 4, stride, is_f32, 0); d += 64; }
    if (d + 32 <= value_dim) { add_values(out, s, v, n, d, 2, stride, is_f32, 0); d += 32; }
    if (d + 16 <= value_dim) { add_values(out, s, v, n, d, 1, stride, is_f32, 0); d += 16; }
    if (d < value_dim) add_values(out, s, v, n, d, 1, stride, is_f32, 1);
}

static void chunk(float *out, float *max_out, float *sum_out, const float *q, const struct moe_kv_rows *rows, int n,
                  float scale) {
    if (rows->is_f32) chunk_of(out, max_out, sum_out, q, rows, n, 1, scale);
    else chunk_of(out, max_out, sum_out, q, rows, n, 0, scale);
}

static float exp_one(float x) {
    float t[16];
    v16_store(t, v16_exp(v16_set1(x)));
    return t[0];
}

/* max' = max(max, chunk_max), a = exp(max - max'), b = exp(chunk_max - max'):
 * sum' = fma(chunk_sum, b, sum * a), out' = fma(chunk_out, b, out * a). A NaN maximum stays. */
static void merge(float *out, float *max_io, float *sum_io, const float *chunk_out, float chunk_max, float chunk_sum,
                  int value_dim) {
    const float old = *max_io;
    const float max = old != old ? old : chunk_max <= old ? old : chunk_max;
    const v16 a = v16_set1(exp_one(old - max)), b = v16_set1(exp_one(chunk_max - max));
    float sum[16];
    v16_store(sum, v16_fma(v16_set1(chunk_sum), b, v16_mul(v16_set1(*sum_io), a)));
    *sum_io = sum[0];
    *max_io = max;
    int d = 0;
    for (; d + 16 <= value_dim; d += 16)
        v16_store(out + d, v16_fma(v16_load(chunk_out + d), b, v16_mul(v16_load(out + d), a)));
    if (d < value_dim) v16_store_n(out + d, v16_fma(load8(chunk_out + d), b, v16_mul(load8(out + d), a)), 8);
}

MOE_EXPORT_OPS(attention, .chunk = chunk, .merge = merge);
