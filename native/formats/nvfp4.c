/* nvfp4: 64 values in 36 bytes, E2M1 codes with an E4M3 scale per 16.
 *
 *   0  4 unsigned E4M3 scales; 0 and 0x7f mean 0; halved, because T is doubled
 *   4  32 bytes, 8 per sub-block of 16: low nibbles are its elements 0..7, high nibbles 8..15
 *   y = T[q] * scale / 2, T as in mxfp4
 *
 * Produced by GGUF converters. Layout nib8_nvfp4, lossless: 36 bytes stay 36. No scale byte is infinite or NaN here. */
#include "strip.h"
struct block { uint8_t scale[4]; uint8_t q[32]; };
_Static_assert(sizeof(struct block) == 36, "nvfp4 block");

static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    for (int j = 0; j < 4; j++) {
        u->scale[j][0] = b->scale[j];
        split_nibbles(u->code + 16 * j, u->code + 16 * j + 8, b->q + 8 * j, 8);
    }
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct unit_spec s = {.cols = 64, .block_bytes = 36, .spans = 4, .scale_bytes = 1, .bits = 4};
    encode_units(s, strip, rows, row_bytes, num_rows, cols, unpack);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { (void)blocks; (void)cols; return -1; })

MOE_EXPORT_FORMAT(nvfp4, .version = 1, .block_len = 64, .block_bytes = 36, .layout = "nib8_nvfp4",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
