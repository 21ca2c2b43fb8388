/* iq2_xs: 256 values in 74 bytes, eight at a time from a codebook of 512 entries.
 *
 *   0   fp16 d
 *   2   32 u16, one per 8 values: 9-bit index, 7-bit signs on top
 *   66  8 bytes: 4-bit s per 16 values, the first in the low half
 *   y = d * (s + 1/2) / 4 * grid * sign;  grid values 8, 25, 43; the eighth sign makes the negatives even
 *
 * Produced by llama.cpp-style quantizers. Layout nib8_iq2_s, lossless: y = d / 8 * (2s + 1) * +-grid; 74 bytes become
 * 146. Only read. */
#include "grid.h"
enum { BLOCK_BYTES = 74, SUBS = 16, WORDS_AT = 2, WORDS = 18 };

MOE_INLINE uint16_t block_scale(const uint8_t *b) { return get16(b); }
MOE_INLINE void group32(uint32_t *word, uint8_t *sub, const uint8_t *b, int p) {
    sub[0] = (uint8_t)(2 * (b[66 + p] & 15) + 1);
    sub[1] = (uint8_t)(2 * (b[66 + p] >> 4) + 1);
    for (int g = 0; g < 4; g++) {
        uint32_t q = get16(b + 2 + 8 * p + 2 * g);
        word[g] = grid_iq2_xs[q & 511] | sign_word(even_signs(q >> 9));
    }
}
#if MOE_TIER_ID == MOE_AVX2
MOE_INLINE void group32_rows8(__m256i *word, __m256i *sub, const __m256i *w, int p) {
    __m256i s = w[16 + p / 4];
    sub[0] = odd8(s, 8 * (p & 3), 4);
    sub[1] = odd8(s, 8 * (p & 3) + 4, 4);
    for (int g = 0; g < 4; g += 2) { /* two u16: the seven signs to bytes 1 and 3 */
        __m256i q = w[2 * p + g / 2], signs = _mm256_and_si256(_mm256_srli_epi32(q, 1), _mm256_set1_epi32(0x7f007f00));
        signs = even_signs8(signs);
        word[g] = both8(words8(grid_iq2_xs, field8(q, 0, 9)), sign_words8(signs, 1));
        word[g + 1] = both8(words8(grid_iq2_xs, field8(q, 16, 9)), sign_words8(signs, 3));
    }
}
#endif

#if MOE_TIER_ID == MOE_SCALAR || MOE_TIER_ID == MOE_AVX2
#include "grid_strip.h"
#endif

#if MOE_TIER_ID == MOE_SCALAR
MOE_EXPORT_FORMAT(iq2_xs, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq2_s",
                  .encode_strip = encode_strip, .check_row = check_row);
#elif MOE_TIER_ID == MOE_AVX2
MOE_EXPORT_FORMAT(iq2_xs, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq2_s",
                  .encode_strip = encode_strip);
#elif MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(iq2_xs, avx2,
                   "a strip is eight rows, which is one AVX2 register per group; the table reads bound it");
#else
#error "iq2_xs: no codec for this tier; write one or state MOE_FORMAT_SAME_AS with a reason"
#endif
