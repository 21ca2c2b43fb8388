/* What the C files share and Python does not see: operation tables per tier, the context, the thread pool, small
 * portable helpers. No libc beyond the freestanding headers, so that kernels also run bare-metal in tests. */
#ifndef MOE_INTERNAL_H
#define MOE_INTERNAL_H
#include "tables.h"

enum { MOE_MAX_TOKENS = 8, MOE_TILE_TOKENS = 32 }; /* tokens per call of a matmul, of a tile */
enum { MOE_ATTENTION_CHUNK = 64 }; /* positions computed alone and merged in order; part of the arithmetic */

/* Activations of one token in a quantized form, one block of memory of moe_activation_bytes:
 *   q     int8  [cols]           at 0
 *   d     float [cols / block]   scale per block (32 or 256)
 *   sum16 int16 [cols / 16]      exact sums of q per 16 columns
 *   sum32 int32 [cols / 32]      exact sums of q per 32 columns
 * Each part starts at a multiple of 64 bytes. */
struct moe_act_view {
    const int8_t *q;
    const float *d;
    const int16_t *sum16;
    const int32_t *sum32;
};
static inline size_t moe_round64(size_t n) { return (n + 63) & ~(size_t)63; }
enum { MOE_NUM_ACT = MOE_ACT_F32_ROTATED + 1 };
static inline int moe_act_block(int activation) { return activation >= MOE_ACT_Q8_256 ? 256 : 32; }
static inline struct moe_act_view moe_act_view(const void *act, int activation, int cols) {
    const char *p = (const char *)act;
    struct moe_act_view v;
    v.q = (const int8_t *)p;
    p += moe_round64((size_t)cols);
    v.d = (const float *)(const void *)p;
    p += moe_round64((size_t)cols / (size_t)moe_act_block(activation) * 4);
    v.sum16 = (const int16_t *)(const void *)p;
    p += moe_round64((size_t)cols / 16 * 2);
    v.sum32 = (const int32_t *)(const void *)p;
    return v;
}

/* Row operations on float32, one table per tier (native/ops/vector.c). Rows, never threads: the drivers split work. */
struct moe_vector_ops {
    const char *tier;
    void (*quantize_q8)(void *act, const float *x, int cols, int activation);
    void (*rotate)(float *y, const float *x, int cols); /* native/rotation.h; cols a multiple of 256, y is not x */
    void (*rmsnorm)(float *y, const float *x, const float *weight, int n, float eps);
    void (*clip)(float *x, int64_t n, float limit);
    void (*softmax)(float *y, const float *x, int n);            /* max, exp, 16-lane sum, divide */
    double (*logsumexp)(const float *x, int n);
    void (*swiglu)(float *y, const float *gate, const float *up, int64_t n);
    void (*swiglu_clamped)(float *y, const float *gate, const float *up, int64_t n, float limit);
    void (*sigmoid)(float *y, const float *x, int64_t n);
    void (*rope)(float *x, const float *cosines, const float *sines, int head_dim, int rotary_dim,
                 int interleaved);                               /* one head */
    void (*add)(float *y, const float *x, int64_t n);            /* y += x */
    void (*scale)(float *y, const float *x, float s, int64_t n); /* y = s * x */
    void (*fma)(float *y, const float *x, float s, int64_t n);   /* y = fma(s, x, y) */
    int (*all_finite)(const float *x, int64_t n);
    void (*exp)(float *y, const float *x, int64_t n);
    void (*f16_to_f32)(float *y, const uint16_t *x, int64_t n);
    void (*f32_to_f16)(uint16_t *y, const float *x, int64_t n);
    void (*bf16_to_f32)(float *y, const uint16_t *x, int64_t n);
    void (*f32_to_bf16)(uint16_t *y, const float *x, int64_t n);
};
/* Rows of a chunk of keys and values: D and V are multiples of 8. */
struct moe_kv_rows {
    const void *k, *v;             /* key j at j * head_dim, value j at j * value_stride elements */
    int head_dim, value_dim;       /* D, V */
    int value_stride;              /* V, or D where a value is the first V numbers of its key */
    int is_f32;                    /* 0: float16, 1: float32 */
};
/* Attention over one chunk of positions (native/ops/attention_chunk.c). */
struct moe_attention_ops {
    const char *tier;
    /* One query head [D] against the first n <= MOE_ATTENTION_CHUNK rows:
     * *max_out = max_j s_j, s_j = scale * (q . k_j); *sum_out = 16-lane sum of exp(s_j - max);
     * out[d] = sum_j exp(s_j - max) * v_j[d], d < V, j ascending, FMA. */
    void (*chunk)(float *out, float *max_out, float *sum_out, const float *q, const struct moe_kv_rows *rows, int n,
                  float scale);
    /* Merge a chunk into the running (out [V], max, sum): rescale both to the larger max with exp, FMA. */
    void (*merge)(float *out, float *max_io, float *sum_io, const float *chunk_out, float chunk_max, float chunk_sum,
                  int value_dim);
};

struct moe_pool;
struct moe_call_log;
struct moe_ctx {
    int tier;                              /* index in the tier list */
    const struct moe_vector_ops *vec;
    const struct moe_attention_ops *attn;
    struct moe_pool *pool;
    int num_threads;
    const struct moe_layout *float_rows;   /* rows_f32 under MOE_ARITH_FLOAT, NULL under MOE_ARITH_CANONICAL */
    void *scratch;                         /* grow-only, 64-byte aligned, used by one call at a time */
    size_t scratch_bytes;
    struct moe_call_log *log;              /* NULL: calls are not recorded */
};

/* ---- threadpool.c ---- */
typedef void (*moe_task_fn)(void *arg, int task, int worker);
/* Workers sleep when idle. NULL when a thread cannot be started. */
struct moe_pool *moe_pool_create(int num_threads);
void moe_pool_destroy(struct moe_pool *pool);
/* fn(arg, task, worker) for every task in 0 .. num_tasks-1, in any order, worker < num_threads; returns when all are
 * done. Runs on the caller alone when num_tasks is 1 or the pool has one thread. */
void moe_parallel(struct moe_ctx *ctx, int num_tasks, moe_task_fn fn, void *arg);
/* Scratch of at least that many bytes, contents undefined; NULL when memory is short. */
void *moe_scratch(struct moe_ctx *ctx, size_t bytes);
/* Round to nearest with subnormals on, for threads that are not the pool's. */
void moe_float_defaults(void);
/* Bracket of every public call: takes the context's lock, sets round-to-nearest with subnormals on, and restores.
 * Records the call where that is wanted; `subject` is what says whose it is (struct moe_call). */
#define moe_enter(ctx) moe_enter_call(ctx, __func__, 0)
#define moe_enter_for(ctx, subject) moe_enter_call(ctx, __func__, subject)
uint32_t moe_enter_call(struct moe_ctx *ctx, const char *function, const void *subject);
int moe_leave(struct moe_ctx *ctx, uint32_t saved, int status);
/* The lock alone, for what is no call of its own. */
void moe_lock(struct moe_ctx *ctx);
void moe_unlock(struct moe_ctx *ctx);
/* Whether the time that tasks take is added up by thread; under the lock. */
void moe_time_tasks(struct moe_pool *pool, int on);

/* ---- calls.c ---- */
struct moe_call;
struct moe_calls;
int64_t moe_now_ns(void);
/* A new log at *log, or none any more; a status: MOE_IN_USE when there is one already. */
int moe_switch_log(struct moe_call_log **log, int on);
void moe_free_call_log(struct moe_call_log *log);
void moe_take_log(struct moe_call_log *log, struct moe_calls *taken);
void moe_add_call(struct moe_call_log *log, const struct moe_call *call);
/* A context's call from its beginning to its end. */
void moe_begin_call(struct moe_call_log *log, const char *function, const void *subject);
int64_t moe_end_call(struct moe_call_log *log); /* the ns it took */
/* ns of the calling thread between the two are added to a part (enum moe_time) of the call, where it is recorded. The
 * second returns when that was, so that another part can begin. */
int64_t moe_time_begin(const struct moe_ctx *ctx);
int64_t moe_time_end(struct moe_ctx *ctx, int part, int64_t started);
/* Experts of the call, once in it: ids [n], offsets [n + 1] of their tokens. */
void moe_note_experts(struct moe_ctx *ctx, const int32_t *expert_ids, const int32_t *offsets, int num_experts);

static inline int moe_same_name(const char *a, const char *b) {
    while (*a && *a == *b) a++, b++;
    return *a == *b;
}

/* ---- exact scalar helpers (scalar tier, codecs) ---- */
static inline float moe_bits_f32(uint32_t u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
static inline uint32_t moe_f32_bits(float f) { uint32_t u; __builtin_memcpy(&u, &f, 4); return u; }
static inline float moe_f16_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 31)
        return moe_bits_f32(sign | 0x7f800000u | m << 13 | (m ? 0x400000u : 0)); /* quiet, as the hardware does */
    if (e) return moe_bits_f32(sign | (e + 112) << 23 | m << 13);
    float f = (float)m * 5.9604644775390625e-8f; /* 2^-24: exact */
    return moe_bits_f32(sign | moe_f32_bits(f));
}
static inline uint16_t moe_f32_f16(float f) { /* round to nearest even */
    uint32_t u = moe_f32_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  /* rounds past 65504 */
    if (a >= 0x38800000) return (uint16_t)(sign | ((a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13));
    if (a < 0x33000000) return (uint16_t)sign;              /* below half the smallest subnormal */
    uint32_t shift = 126 - (a >> 23), m = (a & 0x7fffff) | 0x800000, half = 1u << (shift - 1),
             low = m & ((1u << shift) - 1);
    uint32_t q = m >> shift;
    return (uint16_t)(sign | (q + (low > half || (low == half && (q & 1)))));
}
static inline float moe_bf16_f32(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    if ((u & 0x7fffffff) > 0x7f800000) u |= 0x400000;
    return moe_bits_f32(u);
}
static inline uint16_t moe_f32_bf16(float f) {
    uint32_t u = moe_f32_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
/* Correctly rounded fused multiply-add without FMA hardware: the product of two floats is exact in double; the sum is
 * rounded to odd there, so that the final rounding to float is the only one that counts. */
static inline float moe_fmaf(float a, float b, float c) {
    double p = (double)a * (double)b, s = p + (double)c, t = s - p, e = (p - (s - t)) + ((double)c - t);
    union { double f; uint64_t u; } odd = {.f = s};
    if ((e > 0 || e < 0) && !(odd.u & 1)) odd.u += (e > 0) == (s > 0) ? 1 : (uint64_t)-1;
    return (float)odd.f;
}
static inline float moe_round_even(float x) { /* |x| < 2^22 */
    float t = x + 12582912.0f;
    return t - 12582912.0f;
}
#endif
