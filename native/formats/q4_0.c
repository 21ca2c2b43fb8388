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
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(q4_0, avx2, ROWS8_REASON);
#else
struct block { uint8_t d[2]; uint8_t q[16]; };
_Static_assert(sizeof(struct block) == 18, "q4_0 block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    put16(u->scale[0], get16(b->d));
    split_nibbles(u->code, u->code + 16, b->q, 16);
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i t[4];
    dwords4(t, p, stride);
    put_low_half(scales, t[0]);
    put_nib8_block(code, p + 2, stride);
}
static const struct block absent = {.q = {[0 ... 15] = 0x88}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_UNITS(.cols = 32, .block_bytes = 18, .spans = 1, .scale_bytes = 2, .bits = 4, .zero = 8);
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
#else
MOE_EXPORT_FORMAT(q4_0, .version = 1, .block_len = 32, .block_bytes = 18, .layout = "nib8_q4_0",
                  .encode_strip = encode_strip);
#endif
#endif
