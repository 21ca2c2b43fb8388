/* Eight-row strips on AVX2: one body for every layout, folded by the compiler for its strip_spec and token count.
 *
 * int16 headroom (|x| <= 127):
 *   plain nibbles: unsigned codes 0..15; a maddubs pair is <= 2*15*127 = 3810 and a 32-column group adds 8 of them to
 *     one int16: 30480. The offset is taken off with the exact sums of x: - offset * sub * sum.
 *   tables and int8: maddubs(|w|, sign(x, w)): 2*128*127 = 32512, so every pair is widened at once by madd, which
 *     also applies the int8 sub-scale. */
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

/* is[t] += sub * sum over 32 columns of weight * x. scale: int16 pairs (sub, sub) per row; minus: -offset * scale. */
MOE_INLINE void strip_dot_plain(__m256i *is, const char *code, struct strip_x x, size_t col, int T, __m256i scale,
                                __m256i minus) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i sum[MOE_MAX_TOKENS];
    STRIP_UNROLL for (int g = 0; g < 4; g++) {
        __m256i q = _mm256_loadu_si256((const void *)(code + 32 * g));
        if (!(g & 1)) _mm_prefetch(code + 32 * g + STRIP_PREFETCH_BYTES, _MM_HINT_T0);
        __m256i lo = _mm256_and_si256(q, low), hi = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
        STRIP_UNROLL for (int t = 0; t < T; t++) {
            __m256i a = _mm256_maddubs_epi16(lo, strip_four(x.q[t] + col + 8 * g));
            __m256i b = _mm256_maddubs_epi16(hi, strip_four(x.q[t] + col + 8 * g + 4));
            a = _mm256_add_epi16(a, b);
            sum[t] = g ? _mm256_add_epi16(sum[t], a) : a;
            STRIP_PIN(sum[t]);
        }
    }
    STRIP_UNROLL for (int t = 0; t < T; t++) {
        __m256i offset = _mm256_madd_epi16(strip_four(x.q[t] + x.sum16 + col / 8), minus);
        is[t] = _mm256_add_epi32(is[t], _mm256_add_epi32(_mm256_madd_epi16(sum[t], scale), offset));
        STRIP_PIN(is[t]);
    }
}

MOE_INLINE void strip_signed(__m256i *is, __m256i w, const char *x, __m256i scale) {
    __m256i p = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(strip_four(x), w));
    *is = _mm256_add_epi32(*is, _mm256_madd_epi16(p, scale));
    STRIP_PIN(*is);
}

/* scale: of columns 0..15, then of 16..31. */
MOE_INLINE void strip_dot_table(__m256i *is, const char *code, struct strip_x x, size_t col, int T, const __m256i *scale,
                                __m256i table) {
    const __m256i low = _mm256_set1_epi8(15);
    STRIP_UNROLL for (int g = 0; g < 4; g++) {
        __m256i q = _mm256_loadu_si256((const void *)(code + 32 * g));
        if (!(g & 1)) _mm_prefetch(code + 32 * g + STRIP_PREFETCH_BYTES, _MM_HINT_T0);
        __m256i lo = _mm256_shuffle_epi8(table, _mm256_and_si256(q, low));
        __m256i hi = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(q, 4), low));
        STRIP_UNROLL for (int t = 0; t < T; t++) {
            strip_signed(&is[t], lo, x.q[t] + col + 8 * g, scale[g / 2]);
            strip_signed(&is[t], hi, x.q[t] + col + 8 * g + 4, scale[g / 2]);
        }
    }
}

/* int16 pairs (sub, sub) per row. */
MOE_INLINE __m256i strip_sub8(const char *p) {
    __m128i sub = _mm_loadl_epi64((const void *)p);
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(sub, sub));
}

MOE_INLINE void strip_dot_byte(__m256i *is, const char *code, struct strip_x x, size_t col, int T, __m256i scale) {
    STRIP_UNROLL for (int g = 0; g < 8; g++) {
        __m256i w = _mm256_loadu_si256((const void *)(code + 32 * g));
        if (!(g & 1)) _mm_prefetch(code + 32 * g + STRIP_PREFETCH_BYTES, _MM_HINT_T0);
        STRIP_UNROLL for (int t = 0; t < T; t++) strip_signed(&is[t], w, x.q[t] + col + 4 * g, scale);
    }
}

/* One strip, T tokens. */
MOE_INLINE void strip_rows8(struct strip_spec s, float *const *y, const char *strip, int rows, int cols,
                            struct strip_x x, int T) {
    const char *scales = strip, *code = strip + strip_code_offset(s, cols);
    __m256i table = s.table ? _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)s.table)) : _mm256_setzero_si256();
    __m256i scale[2] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1)}, minus = _mm256_set1_epi16((short)-s.offset);
    __m256 acc[MOE_MAX_TOKENS];
    STRIP_UNROLL for (int t = 0; t < T; t++) acc[t] = _mm256_setzero_ps();
    for (size_t col = 0, end = (size_t)cols, d = x.d; col < end; d += 4, scales += strip_scale_stride(s)) {
        __m256i is[MOE_MAX_TOKENS];
        STRIP_UNROLL for (int t = 0; t < T; t++) is[t] = _mm256_setzero_si256();
        for (int p = 0; p < s.span / 32; p++, col += 32, code += strip_code_stride(s)) {
            if (s.sub) {
                scale[0] = strip_sub8(scales + 16 + 256 / s.sub * p);
                scale[1] = s.sub == 16 ? strip_sub8(scales + 24 + 16 * p) : scale[0];
                minus = _mm256_mullo_epi16(scale[0], _mm256_set1_epi16((short)-s.offset));
            }
            if (s.bits == 8) strip_dot_byte(is, code, x, col, T, scale[0]);
            else if (s.table) strip_dot_table(is, code, x, col, T, scale, table);
            else strip_dot_plain(is, code, x, col, T, scale[0], minus);
        }
        __m256 dw = _mm256_cvtph_ps(_mm_loadu_si128((const void *)scales));
        if (s.shift) dw = _mm256_mul_ps(dw, _mm256_set1_ps(1.0f / (float)(1 << s.shift)));
        STRIP_UNROLL for (int t = 0; t < T; t++)
            acc[t] = _mm256_fmadd_ps(dw, _mm256_mul_ps(strip_float(x.q[t] + d), _mm256_cvtepi32_ps(is[t])), acc[t]);
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

MOE_INLINE void strip_matmul(struct strip_spec s, float *const *y, const void *w, int rows, int cols, int first,
                             int last, const void *const *x, int num_tokens) {
    switch (num_tokens) {
    case 1: strip_range(s, y, w, rows, cols, first, last, x, 1); break;
    case 2: strip_range(s, y, w, rows, cols, first, last, x, 2); break;
    case 3: strip_range(s, y, w, rows, cols, first, last, x, 3); break;
    case 4: strip_range(s, y, w, rows, cols, first, last, x, 4); break;
    case 5: strip_range(s, y, w, rows, cols, first, last, x, 5); break;
    case 6: strip_range(s, y, w, rows, cols, first, last, x, 6); break;
    case 7: strip_range(s, y, w, rows, cols, first, last, x, 7); break;
    case 8: strip_range(s, y, w, rows, cols, first, last, x, 8); break;
    }
}
#endif
