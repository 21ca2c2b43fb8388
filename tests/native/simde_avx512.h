/* AVX-512 intrinsics for CPUs without AVX-512: SIMDe (written against Debian's libsimde-dev 0.7.4) plus the ones that
 * it lacks or gets wrong, on AVX2 halves or as plain loops from the instruction's definition. Included by native/tier.h
 * for the tier avx512_emu, in test builds only. An intrinsic that is missing here does not compile ("target specific
 * option mismatch"): add it below. Right results only; never measure speed on it. */
#ifndef SIMDE_AVX512_H
#define SIMDE_AVX512_H
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#include <string.h>
#define EMU         static inline __attribute__((always_inline, unused))
#define EMU_EACH(n) for (int i = 0; i < (n); i++)

/* ---- halves ---- */
EMU __m256i emu_half(__m512i a, int k) { __m256i h[2]; memcpy(h, &a, 64); return h[k]; }
EMU __m256 emu_half_ps(__m512 a, int k) { __m256 h[2]; memcpy(h, &a, 64); return h[k]; }
EMU __m512i emu_join(__m256i lo, __m256i hi) { __m256i h[2] = {lo, hi}; __m512i r; memcpy(&r, h, 64); return r; }
EMU __m512 emu_join_ps(__m256 lo, __m256 hi) { __m256 h[2] = {lo, hi}; __m512 r; memcpy(&r, h, 64); return r; }
EMU __m512 emu_extend_ps(__m256 a) { return emu_join_ps(a, _mm256_setzero_ps()); }
EMU __m128i emu_low(__m256i a) { return _mm256_castsi256_si128(a); }
EMU __m128i emu_high(__m256i a) { return _mm256_extracti128_si256(a, 1); }

/* ---- widening, narrowing, conversion ---- */
EMU __m512i emu_cvtepu8_epi16(__m256i a) {
    return emu_join(_mm256_cvtepu8_epi16(emu_low(a)), _mm256_cvtepu8_epi16(emu_high(a)));
}
EMU __m512i emu_cvtepu16_epi32(__m256i a) {
    return emu_join(_mm256_cvtepu16_epi32(emu_low(a)), _mm256_cvtepu16_epi32(emu_high(a)));
}
EMU __m512i emu_cvtepi16_epi32(__m256i a) {
    return emu_join(_mm256_cvtepi16_epi32(emu_low(a)), _mm256_cvtepi16_epi32(emu_high(a)));
}
EMU __m512i emu_cvtepi8_epi32(__m128i a) {
    return emu_join(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
}
EMU __m512i emu_cvtepu8_epi32(__m128i a) {
    return emu_join(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8)));
}
EMU __m512i emu_cvtepu8_epi64(__m128i a) {
    return emu_join(_mm256_cvtepu8_epi64(a), _mm256_cvtepu8_epi64(_mm_srli_si128(a, 4)));
}
EMU __m512 emu_cvtepi32_ps(__m512i a) {
    return emu_join_ps(_mm256_cvtepi32_ps(emu_half(a, 0)), _mm256_cvtepi32_ps(emu_half(a, 1)));
}
EMU __m512i emu_cvtps_epi32(__m512 a) {
    return emu_join(_mm256_cvtps_epi32(emu_half_ps(a, 0)), _mm256_cvtps_epi32(emu_half_ps(a, 1)));
}
EMU __m512i emu_cvttps_epi32(__m512 a) {
    return emu_join(_mm256_cvttps_epi32(emu_half_ps(a, 0)), _mm256_cvttps_epi32(emu_half_ps(a, 1)));
}
EMU __m512 emu_cvtph_ps(__m256i a) { return emu_join_ps(_mm256_cvtph_ps(emu_low(a)), _mm256_cvtph_ps(emu_high(a))); }
/* the rounding operand must be a constant, hence a macro: as the hardware's, it holds in both halves */
#define emu_cvtps_ph(a, rounding)                                        \
    _mm256_set_m128i(_mm256_cvtps_ph(emu_half_ps(a, 1), (rounding) & 7), \
                     _mm256_cvtps_ph(emu_half_ps(a, 0), (rounding) & 7))
EMU __m128i emu_cvtepi32_epi8(__m512i a) {
    uint32_t x[16];
    uint8_t o[16];
    __m128i r;
    memcpy(x, &a, 64);
    EMU_EACH(16) o[i] = (uint8_t)x[i];
    memcpy(&r, o, 16);
    return r;
}
EMU __m256i emu_cvtepi32_epi16(__m512i a) {
    uint32_t x[16];
    uint16_t o[16];
    __m256i r;
    memcpy(x, &a, 64);
    EMU_EACH(16) o[i] = (uint16_t)x[i];
    memcpy(&r, o, 32);
    return r;
}

/* ---- moving lanes ---- */
EMU __m512i emu_broadcast_i32x8(__m256i a) { return emu_join(a, a); }
EMU __m512i emu_zextsi256_si512(__m256i a) { return emu_join(a, _mm256_setzero_si256()); }
EMU __m512 emu_insertf32x8(__m512 a, __m256 b, int k) {
    return k ? emu_join_ps(emu_half_ps(a, 0), b) : emu_join_ps(b, emu_half_ps(a, 1));
}
#define emu_shuffle_epi32(a, control) \
    emu_join(_mm256_shuffle_epi32(emu_half(a, 0), control), _mm256_shuffle_epi32(emu_half(a, 1), control))
#define emu_permutex_epi64(a, control) \
    emu_join(_mm256_permute4x64_epi64(emu_half(a, 0), control), _mm256_permute4x64_epi64(emu_half(a, 1), control))
#define emu_alignr_epi8(a, b, n)                                    \
    emu_join(_mm256_alignr_epi8(emu_half(a, 0), emu_half(b, 0), n), \
             _mm256_alignr_epi8(emu_half(a, 1), emu_half(b, 1), n))
#define emu_bslli_epi128(a, n) emu_join(_mm256_slli_si256(emu_half(a, 0), n), _mm256_slli_si256(emu_half(a, 1), n))
#define emu_bsrli_epi128(a, n) emu_join(_mm256_srli_si256(emu_half(a, 0), n), _mm256_srli_si256(emu_half(a, 1), n))
EMU __m512 emu_shuffle_f32x4(__m512 a, __m512 b, int control) {
    __m128 x[4], y[4], o[4];
    __m512 r;
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    EMU_EACH(4) o[i] = i < 2 ? x[control >> 2 * i & 3] : y[control >> 2 * i & 3];
    memcpy(&r, o, 64);
    return r;
}
EMU __m512i emu_i32gather_epi32(__m512i index, const void *base, int scale) {
    int32_t x[16], o[16];
    __m512i r;
    memcpy(x, &index, 64);
    EMU_EACH(16) memcpy(&o[i], (const char *)base + (long)x[i] * scale, 4);
    memcpy(&r, o, 64);
    return r;
}
EMU __m512 emu_i32gather_ps(__m512i index, const void *base, int scale) {
    __m512i bits = emu_i32gather_epi32(index, base, scale);
    __m512 r;
    memcpy(&r, &bits, 64);
    return r;
}

/* ---- shifts ---- */
#define emu_srai_epi32(a, n) emu_join(_mm256_srai_epi32(emu_half(a, 0), n), _mm256_srai_epi32(emu_half(a, 1), n))
EMU __m512i emu_srav_epi32(__m512i a, __m512i n) {
    return emu_join(_mm256_srav_epi32(emu_half(a, 0), emu_half(n, 0)),
                    _mm256_srav_epi32(emu_half(a, 1), emu_half(n, 1)));
}

/* ---- masks, masked memory ---- */
EMU __mmask64 emu_cmpneq_epi8_mask(__m512i a, __m512i b) {
    uint32_t lo = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(emu_half(a, 0), emu_half(b, 0)));
    uint32_t hi = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(emu_half(a, 1), emu_half(b, 1)));
    return (__mmask64) ~((uint64_t)hi << 32 | lo);
}
EMU __m512i emu_maskz_loadu_epi8(__mmask64 k, const void *p) {
    uint8_t o[64];
    __m512i r;
    EMU_EACH(64) o[i] = (k >> i) & 1 ? ((const uint8_t *)p)[i] : 0;
    memcpy(&r, o, 64);
    return r;
}
EMU __m512 emu_mask_loadu_ps(__m512 other, __mmask16 k, const void *p) {
    float o[16];
    __m512 r;
    memcpy(o, &other, 64);
    EMU_EACH(16) if ((k >> i) & 1) memcpy(&o[i], (const char *)p + 4 * i, 4);
    memcpy(&r, o, 64);
    return r;
}
EMU __m512 emu_maskz_loadu_ps(__mmask16 k, const void *p) { return emu_mask_loadu_ps(_mm512_setzero_ps(), k, p); }
EMU void emu_mask_storeu_ps(void *p, __mmask16 k, __m512 a) {
    float x[16];
    memcpy(x, &a, 64);
    EMU_EACH(16) if ((k >> i) & 1) memcpy((char *)p + 4 * i, &x[i], 4);
}
EMU void emu_mask_storeu_epi8(void *p, __mmask64 k, __m512i a) {
    uint8_t x[64];
    memcpy(x, &a, 64);
    EMU_EACH(64) if ((k >> i) & 1) ((uint8_t *)p)[i] = x[i];
}

/* ---- products: calls, since SIMDe's generic code in every unrolled step of a kernel takes minutes to compile ---- */
#define EMU_CALL static __attribute__((noinline, unused))
EMU __m256i emu_dot_u8s8(__m256i sum, __m256i u, __m256i x) { /* even and odd bytes apart: no step saturates */
    __m256i even =
        _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
EMU_CALL __m512i emu_dpbusd_epi32(__m512i sum, __m512i u, __m512i x) {
    return emu_join(emu_dot_u8s8(emu_half(sum, 0), emu_half(u, 0), emu_half(x, 0)),
                    emu_dot_u8s8(emu_half(sum, 1), emu_half(u, 1), emu_half(x, 1)));
}
EMU_CALL __m512i emu_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) { /* wraps, as the instruction */
    return emu_join(_mm256_add_epi32(emu_half(sum, 0), _mm256_madd_epi16(emu_half(a, 0), emu_half(b, 0))),
                    _mm256_add_epi32(emu_half(sum, 1), _mm256_madd_epi16(emu_half(a, 1), emu_half(b, 1))));
}
EMU_CALL __m512i emu_shuffle_epi8(__m512i a, __m512i index) {
    return emu_join(_mm256_shuffle_epi8(emu_half(a, 0), emu_half(index, 0)),
                    _mm256_shuffle_epi8(emu_half(a, 1), emu_half(index, 1)));
}

/* ---- sums: the compiler's own order, halves first ---- */
EMU float emu_reduce_add_ps(__m512 a) {
    float x[16];
    memcpy(x, &a, 64);
    for (int h = 8; h; h /= 2) EMU_EACH(h) x[i] += x[i + h];
    return x[0];
}
EMU float emu_reduce_max_ps(__m512 a) {
    float x[16];
    memcpy(x, &a, 64);
    for (int h = 8; h; h /= 2) EMU_EACH(h) x[i] = x[i] > x[i + h] ? x[i] : x[i + h];
    return x[0];
}
EMU int emu_reduce_add_epi32(__m512i a) {
    uint32_t x[16], sum = 0;
    memcpy(x, &a, 64);
    EMU_EACH(16) sum += x[i];
    return (int)sum;
}

/* ---- names ---- */
#undef _mm512_alignr_epi8
#undef _mm512_broadcast_i32x8
#undef _mm512_bslli_epi128
#undef _mm512_bsrli_epi128
#undef _mm512_cvtps_ph
#undef _mm512_dpbusd_epi32
#undef _mm512_dpwssd_epi32
#undef _mm512_extractf32x8_ps
#undef _mm512_extracti32x8_epi32
#undef _mm512_i32gather_epi32
#undef _mm512_i32gather_ps
#undef _mm512_insertf32x8
#undef _mm512_inserti32x8
#undef _mm512_mask_storeu_ps
#undef _mm512_permutex_epi64
#undef _mm512_shuffle_epi32
#undef _mm512_shuffle_epi8
#undef _mm512_shuffle_f32x4
#undef _mm512_srai_epi32
#define _mm512_alignr_epi8        emu_alignr_epi8
#define _mm512_broadcast_i32x8    emu_broadcast_i32x8
#define _mm512_bslli_epi128       emu_bslli_epi128
#define _mm512_bsrli_epi128       emu_bsrli_epi128
#define _mm512_cmpneq_epi8_mask   emu_cmpneq_epi8_mask
#define _mm512_cvtepi16_epi32     emu_cvtepi16_epi32
#define _mm512_cvtepi32_epi16     emu_cvtepi32_epi16
#define _mm512_cvtepi32_epi8      emu_cvtepi32_epi8
#define _mm512_cvtepi32_ps        emu_cvtepi32_ps
#define _mm512_cvtepi8_epi32      emu_cvtepi8_epi32
#define _mm512_cvtepu16_epi32     emu_cvtepu16_epi32
#define _mm512_cvtepu8_epi16      emu_cvtepu8_epi16
#define _mm512_cvtepu8_epi32      emu_cvtepu8_epi32
#define _mm512_cvtepu8_epi64      emu_cvtepu8_epi64
#define _mm512_cvtph_ps           emu_cvtph_ps
#define _mm512_cvtps_epi32        emu_cvtps_epi32
#define _mm512_cvtps_ph           emu_cvtps_ph
#define _mm512_cvttps_epi32       emu_cvttps_epi32
#define _mm512_dpbusd_epi32       emu_dpbusd_epi32
#define _mm512_dpwssd_epi32       emu_dpwssd_epi32
#define _mm512_extractf32x8_ps    emu_half_ps
#define _mm512_extracti32x8_epi32 emu_half
#define _mm512_i32gather_epi32    emu_i32gather_epi32
#define _mm512_i32gather_ps       emu_i32gather_ps
#define _mm512_insertf32x8        emu_insertf32x8
#define _mm512_inserti32x8        _mm512_inserti64x4
#define _mm512_mask_loadu_ps      emu_mask_loadu_ps
#define _mm512_mask_storeu_epi8   emu_mask_storeu_epi8
#define _mm512_mask_storeu_ps     emu_mask_storeu_ps
#define _mm512_maskz_loadu_epi8   emu_maskz_loadu_epi8
#define _mm512_maskz_loadu_ps     emu_maskz_loadu_ps
#define _mm512_permutex_epi64     emu_permutex_epi64
#define _mm512_reduce_add_epi32   emu_reduce_add_epi32
#define _mm512_reduce_add_ps      emu_reduce_add_ps
#define _mm512_reduce_max_ps      emu_reduce_max_ps
#define _mm512_shuffle_epi32      emu_shuffle_epi32
#define _mm512_shuffle_epi8       emu_shuffle_epi8
#define _mm512_shuffle_f32x4      emu_shuffle_f32x4
#define _mm512_srai_epi32         emu_srai_epi32
#define _mm512_srav_epi32         emu_srav_epi32
#define _mm512_zextps256_ps512    emu_extend_ps
#define _mm512_zextsi256_si512    emu_zextsi256_si512
/* an alias of SIMDe 0.7.4 that takes the wrong number of arguments */
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#endif
