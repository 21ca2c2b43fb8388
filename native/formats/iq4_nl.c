/* iq4_nl: 32 values in 18 bytes, a non-linear 4-bit codebook.
 *
 *   0  fp16 d
 *   2  16 bytes: low nibbles are elements 0..15, high nibbles 16..31
 *   y = d * K[q]
 *
 * Produced by GGUF quantizers. Layout nib8_iq4_nl, lossless: 18 bytes stay 18.
 * Quantizer: the scale that a weighted least-squares fit prefers among several placements (iq4.h), then the better of
 * its fp16 neighbours. */
#include "half_nibbles.h"
#include "iq4.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(iq4_nl, avx2, ROWS8_REASON);
#else
#if MOE_TIER_ID == MOE_SCALAR
static void quantize_block(struct block *b, const float *x) {
    float weight[32], mean = 0, least = 0;
    for (int c = 0; c < 32; c++) mean += x[c] * x[c];
    for (int c = 0; c < 32; c++) weight[c] = mean / 32 + x[c] * x[c];
    uint16_t near = moe_f32_f16(iq4_scale(x, weight)), d16 = near;
    for (int step = -1; step <= 1; step++) { /* fp16 bit patterns next to each other are values next to each other */
        if ((near & 0x7fff) == 0 || !finite16((uint16_t)(near + step))) continue;
        float e = iq4_error(x, weight, moe_f16_f32((uint16_t)(near + step)));
        if (step == -1 || e < least) least = e, d16 = (uint16_t)(near + step);
    }
    float d = moe_f16_f32(d16), inverse = d != 0 ? 1.0f / d : 0;
    put16(b->d, d16);
    for (int c = 0; c < 16; c++) b->q[c] = (uint8_t)(iq4_code(x[c] * inverse) | iq4_code(x[c + 16] * inverse) << 4);
}
static void quantize_row(void *blocks, const float *x, int cols) {
    for (int i = 0; i < cols / 32; i++) quantize_block((struct block *)blocks + i, x + 32 * i);
}
#endif
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 32, 18, 0, -1); })

MOE_EXPORT_FORMAT(iq4_nl, .version = 1, .block_len = 32, .block_bytes = 18, .layout = "nib8_iq4_nl",
                  .encode_strip = encode_strip, SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
