/* iq3_s: 256 values in 110 bytes, four at a time from a codebook of 512 entries.
 *
 *   0    fp16 d
 *   2    64 index bytes, one per 4 values
 *   66   8 bytes: ninth index bits, bit j of byte p for values 32p + 4j ..
 *   74   32 sign bytes, one per 8 values
 *   106  4 bytes: 4-bit s per 32 values, the first in the low half
 *   y = d * (1 + 2s) * grid * sign;  grid values 1, 3 .. 15
 *
 * Produced by llama.cpp-style quantizers. Layout nib8_iq3_s, lossless: 110 bytes become 138. Only read. */
#include "grid.h"
enum { BLOCK_BYTES = 110, SUBS = 8, WORDS_AT = 2, WORDS = 27 };

MOE_INLINE uint16_t block_scale(const uint8_t *b) { return get16(b); }
MOE_INLINE void group32(uint32_t *word, uint8_t *sub, const uint8_t *b, int p) {
    const uint8_t *q = b + 2 + 8 * p;
    uint32_t ninth = b[66 + p];
    sub[0] = (uint8_t)(2 * (b[106 + p / 2] >> 4 * (p & 1) & 15) + 1);
    for (int g = 0; g < 4; g++) {
        uint32_t left = grid_iq3_s[q[2 * g] | (ninth >> 2 * g & 1) << 8];
        uint32_t right = grid_iq3_s[q[2 * g + 1] | (ninth >> (2 * g + 1) & 1) << 8];
        word[g] = left | right << 4 | sign_word(b[74 + 4 * p + g]);
    }
}
#if MOE_TIER_ID == MOE_AVX2
MOE_INLINE void group32_rows8(__m256i *word, __m256i *sub, const __m256i *w, int p) {
    __m256i ninth = w[16 + p / 4], signs = w[18 + p];
    sub[0] = odd8(w[26], 4 * p, 4);
    for (int g = 0; g < 4; g++) {
        const int bit = 8 * (p & 3) + 2 * g, byte = 2 * (g & 1);
        __m256i q = w[2 * p + g / 2], left = both8(byte8(q, byte), moved8(ninth, bit, 8, 1));
        __m256i right = words8(grid_iq3_s, both8(byte8(q, byte + 1), moved8(ninth, bit + 1, 8, 1)));
        word[g] = both8(words8(grid_iq3_s, left), _mm256_slli_epi32(right, 4));
        word[g] = both8(word[g], sign_words8(signs, g));
    }
}
#endif

#if MOE_TIER_ID == MOE_SCALAR || MOE_TIER_ID == MOE_AVX2
#include "grid_strip.h"
#endif

#if MOE_TIER_ID == MOE_SCALAR
MOE_EXPORT_FORMAT(iq3_s, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq3_s",
                  .encode_strip = encode_strip, .check_row = check_row);
#elif MOE_TIER_ID == MOE_AVX2
MOE_EXPORT_FORMAT(iq3_s, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq3_s",
                  .encode_strip = encode_strip);
#elif MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(iq3_s, avx2,
                   "a strip is eight rows, which is one AVX2 register per group; the table reads bound it");
#else
#error "iq3_s: no codec for this tier; write one or state MOE_FORMAT_SAME_AS with a reason"
#endif
