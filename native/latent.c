/* Products of latent attention: one small matrix per head, for the queries on their way into the latent space and the
 * results on their way out. Keys and values stay compressed: native/attention.c attends to the cached latents. */
#include "linear.h"

struct heads_job {
    struct moe_ctx *ctx;
    const struct moe_matrix *w;
    float *y;
    const float *x;
    char *act; /* [threads, MOE_MAX_TOKENS] activations, and a span of strips */
    size_t act_bytes, worker_bytes;
    int form, num_tokens, num_heads, rows, x_width, tail;
};

/* One head, all tokens: its matrix stays in cache. */
static void head_task(void *arg, int head, int worker) {
    const struct heads_job *j = arg;
    const struct moe_layout *layout = j->w->layout;
    const int cols = j->w->cols, strips = j->rows / layout->strip_rows;
    struct moe_matrix w = *j->w; /* the rows of this head */
    w.data = (const char *)w.data + (size_t)head * (size_t)strips * layout->strip_bytes(cols);
    w.rows = j->rows;
    char *act = j->act + (size_t)worker * j->worker_bytes;
    const int step = moe_span_strips(j->ctx, &w) ? moe_span_strips(j->ctx, &w) : strips;
    for (int t0 = 0; t0 < j->num_tokens; t0 += MOE_MAX_TOKENS) {
        const int n = j->num_tokens - t0 < MOE_MAX_TOKENS ? j->num_tokens - t0 : MOE_MAX_TOKENS;
        float *y[MOE_MAX_TOKENS];
        const void *x[MOE_MAX_TOKENS];
        for (int t = 0; t < n; t++) {
            const size_t row = (size_t)(t0 + t) * (size_t)j->num_heads + (size_t)head;
            const float *from = j->x + row * (size_t)j->x_width;
            y[t] = j->y + row * (size_t)(j->rows + j->tail);
            x[t] = from;
            if (j->form != MOE_ACT_F32) {
                x[t] = act + (size_t)t * j->act_bytes;
                moe_activate_row(j->ctx->vec, act + (size_t)t * j->act_bytes, j->form, from, cols);
            }
            __builtin_memcpy(y[t] + j->rows, from + cols, (size_t)j->tail * sizeof(float));
        }
        for (int s = 0, last; s < strips; s = last) {
            last = strips - s < step ? strips : s + step;
            struct moe_span span = moe_span(j->ctx, &w, s, last, act + MOE_MAX_TOKENS * j->act_bytes);
            moe_multiply(&span, y, x, n);
        }
    }
}

int moe_linear_heads(struct moe_ctx *ctx, const struct moe_matrix *w, float *y, const float *x, int num_tokens,
                     int num_heads, int x_width, int tail) {
    if (!ctx || !y || !x || num_tokens < 0 || num_heads < 1 || tail < 0) return MOE_BAD_ARGUMENT;
    if (!moe_matrix_ok(w) || w->bias || w->storage || w->layout->scattered || w->rows % num_heads)
        return MOE_BAD_ARGUMENT;
    if (w->rows / num_heads % w->layout->strip_rows || x_width < 0 || (int64_t)w->cols + tail > x_width)
        return MOE_BAD_ARGUMENT;
    struct heads_job job = {.ctx = ctx, .w = w, .y = y, .x = x, .num_tokens = num_tokens, .num_heads = num_heads,
                            .rows = w->rows / num_heads, .x_width = x_width, .tail = tail};
    job.form = moe_form(ctx, w);
    job.act_bytes = job.form == MOE_ACT_F32 ? 0 : moe_activation_bytes(job.form, w->cols);
    job.worker_bytes = MOE_MAX_TOKENS * job.act_bytes + moe_span_bytes(ctx, w);
    uint32_t saved = moe_enter_for(ctx, w);
    job.act = moe_scratch(ctx, (size_t)ctx->num_threads * job.worker_bytes + 64);
    if (!job.act) return moe_leave(ctx, saved, MOE_NO_MEMORY);
    moe_parallel(ctx, num_heads, head_task, &job);
    return moe_leave(ctx, saved, MOE_OK);
}
