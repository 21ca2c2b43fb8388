/* Helpers of the grid formats (iq1_*, iq2_*, iq3_*, e8_iq3): blocks of 256 whose weights come eight at a time as an
 * index into a codebook and signs. grids.h holds the codebooks as nib8 code words (low nibbles columns 8g..8g+3 of a
 * group, high nibbles 8g+4..8g+7), so a group of eight columns is one word: grid | signs.
 *
 * A code is magnitude | sign << 3; the layout's table holds the signed weights. AVX2 does the same group of all eight
 * rows of a strip at once, one row per 32-bit lane, which is how a strip wants them stored. */
#ifndef MOE_FORMAT_GRID_H
#define MOE_FORMAT_GRID_H
#include "grids.h"
#include "strip.h"

/* Sign bits of eight columns to the top bits of their nibbles. The products hold shifted copies of four bits that do
 * not overlap: bit j of the nibble lands in bit 8j + 3 or 8j + 7. */
MOE_INLINE uint32_t sign_word(uint32_t s) {
    return ((s & 15) * 0x01020408u & 0x08080808u) | ((s >> 4 & 15) * 0x10204080u & 0x80808080u);
}
/* Seven stored signs; the eighth makes the number of negatives even. */
MOE_INLINE uint32_t even_signs(uint32_t s) {
    s &= 127;
    return s | (uint32_t)__builtin_parity(s) << 7;
}

#if MOE_TIER_ID == MOE_AVX2
/* The same 32-bit field of eight rows. */
MOE_INLINE __m256i rows32(const uint8_t *p, __m256i row_at) { return _mm256_i32gather_epi32((const int *)(const void *)p, row_at, 1); }
MOE_INLINE __m256i words8(const uint32_t *grid, __m256i index) { return _mm256_i32gather_epi32((const int *)(const void *)grid, index, 4); }
/* Bits at .. at + bits - 1 of every lane. */
MOE_INLINE __m256i field8(__m256i v, int at, int bits) {
    return _mm256_and_si256(_mm256_srli_epi32(v, at), _mm256_set1_epi32((1 << bits) - 1));
}
/* sign_word of byte `byte` of every lane. */
MOE_INLINE __m256i sign_words8(__m256i s, int byte) {
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12,
                                            0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    const __m256i low = _mm256_set1_epi32(0x08040201), high = _mm256_set1_epi32((int)0x80402010u);
    __m256i b = _mm256_shuffle_epi8(s, _mm256_add_epi8(spread, _mm256_set1_epi8((char)byte)));
    __m256i l = _mm256_cmpeq_epi8(_mm256_and_si256(b, low), low), h = _mm256_cmpeq_epi8(_mm256_and_si256(b, high), high);
    return _mm256_or_si256(_mm256_and_si256(l, _mm256_set1_epi8(0x08)), _mm256_and_si256(h, _mm256_set1_epi8((char)0x80)));
}
/* even_signs of lanes that hold seven bits. */
MOE_INLINE __m256i even_signs8(__m256i s) {
    const __m256i odd = _mm256_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0,
                                         0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
    __m256i fold = _mm256_and_si256(_mm256_xor_si256(s, _mm256_srli_epi32(s, 4)), _mm256_set1_epi32(15));
    return _mm256_or_si256(s, _mm256_and_si256(_mm256_shuffle_epi8(odd, fold), _mm256_set1_epi32(128)));
}
/* The low byte of every lane. */
MOE_INLINE void put_bytes8(uint8_t *p, __m256i v) {
    const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                          0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i b = _mm256_shuffle_epi8(v, pick);
    _mm_storel_epi64((void *)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1)));
}
#endif
#endif
