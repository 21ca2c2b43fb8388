/* bf16: the upper half of an IEEE binary32, little-endian; block of one value. Kept row-major (layout rows_bf16).
 * Quantizer: round to nearest, ties to even; NaN stays NaN. */
#include "rows.h"
#if MOE_TIER_ID == MOE_SCALAR
static void quantize_row(void *blocks, const float *x, int cols) {
    for (int c = 0; c < cols; c++) rows_put(blocks, c, moe_f32_bf16(x[c]));
}

MOE_EXPORT_FORMAT(bf16, .version = 1, .block_len = 1, .block_bytes = 2, .layout = "rows_bf16",
                  .encode_strip = encode_16, .quantize_row = quantize_row, .check_row = check_bf16);
#else
MOE_FORMAT_SAME_AS(bf16, scalar, "rows are copied as they are");
#endif
