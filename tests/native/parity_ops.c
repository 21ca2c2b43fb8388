/* Row operations and attention of one tier against the scalar tables. */
#include "parity.h"

#if PARITY_SMALL
enum { SWEEP = 2048, F16_STEP = 29, HEAD_STEP = 21 };
static const int lengths[] = {1, 15, 16, 17, 40};
#else
enum { SWEEP = 200000, F16_STEP = 1, HEAD_STEP = 1 };
static const int lengths[] = {1, 2, 7, 8, 9, 15, 16, 17, 23, 31, 32, 33, 48, 63, 64, 65, 100, 256, 259, 1000};
#endif
enum { N = 1 << 18 };
#define LENGTH(a) ((int)(sizeof(a) / sizeof(a)[0]))
enum row_kind { UNIT, WIDE, SPECIAL, BITS, NUM_ROW_KINDS };
static const char *const row_label[] = {"unit data, n", "wide data, n", "special values, n", "random bits, n"};

static _Alignas(64) float a_row[N], b_row[N], want_row[N], got_row[N + 2 * PARITY_GUARD + 1];
static _Alignas(64) uint16_t half_row[N], half_want[N], half_got[N];
#define GOT (got_row + PARITY_GUARD + 1) /* odd on purpose: rows of callers are aligned to 4 bytes only */

static void fill(struct parity *p, float *x, int n, int kind) {
    static const uint32_t specials[] = {0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x00800000, 0x7f7fffff,
                                        0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0x3f800000, 0xbf800000,
                                        0x42b17218, 0xc2aeac50, 0xc2cff1b5, 0x4b400000};
    for (int i = 0; i < n; i++) {
        if (kind == UNIT) x[i] = parity_unit(p);
        else if (kind == WIDE) x[i] = parity_wide(p);
        else if (kind == SPECIAL)
            x[i] =
                parity_u32(p) % 3 ? parity_unit(p) * 90.0f : moe_bits_f32(specials[parity_u32(p) % LENGTH(specials)]);
        else x[i] = moe_bits_f32(parity_u32(p));
    }
}

static void u16_outputs(struct parity *p, int n, int nan_aside) {
    uint32_t *got = (uint32_t *)(void *)GOT, *want = (uint32_t *)(void *)want_row;
    for (int i = 0; i < PARITY_GUARD; i++)
        if (half_got[n + PARITY_GUARD + i] != 0x5a5a || half_got[i] != 0x5a5a)
            parity_fail(p, "wrote outside the output");
    for (int i = 0; i < n; i++) {
        got[i] = half_got[PARITY_GUARD + i];
        want[i] = half_want[i];
        if (nan_aside && (got[i] & 0x7fff) > 0x7f80 && (want[i] & 0x7fff) > 0x7f80) got[i] = want[i] = 0x7fc0;
    }
    parity_words(p, got, want, (size_t)n);
}

/* ---- one function per slot ---- */
static void op_quantize_q8(struct parity *p) {
    static const int cols_list[] = {32, 96, 256, 768};
    unsigned char *got = (unsigned char *)(void *)got_row, *want = (unsigned char *)(void *)want_row;
    for (int kind = 0; kind < NUM_ROW_KINDS; kind++)
        for (int c = 0; c < LENGTH(cols_list); c++)
            for (int activation = MOE_ACT_Q8_32; activation <= MOE_ACT_Q8_256_ROTATED; activation++) {
                int cols = cols_list[c];
                if (cols % moe_act_block(activation)) continue;
                parity_where(p, row_label[kind], cols, "activation form", activation, 0, 0);
                fill(p, a_row + 1, cols, kind);
                if (kind == UNIT) for (int i = 0; i < 32; i++) a_row[1 + i] = 0.0f;
                if (kind == WIDE)
                    for (int i = 0; i < 32; i++) a_row[1 + i] = (float)(2 * (i % 64) - 31) * 0.5f; /* ties */
                unsigned char *g = (unsigned char *)(((uintptr_t)got + 63) & ~(uintptr_t)63);
                p->vec->quantize_q8(g, a_row + 1, cols, activation);
                p->vec_scalar->quantize_q8(want, a_row + 1, cols, activation);
                struct moe_act_view vg = moe_act_view(g, activation, cols), vw = moe_act_view(want, activation, cols);
                parity_bytes(p, vg.q, vw.q, (size_t)cols);
                parity_words(p, (const uint32_t *)(const void *)vg.d, (const uint32_t *)(const void *)vw.d,
                             (size_t)(cols / moe_act_block(activation)));
                parity_bytes(p, vg.sum16, vw.sum16, (size_t)cols / 16 * 2);
                parity_bytes(p, vg.sum32, vw.sum32, (size_t)cols / 32 * 4);
                for (int g16 = 0, sum; g16 < cols / 16; g16++) {
                    sum = 0;
                    for (int i = 0; i < 16; i++) sum += vw.q[16 * g16 + i];
                    if (sum != vw.sum16[g16]) parity_fail(p, "sum16 is not the sum of the codes");
                }
            }
}

static void op_rotate(struct parity *p) {
    for (int kind = 0; kind < NUM_ROW_KINDS; kind++)
        for (int cols = 256; cols <= 768; cols += 512) { /* one tile, and two of different length */
            parity_where(p, row_label[kind], cols, 0, 0, 0, 0);
            fill(p, a_row + 1, cols, kind);
            parity_poison(GOT, (size_t)cols);
            p->vec_scalar->rotate(want_row, a_row + 1, cols);
            p->vec->rotate(GOT, a_row + 1, cols);
            parity_floats(p, GOT, want_row, (size_t)cols);
        }
}

/* Rows of every length and kind through one call each; the callback runs want and got. */
typedef void (*row_fn)(const struct moe_vector_ops *v, float *y, int n);
static void rows(struct parity *p, row_fn fn, int in_place) {
    for (int kind = 0; kind < NUM_ROW_KINDS; kind++)
        for (int i = 0; i < LENGTH(lengths); i++) {
            int n = lengths[i];
            parity_where(p, row_label[kind], n, 0, 0, 0, 0);
            fill(p, a_row, n, kind);
            fill(p, b_row, n, kind);
            if (kind == UNIT) for (int j = 0; j < n; j++) a_row[j] *= 20.0f;
            parity_poison(GOT, (size_t)n);
            if (in_place) {
                __builtin_memcpy(want_row, b_row, (size_t)n * 4);
                __builtin_memcpy(GOT, b_row, (size_t)n * 4);
            } else {
                parity_poison(want_row + PARITY_GUARD, (size_t)n);
            }
            fn(p->vec_scalar, want_row, n);
            fn(p->vec, GOT, n);
            parity_floats(p, GOT, want_row, (size_t)n);
        }
}
static void call_rmsnorm(const struct moe_vector_ops *v, float *y, int n) { v->rmsnorm(y, a_row, b_row, n, 1e-5f); }
static void call_rmsnorm_in_place(const struct moe_vector_ops *v, float *y, int n) {
    v->rmsnorm(y, y, a_row, n, 1e-6f);
}
static void call_clip(const struct moe_vector_ops *v, float *y, int n) { v->clip(y, n, 0.5f); }
static void call_softmax(const struct moe_vector_ops *v, float *y, int n) { v->softmax(y, a_row, n); }
static void call_swiglu(const struct moe_vector_ops *v, float *y, int n) { v->swiglu(y, a_row, b_row, n); }
static void call_swiglu_clamped(const struct moe_vector_ops *v, float *y, int n) {
    v->swiglu_clamped(y, a_row, b_row, n, 7.0f);
}
static void call_sigmoid(const struct moe_vector_ops *v, float *y, int n) { v->sigmoid(y, a_row, n); }
static void call_add(const struct moe_vector_ops *v, float *y, int n) { v->add(y, a_row, n); }
static void call_scale(const struct moe_vector_ops *v, float *y, int n) { v->scale(y, a_row, 0.3333f, n); }
static void call_fma(const struct moe_vector_ops *v, float *y, int n) { v->fma(y, a_row, -1.7f, n); }
static void call_exp(const struct moe_vector_ops *v, float *y, int n) { v->exp(y, a_row, n); }
static void op_rmsnorm(struct parity *p) { rows(p, call_rmsnorm, 0); rows(p, call_rmsnorm_in_place, 1); }
static void op_clip(struct parity *p) { rows(p, call_clip, 1); }
static void op_softmax(struct parity *p) { rows(p, call_softmax, 0); }
static void op_swiglu(struct parity *p) { rows(p, call_swiglu, 0); }
static void op_swiglu_clamped(struct parity *p) { rows(p, call_swiglu_clamped, 0); }
static void op_sigmoid(struct parity *p) { rows(p, call_sigmoid, 0); }
static void op_add(struct parity *p) { rows(p, call_add, 1); }
static void op_scale(struct parity *p) { rows(p, call_scale, 0); }
static void op_fma(struct parity *p) { rows(p, call_fma, 1); }

static void op_exp(struct parity *p) {
    rows(p, call_exp, 0);
    parity_where(p, "sweep", SWEEP, 0, 0, 0, 0);
    for (int i = 0; i < SWEEP; i++) a_row[i] = i % 5 ? parity_unit(p) * 104.0f : moe_bits_f32(parity_u32(p));
    parity_poison(GOT, SWEEP);
    p->vec_scalar->exp(want_row, a_row, SWEEP);
    p->vec->exp(GOT, a_row, SWEEP);
    parity_floats(p, GOT, want_row, SWEEP);
}

static void op_logsumexp(struct parity *p) {
    for (int kind = 0; kind < NUM_ROW_KINDS; kind++)
        for (int i = 0; i < LENGTH(lengths); i++) {
            parity_where(p, row_label[kind], lengths[i], 0, 0, 0, 0);
            fill(p, a_row + 1, lengths[i], kind);
            double got = p->vec->logsumexp(a_row + 1, lengths[i]),
                   want = p->vec_scalar->logsumexp(a_row + 1, lengths[i]);
            if (got != got) got = 0.5;
            if (want != want) want = 0.5;
            parity_bytes(p, &got, &want, sizeof got);
        }
}

static void op_rope(struct parity *p) {
    static const int head_dims[] = {16, 24, 64, 128};
    for (int h = 0; h < LENGTH(head_dims); h++)
        for (int part = 1; part <= 4; part++)
            for (int interleaved = 0; interleaved < 2; interleaved++) {
                int head_dim = head_dims[h], rotary_dim = head_dim * part / 4 & ~1;
                parity_where(p, "head_dim", head_dim, "rotary_dim", rotary_dim, "interleaved", interleaved);
                fill(p, a_row, head_dim, UNIT);
                fill(p, b_row, head_dim, WIDE);
                parity_poison(GOT, (size_t)head_dim);
                __builtin_memcpy(want_row, b_row, (size_t)head_dim * 4);
                __builtin_memcpy(GOT, b_row, (size_t)head_dim * 4);
                p->vec_scalar->rope(want_row, a_row, a_row + rotary_dim / 2, head_dim, rotary_dim, interleaved);
                p->vec->rope(GOT, a_row, a_row + rotary_dim / 2, head_dim, rotary_dim, interleaved);
                parity_floats(p, GOT, want_row, (size_t)head_dim);
                for (int d = rotary_dim; d < head_dim; d++)
                    if (want_row[d] != b_row[d]) parity_fail(p, "turned a dimension past rotary_dim");
            }
}

static void op_all_finite(struct parity *p) {
    static const uint32_t odd_ones[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffffffff, 0x7f800001};
    for (int i = 0; i < LENGTH(lengths); i++) {
        int n = lengths[i];
        parity_where(p, "n", n, 0, 0, 0, 0);
        fill(p, a_row + 1, n, WIDE);
        a_row[1] = 3.402823466e38f; /* the largest float is finite */
        a_row[0] = a_row[n + 1] = moe_bits_f32(0x7fc00000); /* not part of the row */
        if (!p->vec->all_finite(a_row + 1, n)) parity_fail(p, "a finite row is called non-finite");
        for (int at = 0; at < n; at += PARITY_SMALL ? 5 : 1) {
            float kept = a_row[1 + at];
            a_row[1 + at] = moe_bits_f32(odd_ones[at % LENGTH(odd_ones)]);
            if (p->vec->all_finite(a_row + 1, n)) parity_fail(p, "a non-finite value was overlooked");
            a_row[1 + at] = kept;
        }
    }
}

/* Every 16-bit pattern. */
static int every_half(void) {
    int n = 0;
    for (int h = 0; h < 65536; h += F16_STEP) half_row[n++] = (uint16_t)h;
    return n;
}
static void op_f16_to_f32(struct parity *p) {
    int n = every_half();
    parity_poison(GOT, (size_t)n);
    p->vec_scalar->f16_to_f32(want_row, half_row, n);
    p->vec->f16_to_f32(GOT, half_row, n);
    parity_floats(p, GOT, want_row, (size_t)n);
    for (int i = 0; i < n; i++) /* and both are right */
        if (moe_f32_bits(want_row[i]) != moe_f32_bits(moe_f16_f32(half_row[i])) && want_row[i] == want_row[i])
            parity_fail(p, "wrong value");
}
static void op_bf16_to_f32(struct parity *p) {
    int n = every_half();
    parity_poison(GOT, (size_t)n);
    p->vec_scalar->bf16_to_f32(want_row, half_row, n);
    p->vec->bf16_to_f32(GOT, half_row, n);
    parity_floats(p, GOT, want_row, (size_t)n);
}

/* Every 16-bit value, its float neighbours and the halfway points around it: where rounding goes wrong if it does. */
static void to_half(struct parity *p, int bf16) {
    static const int32_t offsets[2][7] = {{0, 1, -1, 0x0fff, 0x1000, 0x1001, 0x800},
                                          {0, 1, -1, 0x7fff, 0x8000, 0x8001, 0x4000}};
    for (int o = 0; o < 7; o++) {
        int n = every_half();
        /* Bochs 2.7 rounds the halfway cases of VCVTPS2PH up, not to even: the full walk, on hardware, checks those. */
        if (PARITY_SMALL && !bf16 && offsets[0][o] == 0x1000) continue;
        parity_where(p, "offset", offsets[bf16][o], "bf16", bf16, 0, 0);
        for (int i = 0; i < n; i++) {
            float f = bf16 ? moe_bf16_f32(half_row[i]) : moe_f16_f32(half_row[i]);
            a_row[i] = moe_bits_f32(moe_f32_bits(f) + (uint32_t)offsets[bf16][o]);
        }
        for (int i = 0; i < n + 2 * PARITY_GUARD; i++) half_got[i] = 0x5a5a;
        if (bf16) {
            p->vec_scalar->f32_to_bf16(half_want, a_row, n);
            p->vec->f32_to_bf16(half_got + PARITY_GUARD, a_row, n);
        } else {
            p->vec_scalar->f32_to_f16(half_want, a_row, n);
            p->vec->f32_to_f16(half_got + PARITY_GUARD, a_row, n);
        }
        u16_outputs(p, n, bf16);
    }
    for (int i = 0; i < LENGTH(lengths); i++) { /* lengths that leave a rest, arbitrary bits */
        int n = lengths[i];
        fill(p, a_row + 1, n, i & 1 ? BITS : WIDE);
        parity_where(p, "n", n, "bf16", bf16, 0, 0);
        for (int j = 0; j < n + 2 * PARITY_GUARD; j++) half_got[j] = 0x5a5a;
        if (bf16) {
            p->vec_scalar->f32_to_bf16(half_want, a_row + 1, n);
            p->vec->f32_to_bf16(half_got + PARITY_GUARD, a_row + 1, n);
        } else {
            p->vec_scalar->f32_to_f16(half_want, a_row + 1, n);
            p->vec->f32_to_f16(half_got + PARITY_GUARD, a_row + 1, n);
        }
        u16_outputs(p, n, bf16);
    }
}
static void op_f32_to_f16(struct parity *p) { to_half(p, 0); }
static void op_f32_to_bf16(struct parity *p) { to_half(p, 1); }

/* ---- attention ---- */
static void fill_kv(struct parity *p, void *kv, int n, int is_f32, float size) {
    float *f = kv;
    uint16_t *h = kv;
    for (int i = 0; i < n; i++) {
        float x = parity_unit(p) * size;
        if (is_f32) f[i] = x;
        else h[i] = moe_f32_f16(x);
    }
}

/* latent: no values of their own, but the first head_dim - 8 numbers of each key. */
static void attention_case(struct parity *p, int head_dim, int n, int is_f32, float size, int latent) {
    const int value_dim = latent ? head_dim - 8 : head_dim;
    static _Alignas(64) float k[MOE_ATTENTION_CHUNK * 128], v[MOE_ATTENTION_CHUNK * 128];
    float want_stat[2], got_room[2 + 2 * PARITY_GUARD], *got_stat = got_room + PARITY_GUARD;
    parity_where(p, "head_dim", head_dim, "positions", n, is_f32 ? "f32, size" : "f16, size", (int)size);
    const struct moe_kv_rows rows = {k, latent ? k : v, head_dim, value_dim, head_dim, is_f32};
    fill(p, a_row + 1, head_dim, UNIT);
    fill_kv(p, k, n * head_dim, is_f32, size);
    fill_kv(p, v, n * head_dim, is_f32, 1.0f);
    parity_poison(GOT, (size_t)value_dim);
    parity_poison(got_stat, 2);
    p->attn_scalar->chunk(want_row, want_stat, want_stat + 1, a_row + 1, &rows, n, 0.125f);
    p->attn->chunk(GOT, got_stat, got_stat + 1, a_row + 1, &rows, n, 0.125f);
    parity_floats(p, GOT, want_row, (size_t)value_dim);
    parity_floats(p, got_stat, want_stat, 2);
}
static void attention_chunk(struct parity *p) {
    static const int head_dims[] = {16, 24, 64, 128};
    for (int h = 0; h < LENGTH(head_dims); h++)
        for (int n = 1; n <= MOE_ATTENTION_CHUNK; n += HEAD_STEP)
            for (int is_f32 = 0; is_f32 < 2; is_f32++) {
                attention_case(p, head_dims[h], n, is_f32, 1.0f, n % 2);
                if (n % 7 == 1) attention_case(p, head_dims[h], n, is_f32, 400.0f, 0); /* far scores: exp underflows */
            }
}

static void attention_merge(struct parity *p) {
    static const int head_dims[] = {16, 24, 64, 128};
    static const float maxima[][2] = {{1.0f, 2.5f},    {2.5f, 1.0f},   {0.0f, 0.0f},   {-100.0f, 100.0f},
                                      {90.0f, -90.0f}, {-3e38f, 5.0f}, {0.25f, -0.25f}};
    for (int h = 0; h < LENGTH(head_dims); h++)
        for (int m = 0; m <= LENGTH(maxima); m++) {
            int n = head_dims[h], last = m == LENGTH(maxima);
            float want_stat[2] = {last ? -__builtin_inff() : maxima[m][0], last ? 0.0f : 3.5f};
            float got_room[2 + 2 * PARITY_GUARD], *got_stat = got_room + PARITY_GUARD,
                                                  chunk_max = last ? 1.0f : maxima[m][1];
            parity_where(p, "head_dim", n, "case", m, 0, 0);
            fill(p, a_row + 1, n, UNIT);
            fill(p, want_row, n, UNIT);
            parity_poison(GOT, (size_t)n);
            parity_poison(got_stat, 2);
            __builtin_memcpy(GOT, want_row, (size_t)n * 4);
            __builtin_memcpy(got_stat, want_stat, sizeof want_stat);
            p->attn_scalar->merge(want_row, want_stat, want_stat + 1, a_row + 1, chunk_max, 2.25f, n);
            p->attn->merge(GOT, got_stat, got_stat + 1, a_row + 1, chunk_max, 2.25f, n);
            parity_floats(p, GOT, want_row, (size_t)n);
            parity_floats(p, got_stat, want_stat, 2);
        }
}

/* ---- tables ---- */
struct check { const char *name; void (*run)(struct parity *p); size_t slot; };
static const struct check vector_checks[] = {
    {"quantize_q8", op_quantize_q8, offsetof(struct moe_vector_ops, quantize_q8)},
    {"rotate", op_rotate, offsetof(struct moe_vector_ops, rotate)},
    {"rmsnorm", op_rmsnorm, offsetof(struct moe_vector_ops, rmsnorm)},
    {"clip", op_clip, offsetof(struct moe_vector_ops, clip)},
    {"softmax", op_softmax, offsetof(struct moe_vector_ops, softmax)},
    {"logsumexp", op_logsumexp, offsetof(struct moe_vector_ops, logsumexp)},
    {"swiglu", op_swiglu, offsetof(struct moe_vector_ops, swiglu)},
    {"swiglu_clamped", op_swiglu_clamped, offsetof(struct moe_vector_ops, swiglu_clamped)},
    {"sigmoid", op_sigmoid, offsetof(struct moe_vector_ops, sigmoid)},
    {"rope", op_rope, offsetof(struct moe_vector_ops, rope)},
    {"add", op_add, offsetof(struct moe_vector_ops, add)},
    {"scale", op_scale, offsetof(struct moe_vector_ops, scale)},
    {"fma", op_fma, offsetof(struct moe_vector_ops, fma)},
    {"all_finite", op_all_finite, offsetof(struct moe_vector_ops, all_finite)},
    {"exp", op_exp, offsetof(struct moe_vector_ops, exp)},
    {"f16_to_f32", op_f16_to_f32, offsetof(struct moe_vector_ops, f16_to_f32)},
    {"f32_to_f16", op_f32_to_f16, offsetof(struct moe_vector_ops, f32_to_f16)},
    {"bf16_to_f32", op_bf16_to_f32, offsetof(struct moe_vector_ops, bf16_to_f32)},
    {"f32_to_bf16", op_f32_to_bf16, offsetof(struct moe_vector_ops, f32_to_bf16)},
};
static const struct check attention_checks[] = {
    {"chunk", attention_chunk, offsetof(struct moe_attention_ops, chunk)},
    {"merge", attention_merge, offsetof(struct moe_attention_ops, merge)},
};
/* A slot added to a table without a check here does not compile: tier name plus one pointer per check. */
_Static_assert(sizeof(struct moe_vector_ops) == (1 + sizeof vector_checks / sizeof *vector_checks) * sizeof(void *),
               "a vector op has no check");
_Static_assert(sizeof(struct moe_attention_ops) ==
                   (1 + sizeof attention_checks / sizeof *attention_checks) * sizeof(void *),
               "an attention op has no check");

static void run_checks(struct parity *p, const char *kind, const struct check *checks, int n, const void *ops,
                       const char *ops_tier) {
    for (int i = 0; i < n; i++) {
        void *slot;
        __builtin_memcpy(&slot, (const char *)ops + checks[i].slot, sizeof slot);
        parity_begin(p, kind, checks[i].name);
        if (!moe_same_name(ops_tier, p->tier)) parity_fail(p, "the table belongs to another tier");
        if (!slot) parity_fail(p, "the table has an empty slot");
        else checks[i].run(p);
        parity_end(p);
    }
}
void parity_vector_ops(struct parity *p) {
    run_checks(p, "op", vector_checks, LENGTH(vector_checks), p->vec, p->vec->tier);
}
void parity_attention_ops(struct parity *p) {
    run_checks(p, "attention", attention_checks, LENGTH(attention_checks), p->attn, p->attn->tier);
}
