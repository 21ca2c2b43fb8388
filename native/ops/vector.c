/* Row operations on float32, written once on sixteen lanes (vec16.h) or as plain loops that every tier's compiler may
 * vectorise: no loop below has an order to lose, except the reductions, which name theirs. Definitions, with reasons:
 * docs/arithmetic.md. Reductions keep element i in lane i mod 16 and end in v16_reduce_add's fixed tree. */
#include "tier.h"
#include "quantize32.h"
#include "rotation.h"
#include "vec16.h"
#include <float.h>

/* The first n < 16 elements, the others `pad`. */
MOE_INLINE v16 load_padded(const float *x, int n, float pad) {
    float t[16];
    for (int i = 0; i < 16; i++) t[i] = i < n ? x[i] : pad;
    return v16_load(t);
}

/* ---- activation quantizer ---- */
/* Signs of the tile lengths 256 .. 32768, length n at byte n / 8; made once, by the first that asks. */
static const uint8_t *rotation_signs(int n) {
    static uint8_t bits[ROTATION_SIGN_BYTES];
    static int state; /* 0 nothing, 1 being made, 2 there */
    int expected = 0;
    if (__atomic_load_n(&state, __ATOMIC_ACQUIRE) != 2) {
        if (__atomic_compare_exchange_n(&state, &expected, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) {
            for (int k = ROTATION_MIN; k <= ROTATION_MAX; k *= 2) rotation_make_signs(bits + k / 8, k);
            __atomic_store_n(&state, 2, __ATOMIC_RELEASE);
        }
        while (__atomic_load_n(&state, __ATOMIC_ACQUIRE) != 2) continue; /* some ten microseconds, once */
    }
    return bits + n / 8;
}

__attribute__((noinline))
static void quantize_rotated(int8_t *q, float *d, int16_t *sum16, int32_t *sum32, const float *x, int cols) {
    float tile[ROTATION_MAX]; /* 128 KiB of stack: not inlined, so that only this form needs them */
    for (int at = 0, n; at < cols; at += n) {
        n = rotation_length(cols - at);
        rotation_tile(tile, x + at, n, rotation_signs(n));
        for (int b = 0; b < n / 256; b++)
            quantize_block(q + at + 256 * b, d + at / 256 + b, sum16 + at / 16 + 16 * b, sum32 + at / 32 + 8 * b,
                           tile + 256 * b, 256);
    }
}

static void rotate(float *y, const float *x, int cols) {
    for (int at = 0, n; at < cols; at += n) {
        n = rotation_length(cols - at);
        rotation_tile(y + at, x + at, n, rotation_signs(n));
    }
}

static void quantize_q8(void *act, const float *x, int cols, int activation) {
    struct moe_act_view v = moe_act_view(act, activation, cols);
    int8_t *q = (int8_t *)v.q;
    float *d = (float *)v.d;
    int16_t *sum16 = (int16_t *)v.sum16;
    int32_t *sum32 = (int32_t *)v.sum32;
    if (activation == MOE_ACT_Q8_256_ROTATED) quantize_rotated(q, d, sum16, sum32, x, cols);
    else if (activation == MOE_ACT_Q8_256)
        for (int b = 0; b < cols / 256; b++)
            quantize_block(q + 256 * b, d + b, sum16 + 16 * b, sum32 + 8 * b, x + 256 * b, 256);
    else
        for (int b = 0; b < cols / 32; b++) quantize_block(q + 32 * b, d + b, sum16 + 2 * b, sum32 + b, x + 32 * b, 32);
}

/* ---- norms and activations ---- */
static void rmsnorm(float *y, const float *x, const float *weight, int n, float eps) {
    v16 sum = v16_zero();
    int i = 0;
    for (; i + 16 <= n; i += 16) { v16 a = v16_load(x + i); sum = v16_fma(a, a, sum); }
    if (i < n) { v16 a = v16_load_n(x + i, n - i); sum = v16_fma(a, a, sum); }
    float total = v16_reduce_add(sum), r = 1.0f / __builtin_sqrtf(total / (float)n + eps);
    if (!(total <= FLT_MAX)) r = total - total; /* NaN: an overflowed sum must not turn the row into zeros */
    const v16 vr = v16_set1(r);
    for (i = 0; i + 16 <= n; i += 16) v16_store(y + i, v16_mul(v16_mul(v16_load(x + i), vr), v16_load(weight + i)));
    for (; i < n; i++) y[i] = x[i] * r * weight[i];
}

static void clip(float *x, int64_t n, float limit) {
    const v16 low = v16_set1(-limit), high = v16_set1(limit);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store(x + i, v16_max(low, v16_min(high, v16_load(x + i))));
    if (i < n) v16_store_n(x + i, v16_max(low, v16_min(high, v16_load_n(x + i, (int)(n - i)))), (int)(n - i));
}

MOE_INLINE float row_max(const float *x, int n) {
    v16 m = load_padded(x, n < 16 ? n : 16, -__builtin_inff());
    int i = 16;
    for (; i + 16 <= n; i += 16) m = v16_max(m, v16_load(x + i));
    if (i < n) m = v16_max(m, load_padded(x + i, n - i, -__builtin_inff()));
    return v16_reduce_max(m);
}

/* A NaN that the maximum loses comes back in the sum, so the row is NaN; so is a row whose maximum is infinite. */
static void softmax(float *y, const float *x, int n) {
    const v16 m = v16_set1(row_max(x, n));
    v16 sum = v16_zero();
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 e = v16_exp(v16_sub(v16_load(x + i), m));
        v16_store(y + i, e);
        sum = v16_add(sum, e);
    }
    if (i < n) { /* exp(-inf) is exactly 0 */
        v16 e = v16_exp(v16_sub(load_padded(x + i, n - i, -__builtin_inff()), m));
        v16_store_n(y + i, e, n - i);
        sum = v16_add(sum, e);
    }
    float total = v16_reduce_add(sum);
    const v16 d = v16_set1(total);
    for (i = 0; i + 16 <= n; i += 16) v16_store(y + i, v16_div(v16_load(y + i), d));
    for (; i < n; i++) y[i] /= total;
}

/* ln x for finite x >= 1 (here: a sum that holds exp(0)): x = 2^e m with m in [sqrt(1/2), sqrt(2)),
 * ln m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.1716; the first term left out is below s^23 2/23 < 1e-18. */
static double natural_log(double x) {
    uint64_t u;
    __builtin_memcpy(&u, &x, 8);
    int e = (int)(u >> 52) - 1023;
    u = (u & 0xfffffffffffffull) | 0x3ff0000000000000ull;
    double m;
    __builtin_memcpy(&m, &u, 8);
    if (m > 1.4142135623730951) { m *= 0.5; e++; }
    double s = (m - 1.0) / (m + 1.0), z = s * s, p = 1.0 / 21.0;
    for (int k = 19; k >= 1; k -= 2) p = p * z + 1.0 / (double)k;
    return (double)e * 0.6931471805599453 + 2.0 * s * p;
}

/* Sixteen double lanes in the compiler's own vectors: a conversion is exact and an addition rounds once everywhere. */
typedef float f4 __attribute__((vector_size(16)));
typedef double d4 __attribute__((vector_size(32)));

static double logsumexp(const float *x, int n) {
    float top = row_max(x, n), t[16];
    const v16 m = v16_set1(top);
    d4 lanes[4] = {{0}};
    for (int i = 0; i < n; i += 16) {
        v16 a = n - i < 16 ? load_padded(x + i, n - i, -__builtin_inff()) : v16_load(x + i);
        f4 part[4];
        v16_store(t, v16_exp(v16_sub(a, m)));
        __builtin_memcpy(part, t, sizeof part);
        for (int j = 0; j < 4; j++) lanes[j] += __builtin_convertvector(part[j], d4);
    }
    double sum[16];
    __builtin_memcpy(sum, lanes, sizeof sum);
    for (int h = 8; h; h /= 2) for (int j = 0; j < h; j++) sum[j] += sum[j + h];
    if (!(sum[0] <= DBL_MAX)) return sum[0];
    return (double)top + natural_log(sum[0]);
}

/* g / (1 + exp(-g)) * u */
MOE_INLINE v16 swiglu_16(v16 g, v16 u) {
    return v16_mul(v16_div(g, v16_add(v16_set1(1.0f), v16_exp(v16_neg(g)))), u);
}
static void swiglu(float *y, const float *gate, const float *up, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, swiglu_16(v16_load(gate + i), v16_load(up + i)));
    int rest = (int)(n - i);
    if (rest) v16_store_n(y + i, swiglu_16(v16_load_n(gate + i, rest), v16_load_n(up + i, rest)), rest);
}

/* g = min(gate, limit), u = up clamped to [-limit, limit]: g / (1 + exp(-(1.702 g))) * (u + 1) */
MOE_INLINE v16 swiglu_clamped_16(v16 gate, v16 up, v16 limit) {
    const v16 one = v16_set1(1.0f), g = v16_min(limit, gate), u = v16_max(v16_neg(limit), v16_min(limit, up));
    const v16 sigmoid_part = v16_add(one, v16_exp(v16_neg(v16_mul(v16_set1(1.702f), g))));
    return v16_mul(v16_div(g, sigmoid_part), v16_add(u, one));
}
static void swiglu_clamped(float *y, const float *gate, const float *up, int64_t n, float limit) {
    const v16 l = v16_set1(limit);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, swiglu_clamped_16(v16_load(gate + i), v16_load(up + i), l));
    int rest = (int)(n - i);
    if (rest) v16_store_n(y + i, swiglu_clamped_16(v16_load_n(gate + i, rest), v16_load_n(up + i, rest), l), rest);
}

/* 1 / (1 + exp(-x)) */
MOE_INLINE v16 sigmoid_16(v16 x) {
    const v16 one = v16_set1(1.0f);
    return v16_div(one, v16_add(one, v16_exp(v16_neg(x))));
}
static void sigmoid(float *y, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, sigmoid_16(v16_load(x + i)));
    if (i < n) v16_store_n(y + i, sigmoid_16(v16_load_n(x + i, (int)(n - i))), (int)(n - i));
}

static void exp_row(float *y, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, v16_exp(v16_load(x + i)));
    if (i < n) v16_store_n(y + i, v16_exp(v16_load_n(x + i, (int)(n - i))), (int)(n - i));
}

/* ---- elementwise ---- */
/* Each product and each sum is rounded, as in the reference implementation: x cos + rotated(x) sin. */
static void rope(float *x, const float *cosines, const float *sines, int head_dim, int rotary_dim, int interleaved) {
    (void)head_dim; /* dimensions past rotary_dim stay */
    int half = rotary_dim / 2, next = interleaved ? 1 : half, step = interleaved ? 2 : 1;
    if (!interleaved && half % 16 == 0) {
        for (int j = 0; j < half; j += 16) {
            v16 a = v16_load(x + j), b = v16_load(x + half + j), c = v16_load(cosines + j), s = v16_load(sines + j);
            v16_store(x + j, v16_sub(v16_mul(a, c), v16_mul(b, s)));
            v16_store(x + half + j, v16_add(v16_mul(b, c), v16_mul(a, s)));
        }
        return;
    }
    for (int j = 0; j < half; j++) {
        float a = x[step * j], b = x[step * j + next];
        x[step * j] = a * cosines[j] - b * sines[j];
        x[step * j + next] = b * cosines[j] + a * sines[j];
    }
}

static void add(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] += x[i];
}

static void scale(float *y, const float *x, float s, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = s * x[i];
}

static void fma_row(float *y, const float *x, float s, int64_t n) {
    const v16 vs = v16_set1(s);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, v16_fma(vs, v16_load(x + i), v16_load(y + i)));
    int rest = (int)(n - i);
    if (rest) v16_store_n(y + i, v16_fma(vs, v16_load_n(x + i, rest), v16_load_n(y + i, rest)), rest);
}

static int all_finite(const float *x, int64_t n) {
    int32_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t a = (int32_t)(moe_f32_bits(x[i]) & 0x7fffffffu);
        top = a > top ? a : top;
    }
    return top < 0x7f800000;
}

/* ---- 16-bit floats ---- */
static void f16_to_f32(float *y, const uint16_t *x, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, v16_load_f16(x + i));
    for (; i < n; i++) y[i] = moe_f16_f32(x[i]);
}
static void f32_to_f16(uint16_t *y, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store_f16(y + i, v16_load(x + i));
    for (; i < n; i++) y[i] = moe_f32_f16(x[i]);
}
static void bf16_to_f32(float *y, const uint16_t *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = moe_bf16_f32(x[i]);
}
static void f32_to_bf16(uint16_t *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = moe_f32_bf16(x[i]);
}

MOE_EXPORT_OPS(vector, .quantize_q8 = quantize_q8, .rotate = rotate, .rmsnorm = rmsnorm, .clip = clip,
               .softmax = softmax, .logsumexp = logsumexp, .swiglu = swiglu, .swiglu_clamped = swiglu_clamped,
               .sigmoid = sigmoid, .rope = rope, .add = add, .scale = scale, .fma = fma_row,
               .all_finite = all_finite, .exp = exp_row, .f16_to_f32 = f16_to_f32, .f32_to_f16 = f32_to_f16,
               .bf16_to_f32 = bf16_to_f32, .f32_to_bf16 = f32_to_bf16);
