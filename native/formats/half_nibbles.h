/* Codec of a block of 32 in 18 bytes, an fp16 scale and sixteen bytes of nibbles, low ones first: shared by Q4_0 and
 * IQ4_NL, whose codes only mean other values. Absent rows: d = 0, q = 8. */
#ifndef MOE_FORMAT_HALF_NIBBLES_H
#define MOE_FORMAT_HALF_NIBBLES_H
#include "rows8.h"
#if MOE_TIER_ID != MOE_AVX512
struct block { uint8_t d[2]; uint8_t q[16]; };
_Static_assert(sizeof(struct block) == 18, "block of 18 bytes");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    put16(u->scale[0], get16(b->d));
    split_nibbles(u->code, u->code + 16, b->q, 16);
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i t[4];
    dwords4(t, p, stride);
    put_low_half(scales, t[0]);
    put_nib8_block(code, p + 2, stride);
}
static const struct block absent = {.q = {[0 ... 15] = 0x88}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_UNITS(.cols = 32, .block_bytes = 18, .spans = 1, .scale_bytes = 2, .bits = 4, .zero = 8);
}
#endif
#endif
