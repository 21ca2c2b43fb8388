/* iq3_xxs: 256 values in 98 bytes, four at a time from a codebook of 256 entries.
 *
 *   0   fp16 d
 *   2   64 index bytes, one per 4 values
 *   66  8 u32, one per 32 values: four 7-bit signs (one per 8 values) and, on top, 4-bit s
 *   y = d * (s + 1/2) / 2 * grid * sign;  grid values 4, 12, 20, 28, 36, 44, 52, 62; the eighth sign makes the
 *   negatives even
 *
 * Produced by llama.cpp-style quantizers. Layout nib8_iq3_xxs, lossless: the grid is even, so
 * y = d / 2 * (2s + 1) * +-grid/2; 98 bytes become 138. Only read. */
#include "grid.h"
enum { BLOCK_BYTES = 98, SUBS = 8 };

MOE_INLINE uint16_t block_scale(const uint8_t *b) { return get16(b); }
MOE_INLINE void group32(uint32_t *word, uint8_t *sub, const uint8_t *b, int p) {
    const uint8_t *q = b + 2 + 8 * p;
    uint32_t s = get32(b + 66 + 4 * p);
    sub[0] = (uint8_t)(2 * (s >> 28) + 1);
    for (int g = 0; g < 4; g++)
        word[g] = grid_iq3_xxs[q[2 * g]] | grid_iq3_xxs[q[2 * g + 1]] << 4 | sign_word(even_signs(s >> 7 * g));
}
#if MOE_TIER_ID == MOE_AVX2
MOE_INLINE void group32_rows8(__m256i *word, __m256i *sub, const uint8_t *b, __m256i row_at, int p) {
    __m256i q[2] = {rows32(b + 2 + 8 * p, row_at), rows32(b + 6 + 8 * p, row_at)}, s = rows32(b + 66 + 4 * p, row_at);
    sub[0] = _mm256_or_si256(_mm256_slli_epi32(_mm256_srli_epi32(s, 28), 1), _mm256_set1_epi32(1));
    for (int g = 0; g < 4; g++) {
        __m256i left = words8(grid_iq3_xxs, field8(q[g / 2], 16 * (g & 1), 8));
        __m256i right = _mm256_slli_epi32(words8(grid_iq3_xxs, field8(q[g / 2], 16 * (g & 1) + 8, 8)), 4);
        word[g] = _mm256_or_si256(_mm256_or_si256(left, right), sign_words8(even_signs8(field8(s, 7 * g, 7)), 0));
    }
}
#endif

#if MOE_TIER_ID == MOE_SCALAR || MOE_TIER_ID == MOE_AVX2
#include "grid_strip.h"
#endif

#if MOE_TIER_ID == MOE_SCALAR
MOE_EXPORT_FORMAT(iq3_xxs, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq3_xxs",
                  .encode_strip = encode_strip, .check_row = check_row);
#elif MOE_TIER_ID == MOE_AVX2
MOE_EXPORT_FORMAT(iq3_xxs, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq3_xxs",
                  .encode_strip = encode_strip);
#elif MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(iq3_xxs, avx2, "a strip is eight rows, which is one AVX2 register per group; the table reads bound it");
#else
#error "iq3_xxs: no codec for this tier; write one or state MOE_FORMAT_SAME_AS with a reason"
#endif
