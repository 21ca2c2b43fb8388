/* The canonical int8 quantization of floats, shared by the activation quantizer (native/ops/vector.c) and by layouts
 * that scale the activations themselves before they quantize them. d = amax / 127, q = x * (127 / amax), half to
 * even. */
#ifndef MOE_QUANTIZE32_H
#define MOE_QUANTIZE32_H
#include "tier.h"
#include <float.h>

/* largest_32: the largest |x| of 32 through its bit pattern: NaN and infinity are larger than every finite number, so
 * they cannot hide. quantize_32: q = x * inv to the nearest integer, half to even, and its exact sums. No clamp is
 * needed: |x * inv| <= amax * (127 / amax) * (1 + 2^-24)^2 < 127.5. */
#if MOE_TIER_ID == MOE_AVX2 || MOE_TIER_ID == MOE_AVX512
MOE_INLINE int32_t largest_32(const float *x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i m[4];
    for (int i = 0; i < 4; i++) m[i] = _mm256_and_si256(_mm256_loadu_si256((const void *)(x + 8 * i)), mask);
    m[0] = _mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3]));
    __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m[0]), _mm256_extracti128_si256(m[0], 1));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
}
MOE_INLINE void quantize_32(int8_t *q, int16_t *sum16, int32_t *sum32, const float *x, float inv) {
    const __m256 factor = _mm256_set1_ps(inv);
    __m256i t[4];
    for (int i = 0; i < 4; i++) /* rounds as MXCSR says: half to even */
        t[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor));
    __m256i p = _mm256_packs_epi16(_mm256_packs_epi32(t[0], t[1]), _mm256_packs_epi32(t[2], t[3]));
    p = _mm256_permutevar8x32_epi32(p, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); /* packing works per 128-bit half */
    _mm256_storeu_si256((void *)q, p);
    /* Sums of eight bytes after a shift to unsigned; sixteen of them carry 16 * 128 too much. */
    __m256i s = _mm256_sad_epu8(_mm256_xor_si256(p, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    s = _mm256_add_epi64(s, _mm256_shuffle_epi32(s, 0x4e));
    int low = _mm256_extract_epi32(s, 0) - 2048, high = _mm256_extract_epi32(s, 4) - 2048;
    sum16[0] = (int16_t)low;
    sum16[1] = (int16_t)high;
    *sum32 = low + high;
}
#else
static const float MAGIC = 12582912.0f; /* 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer, half to even */

MOE_INLINE int32_t largest_32(const float *x) {
    int32_t top = 0;
    for (int i = 0; i < 32; i++) {
        int32_t a = (int32_t)(moe_f32_bits(x[i]) & 0x7fffffffu);
        top = a > top ? a : top;
    }
    return top;
}
MOE_INLINE void quantize_32(int8_t *q, int16_t *sum16, int32_t *sum32, const float *x, float inv) {
    *sum32 = 0;
    for (int g = 0; g < 2; g++) {
        int32_t t[16], sum = 0;
        for (int i = 0; i < 16; i++) t[i] = (int32_t)(moe_f32_bits(x[16 * g + i] * inv + MAGIC) - 0x4b400000u);
        for (int i = 0; i < 16; i++) q[16 * g + i] = (int8_t)t[i];
        for (int i = 0; i < 16; i++) sum += t[i];
        sum16[g] = (int16_t)sum;
        *sum32 += sum;
    }
}
#endif

MOE_INLINE void quantize_block(int8_t *q, float *d, int16_t *sum16, int32_t *sum32, const float *x, int n) {
    int32_t top = 0;
    for (int g = 0; g < n / 32; g++) {
        int32_t a = largest_32(x + 32 * g);
        top = a > top ? a : top;
    }
    float amax = moe_bits_f32((uint32_t)top), inv = 127.0f / amax;
    if (inv > 0.0f && inv <= FLT_MAX) {
        *d = amax / 127.0f;
        for (int g = 0; g < n / 32; g++) quantize_32(q + 32 * g, sum16 + 2 * g, sum32 + g, x + 32 * g, inv);
        return;
    }
    /* All zero, or so small that 127 / amax overflows: zero. Not finite: the scale says so. */
    *d = amax <= FLT_MAX ? 0.0f : amax / 127.0f;
    for (int i = 0; i < n; i++) q[i] = 0;
    for (int g = 0; g < n / 16; g++) sum16[g] = 0;
    for (int g = 0; g < n / 32; g++) sum32[g] = 0;
}
#endif
