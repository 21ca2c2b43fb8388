/* Rotation of activations and weight rows by an orthogonal matrix (format e8_iq3; engine/formats/_rotation.py is the
 * definition).
 *
 * A row is tiled by powers of two: the lowest set bit of what is left, at most 32768, from column 0 on (6144 = 2048 +
 * 4096). A tile of n values: signs flipped by pseudo-random bits, Walsh-Hadamard butterflies (a + b, a - b) at distance
 * 1, 2, 4 .. n / 2, then one multiply by 1 / sqrt(n) rounded to float32. Every value of a stage is one rounded addition
 * of two values of the stage before, so any order inside a stage gives the same bits on every tier.
 *
 * Needs rows of multiples of 256, as its users do anyway. Included by tiered files. */
#ifndef MOE_ROTATION_H
#define MOE_ROTATION_H
#include "vec16.h"

enum { ROTATION_MAX = 32768, ROTATION_MIN = 256, ROTATION_SIGN_BYTES = 2 * ROTATION_MAX / 8 };

/* Length of the tile at the start of `cols` remaining columns. */
MOE_INLINE int rotation_length(int cols) {
    int n = cols & -cols;
    return n < ROTATION_MAX ? n : ROTATION_MAX;
}

/* Bit i (bit i & 7 of byte i >> 3) tells whether value i changes sign: xorshift64*, top byte of each draw. */
static inline void rotation_make_signs(uint8_t *bits, int n) {
    uint64_t state = 417 + (uint64_t)n;
    for (int i = 0; i < n / 8; i++) {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        bits[i] = (uint8_t)(state * 2685821657736338717u >> 56);
    }
}

/* 1 / sqrt(n): 2^(-k/2), where 1 / sqrt(2) is rounded once. */
MOE_INLINE float rotation_scale(int n) {
    float s = 1.0f;
    for (; n >= 4; n /= 4) s *= 0.5f;
    return n == 2 ? s * 0.70710678118654752440f : s;
}

/* Signs and the stages of distance 1 .. 8 of 256 values. They are transposed as 16 x 16 so that a stage works on whole
 * vectors. */
static inline void rotation_first_stages(float *y, const float *x, const uint8_t *signs) {
    float t[16][16];
    v16 v[16];
    for (int r = 0; r < 16; r++) {
        uint32_t flips = (uint32_t)signs[2 * r] | (uint32_t)signs[2 * r + 1] << 8;
        for (int c = 0; c < 16; c++) t[c][r] = moe_bits_f32(moe_f32_bits(x[16 * r + c]) ^ (flips >> c & 1) << 31);
    }
    for (int c = 0; c < 16; c++) v[c] = v16_load(t[c]);
    for (int h = 1; h < 16; h *= 2)
        for (int c = 0; c < 16; c++) {
            if (c & h) continue;
            v16 a = v[c], b = v[c + h];
            v[c] = v16_add(a, b);
            v[c + h] = v16_sub(a, b);
        }
    for (int c = 0; c < 16; c++) v16_store(t[c], v[c]);
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 16; c++) y[16 * r + c] = t[c][r];
}

/* One tile of n = 2^k >= 256 values; y is not x. */
static inline void rotation_tile(float *y, const float *x, int n, const uint8_t *signs) {
    for (int i = 0; i < n; i += 256) rotation_first_stages(y + i, x + i, signs + i / 8);
    for (int h = 16; h < n; h *= 2)
        for (int base = 0; base < n; base += 2 * h)
            for (int i = base; i < base + h; i += 16) {
                v16 a = v16_load(y + i), b = v16_load(y + i + h);
                v16_store(y + i, v16_add(a, b));
                v16_store(y + i + h, v16_sub(a, b));
            }
    const v16 scale = v16_set1(rotation_scale(n));
    for (int i = 0; i < n; i += 16) v16_store(y + i, v16_mul(v16_load(y + i), scale));
}
#endif
