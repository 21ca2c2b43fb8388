/* q4_0: 32 values in 18 bytes.
 *
 *   0  fp16 d
 *   2  16 bytes: low nibbles are elements 0..15, high nibbles 16..31
 *   y = (q - 8) * d
 *
 * Produced by every GGUF quantizer. Layout nib8_q4_0, lossless: 18 bytes stay 18. Absent rows: d = 0, q = 8.
 * Quantizer: d = m / -8 with m the value of largest magnitude (the first of several), q = trunc(x / d + 8.5) at most
 * 15; byte-equal to gguf.quants. */
#include "block32.h"
#include "half_nibbles.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q4_0, avx2, ROWS8_REASON);
#else
#if MOE_TIER_ID == MOE_SCALAR
static void quantize_row(void *blocks, const float *x, int cols) {
    struct block *b = blocks;
    for (int i = 0; i < cols / 32; i++, b++, x += 32) {
        uint8_t q[32];
        put16(b->d, moe_f32_f16(quantize_symmetric32(q, x, 8)));
        put_nibbles32(b->q, q);
    }
}
#endif
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 32, 18, 0, -1); })

MOE_EXPORT_FORMAT(q4_0, .version = 1, .block_len = 32, .block_bytes = 18, .layout = "nib8_q4_0",
                  .encode_strip = encode_strip, SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
