/* q4_0: 32 values in 18 bytes.
 *
 *   0  fp16 d
 *   2  16 bytes: low nibbles are elements 0..15, high nibbles 16..31
 *   y = (q - 8) * d
 *
 * Produced by every GGUF quantizer. Layout nib8_q4_0, lossless: 18 bytes stay 18. Absent rows: d = 0, q = 8.
 * Quantizer: d = m / -8 with m the value of largest magnitude (the first of several), q = trunc(x / d + 8.5) at most 15;
 * byte-equal to gguf.quants. */
#include "strip.h"
struct block { uint8_t d[2]; uint8_t q[16]; };
_Static_assert(sizeof(struct block) == 18, "q4_0 block");

static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    uint8_t *scales = (uint8_t *)strip, *code = scales + moe_round64((size_t)cols / 2);
    clear(scales + cols / 2, moe_round64((size_t)cols / 2) - (size_t)cols / 2);
    static const struct block zero = {{0, 0}, {0x88, 0x88, 0x88, 0x88, 0x88, 0x88, 0x88, 0x88,
                                               0x88, 0x88, 0x88, 0x88, 0x88, 0x88, 0x88, 0x88}};
    for (int i = 0; i < cols / 32; i++) {
        const uint8_t *q[8];
        for (int r = 0; r < 8; r++) {
            const struct block *b = (const void *)((const char *)rows + (size_t)r * row_bytes);
            b = r < num_rows ? b + i : &zero;
            put16(scales + 16 * i + 2 * r, get16(b->d));
            q[r] = b->q;
        }
        put_nib8_rows(code + 128 * (size_t)i, q);
    }
}

#if MOE_TIER_ID == MOE_SCALAR
static void quantize_row(void *blocks, const float *x, int cols) {
    struct block *b = blocks;
    for (int i = 0; i < cols / 32; i++, b++, x += 32) {
        float m = x[0];
        for (int c = 1; c < 32; c++)
            if (!(__builtin_fabsf(x[c]) <= __builtin_fabsf(m)) && m == m) m = x[c]; /* NaN wins */
        float d = m / -8.0f, inverse = d == 0 ? 0 : 1.0f / d;
        uint8_t q[32];
        for (int c = 0; c < 32; c++) {
            float v = x[c] * inverse + 8.5f;
            q[c] = v < 16 ? (uint8_t)(v > 0 ? (int)v : 0) : v < 17 ? 15 : 0; /* 0 where 1 / d overflowed, too */
        }
        put16(b->d, moe_f32_f16(d));
        for (int c = 0; c < 16; c++) b->q[c] = (uint8_t)(q[c] | q[c + 16] << 4);
    }
}

static int check_row(const void *blocks, int cols) {
    const struct block *b = blocks;
    for (int i = 0; i < cols / 32; i++)
        if (!finite16(get16(b[i].d))) return i;
    return -1;
}

MOE_EXPORT_FORMAT(q4_0, .version = 1, .block_len = 32, .block_bytes = 18, .layout = "nib8_q4_0",
                  .encode_strip = encode_strip, .quantize_row = quantize_row, .check_row = check_row);
#elif MOE_TIER_ID == MOE_AVX2 || MOE_TIER_ID == MOE_AVX512
MOE_EXPORT_FORMAT(q4_0, .version = 1, .block_len = 32, .block_bytes = 18, .layout = "nib8_q4_0",
                  .encode_strip = encode_strip);
#else
#error "q4_0: no codec for this tier; write one or state MOE_FORMAT_SAME_AS with a reason"
#endif
