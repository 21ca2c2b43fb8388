/* q5_1: 32 values in 24 bytes.
 *
 *   0  fp16 d
 *   2  fp16 m
 *   4  32 fifth bits, bit j belongs to element j
 *   8  16 bytes: low nibbles are elements 0..15, high nibbles 16..31
 *   y = q * d + m
 *
 * Produced by GGUF quantizers. Layout byte8_q5_1 (codes 0..31), lossless: 24 bytes become 36.
 * Quantizer: d = (max - min) / 31, m = min, q = trunc((x - min) / d + 0.5); byte-equal to gguf.quants. */
#include "strip.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q5_1, avx2, "a strip is eight rows: 512-bit registers gain nothing, and Bochs computes them otherwise");
#else
struct block { uint8_t d[2]; uint8_t m[2]; uint8_t high[4]; uint8_t q[16]; };
_Static_assert(sizeof(struct block) == 24, "q5_1 block");

static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    uint32_t high = get32(b->high);
    put16(u->scale[0], get16(b->d));
    put16(u->min, get16(b->m));
    split_nibbles(u->code, u->code + 16, b->q, 16);
    for (int j = 0; j < 32; j++) u->code[j] = (uint8_t)(u->code[j] | (high >> j & 1) << 4);
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct unit_spec s = {.cols = 32, .block_bytes = 24, .spans = 1, .scale_bytes = 2, .min = 1, .bits = 8};
    encode_units(s, strip, rows, row_bytes, num_rows, cols, unpack);
}
#if MOE_TIER_ID == MOE_SCALAR
static void extremes(const float *x, float *low, float *high) { /* NaN wins, so that it shows in d and m */
    *low = *high = x[0];
    for (int c = 1; c < 32; c++) {
        if (!(x[c] >= *low) && *low == *low) *low = x[c];
        if (!(x[c] <= *high) && *high == *high) *high = x[c];
    }
}
static void quantize_row(void *blocks, const float *x, int cols) {
    struct block *b = blocks;
    for (int i = 0; i < cols / 32; i++, b++, x += 32) {
        float low, high;
        extremes(x, &low, &high);
        float d = (high - low) / 31.0f, inverse = d == 0 ? 0 : 1.0f / d;
        uint8_t q[32];
        for (int c = 0; c < 32; c++) {
            float v = (x[c] - low) * inverse + 0.5f;
            q[c] = (uint8_t)(v < 32 ? (int)v : v < 33 ? 31 : 0); /* 0 where 1 / d overflowed */
        }
        put16(b->d, moe_f32_f16(d));
        put16(b->m, moe_f32_f16(low));
        uint32_t fifth = 0;
        for (int c = 0; c < 32; c++) fifth |= (uint32_t)(q[c] >> 4) << c;
        put32(b->high, fifth);
        for (int c = 0; c < 16; c++) b->q[c] = (uint8_t)((q[c] & 15) | q[c + 16] << 4);
    }
}
#endif
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 32, 24, 0, 2); })

MOE_EXPORT_FORMAT(q5_1, .version = 1, .block_len = 32, .block_bytes = 24, .layout = "byte8_q5_1",
                  .encode_strip = encode_strip, SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
