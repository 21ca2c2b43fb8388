/* Helpers of the codecs that fill eight-row strips (native/layouts/strip8.h has the geometry). */
#ifndef MOE_FORMAT_STRIP_H
#define MOE_FORMAT_STRIP_H
#include "tier.h"

MOE_INLINE uint16_t get16(const uint8_t *p) { uint16_t v; __builtin_memcpy(&v, p, 2); return v; }
MOE_INLINE uint32_t get32(const uint8_t *p) { uint32_t v; __builtin_memcpy(&v, p, 4); return v; }
MOE_INLINE void put16(uint8_t *p, uint16_t v) { __builtin_memcpy(p, &v, 2); }
MOE_INLINE void put32(uint8_t *p, uint32_t v) { __builtin_memcpy(p, &v, 4); }
MOE_INLINE int finite16(uint16_t h) { return (h & 0x7c00) != 0x7c00; }

/* Sixteen bytes "low nibbles are elements 0..15, high nibbles 16..31" of row r into 128 code bytes of nib8: group g
 * takes columns 8g..8g+3 as low and 8g+4..8g+7 as high nibbles. */
MOE_INLINE void put_nib8(uint8_t *code, int r, const uint8_t *q) {
    for (int h = 0; h < 2; h++) { /* eight source bytes: columns 8h.. (low) and 16 + 8h.. (high) */
        uint32_t a = get32(q + 8 * h), b = get32(q + 8 * h + 4);
        put32(code + 32 * h + 4 * r, (a & 0x0f0f0f0f) | (b & 0x0f0f0f0f) << 4);
        put32(code + 32 * (h + 2) + 4 * r, (a >> 4 & 0x0f0f0f0f) | (b & 0xf0f0f0f0));
    }
}

/* The same for all eight rows. */
MOE_INLINE void put_nib8_rows(uint8_t *code, const uint8_t *const q[8]) {
#if MOE_TIER_ID == MOE_AVX2 || MOE_TIER_ID == MOE_AVX512
    const __m128i low = _mm_set1_epi8(15);
    for (int half = 0; half < 8; half += 4) {
        __m128 g[4]; /* one row each: its four bytes of groups 0..3, then transposed to one group of four rows */
        for (int j = 0; j < 4; j++) {
            __m128i v = _mm_loadu_si128((const void *)q[half + j]);
            __m128i a = _mm_and_si128(v, low), b = _mm_and_si128(_mm_srli_epi16(v, 4), low);
            a = _mm_or_si128(a, _mm_srli_epi64(a, 28)); /* the upper four bytes of eight become the high nibbles */
            b = _mm_or_si128(b, _mm_srli_epi64(b, 28));
            g[j] = _mm_shuffle_ps(_mm_castsi128_ps(a), _mm_castsi128_ps(b), _MM_SHUFFLE(2, 0, 2, 0));
        }
        _MM_TRANSPOSE4_PS(g[0], g[1], g[2], g[3]);
        for (int j = 0; j < 4; j++) _mm_storeu_ps((float *)(void *)(code + 32 * j + 4 * half), g[j]);
    }
#else
    for (int r = 0; r < 8; r++) put_nib8(code, r, q[r]);
#endif
}
MOE_INLINE void clear(uint8_t *p, size_t n) { for (size_t i = 0; i < n; i++) p[i] = 0; }
#endif
