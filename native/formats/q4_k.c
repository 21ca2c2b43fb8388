/* q4_k: 256 values in 144 bytes.
 *
 *    0  fp16 d
 *    2  fp16 dmin
 *    4  12 bytes: eight 6-bit (sub-scale sc, minimum mn) pairs, see unpack_pairs6
 *   16  128 bytes, 32 per 64 values: low nibbles are the first 32, high nibbles the second
 *   y = d * sc * q - dmin * mn
 *
 * Produced by GGUF quantizers. Layout nib8_q4_k, lossless: 144 bytes become 148.
 * Quantizer: per 32 a least-squares (scale, minimum) over several placements of the codes, sub-scales and minima on common
 * 6-bit grids with their neighbours tried, then the codes (affine.h). */
#include "strip.h"
#include "affine.h"
struct block { uint8_t d[2]; uint8_t dmin[2]; uint8_t scales[12]; uint8_t q[128]; };
_Static_assert(sizeof(struct block) == 144, "q4_k block");

static void unpack(struct strip_super *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->d = get16(b->d);
    u->dmin = get16(b->dmin);
    unpack_pairs6(u, b->scales);
    for (int g = 0; g < 4; g++) split_nibbles(u->code + 64 * g, u->code + 64 * g + 32, b->q + 32 * g, 32);
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct super_spec s = {.block_bytes = 144, .subs = 8, .min = 1, .bits = 4};
    encode_supers(s, strip, rows, row_bytes, num_rows, cols, unpack);
}
#if MOE_TIER_ID == MOE_SCALAR
static void quantize_block(struct block *b, const float *x) {
    struct affine fit[8];
    float top_scale = 0, top_min = 0;
    for (int p = 0; p < 8; p++) {
        fit[p] = fit_affine(x + 32 * p, 15);
        if (fit[p].scale > top_scale) top_scale = fit[p].scale;
        if (fit[p].min > top_min) top_min = fit[p].min;
    }
    uint16_t d16 = moe_f32_f16(top_scale / 63.0f), dmin16 = moe_f32_f16(top_min / 63.0f);
    uint8_t sub[8], min[8], q[256];
    for (int p = 0; p < 8; p++) refine_affine(&sub[p], &min[p], q + 32 * p, x + 32 * p, fit[p], moe_f16_f32(d16), moe_f16_f32(dmin16), 15);
    put16(b->d, d16);
    put16(b->dmin, dmin16);
    pack_pairs6(b->scales, sub, min);
    for (int g = 0; g < 4; g++)
        for (int l = 0; l < 32; l++) b->q[32 * g + l] = (uint8_t)(q[64 * g + l] | q[64 * g + 32 + l] << 4);
}
static void quantize_row(void *blocks, const float *x, int cols) {
    for (int i = 0; i < cols / 256; i++) quantize_block((struct block *)blocks + i, x + 256 * i);
}
#endif
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 256, 144, 0, 2); })

MOE_EXPORT_FORMAT(q4_k, .version = 1, .block_len = 256, .block_bytes = 144, .layout = "nib8_q4_k",
                  .encode_strip = encode_strip, SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
