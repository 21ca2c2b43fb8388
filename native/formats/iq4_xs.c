/* iq4_xs: 256 values in 136 bytes, a non-linear 4-bit codebook with signed sub-scales.
 *
 *   0  fp16 d
 *   2  u16 scales_h: two high bits of the eight sub-scales
 *   4  4 bytes scales_l: low nibbles of the eight sub-scales, even sub-block in the low half
 *   8  128 bytes, 16 per sub-block of 32: low nibbles are its elements 0..15, high nibbles 16..31
 *   y = d * (ls - 32) * K[q]
 *
 * Produced by llama.cpp-style quantizers. Layout nib8_iq4_xs, lossless: 136 bytes become 138 (a sub-scale is a byte,
 * ls - 32). Absent rows: d = 0, sub-scales 0, q = 8.
 * Quantizer: per sub-block the scale that a weighted least-squares fit prefers among codebook placements, then the
 * sub-scales on a common d, then the best of the neighbouring sub-scales. Relative RMS error on Gaussian data: see
 * engine/formats/iq4_xs.py. */
#include "rows8.h"
#include "iq4.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(iq4_xs, avx2, ROWS8_REASON);
#else
struct block { uint8_t d[2]; uint8_t scales_h[2]; uint8_t scales_l[4]; uint8_t q[128]; };
_Static_assert(sizeof(struct block) == 136, "iq4_xs block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_super *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    uint32_t high = get16(b->scales_h), low = get32(b->scales_l);
    u->d = get16(b->d);
    for (int p = 0; p < 8; p++) u->sub[p] = (int8_t)((int)((low >> 4 * p & 15) | (high >> 2 * p & 3) << 4) - 32);
    for (int p = 0; p < 8; p++) split_nibbles(u->code + 32 * p, u->code + 32 * p + 16, b->q + 16 * p, 16);
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i head[4];
    dwords4(head, p, stride);
    __m256i high = _mm256_srli_epi32(head[0], 16), even, odd;
    high = _mm256_and_si256(_mm256_or_si256(high, _mm256_slli_epi32(high, 8)), _mm256_set1_epi32(0x00ff00ff));
    high = _mm256_or_si256(high, _mm256_slli_epi32(high, 4)); /* byte k: two bits of sub-scales 2k and 2k + 1 */
    even = _mm256_or_si256(bits8(head[1], 0, 0x0f), bits8(high, -4, 0x30));
    odd = _mm256_or_si256(bits8(head[1], 4, 0x0f), bits8(high, -2, 0x30));
    even = by_byte(_mm256_sub_epi8(even, _mm256_set1_epi8(32)));
    odd = by_byte(_mm256_sub_epi8(odd, _mm256_set1_epi8(32)));
    __m256i first = _mm256_unpacklo_epi64(even, odd), second = _mm256_unpackhi_epi64(even, odd); /* 0 1 4 5, 2 3 6 7 */
    put_low_half(scales, head[0]);
    put_lanes(scales + 16, _mm256_permute2x128_si256(first, second, 0x20));
    put_lanes(scales + 48, _mm256_permute2x128_si256(first, second, 0x31));
    for (int i = 0; i < 8; i++) put_nib8_block(code + 128 * i, p + 8 + 16 * i, stride);
}
static const struct block absent = {.scales_h = {0xaa, 0xaa}, .q = {[0 ... 127] = 0x88}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_SUPERS(.block_bytes = 136, .subs = 8, .bits = 4, .zero = 8);
}

#if MOE_TIER_ID == MOE_SCALAR
static void quantize_block(struct block *b, const float *x) {
    float weight[256], scale[8], top = 0, mean = 0;
    for (int c = 0; c < 256; c++) mean += x[c] * x[c];
    mean /= 256;
    for (int c = 0; c < 256; c++)
        weight[c] = mean + x[c] * x[c]; /* large weights matter more, small ones still count */
    for (int p = 0; p < 8; p++) {
        scale[p] = iq4_scale(x + 32 * p, weight + 32 * p);
        if (__builtin_fabsf(scale[p]) > __builtin_fabsf(top)) top = scale[p];
    }
    uint16_t d16 = moe_f32_f16(top / -32.0f); /* the largest sub-scale is -32, the one end that reaches 32 */
    float d = moe_f16_f32(d16);
    uint32_t high = 0, low = 0;
    for (int p = 0; p < 8; p++) {
        float ratio = d != 0 ? scale[p] / d : 0, best = 0;
        int near = (int)moe_round_even(ratio < -32 ? -32 : ratio > 31 ? 31 : ratio), choice = 0;
        for (int s = near - 1; s <= near + 1; s++) {
            if (s < -32 || s > 31) continue;
            float e = iq4_error(x + 32 * p, weight + 32 * p, d * (float)s);
            if (s == near - 1 || s == -32 || e < best) best = e, choice = s;
        }
        float dl = d * (float)choice, inverse = dl != 0 ? 1.0f / dl : 0;
        for (int c = 0; c < 16; c++)
            b->q[16 * p + c] =
                (uint8_t)(iq4_code(x[32 * p + c] * inverse) | iq4_code(x[32 * p + 16 + c] * inverse) << 4);
        low |= (uint32_t)((choice + 32) & 15) << 4 * p;
        high |= (uint32_t)((choice + 32) >> 4) << 2 * p;
    }
    put16(b->d, d16);
    put16(b->scales_h, (uint16_t)high);
    put32(b->scales_l, low);
}

static void quantize_row(void *blocks, const float *x, int cols) {
    for (int i = 0; i < cols / 256; i++) quantize_block((struct block *)blocks + i, x + 256 * i);
}

static int check_row(const void *blocks, int cols) {
    const struct block *b = blocks;
    for (int i = 0; i < cols / 256; i++)
        if (!finite16(get16(b[i].d))) return i;
    return -1;
}

MOE_EXPORT_FORMAT(iq4_xs, .version = 1, .block_len = 256, .block_bytes = 136, .layout = "nib8_iq4_xs",
                  .encode_strip = encode_strip, .quantize_row = quantize_row, .check_row = check_row);
#else
MOE_EXPORT_FORMAT(iq4_xs, .version = 1, .block_len = 256, .block_bytes = 136, .layout = "nib8_iq4_xs",
                  .encode_strip = encode_strip);
#endif
#endif
