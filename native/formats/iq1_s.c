/* iq1_s: 256 values in 50 bytes, eight at a time from a codebook of 2048 entries of -1, 0, 1.
 *
 *   0   fp16 d
 *   2   32 index bytes, one per 8 values
 *   34  8 u16, one per 32 values: four times 3 high index bits, 3-bit s, the sign of delta in bit 15
 *   y = d * (2s + 1) * (grid +- 1/8)
 *
 * Produced by llama.cpp-style quantizers. Layout nib8_iq1_s, lossless: y = d / 8 * (2s + 1) * (8 grid +- 1), six
 * weights, the sign of delta in bit 3 of the code; 50 bytes become 138. Only read. */
#include "grid.h"
enum { BLOCK_BYTES = 50, SUBS = 8, WORDS_AT = 2, WORDS = 12 };

MOE_INLINE uint16_t block_scale(const uint8_t *b) { return get16(b); }
MOE_INLINE void group32(uint32_t *word, uint8_t *sub, const uint8_t *b, int p) {
    uint32_t h = get16(b + 34 + 2 * p);
    sub[0] = (uint8_t)(2 * (h >> 12 & 7) + 1);
    for (int g = 0; g < 4; g++)
        word[g] = grid_iq1[b[2 + 4 * p + g] | (h >> 3 * g & 7) << 8] | (h >> 15) * 0x88888888u;
}
#if MOE_TIER_ID == MOE_AVX2
MOE_INLINE void group32_rows8(__m256i *word, __m256i *sub, const __m256i *w, int p) {
    const int at = 16 * (p & 1);
    __m256i q = w[p], h = w[8 + p / 2], delta = _mm256_srai_epi32(at ? h : _mm256_slli_epi32(h, 16), 31);
    delta = _mm256_and_si256(delta, _mm256_set1_epi32((int)0x88888888u));
    sub[0] = odd8(h, at + 12, 3);
    for (int g = 0; g < 4; g++) {
        __m256i index = both8(byte8(q, g), moved8(h, at + 3 * g, 8, 3));
        word[g] = both8(words8(grid_iq1, index), delta);
    }
}
#endif

#if MOE_TIER_ID == MOE_SCALAR || MOE_TIER_ID == MOE_AVX2
#include "grid_strip.h"
#endif

#if MOE_TIER_ID == MOE_SCALAR
MOE_EXPORT_FORMAT(iq1_s, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq1_s",
                  .encode_strip = encode_strip, .check_row = check_row);
#elif MOE_TIER_ID == MOE_AVX2
MOE_EXPORT_FORMAT(iq1_s, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq1_s",
                  .encode_strip = encode_strip);
#elif MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(iq1_s, avx2,
                   "a strip is eight rows, which is one AVX2 register per group; the table reads bound it");
#else
#error "iq1_s: no codec for this tier; write one or state MOE_FORMAT_SAME_AS with a reason"
#endif
