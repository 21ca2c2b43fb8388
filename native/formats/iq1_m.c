/* iq1_m: 256 values in 56 bytes, eight at a time from the codebook of iq1_s.
 *
 *   0   32 index bytes, one per 8 values
 *   32  16 bytes, a nibble per 8 values, the first in the low half: 3 high index bits, the sign of delta on top
 *   48  4 u16, one per 64 values: four 3-bit s (one per 16 values); their top nibbles, low to high, form fp16 d
 *   y = d * (2s + 1) * (grid +- 1/8)
 *
 * Produced by llama.cpp-style quantizers. Layout nib8_iq1_m, lossless: y = d / 8 * (2s + 1) * (8 grid +- 1), six
 * weights, the sign of delta in bit 3 of the code; 56 bytes become 146. Only read. */
#include "grid.h"
enum { BLOCK_BYTES = 56, SUBS = 16, WORDS_AT = 0, WORDS = 14 };

MOE_INLINE uint16_t block_scale(const uint8_t *b) {
    return (uint16_t)(b[49] >> 4 | (b[51] & 0xf0) | (b[53] & 0xf0) << 4 | (b[55] & 0xf0) << 8);
}
MOE_INLINE void group32(uint32_t *word, uint8_t *sub, const uint8_t *b, int p) {
    uint32_t s = (uint32_t)get16(b + 48 + p / 2 * 2) >> 6 * (p & 1), h = get16(b + 32 + 2 * p);
    sub[0] = (uint8_t)(2 * (s & 7) + 1);
    sub[1] = (uint8_t)(2 * (s >> 3 & 7) + 1);
    for (int g = 0; g < 4; g++) {
        uint32_t n = h >> 4 * g & 15;
        word[g] = grid_iq1[b[4 * p + g] | (n & 7) << 8] | (n >> 3) * 0x88888888u;
    }
}
#if MOE_TIER_ID == MOE_AVX2
MOE_INLINE void group32_rows8(__m256i *word, __m256i *sub, const __m256i *w, int p) {
    const __m256i every = _mm256_set1_epi32((int)0x88888888u);
    const int at = 16 * (p / 2 & 1) + 6 * (p & 1);
    __m256i q = w[p], h = w[8 + p / 2], s = w[12 + p / 4];
    sub[0] = odd8(s, at, 3);
    sub[1] = odd8(s, at + 3, 3);
    for (int g = 0; g < 4; g++) {
        const int bit = 16 * (p & 1) + 4 * g;
        __m256i index = both8(byte8(q, g), moved8(h, bit, 8, 3));
        __m256i delta = _mm256_and_si256(_mm256_srai_epi32(_mm256_slli_epi32(h, 28 - bit), 31), every);
        word[g] = both8(words8(grid_iq1, index), delta);
    }
}
#endif

#if MOE_TIER_ID == MOE_SCALAR || MOE_TIER_ID == MOE_AVX2
#include "grid_strip.h"
#endif

#if MOE_TIER_ID == MOE_SCALAR
MOE_EXPORT_FORMAT(iq1_m, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq1_m",
                  .encode_strip = encode_strip, .check_row = check_row);
#elif MOE_TIER_ID == MOE_AVX2
MOE_EXPORT_FORMAT(iq1_m, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq1_m",
                  .encode_strip = encode_strip);
#elif MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(iq1_m, avx2,
                   "a strip is eight rows, which is one AVX2 register per group; the table reads bound it");
#else
#error "iq1_m: no codec for this tier; write one or state MOE_FORMAT_SAME_AS with a reason"
#endif
