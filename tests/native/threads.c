/* threads [ROUNDS]: the drivers of the engine (products, experts, attention, sampling) on every tier of this CPU and
 * with several thread counts, then from several callers at once, two of them on one context. Every walk must produce
 * the same bits; the hash is printed, so that machines can be compared. Half of the walks and all of the callers are
 * recorded, with somebody who takes the records meanwhile. Made to run under the thread sanitizer. */
#include "internal.h"
#include "moe.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) /* much slower: small matrices, the best tier only */
enum { SANITIZED = 1, H = 256, I = 256, E = 3, V = 1001, CAPACITY = 128, MAX_FORMATS = 4 };
#else
enum { SANITIZED = 0, H = 512, I = 256, E = 3, V = 3001, CAPACITY = 192, MAX_FORMATS = 99 };
#endif
enum { A = 2, T = 11, N = 4, K = 2, D = 64 };

struct walk {
    struct moe_ctx *ctx;
    uint64_t hash, random;
    const char *failed; /* first call that did not return MOE_OK */
};
#define TRY(w, call) do { if ((call) != MOE_OK && !(w)->failed) (w)->failed = #call; } while (0)

static float unit(struct walk *w) {
    uint64_t z = w->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (float)(int32_t)(uint32_t)(z >> 40) / 8388608.0f - 1.0f;
}
static float *floats(struct walk *w, size_t n, float size) {
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; x && i < n; i++) x[i] = unit(w) * size;
    if (!x) abort();
    return x;
}
static void *bytes(size_t n) {
    void *p = aligned_alloc(64, (n + 63) & ~(size_t)63);
    if (!p) abort();
    return memset(p, 0xff, (n + 63) & ~(size_t)63); /* 0xff..: NaN wherever a result is missing */
}
static void mix(struct walk *w, const void *p, size_t n) {
    for (size_t i = 0; i < n; i++) w->hash = (w->hash ^ ((const unsigned char *)p)[i]) * 0x100000001b3u;
}

/* compact: storage rows as they are, else strips */
static struct moe_matrix matrix(struct walk *w, const char *format_name, int rows, int cols, const float *bias,
                                int compact) {
    const char *error;
    const struct moe_format *f = moe_select_format(w->ctx, format_name, &error);
    const struct moe_layout *l = f ? moe_select_layout(w->ctx, f->layout, &error) : NULL;
    if (!l) { fprintf(stderr, "%s: %s\n", format_name, error); abort(); }
    size_t row_bytes = (size_t)(cols / f->block_len) * (size_t)f->block_bytes + (size_t)f->row_extra_bytes;
    float *x = floats(w, (size_t)rows * (size_t)cols, 0.1f);
    void *storage = bytes((size_t)rows * row_bytes), *strips = bytes(moe_matrix_bytes(l, rows, cols));
    TRY(w, moe_quantize(w->ctx, storage, format_name, x, rows, cols));
    TRY(w, moe_check_rows(w->ctx, format_name, storage, rows, cols) == -1 ? MOE_OK : MOE_NONFINITE);
    TRY(w, moe_encode(w->ctx, strips, f, l, storage, rows, cols));
    mix(w, storage, (size_t)rows * row_bytes);
    mix(w, strips, moe_matrix_bytes(l, rows, cols));
    free(x);
    free(compact ? strips : storage);
    return (struct moe_matrix){.data = compact ? storage : strips,
                               .layout = l,
                               .bias = bias,
                               .rows = rows,
                               .cols = cols,
                               .storage = compact ? f : NULL};
}

static void products(struct walk *w, const char *format, int compact, int odd_rows) {
    float *bias = floats(w, V, 1.0f), *x = floats(w, T * H, 1.0f), *y[3];
    struct moe_matrix m[3] = {matrix(w, format, H, H, bias, compact), matrix(w, format, odd_rows, H, NULL, 0),
                              matrix(w, format, I, H, NULL, compact)};
    const struct moe_matrix *all[3] = {m, m + 1, m + 2};
    int32_t ids[T];
    for (int i = 0; i < 3; i++) y[i] = bytes((size_t)T * (size_t)m[i].rows * 4);
    TRY(w, moe_linear(w->ctx, all, y, 3, x, T, 0));
    TRY(w, moe_linear(w->ctx, all, y, 1, x, 1, 1));
    for (int i = 0; i < 3; i++) mix(w, y[i], (size_t)T * (size_t)m[i].rows * 4);
    for (int t = 0; t < T; t++) ids[t] = t * 37 % H;
    int status = moe_embed(w->ctx, x, m, ids, T), rotated = m->layout->activation == MOE_ACT_Q8_256_ROTATED;
    TRY(w, status == (rotated ? MOE_NO_KERNEL : MOE_OK) ? MOE_OK
                                                        : MOE_BAD_ARGUMENT); /* rotated rows are not the weights */
    mix(w, x, T * H * 4);
    for (int i = 0; i < 3; i++) free((void *)m[i].data), free(y[i]);
    free(bias);
    free(x);
}

static void experts(struct walk *w, const char *format, int compact) {
    struct moe_expert expert[E];
    const struct moe_expert *table[E];
    struct moe_router_rule rule = {.score = MOE_SOFTMAX_THEN_TOPK, .norm_topk_prob = 1, .scale = 1.0f};
    float *x = floats(w, T * H, 1.0f), *logits = floats(w, T * E, 3.0f), *y = floats(w, T * H, 1.0f);
    float *out = bytes((size_t)T * A * H * 4), weights[T * A];
    int32_t ids[T * A], expert_ids[E], offsets[E + 1], assignments[T * A];
    for (int e = 0; e < E; e++) {
        expert[e] = (struct moe_expert){.gate = matrix(w, format, I, H, NULL, compact),
                                        .up = matrix(w, format, I, H, NULL, compact),
                                        .down = matrix(w, format, H, I, NULL, compact)};
        table[e] = &expert[e];
    }
    TRY(w, moe_route(w->ctx, ids, weights, logits, T, E, A, &rule));
    int n = moe_route_plan(w->ctx, expert_ids, offsets, assignments, ids, T, A, E);
    if (n > 1) { /* in two calls, as experts arrive */
        TRY(w, moe_experts(w->ctx, out, table, expert_ids + 1, offsets + 1, assignments, n - 1, x, T, A));
        TRY(w, moe_experts(w->ctx, out, table, expert_ids, offsets, assignments, 1, x, T, A));
    } else {
        TRY(w, MOE_BAD_ARGUMENT);
    }
    TRY(w, moe_experts_combine(w->ctx, y, out, weights, T, A, H));
    mix(w, ids, sizeof ids);
    mix(w, weights, sizeof weights);
    mix(w, out, (size_t)T * A * H * 4);
    mix(w, y, T * H * 4);
    for (int e = 0; e < E; e++)
        free((void *)expert[e].gate.data), free((void *)expert[e].up.data), free((void *)expert[e].down.data);
    free(x), free(logits), free(y), free(out);
}

static void attention(struct walk *w, int is_f32) {
    size_t kv_bytes = (size_t)K * CAPACITY * D * (is_f32 ? 4 : 2);
    struct moe_kv kv = {.k = bytes(kv_bytes),
                        .v = bytes(kv_bytes),
                        .num_heads = K,
                        .head_dim = D,
                        .value_dim = D,
                        .capacity = CAPACITY,
                        .is_f32 = is_f32};
    float inv_freq[D / 2], sinks[N], *cosines = bytes(CAPACITY * D / 2 * 4), *sines = bytes(CAPACITY * D / 2 * 4);
    float *k = floats(w, CAPACITY * K * D, 1.0f), *v = floats(w, CAPACITY * K * D, 1.0f),
          *q = floats(w, T * N * D, 1.0f), *out = bytes(T * N * D * 4);
    for (int i = 0; i < N; i++) sinks[i] = unit(w);
    TRY(w, moe_rope_inv_freq(inv_freq, 10000.0, D));
    TRY(w, moe_rope_table(cosines, sines, inv_freq, D / 2, 0, CAPACITY, 1.0f));
    mix(w, cosines, CAPACITY * D / 2 * 4);
    mix(w, sines, CAPACITY * D / 2 * 4);
    TRY(w, moe_rope(w->ctx, k, CAPACITY, K, D, D, cosines, sines, 0, 0));
    TRY(w, moe_rope(w->ctx, q, T, N, D, D, cosines, sines, CAPACITY - T, 0));
    TRY(w, moe_kv_store(w->ctx, &kv, k, v, 0, CAPACITY));
    for (int window = 0; window <= 40; window += 40) {
        TRY(w, moe_attention(w->ctx, out, q, &kv, T, N, CAPACITY - T, 0.125f, window, window ? sinks : NULL));
        mix(w, out, T * N * D * 4);
    }
    free(kv.k), free(kv.v), free(cosines), free(sines), free(k), free(v), free(q), free(out);
}

static void rows_and_sampling(struct walk *w) {
    struct moe_sampling sampling = {
        .temperature = 0.8f, .top_k = 50, .top_p = 0.95f, .repeat_penalty = 1.1f, .seed = 7};
    float *x = floats(w, T * V, 8.0f), *y = bytes(T * V * 4), *weight = floats(w, V, 1.0f);
    int32_t token, history[4] = {5, 9, 5, V - 2}, targets[T] = {0, 5, V - 1};
    double logprobs[T];
    for (uint64_t position = 0; position < 5; position++) {
        TRY(w, moe_sample(w->ctx, &token, x, V, &sampling, history, 4, position));
        mix(w, &token, sizeof token);
    }
    TRY(w, moe_token_logprobs(w->ctx, logprobs, x, targets, T, V));
    mix(w, logprobs, sizeof logprobs);
    TRY(w, moe_rmsnorm(w->ctx, y, x, weight, T, V, 1e-5f));
    mix(w, y, T * V * 4);
    TRY(w, moe_softmax(w->ctx, y, x, T, V));
    mix(w, y, T * V * 4);
    TRY(w, moe_swiglu(w->ctx, y, x, y, T * V));
    TRY(w, moe_clip(w->ctx, y, T * V, 0.5f));
    TRY(w, moe_check_finite(w->ctx, y, T * V));
    mix(w, y, T * V * 4);
    free(x), free(y), free(weight);
}

/* Strips, compact rows and the float arithmetic with the same numbers. Compact rows give the bits of strips. The float
 * arithmetic runs on a context of its own: it is a property of the context, and others may use this one. */
static void every_arrival(struct walk *w, const char *format, int odd_rows) {
    const char *error;
    struct moe_ctx *ctx = w->ctx, *floats = moe_ctx_create(moe_ctx_tier(ctx), moe_ctx_num_threads(ctx), &error);
    if (!floats || moe_ctx_set_arith(floats, MOE_ARITH_FLOAT) != MOE_OK) abort();
    uint64_t random = w->random, before = w->hash, after[3];
    for (int way = 0; way < 3; way++) { /* 2: compact and float at once */
        w->random = random;
        w->hash = before;
        w->ctx = way == 2 ? floats : ctx;
        products(w, format, way > 0, odd_rows);
        experts(w, format, way > 0);
        after[way] = w->hash;
    }
    w->ctx = ctx;
    moe_ctx_destroy(floats);
    mix(w, after, sizeof after);
    if (after[1] != after[0] && !w->failed) w->failed = "compact rows give other bits than strips";
    const struct moe_format *f = moe_select_format(ctx, format, &error);
    const int quantized = f && moe_select_layout(ctx, f->layout, &error)->strip_rows > 1;
    if (quantized && after[2] == after[0] && !w->failed)
        w->failed = "the float arithmetic gives the bits of the canonical one";
}

/* Everything once; the formats are the compiled ones that can quantize. */
static struct walk run(struct moe_ctx *ctx) {
    struct walk w = {.ctx = ctx, .hash = 0xcbf29ce484222325u, .random = 1};
    for (int i = 0, left = MAX_FORMATS; i < moe_format_count() && left; i++) {
        const struct moe_format *f = moe_format_at(i);
        const int quantizes = f->group_rows ? f->quantize_group != 0 : f->quantize_row != 0;
        if (!moe_same_name(f->tier, "scalar") || !quantizes || H % f->block_len || I % f->block_len) continue;
        left--;
        every_arrival(&w, f->name, f->group_rows ? 5 * f->group_rows : 2 * D + 5);
    }
    attention(&w, 0);
    attention(&w, 1);
    rows_and_sampling(&w);
    return w;
}

static uint64_t expected;
static int passed, failed, skipped;
static void report(const char *what, const char *tier, int threads, struct walk w) {
    int bad = w.failed || w.hash != expected;
    printf("%s %s, threads %d: %s%s\n", what, tier, threads, bad ? "FAILED, " : "passed",
           !bad       ? ""
           : w.failed ? w.failed
                      : "other bits than the first walk");
    if (bad) failed++;
    else passed++;
}

struct caller {
    pthread_t thread;
    struct moe_ctx *ctx;
    int rounds;
    struct walk last;
};
static void *call(void *arg) {
    struct caller *c = arg;
    for (int i = 0; i < c->rounds; i++) {
        c->last = run(c->ctx);
        if (c->last.failed || c->last.hash != expected) break;
    }
    return NULL;
}

/* Takes the records of a context while others call it. */
struct listener {
    pthread_t thread;
    struct moe_ctx *ctx;
    atomic_int stop;
    int64_t calls, experts, last; /* taken so far; end of the last call */
    int bad;
};

static void take(struct listener *l) {
    struct moe_calls taken;
    moe_take_calls(l->ctx, &taken);
    int64_t experts = 0;
    for (int64_t i = 0; i < taken.num_calls; i++) {
        const struct moe_call *c = &taken.calls[i];
        l->bad |= c->start_ns < l->last || c->end_ns < c->start_ns || strncmp(c->function, "moe_", 4) != 0;
        l->last = c->end_ns;
        experts += c->num_experts;
    }
    for (int64_t i = 0; i < taken.num_experts; i++)
        l->bad |= taken.experts[i].expert < 0 || taken.experts[i].expert >= E || taken.experts[i].num_tokens < 1;
    l->bad |= experts != taken.num_experts || taken.lost != 0;
    l->calls += taken.num_calls;
    l->experts += experts;
}

static void *listen(void *arg) {
    struct listener *l = arg;
    int64_t busy[3];
    while (!atomic_load(&l->stop)) {
        take(l);
        moe_busy_times(l->ctx, busy);
        sched_yield();
    }
    take(l);
    return NULL;
}

static void report_records(const struct listener *l, int64_t calls, int64_t experts) {
    int bad = l->bad || l->calls != calls || l->experts != experts;
    printf("records of %lld calls with %lld experts: %s\n", (long long)l->calls, (long long)l->experts,
           bad ? "FAILED" : "passed");
    if (bad) failed++;
    else passed++;
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 2;
    const char *error;
    struct moe_ctx *shared = moe_ctx_create(NULL, 3, &error), *own = moe_ctx_create(NULL, 2, &error);
    if (!shared || !own) { printf("FAILED, %s\n", error); return 1; }
    struct listener one, of[2] = {{.ctx = shared}, {.ctx = own}};
    int64_t one_calls = 0, one_experts = 0; /* of a walk */
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int tier = 0; tier < moe_tier_count(); tier++) {
        const char *name = moe_tier_name(tier);
        if (!moe_tier_supported(name)) {
            printf("tier %s: skipped, this CPU lacks %s\n", name, moe_tier_missing(name));
            skipped++;
            continue;
        }
        if (SANITIZED && !moe_same_name(name, moe_ctx_tier(shared))) continue;
        for (int threads = 1; threads <= 4; threads++) {
            struct moe_ctx *ctx = moe_ctx_create(name, threads, &error);
            if (!ctx) { printf("%s: FAILED, %s\n", name, error); return 1; }
            if (threads % 2 && moe_record(ctx, 1) != MOE_OK) return 1;
            struct walk w = run(ctx);
            if (!expected) expected = w.hash;
            report("tier", name, threads, w);
            one = (struct listener){.ctx = ctx};
            if (threads % 2) {
                take(&one);
                one_calls = one.calls;
                one_experts = one.experts;
            }
            moe_ctx_destroy(ctx);
        }
    }
    struct caller callers[3] = {
        {.ctx = shared, .rounds = rounds}, {.ctx = shared, .rounds = rounds}, {.ctx = own, .rounds = rounds}};
    for (int i = 0; i < 2; i++)
        if (moe_record(of[i].ctx, 1) != MOE_OK || pthread_create(&of[i].thread, NULL, listen, &of[i])) return 1;
    for (int i = 0; i < 3; i++)
        if (pthread_create(&callers[i].thread, NULL, call, &callers[i])) return 1;
    for (int i = 0; i < 3; i++) {
        pthread_join(callers[i].thread, NULL);
        report(i < 2 ? "caller on a shared context," : "caller on its own context,", moe_ctx_tier(callers[i].ctx),
               moe_ctx_num_threads(callers[i].ctx), callers[i].last);
    }
    for (int i = 0; i < 2; i++) {
        atomic_store(&of[i].stop, 1);
        pthread_join(of[i].thread, NULL);
        int walks = (i ? 1 : 2) * rounds; /* each as many calls as the last one that was recorded alone */
        report_records(&of[i], walks * one_calls, walks * one_experts);
    }
    moe_ctx_destroy(shared);
    moe_ctx_destroy(own);
    printf("hash drivers %016llx\n%02d passed, %02d failed, %02d skipped\n", (unsigned long long)expected, passed,
           failed, skipped);
    return failed != 0;
}
