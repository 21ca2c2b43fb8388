/* iq2_xxs: 256 values in 66 bytes, eight at a time from a codebook of 256 entries.
 *
 *   0  fp16 d
 *   2  8 times, per 32 values: 4 index bytes, then a u32 of four 7-bit signs (one per 8 values) and, on top, 4-bit s
 *   y = d * (s + 1/2) / 4 * grid * sign;  grid values 8, 25, 43; the eighth sign makes the negatives even
 *
 * Produced by llama.cpp-style quantizers. Layout nib8_iq2_xxs, lossless: y = d / 8 * (2s + 1) * +-grid; 66 bytes become
 * 138. Only read. */
#include "grid.h"
enum { BLOCK_BYTES = 66, SUBS = 8, WORDS_AT = 2, WORDS = 16 };

MOE_INLINE uint16_t block_scale(const uint8_t *b) { return get16(b); }
MOE_INLINE void group32(uint32_t *word, uint8_t *sub, const uint8_t *b, int p) {
    const uint8_t *q = b + 2 + 8 * p;
    uint32_t s = get32(q + 4);
    sub[0] = (uint8_t)(2 * (s >> 28) + 1);
    for (int g = 0; g < 4; g++) word[g] = grid_iq2_xxs[q[g]] | sign_word(even_signs(s >> 7 * g));
}
#if MOE_TIER_ID == MOE_AVX2
MOE_INLINE void group32_rows8(__m256i *word, __m256i *sub, const __m256i *w, int p) {
    __m256i q = w[2 * p], s = w[2 * p + 1], signs = even_signs8(sevens8(s));
    sub[0] = odd8(s, 28, 4);
    for (int g = 0; g < 4; g++) word[g] = both8(words8(grid_iq2_xxs, byte8(q, g)), sign_words8(signs, g));
}
#endif

#if MOE_TIER_ID == MOE_SCALAR || MOE_TIER_ID == MOE_AVX2
#include "grid_strip.h"
#endif

#if MOE_TIER_ID == MOE_SCALAR
MOE_EXPORT_FORMAT(iq2_xxs, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq2_xxs",
                  .encode_strip = encode_strip, .check_row = check_row);
#elif MOE_TIER_ID == MOE_AVX2
MOE_EXPORT_FORMAT(iq2_xxs, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq2_xxs",
                  .encode_strip = encode_strip);
#elif MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(iq2_xxs, avx2,
                   "a strip is eight rows, which is one AVX2 register per group; the table reads bound it");
#else
#error "iq2_xxs: no codec for this tier; write one or state MOE_FORMAT_SAME_AS with a reason"
#endif
