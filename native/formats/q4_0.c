/* q4_0: 32 values in 18 bytes.
 *
 *   0  fp16 d
 *   2  16 bytes: low nibbles are elements 0..15, high nibbles 16..31
 *   y = (q - 8) * d
 *
 * Produced by every GGUF quantizer. Layout nib8_q4_0, lossless: 18 bytes stay 18. Absent rows: d = 0, q = 8.
 * Quantizer: d = m / -8 with m the value of largest magnitude (the first of several), q = trunc(x / d + 8.5) at most
 * 15; byte-equal to gguf.quants. */
#include "block32.h"
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
        uint8_t q[32];
        put16(b->d, moe_f32_f16(quantize_symmetric32(q, x, 8)));
        put_nibbles32(b->q, q);
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
