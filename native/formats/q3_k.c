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
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q3_k, avx2, ROWS8_REASON);
#else
struct block { uint8_t high[32]; uint8_t q[64]; uint8_t scales[12]; uint8_t d[2]; };
_Static_assert(sizeof(struct block) == 110, "q3_k block");

#if MOE_TIER_ID == MOE_SCALAR
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
#else
/* Eight columns of each of four blocks of 32: codes of two bits at shift 2k with bit at + k of `third`, k = 0..3. */
MOE_INLINE void put_pairs3(uint8_t *code, const __m256i *q, const __m256i *third, int at) {
    __m256i even[2], odd[2];
    for (int j = 0; j < 2; j++) {
        __m256i t = third[j];
        even[j] = or3(bits8(q[j], 0, 0x33), bits8(t, at - 2, 0x04), bits8(t, at - 4, 0x40));
        odd[j] = or3(bits8(q[j], 2, 0x33), bits8(t, at - 1, 0x04), bits8(t, at - 3, 0x40));
    }
    put_nibble_pair(code, code + 256, even[0], even[1]);
    put_nibble_pair(code + 128, code + 384, odd[0], odd[1]);
}
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i s[4], sub[4];
    dwords4(s, p + 94, stride);
    put_high_half(scales, s[3]);
    dwords4(s, p + 92, stride); /* the sub-scales are [1], [2] and [3] */
    for (int j = 0; j < 4; j++) {
        sub[j] = _mm256_or_si256(bits8(s[1 + j % 2], j / 2 * 4, 0x0f), bits8(s[3], 2 * j - 4, 0x30));
        put_bytes4(scales + 16 + 32 * j, _mm256_sub_epi8(sub[j], _mm256_set1_epi8(32)));
    }
    for (int part = 0; part < 2; part++) { /* half of the bytes of third bits, for both halves of the values */
        __m256i third[4], q[4];
        dwords4(third, p + 16 * part, stride);
        for (int half = 0; half < 2; half++) {
            dwords4(q, p + 32 + 32 * half + 16 * part, stride);
            for (int j = 0; j < 4; j += 2)
                put_pairs3(code + 512 * half + 64 * part + 16 * j, q + j, third + j, 4 * half);
        }
    }
}
static const struct block absent = {.high = {[0 ... 31] = 0xff}, .scales = {[8 ... 11] = 0xaa}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_SUPERS(.block_bytes = 110, .subs = 16, .bits = 4, .zero = 4);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 256, 110, 108, -1); })

MOE_EXPORT_FORMAT(q3_k, .version = 1, .block_len = 256, .block_bytes = 110, .layout = "nib8_q3_k",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
#endif
