/* q4_1: 32 values in 20 bytes.
 *
 *   0  fp16 d
 *   2  fp16 m
 *   4  16 bytes: low nibbles are elements 0..15, high nibbles 16..31
 *   y = q * d + m
 *
 * Produced by GGUF quantizers. Layout nib8_q4_1, lossless: 20 bytes stay 20.
 * Quantizer: d = (max - min) / 15, m = min, q = trunc((x - min) / d + 0.5); byte-equal to gguf.quants. */
#include "block32.h"
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q4_1, avx2, ROWS8_REASON);
#else
struct block { uint8_t d[2]; uint8_t m[2]; uint8_t q[16]; };
_Static_assert(sizeof(struct block) == 20, "q4_1 block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    put16(u->scale[0], get16(b->d));
    put16(u->min, get16(b->m));
    split_nibbles(u->code, u->code + 16, b->q, 16);
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i t[4];
    dwords4(t, p, stride);
    put_halves(scales, t[0]);
    put_nib8_block(code, p + 4, stride);
}
static const struct block absent = {.q = {0}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_UNITS(.cols = 32, .block_bytes = 20, .spans = 1, .scale_bytes = 2, .min = 1, .bits = 4);
}
#if MOE_TIER_ID == MOE_SCALAR
static void quantize_row(void *blocks, const float *x, int cols) {
    struct block *b = blocks;
    for (int i = 0; i < cols / 32; i++, b++, x += 32) {
        uint8_t q[32];
        float m, d = quantize_affine32(q, &m, x, 15);
        put16(b->d, moe_f32_f16(d));
        put16(b->m, moe_f32_f16(m));
        put_nibbles32(b->q, q);
    }
}
#endif
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 32, 20, 0, 2); })

MOE_EXPORT_FORMAT(q4_1, .version = 1, .block_len = 32, .block_bytes = 20, .layout = "nib8_q4_1",
                  .encode_strip = encode_strip, SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
