/* q6_k: 256 values in 210 bytes.
 *
 *     0  128 bytes of low nibbles: per 128 values 64 bytes ql; low halves are values 0..63, high halves 64..127
 *   128  64 bytes of high pairs: per 128 values 32 bytes qh; bits 2k..2k+1 of byte l belong to value 32 * k + l
 *   192  16 int8 sub-scales, one per 16 values
 *   208  fp16 d
 *   y = d * sc * (q - 32)
 *
 * Produced by GGUF quantizers. Layout byte8_q6_k (q - 32 as int8), lossless: 210 bytes become 274. */
#include "strip.h"
struct block { uint8_t low[128]; uint8_t high[64]; int8_t scales[16]; uint8_t d[2]; };
_Static_assert(sizeof(struct block) == 210, "q6_k block");

static void unpack(struct strip_super *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->d = get16(b->d);
    for (int j = 0; j < 16; j++) u->sub[j] = b->scales[j];
    for (int half = 0; half < 2; half++) {
        split_nibbles(u->code + 128 * half, u->code + 128 * half + 64, b->low + 64 * half, 64);
        for (int k = 0; k < 4; k++)
            for (int l = 0; l < 32; l++) {
                uint8_t *q = u->code + 128 * half + 32 * k + l;
                *q = (uint8_t)((*q | (b->high[32 * half + l] >> 2 * k & 3) << 4) - 32);
            }
    }
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct super_spec s = {.block_bytes = 210, .subs = 16, .bits = 8};
    encode_supers(s, strip, rows, row_bytes, num_rows, cols, unpack);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 256, 210, 208, -1); })

MOE_EXPORT_FORMAT(q6_k, .version = 1, .block_len = 256, .block_bytes = 210, .layout = "byte8_q6_k",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
