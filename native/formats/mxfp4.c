/* mxfp4: 32 values in 17 bytes, E2M1 codes with a power-of-two scale.
 *
 *   0  E8M0 e
 *   1  16 bytes: low nibbles are elements 0..15, high nibbles 16..31
 *   y = T[q] * 2^(e - 128), T = 0 1 2 3 4 6 8 12 and the same negated (E2M1 doubled); code 8 is +0
 *
 * Produced by gpt-oss and GGUF quantizers. Layout nib8_mxfp4, lossless: 17 bytes stay 17. Every exponent byte is a finite
 * scale (0 and 1 are subnormal), so there is nothing to refuse. */
#include "strip.h"
struct block { uint8_t e; uint8_t q[16]; };
_Static_assert(sizeof(struct block) == 17, "mxfp4 block");

static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->scale[0][0] = b->e;
    split_nibbles(u->code, u->code + 16, b->q, 16);
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct unit_spec s = {.cols = 32, .block_bytes = 17, .spans = 1, .scale_bytes = 1, .bits = 4};
    encode_units(s, strip, rows, row_bytes, num_rows, cols, unpack);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { (void)blocks; (void)cols; return -1; })

MOE_EXPORT_FORMAT(mxfp4, .version = 1, .block_len = 32, .block_bytes = 17, .layout = "nib8_mxfp4",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
