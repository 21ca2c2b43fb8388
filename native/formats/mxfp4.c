/* mxfp4: 32 values in 17 bytes, E2M1 codes with a power-of-two scale.
 *
 *   0  E8M0 e
 *   1  16 bytes: low nibbles are elements 0..15, high nibbles 16..31
 *   y = T[q] * 2^(e - 128), T = 0 1 2 3 4 6 8 12 and the same negated (E2M1 doubled); code 8 is +0
 *
 * Produced by gpt-oss and GGUF quantizers. Layout nib8_mxfp4, lossless: 17 bytes stay 17. Every exponent byte is a
 * finite scale (0 and 1 are subnormal), so there is nothing to refuse.
 * Quantizer: e = floor(log2 max|x|) - 2 + 127, then the nearest T (the lower code on a tie); byte-equal to
 * gguf.quants, whose log2 is rounded to float32 before the floor; exponents below 0 become 0. */
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(mxfp4, avx2, ROWS8_REASON);
#else
struct block { uint8_t e; uint8_t q[16]; };
_Static_assert(sizeof(struct block) == 17, "mxfp4 block");

#if MOE_TIER_ID == MOE_SCALAR
static void unpack(struct strip_unit *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->scale[0][0] = b->e;
    split_nibbles(u->code, u->code + 16, b->q, 16);
}
#else
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i t[4];
    dwords4(t, p, stride);
    put_byte(scales, t[0]);
    put_nib8_block(code, p + 1, stride);
}
static const struct block absent = {.q = {0}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_UNITS(.cols = 32, .block_bytes = 17, .spans = 1, .scale_bytes = 1, .bits = 4);
}
#if MOE_TIER_ID == MOE_SCALAR
static const float table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* floor of log2(a) as a float32 log2 sees it: just below 2^k it has already rounded up to k. a > 0, finite. */
static int floor_log2(float a) {
    int shift = 0;
    if (a < 1.17549435e-38f) a *= 8388608.0f, shift = -23; /* subnormal: 2^23 */
    uint32_t bits = moe_f32_bits(a);
    int k = (int)(bits >> 23) - 127 + shift;
    double below = 1.0 - (double)moe_bits_f32((bits & 0x7fffff) | 0x3f800000) * 0.5; /* a = 2^(k+1) * (1 - below) */
    if (below < 1e-4 && (float)((double)(k + 1) - below * 1.4426950408889634) == (float)(k + 1)) return k + 1;
    return k;
}
static float scale_of(int e) { return moe_bits_f32(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23); }

static void quantize_row(void *blocks, const float *x, int cols) {
    struct block *b = blocks;
    for (int i = 0; i < cols / 32; i++, b++, x += 32) {
        float top = 0;
        for (int c = 0; c < 32; c++)
            if (__builtin_fabsf(x[c]) > top) top = __builtin_fabsf(x[c]);
        int e = top > 0 && finite32(moe_f32_bits(top)) ? floor_log2(top) + 125 : 0;
        if (e < 0) e = 0;
        float d = scale_of(e);
        uint8_t q[32];
        for (int c = 0; c < 32; c++) {
            float best = __builtin_fabsf(x[c]);
            q[c] = 0;
            for (int k = 1; k < 16; k++) {
                float error = __builtin_fabsf(d * table[k] - x[c]);
                if (error < best) best = error, q[c] = (uint8_t)k;
            }
        }
        b->e = (uint8_t)e;
        for (int c = 0; c < 16; c++) b->q[c] = (uint8_t)(q[c] | q[c + 16] << 4);
    }
}
#endif
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { (void)blocks; (void)cols; return -1; })

MOE_EXPORT_FORMAT(mxfp4, .version = 1, .block_len = 32, .block_bytes = 17, .layout = "nib8_mxfp4",
                  .encode_strip = encode_strip, SCALAR_ONLY(.quantize_row = quantize_row, .check_row = check_row));
#endif
