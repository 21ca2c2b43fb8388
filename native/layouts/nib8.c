/* nib8: 4-bit codes into 16 weights, eight interleaved rows (strip8.h has the bytes, the arithmetic and the ranges).
 *
 *   nib8_q4_0    weight = code - 8, fp16 scale per 32 columns
 *   nib8_iq4_xs  weight = K[code], fp16 scale per 256 columns and signed int8 sub-scale per 32
 *
 * The grid formats: fp16 scale d per 256 columns, odd sub-scales 1..31 (IQ1: 1..15), d counted 2^-shift times:
 *                                                               sub  shift  activations
 *   nib8_iq1_s    weight -9, -7, -1, 1, 7, 9                     32    3    plain
 *   nib8_iq1_m    the same                                       16    3    plain
 *   nib8_iq2_xxs  weight +-{8, 25, 43}                           32    3    plain
 *   nib8_iq2_s    the same                                       16    3    plain
 *   nib8_iq3_xxs  weight +-{2, 6, 10, 14, 18, 22, 26, 31}        32    1    plain
 *   nib8_e8_iq3   the same                                       32    2    rotated (native/rotation.h)
 *   nib8_iq3_s    weight +-{1, 3 .. 15}                          32    0    plain
 * int16 headroom (|x| <= 127), as a signed weight and as u = weight + max |weight|: products that one int16 can hold
 *   9:  18 * 127 = 2286, 14;   15: 30 * 127 = 3810, 8;   31: 31 * 127 = 3937, 8 signed or 62 * 127 = 7874, 4 unsigned;
 *   43: 43 * 127 = 5461, 6 signed or 86 * 127 = 10922, 3 unsigned.
 *
 * A further variant is two lines at the end. */
#include "strip8.h"
#if MOE_TIER_ID == MOE_AVX2
#include "strip8_avx2.h"
#elif MOE_TIER_ID == MOE_AVX512
#include "strip8_avx512.h"
#elif MOE_TIER_ID != MOE_SCALAR
#error "nib8: no kernel for this tier; write one or state MOE_LAYOUT_SAME_AS with a reason"
#endif

/* The non-linear 4-bit codebook of IQ4_NL and IQ4_XS. */
static const int8_t iq4_table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* Codes of the grid formats: magnitude in bits 0..2, sign in bit 3. Codes that no file can hold are 0. */
static const int8_t iq1_table[16] = {-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7};
static const int8_t iq2_table[16] = {8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43};
static const int8_t iq3_xxs_table[16] = {2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31};
static const int8_t iq3_s_table[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};

/* E2M1 doubled; code 8 is +0. */
static const int8_t fp4_table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

STRIP_FUNCTIONS(q4_0, 32, .bits = 4, .offset = 8, .reach = 15)
STRIP_FUNCTIONS(q4_1, 32, .bits = 4, .reach = 15, .min = 1)
STRIP_FUNCTIONS(iq4_nl, 32, .bits = 4, .table = iq4_table)
STRIP_FUNCTIONS(mxfp4, 32, .bits = 4, .table = fp4_table, .offset = 12, .reach = 24, .scale = STRIP_E8M0)
STRIP_FUNCTIONS(nvfp4, 16, .bits = 4, .table = fp4_table, .offset = 12, .reach = 24, .scale = STRIP_E4M3)
STRIP_FUNCTIONS(int4_g32, 32, .bits = 4, .offset = 8, .reach = 15, .scale = STRIP_F32)
STRIP_FUNCTIONS(int4_g64, 64, .bits = 4, .offset = 8, .reach = 15, .scale = STRIP_F32)
STRIP_FUNCTIONS(int4_g128, 128, .bits = 4, .offset = 8, .reach = 15, .scale = STRIP_F32)
STRIP_FUNCTIONS(int3_g64, 64, .bits = 4, .offset = 4, .reach = 7, .scale = STRIP_F32)
STRIP_FUNCTIONS(q4_k, 256, .bits = 4, .reach = 15, .sub = 32, .min = 1)
STRIP_FUNCTIONS(q2_k, 256, .bits = 4, .reach = 3, .sub = 16, .min = 1)
STRIP_FUNCTIONS(q3_k, 256, .bits = 4, .offset = 4, .reach = 7, .sub = 16)
STRIP_FUNCTIONS(tq, 256, .bits = 4, .offset = 1, .reach = 3)
STRIP_FUNCTIONS(iq4_xs, 256, .bits = 4, .table = iq4_table, .sub = 32)
STRIP_FUNCTIONS(iq1_s, 256, .bits = 4, .table = iq1_table, .offset = 9, .reach = 18, .sub = 32, .shift = 3)
STRIP_FUNCTIONS(iq1_m, 256, .bits = 4, .table = iq1_table, .offset = 9, .reach = 18, .sub = 16, .shift = 3)
STRIP_FUNCTIONS(iq2_xxs, 256, .bits = 4, .table = iq2_table, .offset = 43, .reach = 86, .sub = 32, .shift = 3)
STRIP_FUNCTIONS(iq2_s, 256, .bits = 4, .table = iq2_table, .offset = 43, .reach = 86, .sub = 16, .shift = 3)
STRIP_FUNCTIONS(iq3_xxs, 256, .bits = 4, .table = iq3_xxs_table, .offset = 31, .reach = 62, .sub = 32, .shift = 1)
STRIP_FUNCTIONS(e8_iq3, 256, .bits = 4, .table = iq3_xxs_table, .offset = 31, .reach = 62, .sub = 32, .shift = 2)
STRIP_FUNCTIONS(iq3_s, 256, .bits = 4, .table = iq3_s_table, .offset = 15, .reach = 30, .sub = 32)

MOE_EXPORT_LAYOUT(nib8_q4_0, STRIP_TABLE(q4_0));
MOE_EXPORT_LAYOUT(nib8_iq4_xs, STRIP_TABLE(iq4_xs));
MOE_EXPORT_LAYOUT(nib8_q4_1, STRIP_TABLE(q4_1));
MOE_EXPORT_LAYOUT(nib8_iq4_nl, STRIP_TABLE(iq4_nl));
MOE_EXPORT_LAYOUT(nib8_mxfp4, STRIP_TABLE(mxfp4));
MOE_EXPORT_LAYOUT(nib8_nvfp4, STRIP_TABLE(nvfp4), .block_len = 64);
MOE_EXPORT_LAYOUT(nib8_int4_g32, STRIP_TABLE(int4_g32));
MOE_EXPORT_LAYOUT(nib8_int4_g64, STRIP_TABLE(int4_g64));
MOE_EXPORT_LAYOUT(nib8_int4_g128, STRIP_TABLE(int4_g128));
MOE_EXPORT_LAYOUT(nib8_int3_g64, STRIP_TABLE(int3_g64));
MOE_EXPORT_LAYOUT(nib8_q4_k, STRIP_TABLE(q4_k));
MOE_EXPORT_LAYOUT(nib8_q2_k, STRIP_TABLE(q2_k));
MOE_EXPORT_LAYOUT(nib8_q3_k, STRIP_TABLE(q3_k));
MOE_EXPORT_LAYOUT(nib8_tq, STRIP_TABLE(tq));
MOE_EXPORT_LAYOUT(nib8_iq1_s, STRIP_TABLE(iq1_s));
MOE_EXPORT_LAYOUT(nib8_iq1_m, STRIP_TABLE(iq1_m));
MOE_EXPORT_LAYOUT(nib8_iq2_xxs, STRIP_TABLE(iq2_xxs));
MOE_EXPORT_LAYOUT(nib8_iq2_s, STRIP_TABLE(iq2_s));
MOE_EXPORT_LAYOUT(nib8_iq3_xxs, STRIP_TABLE(iq3_xxs));
MOE_EXPORT_LAYOUT(nib8_iq3_s, STRIP_TABLE(iq3_s));
MOE_EXPORT_LAYOUT(nib8_e8_iq3, STRIP_TABLE(e8_iq3), .activation = MOE_ACT_Q8_256_ROTATED);
