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
MOE_INLINE void group32_rows8(__m256i *word, __m256i *sub, const __m256i *w, int p) {
    __m256i s = w[16 + p], signs = even_signs8(sevens8(s));
    sub[0] = odd8(s, 28, 4);
    for (int g = 0; g < 4; g++) {
        __m256i q = w[2 * p + g / 2], right = words8(grid_iq3_xxs, byte8(q, 2 * (g & 1) + 1));
        word[g] = both8(words8(grid_iq3_xxs, byte8(q, 2 * (g & 1))), _mm256_slli_epi32(right, 4));
        word[g] = both8(word[g], sign_words8(signs, g));
    }
}
#endif
#endif
