/* Rows of the iq3_xxs codebook: shared by iq3_xxs and e8_iq3, whose blocks hold the same fields at other places. The
 * including file has defined INDEX_AT and SIGNS_AT. */
#ifndef MOE_FORMAT_IQ3_XXS_H
#define MOE_FORMAT_IQ3_XXS_H
#include "grid.h"
MOE_INLINE void group32(uint32_t *word, uint8_t *sub, const uint8_t *b, int p) {
    const uint8_t *q = b + INDEX_AT + 8 * p;
    uint32_t s = get32(b + SIGNS_AT + 4 * p);
    sub[0] = (uint8_t)(2 * (s >> 28) + 1);
    for (int g = 0; g < 4; g++)
        word[g] = grid_iq3_xxs[q[2 * g]] | grid_iq3_xxs[q[2 * g + 1]] << 4 | sign_word(even_signs(s >> 7 * g));
}
#if MOE_TIER_ID == MOE_AVX2
MOE_INLINE void group32_rows8(__m256i *word, __m256i *sub, const uint8_t *b, __m256i row_at, int p) {
    const uint8_t *index = b + INDEX_AT + 8 * p;
    __m256i q[2] = {rows32(index, row_at), rows32(index + 4, row_at)}, s = rows32(b + SIGNS_AT + 4 * p, row_at);
    sub[0] = _mm256_or_si256(_mm256_slli_epi32(_mm256_srli_epi32(s, 28), 1), _mm256_set1_epi32(1));
    for (int g = 0; g < 4; g++) {
        __m256i left = words8(grid_iq3_xxs, field8(q[g / 2], 16 * (g & 1), 8));
        __m256i right = _mm256_slli_epi32(words8(grid_iq3_xxs, field8(q[g / 2], 16 * (g & 1) + 8, 8)), 4);
        word[g] = _mm256_or_si256(_mm256_or_si256(left, right), sign_words8(even_signs8(field8(s, 7 * g, 7)), 0));
    }
}
#endif
#endif
