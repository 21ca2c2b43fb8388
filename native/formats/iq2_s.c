/* iq2_s: 256 values in 82 bytes, eight at a time from a codebook of 1024 entries.
 *
 *   0   fp16 d
 *   2   32 index bytes, one per 8 values
 *   34  32 sign bytes, one per 8 values
 *   66  8 bytes: two high index bits per 8 values, the first in the low bits
 *   74  8 bytes: 4-bit s per 16 values, the first in the low half
 *   y = d * (s + 1/2) / 4 * grid * sign;  grid values 8, 25, 43
 *
 * Produced by llama.cpp-style quantizers. Layout nib8_iq2_s, lossless: y = d / 8 * (2s + 1) * +-grid; 82 bytes become
 * 146. Only read. */
#include "grid.h"
enum { BLOCK_BYTES = 82, SUBS = 16, WORDS_AT = 2, WORDS = 20 };

MOE_INLINE uint16_t block_scale(const uint8_t *b) { return get16(b); }
MOE_INLINE void group32(uint32_t *word, uint8_t *sub, const uint8_t *b, int p) {
    sub[0] = (uint8_t)(2 * (b[74 + p] & 15) + 1);
    sub[1] = (uint8_t)(2 * (b[74 + p] >> 4) + 1);
    for (int g = 0; g < 4; g++) {
        uint32_t high = b[66 + p] >> 2 * g & 3u;
        word[g] = grid_iq2_s[b[2 + 4 * p + g] | high << 8] | sign_word(b[34 + 4 * p + g]);
    }
}
#if MOE_TIER_ID == MOE_AVX2
MOE_INLINE void group32_rows8(__m256i *word, __m256i *sub, const __m256i *w, int p) {
    __m256i q = w[p], signs = w[8 + p], high = w[16 + p / 4], s = w[18 + p / 4];
    sub[0] = odd8(s, 8 * (p & 3), 4);
    sub[1] = odd8(s, 8 * (p & 3) + 4, 4);
    for (int g = 0; g < 4; g++) {
        __m256i index = both8(byte8(q, g), moved8(high, 8 * (p & 3) + 2 * g, 8, 2));
        word[g] = both8(words8(grid_iq2_s, index), sign_words8(signs, g));
    }
}
#endif

#if MOE_TIER_ID == MOE_SCALAR || MOE_TIER_ID == MOE_AVX2
#include "grid_strip.h"
#endif

#if MOE_TIER_ID == MOE_SCALAR
MOE_EXPORT_FORMAT(iq2_s, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq2_s",
                  .encode_strip = encode_strip, .check_row = check_row);
#elif MOE_TIER_ID == MOE_AVX2
MOE_EXPORT_FORMAT(iq2_s, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq2_s",
                  .encode_strip = encode_strip);
#elif MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(iq2_s, avx2,
                   "a strip is eight rows, which is one AVX2 register per group; the table reads bound it");
#else
#error "iq2_s: no codec for this tier; write one or state MOE_FORMAT_SAME_AS with a reason"
#endif
