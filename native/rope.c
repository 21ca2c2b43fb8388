/* Rotary position embedding: frequencies, tables, and the drive over tokens and heads (one head's rotation is
 * vec->rope). Tables are made in double with the routines below and not with libm, whose last bit differs between
 * systems. Only + - * / and conversions are used, in a fixed order, so every machine makes the same tables.
 *
 * The angle is the float32 product position * inv_freq, as in the reference implementations: at large positions its
 * rounding is part of the model. */
#include "internal.h"
#include "moe.h"

/* ---- double-double: a value is hi + lo with |lo| <= ulp(hi) / 2, about 104 bits ---- */
struct dd { double hi, lo; };

static struct dd dd_quick_sum(double a, double b) { /* |a| >= |b| */
    struct dd r = {a + b, 0};
    r.lo = b - (r.hi - a);
    return r;
}
static struct dd dd_sum(double a, double b) {
    struct dd r = {a + b, 0};
    double t = r.hi - a;
    r.lo = (a - (r.hi - t)) + (b - t);
    return r;
}
static struct dd dd_product(double a, double b) { /* Dekker: 27-bit halves, whose products are exact */
    const double split = 134217729.0; /* 2^27 + 1 */
    double ta = split * a, tb = split * b, ah = ta - (ta - a), bh = tb - (tb - b), al = a - ah, bl = b - bh;
    struct dd r = {a * b, 0};
    r.lo = ((ah * bh - r.hi) + ah * bl + al * bh) + al * bl;
    return r;
}
static struct dd dd_add(struct dd a, struct dd b) {
    struct dd s = dd_sum(a.hi, b.hi);
    return dd_quick_sum(s.hi, s.lo + a.lo + b.lo);
}
static struct dd dd_mul(struct dd a, struct dd b) {
    struct dd p = dd_product(a.hi, b.hi);
    return dd_quick_sum(p.hi, p.lo + (a.hi * b.lo + a.lo * b.hi));
}
static struct dd dd_div(struct dd a, double b) {
    double q = a.hi / b;
    struct dd p = dd_product(q, b);
    return dd_quick_sum(q, (((a.hi - p.hi) - p.lo) + a.lo) / b);
}
static double power_of_two(int n) { /* -1022 <= n <= 1023 */
    uint64_t bits = (uint64_t)(n + 1023) << 52;
    double r;
    __builtin_memcpy(&r, &bits, 8);
    return r;
}

/* exp for |x| < 700: x = n ln2 + r, the Taylor series of r / 512 (next term below 1e-32), squared nine times. */
static struct dd dd_exp(struct dd x) {
    const struct dd ln2 = {0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56};
    const int n = (int)(x.hi * 0x1.71547652b82fep0 + (x.hi < 0 ? -0.5 : 0.5));
    struct dd r = dd_add(x, dd_mul(ln2, (struct dd){-(double)n, 0})), sum = {1, 0};
    r.hi *= 0x1p-9;
    r.lo *= 0x1p-9;
    for (int i = 9; i > 0; i--) sum = dd_add((struct dd){1, 0}, dd_div(dd_mul(sum, r), (double)i));
    for (int i = 0; i < 9; i++) sum = dd_mul(sum, sum);
    sum.hi *= power_of_two(n);
    sum.lo *= power_of_two(n);
    return sum;
}

/* Natural logarithm of a normal x > 0: Newton's y + (x exp(-y) - 1) from a start within 0.06; errors square each
 * time. */
static struct dd dd_log(double x) {
    uint64_t bits;
    __builtin_memcpy(&bits, &x, 8);
    const int exponent = (int)(bits >> 52) - 1023;
    const double mantissa = x * power_of_two(-exponent / 2) * power_of_two(-exponent - -exponent / 2);
    struct dd y = {0.6931471805599453 * ((double)exponent + (mantissa - 1.0)), 0};
    for (int i = 0; i < 5; i++) {
        struct dd e = dd_mul(dd_exp((struct dd){-y.hi, -y.lo}), (struct dd){x, 0});
        y = dd_add(y, dd_add(e, (struct dd){-1, 0}));
    }
    return y;
}

/* ---- sine and cosine ---- */
/* r in [-pi/4, pi/4] and its quadrant for |x| < 2^24. pi/2 is cut into two parts of 28 bits, whose products with
 * n < 2^24 are exact, and a rest. */
static double reduce_angle(double x, int *quadrant) {
    const double part1 = 0x1.921fb54p+0, part2 = 0x1.10b4610p-30, rest = 0x1.a62633145c06ep-58;
    const double magic = 0x1.8p52;
    const double t = x * 0x1.45f306dc9c883p-1 + magic, n = t - magic; /* nearest integer to x * 2 / pi */
    *quadrant = (int)n & 3;
    return ((x - n * part1) - n * part2) - n * rest;
}

/* Taylor series to r^17 and r^18: the first term left out is below 1e-19 for |r| <= pi/4 + 1e-6. */
static void sin_cos(double x, double *sine, double *cosine) {
    static const double s[] = {1.0, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800.0,
                               -1.0 / 1307674368000.0, 1.0 / 355687428096000.0};
    static const double c[] = {1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600,
                               -1.0 / 87178291200.0, 1.0 / 20922789888000.0, -1.0 / 6402373705728000.0};
    int quadrant;
    const double r = reduce_angle(x, &quadrant), r2 = r * r;
    double ps = s[8], pc = c[9];
    for (int i = 7; i > 0; i--) ps = ps * r2 + s[i];
    for (int i = 8; i > 0; i--) pc = pc * r2 + c[i];
    ps = r + r * (r2 * ps);
    pc = 1.0 + r2 * pc;
    *sine = quadrant & 1 ? pc : ps;
    *cosine = quadrant & 1 ? ps : pc;
    if (quadrant & 2) *sine = -*sine;
    if (quadrant == 1 || quadrant == 2) *cosine = -*cosine;
}

static int frequencies_ok(const void *out, double theta, int rotary_dim) {
    return out && rotary_dim > 0 && rotary_dim % 2 == 0 && theta >= 1e-100 && theta <= 1e100;
}
static double frequency(struct dd log_theta, int i, int rotary_dim) {
    return dd_exp(dd_div(dd_mul(log_theta, (struct dd){-2.0 * i, 0}), (double)rotary_dim)).hi;
}

int moe_rope_inv_freq(float *inv_freq, double theta, int rotary_dim) {
    if (!frequencies_ok(inv_freq, theta, rotary_dim)) return MOE_BAD_ARGUMENT;
    const struct dd log_theta = dd_log(theta);
    for (int i = 0; i < rotary_dim / 2; i++) inv_freq[i] = (float)frequency(log_theta, i, rotary_dim);
    return MOE_OK;
}

int moe_rope_frequencies(double *frequencies, double theta, int rotary_dim) {
    if (!frequencies_ok(frequencies, theta, rotary_dim)) return MOE_BAD_ARGUMENT;
    const struct dd log_theta = dd_log(theta);
    for (int i = 0; i < rotary_dim / 2; i++) frequencies[i] = frequency(log_theta, i, rotary_dim);
    return MOE_OK;
}

double moe_log(double x) { return dd_log(x).hi; }

int moe_rope_table(float *cosines, float *sines, const float *inv_freq, int half, int first_position, int num_positions,
                   float scale) {
    const int max_position = 1 << 24; /* exact in float32 */
    if (!cosines || !sines || !inv_freq || half <= 0 || first_position < 0 || num_positions < 0)
        return MOE_BAD_ARGUMENT;
    if (first_position > max_position - num_positions) return MOE_BAD_ARGUMENT;
    for (int t = 0; t < num_positions; t++)
        for (int i = 0; i < half; i++) {
            const float angle = (float)(first_position + t) * inv_freq[i];
            const size_t at = (size_t)t * (size_t)half + (size_t)i;
            double sine, cosine;
            if (!(angle > -16777216.0f && angle < 16777216.0f)) return MOE_BAD_ARGUMENT;
            sin_cos(angle, &sine, &cosine);
            cosines[at] = (float)(cosine * (double)scale);
            sines[at] = (float)(sine * (double)scale);
        }
    return MOE_OK;
}

struct rope_job {
    struct moe_ctx *ctx;
    float *x;
    const float *cosines, *sines;
    int num_heads, head_dim, rotary_dim, first_position, interleaved;
};

static void rotate_token(void *arg, int t, int worker) {
    const struct rope_job *job = arg;
    const size_t row = ((size_t)job->first_position + (size_t)t) * (size_t)(job->rotary_dim / 2);
    (void)worker;
    for (int h = 0; h < job->num_heads; h++) {
        float *x = job->x + ((size_t)t * (size_t)job->num_heads + (size_t)h) * (size_t)job->head_dim;
        job->ctx->vec->rope(x, job->cosines + row, job->sines + row, job->head_dim, job->rotary_dim, job->interleaved);
    }
}

int moe_rope(struct moe_ctx *ctx, float *x, int num_tokens, int num_heads, int head_dim, int rotary_dim,
             const float *cosines, const float *sines, int first_position, int interleaved) {
    enum { PARALLEL_ELEMENTS = 65536 }; /* below this size a worker is not worth waking */
    if (!ctx || num_tokens < 0 || num_heads <= 0 || head_dim <= 0 || rotary_dim <= 0 || rotary_dim > head_dim)
        return MOE_BAD_ARGUMENT;
    if (rotary_dim % 2 || first_position < 0 || (interleaved != 0 && interleaved != 1)) return MOE_BAD_ARGUMENT;
    if (num_tokens == 0) return MOE_OK;
    if (!x || !cosines || !sines) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    struct rope_job job = {ctx, x, cosines, sines, num_heads, head_dim, rotary_dim, first_position, interleaved};
    if ((int64_t)num_tokens * num_heads * rotary_dim < PARALLEL_ELEMENTS)
        for (int t = 0; t < num_tokens; t++) rotate_token(&job, t, 0);
    else
        moe_parallel(ctx, num_tokens, rotate_token, &job);
    return moe_leave(ctx, saved, MOE_OK);
}
