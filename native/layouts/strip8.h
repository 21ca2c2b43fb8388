/* Shared by nib8.c and byte8.c: the geometry of an eight-row strip, what a layout of that kind must tell the kernel
 * template, and the scalar reference. docs/kernels.md draws the bytes.
 *
 *   strip = [ scale area | pad to 64 ][ code area | pad to 64 ]           eight rows, all columns
 *   codes, nib8:  per 32 columns [4 groups][8 rows][4 bytes]; low nibbles columns 8g..8g+3, high nibbles 8g+4..8g+7
 *   codes, byte8: per 32 columns [8 groups][8 rows][4 bytes]; group g is columns 4g..4g+3
 *   scales, span 16, 32, 64, 128:  per span [8 rows] float scale (fp16, float32, E8M0 or E4M3), then if min
 *                                   [8 rows] fp16 m
 *   scales, span 0 (a row):         [8 rows] float scale
 *   scales, span 256:               per 256 columns [8 rows] fp16 d, if min [8 rows] fp16 dmin, then
 *                                   [256 / sub][8 rows] int8 sub-scales, then if min as many uint8 minima mn
 *
 * Lane = row: a broadcast of four activation bytes meets the same four columns of eight rows, so no horizontal add is
 * ever needed and one float accumulator per (row, token) runs over the blocks in order. A block is 256 columns for span
 * 256, 16 for span 16, else 32 (the activation's own block; a longer span reuses its scale):
 *   acc = fma(d_w, d_x * (float)isum, acc),       isum = exact int32 sum of code * sub-scale * x over the block
 *   acc = fma(m_w, d_x * (float)sum(x), acc)      span 32 with min: weight = d * q + m
 *   acc = fma(-dmin_w, d_x * (float)msum, acc)    span 256 with min, msum = sum over sub-blocks of mn * sum(x)
 *
 * Range: |code| <= 128, |x| <= 127, |sub-scale| <= 128, mn <= 255. Block of 32: |isum| <= 32*128*127 = 520192. Block of
 * 256: |isum| <= 256*128*127*128 = 532676608 < 2^31; |msum| <= 256*127*255 < 2^24. code * sub-scale fits int16 while it
 * is <= 32767: 127*128 = 16256. */
#ifndef MOE_STRIP8_H
#define MOE_STRIP8_H
#include "tier.h"

/* Everything a kernel needs to know at compile time; always a literal, so that the template folds to straight code. */
struct strip_spec {
    int bits;             /* 4: nib8, 8: byte8 */
    int offset;           /* weight = u - offset with u = 0 .. reach; nib8 without a table: u is the code itself */
    int reach;            /* largest u that occurs, at most 129; 0: weights up to +-128 that no offset makes small */
    const int8_t *table;  /* nib8: NULL or the 16 weights */
    int span;             /* columns per float scale: 16, 32, 64, 128, 256, or 0 for a row */
    int scale;            /* enum strip_scale_kind */
    int sub;              /* span 256: columns per int8 sub-scale: 16, 32, 0: none */
    int min;              /* 1: span 32 or 256 with a minimum */
    int unpacked;         /* set by the AVX-512 tile for itself: codes are its own scratch */
    int sizes;            /* set by the AVX2 kernel for itself: |x| is at hand */
    int shift;            /* the float scale counts 2^-shift times (exact: fp16 has 2^-24, float32 goes to 2^-149) */
};
enum strip_scale_kind { STRIP_F16, STRIP_F32, STRIP_E8M0, STRIP_E4M3 };

MOE_INLINE int strip_activation(struct strip_spec s) { return s.span == 256 ? MOE_ACT_Q8_256 : MOE_ACT_Q8_32; }
MOE_INLINE int strip_scale_bytes(struct strip_spec s) {
    return s.scale == STRIP_F32 ? 4 : s.scale == STRIP_F16 ? 2 : 1;
}
MOE_INLINE int strip_scale_stride(struct strip_spec s) { /* bytes per span */
    int sub = s.sub ? s.span / s.sub * 8 : 0;
    return 8 * strip_scale_bytes(s) + sub + (s.min ? 16 + sub : 0);
}
/* Span 256, from the start of its scales. */
MOE_INLINE int strip_sub_at(struct strip_spec s) {
    return s.min ? 32 : 16;
}
MOE_INLINE int strip_min_at(struct strip_spec s) { return strip_sub_at(s) + s.span / (s.sub ? s.sub : s.span) * 8; }
MOE_INLINE int strip_code_stride(struct strip_spec s) { return 8 * s.bits * 4; } /* per 32 columns */
MOE_INLINE size_t strip_code_offset(struct strip_spec s, int cols) {
    return moe_round64((size_t)(s.span ? cols / s.span : 1) * (size_t)strip_scale_stride(s));
}
MOE_INLINE size_t strip_size(struct strip_spec s, int cols) {
    return strip_code_offset(s, cols) + moe_round64((size_t)(cols / 32) * (size_t)strip_code_stride(s));
}

/* ---- scales of row r in one span ---- */
MOE_INLINE uint16_t strip_u16(const uint8_t *p) { uint16_t h; __builtin_memcpy(&h, p, 2); return h; }
/* 2^(e-128). */
MOE_INLINE float strip_e8m0(int e) {
    return moe_bits_f32(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}
MOE_INLINE float strip_e4m3(
    int v) { /* half the value of an unsigned E4M3 (bias 7); 0x7f counts as 0, bit 7 is not read */
    int e = v >> 3 & 15, m = v & 7;
    return v == 0x7f ? 0 : e ? moe_bits_f32((uint32_t)(e + 119) << 23 | (uint32_t)m << 20) : (float)m * 0.0009765625f;
}
MOE_INLINE float strip_scale(struct strip_spec s, const uint8_t *scales, int r) {
    if (s.scale == STRIP_E8M0) return strip_e8m0(scales[r]);
    if (s.scale == STRIP_E4M3) return strip_e4m3(scales[r]);
    if (s.scale == STRIP_F16) return moe_f16_f32(strip_u16(scales + 2 * r)) * (1.0f / (float)(1 << s.shift));
    uint32_t u;
    __builtin_memcpy(&u, scales + 4 * r, 4);
    return moe_bits_f32(u);
}
MOE_INLINE float strip_minimum(struct strip_spec s, const uint8_t *scales, int r) {
    return moe_f16_f32(strip_u16(scales + 8 * strip_scale_bytes(s) + 2 * r));
}
MOE_INLINE int strip_sub(struct strip_spec s, const uint8_t *scales, int col, int r) { /* col within the span */
    return s.sub ? (int8_t)scales[strip_sub_at(s) + 8 * (col / s.sub) + r] : 1;
}
MOE_INLINE int strip_mn(struct strip_spec s, const uint8_t *scales, int col, int r) {
    return scales[strip_min_at(s) + 8 * (col / s.sub) + r];
}

/* The 32 weights of row r in one group of 32 columns, without any scale. */
MOE_INLINE void strip_decode32(struct strip_spec s, int16_t *w, const uint8_t *code, int r) {
    if (s.bits == 8) {
        for (int c = 0; c < 32; c++) w[c] = (int8_t)code[c / 4 * 32 + 4 * r + c % 4];
        return;
    }
    for (int c = 0; c < 32; c++) {
        int byte = code[c / 8 * 32 + 4 * r + c % 4], q = c & 4 ? byte >> 4 : byte & 15;
        w[c] = (int16_t)(s.table ? s.table[q] : q - s.offset);
    }
}

/* float32 row in the storage format's own rounding: (d * sub) first, then times the code, then the minimum. */
MOE_INLINE void strip_dequantize_row(struct strip_spec s, float *y, const void *weights, int cols, int row) {
    const uint8_t *strip = (const uint8_t *)weights + (size_t)(row / 8) * strip_size(s, cols);
    const int r = row % 8;
    int16_t w[32];
    for (int col = 0; col < cols; col++) {
        const uint8_t *sc = strip + (s.span ? col / s.span * strip_scale_stride(s) : 0);
        if (col % 32 == 0)
            strip_decode32(s, w, strip + strip_code_offset(s, cols) + (size_t)(col / 32) * (size_t)strip_code_stride(s),
                           r);
        const int in_span = s.span ? col % s.span : 0;
        float d = strip_scale(s, sc, r);
        if (s.sub) d *= (float)strip_sub(s, sc, in_span, r);
        float v = d * (float)w[col % 32];
        if (s.min)
            v = s.span == 256 ? v - strip_minimum(s, sc, r) * (float)strip_mn(s, sc, in_span, r)
                              : v + strip_minimum(s, sc, r);
        y[col] = v;
    }
}

#include "strip8_float.h"

#if MOE_TIER_ID == MOE_SCALAR
/* The definition of the result, in plain C: one row, one block of the activation (256, 32 or, for span 16, half of
 * it). */
MOE_INLINE float strip_block(struct strip_spec s, float acc, const int16_t *w, const uint8_t *sc, const int8_t *q,
                             float dx, int len, int r) {
    int32_t isum = 0, msum = 0;
    for (int c = 0; c < len; c++) {
        isum += w[c] * strip_sub(s, sc, c, r) * q[c];
        if (s.min) msum += (s.span == 256 ? strip_mn(s, sc, c, r) : 1) * q[c];
    }
    acc = moe_fmaf(strip_scale(s, sc, r), dx * (float)isum, acc);
    if (!s.min) return acc;
    float m = strip_minimum(s, sc, r);
    return moe_fmaf(s.span == 256 ? -m : m, dx * (float)msum, acc);
}

MOE_INLINE void strip_matmul(struct strip_spec s, float *const *y, const void *weights, int rows, int cols, int first,
                             int last, const void *const *x, int num_tokens) {
    const int len = s.span == 256  ? 256
                    : s.span == 16 ? 16
                                   : 32,
              block = strip_activation(s) == MOE_ACT_Q8_256 ? 256 : 32;
    struct moe_act_view act[MOE_MAX_TOKENS];
    for (int t = 0; t < num_tokens; t++) act[t] = moe_act_view(x[t], strip_activation(s), cols);
    for (int row = 8 * first; row < 8 * last && row < rows; row++) {
        const uint8_t *strip = (const uint8_t *)weights + (size_t)(row / 8) * strip_size(s, cols);
        const uint8_t *code = strip + strip_code_offset(s, cols);
        float acc[MOE_MAX_TOKENS] = {0};
        int16_t w[256];
        for (int col = 0; col < cols; col += len) {
            const uint8_t *sc = strip + (s.span ? col / s.span * strip_scale_stride(s) : 0);
            for (int c = 0; col % 32 == 0 && c < len; c += 32, code += strip_code_stride(s))
                strip_decode32(s, w + c, code, row % 8);
            for (int t = 0; t < num_tokens; t++)
                acc[t] = strip_block(s, acc[t], w + (len == 16 ? col % 32 : 0), sc, act[t].q + col,
                                     act[t].d[col / block], len, row % 8);
        }
        for (int t = 0; t < num_tokens; t++) y[t][row] = acc[t];
    }
}
#endif

/* Per layout and tier: the functions behind its table, and the table's fields. */
#if MOE_TIER_ID == MOE_SCALAR
#define STRIP_DEQUANTIZE(id)                                                                                       \
    static void dequantize_##id(float *y, const void *w, int cols, int row) {                                      \
        strip_dequantize_row(spec_##id(), y, w, cols, row);                                                        \
    }                                                                                                              \
    STRIP_DEQUANTIZE_STRIP(id)
#define STRIP_DEQUANTIZE_FIELD(id) .dequantize_row = dequantize_##id, .dequantize_strip = dequantize_strip_##id
#else
#define STRIP_DEQUANTIZE(id) STRIP_DEQUANTIZE_STRIP(id)
#define STRIP_DEQUANTIZE_FIELD(id) .dequantize_row = 0, .dequantize_strip = dequantize_strip_##id
#endif
#define STRIP_DEQUANTIZE_STRIP(id)                                                                                 \
    static void dequantize_strip_##id(float *out, const void *strip, int cols) {                                   \
        strip_dequantize(spec_##id(), out, strip, cols);                                                           \
    }
#if MOE_TIER_ID != MOE_AVX512
#define STRIP_TILE(id)
#define STRIP_TILE_FIELDS(id) .tile = 0, .strips_at_once = 1
#else
#define STRIP_TILE(id)                                                                                             \
    static void tile_##id(float *const *y, const void *w, int rows, int cols, int first, int last,                 \
                          const void *const *x, int num_tokens) {                                                  \
        strip_tile(spec_##id(), y, w, rows, cols, first, last, x, num_tokens);                                     \
    }
#define STRIP_TILE_FIELDS(id) .tile = tile_##id, .strips_at_once = MAX_STRIPS
#endif
/* STRIP_FUNCTIONS(id, span, other fields of the strip_spec ...) */
#define STRIP_FUNCTIONS(id, columns, ...)                                                                          \
    enum { span_##id = columns };                                                                                  \
    MOE_INLINE struct strip_spec spec_##id(void) { return (struct strip_spec){.span = columns, __VA_ARGS__}; }     \
    static size_t strip_bytes_##id(int cols) { return strip_size(spec_##id(), cols); }                             \
    static void matmul_##id(float *const *y, const void *w, int rows, int cols, int first, int last,               \
                            const void *const *x, int num_tokens) {                                                \
        int head = num_tokens > 4 && num_tokens < 8 ? 4 : num_tokens;                                              \
        for (int at = 0; at < num_tokens; at += head, head = num_tokens - at)                                      \
            strip_matmul(spec_##id(), y + at, w, rows, cols, first, last, x + at, head);                           \
    }                                                                                                              \
    STRIP_DEQUANTIZE(id)                                                                                           \
    STRIP_TILE(id)
#define STRIP_TABLE(id)                                                                                            \
    .activation = span_##id == 256 ? MOE_ACT_Q8_256 : MOE_ACT_Q8_32,                                               \
    .block_len = span_##id < 32 ? 32 : span_##id, .strip_rows = 8,                                                 \
    .strip_bytes = strip_bytes_##id, .matmul = matmul_##id, STRIP_TILE_FIELDS(id), STRIP_DEQUANTIZE_FIELD(id)
#endif
