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
#include "strip.h"
#include "affine.h"
struct block { uint8_t d[2]; uint8_t dmin[2]; uint8_t scales[12]; uint8_t high[32]; uint8_t q[128]; };
_Static_assert(sizeof(struct block) == 176, "q5_k block");

static void unpack(struct strip_super *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->d = get16(b->d);
    u->dmin = get16(b->dmin);
    unpack_pairs6(u, b->scales);
    for (int g = 0; g < 4; g++) split_nibbles(u->code + 64 * g, u->code + 64 * g + 32, b->q + 32 * g, 32);
    for (int g = 0; g < 8; g++)
        for (int l = 0; l < 32; l++) u->code[32 * g + l] |= (uint8_t)((b->high[l] >> g & 1) << 4);
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct super_spec s = {.block_bytes = 176, .subs = 8, .min = 1, .bits = 8};
    encode_supers(s, strip, rows, row_bytes, num_rows, cols, unpack);
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
