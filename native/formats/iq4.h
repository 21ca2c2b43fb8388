/* Quantizing 32 weights to the non-linear 4-bit codebook: shared by IQ4_NL and IQ4_XS. */
#ifndef MOE_FORMAT_IQ4_H
#define MOE_FORMAT_IQ4_H
#include "strip.h"
#if MOE_TIER_ID == MOE_SCALAR
static const float iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* Codebook value and index nearest to v (the lower one on a tie), by counting the midpoints below v. */
MOE_INLINE float iq4_nearest(float v) {
    float k = iq4_values[0];
    for (int i = 0; i < 15; i++)
        k += v > 0.5f * (iq4_values[i] + iq4_values[i + 1]) ? iq4_values[i + 1] - iq4_values[i] : 0.0f;
    return k;
}
MOE_INLINE int iq4_code(float v) {
    int q = 0;
    for (int i = 0; i < 15; i++) q += v > 0.5f * (iq4_values[i] + iq4_values[i + 1]);
    return q;
}

struct iq4_fit { float xk, kk; }; /* weighted sums of x * k and k * k: best scale xk / kk, gain xk^2 / kk */
static inline struct iq4_fit iq4_fit32(const float *x, const float *weight, float inverse) {
    float xk[4] = {0}, kk[4] = {0};
    for (int c = 0; c < 32; c += 4)
        for (int j = 0; j < 4; j++) {
            float k = iq4_nearest(x[c + j] * inverse), wk = weight[c + j] * k;
            xk[j] += wk * x[c + j];
            kk[j] += wk * k;
        }
    return (struct iq4_fit){(xk[0] + xk[1]) + (xk[2] + xk[3]), (kk[0] + kk[1]) + (kk[2] + kk[3])};
}

/* Scale of one sub-block: the value of largest magnitude is laid near either end of the codebook, a few placements
 * each; the best weighted fit wins. 0 for an all-zero sub-block. */
static inline float iq4_scale(const float *x, const float *weight) {
    float m = 0, best = 0, scale = 0;
    for (int c = 0; c < 32; c++)
        if (__builtin_fabsf(x[c]) > __builtin_fabsf(m)) m = x[c];
    if (__builtin_fabsf(m) < 1e-30f) return 0;
    for (int end = 0; end < 16; end += 15)
        for (int step = -4; step <= 6; step++) {
            struct iq4_fit f = iq4_fit32(x, weight, iq4_values[end] * (1.0f - 0.03f * (float)step) / m);
            if (f.kk > 0 && f.xk * f.xk > best * f.kk) {
                scale = f.xk / f.kk;
                best = f.xk * scale;
            }
        }
    return scale;
}

/* Weighted squared error of the sub-block at a given scale. */
static inline float iq4_error(const float *x, const float *weight, float scale) {
    float inverse = scale != 0 ? 1.0f / scale : 0, e[4] = {0};
    for (int c = 0; c < 32; c += 4)
        for (int j = 0; j < 4; j++) {
            float r = x[c + j] - scale * iq4_nearest(x[c + j] * inverse);
            e[j] += weight[c + j] * r * r;
        }
    return (e[0] + e[1]) + (e[2] + e[3]);
}
#endif
#endif
