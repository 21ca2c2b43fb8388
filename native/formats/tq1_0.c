/* tq1_0: 256 values of -1, 0, 1 in 54 bytes, five trits a byte.
 *
 *    0  48 bytes: 32 bytes of five trits (trit n of byte l is value 32 * n + l), then 16 bytes (160 + 16 * n + l)
 *   48  4 bytes of four trits (value 240 + 4 * n + l)
 *   52  fp16 d
 *   y = (t - 1) * d; trit n of byte b = ((b * 3^n mod 256) * 3) >> 8
 *
 * Produced by GGUF quantizers for ternary models. Layout nib8_tq (codes t, offset 1), lossless: 54 bytes become 130. */
#include "strip.h"
struct block { uint8_t q[48]; uint8_t tail[4]; uint8_t d[2]; };
_Static_assert(sizeof(struct block) == 54, "tq1_0 block");

MOE_INLINE void trits(uint8_t *code, const uint8_t *q, int bytes, int count) {
    static const uint8_t power[5] = {1, 3, 9, 27, 81};
    for (int n = 0; n < count; n++)
        for (int l = 0; l < bytes; l++) code[bytes * n + l] = (uint8_t)((uint8_t)(q[l] * power[n]) * 3 >> 8);
}
static void unpack(struct strip_super *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->d = get16(b->d);
    trits(u->code, b->q, 32, 5);
    trits(u->code + 160, b->q + 32, 16, 5);
    trits(u->code + 240, b->tail, 4, 4);
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct super_spec s = {.block_bytes = 54, .bits = 4, .zero = 1};
    encode_supers(s, strip, rows, row_bytes, num_rows, cols, unpack);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 256, 54, 52, -1); })

MOE_EXPORT_FORMAT(tq1_0, .version = 1, .block_len = 256, .block_bytes = 54, .layout = "nib8_tq",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
