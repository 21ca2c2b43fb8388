/* Shared by nib8.c and byte8.c: the geometry of an eight-row strip, what a layout of that kind must tell the kernel
 * template, and the scalar reference. docs/kernels.md draws the bytes.
 *
 *   strip = [ scale area | pad to 64 ][ code area | pad to 64 ]           eight rows, all columns
 *   codes, nib8:  per 32 columns [4 groups][8 rows][4 bytes]; low nibbles columns 8g..8g+3, high nibbles 8g+4..8g+7
 *   codes, byte8: per 32 columns [8 groups][8 rows][4 bytes]; group g is columns 4g..4g+3
 *   scales, span 32:  per 32 columns [8 rows] fp16
 *   scales, span 256: per 256 columns [8 rows] fp16, then [256 / sub sub-blocks][8 rows] int8
 *
 * Lane = row: a broadcast of four activation bytes meets the same four columns of eight rows, so no horizontal add is
 * ever needed and one float accumulator per (row, token) runs over the spans in order:
 *   acc = fma(d_w, d_x * (float)isum, acc),  isum = exact int32 sum of code * sub-scale * x over the span.
 *
 * Range: |code| <= 128, |x| <= 127, |sub-scale| <= 128. Span 32: |isum| <= 32*128*127 = 520192. Span 256:
 * |isum| <= 256*128*127*128 = 532676608 < 2^31. code * sub-scale fits int16 while it is <= 32767: 127*128 = 16256. */
#ifndef MOE_STRIP8_H
#define MOE_STRIP8_H
#include "tier.h"

/* Everything a kernel needs to know at compile time; always a literal, so that the template folds to straight code. */
struct strip_spec {
    int bits;             /* 4: nib8, 8: byte8 (codes are the int8 weights themselves) */
    int offset;           /* nib8 weight = code - offset when there is no table */
    const int8_t *table;  /* NULL or the 16 weights */
    int span;             /* columns per float scale: 32 or 256 */
    int sub;              /* columns per int8 sub-scale: 16, 32, 0: none */
    int shift;            /* the float scale counts 2^-shift times (exact: fp16 has 2^-24, float32 goes to 2^-149) */
};

MOE_INLINE int strip_activation(struct strip_spec s) { return s.span == 256 ? MOE_ACT_Q8_256 : MOE_ACT_Q8_32; }
MOE_INLINE int strip_scale_stride(struct strip_spec s) { return 16 + (s.sub ? s.span / s.sub * 8 : 0); }
MOE_INLINE int strip_code_stride(struct strip_spec s) { return 8 * s.bits * 4; } /* per 32 columns */
MOE_INLINE size_t strip_code_offset(struct strip_spec s, int cols) {
    return moe_round64((size_t)(cols / s.span) * (size_t)strip_scale_stride(s));
}
MOE_INLINE size_t strip_size(struct strip_spec s, int cols) {
    return strip_code_offset(s, cols) + moe_round64((size_t)(cols / 32) * (size_t)strip_code_stride(s));
}

/* Scales of row r in one span. */
MOE_INLINE float strip_scale(struct strip_spec s, const uint8_t *scales, int r) {
    uint16_t h;
    __builtin_memcpy(&h, scales + 2 * r, 2);
    return moe_f16_f32(h) * (1.0f / (float)(1 << s.shift));
}
MOE_INLINE int strip_sub(struct strip_spec s, const uint8_t *scales, int sub_block, int r) {
    return s.sub ? (int8_t)scales[16 + 8 * sub_block + r] : 1;
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

/* float32 row in the storage format's own rounding: (d * sub) first, then times the code. */
MOE_INLINE void strip_dequantize_row(struct strip_spec s, float *y, const void *weights, int cols, int row) {
    const uint8_t *scales = (const uint8_t *)weights + (size_t)(row / 8) * strip_size(s, cols);
    const uint8_t *code = scales + strip_code_offset(s, cols);
    int16_t w[32];
    for (int b = 0; b < cols / 32; b++, code += strip_code_stride(s)) {
        const uint8_t *sc = scales + 32 * b / s.span * strip_scale_stride(s);
        float d = strip_scale(s, sc, row % 8);
        strip_decode32(s, w, code, row % 8);
        for (int c = 0; c < 32; c++) {
            float dl = s.sub ? d * (float)strip_sub(s, sc, (32 * b % s.span + c) / s.sub, row % 8) : d;
            y[32 * b + c] = dl * (float)w[c];
        }
    }
}

#if MOE_TIER_ID == MOE_SCALAR
/* The definition of the result, in plain C. */
MOE_INLINE void strip_matmul(struct strip_spec s, float *const *y, const void *weights, int rows, int cols, int first,
                             int last, const void *const *x, int num_tokens) {
    struct moe_act_view act[MOE_MAX_TOKENS];
    for (int t = 0; t < num_tokens; t++) act[t] = moe_act_view(x[t], strip_activation(s), cols);
    for (int row = 8 * first; row < 8 * last && row < rows; row++) {
        const uint8_t *scales = (const uint8_t *)weights + (size_t)(row / 8) * strip_size(s, cols);
        const uint8_t *code = scales + strip_code_offset(s, cols);
        float acc[MOE_MAX_TOKENS] = {0};
        for (int b = 0; b < cols / s.span; b++, scales += strip_scale_stride(s)) {
            int16_t w[256];
            for (int p = 0; p < s.span / 32; p++, code += strip_code_stride(s)) {
                strip_decode32(s, w + 32 * p, code, row % 8);
                for (int c = 0; c < 32; c++)
                    w[32 * p + c] = (int16_t)(w[32 * p + c] * strip_sub(s, scales, s.sub ? (32 * p + c) / s.sub : 0, row % 8));
            }
            float d = strip_scale(s, scales, row % 8);
            for (int t = 0; t < num_tokens; t++) {
                const int8_t *q = act[t].q + b * s.span;
                int32_t isum = 0;
                for (int c = 0; c < s.span; c++) isum += w[c] * q[c];
                acc[t] = moe_fmaf(d, act[t].d[b] * (float)isum, acc[t]);
            }
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
    }
#define STRIP_DEQUANTIZE_FIELD(id) .dequantize_row = dequantize_##id
#else
#define STRIP_DEQUANTIZE(id)
#define STRIP_DEQUANTIZE_FIELD(id) .dequantize_row = 0
#endif
/* STRIP_FUNCTIONS(id, span, other fields of the strip_spec ...) */
#define STRIP_FUNCTIONS(id, columns, ...)                                                                          \
    enum { span_##id = columns };                                                                                  \
    MOE_INLINE struct strip_spec spec_##id(void) { return (struct strip_spec){.span = columns, __VA_ARGS__}; }     \
    static size_t strip_bytes_##id(int cols) { return strip_size(spec_##id(), cols); }                             \
    static void matmul_##id(float *const *y, const void *w, int rows, int cols, int first, int last,               \
                            const void *const *x, int num_tokens) {                                                \
        strip_matmul(spec_##id(), y, w, rows, cols, first, last, x, num_tokens);                                   \
    }                                                                                                              \
    STRIP_DEQUANTIZE(id)
#define STRIP_TABLE(id)                                                                                            \
    .activation = span_##id == 256 ? MOE_ACT_Q8_256 : MOE_ACT_Q8_32, .block_len = span_##id, .strip_rows = 8,      \
    .strip_bytes = strip_bytes_##id, .matmul = matmul_##id, STRIP_DEQUANTIZE_FIELD(id)
#endif
