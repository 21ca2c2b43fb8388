/* Quantizing 32 weights as y = scale * q - min with q = 0 .. top and min >= 0: shared by Q4_K and Q5_K. */
#ifndef MOE_FORMAT_AFFINE_H
#define MOE_FORMAT_AFFINE_H
#include "strip.h"
#if MOE_TIER_ID == MOE_SCALAR
struct affine { float scale, min; };

MOE_INLINE float affine_code(float v, int top) { return moe_round_even(v > (float)top ? (float)top : v > 0 ? v : 0); }

/* Large weights count more, small ones still count. */
static inline void affine_weights(float *weight, const float *x) {
    float mean = 0;
    for (int c = 0; c < 32; c++) mean += x[c] * x[c];
    mean = __builtin_sqrtf(mean / 32);
    for (int c = 0; c < 32; c++) weight[c] = mean + __builtin_fabsf(x[c]);
}

/* Weighted squared error of the codes that (scale, min) imply. */
static inline float affine_error(const float *x, const float *weight, struct affine a, int top) {
    float inverse = a.scale > 0 ? 1.0f / a.scale : 0, e[4] = {0};
    for (int c = 0; c < 32; c += 4)
        for (int j = 0; j < 4; j++) {
            float q = affine_code((x[c + j] + a.min) * inverse, top), r = x[c + j] - (a.scale * q - a.min);
            e[j] += weight[c + j] * r * r;
        }
    return (e[0] + e[1]) + (e[2] + e[3]);
}

/* Least-squares (scale, min) for the codes of one placement; min is cut at 0, where scale alone is fitted. */
static inline struct affine affine_solve(const float *x, const float *weight, float inverse, float min, int top) {
    float w = 0, wx = 0, wq = 0, wqq = 0, wxq = 0;
    for (int c = 0; c < 32; c++) {
        float q = affine_code((x[c] + min) * inverse, top), k = weight[c];
        w += k;
        wx += k * x[c];
        wq += k * q;
        wqq += k * q * q;
        wxq += k * q * x[c];
    }
    struct affine a = {0, 0};
    float det = w * wqq - wq * wq;
    if (det > 0) a.scale = (w * wxq - wx * wq) / det, a.min = (wq * wxq - wqq * wx) / det;
    if (!(det > 0) || a.min < 0) a.min = 0, a.scale = wqq > 0 ? wxq / wqq : 0;
    if (a.scale < 0) a.scale = 0;
    return a;
}

static inline struct affine fit_affine(const float *x, int top) {
    float weight[32], low = 0, high = x[0];
    for (int c = 0; c < 32; c++) {
        if (x[c] < low) low = x[c];
        if (x[c] > high) high = x[c];
    }
    struct affine best = {0, -low};
    if (!(high - low > 1e-30f)) return best;
    affine_weights(weight, x);
    best.scale = (high - low) / (float)top;
    float least = affine_error(x, weight, best, top);
    for (int step = 0; step <= 24; step++) {
        float inverse = ((float)top - 1.2f + 0.1f * (float)step) / (high - low);
        struct affine a = affine_solve(x, weight, inverse, -low, top);
        float e = affine_error(x, weight, a, top);
        if (e < least) least = e, best = a;
    }
    return best;
}

/* The pair on the 6-bit grids of d and dmin (neighbours tried), and its codes. */
static inline void refine_affine(uint8_t *sub, uint8_t *min, uint8_t *q, const float *x, struct affine fit, float d,
                                 float dmin, int top) {
    float weight[32], least = 0;
    int first = 1, s0 = d > 0 ? (int)moe_round_even(fit.scale / d) : 0,
        m0 = dmin > 0 ? (int)moe_round_even(fit.min / dmin) : 0;
    struct affine best = {0, 0};
    affine_weights(weight, x);
    *sub = *min = 0;
    for (int s = s0 - 1; s <= s0 + 1; s++)
        for (int m = m0 - 1; m <= m0 + 1; m++) {
            if (s < 0 || s > 63 || m < 0 || m > 63) continue;
            struct affine a = {d * (float)s, dmin * (float)m};
            float e = affine_error(x, weight, a, top);
            if (first || e < least) first = 0, least = e, best = a, *sub = (uint8_t)s, *min = (uint8_t)m;
        }
    float inverse = best.scale > 0 ? 1.0f / best.scale : 0;
    for (int c = 0; c < 32; c++) q[c] = (uint8_t)affine_code((x[c] + best.min) * inverse, top);
}

/* Inverse of unpack_pairs6. */
static inline void pack_pairs6(uint8_t *b, const uint8_t *sub, const uint8_t *min) {
    for (int j = 0; j < 4; j++) {
        b[j] = (uint8_t)(sub[j] | sub[j + 4] >> 4 << 6);
        b[j + 4] = (uint8_t)(min[j] | min[j + 4] >> 4 << 6);
        b[j + 8] = (uint8_t)((sub[j + 4] & 15) | (min[j + 4] & 15) << 4);
    }
}

/* A super-block of 256: codes and the fields in front of them. */
struct affine_super { uint8_t d[2], dmin[2], scales[12]; };
static inline void quantize_affine256(struct affine_super *head, uint8_t *q, const float *x, int top) {
    struct affine fit[8];
    float top_scale = 0, top_min = 0;
    for (int p = 0; p < 8; p++) {
        fit[p] = fit_affine(x + 32 * p, top);
        if (fit[p].scale > top_scale) top_scale = fit[p].scale;
        if (fit[p].min > top_min) top_min = fit[p].min;
    }
    uint16_t d16 = moe_f32_f16(top_scale / 63.0f), dmin16 = moe_f32_f16(top_min / 63.0f);
    const float d = moe_f16_f32(d16), dmin = moe_f16_f32(dmin16);
    uint8_t sub[8], min[8];
    for (int p = 0; p < 8; p++) refine_affine(&sub[p], &min[p], q + 32 * p, x + 32 * p, fit[p], d, dmin, top);
    put16(head->d, d16);
    put16(head->dmin, dmin16);
    pack_pairs6(head->scales, sub, min);
}
/* Per 64 values 32 bytes: low nibbles the first half, high nibbles the second. */
static inline void put_nibbles256(uint8_t *out, const uint8_t *q) {
    for (int g = 0; g < 4; g++)
        for (int l = 0; l < 32; l++) out[32 * g + l] = (uint8_t)((q[64 * g + l] & 15) | q[64 * g + 32 + l] << 4);
}
#endif
#endif
