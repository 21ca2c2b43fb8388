/* q8_0: 32 values in 34 bytes.
 *
 *   0  fp16 d
 *   2  32 int8 q
 *   y = q * d
 *
 * Produced by every GGUF quantizer (|q| <= 127; a file may hold -128). Layout byte8_q8_0, lossless: 34 bytes stay 34.
 * Quantizer: d = max|x| / 127, q = x * (1 / d) rounded half away from zero; byte-equal to gguf.quants. */
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q8_0, avx2, ROWS8_REASON);
#else
struct block { uint8_t d[2]; int8_t q[32]; };
_Static_assert(sizeof(struct block) == 34, "q8_0 block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    put16(u->scale[0], get16(b->d));
    for (int c = 0; c < 32; c++) u->code[c] = (uint8_t)b->q[c];
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i s[4], t[8];
    dwords4(s, p, stride);
    put_low_half(scales, s[0]);
    dwords8(t, p + 2, stride);
    for (int g = 0; g < 8; g++) put_lanes(code + 32 * g, t[g]);
}
static const struct block absent = {.q = {0}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_UNITS(.cols = 32, .block_bytes = 34, .spans = 1, .scale_bytes = 2, .bits = 8);
}

#if MOE_TIER_ID == MOE_SCALAR
static int round_half_away(float v) { /* |v| < 2^22 */
    float a = __builtin_fabsf(v);
    int n = (int)a;
    n += a - (float)n >= 0.5f;
    return v < 0 ? -n : n;
}

static void quantize_row(void *blocks, const float *x, int cols) {
    struct block *b = blocks;
    for (int i = 0; i < cols / 32; i++, b++, x += 32) {
        float m = 0;
        for (int c = 0; c < 32; c++) {
            float a = __builtin_fabsf(x[c]);
            if (!(a <= m) && m == m) m = a; /* NaN wins */
        }
        float d = m / 127.0f, inverse = d == 0 ? 0 : 1.0f / d;
        put16(b->d, moe_f32_f16(d));
        for (int c = 0; c < 32; c++) {
            float v = x[c] * inverse;
            b->q[c] = (int8_t)(__builtin_fabsf(v) < 128 ? round_half_away(v) : 0); /* 0 where 1 / d overflowed */
        }
    }
}

static int check_row(const void *blocks, int cols) {
    const struct block *b = blocks;
    for (int i = 0; i < cols / 32; i++)
        if (!finite16(get16(b[i].d))) return i;
    return -1;
}

MOE_EXPORT_FORMAT(q8_0, .version = 1, .block_len = 32, .block_bytes = 34, .layout = "byte8_q8_0",
                  .encode_strip = encode_strip, .quantize_row = quantize_row, .check_row = check_row);
#else
MOE_EXPORT_FORMAT(q8_0, .version = 1, .block_len = 32, .block_bytes = 34, .layout = "byte8_q8_0",
                  .encode_strip = encode_strip);
#endif
#endif
