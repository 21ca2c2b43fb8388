/* byte8: int8 weights, eight interleaved rows (strip8.h has the bytes, the arithmetic and the ranges).
 *
 *   byte8_q8_0   fp16 scale per 32 columns; a code of -128 is legal and exact */
#include "strip8.h"
#if MOE_TIER_ID == MOE_AVX2
#include "strip8_avx2.h"
#elif MOE_TIER_ID == MOE_AVX512
#include "strip8_avx512.h"
#elif MOE_TIER_ID != MOE_SCALAR
#error "byte8: no kernel for this tier; write one or state MOE_LAYOUT_SAME_AS with a reason"
#endif

STRIP_FUNCTIONS(q8_0, 32, .bits = 8)

MOE_EXPORT_LAYOUT(byte8_q8_0, STRIP_TABLE(q8_0));
