/* tq2_0: 256 values of -1 .. 2 in 66 bytes, four codes a byte.
 *
 *    0  64 bytes: per 128 values 32 bytes, bits 2k..2k+1 of byte l belong to value 32 * k + l
 *   64  fp16 d
 *   y = (q - 1) * d
 *
 * Produced by GGUF quantizers for ternary models. Layout nib8_tq (offset 1), lossless: 66 bytes become 130. */
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(tq2_0, avx2, ROWS8_REASON);
#else
struct block { uint8_t q[64]; uint8_t d[2]; };
_Static_assert(sizeof(struct block) == 66, "tq2_0 block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_super *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->d = get16(b->d);
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 4; k++)
            for (int l = 0; l < 32; l++) u->code[128 * half + 32 * k + l] = b->q[32 * half + l] >> 2 * k & 3;
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i s[4];
    dwords4(s, p + 50, stride);
    put_high_half(scales, s[3]);
    for (int part = 0; part < 4; part++) { /* half of the bytes of 128 values: sixteen columns at each shift */
        __m256i q[4];
        dwords4(q, p + 0 + 16 * part, stride);
        for (int j = 0; j < 4; j += 2) put_pairs2(code + 512 * (part / 2) + 64 * (part % 2) + 16 * j, q[j], q[j + 1]);
    }
}
static const struct block absent = {.q = {[0 ... 63] = 0x55}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_SUPERS(.block_bytes = 66, .bits = 4, .zero = 1);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 256, 66, 64, -1); })

MOE_EXPORT_FORMAT(tq2_0, .version = 1, .block_len = 256, .block_bytes = 66, .layout = "nib8_tq",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
#endif
