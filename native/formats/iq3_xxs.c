/* iq3_xxs: 256 values in 98 bytes, four at a time from a codebook of 256 entries.
 *
 *   0   fp16 d
 *   2   64 index bytes, one per 4 values
 *   66  8 u32, one per 32 values: four 7-bit signs (one per 8 values) and, on top, 4-bit s
 *   y = d * (s + 1/2) / 2 * grid * sign;  grid values 4, 12, 20, 28, 36, 44, 52, 62; the eighth sign makes the
 *   negatives even
 *
 * Produced by llama.cpp-style quantizers. Layout nib8_iq3_xxs, lossless: the grid is even, so
 * y = d / 2 * (2s + 1) * +-grid/2; 98 bytes become 138. Only read. */
#include "grid.h"
enum { BLOCK_BYTES = 98, SUBS = 8, WORDS_AT = 2, WORDS = 24, INDEX_AT = 2, SIGNS_AT = 66 };
#include "iq3_xxs.h"

MOE_INLINE uint16_t block_scale(const uint8_t *b) { return get16(b); }
#if MOE_TIER_ID == MOE_SCALAR || MOE_TIER_ID == MOE_AVX2
#include "grid_strip.h"
#endif

#if MOE_TIER_ID == MOE_SCALAR
MOE_EXPORT_FORMAT(iq3_xxs, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq3_xxs",
                  .encode_strip = encode_strip, .check_row = check_row);
#elif MOE_TIER_ID == MOE_AVX2
MOE_EXPORT_FORMAT(iq3_xxs, .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES, .layout = "nib8_iq3_xxs",
                  .encode_strip = encode_strip);
#elif MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(iq3_xxs, avx2,
                   "a strip is eight rows, which is one AVX2 register per group; the table reads bound it");
#else
#error "iq3_xxs: no codec for this tier; write one or state MOE_FORMAT_SAME_AS with a reason"
#endif
