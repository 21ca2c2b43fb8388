/* byte8: int8 weights, eight interleaved rows (strip8.h has the bytes, the arithmetic and the ranges).
 *
 *   byte8_q8_0      fp16 scale per 32 columns; a code of -128 is legal and exact
 *   byte8_q5_0      the same, codes -16..15 only
 *   byte8_q5_1      fp16 scale and minimum per 32 columns, codes 0..31
 *   byte8_int8_row  float32 scale per row
 *   byte8_q5_k      fp16 scale and minimum per 256 columns, sub-scales and minima per 32, codes 0..31
 *   byte8_q6_k      fp16 scale per 256 columns, sub-scales per 16, codes -32..31 */
#include "strip8.h"
#if MOE_TIER_ID == MOE_AVX2
#include "strip8_avx2.h"
#elif MOE_TIER_ID == MOE_AVX512
#include "strip8_avx512.h"
#elif MOE_TIER_ID != MOE_SCALAR
#error "byte8: no kernel for this tier; write one or state MOE_LAYOUT_SAME_AS with a reason"
#endif

STRIP_FUNCTIONS(q8_0, 32, .bits = 8)
STRIP_FUNCTIONS(q5_0, 32, .bits = 8, .offset = 16, .reach = 31)
STRIP_FUNCTIONS(q5_1, 32, .bits = 8, .reach = 31, .min = 1)
STRIP_FUNCTIONS(int8_row, 0, .bits = 8, .scale = STRIP_F32)
STRIP_FUNCTIONS(q5_k, 256, .bits = 8, .reach = 31, .sub = 32, .min = 1)
STRIP_FUNCTIONS(q6_k, 256, .bits = 8, .offset = 32, .reach = 63, .sub = 16)

MOE_EXPORT_LAYOUT(byte8_q8_0, STRIP_TABLE(q8_0));
MOE_EXPORT_LAYOUT(byte8_q5_0, STRIP_TABLE(q5_0));
MOE_EXPORT_LAYOUT(byte8_q5_1, STRIP_TABLE(q5_1));
MOE_EXPORT_LAYOUT(byte8_int8_row, STRIP_TABLE(int8_row));
MOE_EXPORT_LAYOUT(byte8_q5_k, STRIP_TABLE(q5_k));
MOE_EXPORT_LAYOUT(byte8_q6_k, STRIP_TABLE(q6_k));
