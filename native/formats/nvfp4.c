/* nvfp4: 64 values in 36 bytes, E2M1 codes with an E4M3 scale per 16.
 *
 *   0  4 unsigned E4M3 scales; 0 and 0x7f mean 0; halved, because T is doubled
 *   4  32 bytes, 8 per sub-block of 16: low nibbles are its elements 0..7, high nibbles 8..15
 *   y = T[q] * scale / 2, T as in mxfp4
 *
 * Produced by GGUF converters. Layout nib8_nvfp4, lossless: 36 bytes stay 36. No scale byte is infinite or NaN here. */
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(nvfp4, avx2, ROWS8_REASON);
#else
struct block { uint8_t scale[4]; uint8_t q[32]; };
_Static_assert(sizeof(struct block) == 36, "nvfp4 block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    for (int j = 0; j < 4; j++) {
        u->scale[j][0] = b->scale[j];
        split_nibbles(u->code + 16 * j, u->code + 16 * j + 8, b->q + 8 * j, 8);
    }
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i s[4], t[8];
    dwords4(s, p, stride);
    put_bytes4(scales, s[0]);
    dwords8(t, p + 4, stride);
    for (int j = 0; j < 4; j++) put_nibble_pair(code + 64 * j, code + 64 * j + 32, t[2 * j], t[2 * j + 1]);
}
static const struct block absent = {.q = {0}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_UNITS(.cols = 64, .block_bytes = 36, .spans = 4, .scale_bytes = 1, .bits = 4);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { (void)blocks; (void)cols; return -1; })

MOE_EXPORT_FORMAT(nvfp4, .version = 1, .block_len = 64, .block_bytes = 36, .layout = "nib8_nvfp4",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
#endif
