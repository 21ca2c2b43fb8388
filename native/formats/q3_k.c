/* q3_k: 256 values in 110 bytes.
 *
 *     0  32 bytes of third bits: bit 4 * half + k of byte l belongs to value 128 * half + 32 * k + l
 *    32  64 bytes of 2-bit codes, in the order of q2_k
 *    96  12 bytes: sixteen 6-bit sub-scales; low nibbles in bytes 0..7 (j < 8 low half, else high half), two high bits
 *        of sub-scale j in byte 8 + j % 4 at bit 2 * (j / 4)
 *   108  fp16 d
 *   y = d * (sc - 32) * (q2 - (third bit set ? 0 : 4))
 *
 * Produced by GGUF quantizers. Layout nib8_q3_k (codes q2 + 4 * third bit, offset 4), lossless: 110 bytes become
 * 146. */
#include "strip.h"
struct block { uint8_t high[32]; uint8_t q[64]; uint8_t scales[12]; uint8_t d[2]; };
_Static_assert(sizeof(struct block) == 110, "q3_k block");

static void unpack(struct strip_super *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->d = get16(b->d);
    for (int j = 0; j < 16; j++) {
        int low = j < 8 ? b->scales[j] & 15 : b->scales[j - 8] >> 4, top = b->scales[8 + j % 4] >> 2 * (j / 4) & 3;
        u->sub[j] = (int8_t)((low | top << 4) - 32);
    }
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 4; k++)
            for (int l = 0; l < 32; l++)
                u->code[128 * half + 32 * k + l] =
                    (uint8_t)((b->q[32 * half + l] >> 2 * k & 3) | (b->high[l] >> (4 * half + k) & 1) << 2);
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct super_spec s = {.block_bytes = 110, .subs = 16, .bits = 4, .zero = 4};
    encode_supers(s, strip, rows, row_bytes, num_rows, cols, unpack);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 256, 110, 108, -1); })

MOE_EXPORT_FORMAT(q3_k, .version = 1, .block_len = 256, .block_bytes = 110, .layout = "nib8_q3_k",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
