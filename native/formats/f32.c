/* f32: little-endian IEEE binary32 as it comes; block of one value. Kept row-major (layout rows_f32). */
#include "rows.h"
#if MOE_TIER_ID == MOE_SCALAR
static void quantize_row(void *blocks, const float *x, int cols) { rows_copy(blocks, x, (size_t)cols * 4); }

MOE_EXPORT_FORMAT(f32, .version = 1, .block_len = 1, .block_bytes = 4, .layout = "rows_f32", .encode_strip = encode_32,
                  .quantize_row = quantize_row, .check_row = check_f32);
#else
MOE_FORMAT_SAME_AS(f32, scalar, "rows are copied as they are");
#endif
