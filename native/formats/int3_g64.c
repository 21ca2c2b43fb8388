/* int3-g64: 3-bit integers with a float32 scale per 64 columns, 28 bytes.
 *
 *    0  float32 s
 *    4  16 bytes: two low bits of value k in byte k / 4 at bit 2 * (k % 4)
 *   20  8 bytes: third bit of value k in byte k / 8 at bit k % 8
 *   y = (u - 4) * s, u = v + 4, |v| <= 3
 *
 * Produced by our converter. Layout nib8_int3_g64 (codes u, offset 4), lossless: 28 bytes become 36.
 * Quantizer: s = max|w| / 3, v = w / s rounded half to even; all zero: s = 0, v = 0. */
#include "strip.h"
struct block { uint8_t s[4]; uint8_t low[16]; uint8_t high[8]; };
_Static_assert(sizeof(struct block) == 28, "int3_g64 block");

static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    put32(u->scale[0], get32(b->s));
    for (int k = 0; k < 64; k++)
        u->code[k] = (uint8_t)((b->low[k / 4] >> 2 * (k % 4) & 3) | (b->high[k / 8] >> k % 8 & 1) << 2);
}
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const struct unit_spec s = {.cols = 64, .block_bytes = 28, .spans = 1, .scale_bytes = 4, .bits = 4, .zero = 4};
    encode_units(s, strip, rows, row_bytes, num_rows, cols, unpack);
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
