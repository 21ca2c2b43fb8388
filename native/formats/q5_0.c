/* q5_0: 32 values in 22 bytes.
 *
 *   0  fp16 d
 *   2  32 fifth bits, bit j belongs to element j
 *   6  16 bytes: low nibbles are elements 0..15, high nibbles 16..31
 *   y = (q - 16) * d
 *
 * Produced by GGUF quantizers. Layout byte8_q8_0 (q - 16 as int8), lossless: 22 bytes become 34. */
#include "strip.h"
struct block { uint8_t d[2]; uint8_t high[4]; uint8_t q[16]; };
_Static_assert(sizeof(struct block) == 22, "q5_0 block");

static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    uint32_t high = get32(b->high);
    put16(u->scale[0], get16(b->d));
    split_nibbles(u->code, u->code + 16, b->q, 16);
    for (int j = 0; j < 32; j++) u->code[j] = (uint8_t)((u->code[j] | (high >> j & 1) << 4) - 16);
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct unit_spec s = {.cols = 32, .block_bytes = 22, .spans = 1, .scale_bytes = 2, .bits = 8};
    encode_units(s, strip, rows, row_bytes, num_rows, cols, unpack);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 32, 22, 0, -1); })

MOE_EXPORT_FORMAT(q5_0, .version = 1, .block_len = 32, .block_bytes = 22, .layout = "byte8_q8_0",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
