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
/* The 32-bit words of eight rows' blocks, lane = row: word k of the lanes is the bytes at `b` + 4k of each row. Four
 * words at a time, the last ones again rather than past the block. A gather takes twice as long. */
MOE_INLINE void rows_to_lanes(__m256i *lanes, const uint8_t *b, size_t row_bytes, int words) {
    for (int k = 0; k < words; k += 4) {
        const int at = k < words - 4 ? k : words - 4;
        __m256i row[4], pair[4];
        for (int r = 0; r < 4; r++) {
            const uint8_t *from = b + 4 * at + (size_t)r * row_bytes;
            __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const void *)from));
            row[r] = _mm256_inserti128_si256(low, _mm_loadu_si128((const void *)(from + 4 * row_bytes)), 1);
        }
        for (int r = 0; r < 4; r += 2) {
            pair[r] = _mm256_unpacklo_epi32(row[r], row[r + 1]);
            pair[r + 1] = _mm256_unpackhi_epi32(row[r], row[r + 1]);
        }
        for (int r = 0; r < 2; r++) {
            lanes[at + 2 * r] = _mm256_unpacklo_epi64(pair[r], pair[r + 2]);
            lanes[at + 2 * r + 1] = _mm256_unpackhi_epi64(pair[r], pair[r + 2]);
        }
    }
}
MOE_INLINE __m256i words8(const uint32_t *grid, __m256i index) {
    return _mm256_i32gather_epi32((const int *)(const void *)grid, index, 4);
}
MOE_INLINE __m256i both8(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }
/* Bits at .. at + bits - 1 of every lane. */
MOE_INLINE __m256i field8(__m256i v, int at, int bits) {
    return _mm256_and_si256(_mm256_srli_epi32(v, at), _mm256_set1_epi32((1 << bits) - 1));
}
/* Byte `byte` of every lane. */
MOE_INLINE __m256i byte8(__m256i v, int byte) {
    const __m256i at = _mm256_setr_epi8(0, -1, -1, -1, 4, -1, -1, -1, 8, -1, -1, -1, 12, -1, -1, -1,
                                        0, -1, -1, -1, 4, -1, -1, -1, 8, -1, -1, -1, 12, -1, -1, -1);
    return _mm256_shuffle_epi8(v, _mm256_add_epi8(at, _mm256_set1_epi32(byte)));
}
/* Bit `from` and the following of every lane at bits `to` .. to + bits - 1, the other bits 0. */
MOE_INLINE __m256i moved8(__m256i v, int from, int to, int bits) {
    v = from < to ? _mm256_slli_epi32(v, to - from) : from > to ? _mm256_srli_epi32(v, from - to) : v;
    return _mm256_and_si256(v, _mm256_set1_epi32(((1 << bits) - 1) << to));
}
/* Odd sub-scales 2s + 1: s is bits at .. at + bits - 1. */
MOE_INLINE __m256i odd8(__m256i v, int at, int bits) { return both8(moved8(v, at, 1, bits), _mm256_set1_epi32(1)); }
/* sign_word of byte `byte` of every lane: of four copies of it byte j keeps bits j and j + 4, and moves up by 3 - j. */
MOE_INLINE __m256i sign_words8(__m256i s, int byte) {
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12,
                                            0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    __m256i copies = _mm256_shuffle_epi8(s, _mm256_add_epi8(spread, _mm256_set1_epi8((char)byte)));
    __m256i v = _mm256_and_si256(copies, _mm256_set1_epi32((int)0x88442211u));
    v = _mm256_add_epi32(v, _mm256_and_si256(copies, _mm256_set1_epi32(0x00440011))); /* bytes 0 and 2, one up */
    return _mm256_mullo_epi16(v, _mm256_set1_epi32(0x00010004));                       /* bytes 0 and 1, two up */
}
/* even_signs of every byte, whose bit 7 is 0. */
MOE_INLINE __m256i even_signs8(__m256i s) {
    const __m256i odd = _mm256_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0,
                                         0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
    __m256i fold = _mm256_and_si256(_mm256_xor_si256(s, _mm256_srli_epi32(s, 4)), _mm256_set1_epi8(15));
    return both8(s, _mm256_shuffle_epi8(odd, fold));
}
/* Four fields of seven bits, one to a byte. */
MOE_INLINE __m256i sevens8(__m256i s) {
    return both8(both8(moved8(s, 0, 0, 7), moved8(s, 7, 8, 7)), both8(moved8(s, 14, 16, 7), moved8(s, 21, 24, 7)));
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
