/* e8-iq3: the codebook of iq3_xxs over rotated rows, 256 values in 98 bytes. Our own format.
 *
 *   0   64 index bytes, one per 4 values
 *   64  8 u32, one per 32 values: four 7-bit signs (one per 8 values) and, on top, 4-bit c
 *   96  fp16 d
 *   y = sign * grid / 2 * d * (c + 1/2) / 2;  grid values 4, 12, 20, 28, 36, 44, 52, 62; the eighth sign makes the
 *   negatives even
 *
 * A block is an iq3_xxs block with d doubled and moved to the end. Rows hold W Q (rotation.h), so the layout,
 * nib8_e8_iq3, wants rotated activations. Lossless: y = d / 4 * (2c + 1) * +-grid/2; 98 bytes become 138.
 * Quantizer: rotate; make the negatives of every 8 even by giving the smallest magnitude the other sign; d = rms / 20 +
 * 1e-12; per 32 the best of the 16 codes, every 4 values taking the nearest codebook entry (ties: the first). */
#include "grid.h"
#if MOE_TIER_ID == MOE_SCALAR
#include "rotation.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#endif
/* The name holds a '-', so it overrides the one that the macro derives. */
#pragma GCC diagnostic ignored "-Woverride-init"
enum { BLOCK_BYTES = 98, SUBS = 8, WORDS_AT = 0, WORDS = 24, INDEX_AT = 0, SIGNS_AT = 64 };
#include "iq3_xxs.h"

MOE_INLINE uint16_t block_scale(const uint8_t *b) { return get16(b + 96); }
#if MOE_TIER_ID == MOE_SCALAR || MOE_TIER_ID == MOE_AVX2
#include "grid_strip.h"
#endif

#if MOE_TIER_ID == MOE_SCALAR
typedef float lanes __attribute__((vector_size(16)));
enum { ENTRIES = 256 / 4 }; /* vectors of four codebook entries */

struct codebook {
    lanes value[4][ENTRIES]; /* grid / 2 */
    lanes square[ENTRIES];   /* sum of the squares of the four */
};

static void make_codebook(struct codebook *k) {
    static const float magnitude[8] = {2, 6, 10, 14, 18, 22, 26, 31};
    for (int i = 0; i < 256; i++) {
        float sum = 0;
        for (int j = 0; j < 4; j++) {
            float v = magnitude[grid_iq3_xxs[i] >> 8 * j & 7];
            k->value[j][i / 4][i % 4] = v;
            sum += v * v;
        }
        k->square[i / 4][i % 4] = sum;
    }
}

MOE_INLINE lanes smaller(lanes a, lanes b) { /* a < b ? a : b */
#ifdef __SSE2__
    return _mm_min_ps(a, b);
#else
    for (int j = 0; j < 4; j++) a[j] = a[j] < b[j] ? a[j] : b[j];
    return a;
#endif
}

MOE_INLINE float scale_of_code(float d, uint32_t c) { return d * ((float)c + 0.5f) * 0.5f; }

/* Eight values to magnitudes and seven sign bits. The one whose sign had to change gets a negative magnitude. */
static uint32_t split_signs(float *m, const float *x) {
    uint32_t signs = 0;
    int smallest = 0;
    for (int c = 0; c < 8; c++) {
        m[c] = __builtin_fabsf(x[c]);
        signs |= (uint32_t)(x[c] < 0) << c;
        if (m[c] < m[smallest]) smallest = c;
    }
    if (__builtin_parity(signs)) {
        signs ^= 1u << smallest;
        m[smallest] = -m[smallest];
    }
    return signs & 127;
}

/* |m - db g|^2 = |m|^2 + db (db |g|^2 - 2 m.g): the smallest bracket over the codebook, dot2 = 2 m.g. */
static float best_bracket(const lanes *dot2, const lanes *square, float db) {
    lanes best[4];
    for (int j = 0; j < 4; j++) best[j] = db * square[j] - dot2[j];
    for (int i = 4; i < ENTRIES; i += 4)
        for (int j = 0; j < 4; j++) best[j] = smaller(db * square[i + j] - dot2[i + j], best[j]);
    best[0] = smaller(smaller(best[0], best[1]), smaller(best[2], best[3]));
    float least = best[0][0];
    for (int j = 1; j < 4; j++) least = best[0][j] < least ? best[0][j] : least;
    return least;
}
static int best_entry(const lanes *dot2, const lanes *square, float db) {
    float best = best_bracket(dot2, square, db);
    for (int i = 0; i < 256; i++)
        if (db * square[i / 4][i % 4] - dot2[i / 4][i % 4] == best) return i;
    return 0; /* not finite: the scale is refused anyway */
}

/* Squared error of the group at scale db, or something larger than `enough` once that is certain. */
static float group_error(const lanes (*dot2)[ENTRIES], const float *energy, const struct codebook *k, float db,
                         float enough) {
    float sum = 0;
    for (int v = 0; v < 8; v++) {
        sum += energy[v] + db * best_bracket(dot2[v], k->square, db);
        if (sum > enough) break;
    }
    return sum;
}

/* 32 values: eight indices; returns signs and code. The codes are tried from the likely ones outwards, which lets most
 * of the others stop early; on a tie the lowest code wins. */
static uint32_t quantize_group(uint8_t *index, const float *x, float d, const struct codebook *k) {
    static const uint8_t order[16] = {5, 4, 6, 3, 7, 2, 8, 1, 9, 0, 10, 11, 12, 13, 14, 15};
    float m[32], energy[8], least = __builtin_inff();
    lanes dot2[8][ENTRIES];
    uint32_t packed = 0, code = 0;
    for (int g = 0; g < 4; g++) packed |= split_signs(m + 8 * g, x + 8 * g) << 7 * g;
    for (int v = 0; v < 8; v++) {
        const float *p = m + 4 * v;
        energy[v] = (p[0] * p[0] + p[1] * p[1]) + (p[2] * p[2] + p[3] * p[3]);
        for (int i = 0; i < ENTRIES; i++)
            dot2[v][i] =
                2 * ((p[0] * k->value[0][i] + p[1] * k->value[1][i]) + (p[2] * k->value[2][i] + p[3] * k->value[3][i]));
    }
    for (int i = 0; i < 16; i++) {
        uint32_t c = order[i];
        float error = group_error(dot2, energy, k, scale_of_code(d, c), least);
        if (error < least || (error == least && c < code)) least = error, code = c;
    }
    for (int v = 0; v < 8; v++) index[v] = (uint8_t)best_entry(dot2[v], k->square, scale_of_code(d, code));
    return packed | code << 28;
}

static void quantize_block(uint8_t *b, const float *x, const struct codebook *k) {
    double sum = 0;
    for (int c = 0; c < 256; c++) sum += (double)x[c] * (double)x[c];
    uint16_t d16 = moe_f32_f16((float)(__builtin_sqrt(sum / 256) / 20 + 1e-12));
    float d = moe_f16_f32(d16);
    for (int p = 0; p < 8; p++) put32(b + 64 + 4 * p, quantize_group(b + 8 * p, x + 32 * p, d, k));
    put16(b + 96, d16);
}

static void quantize_row(void *blocks, const float *x, int cols) {
    float tile[ROTATION_MAX];
    uint8_t signs[ROTATION_MAX / 8], *b = blocks;
    struct codebook k;
    make_codebook(&k);
    for (int at = 0, n; at < cols; at += n) {
        n = rotation_length(cols - at);
        rotation_make_signs(signs, n);
        rotation_tile(tile, x + at, n, signs);
        for (int i = 0; i < n; i += 256, b += BLOCK_BYTES) quantize_block(b, tile + i, &k);
    }
}

MOE_EXPORT_FORMAT(e8_iq3, .name = "e8-iq3", .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES,
                  .layout = "nib8_e8_iq3", .encode_strip = encode_strip, .quantize_row = quantize_row,
                  .check_row = check_row);
#elif MOE_TIER_ID == MOE_AVX2
MOE_EXPORT_FORMAT(e8_iq3, .name = "e8-iq3", .version = 1, .block_len = 256, .block_bytes = BLOCK_BYTES,
                  .layout = "nib8_e8_iq3", .encode_strip = encode_strip);
#elif MOE_TIER_ID == MOE_AVX512
MOE_EXPORT_FORMAT(e8_iq3, .name = "e8-iq3", .same_as = "avx2",
                  .why = "a strip is eight rows, which is one AVX2 register per group; the table reads bound it");
#else
#error "e8_iq3: no codec for this tier; write one or state MOE_FORMAT_SAME_AS with a reason"
#endif
