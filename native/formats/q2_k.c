/* q2_k: 256 values in 84 bytes.
 *
 *    0  16 bytes, one per 16 values: low nibble sub-scale sc, high nibble minimum mn
 *   16  64 bytes of 2-bit codes: per 128 values 32 bytes, bits 0-1 values 0..31, bits 2-3 values 32..63 ...
 *   80  fp16 d
 *   82  fp16 dmin
 *   y = d * sc * q - dmin * mn
 *
 * Produced by GGUF quantizers. Layout nib8_q2_k, lossless: 84 bytes become 164. */
#include "strip.h"
struct block { uint8_t scales[16]; uint8_t q[64]; uint8_t d[2]; uint8_t dmin[2]; };
_Static_assert(sizeof(struct block) == 84, "q2_k block");

static void unpack(struct strip_super *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->d = get16(b->d);
    u->dmin = get16(b->dmin);
    for (int j = 0; j < 16; j++) {
        u->sub[j] = (int8_t)(b->scales[j] & 15);
        u->min[j] = b->scales[j] >> 4;
    }
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 4; k++)
            for (int l = 0; l < 32; l++) u->code[128 * half + 32 * k + l] = b->q[32 * half + l] >> 2 * k & 3;
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct super_spec s = {.block_bytes = 84, .subs = 16, .min = 1, .bits = 4};
    encode_supers(s, strip, rows, row_bytes, num_rows, cols, unpack);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 256, 84, 80, 82); })

MOE_EXPORT_FORMAT(q2_k, .version = 1, .block_len = 256, .block_bytes = 84, .layout = "nib8_q2_k",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
