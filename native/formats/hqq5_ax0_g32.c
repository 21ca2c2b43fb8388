/* hqq5-ax0-g32: half-quadratic quantization to five bits; 32 rows of one column share a scale and a zero.
 *
 * A matrix [O, I], O and I multiples of 32, is stored as a whole:
 *
 *   codes   row by row; per 32 columns 16 bytes of low nibbles (low nibbles are columns 0..15, high nibbles 16..31) and
 *           4 bytes of fifth bits (bit k is column k)
 *   meta    for each row group j: I fp16 scales, then I fp16 zeros
 *   y = (q - zero) * scale
 *
 * Row group j of n = O / 32 holds rows j, j + n, j + 2n ...: the flat order of a tensor reshaped to [32, O * I / 32],
 * so the axis along which weights share is the output dimension and every input column keeps its own scale. Exactly 24
 * bytes per 32 weights in all. Layout hqq5_ax0, lossless: 24 bytes stay 24.
 *
 * Quantizer, per column of a group (the 32 weights W), all in float32 with the scale and zero as fp16 holds them:
 *   start   s = (max - min) / 31, z = -min / s
 *   step k  q = clamp(round(W / s + z), 0, 31); r = (q - z) * s; e = shrink(W - r); z = mean(q - (W - e) / s)
 *           shrink(x) = sign(x) * max(|x| - |x|^(p - 1) / beta, 0), p = 0.7, beta = 10 * 1.01^k
 *   At most 20 steps; the z with the smallest squared error is kept, and a column stops when its error grows. So the
 *   result is never worse than the start. Constant columns: s = |W|, exact but for the rounding to fp16. */
#include "../layouts/hqq5.h"
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_EXPORT_FORMAT(hqq5_ax0_g32, .name = "hqq5-ax0-g32", .same_as = "avx2", .why = ROWS8_REASON);
#else

MOE_INLINE size_t code_row_bytes(int cols) { return (size_t)cols / 32 * 20; }
/* Offset of the scales of a group; the zeros follow after `cols` of them. */
MOE_INLINE size_t meta_at(int rows, int cols, int group) {
    return (size_t)rows * code_row_bytes(cols) + (size_t)group * (size_t)cols * 4;
}

/* Planes of one block of one row, or of eight rows that lie `stride` bytes apart. */
#if MOE_TIER_ID == MOE_SCALAR
enum { ROWS_AT_ONCE = 1 };
MOE_INLINE void encode_block(uint8_t *out, const uint8_t *code, size_t stride) {
    uint32_t set[8], plane[5], fifth = get32(code + 16);
    (void)stride;
    for (int g = 0; g < 4; g++) {
        uint32_t q = get32(code + 4 * g);
        set[g] = q & 0x0f0f0f0f;
        set[g + 4] = q >> 4 & 0x0f0f0f0f;
    }
    /* Four bits spread to bit 4 of four bytes. */
    for (int g = 0; g < 8; g++) set[g] |= ((fifth >> 4 * g & 15) * 0x00204081u & 0x01010101u) << 4;
    hqq5_pack(plane, set);
    for (int i = 0; i < 5; i++) put32(out + i * HQQ5_PLANE, plane[i]);
}
#else
enum { ROWS_AT_ONCE = 8 };
MOE_INLINE void encode_block(uint8_t *out, const uint8_t *code, size_t stride) { /* hqq5_pack of every lane */
    __m256i q[4], high[4], set[8];
    dwords4(q, code, stride);
    dwords4(high, code + 4, stride); /* the fifth bits are [3] */
    for (int g = 0; g < 8; g++)
        set[g] = _mm256_or_si256(bits8(q[g % 4], g < 4 ? 0 : 4, 0x0f), bits8(spread4(high[3], g), 0, 0x10));
    for (int i = 0; i < 3; i++) put_lanes(out + i * HQQ5_PLANE, _mm256_or_si256(set[i], bits8(set[5 + i], -5, 0xe0)));
    put_lanes(out + 3 * HQQ5_PLANE, or3(set[3], bits8(set[5], -2, 0x60), bits8(set[7], -4, 0x80)));
    put_lanes(out + 4 * HQQ5_PLANE, or3(set[4], bits8(set[6], -2, 0x60), bits8(set[7], -3, 0x80)));
}
#endif

static void encode_group(void *strip, const void *matrix, int rows, int cols, int group) {
    const uint8_t *in = (const uint8_t *)matrix, *scales = in + meta_at(rows, cols, group);
    const uint8_t *zeros = scales + 2 * (size_t)cols;
    int stride = rows / HQQ5_ROWS;
    for (int b = 0; b < cols / 32; b++) {
        uint8_t *block = (uint8_t *)strip + (size_t)b * HQQ5_BLOCK;
        __builtin_memcpy(block, scales + 64 * (size_t)b, 64);
        __builtin_memcpy(block + 64, zeros + 64 * (size_t)b, 64);
    }
    for (int r = 0; r < HQQ5_ROWS; r += ROWS_AT_ONCE) {
        const uint8_t *code = in + (size_t)(group + r * stride) * code_row_bytes(cols);
        uint8_t *out = (uint8_t *)strip + HQQ5_META + 4 * r;
        for (int b = 0; b < cols / 32; b++, code += 20, out += HQQ5_BLOCK)
            encode_block(out, code, (size_t)stride * code_row_bytes(cols));
    }
}

#if MOE_TIER_ID == MOE_SCALAR
enum { LANES = 16, STEPS = 20 }; /* columns at once, for the compiler to vectorise */

/* |x|^-0.3 for normal x > 0 within a few 1e-7, from adds and multiplications alone: 2^(-0.3 * log2 x) with
 * log2 x = e + 2 / ln 2 * atanh(t), t = (m - 1) / (m + 1), m in [sqrt(1/2), sqrt(2)), |t| < 0.1716. */
static float power_minus_03(float x) {
    uint32_t u = moe_f32_bits(x), shifted = u - 0x3f3504f3u; /* sqrt(1/2) */
    int e = (int32_t)shifted >> 23;
    double m = moe_bits_f32(u - ((uint32_t)e << 23)), t = (m - 1) / (m + 1), s = t * t;
    double log2 = e + 2.885390081777927 * t * (1 + s * (1.0 / 3 + s * (1.0 / 5 + s * (1.0 / 7 + s / 9))));
    double v = -0.3 * log2, n = (double)(int)(v < 0 ? v - 0.5 : v + 0.5), f = (v - n) * 0.6931471805599453;
    double p = 1.0 / 24 + f * (1.0 / 120 + f * (1.0 / 720 + f / 5040));
    p = 1 + f * (1 + f * (1.0 / 2 + f * (1.0 / 6 + f * p)));
    return (float)(p * (double)moe_bits_f32((uint32_t)((int)n + 127) << 23));
}

/* Below a tenth |x|^1.3 < 1 / beta for every beta of the 20 steps (0.05 against 0.08), and the result is 0. */
static float shrink(float x, float inverse_beta) {
    float a = __builtin_fabsf(x);
    if (a < 0.1f) return 0;
    a -= power_minus_03(a) * inverse_beta;
    return a <= 0 ? 0 : x < 0 ? -a : a;
}

struct columns { /* LANES neighbouring columns of one group */
    float w[HQQ5_ROWS][LANES];
    float s[LANES], inverse[LANES], z[LANES];
};

static float through_f16(float v) { return moe_f16_f32(moe_f32_f16(v)); }

/* min(max(round(v), 0), 31), half to even; NaN gives 0. */
MOE_INLINE float code_of(float v) {
    v = v > 0 ? v : 0;
    v = v < 31 ? v : 31;
    return moe_round_even(v);
}

static void start(struct columns *k) {
    for (int i = 0; i < LANES; i++) {
        float low = k->w[0][i], high = low;
        for (int r = 1; r < HQQ5_ROWS; r++) {
            low = k->w[r][i] < low ? k->w[r][i] : low;
            high = k->w[r][i] > high ? k->w[r][i] : high;
        }
        /* Halves first: the range of finite weights may overflow. */
        float s = through_f16((0.5f * high - 0.5f * low) * (2.0f / 31)), z = s > 0 ? through_f16(-low / s) : 0;
        if (!(s > 0 && __builtin_fabsf(z) <= 65504)) { /* (nearly) constant: one magnitude and its sign */
            float middle = 0.5f * low + 0.5f * high;
            s = through_f16(__builtin_fabsf(middle));
            z = middle < 0 && s > 0;
        }
        k->s[i] = s;
        k->z[i] = z;
        k->inverse[i] = s > 0 ? 1.0f / s : 0;
    }
}

/* Squared error of each column at zeros z, and the zeros of the next step. */
static void step(const struct columns *k, const float *z, float inverse_beta, float *error, float *next) {
    float sum[LANES] = {0}, top = 0;
    for (int i = 0; i < LANES; i++) error[i] = 0;
    for (int i = 0; i < LANES; i++) top = k->s[i] > top ? k->s[i] : top;
    for (int r = 0; r < HQQ5_ROWS; r++) {
        float x[LANES], q[LANES];
        for (int i = 0; i < LANES; i++) {
            q[i] = code_of(k->w[r][i] * k->inverse[i] + z[i]);
            x[i] = k->w[r][i] - (q[i] - z[i]) * k->s[i];
            error[i] += x[i] * x[i];
        }
        for (int i = 0; i < LANES; i++) x[i] = k->w[r][i] - shrink(x[i], inverse_beta);
        for (int i = 0; i < LANES; i++) sum[i] += q[i] - x[i] * k->inverse[i];
    }
    for (int i = 0; i < LANES; i++) next[i] = through_f16(sum[i] * (1.0f / HQQ5_ROWS));
}

/* The alternation; columns that have stopped keep their zero while their neighbours go on. */
static void solve(struct columns *k) {
    float z[LANES], next[LANES], error[LANES], best[LANES], beta = 10;
    int running[LANES], any = 1;
    for (int i = 0; i < LANES; i++) z[i] = k->z[i], best[i] = __builtin_inff(), running[i] = k->s[i] > 0;
    for (int n = 0; n <= STEPS && any; n++, beta *= 1.01f) {
        step(k, z, 1.0f / beta, error, next);
        any = 0;
        for (int i = 0; i < LANES; i++) {
            running[i] &= error[i] < best[i] && __builtin_fabsf(next[i]) <= 65504;
            if (!running[i]) continue;
            best[i] = error[i];
            k->z[i] = z[i];
            z[i] = next[i];
            any = 1;
        }
    }
}

static void quantize_group(void *matrix, const float *x, int rows, int cols, int group) {
    uint8_t *out = (uint8_t *)matrix, *scales = out + meta_at(rows, cols, group), *zeros = scales + 2 * (size_t)cols;
    int stride = rows / HQQ5_ROWS;
    for (int c = 0; c < cols; c += LANES) {
        struct columns k;
        for (int r = 0; r < HQQ5_ROWS; r++)
            __builtin_memcpy(k.w[r], x + (size_t)(group + r * stride) * (size_t)cols + c, sizeof k.w[r]);
        start(&k);
        solve(&k);
        for (int i = 0; i < LANES; i++) {
            put16(scales + 2 * (size_t)(c + i), moe_f32_f16(k.s[i]));
            put16(zeros + 2 * (size_t)(c + i), moe_f32_f16(k.z[i]));
        }
        for (int r = 0; r < HQQ5_ROWS; r++) {
            /* The first sixteen columns of a block, the low nibbles, start its bytes; the others complete them. */
            uint8_t *code = out + (size_t)(group + r * stride) * code_row_bytes(cols) + (size_t)c / 32 * 20;
            int high = c % 32 / 16;
            uint32_t fifth = 0;
            for (int i = 0; i < LANES; i++) {
                int q = (int)code_of(k.w[r][i] * k.inverse[i] + k.z[i]);
                code[i] = (uint8_t)(high ? code[i] | (q & 15) << 4 : q & 15);
                fifth |= (uint32_t)(q >> 4) << i;
            }
            put16(code + 16 + 2 * high, (uint16_t)fifth);
        }
    }
}

static int check_group(const void *matrix, int rows, int cols, int group) {
    const uint8_t *scales = (const uint8_t *)matrix + meta_at(rows, cols, group), *zeros = scales + 2 * (size_t)cols;
    for (int c = 0; c < cols; c++)
        if (!finite16(get16(scales + 2 * (size_t)c)) || !finite16(get16(zeros + 2 * (size_t)c))) return c / 32;
    return -1;
}

MOE_EXPORT_FORMAT(hqq5_ax0_g32, .name = "hqq5-ax0-g32", .version = 1, .block_len = 32, .block_bytes = 24,
                  .layout = "hqq5_ax0", .group_rows = HQQ5_ROWS, .encode_group = encode_group,
                  .quantize_group = quantize_group, .check_group = check_group);
#else
MOE_EXPORT_FORMAT(hqq5_ax0_g32, .name = "hqq5-ax0-g32", .version = 1, .block_len = 32, .block_bytes = 24,
                  .layout = "hqq5_ax0", .group_rows = HQQ5_ROWS, .encode_group = encode_group);
#endif
#endif
