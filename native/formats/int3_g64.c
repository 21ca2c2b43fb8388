/* int3-g64: 3-bit integers with a float32 scale per 64 columns, 28 bytes.
 *
 *    0  float32 s
 *    4  16 bytes: two low bits of value k in byte k / 4 at bit 2 * (k % 4)
 *   20  8 bytes: third bit of value k in byte k / 8 at bit k % 8
 *   y = (u - 4) * s, u = v + 4, |v| <= 3
 *
 * Produced by our converter. Layout nib8_int3_g64 (codes u, offset 4), lossless: 28 bytes become 36.
 * Quantizer: s = max|w| / 3, v = w / s rounded half to even; all zero: s = 0, v = 0. */
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_EXPORT_FORMAT(int3_g64, .name = "int3-g64", .same_as = "avx2", .why = ROWS8_REASON);
#else
struct block { uint8_t s[4]; uint8_t low[16]; uint8_t high[8]; };
_Static_assert(sizeof(struct block) == 28, "int3_g64 block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    put32(u->scale[0], get32(b->s));
    for (int k = 0; k < 64; k++)
        u->code[k] = (uint8_t)((b->low[k / 4] >> 2 * (k % 4) & 3) | (b->high[k / 8] >> k % 8 & 1) << 2);
}
#else
/* Sixteen columns, two groups of eight. In each half of a lane of `low`, nibbles 0 and 1 are the first four columns, 2
 * and 3 the others, which belong into the high nibbles of a strip: with 1 and 2 exchanged, the fields of two bits go
 * apart over two bytes each. The third bits of the groups are bytes 2 * odd and 2 * odd + 1 of `high`: bits 0, 4 go to
 * byte 0, 1, 5 to byte 1, moved by a product, 2, 6 and 3, 7 likewise to the upper half. */
MOE_INLINE void put_groups(uint8_t *code, __m256i low, __m256i high, int odd) {
    const __m256i middle = _mm256_set1_epi16(0x00f0), keep = _mm256_set1_epi32((int)0x00cc0033);
    const __m256i spread = _mm256_set1_epi32((int)0x00810204); /* 1 << 7 | 1, 1 << 9 | 1 << 2 */
    __m256i x = _mm256_and_si256(_mm256_xor_si256(low, _mm256_srli_epi16(low, 4)), middle);
    low = _mm256_xor_si256(low, _mm256_xor_si256(x, _mm256_slli_epi16(x, 4)));
    for (int g = 0; g < 2; g++) {
        const char a = (char)(2 * g), b = (char)(2 * odd + g), z = -1;
        const __m256i lanes = _mm256_setr_epi8(0, z, 1, z, 4, z, 5, z, 8, z, 9, z, 12, z, 13, z,
                                               0, z, 1, z, 4, z, 5, z, 8, z, 9, z, 12, z, 13, z);
        const __m256i twice = _mm256_setr_epi8(0, z, 0, z, 4, z, 4, z, 8, z, 8, z, 12, z, 12, z,
                                               0, z, 0, z, 4, z, 4, z, 8, z, 8, z, 12, z, 12, z);
        __m256i l = _mm256_shuffle_epi8(low, _mm256_add_epi8(lanes, _mm256_set1_epi16(a)));
        __m256i h = _mm256_shuffle_epi8(high, _mm256_add_epi8(twice, _mm256_set1_epi16(b)));
        l = bits8(_mm256_or_si256(l, _mm256_slli_epi32(l, 6)), 0, 0x33);
        h = bits8(_mm256_mullo_epi16(_mm256_and_si256(h, keep), spread), 0, 0x44);
        put_lanes(code + 32 * g, _mm256_or_si256(l, h));
    }
}
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i s[4], low[4], high[4];
    dwords4(s, p, stride);
    put_lanes(scales, s[0]);
    dwords4(low, p + 4, stride);
    dwords4(high, p + 12, stride); /* the third bits are [2] and [3] */
    for (int k = 0; k < 4; k++) put_groups(code + 64 * k, low[k], high[2 + k / 2], k % 2);
}
static const struct block absent = {.high = {[0 ... 7] = 0xff}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_UNITS(.cols = 64, .block_bytes = 28, .spans = 1, .scale_bytes = 4, .bits = 4, .zero = 4);
}

#if MOE_TIER_ID == MOE_SCALAR
static void quantize_row(void *blocks, const float *x, int cols) {
    struct block *b = blocks;
    for (int i = 0; i < cols / 64; i++, b++, x += 64) {
        float top = 0;
        for (int c = 0; c < 64; c++) {
            float a = __builtin_fabsf(x[c]);
            if (!(a <= top) && top == top) top = a;
        }
        float s = top / 3.0f;
        clear((uint8_t *)b, sizeof *b);
        put32(b->s, moe_f32_bits(s));
        for (int k = 0; k < 64; k++) {
            float v = s > 0 ? x[k] / s : 0;
            int u = (int)(v > 3 ? 3 : v < -3 ? -3 : v == v ? moe_round_even(v) : 0) + 4;
            b->low[k / 4] |= (uint8_t)((u & 3) << 2 * (k % 4));
            b->high[k / 8] |= (uint8_t)(u >> 2 << k % 8);
        }
    }
}
static int check_row(const void *blocks, int cols) {
    const struct block *b = blocks;
    for (int i = 0; i < cols / 64; i++)
        if (!finite32(get32(b[i].s))) return i;
    return -1;
}
#endif

MOE_EXPORT_FORMAT(int3_g64, .name = "int3-g64", .version = 1, .block_len = 64, .block_bytes = 28,
                  .layout = "nib8_int3_g64", .encode_strip = encode_strip,
                  SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
