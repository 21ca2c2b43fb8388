/* q5_0: 32 values in 22 bytes.
 *
 *   0  fp16 d
 *   2  32 fifth bits, bit j belongs to element j
 *   6  16 bytes: low nibbles are elements 0..15, high nibbles 16..31
 *   y = (q - 16) * d
 *
 * Produced by GGUF quantizers. Layout byte8_q5_0 (q - 16 as int8), lossless: 22 bytes become 34.
 * Quantizer: d = m / -16 with m the value of largest magnitude (the first of several), q = trunc(x / d + 16.5) at
 * most 31; byte-equal to gguf.quants. */
#include "strip.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q5_0, avx2, "a strip is eight rows: 512-bit registers gain nothing, and Bochs computes them otherwise");
#else
struct block { uint8_t d[2]; uint8_t high[4]; uint8_t q[16]; };
_Static_assert(sizeof(struct block) == 22, "q5_0 block");

static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    uint32_t high = get32(b->high);
    put16(u->scale[0], get16(b->d));
    split_nibbles(u->code, u->code + 16, b->q, 16);
    for (int j = 0; j < 32; j++) u->code[j] = (uint8_t)((u->code[j] | (high >> j & 1) << 4) - 16);
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct unit_spec s = {.cols = 32, .block_bytes = 22, .spans = 1, .scale_bytes = 2, .bits = 8};
    encode_units(s, strip, rows, row_bytes, num_rows, cols, unpack);
}
#if MOE_TIER_ID == MOE_SCALAR
static void quantize_row(void *blocks, const float *x, int cols) {
    struct block *b = blocks;
    for (int i = 0; i < cols / 32; i++, b++, x += 32) {
        float m = x[0];
        for (int c = 1; c < 32; c++)
            if (!(__builtin_fabsf(x[c]) <= __builtin_fabsf(m)) && m == m) m = x[c]; /* NaN wins */
        float d = m / -16.0f, inverse = d == 0 ? 0 : 1.0f / d;
        uint8_t q[32];
        uint32_t fifth = 0;
        for (int c = 0; c < 32; c++) {
            float v = x[c] * inverse + 16.5f;
            q[c] = (uint8_t)(v < 32 ? (v > 0 ? (int)v : 0) : v < 33 ? 31 : 0); /* 0 where 1 / d overflowed, too */
            fifth |= (uint32_t)(q[c] >> 4) << c;
        }
        put16(b->d, moe_f32_f16(d));
        put32(b->high, fifth);
        for (int c = 0; c < 16; c++) b->q[c] = (uint8_t)((q[c] & 15) | q[c + 16] << 4);
    }
}
#endif
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 32, 22, 0, -1); })

MOE_EXPORT_FORMAT(q5_0, .version = 1, .block_len = 32, .block_bytes = 22, .layout = "byte8_q5_0",
                  .encode_strip = encode_strip, SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
