/* int4-g32, int4-g64, int4-g128: 4-bit integers with a float32 scale per group of columns.
 *
 *   0  float32 s
 *   4  group / 2 bytes: byte k holds v + 8 of column 2k in its low nibble and of column 2k + 1 in its high nibble
 *   y = v * s, |v| <= 7
 *
 * Produced by our converter. Layouts nib8_int4_g*, lossless and of the same size.
 * Quantizer: s = max|w| / 7, v = w / s rounded half to even; all zero: s = 0, v = 0. */
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_EXPORT_FORMAT(int4_g32, .name = "int4-g32", .same_as = "avx2", .why = ROWS8_REASON);
MOE_EXPORT_FORMAT(int4_g64, .name = "int4-g64", .same_as = "avx2", .why = ROWS8_REASON);
MOE_EXPORT_FORMAT(int4_g128, .name = "int4-g128", .same_as = "avx2", .why = ROWS8_REASON);
#else

MOE_INLINE struct unit_spec spec(int group) {
    return (struct unit_spec){
        .cols = group, .block_bytes = 4 + group / 2, .spans = 1, .scale_bytes = 4, .bits = 4, .zero = 8};
}
#if MOE_TIER_ID == MOE_SCALAR
MOE_INLINE void unpack(struct strip_unit *u, const uint8_t *block, int group) {
    put32(u->scale[0], get32(block));
    for (int k = 0; k < group / 2; k++) {
        u->code[2 * k] = block[4 + k] & 15;
        u->code[2 * k + 1] = block[4 + k] >> 4;
    }
}
#else
/* Nibbles 0 .. 7 of a lane to the order 0 4 1 5 2 6 3 7: bytes 1 and 2 exchanged, then the middle nibbles of each
 * half. */
MOE_INLINE __m256i interleave8(__m256i v) {
    const __m256i swap = _mm256_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15,
                                          0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    v = _mm256_shuffle_epi8(v, swap);
    __m256i x = _mm256_and_si256(_mm256_xor_si256(v, _mm256_srli_epi16(v, 4)), _mm256_set1_epi16(0x00f0));
    return _mm256_xor_si256(v, _mm256_xor_si256(x, _mm256_slli_epi16(x, 4)));
}
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride, int group) {
    __m256i t[4];
    dwords4(t, p, stride);
    put_lanes(scales, t[0]);
    for (int i = 0; i < group / 32; i++) {
        dwords4(t, p + 4 + 16 * i, stride);
        for (int j = 0; j < 4; j++) put_lanes(code + 128 * i + 32 * j, interleave8(t[j]));
    }
}
static const uint8_t absent[68] = {[4 ... 67] = 0x88};
#endif

#if MOE_TIER_ID == MOE_SCALAR
static void quantize_group(uint8_t *block, const float *x, int group) {
    float top = 0;
    for (int c = 0; c < group; c++) {
        float a = __builtin_fabsf(x[c]);
        if (!(a <= top) && top == top) top = a;
    }
    float s = top / 7.0f;
    put32(block, moe_f32_bits(s));
    for (int c = 0; c < group; c++) {
        float v = s > 0 ? x[c] / s : 0;
        int q = (int)(v > 7 ? 7 : v < -7 ? -7 : v == v ? moe_round_even(v) : 0) + 8;
        block[4 + c / 2] = (uint8_t)(c & 1 ? block[4 + c / 2] | q << 4 : q);
    }
}
static int check_groups(const uint8_t *block, int cols, int group) {
    for (int i = 0; i < cols / group; i++)
        if (!finite32(get32(block + (size_t)i * (size_t)(4 + group / 2)))) return i;
    return -1;
}
#define SCALAR_FUNCTIONS(group)                                                                                       \
    static void quantize_row_##group(void *blocks, const float *x, int cols) {                                        \
        for (int i = 0; i < cols / group; i++)                                                                        \
            quantize_group((uint8_t *)blocks + (size_t)i * (4 + group / 2), x + (size_t)i * group, group);            \
    }                                                                                                                 \
    static int check_row_##group(const void *blocks, int cols) { return check_groups(blocks, cols, group); }
#else
#define SCALAR_FUNCTIONS(group)
#endif
#if MOE_TIER_ID == MOE_SCALAR
#define ENCODE(group)                                                                                                 \
    static void unpack_##group(struct strip_unit *u, const uint8_t *block) { unpack(u, block, group); }               \
    static void encode_strip_##group(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {       \
        encode_units(spec(group), strip, rows, row_bytes, num_rows, cols, unpack_##group);                            \
    }
#else
#define ENCODE(group)                                                                                                 \
    MOE_INLINE void block8_##group(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {                 \
        block8(scales, code, p, stride, group);                                                                       \
    }                                                                                                                 \
    static void encode_strip_##group(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {       \
        encode_units8(spec(group), strip, rows, row_bytes, num_rows, cols, absent, block8_##group);                   \
    }
#endif
#define CODEC(group) ENCODE(group) SCALAR_FUNCTIONS(group)
CODEC(32)
CODEC(64)
CODEC(128)

MOE_EXPORT_FORMAT(int4_g32, .name = "int4-g32", .version = 1, .block_len = 32, .block_bytes = 20,
                  .layout = "nib8_int4_g32", .encode_strip = encode_strip_32,
                  SCALAR_ONLY(.quantize_row = quantize_row_32, .check_row = check_row_32));
MOE_EXPORT_FORMAT(int4_g64, .name = "int4-g64", .version = 1, .block_len = 64, .block_bytes = 36,
                  .layout = "nib8_int4_g64", .encode_strip = encode_strip_64,
                  SCALAR_ONLY(.quantize_row = quantize_row_64, .check_row = check_row_64));
MOE_EXPORT_FORMAT(int4_g128, .name = "int4-g128", .version = 1, .block_len = 128, .block_bytes = 68,
                  .layout = "nib8_int4_g128", .encode_strip = encode_strip_128,
                  SCALAR_ONLY(.quantize_row = quantize_row_128, .check_row = check_row_128));
#endif
