/* Eight-row strips on AVX-512 VNNI: two strips at once, one in each half of a register, 16 rows in all.
 *
 * dpbusd adds four u8 * s8 products to int32 without saturation, so codes are made unsigned and the offset is taken
 * off through the start value of the sum: weight = u - offset, start = -offset * sum(x).
 *   plain nibbles: u = code;  tables: u = table + 128;  int8: u = w + 128 (sign bit flipped).
 * |sum u * x| <= 32 * 255 * 127 = 1036320 and the start is <= 128 * 32 * 127, far inside int32. */
#ifndef MOE_STRIP8_AVX512_H
#define MOE_STRIP8_AVX512_H
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
MOE_INLINE __m512i strip_four(const char *p) {
    int32_t v;
    __builtin_memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}
MOE_INLINE __m512 strip_float(const char *p) {
    float v;
    __builtin_memcpy(&v, p, 4);
    return _mm512_set1_ps(v);
}
MOE_INLINE __m512i strip_both(const char *a, const char *b) { /* 32 bytes of each strip */
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const void *)a)),
                              _mm256_loadu_si256((const void *)b), 1);
}
MOE_INLINE int strip_offset(struct strip_spec s) { return s.bits == 8 || s.table ? 128 : s.offset; }

/* sum[t] += sum over the columns of groups first .. last - 1 of u * x. */
MOE_INLINE void strip_dot32(struct strip_spec s, __m512i *sum, const char *a, const char *b, struct strip_x x, size_t col,
                            int T, __m512i table, int first, int last) {
    const __m512i low = _mm512_set1_epi8(15), flip = _mm512_set1_epi8((char)0x80);
    STRIP_UNROLL for (int g = first; g < last; g++) {
        __m512i q = strip_both(a + 32 * g, b + 32 * g);
        if (!(g & 1)) {
            _mm_prefetch(a + 32 * g + STRIP_PREFETCH_BYTES, _MM_HINT_T0);
            _mm_prefetch(b + 32 * g + STRIP_PREFETCH_BYTES, _MM_HINT_T0);
        }
        if (s.bits == 8) {
            q = _mm512_xor_si512(q, flip);
            STRIP_UNROLL for (int t = 0; t < T; t++)
                sum[t] = _mm512_dpbusd_epi32(sum[t], q, strip_four(x.q[t] + col + 4 * g));
            continue;
        }
        __m512i lo = _mm512_and_si512(q, low), hi = _mm512_and_si512(_mm512_srli_epi16(q, 4), low);
        if (s.table) lo = _mm512_shuffle_epi8(table, lo), hi = _mm512_shuffle_epi8(table, hi);
        STRIP_UNROLL for (int t = 0; t < T; t++) {
            sum[t] = _mm512_dpbusd_epi32(sum[t], lo, strip_four(x.q[t] + col + 8 * g));
            sum[t] = _mm512_dpbusd_epi32(sum[t], hi, strip_four(x.q[t] + col + 8 * g + 4));
        }
    }
}

/* Sub-scales of both strips. */
MOE_INLINE __m512i strip_sub8(const char *a, const char *b) {
    return _mm512_cvtepi8_epi32(_mm_unpacklo_epi64(_mm_loadl_epi64((const void *)a), _mm_loadl_epi64((const void *)b)));
}
/* 32 columns with a sub-scale per 16: two half sums, each with its own start value. */
MOE_INLINE void strip_sub16(struct strip_spec s, __m512i *is, const char *ca, const char *cb, const char *sa,
                            const char *sb, struct strip_x x, size_t col, int T, __m512i table) {
    for (int h = 0; h < 2; h++) {
        __m512i sum[MOE_MAX_TOKENS], sub = strip_sub8(sa + 8 * h, sb + 8 * h);
        STRIP_UNROLL for (int t = 0; t < T; t++) {
            int16_t total;
            __builtin_memcpy(&total, x.q[t] + x.sum16 + col / 8 + 2 * h, 2);
            sum[t] = _mm512_set1_epi32(-strip_offset(s) * total);
        }
        int groups = strip_code_stride(s) / 64;
        strip_dot32(s, sum, ca, cb, x, col, T, table, h * groups, (h + 1) * groups);
        STRIP_UNROLL for (int t = 0; t < T; t++) is[t] = _mm512_add_epi32(is[t], _mm512_mullo_epi32(sum[t], sub));
    }
}

/* Strips at a and b (the same one twice at an odd end), T tokens. */
MOE_INLINE void strip_rows16(struct strip_spec s, float *const *y, const char *a, const char *b, int rows, int cols,
                             struct strip_x x, int T) {
    size_t area = strip_code_offset(s, cols);
    const char *ca = a + area, *cb = b + area;
    __m512i table = _mm512_setzero_si512(), minus = _mm512_set1_epi16((short)-strip_offset(s));
    if (s.table)
        table = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)s.table)), _mm512_set1_epi8((char)0x80));
    __m512 acc[MOE_MAX_TOKENS];
    STRIP_UNROLL for (int t = 0; t < T; t++) acc[t] = _mm512_setzero_ps();
    for (size_t col = 0, end = (size_t)cols, d = x.d; col < end;
         d += 4, a += strip_scale_stride(s), b += strip_scale_stride(s)) {
        __m512i is[MOE_MAX_TOKENS];
        if (s.sub == 16)
            STRIP_UNROLL for (int t = 0; t < T; t++) is[t] = _mm512_setzero_si512();
        for (int p = 0; p < s.span / 32; p++, col += 32, ca += strip_code_stride(s), cb += strip_code_stride(s)) {
            __m512i sum[MOE_MAX_TOKENS], sub = _mm512_setzero_si512();
            if (s.sub == 16) {
                strip_sub16(s, is, ca, cb, a + 16 + 16 * p, b + 16 + 16 * p, x, col, T, table);
                continue;
            }
            STRIP_UNROLL for (int t = 0; t < T; t++)
                sum[t] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), minus, strip_four(x.q[t] + x.sum16 + col / 8));
            strip_dot32(s, sum, ca, cb, x, col, T, table, 0, strip_code_stride(s) / 32);
            if (s.sub) sub = strip_sub8(a + 16 + 8 * p, b + 16 + 8 * p);
            STRIP_UNROLL for (int t = 0; t < T; t++) {
                __m512i v = s.sub ? _mm512_mullo_epi32(sum[t], sub) : sum[t];
                is[t] = p ? _mm512_add_epi32(is[t], v) : v;
            }
        }
        __m256i h = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const void *)a)),
                                            _mm_loadu_si128((const void *)b), 1);
        __m512 dw = _mm512_cvtph_ps(h);
        if (s.shift) dw = _mm512_mul_ps(dw, _mm512_set1_ps(1.0f / (float)(1 << s.shift)));
        STRIP_UNROLL for (int t = 0; t < T; t++)
            acc[t] = _mm512_fmadd_ps(dw, _mm512_mul_ps(strip_float(x.q[t] + d), _mm512_cvtepi32_ps(is[t])), acc[t]);
    }
    __mmask16 mask = rows >= 16 ? 0xffff : (__mmask16)((1u << rows) - 1);
    STRIP_UNROLL for (int t = 0; t < T; t++) _mm512_mask_storeu_ps(y[t], mask, acc[t]);
}

MOE_INLINE void strip_range(struct strip_spec s, float *const *y, const void *w, int rows, int cols, int first, int last,
                            const void *const *x, int T) {
    struct strip_x v = strip_x(s, x, cols, T);
    size_t bytes = strip_size(s, cols);
    if (rows > 8 * last) rows = 8 * last;
    for (int strip = first; strip < last && 8 * strip < rows; strip += 2) {
        float *out[MOE_MAX_TOKENS];
        const char *a = (const char *)w + (size_t)strip * bytes;
        int left = rows - 8 * strip;
        for (int t = 0; t < T; t++) out[t] = y[t] + 8 * strip;
        strip_rows16(s, out, a, left > 8 ? a + bytes : a, left, cols, v, T);
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
