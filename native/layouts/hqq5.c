/* hqq5_ax0: five-bit codes whose scale and zero belong to an input column within a group of 32 output rows (hqq5.h
 * draws the bytes). Strip j of n holds rows j, j + n, j + 2n ...: outputs are scattered with stride n.
 *
 * Because the scale sits on the input side, the activations are scaled, once per row group, and what remains is a dot
 * product of small integers. Per strip and token, over blocks of 32 columns in order:
 *
 *   xs_c  = x_c * scale_c                                 float32, one rounding
 *   d, q  = canonical int8 quantization of the 32 xs      quantize32.h
 *   acc_r = fma(d, (float)sum_c (code_rc - 16) * q_c, acc_r)            exact int32 sum
 *   z_i   = fma(d, fma(q_i+16, zero_i+16 - 16, q_i * (zero_i - 16)), z_i)  sixteen lanes i, running over all blocks
 *   y_r   = acc_r - v16_reduce_add(z)
 *
 * The zero term uses the quantized activations, not xs: rounding errors of q then meet (code - zero), as in every other
 * format, instead of the twice as large code. The 16 taken off both sides is exact in the integer sum and keeps the two
 * terms small, so that little cancels in the last line.
 *
 * Range: |sum of code * q| <= 32 * 31 * 127 = 125984, the start of the sum 16 * 32 * 127 at most. AVX2: a maddubs pair
 * is <= 2 * 31 * 127 = 7874, four of them in one int16 31496. */
#include "hqq5.h"
#include "quantize32.h"
#include "vec16.h"

/* CHUNK blocks of activations are prepared in the lanes of one register. PANEL blocks are prepared before they are
 * multiplied, so that the latency of one chunk hides behind the next. */
enum { CHUNK = 8, PANEL = 16 };
#define HQQ5_UNROLL _Pragma("GCC unroll 8")

#if MOE_TIER_ID == MOE_SCALAR
MOE_INLINE v16 load_q16(const int8_t *q) { v16 r; V16_EACH(r.f[i] = (float)q[i]); return r; }
#elif MOE_TIER_ID == MOE_AVX2
MOE_INLINE __m256 load_q8(const int8_t *q) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)q)));
}
MOE_INLINE v16 load_q16(const int8_t *q) { V16_2(load_q8(q), load_q8(q + 8)); }
#elif MOE_TIER_ID == MOE_AVX512
MOE_INLINE v16 load_q16(const int8_t *q) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)q)));
}
#else
#error "hqq5: no kernel for this tier; write one or state MOE_LAYOUT_SAME_AS with a reason"
#endif

/* Scales and zeros - 16 of n <= CHUNK blocks. */
struct meta {
    _Alignas(64) float scale[CHUNK * 32];
    float zero[CHUNK * 32];
};
MOE_INLINE void widen(struct meta *m, const uint8_t *block, int n) {
    for (int c = 0; c < 32 * n; c += 16) {
        const uint16_t *from = (const void *)(block + (size_t)(c / 32) * HQQ5_BLOCK + 2 * (c % 32));
        v16_store(m->scale + c, v16_load_f16(from));
        v16_store(m->zero + c, v16_sub(v16_load_f16(from + 32), v16_set1(16.0f)));
    }
}

/* One token's activations for PANEL blocks of one row group. */
struct prepared {
    _Alignas(64) int8_t q[PANEL][32];
    float d[PANEL];
    int32_t start[PANEL]; /* -16 * sum of q */
};

/* The definition: n blocks from `at` on, one by one; returns the new z. */
MOE_INLINE v16 prepare_plain(struct prepared *p, int at, v16 z, const struct meta *m, const float *x, int n) {
    for (int b = 0; b < n; b++) {
        int8_t *q = p->q[at + b];
        const float *scale = m->scale + 32 * b, *zero = m->zero + 32 * b;
        float xs[32];
        int16_t sum16[2];
        int32_t sum;
        for (int c = 0; c < 32; c += 16) v16_store(xs + c, v16_mul(v16_load(x + 32 * b + c), v16_load(scale + c)));
        quantize_block(q, &p->d[at + b], sum16, &sum, xs, 32);
        p->start[at + b] = -16 * sum;
        v16 u = v16_mul(load_q16(q), v16_load(zero));
        u = v16_fma(load_q16(q + 16), v16_load(zero + 16), u);
        z = v16_fma(v16_set1(p->d[at + b]), u, z);
    }
    return z;
}

#if MOE_TIER_ID == MOE_SCALAR
MOE_INLINE v16 prepare(struct prepared *p, int at, v16 z, const struct meta *m, const float *x, int n) {
    return prepare_plain(p, at, z, m, x, n);
}
#else
/* The same for a whole chunk: what is one number per block (largest magnitude, division, sum) is done for eight blocks
 * in the lanes of one register. */
enum { FOLD_MAX, FOLD_ADD };
MOE_INLINE __m256i fold2(__m256i a, __m256i b, int how) {
    return how == FOLD_MAX ? _mm256_max_epi32(a, b) : _mm256_add_epi32(a, b);
}
/* Lane i of the result: the eight lanes of v[i] folded. */
MOE_INLINE __m256i fold8(const __m256i *v, int how) {
    __m256i a[4], b[2];
    HQQ5_UNROLL for (int i = 0; i < 4; i++)
        a[i] = fold2(_mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]), how);
    HQQ5_UNROLL for (int i = 0; i < 2; i++)
        b[i] = fold2(_mm256_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm256_unpackhi_epi64(a[2 * i], a[2 * i + 1]), how);
    return fold2(_mm256_permute2x128_si256(b[0], b[1], 0x20), _mm256_permute2x128_si256(b[0], b[1], 0x31), how);
}

/* Bit patterns of the larger magnitudes of 32 values, eight to be folded: infinity and NaN are the largest. */
#if MOE_TIER_ID == MOE_AVX2
MOE_INLINE __m256i magnitudes(v16 a, v16 b) {
    a = v16_abs(a), b = v16_abs(b);
    return fold2(fold2(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi), FOLD_MAX),
                 fold2(_mm256_castps_si256(b.lo), _mm256_castps_si256(b.hi), FOLD_MAX), FOLD_MAX);
}
/* 32 products rounded, half to even: stored as int8 at q, returned as floats in place. */
MOE_INLINE void round32(int8_t *q, v16 *a, v16 *b) {
    __m256i t[4] = {_mm256_cvtps_epi32(a->lo), _mm256_cvtps_epi32(a->hi), _mm256_cvtps_epi32(b->lo),
                    _mm256_cvtps_epi32(b->hi)};
    __m256i p = _mm256_packs_epi16(_mm256_packs_epi32(t[0], t[1]), _mm256_packs_epi32(t[2], t[3]));
    p = _mm256_permutevar8x32_epi32(p, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); /* packing works per 128-bit half */
    _mm256_store_si256((void *)q, p);
    a->lo = _mm256_cvtepi32_ps(t[0]), a->hi = _mm256_cvtepi32_ps(t[1]);
    b->lo = _mm256_cvtepi32_ps(t[2]), b->hi = _mm256_cvtepi32_ps(t[3]);
}
#else
MOE_INLINE __m256i magnitudes(v16 a, v16 b) {
    __m512i m = _mm512_max_epi32(_mm512_castps_si512(v16_abs(a)), _mm512_castps_si512(v16_abs(b)));
    return fold2(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1), FOLD_MAX);
}
MOE_INLINE void round32(int8_t *q, v16 *a, v16 *b) {
    __m512i t0 = _mm512_cvtps_epi32(*a), t1 = _mm512_cvtps_epi32(*b);
    _mm_store_si128((void *)q, _mm512_cvtepi32_epi8(t0));
    _mm_store_si128((void *)(q + 16), _mm512_cvtepi32_epi8(t1));
    *a = _mm512_cvtepi32_ps(t0), *b = _mm512_cvtepi32_ps(t1);
}
#endif

MOE_INLINE v16 prepare(struct prepared *p, int at, v16 z, const struct meta *m, const float *x, int n) {
    _Alignas(64) float xs[CHUNK * 32], inv[CHUNK];
    __m256i fold[CHUNK];
    HQQ5_UNROLL for (int b = 0; b < CHUNK; b++) fold[b] = _mm256_setzero_si256();
    for (int b = 0; b < n; b++) {
        v16 v0 = v16_mul(v16_load(x + 32 * b), v16_load(m->scale + 32 * b));
        v16 v1 = v16_mul(v16_load(x + 32 * b + 16), v16_load(m->scale + 32 * b + 16));
        v16_store(xs + 32 * b, v0);
        v16_store(xs + 32 * b + 16, v1);
        fold[b] = magnitudes(v0, v1);
    }
    const __m256 most = _mm256_set1_ps(FLT_MAX);
    __m256i bits = fold8(fold, FOLD_MAX);
    int not_finite = _mm256_movemask_epi8(_mm256_cmpgt_epi32(bits, _mm256_castps_si256(most)));
    if (not_finite) return prepare_plain(p, at, z, m, x, n);
    __m256 amax = _mm256_castsi256_ps(bits), i = _mm256_div_ps(_mm256_set1_ps(127.0f), amax);
    __m256 usable = _mm256_cmp_ps(i, most, _CMP_LE_OQ); /* else zero, or so small that 127 / amax overflows */
    _mm256_store_ps(inv, _mm256_and_ps(i, usable));
    _mm256_storeu_ps(p->d + at, _mm256_and_ps(_mm256_div_ps(amax, _mm256_set1_ps(127.0f)), usable));
    for (int b = 0; b < n; b++) {
        v16 f = v16_set1(inv[b]), v0 = v16_mul(v16_load(xs + 32 * b), f), v1 = v16_mul(v16_load(xs + 32 * b + 16), f);
        round32(p->q[at + b], &v0, &v1);
        v16 u = v16_fma(v1, v16_load(m->zero + 32 * b + 16), v16_mul(v0, v16_load(m->zero + 32 * b)));
        z = v16_fma(v16_set1(p->d[at + b]), u, z);
        __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_load_si256((const void *)p->q[at + b]));
        fold[b] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(-16));
    }
    _mm256_storeu_si256((void *)(p->start + at), fold8(fold, FOLD_ADD));
    return z;
}
#endif

/* acc[LANES * t + ...] += block b of the chunk, for all 32 rows. */
#if MOE_TIER_ID == MOE_SCALAR
enum { LANES = 32 };
typedef float lanes;
MOE_INLINE lanes lanes_zero(void) { return 0; }
MOE_INLINE void lanes_store(float *y, lanes v) { *y = v; }

MOE_INLINE void dot(lanes *acc, const uint8_t *block, const struct prepared *p, int b, int T) {
    for (int r = 0; r < HQQ5_ROWS; r++) {
        uint8_t code[32];
        hqq5_codes(code, block, r);
        for (int t = 0; t < T; t++) {
            int32_t sum = p[t].start[b];
            for (int c = 0; c < 32; c++) sum += code[c] * p[t].q[b][c];
            acc[LANES * t + r] = moe_fmaf(p[t].d[b], (float)sum, acc[LANES * t + r]);
        }
    }
}
#elif MOE_TIER_ID == MOE_AVX2
enum { LANES = 4, PREFETCH_BYTES = PANEL * HQQ5_BLOCK };
typedef __m256 lanes;
/* Fixes where a sum is updated. Without it gcc reassociates the adds, holds many products and spills them. */
#define PIN(v) __asm__ volatile("" : "+x"(v))
/* Broadcasts of q are cheap loads; kept for the next eight rows they take the registers that the sets need. */
#define FORGET_LOADS() __asm__ volatile("" ::: "memory")
MOE_INLINE lanes lanes_zero(void) { return _mm256_setzero_ps(); }
MOE_INLINE void lanes_store(float *y, lanes v) { _mm256_storeu_ps(y, v); }
MOE_INLINE __m256i four(const int8_t *p) { /* four bytes to every lane */
    int32_t v;
    __builtin_memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}
#define BITS(v, shift, mask) _mm256_and_si256(_mm256_srli_epi16(v, shift), _mm256_set1_epi8(mask))

/* Eight rows: their 32 columns as eight sets of four. */
MOE_INLINE void unpack(__m256i *set, const uint8_t *code) {
    __m256i plane[5];
    HQQ5_UNROLL for (int i = 0; i < 5; i++) plane[i] = _mm256_loadu_si256((const void *)(code + i * HQQ5_PLANE));
    set[5] = _mm256_or_si256(BITS(plane[0], 5, 7), BITS(plane[3], 2, 24));
    set[6] = _mm256_or_si256(BITS(plane[1], 5, 7), BITS(plane[4], 2, 24));
    set[7] = _mm256_or_si256(_mm256_or_si256(BITS(plane[2], 5, 7), BITS(plane[3], 4, 8)), BITS(plane[4], 3, 16));
    HQQ5_UNROLL for (int i = 0; i < 5; i++) set[i] = _mm256_and_si256(plane[i], _mm256_set1_epi8(31));
}

MOE_INLINE void dot(lanes *acc, const uint8_t *block, const struct prepared *p, int b, int T) {
    const __m256i ones = _mm256_set1_epi16(1);
    HQQ5_UNROLL for (int i = 0; i < LANES; i++) {
        __m256i set[8];
        const char *ahead = (const char *)block + PREFETCH_BYTES + 192 * i;
        HQQ5_UNROLL for (int line = 0; line < 3; line++) _mm_prefetch(ahead + 64 * line, _MM_HINT_T0);
        unpack(set, block + HQQ5_META + 32 * i);
        FORGET_LOADS();
        HQQ5_UNROLL for (int t = 0; t < T; t++) {
            const int8_t *q = p[t].q[b];
            __m256i sum[2], is = _mm256_set1_epi32(p[t].start[b]);
            HQQ5_UNROLL for (int h = 0; h < 2; h++) {
                sum[h] = _mm256_maddubs_epi16(set[4 * h], four(q + 16 * h));
                HQQ5_UNROLL for (int g = 1; g < 4; g++) {
                    sum[h] = _mm256_add_epi16(sum[h], _mm256_maddubs_epi16(set[4 * h + g], four(q + 16 * h + 4 * g)));
                    PIN(sum[h]);
                }
                is = _mm256_add_epi32(is, _mm256_madd_epi16(sum[h], ones));
            }
            acc[LANES * t + i] = _mm256_fmadd_ps(_mm256_set1_ps(p[t].d[b]), _mm256_cvtepi32_ps(is), acc[LANES * t + i]);
        }
    }
}
#else
enum { LANES = 2, PREFETCH_BYTES = PANEL * HQQ5_BLOCK };
typedef __m512 lanes;
MOE_INLINE lanes lanes_zero(void) { return _mm512_setzero_ps(); }
MOE_INLINE void lanes_store(float *y, lanes v) { _mm512_storeu_ps(y, v); }
MOE_INLINE __m512i four(const int8_t *p) {
    int32_t v;
    __builtin_memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}
#define BITS(v, shift, mask) _mm512_and_si512(_mm512_srli_epi16(v, shift), _mm512_set1_epi8(mask))

/* Sixteen rows: their 32 columns as eight sets of four. */
MOE_INLINE void unpack(__m512i *set, const uint8_t *code) {
    __m512i plane[5];
    HQQ5_UNROLL for (int i = 0; i < 5; i++) plane[i] = _mm512_loadu_si512((const void *)(code + i * HQQ5_PLANE));
    set[5] = _mm512_or_si512(BITS(plane[0], 5, 7), BITS(plane[3], 2, 24));
    set[6] = _mm512_or_si512(BITS(plane[1], 5, 7), BITS(plane[4], 2, 24));
    set[7] = _mm512_or_si512(_mm512_or_si512(BITS(plane[2], 5, 7), BITS(plane[3], 4, 8)), BITS(plane[4], 3, 16));
    HQQ5_UNROLL for (int i = 0; i < 5; i++) set[i] = _mm512_and_si512(plane[i], _mm512_set1_epi8(31));
}

MOE_INLINE void dot(lanes *acc, const uint8_t *block, const struct prepared *p, int b, int T) {
    HQQ5_UNROLL for (int i = 0; i < LANES; i++) {
        __m512i set[8];
        const char *ahead = (const char *)block + PREFETCH_BYTES + 384 * i;
        HQQ5_UNROLL for (int line = 0; line < 6; line++) _mm_prefetch(ahead + 64 * line, _MM_HINT_T0);
        unpack(set, block + HQQ5_META + 64 * i);
        HQQ5_UNROLL for (int t = 0; t < T; t++) {
            __m512i is = _mm512_set1_epi32(p[t].start[b]);
            HQQ5_UNROLL for (int g = 0; g < 8; g++) is = _mm512_dpbusd_epi32(is, set[g], four(p[t].q[b] + 4 * g));
            acc[LANES * t + i] = _mm512_fmadd_ps(_mm512_set1_ps(p[t].d[b]), _mm512_cvtepi32_ps(is), acc[LANES * t + i]);
        }
    }
}
#endif

MOE_INLINE void strip_rows32(float *const *y, const uint8_t *strip, int stride, int cols, const void *const *x, int T) {
    struct prepared p[MOE_MAX_TOKENS];
    struct meta m;
    lanes acc[MOE_MAX_TOKENS * LANES];
    v16 z[MOE_MAX_TOKENS];
    HQQ5_UNROLL for (int i = 0; i < T * LANES; i++) acc[i] = lanes_zero();
    HQQ5_UNROLL for (int t = 0; t < T; t++) z[t] = v16_zero();
    for (int c = 0; c < cols; c += 32 * PANEL) {
        int n = (cols - c) / 32 < PANEL ? (cols - c) / 32 : PANEL;
        for (int at = 0; at < n; at += CHUNK) {
            int some = n - at < CHUNK ? n - at : CHUNK;
            widen(&m, strip + (size_t)at * HQQ5_BLOCK, some);
            for (int t = 0; t < T; t++) z[t] = prepare(&p[t], at, z[t], &m, (const float *)x[t] + c + 32 * at, some);
        }
        for (int b = 0; b < n; b++, strip += HQQ5_BLOCK) dot(acc, strip, p, b, T);
    }
    for (int t = 0; t < T; t++) {
        float rows[HQQ5_ROWS], zero = v16_reduce_add(z[t]);
        for (int i = 0; i < LANES; i++) lanes_store(rows + i * (HQQ5_ROWS / LANES), acc[LANES * t + i]);
        for (int r = 0; r < HQQ5_ROWS; r++) y[t][(ptrdiff_t)r * stride] = rows[r] - zero;
    }
}

MOE_INLINE void range(float *const *y, const void *w, int rows, int cols, int first, int last, const void *const *x,
                      int T) {
    int stride = rows / HQQ5_ROWS;
    for (int strip = first; strip < last && strip < stride; strip++) {
        float *out[MOE_MAX_TOKENS];
        for (int t = 0; t < T; t++) out[t] = y[t] + strip;
        strip_rows32(out, (const uint8_t *)w + (size_t)strip * hqq5_strip_bytes(cols), stride, cols, x, T);
    }
}

static void matmul(float *const *y, const void *w, int rows, int cols, int first, int last, const void *const *x,
                   int num_tokens) {
    switch (num_tokens) {
    case 1: range(y, w, rows, cols, first, last, x, 1); break;
    case 2: range(y, w, rows, cols, first, last, x, 2); break;
    case 3: range(y, w, rows, cols, first, last, x, 3); break;
    case 4: range(y, w, rows, cols, first, last, x, 4); break;
    case 5: range(y, w, rows, cols, first, last, x, 5); break;
    case 6: range(y, w, rows, cols, first, last, x, 6); break;
    case 7: range(y, w, rows, cols, first, last, x, 7); break;
    case 8: range(y, w, rows, cols, first, last, x, 8); break;
    }
}

static size_t strip_bytes(int cols) { return hqq5_strip_bytes(cols); }

/* hqq5_unpack of eight rows side by side, which the compiler turns into vectors. */
MOE_INLINE void unpack_rows8(uint32_t set[8][8], const uint32_t plane[5][8]) {
    for (int i = 0; i < 5; i++)
        for (int r = 0; r < 8; r++) set[i][r] = plane[i][r] & 0x1f1f1f1f;
    for (int r = 0; r < 8; r++) {
        set[5][r] = (plane[0][r] >> 5 & 0x07070707) | (plane[3][r] >> 2 & 0x18181818);
        set[6][r] = (plane[1][r] >> 5 & 0x07070707) | (plane[4][r] >> 2 & 0x18181818);
        set[7][r] = (plane[2][r] >> 5 & 0x07070707) | (plane[3][r] >> 4 & 0x08080808) | (plane[4][r] >> 3 & 0x10101010);
    }
}

/* The values of dequantize_row; a block of 32 columns in two halves. */
static void dequantize_strip(float *out, const void *strip, int cols) {
    const uint8_t *block = strip;
    for (int b = 0; b < cols / 32; b++, block += HQQ5_BLOCK) {
        v16 scale[2], zero[2];
        for (int h = 0; h < 2; h++) {
            scale[h] = v16_load_f16((const uint16_t *)(const void *)block + 16 * h);
            zero[h] = v16_load_f16((const uint16_t *)(const void *)block + 32 + 16 * h);
        }
        for (int row = 0; row < HQQ5_ROWS; row += 8) {
            uint32_t plane[5][8], set[8][8], code[8][8];
            for (int i = 0; i < 5; i++) __builtin_memcpy(plane[i], block + HQQ5_META + i * HQQ5_PLANE + 4 * row, 32);
            unpack_rows8(set, plane);
            for (int r = 0; r < 8; r++) /* all rows first: a load right behind its small stores would wait for them */
                for (int g = 0; g < 8; g++) code[r][g] = set[g][r];
            for (int r = 0; r < 8; r++)
                for (int h = 0; h < 2; h++)
                    v16_store(out + (size_t)(row + r) * (size_t)cols + 32 * b + 16 * h,
                              v16_mul(v16_sub(load_q16((const int8_t *)code[r] + 16 * h), zero[h]), scale[h]));
        }
    }
}

#if MOE_TIER_ID == MOE_SCALAR
/* (code - zero) first, then times the scale. */
static void dequantize_row(float *y, const void *weights, int cols, int row) {
    const uint8_t *block = (const uint8_t *)weights + (size_t)(row / HQQ5_ROWS) * hqq5_strip_bytes(cols);
    for (int b = 0; b < cols / 32; b++, block += HQQ5_BLOCK) {
        const uint16_t *meta = (const void *)block;
        uint8_t code[32];
        hqq5_codes(code, block, row % HQQ5_ROWS);
        for (int c = 0; c < 32; c++)
            y[32 * b + c] = ((float)code[c] - moe_f16_f32(meta[32 + c])) * moe_f16_f32(meta[c]);
    }
}
#define HQQ5_DEQUANTIZE dequantize_row
#else
#define HQQ5_DEQUANTIZE 0
#endif

MOE_EXPORT_LAYOUT(hqq5_ax0, .activation = MOE_ACT_F32, .block_len = 32, .strip_rows = HQQ5_ROWS, .scattered = 1,
                  .strip_bytes = strip_bytes, .matmul = matmul, .dequantize_row = HQQ5_DEQUANTIZE,
                  .dequantize_strip = dequantize_strip);
