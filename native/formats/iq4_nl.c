/* iq4_nl: 32 values in 18 bytes, a non-linear 4-bit codebook.
 *
 *   0  fp16 d
 *   2  16 bytes: low nibbles are elements 0..15, high nibbles 16..31
 *   y = d * K[q]
 *
 * Produced by GGUF quantizers. Layout nib8_iq4_nl, lossless: 18 bytes stay 18. */
#include "strip.h"
struct block { uint8_t d[2]; uint8_t q[16]; };
_Static_assert(sizeof(struct block) == 18, "iq4_nl block");

static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    put16(u->scale[0], get16(b->d));
    split_nibbles(u->code, u->code + 16, b->q, 16);
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct unit_spec s = {.cols = 32, .block_bytes = 18, .spans = 1, .scale_bytes = 2, .bits = 4, .zero = 8};
    encode_units(s, strip, rows, row_bytes, num_rows, cols, unpack);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 32, 18, 0, -1); })

MOE_EXPORT_FORMAT(iq4_nl, .version = 1, .block_len = 32, .block_bytes = 18, .layout = "nib8_iq4_nl",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
