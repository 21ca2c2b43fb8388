/* q8_0: 32 values in 34 bytes.
 *
 *   0  fp16 d
 *   2  32 int8 q
 *   y = q * d
 *
 * Produced by every GGUF quantizer (|q| <= 127; a file may hold -128). Layout byte8_q8_0, lossless: 34 bytes stay 34.
 * Quantizer: d = max|x| / 127, q = x * (1 / d) rounded half away from zero; byte-equal to gguf.quants. */
#include "strip.h"
struct block { uint8_t d[2]; int8_t q[32]; };
_Static_assert(sizeof(struct block) == 34, "q8_0 block");

static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    uint8_t *scales = (uint8_t *)strip, *code = scales + moe_round64((size_t)cols / 2);
    clear(scales + cols / 2, moe_round64((size_t)cols / 2) - (size_t)cols / 2);
    for (int r = 0; r < 8; r++) {
        static const struct block zero;
        const struct block *b = (const void *)((const char *)rows + (size_t)r * row_bytes);
        for (int i = 0; i < cols / 32; i++) {
            const struct block *from = r < num_rows ? &b[i] : &zero;
            put16(scales + 16 * i + 2 * r, get16(from->d));
            for (int g = 0; g < 8; g++)
                put32(code + 256 * (size_t)i + 32 * g + 4 * r, get32((const uint8_t *)from->q + 4 * g));
        }
    }
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
#elif MOE_TIER_ID == MOE_AVX2 || MOE_TIER_ID == MOE_AVX512
MOE_EXPORT_FORMAT(q8_0, .version = 1, .block_len = 32, .block_bytes = 34, .layout = "byte8_q8_0",
                  .encode_strip = encode_strip);
#else
#error "q8_0: no codec for this tier; write one or state MOE_FORMAT_SAME_AS with a reason"
#endif
