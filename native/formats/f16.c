/* f16: little-endian IEEE binary16; block of one value. Kept row-major (layout rows_f16).
 * Quantizer: round to nearest, ties to even; past 65504 it gives infinity, which check_row refuses. */
#include "rows.h"
#if MOE_TIER_ID == MOE_SCALAR
static void quantize_row(void *blocks, const float *x, int cols) {
    for (int c = 0; c < cols; c++) rows_put(blocks, c, moe_f32_f16(x[c]));
}

MOE_EXPORT_FORMAT(f16, .version = 1, .block_len = 1, .block_bytes = 2, .layout = "rows_f16", .encode_strip = encode_16,
                  .quantize_row = quantize_row, .check_row = check_f16);
#else
MOE_FORMAT_SAME_AS(f16, scalar, "rows are copied as they are");
#endif
