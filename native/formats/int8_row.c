/* int8-row: a row of int8 weights with one float32 scale behind it.
 *
 *   0     cols int8 q, |q| <= 127
 *   cols  float32 s
 *   y = q * s
 *
 * Produced by our converter. Layout byte8_int8_row, lossless and of the same size.
 * Quantizer: s = max(max|w| / 127, 1e-12), q = w / s rounded half to even. */
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_EXPORT_FORMAT(int8_row, .name = "int8-row", .same_as = "avx2", .why = ROWS8_REASON);
#else

static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    uint8_t *scales = strip, *code = scales + moe_round64(32), zero[32] = {0};
    clear(scales, 64);
#if MOE_TIER_ID != MOE_SCALAR
    if (num_rows == 8) {
        const uint8_t *p = rows;
        for (int r = 0; r < 8; r++) put32(scales + 4 * r, get32(p + (size_t)r * row_bytes + cols));
        for (int i = 0; i < cols / 32; i++, p += 32, code += 256) {
            __m256i t[8];
            dwords8(t, p, row_bytes);
            for (int g = 0; g < 8; g++) put_lanes(code + 32 * g, t[g]);
        }
        return;
    }
#endif
    for (int r = 0; r < 8; r++) {
        const uint8_t *row = (const uint8_t *)rows + (size_t)r * row_bytes;
        if (r < num_rows) put32(scales + 4 * r, get32(row + cols));
        for (int i = 0; i < cols / 32; i++) put_codes(code + 256 * (size_t)i, r, r < num_rows ? row + 32 * i : zero, 8);
    }
}

#if MOE_TIER_ID == MOE_SCALAR
static void quantize_row(void *blocks, const float *x, int cols) {
    int8_t *q = blocks;
    float top = 0;
    for (int c = 0; c < cols; c++) {
        float a = __builtin_fabsf(x[c]);
        if (!(a <= top) && top == top) top = a; /* NaN wins, and shows as a scale that is not finite */
    }
    float s = top / 127.0f;
    if (s < 1e-12f) s = 1e-12f;
    for (int c = 0; c < cols; c++) {
        float v = x[c] / s;
        q[c] = (int8_t)(v > 127 ? 127 : v < -127 ? -127 : v == v ? moe_round_even(v) : 0);
    }
    put32((uint8_t *)q + cols, moe_f32_bits(s));
}
static int check_row(const void *blocks, int cols) {
    return finite32(get32((const uint8_t *)blocks + cols)) ? -1 : 0;
}
#endif

MOE_EXPORT_FORMAT(int8_row, .name = "int8-row", .version = 1, .block_len = 32, .block_bytes = 32, .row_extra_bytes = 4,
                  .layout = "byte8_int8_row", .encode_strip = encode_strip,
                  SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
