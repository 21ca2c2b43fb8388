/* nib8: 4-bit codes into 16 weights, eight interleaved rows (strip8.h has the bytes, the arithmetic and the ranges).
 *
 *   nib8_q4_0    weight = code - 8, fp16 scale per 32 columns
 *   nib8_iq4_xs  weight = K[code], fp16 scale per 256 columns and signed int8 sub-scale per 32
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

STRIP_FUNCTIONS(q4_0, 32, .bits = 4, .offset = 8)
STRIP_FUNCTIONS(iq4_xs, 256, .bits = 4, .table = iq4_table, .sub = 32)

MOE_EXPORT_LAYOUT(nib8_q4_0, STRIP_TABLE(q4_0));
MOE_EXPORT_LAYOUT(nib8_iq4_xs, STRIP_TABLE(iq4_xs));
