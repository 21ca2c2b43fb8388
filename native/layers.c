/* Drivers of the row operations: they check arguments and split rows over threads. The numbers are made in
 * native/ops/vector.c, one row at a time, so no split can change a bit. */
#include "internal.h"
#include "moe.h"
#include <stdatomic.h>

enum { TASK_ELEMENTS = 8192, MAX_TASKS = 4096 }; /* below that many elements a thread costs more than it saves */

/* `rows` rows of `width` elements, cut into tasks of whole rows. */
struct row_job {
    const struct moe_vector_ops *vec;
    void (*run)(const struct row_job *job, int64_t first, int64_t last);
    int64_t rows, rows_per_task, stride; /* stride: of rmsnorm_part */
    int width;
    float *y;
    const float *x, *other;
    float number; /* eps or limit */
    double *out;
    const int32_t *targets;
    atomic_int *bad;
};

static void run_row_task(void *arg, int task, int worker) {
    const struct row_job *job = arg;
    int64_t first = task * job->rows_per_task, last = first + job->rows_per_task;
    (void)worker;
    job->run(job, first, last < job->rows ? last : job->rows);
}

static void run_rows(struct moe_ctx *ctx, struct row_job *job) {
    job->vec = ctx->vec;
    job->rows_per_task = TASK_ELEMENTS / job->width + 1;
    if (job->rows_per_task < job->rows / MAX_TASKS) job->rows_per_task = job->rows / MAX_TASKS + 1;
    int64_t num_tasks = (job->rows + job->rows_per_task - 1) / job->rows_per_task;
    moe_parallel(ctx, (int)num_tasks, run_row_task, job);
}

static void rmsnorm_rows(const struct row_job *j, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++)
        j->vec->rmsnorm(j->y + r * j->width, j->x + r * j->width, j->other, j->width, j->number);
}
int moe_rmsnorm(struct moe_ctx *ctx, float *y, const float *x, const float *weight, int64_t num_rows, int width,
                float eps) {
    if (!ctx || !y || !x || !weight || num_rows < 0 || width < 1) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter_for(ctx, weight);
    struct row_job job = {.run = rmsnorm_rows, .rows = num_rows, .width = width, .y = y, .x = x, .other = weight,
                          .number = eps};
    run_rows(ctx, &job);
    return moe_leave(ctx, saved, MOE_OK);
}

static void rmsnorm_part_rows(const struct row_job *j, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++)
        j->vec->rmsnorm(j->y + r * j->stride, j->y + r * j->stride, j->other, j->width, j->number);
}
int moe_rmsnorm_part(struct moe_ctx *ctx, float *x, const float *weight, int64_t num_rows, int width, int64_t stride,
                     float eps) {
    if (!ctx || !x || !weight || num_rows < 0 || width < 1 || stride < width) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter_for(ctx, weight);
    struct row_job job = {.run = rmsnorm_part_rows, .rows = num_rows, .width = width, .stride = stride, .y = x,
                          .other = weight, .number = eps};
    run_rows(ctx, &job);
    return moe_leave(ctx, saved, MOE_OK);
}

static void softmax_rows(const struct row_job *j, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) j->vec->softmax(j->y + r * j->width, j->x + r * j->width, j->width);
}
int moe_softmax(struct moe_ctx *ctx, float *y, const float *x, int64_t num_rows, int width) {
    if (!ctx || !y || !x || num_rows < 0 || width < 1) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    struct row_job job = {.run = softmax_rows, .rows = num_rows, .width = width, .y = y, .x = x};
    run_rows(ctx, &job);
    return moe_leave(ctx, saved, MOE_OK);
}

/* Elementwise operations see rows of one element. */
static void clip_rows(const struct row_job *j, int64_t first, int64_t last) {
    j->vec->clip(j->y + first, last - first, j->number);
}
int moe_clip(struct moe_ctx *ctx, float *x, int64_t n, float limit) {
    if (!ctx || !x || n < 0 || !(limit >= 0)) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    struct row_job job = {.run = clip_rows, .rows = n, .width = 1, .y = x, .number = limit};
    run_rows(ctx, &job);
    return moe_leave(ctx, saved, MOE_OK);
}

static void scale_rows(const struct row_job *j, int64_t first, int64_t last) {
    j->vec->scale(j->y + first, j->y + first, j->number, last - first);
}
int moe_scale(struct moe_ctx *ctx, float *x, int64_t n, float factor) {
    if (!ctx || !x || n < 0) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    struct row_job job = {.run = scale_rows, .rows = n, .width = 1, .y = x, .number = factor};
    run_rows(ctx, &job);
    return moe_leave(ctx, saved, MOE_OK);
}

static void gated_rows(const struct row_job *j, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) {
        float negative = -j->other[r], e;
        j->vec->exp(&e, &negative, 1);
        j->vec->fma(j->y + r * j->width, j->x + r * j->width, 1.0f / (1.0f + e), j->width);
    }
}
int moe_add_gated(struct moe_ctx *ctx, float *y, const float *x, const float *gate, int64_t num_rows, int width) {
    if (!ctx || !y || !x || !gate || num_rows < 0 || width < 1) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    struct row_job job = {.run = gated_rows, .rows = num_rows, .width = width, .y = y, .x = x, .other = gate};
    run_rows(ctx, &job);
    return moe_leave(ctx, saved, MOE_OK);
}

static void swiglu_rows(const struct row_job *j, int64_t first, int64_t last) {
    j->vec->swiglu(j->y + first, j->x + first, j->other + first, last - first);
}
int moe_swiglu(struct moe_ctx *ctx, float *y, const float *gate, const float *up, int64_t n) {
    if (!ctx || !y || !gate || !up || n < 0) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    struct row_job job = {.run = swiglu_rows, .rows = n, .width = 1, .y = y, .x = gate, .other = up};
    run_rows(ctx, &job);
    return moe_leave(ctx, saved, MOE_OK);
}

static void swiglu_clamped_rows(const struct row_job *j, int64_t first, int64_t last) {
    j->vec->swiglu_clamped(j->y + first, j->x + first, j->other + first, last - first, j->number);
}
int moe_swiglu_clamped(struct moe_ctx *ctx, float *y, const float *gate, const float *up, int64_t n, float limit) {
    if (!ctx || !y || !gate || !up || n < 0 || !(limit > 0)) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    struct row_job job = {.run = swiglu_clamped_rows, .rows = n, .width = 1, .y = y, .x = gate, .other = up,
                          .number = limit};
    run_rows(ctx, &job);
    return moe_leave(ctx, saved, MOE_OK);
}

static void sigmoid_rows(const struct row_job *j, int64_t first, int64_t last) {
    j->vec->sigmoid(j->y + first, j->x + first, last - first);
}
int moe_sigmoid(struct moe_ctx *ctx, float *y, const float *x, int64_t n) {
    if (!ctx || !y || !x || n < 0) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    struct row_job job = {.run = sigmoid_rows, .rows = n, .width = 1, .y = y, .x = x};
    run_rows(ctx, &job);
    return moe_leave(ctx, saved, MOE_OK);
}

static void finite_rows(const struct row_job *j, int64_t first, int64_t last) {
    if (!j->vec->all_finite(j->x + first, last - first)) atomic_store_explicit(j->bad, 1, memory_order_relaxed);
}
int moe_check_finite(struct moe_ctx *ctx, const float *x, int64_t n) {
    if (!ctx || !x || n < 0) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    atomic_int bad = 0;
    struct row_job job = {.run = finite_rows, .rows = n, .width = 1, .x = x, .bad = &bad};
    run_rows(ctx, &job);
    return moe_leave(ctx, saved, bad ? MOE_NONFINITE : MOE_OK);
}

static void logprob_rows(const struct row_job *j, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) {
        const float *x = j->x + r * j->width;
        double p = (double)x[j->targets[r]] - j->vec->logsumexp(x, j->width);
        j->out[r] = p;
        if (!(p - p == 0.0)) atomic_store_explicit(j->bad, 1, memory_order_relaxed);
    }
}
int moe_token_logprobs(struct moe_ctx *ctx, double *out, const float *logits, const int32_t *targets, int num_tokens,
                       int vocab_size) {
    if (!ctx || !out || !logits || !targets || num_tokens < 0 || vocab_size < 1) return MOE_BAD_ARGUMENT;
    for (int t = 0; t < num_tokens; t++)
        if (targets[t] < 0 || targets[t] >= vocab_size) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    atomic_int bad = 0;
    struct row_job job = {.run = logprob_rows, .rows = num_tokens, .width = vocab_size, .x = logits, .out = out,
                          .targets = targets, .bad = &bad};
    run_rows(ctx, &job);
    return moe_leave(ctx, saved, bad ? MOE_NONFINITE : MOE_OK);
}
