/* What the two matrix drivers (linear.c, experts.c) share: checks, strip arithmetic, activations of many tokens. */
#ifndef MOE_LINEAR_H
#define MOE_LINEAR_H
#include "internal.h"
#include "moe.h"

/* Weight bytes per task: enough to hide the cost of claiming it, few enough to stay in L2 for several token groups. */
enum { MIN_TASK_BYTES = 32768, MAX_TASK_BYTES = 131072, TASKS_PER_THREAD = 16 };

int moe_matrix_ok(const struct moe_matrix *w);
/* x rows tokens[i] (or i where tokens is NULL) into their slots of `out`, slot = token, all threads. */
void moe_activate(struct moe_ctx *ctx, char *out, int activation, const float *x, const int32_t *tokens, int count,
                  int cols);

/* moe_encode on the calling thread, arguments checked before. */
void moe_encode_serial(void *out, const struct moe_format *format, const struct moe_layout *layout, const void *rows_in,
                       int rows, int cols);

static inline size_t moe_row_bytes(const struct moe_format *f, int cols) { /* storage bytes of one row */
    return (size_t)(cols / f->block_len) * (size_t)f->block_bytes + (size_t)f->row_extra_bytes;
}
static inline int moe_strips(const struct moe_matrix *w) {
    return (int)(((int64_t)w->rows + w->layout->strip_rows - 1) / w->layout->strip_rows);
}
/* Output rows of strips [first, last): `count` runs of `len` rows, `stride` apart. */
struct moe_runs { int64_t first, len, stride; int count; };
static inline struct moe_runs moe_runs(const struct moe_matrix *w, int first, int last) {
    int64_t row0 = (int64_t)first * w->layout->strip_rows, row1 = (int64_t)last * w->layout->strip_rows;
    if (w->layout->scattered) return (struct moe_runs){first, last - first, moe_strips(w), w->layout->strip_rows};
    return (struct moe_runs){row0, (row1 < w->rows ? row1 : w->rows) - row0, 0, 1};
}
/* The form of activations that w multiplies on this context. */
static inline int moe_form(const struct moe_ctx *ctx, const struct moe_matrix *w) {
    if (!ctx->float_rows || !w->layout->dequantize_strip) return w->layout->activation;
    return w->layout->activation == MOE_ACT_Q8_256_ROTATED ? MOE_ACT_F32_ROTATED : MOE_ACT_F32;
}
/* One token into a form other than MOE_ACT_F32. */
static inline void moe_activate_row(const struct moe_vector_ops *vec, void *out, int form, const float *x, int cols) {
    if (form == MOE_ACT_F32_ROTATED) vec->rotate(out, x, cols);
    else vec->quantize_q8(out, x, cols, form);
}

/* Strips ready for a kernel: those of the matrix, or made in scratch right before use. Scratch holds re-coded strips of
 * a compact matrix and, under the float arithmetic, the rows of one strip as float32. */
enum {
    MOE_SPAN_ROWS = 16,
    MOE_SPAN_MAX_ROWS = 32
}; /* rows re-coded at once, if a strip is not longer; longest strip */
struct moe_span {
    const struct moe_layout *layout;
    const void *data;
    int64_t row0; /* the kernel's row 0 is this one of the matrix */
    int rows, cols, first, last;
    int stride;   /* 0, or how far apart its rows are in the matrix */
};
static inline int moe_span_is_float(const struct moe_ctx *ctx, const struct moe_matrix *w) {
    return ctx->float_rows && w->layout->dequantize_strip;
}
/* Most strips of one span; 0: any number. */
static inline int moe_span_strips(const struct moe_ctx *ctx, const struct moe_matrix *w) {
    if (moe_span_is_float(ctx, w)) return 1;
    return w->storage ? (MOE_SPAN_ROWS + w->layout->strip_rows - 1) / w->layout->strip_rows : 0;
}
/* Bytes of scratch that a span takes. */
static inline size_t moe_span_bytes(const struct moe_ctx *ctx, const struct moe_matrix *w) {
    size_t strips = w->storage ? moe_round64((size_t)moe_span_strips(ctx, w) * w->layout->strip_bytes(w->cols)) : 0;
    return strips + (moe_span_is_float(ctx, w) ? moe_round64((size_t)w->layout->strip_rows * (size_t)w->cols * 4) : 0);
}
struct moe_span moe_span(const struct moe_ctx *ctx, const struct moe_matrix *w, int first, int last, void *scratch);
/* y[t] is row 0 of the matrix; n <= MOE_TILE_TOKENS. */
void moe_multiply(const struct moe_span *s, float *const *y, const void *const *x, int n);
static inline size_t moe_data_bytes(const struct moe_matrix *w) {
    return moe_matrix_bytes(w->layout, w->rows, w->cols);
}
/* Strips for a task: n, rounded up to what the kernel takes at once. */
static inline size_t moe_whole_strips(const struct moe_layout *k, size_t n) {
    size_t at_once = k->strips_at_once > 1 ? (size_t)k->strips_at_once : 1;
    return (n + at_once - 1) / at_once * at_once;
}
static inline size_t moe_task_bytes(size_t total, int num_threads) {
    size_t bytes = total / (size_t)num_threads / TASKS_PER_THREAD;
    return bytes < MIN_TASK_BYTES ? MIN_TASK_BYTES : bytes > MAX_TASK_BYTES ? MAX_TASK_BYTES : bytes;
}
#endif
