/* Eight-row strips on AVX2: one body for every layout, folded by the compiler for its strip_spec and token count.
 *
 * int16 headroom (|x| <= 127):
 *   weights made unsigned, u = weight + offset in 0 .. reach <= 129: a maddubs pair is <= 2 * reach * 127 <= 32766, and
 *     32767 / (254 * reach) of them share one int16 before madd widens them and applies the int8 sub-scale (nibbles: 8,
 *     the whole group of 32 columns). The offset is taken off with the exact sums of x: - offset * sub * sum.
 *   other tables and int8: maddubs(|w|, sign(x, w)): 2*128*127 = 32512, so every pair is widened at once. */
#ifndef MOE_STRIP8_AVX2_H
#define MOE_STRIP8_AVX2_H
#include "tier.h"
typedef __m256 strip_floats;
typedef __m256i strip_ints;
enum { STRIPS = 1, TILE_SETS = 1, STRIP_UNPACKED_BYTES = 0 }; /* no tile: docs/kernels.md says why */
enum { STRIP_SIZE_TOKENS = 4, STRIP_SIZE_COLS = 8192 };
#include "strip8_x86.h"

MOE_INLINE __m256i strip_four(const char *p) { return _mm256_set1_epi32(strip_load4(p)); } /* to every lane */
MOE_INLINE __m256 strip_float(const char *p) { return _mm256_castsi256_ps(strip_four(p)); }
MOE_INLINE strip_floats strip_zero(void) { return _mm256_setzero_ps(); }
MOE_INLINE void strip_store(float *y, __m256 v, int rows) {
    float part[8];
    _mm256_storeu_ps(rows >= 8 ? y : part, v);
    for (int r = 0; r < rows && rows < 8; r++) y[r] = part[r];
}
MOE_INLINE strip_ints strip_table(struct strip_spec s) {
    if (!s.table) return _mm256_setzero_si256();
    __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)s.table));
    return s.reach ? _mm256_add_epi8(table, _mm256_set1_epi8((char)s.offset)) : table;
}

/* maddubs results that one int16 holds. */
MOE_INLINE int strip_pairs(struct strip_spec s) {
    int n = s.reach ? 32767 / (254 * s.reach) : 1;
    return n >= 8 ? 8 : n >= 4 ? 4 : n >= 2 ? 2 : 1;
}
/* Does a sum end with the first 16 columns of a group? */
MOE_INLINE int strip_halves(struct strip_spec s) { return s.sub == 16 || s.span == 16; }

/* Eight rows x four columns, as weights, or unsigned where the layout says so. */
MOE_INLINE __m256i strip_bytes(struct strip_spec s, const char *code) {
    __m256i q = _mm256_loadu_si256((const void *)code);
    return s.reach && s.offset ? _mm256_add_epi8(q, _mm256_set1_epi8((char)s.offset)) : q;
}
MOE_INLINE void strip_nibbles(struct strip_spec s, __m256i *w, const char *code, __m256i table) { /* two of them */
    const __m256i low = _mm256_set1_epi8(15);
    __m256i q = _mm256_loadu_si256((const void *)code);
    w[0] = _mm256_and_si256(q, low);
    w[1] = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
    if (s.table) w[0] = _mm256_shuffle_epi8(table, w[0]), w[1] = _mm256_shuffle_epi8(table, w[1]);
}

/* is[R * t + r] += sub * sum of u * x (or weight * x) over halves first .. last - 1 of a group of 32 columns.
 * scale[r]: int16 pairs (sub, sub) per row, of columns 0..15 and of 16..31. */
MOE_INLINE void strip_dot(struct strip_spec s, __m256i *is, struct strip_at at, struct strip_x x, size_t col, int T,
                          int R, int first, int last, __m256i (*scale)[2], __m256i table) {
    const int limit = strip_pairs(s);
    const char *code = at.code[0];
    __m256i sum[MOE_MAX_TOKENS], pair[2], w[TILE_SETS], sign[TILE_SETS];
    int held = 0;
    STRIP_UNROLL for (int v = 4 * first; v < 4 * last; v++) {
        const int widen = held + 1 == limit || v + 1 == 4 * last || (strip_halves(s) && v == 3);
        STRIP_UNROLL for (int r = 0; r < R; r++) {
            const int byte = s.bits == 8 ? 32 * v : 16 * v;
            if (byte % 64 == 0) strip_prefetch(code + byte);
            if (s.bits == 8) pair[v & 1] = strip_bytes(s, code + byte);
            else if (!(v & 1)) strip_nibbles(s, pair, code + byte, table);
            sign[r] = pair[v & 1];
            w[r] = s.reach || s.sizes ? sign[r] : _mm256_abs_epi8(sign[r]);
        }
        STRIP_UNROLL for (int t = 0; t < T; t++) {
            const __m256i four = strip_four(x.q[t] + col + (size_t)(4 * v));
            STRIP_UNROLL for (int r = 0; r < R; r++) {
                __m256i a = four;
                if (s.sizes) a = _mm256_sign_epi8(w[r], four);
                else if (!s.reach) a = _mm256_sign_epi8(a, sign[r]);
                if (s.sizes) a = _mm256_maddubs_epi16(strip_four(x.size[t] + col + (size_t)(4 * v)), a);
                else a = _mm256_maddubs_epi16(w[r], a);
                if (held) a = _mm256_add_epi16(sum[R * t + r], a);
                if (widen) {
                    is[R * t + r] = _mm256_add_epi32(is[R * t + r], _mm256_madd_epi16(a, scale[r][v / 4]));
                    STRIP_PIN(is[R * t + r]);
                } else {
                    sum[R * t + r] = a;
                    STRIP_PIN(sum[R * t + r]);
                }
            }
        }
        held = widen ? 0 : held + 1;
    }
}

/* ---- scales of eight rows ---- */
MOE_INLINE __m256 strip_e8m0_8(__m256i e) { /* the larger pattern is the right one on both sides of e = 2 */
    __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23); /* negative for 0 */
    __m256i small = _mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(1)), 21);  /* e < 2 */
    return _mm256_castsi256_ps(_mm256_max_epi32(normal, small));
}
MOE_INLINE __m256 strip_e4m3_8(__m256i v) {
    __m256i e = _mm256_and_si256(_mm256_srli_epi32(v, 3), _mm256_set1_epi32(15)),
            m = _mm256_and_si256(v, _mm256_set1_epi32(7));
    __m256i normal =
        _mm256_or_si256(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(119)), 23), _mm256_slli_epi32(m, 20));
    __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(m), _mm256_set1_ps(0.0009765625f));
    __m256 d = _mm256_blendv_ps(_mm256_castsi256_ps(normal), small,
                                _mm256_castsi256_ps(_mm256_cmpeq_epi32(e, _mm256_setzero_si256())));
    return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(v, _mm256_set1_epi32(0x7f))), d);
}
MOE_INLINE __m256 strip_scale8(struct strip_spec s, const char *p) {
    if (s.scale == STRIP_F32) return _mm256_loadu_ps((const void *)p);
    if (s.scale != STRIP_F16) {
        __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
        return s.scale == STRIP_E8M0 ? strip_e8m0_8(v) : strip_e4m3_8(v);
    }
    __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
    return s.shift ? _mm256_mul_ps(d, _mm256_set1_ps(1.0f / (float)(1 << s.shift))) : d;
}
MOE_INLINE __m256 strip_minimum8(struct strip_spec s, const char *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p + 8 * strip_scale_bytes(s))));
}
/* int8 (or uint8) of two sub-blocks as int16 pairs per row. */
MOE_INLINE __m256i strip_pairs8(const char *first, const char *second, int is_signed) {
    __m128i pair = _mm_unpacklo_epi8(_mm_loadl_epi64((const void *)first), _mm_loadl_epi64((const void *)second));
    return is_signed ? _mm256_cvtepi8_epi16(pair) : _mm256_cvtepu8_epi16(pair);
}

/* Sub-scales of columns 0..15 and 16..31 of sub-block group p as int16 pairs (sub, sub); `pair` as (first, second). */
MOE_INLINE void strip_subs(struct strip_spec s, __m256i *scale, __m256i *pair, const char *scales, int p) {
    scale[0] = scale[1] = *pair = _mm256_set1_epi16(1);
    if (!s.sub) return;
    const char *a = scales + strip_sub_at(s) + (s.sub == 16 ? 16 : 8) * p, *b = s.sub == 16 ? a + 8 : a;
    *pair = strip_pairs8(a, b, 1);
    scale[0] = s.sub == 16 ? strip_pairs8(a, a, 1) : *pair;
    scale[1] = s.sub == 16 ? strip_pairs8(b, b, 1) : *pair;
}
MOE_INLINE __m256 strip_add(__m256 acc, __m256 dw, __m256 dx, __m256i is) {
    return _mm256_fmadd_ps(dw, _mm256_mul_ps(dx, _mm256_cvtepi32_ps(is)), acc);
}

/* One super-block of 256 columns: exact sums of the weights (is) and of the minima (ms), then the floats. */
MOE_INLINE void strip_super(struct strip_spec s, __m256 *acc, struct strip_at at, struct strip_x x, size_t col, int T,
                            int R, __m256i table) {
    const __m256i off = _mm256_set1_epi16((short)-s.offset);
    const size_t block = col;
    __m256i is[MOE_MAX_TOKENS], ms[MOE_MAX_TOKENS];
    STRIP_UNROLL for (int i = 0; i < R * T; i++) is[i] = ms[i] = _mm256_setzero_si256();
    for (int p = 0; p < 8; p++, col += 32, strip_next_code(s, &at, 32, R)) {
        __m256i scale[TILE_SETS][2], pair[TILE_SETS];
        STRIP_UNROLL for (int r = 0; r < R; r++) strip_subs(s, scale[r], &pair[r], at.scale[r], p);
        strip_dot(s, is, at, x, col, T, R, 0, 2, scale, table);
        if (!s.min && !(s.reach && s.offset)) continue;
        __m256i minus[TILE_SETS], mn[TILE_SETS];
        STRIP_UNROLL for (int r = 0; r < R; r++) {
            const char *a = at.scale[r] + strip_min_at(s) + (s.sub == 16 ? 16 : 8) * p, *b = s.sub == 16 ? a + 8 : a;
            if (s.min) mn[r] = strip_pairs8(a, b, 0);
            minus[r] = s.sub ? _mm256_mullo_epi16(pair[r], off) : off;
        }
        STRIP_UNROLL for (int t = 0; t < T; t++) {
            const __m256i sums = strip_four(x.q[t] + x.sum16 + col / 8);
            STRIP_UNROLL for (int r = 0; r < R; r++) {
                const int i = R * t + r;
                if (s.reach && s.offset) {
                    is[i] = _mm256_add_epi32(is[i], _mm256_madd_epi16(sums, minus[r]));
                    STRIP_PIN(is[i]);
                }
                if (s.min) {
                    ms[i] = _mm256_add_epi32(ms[i], _mm256_madd_epi16(sums, mn[r]));
                    STRIP_PIN(ms[i]);
                }
            }
        }
    }
    __m256 dw[TILE_SETS], dmin[TILE_SETS];
    STRIP_UNROLL for (int r = 0; r < R; r++) {
        dw[r] = strip_scale8(s, at.scale[r]);
        if (s.min) dmin[r] = strip_minimum8(s, at.scale[r]);
    }
    STRIP_UNROLL for (int i = 0; i < R * T; i++) {
        __m256 dx = strip_float(x.q[i / R] + x.d + block / 64);
        acc[i] = strip_add(acc[i], dw[i % R], dx, is[i]);
        if (s.min) acc[i] = _mm256_fnmadd_ps(dmin[i % R], _mm256_mul_ps(dx, _mm256_cvtepi32_ps(ms[i])), acc[i]);
    }
}

/* 32 columns under one scale, or two halves of 16 with a scale each. */
MOE_INLINE void strip_group(struct strip_spec s, __m256 *acc, struct strip_at at, struct strip_x x, size_t col, int T,
                            int R, __m256i table) {
    const __m256i one = _mm256_set1_epi16(1);
    __m256i ones[TILE_SETS][2];
    const int halves = s.span == 16;
    STRIP_UNROLL for (int r = 0; r < R; r++) ones[r][0] = ones[r][1] = one;
    STRIP_UNROLL for (int h = 0; h < 1 + halves; h++) {
        /* pairs (low, high) are the two sums of 16 columns that the offset takes in */
        const __m256i minus =
            _mm256_set1_epi32(!halves ? (int)((unsigned)-s.offset << 16 | ((unsigned)-s.offset & 0xffff))
                              : h     ? (int)((unsigned)-s.offset << 16)
                                      : -s.offset & 0xffff);
        __m256 dw[TILE_SETS], m[TILE_SETS];
        STRIP_UNROLL for (int r = 0; r < R; r++) {
            dw[r] = strip_scale8(s, at.scale[r] + h * strip_scale_stride(s));
            if (s.min) m[r] = strip_minimum8(s, at.scale[r]);
        }
        __m256i is[MOE_MAX_TOKENS];
        STRIP_UNROLL for (int i = 0; i < R * T; i++) is[i] = _mm256_setzero_si256();
        strip_dot(s, is, at, x, col, T, R, halves ? h : 0, halves ? h + 1 : 2, ones, table);
        STRIP_UNROLL for (int t = 0; t < T; t++) {
            const __m256i sums = strip_four(x.q[t] + x.sum16 + col / 8);
            const __m256 dx = strip_float(x.q[t] + x.d + col / 8);
            __m256i offset = sums;
            if (s.reach && s.offset) offset = _mm256_madd_epi16(sums, minus);
            STRIP_UNROLL for (int r = 0; r < R; r++) {
                const int i = R * t + r;
                if (s.reach && s.offset) is[i] = _mm256_add_epi32(is[i], offset);
                acc[i] = strip_add(acc[i], dw[r], dx, is[i]);
                if (s.min) acc[i] = strip_add(acc[i], m[r], dx, _mm256_madd_epi16(sums, one));
            }
        }
    }
}

/* |x| of up to STRIP_SIZE_TOKENS tokens, once per call: then a weight takes the sign of x instead of x that of the
 * weight, and |weight| is not needed. Only tables, whose weights all have a negative. */
MOE_INLINE int strip_sizes(struct strip_spec s, int cols, int T) {
    return s.bits == 4 && !s.reach && T <= STRIP_SIZE_TOKENS && cols <= STRIP_SIZE_COLS;
}
MOE_INLINE void strip_size_of(struct strip_x *x, char *out, int cols, int T) {
    for (int t = 0; t < T; t++, out += cols) {
        for (int c = 0; c < cols; c += 32) {
            __m256i q = _mm256_loadu_si256((const void *)(x->q[t] + c));
            _mm256_storeu_si256((void *)(out + c), _mm256_abs_epi8(q));
        }
        x->size[t] = out;
    }
}

#include "strip8_run.h"
#endif
