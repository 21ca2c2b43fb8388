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
#include "block32.h"
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q5_1, avx2, ROWS8_REASON);
#else
struct block { uint8_t d[2]; uint8_t m[2]; uint8_t high[4]; uint8_t q[16]; };
_Static_assert(sizeof(struct block) == 24, "q5_1 block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    uint32_t high = get32(b->high);
    put16(u->scale[0], get16(b->d));
    put16(u->min, get16(b->m));
    split_nibbles(u->code, u->code + 16, b->q, 16);
    for (int j = 0; j < 32; j++) u->code[j] = (uint8_t)(u->code[j] | (high >> j & 1) << 4);
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i t[4];
    dwords4(t, p, stride);
    __m256i q[4], high;
    put_halves(scales, t[0]);
    dwords4(q, p + 8, stride);
    high = t[1];
    for (int g = 0; g < 8; g++) {
        __m256i fifth = spread4(high, g);
        put_lanes(code + 32 * g, _mm256_or_si256(bits8(q[g % 4], g < 4 ? 0 : 4, 0x0f), bits8(fifth, 0, 16)));
    }
}
static const struct block absent = {.q = {0}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_UNITS(.cols = 32, .block_bytes = 24, .spans = 1, .scale_bytes = 2, .min = 1, .bits = 8);
}
#if MOE_TIER_ID == MOE_SCALAR
static void quantize_row(void *blocks, const float *x, int cols) {
    struct block *b = blocks;
    for (int i = 0; i < cols / 32; i++, b++, x += 32) {
        uint8_t q[32];
        float m, d = quantize_affine32(q, &m, x, 31);
        put16(b->d, moe_f32_f16(d));
        put16(b->m, moe_f32_f16(m));
        put32(b->high, fifth_bits32(q));
        put_nibbles32(b->q, q);
    }
}
#endif
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 32, 24, 0, 2); })

MOE_EXPORT_FORMAT(q5_1, .version = 1, .block_len = 32, .block_bytes = 24, .layout = "byte8_q5_1",
                  .encode_strip = encode_strip, SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
