/* q4_k: 256 values in 144 bytes.
 *
 *    0  fp16 d
 *    2  fp16 dmin
 *    4  12 bytes: eight 6-bit (sub-scale sc, minimum mn) pairs, see unpack_pairs6
 *   16  128 bytes, 32 per 64 values: low nibbles are the first 32, high nibbles the second
 *   y = d * sc * q - dmin * mn
 *
 * Produced by GGUF quantizers. Layout nib8_q4_k, lossless: 144 bytes become 148.
 * Quantizer: per 32 a least-squares (scale, minimum) over several placements of the codes, sub-scales and minima on
 * common 6-bit grids with their neighbours tried, then the codes (affine.h). */
#include "rows8.h"
#include "affine.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q4_k, avx2, ROWS8_REASON);
#else
struct block { uint8_t d[2]; uint8_t dmin[2]; uint8_t scales[12]; uint8_t q[128]; };
_Static_assert(sizeof(struct block) == 144, "q4_k block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_super *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->d = get16(b->d);
    u->dmin = get16(b->dmin);
    unpack_pairs6(u, b->scales);
    for (int g = 0; g < 4; g++) split_nibbles(u->code + 64 * g, u->code + 64 * g + 32, b->q + 32 * g, 32);
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i head[4];
    dwords4(head, p, stride);
    put_halves(scales, head[0]);
    put_pairs6(scales + 32, scales + 96, head + 1);
    for (int g = 0; g < 4; g++) {
        __m256i q[8];
        dwords8(q, p + 16 + 32 * g, stride);
        for (int j = 0; j < 4; j++)
            put_nibble_pair(code + 256 * g + 32 * j, code + 256 * g + 128 + 32 * j, q[2 * j], q[2 * j + 1]);
    }
}
static const struct block absent = {.q = {0}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_SUPERS(.block_bytes = 144, .subs = 8, .min = 1, .bits = 4);
}
#if MOE_TIER_ID == MOE_SCALAR
static void quantize_block(struct block *b, const float *x) {
    uint8_t q[256];
    quantize_affine256((struct affine_super *)b, q, x, 15);
    put_nibbles256(b->q, q);
}
static void quantize_row(void *blocks, const float *x, int cols) {
    for (int i = 0; i < cols / 256; i++) quantize_block((struct block *)blocks + i, x + 256 * i);
}
#endif
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 256, 144, 0, 2); })

MOE_EXPORT_FORMAT(q4_k, .version = 1, .block_len = 256, .block_bytes = 144, .layout = "nib8_q4_k",
                  .encode_strip = encode_strip, SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
