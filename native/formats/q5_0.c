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
#include "block32.h"
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q5_0, avx2, ROWS8_REASON);
#else
struct block { uint8_t d[2]; uint8_t high[4]; uint8_t q[16]; };
_Static_assert(sizeof(struct block) == 22, "q5_0 block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    uint32_t high = get32(b->high);
    put16(u->scale[0], get16(b->d));
    split_nibbles(u->code, u->code + 16, b->q, 16);
    for (int j = 0; j < 32; j++) u->code[j] = (uint8_t)((u->code[j] | (high >> j & 1) << 4) - 16);
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    const __m256i minus16 = _mm256_set1_epi8(-16); /* q - 16 of a q below 16 is q | 0xf0 */
    __m256i t[4];
    dwords4(t, p, stride);
    __m256i q[4], high;
    put_low_half(scales, t[0]);
    dwords4(q, p + 6, stride);
    high = _mm256_or_si256(_mm256_srli_epi32(t[0], 16), _mm256_slli_epi32(t[1], 16));
    for (int g = 0; g < 8; g++) {
        __m256i fifth = spread4(high, g);
        put_lanes(code + 32 * g,
                  _mm256_or_si256(bits8(q[g % 4], g < 4 ? 0 : 4, 0x0f), _mm256_andnot_si256(fifth, minus16)));
    }
}
static const struct block absent = {.high = {[0 ... 3] = 0xff}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_UNITS(.cols = 32, .block_bytes = 22, .spans = 1, .scale_bytes = 2, .bits = 8);
}
#if MOE_TIER_ID == MOE_SCALAR
static void quantize_row(void *blocks, const float *x, int cols) {
    struct block *b = blocks;
    for (int i = 0; i < cols / 32; i++, b++, x += 32) {
        uint8_t q[32];
        put16(b->d, moe_f32_f16(quantize_symmetric32(q, x, 16)));
        put32(b->high, fifth_bits32(q));
        put_nibbles32(b->q, q);
    }
}
#endif
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 32, 22, 0, -1); })

MOE_EXPORT_FORMAT(q5_0, .version = 1, .block_len = 32, .block_bytes = 22, .layout = "byte8_q5_0",
                  .encode_strip = encode_strip, SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
