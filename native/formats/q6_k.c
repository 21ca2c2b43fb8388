/* q6_k: 256 values in 210 bytes.
 *
 *     0  128 bytes of low nibbles: per 128 values 64 bytes ql; low halves are values 0..63, high halves 64..127
 *   128  64 bytes of high pairs: per 128 values 32 bytes qh; bits 2k..2k+1 of byte l belong to value 32 * k + l
 *   192  16 int8 sub-scales, one per 16 values
 *   208  fp16 d
 *   y = d * sc * (q - 32)
 *
 * Produced by GGUF quantizers. Layout byte8_q6_k (q - 32 as int8), lossless: 210 bytes become 274.
 * Quantizer: per 16 the scale that a weighted least-squares fit prefers among several placements, int8 sub-scales on a
 * common d with their neighbours tried, then the codes. */
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q6_k, avx2, ROWS8_REASON);
#else
struct block { uint8_t low[128]; uint8_t high[64]; int8_t scales[16]; uint8_t d[2]; };
_Static_assert(sizeof(struct block) == 210, "q6_k block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_super *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->d = get16(b->d);
    for (int j = 0; j < 16; j++) u->sub[j] = b->scales[j];
    for (int half = 0; half < 2; half++) {
        split_nibbles(u->code + 128 * half, u->code + 128 * half + 64, b->low + 64 * half, 64);
        for (int k = 0; k < 4; k++)
            for (int l = 0; l < 32; l++) {
                uint8_t *q = u->code + 128 * half + 32 * k + l;
                *q = (uint8_t)((*q | (b->high[32 * half + l] >> 2 * k & 3) << 4) - 32);
            }
    }
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i s[4];
    dwords4(s, p + 194, stride);
    put_high_half(scales, s[3]);
    dwords4(s, p + 192, stride);
    for (int j = 0; j < 4; j++) put_bytes4(scales + 16 + 32 * j, s[j]);
    for (int part = 0; part < 4; part++) { /* half of the bytes of high pairs of 128 values */
        __m256i q[8], high[4];
        dwords4(q, p + 64 * (part / 2) + 16 * (part % 2), stride);
        dwords4(q + 4, p + 64 * (part / 2) + 16 * (part % 2) + 32, stride);
        dwords4(high, p + 128 + 16 * part, stride);
        for (int k = 0; k < 4; k++)
            for (int j = 0; j < 4; j++) {
                __m256i c = _mm256_or_si256(bits8(q[k % 2 * 4 + j], k / 2 * 4, 0x0f), bits8(high[j], 2 * k - 4, 0x30));
                put_lanes(code + 1024 * (part / 2) + 256 * k + 128 * (part % 2) + 32 * j,
                          _mm256_sub_epi8(c, _mm256_set1_epi8(32)));
            }
    }
}
static const struct block absent = {.high = {[0 ... 63] = 0xaa}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_SUPERS(.block_bytes = 210, .subs = 16, .bits = 8);
}
#if MOE_TIER_ID == MOE_SCALAR
/* Weighted error of 16 values at one scale, codes -32..31. */
static float error16(const float *x, const float *weight, float scale) {
    float inverse = scale != 0 ? 1.0f / scale : 0, e = 0;
    for (int c = 0; c < 16; c++) {
        float v = x[c] * inverse, q = moe_round_even(v > 31 ? 31 : v < -32 ? -32 : v), r = x[c] - scale * q;
        e += weight[c] * r * r;
    }
    return e;
}
static float best_scale(const float *x, const float *weight) {
    float m = 0, best = 0, scale = 0;
    for (int c = 0; c < 16; c++)
        if (__builtin_fabsf(x[c]) > __builtin_fabsf(m)) m = x[c];
    if (__builtin_fabsf(m) < 1e-30f) return 0;
    for (int step = -9; step <= 9; step++) {
        float inverse = -(32.0f + 0.1f * (float)step) / m, xq = 0, qq = 0;
        for (int c = 0; c < 16; c++) {
            float v = x[c] * inverse, q = moe_round_even(v > 31 ? 31 : v < -32 ? -32 : v);
            xq += weight[c] * x[c] * q;
            qq += weight[c] * q * q;
        }
        if (qq > 0 && xq * xq > best * qq) scale = xq / qq, best = xq * scale;
    }
    return scale;
}
static void quantize_block(struct block *b, const float *x) {
    float weight[256], scale[16], top = 0;
    for (int c = 0; c < 256; c++) weight[c] = x[c] * x[c];
    for (int j = 0; j < 16; j++) {
        float mean = 0;
        for (int c = 0; c < 16; c++) mean += weight[16 * j + c] / 16;
        for (int c = 0; c < 16; c++) weight[16 * j + c] += mean;
        scale[j] = best_scale(x + 16 * j, weight + 16 * j);
        if (__builtin_fabsf(scale[j]) > __builtin_fabsf(top)) top = scale[j];
    }
    uint16_t d16 = moe_f32_f16(top / -128.0f);
    float d = moe_f16_f32(d16);
    uint8_t code[256];
    for (int j = 0; j < 16; j++) {
        float ratio = d != 0 ? scale[j] / d : 0, best = 0;
        int near = (int)moe_round_even(ratio > 127 ? 127 : ratio < -128 ? -128 : ratio), choice = near, first = 1;
        for (int s = near - 1; s <= near + 1; s++) {
            float e = error16(x + 16 * j, weight + 16 * j, d * (float)s);
            if (s >= -128 && s <= 127 && (first || e < best)) best = e, choice = s, first = 0;
        }
        b->scales[j] = (int8_t)choice;
        float inverse = d * (float)choice != 0 ? 1.0f / (d * (float)choice) : 0;
        for (int c = 0; c < 16; c++) {
            float v = x[16 * j + c] * inverse;
            code[16 * j + c] = (uint8_t)(moe_round_even(v > 31 ? 31 : v < -32 ? -32 : v == v ? v : 0) + 32);
        }
    }
    put16(b->d, d16);
    clear(b->high, 64);
    for (int half = 0; half < 2; half++) {
        const uint8_t *q = code + 128 * half;
        for (int l = 0; l < 64; l++) b->low[64 * half + l] = (uint8_t)((q[l] & 15) | (q[l + 64] & 15) << 4);
        for (int k = 0; k < 4; k++)
            for (int l = 0; l < 32; l++) b->high[32 * half + l] |= (uint8_t)(q[32 * k + l] >> 4 << 2 * k);
    }
}
static void quantize_row(void *blocks, const float *x, int cols) {
    for (int i = 0; i < cols / 256; i++) quantize_block((struct block *)blocks + i, x + 256 * i);
}
#endif
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 256, 210, 208, -1); })

MOE_EXPORT_FORMAT(q6_k, .version = 1, .block_len = 256, .block_bytes = 210, .layout = "byte8_q6_k",
                  .encode_strip = encode_strip, SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
