/* Quantizing 32 values with one scale, byte for byte what gguf.quants does: shared by Q4_0, Q5_0, Q4_1 and Q5_1. */
#ifndef MOE_FORMAT_BLOCK32_H
#define MOE_FORMAT_BLOCK32_H
#include "strip.h"
#if MOE_TIER_ID == MOE_SCALAR

/* trunc(v) at most `top`; 0 where 1 / d overflowed. */
MOE_INLINE uint8_t code32(float v, int top) {
    return (uint8_t)(v < (float)(top + 1) ? (v > 0 ? (int)v : 0) : v < (float)(top + 2) ? top : 0);
}

/* Codes 0 .. 2 * half - 1 of x / d + half; d = m / -half, m the value of largest magnitude, the first of several. */
static inline float quantize_symmetric32(uint8_t *q, const float *x, int half) {
    float m = x[0];
    for (int c = 1; c < 32; c++)
        if (!(__builtin_fabsf(x[c]) <= __builtin_fabsf(m)) && m == m) m = x[c]; /* NaN wins, so that it shows in d */
    float d = m / (float)-half, inverse = d == 0 ? 0 : 1.0f / d;
    for (int c = 0; c < 32; c++) q[c] = code32(x[c] * inverse + ((float)half + 0.5f), 2 * half - 1);
    return d;
}

/* Codes 0 .. top of (x - min) / d, d = (max - min) / top. */
static inline float quantize_affine32(uint8_t *q, float *min, const float *x, int top) {
    float low = x[0], high = x[0];
    for (int c = 1; c < 32; c++) { /* NaN wins, so that it shows in d and m */
        if (!(x[c] >= low) && low == low) low = x[c];
        if (!(x[c] <= high) && high == high) high = x[c];
    }
    float d = (high - low) / (float)top, inverse = d == 0 ? 0 : 1.0f / d;
    for (int c = 0; c < 32; c++) q[c] = code32((x[c] - low) * inverse + 0.5f, top);
    *min = low;
    return d;
}

/* Low nibbles of 0..15, high nibbles of 16..31; the fifth bits, bit j of element j. */
static inline void put_nibbles32(uint8_t *out, const uint8_t *q) {
    for (int c = 0; c < 16; c++) out[c] = (uint8_t)((q[c] & 15) | q[c + 16] << 4);
}
static inline uint32_t fifth_bits32(const uint8_t *q) {
    uint32_t fifth = 0;
    for (int c = 0; c < 32; c++) fifth |= (uint32_t)(q[c] >> 4) << c;
    return fifth;
}
#endif
#endif
