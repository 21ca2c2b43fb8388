/* q2_k: 256 values in 84 bytes.
 *
 *    0  16 bytes, one per 16 values: low nibble sub-scale sc, high nibble minimum mn
 *   16  64 bytes of 2-bit codes: per 128 values 32 bytes, bits 0-1 values 0..31, bits 2-3 values 32..63 ...
 *   80  fp16 d
 *   82  fp16 dmin
 *   y = d * sc * q - dmin * mn
 *
 * Produced by GGUF quantizers. Layout nib8_q2_k, lossless: 84 bytes become 164. */
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q2_k, avx2, ROWS8_REASON);
#else
struct block { uint8_t scales[16]; uint8_t q[64]; uint8_t d[2]; uint8_t dmin[2]; };
_Static_assert(sizeof(struct block) == 84, "q2_k block");

#if MOE_TIER_ID == MOE_SCALAR
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
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i s[4];
    dwords4(s, p + 68, stride);
    put_halves(scales, s[3]);
    dwords4(s, p, stride);
    for (int j = 0; j < 4; j++) {
        put_bytes4(scales + 32 + 32 * j, bits8(s[j], 0, 0x0f));
        put_bytes4(scales + 160 + 32 * j, bits8(s[j], 4, 0x0f));
    }
    for (int part = 0; part < 4; part++) { /* half of the bytes of 128 values: sixteen columns at each shift */
        __m256i q[4];
        dwords4(q, p + 16 + 16 * part, stride);
        for (int j = 0; j < 4; j += 2) put_pairs2(code + 512 * (part / 2) + 64 * (part % 2) + 16 * j, q[j], q[j + 1]);
    }
}
static const struct block absent = {.q = {0}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_SUPERS(.block_bytes = 84, .subs = 16, .min = 1, .bits = 4);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 256, 84, 80, 82); })

MOE_EXPORT_FORMAT(q2_k, .version = 1, .block_len = 256, .block_bytes = 84, .layout = "nib8_q2_k",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
#endif
