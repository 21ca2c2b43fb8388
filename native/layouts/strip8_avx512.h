/* Eight-row strips on AVX-512 VNNI: two strips at once, one in each half of a register, 16 rows in all.
 *
 * dpbusd adds four u8 * s8 products to int32 without saturation, so codes are made unsigned and the offset is taken
 * off through the start value of the sum: weight = u - offset, start = -offset * sum(x).
 *   plain nibbles: u = code;  tables: u = table + 128;  int8: u = w + 128 (sign bit flipped), or w itself where it is
 *   never negative (offset 0).
 * |sum u * x| <= 32 * 255 * 127 = 1036320 and the start is <= 128 * 32 * 127, far inside int32. */
#ifndef MOE_STRIP8_AVX512_H
#define MOE_STRIP8_AVX512_H
#include "tier.h"
typedef __m512 strip_floats;
typedef __m512i strip_ints;
enum { STRIPS = 2, TILE_SETS = 2, TILE_TOKENS = 4, STRIP_UNPACKED_BYTES = 512 };
#include "strip8_x86.h"

MOE_INLINE __m512i strip_four(const char *p) { return _mm512_set1_epi32(strip_load4(p)); }
MOE_INLINE __m512 strip_float(const char *p) { return _mm512_castsi512_ps(strip_four(p)); }
MOE_INLINE strip_floats strip_zero(void) { return _mm512_setzero_ps(); }
MOE_INLINE void strip_store(float *y, __m512 v, int rows) {
    _mm512_mask_storeu_ps(y, rows >= 16 ? 0xffff : (__mmask16)((1u << rows) - 1), v);
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

MOE_INLINE strip_ints strip_table(struct strip_spec s) {
    if (!s.table) return _mm512_setzero_si512();
    return _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)s.table)),
                            _mm512_set1_epi8((char)0x80));
}

/* Both strips x four columns as u: vector v of the eight of a group of 32 columns, or v and v + 1 of nibbles. */
MOE_INLINE __m512i strip_bytes(struct strip_spec s, const char *a, const char *b) {
    __m512i q = strip_both(a, b);
    return strip_unsigned(s) ? q : _mm512_xor_si512(q, _mm512_set1_epi8((char)0x80));
}
MOE_INLINE void strip_nibbles(struct strip_spec s, __m512i *u, const char *a, const char *b, __m512i table) {
    const __m512i low = _mm512_set1_epi8(15), q = strip_both(a, b);
    u[0] = _mm512_and_si512(q, low);
    u[1] = _mm512_and_si512(_mm512_srli_epi16(q, 4), low);
    if (s.table) u[0] = _mm512_shuffle_epi8(table, u[0]), u[1] = _mm512_shuffle_epi8(table, u[1]);
}

/* sum[R * t + r] += sum over the columns of vectors first .. last - 1 of u * x. */
MOE_INLINE void strip_dot(struct strip_spec s, __m512i *sum, struct strip_at at, struct strip_x x, size_t col, int T,
                          int R, __m512i table, int first, int last) {
    const char *a = at.code[0], *b = at.code[1];
    __m512i pair[2], u[TILE_SETS];
    STRIP_UNROLL for (int v = first; v < last; v++) {
        const int byte = s.bits == 8 ? 32 * v : 16 * v;
        if (s.unpacked) STRIP_UNROLL for (int r = 0; r < R; r++)
            u[r] = _mm512_load_si512((const void *)(a + 64 * (R * v + r)));
        if (!s.unpacked) {
            if (byte % 64 == 0) {
                strip_prefetch(a + byte);
                strip_prefetch(b + byte);
            }
            if (s.bits == 8) pair[v & 1] = strip_bytes(s, a + byte, b + byte);
            else if (!(v & 1)) strip_nibbles(s, pair, a + byte, b + byte, table);
            u[0] = pair[v & 1];
        }
        STRIP_UNROLL for (int t = 0; t < T; t++) {
            const __m512i four = strip_four(x.q[t] + col + (size_t)(4 * v));
            STRIP_UNROLL for (int r = 0; r < R; r++) sum[R * t + r] = _mm512_dpbusd_epi32(sum[R * t + r], u[r], four);
        }
    }
}

/* The tile's scratch: u, 64 bytes per four columns. */
MOE_INLINE void strip_unpack(struct strip_spec s, char *out, struct strip_at at, int cols, int R,
                             __m512i table) {
    for (int col = 0; col < cols; col += 32, out += R * STRIP_UNPACKED_BYTES, strip_next_code(s, &at, 32, R))
        STRIP_UNROLL for (int r = 0; r < R; r++) {
            const char *a = at.code[2 * r], *b = at.code[2 * r + 1];
            __m512i u[2];
            STRIP_UNROLL for (int v = 0; v < 8; v++) {
                if (s.bits == 8) u[v & 1] = strip_bytes(s, a + 32 * v, b + 32 * v);
                else if (!(v & 1)) strip_nibbles(s, u, a + 16 * v, b + 16 * v, table);
                _mm512_store_si512((void *)(out + 64 * (R * v + r)), u[v & 1]);
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
    return _mm512_castsi512_ps(
        _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(_mm512_set1_epi32(2), e), normal, small));
}
MOE_INLINE __m512 strip_e4m3_16(__m512i v) {
    __m512i e = _mm512_and_si512(_mm512_srli_epi32(v, 3), _mm512_set1_epi32(15)),
            m = _mm512_and_si512(v, _mm512_set1_epi32(7));
    __m512i normal =
        _mm512_or_si512(_mm512_slli_epi32(_mm512_add_epi32(e, _mm512_set1_epi32(119)), 23), _mm512_slli_epi32(m, 20));
    __m512i small = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(m), _mm512_set1_ps(0.0009765625f)));
    __m512i d = _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(e, _mm512_setzero_si512()), small, normal);
    return _mm512_castsi512_ps(
        _mm512_mask_blend_epi32(_mm512_cmpeq_epi32_mask(v, _mm512_set1_epi32(0x7f)), d, _mm512_setzero_si512()));
}
MOE_INLINE __m512 strip_half16(const char *a, const char *b) {
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const void *)a)),
                                                   _mm_loadu_si128((const void *)b), 1));
}
MOE_INLINE __m512 strip_scale16(struct strip_spec s, const char *a, const char *b) {
    if (s.scale == STRIP_F32) return _mm512_castsi512_ps(strip_both(a, b));
    if (s.scale != STRIP_F16) {
        __m512i v = _mm512_cvtepu8_epi32(
            _mm_unpacklo_epi64(_mm_loadl_epi64((const void *)a), _mm_loadl_epi64((const void *)b)));
        return s.scale == STRIP_E8M0 ? strip_e8m0_16(v) : strip_e4m3_16(v);
    }
    __m512 d = strip_half16(a, b);
    return s.shift ? _mm512_mul_ps(d, _mm512_set1_ps(1.0f / (float)(1 << s.shift))) : d;
}

MOE_INLINE __m512 strip_add(__m512 acc, __m512 dw, __m512 dx, __m512i is) {
    return _mm512_fmadd_ps(dw, _mm512_mul_ps(dx, _mm512_cvtepi32_ps(is)), acc);
}

/* sum[R * t + r] of half h of 32 columns, or of all of them, begins with what takes the offset off. */
MOE_INLINE void strip_begin(struct strip_spec s, __m512i *sum, struct strip_x x, size_t col, int T, int R, int halves,
                            int h) {
    const __m512i minus = _mm512_set1_epi16((short)-strip_offset(s)), zero = _mm512_setzero_si512();
    STRIP_UNROLL for (int t = 0; t < T; t++) {
        const char *sum16 = x.q[t] + x.sum16 + col / 8;
        __m512i first = zero;
        if (halves == 2) first = strip_start16(s, sum16 + 2 * h);
        else if (strip_offset(s)) first = _mm512_dpwssd_epi32(zero, minus, strip_four(sum16));
        STRIP_UNROLL for (int r = 0; r < R; r++) sum[R * t + r] = first;
    }
}

/* One super-block of 256 columns: exact sums of the weights (is) and of the minima (ms), then the floats. */
MOE_INLINE void strip_super(struct strip_spec s, __m512 *acc, struct strip_at at, struct strip_x x, size_t col, int T,
                            int R, __m512i table) {
    const int halves = s.sub == 16 ? 2 : 1;
    const size_t block = col;
    __m512i is[MOE_MAX_TOKENS], ms[MOE_MAX_TOKENS];
    STRIP_UNROLL for (int i = 0; i < R * T; i++) is[i] = ms[i] = _mm512_setzero_si512();
    for (int p = 0; p < 8; p++, col += 32, strip_next_code(s, &at, 32, R)) {
        STRIP_UNROLL for (int h = 0; h < halves; h++) {
            __m512i sum[MOE_MAX_TOKENS], sub[TILE_SETS];
            strip_begin(s, sum, x, col, T, R, halves, h);
            strip_dot(s, sum, at, x, col, T, R, table, h * 8 / halves, (h + 1) * 8 / halves);
            const int from = strip_sub_at(s) + 8 * (halves * p + h);
            if (s.sub) STRIP_UNROLL for (int r = 0; r < R; r++)
                sub[r] = strip_sub8(at.scale[2 * r] + from, at.scale[2 * r + 1] + from);
            STRIP_UNROLL for (int i = 0; i < R * T; i++)
                is[i] = _mm512_add_epi32(is[i], s.sub ? _mm512_mullo_epi32(sum[i], sub[i % R]) : sum[i]);
        }
        if (s.min) {
            const int from = strip_min_at(s) + 8 * halves * p;
            __m512i mn[TILE_SETS];
            STRIP_UNROLL for (int r = 0; r < R; r++)
                mn[r] = strip_mins(at.scale[2 * r] + from, at.scale[2 * r + 1] + from, halves == 2 ? 8 : 0);
            STRIP_UNROLL for (int i = 0; i < R * T; i++)
                ms[i] = _mm512_dpwssd_epi32(ms[i], mn[i % R], strip_four(x.q[i / R] + x.sum16 + col / 8));
        }
    }
    __m512 dw[TILE_SETS], dmin[TILE_SETS];
    STRIP_UNROLL for (int r = 0; r < R; r++) {
        dw[r] = strip_scale16(s, at.scale[2 * r], at.scale[2 * r + 1]);
        if (s.min) dmin[r] = strip_half16(at.scale[2 * r] + 16, at.scale[2 * r + 1] + 16);
    }
    STRIP_UNROLL for (int i = 0; i < R * T; i++) {
        __m512 dx = strip_float(x.q[i / R] + x.d + block / 64);
        acc[i] = strip_add(acc[i], dw[i % R], dx, is[i]);
        if (s.min) acc[i] = _mm512_fnmadd_ps(dmin[i % R], _mm512_mul_ps(dx, _mm512_cvtepi32_ps(ms[i])), acc[i]);
    }
}

/* 32 columns under one scale, or two halves of 16 with a scale each. */
MOE_INLINE void strip_group(struct strip_spec s, __m512 *acc, struct strip_at at, struct strip_x x, size_t col, int T,
                            int R, __m512i table) {
    const int halves = s.span == 16 ? 2 : 1, bytes = 8 * strip_scale_bytes(s);
    const __m512i one = _mm512_set1_epi16(1), zero = _mm512_setzero_si512();
    STRIP_UNROLL for (int h = 0; h < halves; h++) {
        __m512i sum[MOE_MAX_TOKENS];
        __m512 dw[TILE_SETS], m[TILE_SETS];
        STRIP_UNROLL for (int r = 0; r < R; r++) {
            const char *a = at.scale[2 * r] + h * strip_scale_stride(s),
                       *b = at.scale[2 * r + 1] + h * strip_scale_stride(s);
            dw[r] = strip_scale16(s, a, b);
            if (s.min) m[r] = strip_half16(a + bytes, b + bytes);
        }
        strip_begin(s, sum, x, col, T, R, halves, h);
        strip_dot(s, sum, at, x, col, T, R, table, h * 8 / halves, (h + 1) * 8 / halves);
        STRIP_UNROLL for (int i = 0; i < R * T; i++) {
            __m512 dx = strip_float(x.q[i / R] + x.d + col / 8);
            acc[i] = strip_add(acc[i], dw[i % R], dx, sum[i]);
            if (!s.min) continue;
            __m512i total = _mm512_dpwssd_epi32(zero, one, strip_four(x.q[i / R] + x.sum16 + col / 8));
            acc[i] = strip_add(acc[i], m[i % R], dx, total);
        }
    }
}

enum { STRIP_SIZE_TOKENS = 1, STRIP_SIZE_COLS = 1 };
MOE_INLINE int strip_sizes(struct strip_spec s, int cols, int T) { return (void)s, (void)cols, (void)T, 0; }
MOE_INLINE void strip_size_of(struct strip_x *x, char *out, int cols, int T) {
    (void)x, (void)out, (void)cols, (void)T;
}

#include "strip8_run.h"

/* Many tokens: a panel of columns is unpacked once into scratch that stays in L1, then the tokens go over it, a few at
 * a time; every broadcast of activations meets TILE_SETS registers of rows. The sums wait in memory between panels;
 * blocks keep their order, so the bits are those of strip_matmul. */
enum { STRIP_PANEL = 512 };
struct strip_scratch {
    _Alignas(64) char codes[STRIP_PANEL / 32 * TILE_SETS * STRIP_UNPACKED_BYTES];
    strip_floats acc[MOE_TILE_TOKENS * TILE_SETS];
};
MOE_INLINE void strip_tile(struct strip_spec s, float *const *y, const void *w, int rows, int cols, int first, int last,
                           const void *const *x, int num_tokens) {
    enum { R = TILE_SETS, T = TILE_TOKENS };
    struct strip_scratch m;
    struct strip_spec ready = s;
    ready.unpacked = 1;
    const strip_ints table = strip_table(s);
    if (rows > 8 * last) rows = 8 * last;
    for (int row = 8 * first; row < rows; row += 8 * STRIPS * R) {
        const char *strip = (const char *)w + (size_t)(row / 8) * strip_size(s, cols);
        struct strip_at p = strip_at(s, strip, rows - row, cols, R);
        for (int t = 0; t < num_tokens * R; t++) m.acc[t] = strip_zero();
        for (int col = 0; col < cols; col += STRIP_PANEL) {
            const int end = cols - col < STRIP_PANEL ? cols : col + STRIP_PANEL;
            strip_unpack(s, m.codes, p, end - col, R, table);
            struct strip_at u = p;
            u.code[0] = m.codes;
            for (int t = 0; t < num_tokens; t += T)
                strip_columns(ready, m.acc + R * t, u, strip_x(s, x + t, cols, T), (size_t)col, (size_t)end, T, R,
                              table);
            strip_next_code(s, &p, end - col, R);
            if (s.span) strip_next_scale(s, &p, (end - col) / (s.span ? s.span : 1), R);
        }
        for (int t = 0; t < num_tokens * R; t++) {
            const int at = row + t % R * 8 * STRIPS;
            if (at < rows) strip_store(y[t / R] + at, m.acc[t], rows - at);
        }
    }
}
#endif
