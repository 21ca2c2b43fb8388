/* Eight-row strips on AVX2: one body for every layout, folded by the compiler for its strip_spec and token count.
 *
 * int16 headroom (|x| <= 127):
 *   weights made unsigned, u = weight + offset in 0 .. reach <= 129: a maddubs pair is <= 2 * reach * 127 <= 32766, and
 *     32767 / (254 * reach) of them share one int16 before madd widens them and applies the int8 sub-scale (nibbles: 8,
 *     the whole group of 32 columns). The offset is taken off with the exact sums of x: - offset * sub * sum.
 *   other tables and int8: maddubs(|w|, sign(x, w)): 2*128*127 = 32512, so every pair is widened at once. */
#ifndef MOE_STRIP8_AVX2_H
#define MOE_STRIP8_AVX2_H
#include "strip8.h"
enum { STRIP_PREFETCH_BYTES = 4096 };
#define STRIP_UNROLL _Pragma("GCC unroll 8")

/* Activations of the call: the parts lie at the same distances in every token. */
struct strip_x {
    const char *q[MOE_MAX_TOKENS];
    size_t d, sum16;
};
MOE_INLINE struct strip_x strip_x(struct strip_spec s, const void *const *x, int cols, int num_tokens) {
    struct strip_x v;
    struct moe_act_view a = moe_act_view(x[0], strip_activation(s), cols);
    for (int t = 0; t < num_tokens; t++) v.q[t] = (const char *)x[t];
    v.d = (size_t)((const char *)a.d - v.q[0]);
    v.sum16 = (size_t)((const char *)a.sum16 - v.q[0]);
    return v;
}
/* Fixes where a sum is updated. Without it gcc reassociates the adds, holds many products and spills them. */
#define STRIP_PIN(v) __asm__ volatile("" : "+x"(v))

MOE_INLINE __m256i strip_four(const char *p) { /* four bytes to every lane */
    int32_t v;
    __builtin_memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}
MOE_INLINE __m256 strip_float(const char *p) {
    float v;
    __builtin_memcpy(&v, p, 4);
    return _mm256_set1_ps(v);
}

/* maddubs results that one int16 holds. */
MOE_INLINE int strip_pairs(struct strip_spec s) {
    int n = s.reach ? 32767 / (254 * s.reach) : 1;
    return n >= 8 ? 8 : n >= 4 ? 4 : n >= 2 ? 2 : 1;
}
/* Does a sum end with the first 16 columns of a group? */
MOE_INLINE int strip_halves(struct strip_spec s) { return s.sub == 16 || s.span == 16; }

/* The next one or two vectors of eight rows x four columns, as weights, or unsigned where the layout says so. */
MOE_INLINE void strip_weights(struct strip_spec s, __m256i *w, const char *code, __m256i table) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i q = _mm256_loadu_si256((const void *)code);
    if (s.bits == 8) {
        w[0] = s.reach && s.offset ? _mm256_add_epi8(q, _mm256_set1_epi8((char)s.offset)) : q;
        return;
    }
    w[0] = _mm256_and_si256(q, low);
    w[1] = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
    if (s.table) w[0] = _mm256_shuffle_epi8(table, w[0]), w[1] = _mm256_shuffle_epi8(table, w[1]);
}

/* is[t] += sub * sum of u * x (or weight * x) over halves first .. last - 1 of a group of 32 columns.
 * scale: int16 pairs (sub, sub) per row, of columns 0..15 and of 16..31. */
MOE_INLINE void strip_dot(struct strip_spec s, __m256i *is, const char *code, struct strip_x x, size_t col, int T, int first,
                          int last, const __m256i *scale, __m256i table) {
    const int vectors = s.bits == 4 ? 2 : 1, per_half = s.bits == 4 ? 2 : 4, limit = strip_pairs(s);
    __m256i sum[MOE_MAX_TOKENS];
    int held = 0;
    STRIP_UNROLL for (int g = first * per_half; g < last * per_half; g++) {
        __m256i w[2];
        if (!(g & 1)) _mm_prefetch(code + 32 * g + STRIP_PREFETCH_BYTES, _MM_HINT_T0);
        strip_weights(s, w, code + 32 * g, table);
        STRIP_UNROLL for (int k = 0; k < vectors; k++) {
            const size_t at = col + (size_t)(4 * (vectors * g + k));
            const int end = (g + 1) * vectors - (vectors - 1 - k) == last * per_half * vectors ||
                            (strip_halves(s) && k == vectors - 1 && (g + 1) % per_half == 0);
            const int widen = held + 1 == limit || end;
            const __m256i magnitude = s.reach ? w[k] : _mm256_abs_epi8(w[k]), by = scale[g / per_half];
            STRIP_UNROLL for (int t = 0; t < T; t++) {
                __m256i four = strip_four(x.q[t] + at), a;
                a = _mm256_maddubs_epi16(magnitude, s.reach ? four : _mm256_sign_epi8(four, w[k]));
                if (held) a = _mm256_add_epi16(sum[t], a);
                if (widen) {
                    is[t] = _mm256_add_epi32(is[t], _mm256_madd_epi16(a, by));
                    STRIP_PIN(is[t]);
                } else {
                    sum[t] = a;
                    STRIP_PIN(sum[t]);
                }
            }
            held = widen ? 0 : held + 1;
        }
    }
}

/* ---- scales of eight rows ---- */
MOE_INLINE __m256 strip_e8m0_8(__m256i e) {
    __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e); /* e < 2; a count past 31 gives 0 */
    __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}
MOE_INLINE __m256 strip_e4m3_8(__m256i v) {
    __m256i e = _mm256_and_si256(_mm256_srli_epi32(v, 3), _mm256_set1_epi32(15)), m = _mm256_and_si256(v, _mm256_set1_epi32(7));
    __m256i normal = _mm256_or_si256(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(119)), 23), _mm256_slli_epi32(m, 20));
    __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(m), _mm256_set1_ps(0.0009765625f));
    __m256 d = _mm256_blendv_ps(_mm256_castsi256_ps(normal), small, _mm256_castsi256_ps(_mm256_cmpeq_epi32(e, _mm256_setzero_si256())));
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

/* One super-block of 256 columns: exact sums of the weights (is) and of the minima (ms). */
MOE_INLINE void strip_super(struct strip_spec s, __m256i *is, __m256i *ms, const char *scales, const char *code,
                            struct strip_x x, size_t col, int T, __m256i table) {
    const __m256i one = _mm256_set1_epi16(1), off = _mm256_set1_epi16((short)-s.offset);
    for (int p = 0; p < 8; p++, col += 32, code += strip_code_stride(s)) {
        __m256i scale[2] = {one, one}, pair = one;
        if (s.sub) {
            const char *a = scales + strip_sub_at(s) + (s.sub == 16 ? 16 : 8) * p, *b = s.sub == 16 ? a + 8 : a;
            pair = strip_pairs8(a, b, 1);
            scale[0] = s.sub == 16 ? strip_pairs8(a, a, 1) : pair;
            scale[1] = s.sub == 16 ? strip_pairs8(b, b, 1) : pair;
        }
        strip_dot(s, is, code, x, col, T, 0, 2, scale, table);
        if (s.reach && s.offset) {
            __m256i minus = s.sub ? _mm256_mullo_epi16(pair, off) : off;
            STRIP_UNROLL for (int t = 0; t < T; t++) {
                is[t] = _mm256_add_epi32(is[t], _mm256_madd_epi16(strip_four(x.q[t] + x.sum16 + col / 8), minus));
                STRIP_PIN(is[t]);
            }
        }
        if (s.min) {
            const char *a = scales + strip_min_at(s) + (s.sub == 16 ? 16 : 8) * p, *b = s.sub == 16 ? a + 8 : a;
            __m256i mn = strip_pairs8(a, b, 0);
            STRIP_UNROLL for (int t = 0; t < T; t++) {
                ms[t] = _mm256_add_epi32(ms[t], _mm256_madd_epi16(strip_four(x.q[t] + x.sum16 + col / 8), mn));
                STRIP_PIN(ms[t]);
            }
        }
    }
}

/* 32 columns under one scale, or two halves of 16 with a scale each. */
MOE_INLINE void strip_group(struct strip_spec s, __m256 *acc, const char *scales, const char *code, struct strip_x x,
                            size_t col, int T, __m256i table) {
    const __m256i one[2] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
    const int halves = s.span == 16;
    STRIP_UNROLL for (int h = 0; h < 1 + halves; h++) {
        /* pairs (low, high) are the two sums of 16 columns that the offset takes in */
        const __m256i minus = _mm256_set1_epi32(!halves ? (int)((unsigned)-s.offset << 16 | ((unsigned)-s.offset & 0xffff))
                                                        : h ? (int)((unsigned)-s.offset << 16) : -s.offset & 0xffff);
        __m256 dw = strip_scale8(s, scales + h * strip_scale_stride(s));
        __m256i is[MOE_MAX_TOKENS];
        STRIP_UNROLL for (int t = 0; t < T; t++) is[t] = _mm256_setzero_si256();
        strip_dot(s, is, code, x, col, T, halves ? h : 0, halves ? h + 1 : 2, one, table);
        STRIP_UNROLL for (int t = 0; t < T; t++) {
            if (s.reach && s.offset)
                is[t] = _mm256_add_epi32(is[t], _mm256_madd_epi16(strip_four(x.q[t] + x.sum16 + col / 8), minus));
            __m256 dx = strip_float(x.q[t] + x.d + col / 8);
            acc[t] = _mm256_fmadd_ps(dw, _mm256_mul_ps(dx, _mm256_cvtepi32_ps(is[t])), acc[t]);
            if (s.min) {
                __m256i sum = _mm256_madd_epi16(strip_four(x.q[t] + x.sum16 + col / 8), one[0]);
                acc[t] = _mm256_fmadd_ps(strip_minimum8(s, scales), _mm256_mul_ps(dx, _mm256_cvtepi32_ps(sum)), acc[t]);
            }
        }
    }
}

/* One strip, T tokens. */
MOE_INLINE void strip_rows8(struct strip_spec s, float *const *y, const char *strip, int rows, int cols,
                            struct strip_x x, int T) {
    const char *scales = strip, *code = strip + strip_code_offset(s, cols);
    __m256i table = _mm256_setzero_si256();
    if (s.table) {
        table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)s.table));
        if (s.reach) table = _mm256_add_epi8(table, _mm256_set1_epi8((char)s.offset));
    }
    __m256 acc[MOE_MAX_TOKENS];
    STRIP_UNROLL for (int t = 0; t < T; t++) acc[t] = _mm256_setzero_ps();
    if (s.span == 256) {
        for (size_t col = 0; col < (size_t)cols; col += 256, scales += strip_scale_stride(s), code += 8 * strip_code_stride(s)) {
            __m256i is[MOE_MAX_TOKENS], ms[MOE_MAX_TOKENS];
            STRIP_UNROLL for (int t = 0; t < T; t++) is[t] = ms[t] = _mm256_setzero_si256();
            strip_super(s, is, ms, scales, code, x, col, T, table);
            __m256 dw = strip_scale8(s, scales), dmin = _mm256_setzero_ps();
            if (s.min) dmin = strip_minimum8(s, scales);
            STRIP_UNROLL for (int t = 0; t < T; t++) {
                __m256 dx = strip_float(x.q[t] + x.d + col / 64);
                acc[t] = _mm256_fmadd_ps(dw, _mm256_mul_ps(dx, _mm256_cvtepi32_ps(is[t])), acc[t]);
                if (s.min) acc[t] = _mm256_fnmadd_ps(dmin, _mm256_mul_ps(dx, _mm256_cvtepi32_ps(ms[t])), acc[t]);
            }
        }
    } else {
        for (size_t col = 0; col < (size_t)cols; col += 32, code += strip_code_stride(s)) {
            strip_group(s, acc, scales, code, x, col, T, table);
            if (s.span == 16) scales += 2 * strip_scale_stride(s);
            else if (s.span && (col + 32) % (size_t)s.span == 0) scales += strip_scale_stride(s);
        }
    }
    STRIP_UNROLL for (int t = 0; t < T; t++) {
        if (rows >= 8) {
            _mm256_storeu_ps(y[t], acc[t]);
        } else {
            float part[8];
            _mm256_storeu_ps(part, acc[t]);
            for (int r = 0; r < rows; r++) y[t][r] = part[r];
        }
    }
}

MOE_INLINE void strip_range(struct strip_spec s, float *const *y, const void *w, int rows, int cols, int first, int last,
                            const void *const *x, int T) {
    struct strip_x v = strip_x(s, x, cols, T);
    size_t bytes = strip_size(s, cols);
    for (int strip = first; strip < last && 8 * strip < rows; strip++) {
        float *out[MOE_MAX_TOKENS];
        for (int t = 0; t < T; t++) out[t] = y[t] + 8 * strip;
        strip_rows8(s, out, (const char *)w + (size_t)strip * bytes, rows - 8 * strip, cols, v, T);
    }
}

/* Token counts without a body of their own run as two calls: same bits, and half the code to compile. */
MOE_INLINE void strip_matmul(struct strip_spec s, float *const *y, const void *w, int rows, int cols, int first,
                             int last, const void *const *x, int num_tokens) {
    switch (num_tokens) {
    case 1: strip_range(s, y, w, rows, cols, first, last, x, 1); break;
    case 2: strip_range(s, y, w, rows, cols, first, last, x, 2); break;
    case 3: strip_range(s, y, w, rows, cols, first, last, x, 3); break;
    case 4: strip_range(s, y, w, rows, cols, first, last, x, 4); break;
    case 8: strip_range(s, y, w, rows, cols, first, last, x, 8); break;
    }
}
#endif
