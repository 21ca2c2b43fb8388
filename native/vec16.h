/* Sixteen float32 lanes, one definition per tier with identical results: the "16 virtual lanes" of the arithmetic.
 * Element i of a row belongs to lane i mod 16; absent elements of the last group count as +0. Operations are single
 * IEEE-rounded instructions (or exact emulations in the scalar tier), so code written on v16 once gives the same bits
 * on every tier. max/min return the second operand when either is NaN, as x86 does: put the data second. */
#ifndef MOE_VEC16_H
#define MOE_VEC16_H
#include "tier.h"
#define V16_EACH(expr) do { for (int i_ = 0; i_ < 16; i_++) { const int i = i_; expr; } } while (0)

#if MOE_TIER_ID == MOE_SCALAR
typedef struct { float f[16]; } v16;
MOE_INLINE v16 v16_set1(float x) { v16 r; V16_EACH(r.f[i] = x); return r; }
MOE_INLINE v16 v16_load(const float *p) { v16 r; V16_EACH(r.f[i] = p[i]); return r; }
MOE_INLINE void v16_store(float *p, v16 a) { V16_EACH(p[i] = a.f[i]); }
MOE_INLINE v16 v16_load_f16(const uint16_t *p) { v16 r; V16_EACH(r.f[i] = moe_f16_f32(p[i])); return r; }
MOE_INLINE v16 v16_load_bf16(const uint16_t *p) { v16 r; V16_EACH(r.f[i] = moe_bf16_f32(p[i])); return r; }
MOE_INLINE void v16_store_f16(uint16_t *p, v16 a) { V16_EACH(p[i] = moe_f32_f16(a.f[i])); }
MOE_INLINE v16 v16_add(v16 a, v16 b) { V16_EACH(a.f[i] += b.f[i]); return a; }
MOE_INLINE v16 v16_sub(v16 a, v16 b) { V16_EACH(a.f[i] -= b.f[i]); return a; }
MOE_INLINE v16 v16_mul(v16 a, v16 b) { V16_EACH(a.f[i] *= b.f[i]); return a; }
MOE_INLINE v16 v16_div(v16 a, v16 b) { V16_EACH(a.f[i] /= b.f[i]); return a; }
MOE_INLINE v16 v16_max(v16 a, v16 b) { V16_EACH(a.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i]); return a; }
MOE_INLINE v16 v16_min(v16 a, v16 b) { V16_EACH(a.f[i] = a.f[i] < b.f[i] ? a.f[i] : b.f[i]); return a; }
MOE_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { V16_EACH(c.f[i] = moe_fmaf(a.f[i], b.f[i], c.f[i])); return c; }
MOE_INLINE v16 v16_neg(v16 a) { V16_EACH(a.f[i] = moe_bits_f32(moe_f32_bits(a.f[i]) ^ 0x80000000u)); return a; }
MOE_INLINE v16 v16_abs(v16 a) { V16_EACH(a.f[i] = moe_bits_f32(moe_f32_bits(a.f[i]) & 0x7fffffffu)); return a; }
/* a < b ? x : y, lane by lane (false on NaN) */
MOE_INLINE v16 v16_where_lt(v16 a, v16 b, v16 x, v16 y) {
    V16_EACH(x.f[i] = a.f[i] < b.f[i] ? x.f[i] : y.f[i]);
    return x;
}
/* float with bits (bits(t) + 127) << 23: 2^n when t = n + 1.5 * 2^23 */
MOE_INLINE v16 v16_pow2_of_magic(v16 t) {
    V16_EACH(t.f[i] = moe_bits_f32((moe_f32_bits(t.f[i]) + 127u) << 23));
    return t;
}
MOE_INLINE float v16_reduce_add(v16 a) {
    for (int h = 8; h; h /= 2) for (int i = 0; i < h; i++) a.f[i] += a.f[i + h];
    return a.f[0];
}

#elif MOE_TIER_ID == MOE_AVX2
typedef struct { __m256 lo, hi; } v16;
#define V16_2(expr_lo, expr_hi) do { v16 r_; r_.lo = (expr_lo); r_.hi = (expr_hi); return r_; } while (0)
MOE_INLINE v16 v16_set1(float x) { V16_2(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
MOE_INLINE v16 v16_load(const float *p) { V16_2(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
MOE_INLINE void v16_store(float *p, v16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
MOE_INLINE v16 v16_load_f16(const uint16_t *p) {
    V16_2(_mm256_cvtph_ps(_mm_loadu_si128((const void *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p + 8))));
}
MOE_INLINE __m256 v16_bf16_half(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
MOE_INLINE v16 v16_load_bf16(const uint16_t *p) { V16_2(v16_bf16_half(p), v16_bf16_half(p + 8)); }
MOE_INLINE void v16_store_f16(uint16_t *p, v16 a) {
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((void *)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
MOE_INLINE v16 v16_add(v16 a, v16 b) { V16_2(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)); }
MOE_INLINE v16 v16_sub(v16 a, v16 b) { V16_2(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)); }
MOE_INLINE v16 v16_mul(v16 a, v16 b) { V16_2(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)); }
MOE_INLINE v16 v16_div(v16 a, v16 b) { V16_2(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)); }
MOE_INLINE v16 v16_max(v16 a, v16 b) { V16_2(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)); }
MOE_INLINE v16 v16_min(v16 a, v16 b) { V16_2(_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)); }
MOE_INLINE v16 v16_fma(v16 a, v16 b, v16 c) {
    V16_2(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}
MOE_INLINE v16 v16_neg(v16 a) {
    const __m256 s = _mm256_set1_ps(-0.0f);
    V16_2(_mm256_xor_ps(a.lo, s), _mm256_xor_ps(a.hi, s));
}
MOE_INLINE v16 v16_abs(v16 a) {
    const __m256 s = _mm256_set1_ps(-0.0f);
    V16_2(_mm256_andnot_ps(s, a.lo), _mm256_andnot_ps(s, a.hi));
}
MOE_INLINE v16 v16_where_lt(v16 a, v16 b, v16 x, v16 y) {
    V16_2(_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)));
}
MOE_INLINE __m256 v16_pow2_half(__m256 t) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127)), 23));
}
MOE_INLINE v16 v16_pow2_of_magic(v16 t) { V16_2(v16_pow2_half(t.lo), v16_pow2_half(t.hi)); }
MOE_INLINE float v16_reduce_8(__m256 e) { /* lanes i and i + 8 already added */
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
MOE_INLINE float v16_reduce_add(v16 a) { return v16_reduce_8(_mm256_add_ps(a.lo, a.hi)); }

#elif MOE_TIER_ID == MOE_AVX512
typedef __m512 v16;
MOE_INLINE v16 v16_set1(float x) { return _mm512_set1_ps(x); }
MOE_INLINE v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
MOE_INLINE void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
MOE_INLINE v16 v16_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
MOE_INLINE v16 v16_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
MOE_INLINE void v16_store_f16(uint16_t *p, v16 a) {
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
MOE_INLINE v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
MOE_INLINE v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
MOE_INLINE v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
MOE_INLINE v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
MOE_INLINE v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
MOE_INLINE v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
MOE_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
MOE_INLINE v16 v16_neg(v16 a) {
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi32((int)0x80000000u)));
}
MOE_INLINE v16 v16_abs(v16 a) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
}
MOE_INLINE v16 v16_where_lt(v16 a, v16 b, v16 x, v16 y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
MOE_INLINE v16 v16_pow2_of_magic(v16 t) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(127)), 23));
}
MOE_INLINE float v16_reduce_add(v16 a) { /* not _mm512_reduce_add_ps: the order is ours to fix */
    __m256 e = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}

#elif MOE_TIER_ID == MOE_NEON
typedef struct { float32x4_t q[4]; } v16;
#define V16_4(expr) do { v16 r_; for (int j = 0; j < 4; j++) r_.q[j] = (expr); return r_; } while (0)
MOE_INLINE v16 v16_set1(float x) { V16_4(vdupq_n_f32(x)); }
MOE_INLINE v16 v16_load(const float *p) { V16_4(vld1q_f32(p + 4 * j)); }
MOE_INLINE void v16_store(float *p, v16 a) { for (int j = 0; j < 4; j++) vst1q_f32(p + 4 * j, a.q[j]); }
MOE_INLINE v16 v16_load_f16(const uint16_t *p) { V16_4(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * j)))); }
MOE_INLINE v16 v16_load_bf16(const uint16_t *p) { V16_4(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * j), 16))); }
MOE_INLINE void v16_store_f16(uint16_t *p, v16 a) {
    for (int j = 0; j < 4; j++) vst1_u16(p + 4 * j, vreinterpret_u16_f16(vcvt_f16_f32(a.q[j])));
}
MOE_INLINE v16 v16_add(v16 a, v16 b) { V16_4(vaddq_f32(a.q[j], b.q[j])); }
MOE_INLINE v16 v16_sub(v16 a, v16 b) { V16_4(vsubq_f32(a.q[j], b.q[j])); }
MOE_INLINE v16 v16_mul(v16 a, v16 b) { V16_4(vmulq_f32(a.q[j], b.q[j])); }
MOE_INLINE v16 v16_div(v16 a, v16 b) { V16_4(vdivq_f32(a.q[j], b.q[j])); }
MOE_INLINE v16 v16_max(v16 a, v16 b) { V16_4(vbslq_f32(vcgtq_f32(a.q[j], b.q[j]), a.q[j], b.q[j])); }
MOE_INLINE v16 v16_min(v16 a, v16 b) { V16_4(vbslq_f32(vcltq_f32(a.q[j], b.q[j]), a.q[j], b.q[j])); }
MOE_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { V16_4(vfmaq_f32(c.q[j], a.q[j], b.q[j])); }
MOE_INLINE v16 v16_neg(v16 a) { V16_4(vnegq_f32(a.q[j])); }
MOE_INLINE v16 v16_abs(v16 a) { V16_4(vabsq_f32(a.q[j])); }
MOE_INLINE v16 v16_where_lt(v16 a, v16 b, v16 x, v16 y) { V16_4(vbslq_f32(vcltq_f32(a.q[j], b.q[j]), x.q[j], y.q[j])); }
MOE_INLINE v16 v16_pow2_of_magic(v16 t) {
    V16_4(vreinterpretq_f32_u32(vshlq_n_u32(vaddq_u32(vreinterpretq_u32_f32(t.q[j]), vdupq_n_u32(127)), 23)));
}
MOE_INLINE float v16_reduce_add(v16 a) {
    float32x4_t q = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3])); /* 8 apart, then 4 apart */
    float32x2_t h = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(h, 0) + vget_lane_f32(h, 1);
}
#else
#error "vec16.h: this tier needs its own sixteen lanes"
#endif

MOE_INLINE v16 v16_zero(void) { return v16_set1(0.0f); }
/* The first n < 16 elements, the others +0. */
MOE_INLINE v16 v16_load_n(const float *p, int n) {
    float t[16] = {0};
    for (int i = 0; i < n; i++) t[i] = p[i];
    return v16_load(t);
}
MOE_INLINE void v16_store_n(float *p, v16 a, int n) {
    float t[16];
    v16_store(t, a);
    for (int i = 0; i < n; i++) p[i] = t[i];
}
MOE_INLINE float v16_reduce_max(v16 a) { /* NaN wins; order does not matter otherwise */
    float t[16], m;
    v16_store(t, a);
    m = t[0];
    for (int i = 1; i < 16; i++) m = m > t[i] ? m : (m != m ? m : t[i]);
    return m;
}

/* exp to within 2 ulp on [-87.3365, 88.376]; exactly 0 below, saturated above (2.4e38), NaN stays NaN.
 * x = n ln2 + r with ln2 in two parts (Cody and Waite), then a degree 6 polynomial (coefficients: Moshier's Cephes
 * expf). */
MOE_INLINE v16 v16_exp(v16 x) {
    const v16 low = v16_set1(-87.3365402f), magic = v16_set1(12582912.0f), zero = v16_zero();
    v16 c = v16_max(low, v16_min(v16_set1(88.3762589f), x));
    v16 t = v16_fma(c, v16_set1(1.44269502f), magic), n = v16_sub(t, magic);
    v16 r = v16_fma(n, v16_set1(-0.693359375f), c);
    r = v16_fma(n, v16_set1(2.12194440e-4f), r);
    v16 p = v16_set1(1.98756912e-4f);
    p = v16_fma(p, r, v16_set1(1.39819994e-3f));
    p = v16_fma(p, r, v16_set1(8.33345205e-3f));
    p = v16_fma(p, r, v16_set1(4.16657962e-2f));
    p = v16_fma(p, r, v16_set1(0.166666657f));
    p = v16_fma(p, r, v16_set1(0.5f));
    p = v16_fma(v16_mul(r, r), p, r);
    p = v16_mul(v16_add(p, v16_set1(1.0f)), v16_pow2_of_magic(t));
    return v16_where_lt(x, low, zero, p);
}
#endif
