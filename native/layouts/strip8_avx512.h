/* Eight-row strips on AVX-512 VNNI: two strips at once, one in each half of a register, 16 rows in all.
 *
 * dpbusd adds four u8 * s8 products to int32 without saturation, so codes are made unsigned and the offset is taken
 * off through the start value of the sum: weight = u - offset, start = -offset * sum(x).
 *   plain nibbles: u = code;  tables: u = table + 128;  int8: u = w + 128 (sign bit flipped), or w itself where it is
 *   never negative (offset 0).
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
/* int8 codes that are never negative need no offset. */
MOE_INLINE int strip_unsigned(struct strip_spec s) { return s.bits == 8 && s.reach && !s.offset; }
MOE_INLINE int strip_offset(struct strip_spec s) {
    return strip_unsigned(s) ? 0 : s.bits == 8 || s.table ? 128 : s.offset;
}

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
            if (!strip_unsigned(s)) q = _mm512_xor_si512(q, flip);
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
/* uint8 minima of two sub-blocks of both strips as int16 pairs per row. */
MOE_INLINE __m512i strip_mins(const char *a, const char *b, int second) {
    __m128i pa = _mm_unpacklo_epi8(_mm_loadl_epi64((const void *)a), _mm_loadl_epi64((const void *)(a + second)));
    __m128i pb = _mm_unpacklo_epi8(_mm_loadl_epi64((const void *)b), _mm_loadl_epi64((const void *)(b + second)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_cvtepu8_epi16(pa)), _mm256_cvtepu8_epi16(pb), 1);
}
/* Start of a sum of 16 columns: -offset times their sum of x. */
MOE_INLINE __m512i strip_start16(struct strip_spec s, const char *sum16) {
    int16_t total;
    __builtin_memcpy(&total, sum16, 2);
    return _mm512_set1_epi32(-strip_offset(s) * total);
}

/* ---- scales of sixteen rows ---- */
MOE_INLINE __m512 strip_e8m0_16(__m512i e) {
    __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e); /* e < 2; a count past 31 gives 0 */
    __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    return _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(_mm512_set1_epi32(2), e), normal, small));
}
MOE_INLINE __m512 strip_e4m3_16(__m512i v) {
    __m512i e = _mm512_and_si512(_mm512_srli_epi32(v, 3), _mm512_set1_epi32(15)), m = _mm512_and_si512(v, _mm512_set1_epi32(7));
    __m512i normal = _mm512_or_si512(_mm512_slli_epi32(_mm512_add_epi32(e, _mm512_set1_epi32(119)), 23), _mm512_slli_epi32(m, 20));
    __m512i small = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(m), _mm512_set1_ps(0.0009765625f)));
    __m512i d = _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(e, _mm512_setzero_si512()), small, normal);
    return _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmpeq_epi32_mask(v, _mm512_set1_epi32(0x7f)), d, _mm512_setzero_si512()));
}
MOE_INLINE __m512 strip_half16(const char *a, const char *b) {
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const void *)a)),
                                                   _mm_loadu_si128((const void *)b), 1));
}
MOE_INLINE __m512 strip_scale16(struct strip_spec s, const char *a, const char *b) {
    if (s.scale == STRIP_F32) return _mm512_castsi512_ps(strip_both(a, b));
    if (s.scale != STRIP_F16) {
        __m512i v = _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(_mm_loadl_epi64((const void *)a), _mm_loadl_epi64((const void *)b)));
        return s.scale == STRIP_E8M0 ? strip_e8m0_16(v) : strip_e4m3_16(v);
    }
    __m512 d = strip_half16(a, b);
    return s.shift ? _mm512_mul_ps(d, _mm512_set1_ps(1.0f / (float)(1 << s.shift))) : d;
}

/* One super-block of 256 columns: exact sums of the weights (is) and of the minima (ms). */
MOE_INLINE void strip_super(struct strip_spec s, __m512i *is, __m512i *ms, const char *a, const char *b, const char *ca,
                            const char *cb, struct strip_x x, size_t col, int T, __m512i table) {
    const int groups = strip_code_stride(s) / 32, halves = s.sub == 16 ? 2 : 1;
    const __m512i minus = _mm512_set1_epi16((short)-strip_offset(s));
    for (int p = 0; p < 8; p++, col += 32, ca += strip_code_stride(s), cb += strip_code_stride(s)) {
        STRIP_UNROLL for (int h = 0; h < halves; h++) {
            __m512i sum[MOE_MAX_TOKENS];
            STRIP_UNROLL for (int t = 0; t < T; t++) {
                const char *sum16 = x.q[t] + x.sum16 + col / 8;
                if (halves == 2) sum[t] = strip_start16(s, sum16 + 2 * h);
                else if (strip_offset(s)) sum[t] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), minus, strip_four(sum16));
                else sum[t] = _mm512_setzero_si512();
            }
            strip_dot32(s, sum, ca, cb, x, col, T, table, h * groups / halves, (h + 1) * groups / halves);
            const int at = strip_sub_at(s) + 8 * (halves * p + h);
            const __m512i sub = s.sub ? strip_sub8(a + at, b + at) : _mm512_setzero_si512();
            STRIP_UNROLL for (int t = 0; t < T; t++)
                is[t] = _mm512_add_epi32(is[t], s.sub ? _mm512_mullo_epi32(sum[t], sub) : sum[t]);
        }
        if (s.min) {
            const int at = strip_min_at(s) + 8 * halves * p;
            const __m512i mn = strip_mins(a + at, b + at, halves == 2 ? 8 : 0);
            STRIP_UNROLL for (int t = 0; t < T; t++)
                ms[t] = _mm512_dpwssd_epi32(ms[t], mn, strip_four(x.q[t] + x.sum16 + col / 8));
        }
    }
}

/* 32 columns under one scale, or two halves of 16 with a scale each. */
MOE_INLINE void strip_group(struct strip_spec s, __m512 *acc, const char *a, const char *b, const char *ca, const char *cb,
                            struct strip_x x, size_t col, int T, __m512i table) {
    const int groups = strip_code_stride(s) / 32, halves = s.span == 16 ? 2 : 1;
    const __m512i minus = _mm512_set1_epi16((short)-strip_offset(s)), one = _mm512_set1_epi16(1);
    STRIP_UNROLL for (int h = 0; h < halves; h++) {
        __m512i sum[MOE_MAX_TOKENS];
        __m512 dw = strip_scale16(s, a + h * strip_scale_stride(s), b + h * strip_scale_stride(s)), m = _mm512_setzero_ps();
        if (s.min) m = strip_half16(a + 8 * strip_scale_bytes(s), b + 8 * strip_scale_bytes(s));
        STRIP_UNROLL for (int t = 0; t < T; t++) {
            const char *sum16 = x.q[t] + x.sum16 + col / 8;
            if (halves == 2) sum[t] = strip_start16(s, sum16 + 2 * h);
            else if (strip_offset(s)) sum[t] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), minus, strip_four(sum16));
            else sum[t] = _mm512_setzero_si512();
        }
        strip_dot32(s, sum, ca, cb, x, col, T, table, h * groups / halves, (h + 1) * groups / halves);
        STRIP_UNROLL for (int t = 0; t < T; t++) {
            __m512 dx = strip_float(x.q[t] + x.d + col / 8);
            acc[t] = _mm512_fmadd_ps(dw, _mm512_mul_ps(dx, _mm512_cvtepi32_ps(sum[t])), acc[t]);
            if (s.min) {
                __m512i total = _mm512_dpwssd_epi32(_mm512_setzero_si512(), one, strip_four(x.q[t] + x.sum16 + col / 8));
                acc[t] = _mm512_fmadd_ps(m, _mm512_mul_ps(dx, _mm512_cvtepi32_ps(total)), acc[t]);
            }
        }
    }
}

/* Strips at a and b (the same one twice at an odd end), T tokens. */
MOE_INLINE void strip_rows16(struct strip_spec s, float *const *y, const char *a, const char *b, int rows, int cols,
                             struct strip_x x, int T) {
    const int stride = strip_scale_stride(s), code = strip_code_stride(s);
    const char *ca = a + strip_code_offset(s, cols), *cb = b + strip_code_offset(s, cols);
    __m512i table = _mm512_setzero_si512();
    if (s.table)
        table = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)s.table)), _mm512_set1_epi8((char)0x80));
    __m512 acc[MOE_MAX_TOKENS];
    STRIP_UNROLL for (int t = 0; t < T; t++) acc[t] = _mm512_setzero_ps();
    if (s.span == 256) {
        for (size_t col = 0; col < (size_t)cols; col += 256, a += stride, b += stride, ca += 8 * code, cb += 8 * code) {
            __m512i is[MOE_MAX_TOKENS], ms[MOE_MAX_TOKENS];
            STRIP_UNROLL for (int t = 0; t < T; t++) is[t] = ms[t] = _mm512_setzero_si512();
            strip_super(s, is, ms, a, b, ca, cb, x, col, T, table);
            __m512 dw = strip_scale16(s, a, b), dmin = _mm512_setzero_ps();
            if (s.min) dmin = strip_half16(a + 16, b + 16);
            STRIP_UNROLL for (int t = 0; t < T; t++) {
                __m512 dx = strip_float(x.q[t] + x.d + col / 64);
                acc[t] = _mm512_fmadd_ps(dw, _mm512_mul_ps(dx, _mm512_cvtepi32_ps(is[t])), acc[t]);
                if (s.min) acc[t] = _mm512_fnmadd_ps(dmin, _mm512_mul_ps(dx, _mm512_cvtepi32_ps(ms[t])), acc[t]);
            }
        }
    } else {
        for (size_t col = 0; col < (size_t)cols; col += 32, ca += code, cb += code) {
            strip_group(s, acc, a, b, ca, cb, x, col, T, table);
            int step = s.span == 16 ? 2 * stride : s.span && (col + 32) % (size_t)(s.span ? s.span : 1) == 0 ? stride : 0;
            a += step;
            b += step;
        }
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
