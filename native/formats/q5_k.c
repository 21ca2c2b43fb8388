/* q5_k: 256 values in 176 bytes.
 *
 *    0  fp16 d
 *    2  fp16 dmin
 *    4  12 bytes: eight 6-bit (sub-scale sc, minimum mn) pairs, see unpack_pairs6
 *   16  32 bytes of fifth bits: bit g of byte l belongs to value 32 * g + l
 *   48  128 bytes, 32 per 64 values: low nibbles are the first 32, high nibbles the second
 *   y = d * sc * q - dmin * mn
 *
 * Produced by GGUF quantizers. Layout byte8_q5_k (codes 0..31), lossless: 176 bytes become 276.
 * Quantizer: per 32 a least-squares (scale, minimum) over several placements of the codes, sub-scales and minima on
 * common 6-bit grids with their neighbours tried, then the codes (affine.h). */
#include "rows8.h"
#include "affine.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q5_k, avx2, ROWS8_REASON);
#else
struct block { uint8_t d[2]; uint8_t dmin[2]; uint8_t scales[12]; uint8_t high[32]; uint8_t q[128]; };
_Static_assert(sizeof(struct block) == 176, "q5_k block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_super *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->d = get16(b->d);
    u->dmin = get16(b->dmin);
    unpack_pairs6(u, b->scales);
    for (int g = 0; g < 4; g++) split_nibbles(u->code + 64 * g, u->code + 64 * g + 32, b->q + 32 * g, 32);
    for (int g = 0; g < 8; g++)
        for (int l = 0; l < 32; l++) u->code[32 * g + l] |= (uint8_t)((b->high[l] >> g & 1) << 4);
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i head[4];
    dwords4(head, p, stride);
    put_halves(scales, head[0]);
    put_pairs6(scales + 32, scales + 96, head + 1);
    for (int part = 0; part < 2; part++) { /* half of the bytes of fifth bits, for half of every group */
        __m256i high[4], q[4];
        dwords4(high, p + 16 + 16 * part, stride);
        for (int g = 0; g < 8; g += 2) {
            dwords4(q, p + 48 + 16 * g + 16 * part, stride);
            for (int j = 0; j < 4; j++) {
                uint8_t *out = code + 256 * g + 128 * part + 32 * j;
                put_lanes(out, _mm256_or_si256(bits8(q[j], 0, 0x0f), bits8(high[j], g - 4, 0x10)));
                put_lanes(out + 256, _mm256_or_si256(bits8(q[j], 4, 0x0f), bits8(high[j], g - 3, 0x10)));
            }
        }
    }
}
static const struct block absent = {.q = {0}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_SUPERS(.block_bytes = 176, .subs = 8, .min = 1, .bits = 8);
}
#if MOE_TIER_ID == MOE_SCALAR
static void quantize_block(struct block *b, const float *x) {
    uint8_t q[256];
    quantize_affine256((struct affine_super *)b, q, x, 31);
    clear(b->high, 32);
    for (int g = 0; g < 8; g++)
        for (int l = 0; l < 32; l++) b->high[l] |= (uint8_t)(q[32 * g + l] >> 4 << g);
    put_nibbles256(b->q, q);
}
static void quantize_row(void *blocks, const float *x, int cols) {
    for (int i = 0; i < cols / 256; i++) quantize_block((struct block *)blocks + i, x + 256 * i);
}
#endif
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 256, 176, 0, 2); })

MOE_EXPORT_FORMAT(q5_k, .version = 1, .block_len = 256, .block_bytes = 176, .layout = "byte8_q5_k",
                  .encode_strip = encode_strip, SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
