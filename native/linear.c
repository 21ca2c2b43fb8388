/* Weights and dense products: storage rows to strips, activations to their forms, y = x W^T.
 *
 * A product is cut into tasks of (strips, tokens). Inside a task the tokens go through the kernel in groups of at most
 * eight while the strips stay in cache. A kernel's result for one (row, token) depends on neither the other rows nor
 * the other tokens, so no cut can change a bit. */
#include "linear.h"
#include <stdatomic.h>
#include <string.h>

enum {
    MAX_TASK_ROWS = 256,     /* rows of old results a task keeps on its stack */
    INLINE_BYTES = 32768,    /* weight bytes x tokens below which waking a thread costs more than it saves */
    TASK_ELEMENTS = 16384,   /* elements per task of conversions */
    SCALAR_TIER = 0
};

/* ---- lookups and checks ---- */
static const struct moe_format *scalar_format(const char *name) {
    for (int i = 0; name && i < moe_format_count(); i++) {
        const struct moe_format *f = moe_format_at(i);
        if (moe_same_name(f->name, name) && moe_same_name(f->tier, moe_tier_name(SCALAR_TIER))) return f;
    }
    return 0;
}

/* Strips are the same bytes on every tier, so the scalar tier's exact decoder reads them all. */
static const struct moe_layout *scalar_layout(const char *name) {
    for (int i = 0; i < moe_layout_count(); i++) {
        const struct moe_layout *k = moe_layout_at(i);
        if (moe_same_name(k->name, name) && moe_same_name(k->tier, moe_tier_name(SCALAR_TIER))) return k;
    }
    return 0;
}

static int layout_ok(const struct moe_layout *k, int cols) {
    if (!k || !k->matmul || !k->strip_bytes || k->block_len < 1) return 0;
    if (k->strip_rows < 1 || k->strip_rows > MOE_SPAN_MAX_ROWS) return 0;
    return cols > 0 && cols % k->block_len == 0 && moe_activation_bytes(k->activation, cols) > 0;
}

/* 1 when `rows` rows of `cols` columns are whole blocks and groups. */
static int storage_ok(const struct moe_format *f, int64_t rows, int cols) {
    return cols % f->block_len == 0 && (!f->group_rows || (rows % f->group_rows == 0 && rows <= INT32_MAX));
}
static int codec_ok(const struct moe_format *f, const struct moe_layout *layout, int rows, int cols) {
    if (f->group_rows ? !f->encode_group || f->group_rows != layout->strip_rows : !f->encode_strip) return 0;
    return storage_ok(f, rows, cols) && moe_same_name(f->layout, layout->name);
}

int moe_matrix_ok(const struct moe_matrix *w) {
    if (!w || !w->data || w->rows < 1 || !layout_ok(w->layout, w->cols)) return 0;
    if (w->storage && !codec_ok(w->storage, w->layout, w->rows, w->cols)) return 0;
    return !w->layout->scattered || w->rows % w->layout->strip_rows == 0;
}

size_t moe_matrix_bytes(const struct moe_layout *layout, int rows, int cols) {
    if (!layout || !layout->strip_bytes || rows < 1 || cols < 1 || cols % layout->block_len) return 0;
    if (layout->scattered && rows % layout->strip_rows) return 0;
    return ((size_t)rows + (size_t)layout->strip_rows - 1) / (size_t)layout->strip_rows * layout->strip_bytes(cols);
}

/* ---- tasks of consecutive items ---- */
struct span_job {
    int64_t count, per_task;
    void (*run)(void *arg, int64_t first, int64_t last);
    void *arg;
};

static void run_span(void *arg, int task, int worker) {
    const struct span_job *job = arg;
    int64_t first = task * job->per_task, last = first + job->per_task;
    (void)worker;
    job->run(job->arg, first, last < job->count ? last : job->count);
}

/* run(arg, first, last) over 0 .. count-1, items_per_task at a time. */
static void parallel_spans(struct moe_ctx *ctx, int64_t count, int64_t items_per_task,
                           void (*run)(void *, int64_t, int64_t), void *arg) {
    enum { MAX_TASKS = 1 << 20 };
    if (items_per_task < count / MAX_TASKS + 1) items_per_task = count / MAX_TASKS + 1;
    struct span_job job = {count, items_per_task, run, arg};
    moe_parallel(ctx, (int)((count + items_per_task - 1) / items_per_task), run_span, &job);
}

/* ---- storage rows and strips ---- */
struct encode_job {
    char *out;
    const char *rows_in;
    const struct moe_format *format;
    const struct moe_layout *layout;
    size_t row_bytes, strip_bytes;
    int rows, cols;
};

static void encode_strip(const struct encode_job *j, int64_t s, char *out) {
    if (j->format->group_rows) {
        j->format->encode_group(out, j->rows_in, j->rows, j->cols, (int)s);
        return;
    }
    int64_t row = s * j->layout->strip_rows, left = j->rows - row;
    int num_rows = left < j->layout->strip_rows ? (int)left : j->layout->strip_rows;
    j->format->encode_strip(out, j->rows_in + (size_t)row * j->row_bytes, j->row_bytes, num_rows, j->cols);
}

static void encode_strips(void *arg, int64_t first, int64_t last) {
    const struct encode_job *j = arg;
    for (int64_t s = first; s < last; s++) encode_strip(j, s, j->out + (size_t)s * j->strip_bytes);
}

/* Strips [first, last) of a compact matrix in scratch. */
static void recode_span(struct moe_span *span, const struct moe_matrix *w, int first, int last, void *scratch) {
    struct encode_job job = {scratch, w->data, w->storage, w->layout, moe_row_bytes(w->storage, w->cols),
                             w->layout->strip_bytes(w->cols), w->rows, w->cols};
    for (int s = first; s < last; s++) encode_strip(&job, s, job.out + (size_t)(s - first) * job.strip_bytes);
    span->data = scratch;
    span->row0 = w->layout->scattered ? first : (int64_t)first * w->layout->strip_rows;
    if (!w->layout->scattered) span->rows -= (int)span->row0; /* scattered rows are `rows / strip_rows` apart */
    span->first = 0;
    span->last = last - first;
}

/* The one strip of the span as rows of float32. */
static void float_span(struct moe_span *span, const struct moe_ctx *ctx, const struct moe_matrix *w, int strip,
                       float *rows) {
    const int strip_rows = w->layout->strip_rows;
    const char *data = (const char *)span->data + (size_t)span->first * w->layout->strip_bytes(w->cols);
    w->layout->dequantize_strip(rows, data, w->cols);
    *span = (struct moe_span){.layout = ctx->float_rows, .data = rows, .row0 = (int64_t)strip * strip_rows, .cols =
                              w->cols};
    span->rows = w->rows - span->row0 < strip_rows ? w->rows - (int)span->row0 : strip_rows;
    if (w->layout->scattered) {
        span->row0 = strip;
        span->stride = moe_strips(w);
        span->rows = strip_rows;
    }
    span->last = span->rows;
}

struct moe_span moe_span(const struct moe_ctx *ctx, const struct moe_matrix *w, int first, int last, void *scratch) {
    struct moe_span span = {w->layout, w->data, 0, w->rows, w->cols, first, last, 0};
    if (w->storage) recode_span(&span, w, first, last, scratch);
    if (!moe_span_is_float(ctx, w)) return span;
    size_t strips = w->storage ? moe_round64(w->layout->strip_bytes(w->cols)) : 0;
    float_span(&span, ctx, w, first, (float *)(void *)((char *)scratch + strips));
    return span;
}

static void multiply_tokens(const struct moe_span *s, float *const *y, const void *const *x, int n) {
    const struct moe_layout *k = s->layout;
    int t = 0;
    if (k->tile && n > MOE_MAX_TOKENS && s->last - s->first >= k->strips_at_once) {
        t = n / MOE_MAX_TOKENS * MOE_MAX_TOKENS;
        k->tile(y, s->data, s->rows, s->cols, s->first, s->last, x, t);
    }
    for (int more; t < n; t += more) {
        more = n - t < MOE_MAX_TOKENS ? n - t : MOE_MAX_TOKENS;
        k->matmul(y + t, s->data, s->rows, s->cols, s->first, s->last, x + t, more);
    }
}

void moe_multiply(const struct moe_span *s, float *const *y, const void *const *x, int n) {
    float *at[MOE_TILE_TOKENS], apart[MOE_TILE_TOKENS][MOE_SPAN_MAX_ROWS];
    for (int t = 0; t < n; t++) at[t] = s->stride ? apart[t] : y[t] + s->row0;
    multiply_tokens(s, at, x, n);
    for (int t = 0; s->stride && t < n; t++)
        for (int r = 0; r < s->rows; r++) y[t][s->row0 + (int64_t)r * s->stride] = apart[t][r];
}

int moe_encode(struct moe_ctx *ctx, void *out, const struct moe_format *format, const struct moe_layout *layout,
               const void *rows_in, int rows, int cols) {
    if (!ctx || !out || !format || !layout || !rows_in || rows < 1 || !layout_ok(layout, cols)) return MOE_BAD_ARGUMENT;
    if (format->group_rows ? !format->encode_group : !format->encode_strip) return MOE_NO_KERNEL;
    if (!codec_ok(format, layout, rows, cols)) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    struct encode_job job = {out, rows_in, format, layout, moe_row_bytes(format, cols),
                             layout->strip_bytes(cols), rows, cols};
    int64_t strips = ((int64_t)rows + layout->strip_rows - 1) / layout->strip_rows;
    parallel_spans(ctx, strips, MIN_TASK_BYTES / (int64_t)job.strip_bytes + 1, encode_strips, &job);
    return moe_leave(ctx, saved, MOE_OK);
}

void moe_encode_serial(void *out, const struct moe_format *format, const struct moe_layout *layout, const void *rows_in,
                       int rows, int cols) {
    struct encode_job job = {out, rows_in, format, layout, moe_row_bytes(format, cols), layout->strip_bytes(cols),
                             rows, cols};
    encode_strips(&job, 0, ((int64_t)rows + layout->strip_rows - 1) / layout->strip_rows);
}

struct quantize_job {
    const struct moe_vector_ops *vec;
    const struct moe_format *format;
    char *out;
    const float *x;
    size_t row_bytes;
    int64_t rows, first_group;
    int cols;
    atomic_int bad;
};

static void quantize_rows(void *arg, int64_t first, int64_t last) {
    struct quantize_job *j = arg;
    for (int64_t r = first; r < last; r++) {
        const float *x = j->x + r * j->cols;
        if (!j->vec->all_finite(x, j->cols)) atomic_store_explicit(&j->bad, 1, memory_order_relaxed);
        j->format->quantize_row(j->out + (size_t)r * j->row_bytes, x, j->cols);
    }
}

/* Rows that share data are quantized together, a group at a time. */
static void quantize_groups(void *arg, int64_t first, int64_t last) {
    struct quantize_job *j = arg;
    int64_t groups = j->rows / j->format->group_rows;
    for (int64_t g = j->first_group + first; g < j->first_group + last; g++) {
        for (int64_t r = g; r < j->rows; r += groups)
            if (!j->vec->all_finite(j->x + r * j->cols, j->cols))
                atomic_store_explicit(&j->bad, 1, memory_order_relaxed);
        j->format->quantize_group(j->out, j->x, (int)j->rows, j->cols, (int)g);
    }
}

/* `count` units from unit `first` on: groups, or rows where those stand alone. */
static int quantize_units(struct moe_ctx *ctx, const char *function, void *out, const struct moe_format *f,
                          const float *x, int64_t rows, int cols, int64_t first, int64_t count) {
    uint32_t saved = moe_enter_call(ctx, function, 0);
    struct quantize_job job = {.vec = ctx->vec, .format = f, .out = out, .x = x, .row_bytes = moe_row_bytes(f, cols),
                               .rows = rows, .cols = cols, .first_group = first};
    if (f->group_rows) parallel_spans(ctx, count, 1, quantize_groups, &job);
    else parallel_spans(ctx, count, TASK_ELEMENTS / cols + 1, quantize_rows, &job);
    return moe_leave(ctx, saved, job.bad ? MOE_NONFINITE : MOE_OK);
}

int moe_quantize(struct moe_ctx *ctx, void *out, const char *format, const float *x, int64_t rows, int cols) {
    const struct moe_format *f = scalar_format(format);
    if (!ctx || !out || !format || !x || rows < 0 || cols < 1) return MOE_BAD_ARGUMENT;
    if (!f || !(f->group_rows ? f->quantize_group != 0 : f->quantize_row != 0)) return MOE_NO_KERNEL;
    if (!storage_ok(f, rows, cols)) return MOE_BAD_ARGUMENT;
    return quantize_units(ctx, __func__, out, f, x, rows, cols, 0, f->group_rows ? rows / f->group_rows : rows);
}

int moe_quantize_groups(struct moe_ctx *ctx, void *out, const char *format, const float *x, int64_t rows, int cols,
                        int64_t first, int64_t last) {
    const struct moe_format *f = scalar_format(format);
    if (!ctx || !out || !format || !x || rows < 0 || cols < 1) return MOE_BAD_ARGUMENT;
    if (!f || !f->group_rows || !f->quantize_group) return MOE_NO_KERNEL;
    if (!storage_ok(f, rows, cols) || first < 0 || first > last || last > rows / f->group_rows) return MOE_BAD_ARGUMENT;
    return quantize_units(ctx, __func__, out, f, x, rows, cols, first, last - first);
}

struct check_job {
    const struct moe_format *format;
    const char *rows_in;
    size_t row_bytes;
    int64_t blocks, rows;
    int cols;
    _Atomic int64_t first_bad;
};

static void check_rows(void *arg, int64_t first, int64_t last) {
    struct check_job *j = arg;
    for (int64_t r = first; r < last && r * j->blocks < atomic_load(&j->first_bad); r++) {
        int block = j->format->group_rows ? j->format->check_group(j->rows_in, (int)j->rows, j->cols, (int)r)
                                          : j->format->check_row(j->rows_in + (size_t)r * j->row_bytes, j->cols);
        if (block < 0) continue;
        int64_t found = r * j->blocks + block, known = atomic_load(&j->first_bad);
        while (found < known && !atomic_compare_exchange_weak(&j->first_bad, &known, found)) continue;
    }
}

int64_t moe_check_rows(struct moe_ctx *ctx, const char *format, const void *rows_in, int64_t rows, int cols) {
    const struct moe_format *f = scalar_format(format);
    if (!ctx || !format || !rows_in || rows < 0 || cols < 1) return MOE_BAD_ARGUMENT;
    if (!f || !(f->group_rows ? f->check_group != 0 : f->check_row != 0)) return MOE_NO_KERNEL;
    if (!storage_ok(f, rows, cols)) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    int64_t blocks = cols / f->block_len;
    struct check_job job = {f, rows_in, moe_row_bytes(f, cols), blocks, rows, cols, INT64_MAX};
    parallel_spans(ctx, f->group_rows ? rows / f->group_rows : rows, TASK_ELEMENTS / cols + 1, check_rows, &job);
    moe_leave(ctx, saved, MOE_OK);
    return job.first_bad == INT64_MAX ? -1 : job.first_bad;
}

/* ---- 16-bit floats ---- */
struct convert_job {
    const struct moe_vector_ops *vec;
    void *out;
    const void *in;
    int kind;
};

static void widen(void *arg, int64_t first, int64_t last) {
    const struct convert_job *j = arg;
    (j->kind ? j->vec->bf16_to_f32 : j->vec->f16_to_f32)((float *)j->out + first, (const uint16_t *)j->in + first,
                                                         last - first);
}
static void narrow(void *arg, int64_t first, int64_t last) {
    const struct convert_job *j = arg;
    (j->kind ? j->vec->f32_to_bf16 : j->vec->f32_to_f16)((uint16_t *)j->out + first, (const float *)j->in + first,
                                                         last - first);
}
static int convert(struct moe_ctx *ctx, const char *function, void *out, const void *in, int64_t n, int kind,
                   void (*run)(void *, int64_t, int64_t)) {
    if (!ctx || !out || !in || n < 0 || (kind != 0 && kind != 1)) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter_call(ctx, function, 0);
    struct convert_job job = {ctx->vec, out, in, kind};
    parallel_spans(ctx, n, TASK_ELEMENTS, run, &job);
    return moe_leave(ctx, saved, MOE_OK);
}
int moe_to_f32(struct moe_ctx *ctx, float *out, const void *in, int64_t n, int kind) {
    return convert(ctx, __func__, out, in, n, kind, widen);
}
int moe_from_f32(struct moe_ctx *ctx, void *out, const float *in, int64_t n, int kind) {
    return convert(ctx, __func__, out, in, n, kind, narrow);
}

/* ---- activations ---- */
/* 0 for a form or length that does not exist. */
size_t moe_activation_bytes(int activation, int cols) {
    if (cols < 1) return 0;
    if (activation == MOE_ACT_F32) return moe_round64((size_t)cols * 4);
    if (activation < MOE_ACT_Q8_32 || activation >= MOE_NUM_ACT) return 0;
    if (cols % moe_act_block(activation)) return 0;
    if (activation == MOE_ACT_F32_ROTATED) return moe_round64((size_t)cols * 4);
    size_t n = (size_t)cols, scales = n / (size_t)moe_act_block(activation);
    return moe_round64(n) + moe_round64(scales * 4) + moe_round64(n / 16 * 2) + moe_round64(n / 32 * 4);
}

struct activate_job {
    const struct moe_vector_ops *vec;
    char *out;
    const float *x;
    const int32_t *tokens;
    size_t stride;
    int activation, cols;
};

static void activate_rows(void *arg, int64_t first, int64_t last) {
    const struct activate_job *j = arg;
    for (int64_t i = first; i < last; i++) {
        int64_t t = j->tokens ? j->tokens[i] : i;
        char *out = j->out + (size_t)t * j->stride;
        const float *x = j->x + t * j->cols;
        if (j->activation == MOE_ACT_F32) memcpy(out, x, (size_t)j->cols * 4);
        else moe_activate_row(j->vec, out, j->activation, x, j->cols);
    }
}

void moe_activate(struct moe_ctx *ctx, char *out, int activation, const float *x, const int32_t *tokens, int count,
                  int cols) {
    struct activate_job job = {ctx->vec, out, x, tokens, moe_activation_bytes(activation, cols), activation, cols};
    int64_t started = moe_time_begin(ctx);
    parallel_spans(ctx, count, TASK_ELEMENTS / cols + 1, activate_rows, &job);
    moe_time_end(ctx, MOE_TIME_QUANTIZE, started);
}

int moe_quantize_activations(struct moe_ctx *ctx, void *out, int activation, const float *x, int num_tokens, int cols) {
    if (!ctx || !out || !x || num_tokens < 0 || !moe_activation_bytes(activation, cols)) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    moe_activate(ctx, out, activation, x, 0, num_tokens, cols);
    return moe_leave(ctx, saved, MOE_OK);
}

/* ---- y = x W^T ---- */
struct linear_part { /* one matrix of the call */
    const struct moe_matrix *w;
    float *y;
    const char *act; /* token 0, act_stride bytes apart */
    size_t act_stride;
    int strips_per_task, strip_blocks, first_task;
};
struct linear_job {
    const struct moe_ctx *ctx;
    const struct moe_vector_ops *vec;
    struct linear_part *parts;
    int num_parts, num_tasks, num_tokens, tokens_per_task, add;
    char *spans; /* [threads] of span_bytes */
    size_t span_bytes;
};

/* runs: the rows of the span. */
static void linear_group(const struct linear_job *j, const struct linear_part *p, const struct moe_span *span,
                         struct moe_runs runs, int t0, int n) {
    const struct moe_matrix *w = p->w;
    float *y[MOE_TILE_TOKENS], old[MOE_TILE_TOKENS][MAX_TASK_ROWS];
    const void *x[MOE_TILE_TOKENS];
    for (int t = 0; t < n; t++) {
        y[t] = p->y + (int64_t)(t0 + t) * w->rows;
        x[t] = p->act + (size_t)(t0 + t) * p->act_stride;
        for (int k = 0; j->add && k < runs.count; k++)
            memcpy(old[t] + k * runs.len, y[t] + runs.first + k * runs.stride, (size_t)runs.len * sizeof(float));
    }
    moe_multiply(span, y, x, n);
    for (int t = 0; t < n; t++)
        for (int k = 0; k < runs.count; k++) {
            int64_t row = runs.first + k * runs.stride;
            if (w->bias) j->vec->add(y[t] + row, w->bias + row, runs.len);
            if (j->add) j->vec->add(y[t] + row, old[t] + k * runs.len, runs.len);
        }
}

static void linear_task(void *arg, int task, int worker) {
    const struct linear_job *j = arg;
    const struct linear_part *p = j->parts;
    while (p + 1 < j->parts + j->num_parts && p[1].first_task <= task) p++;
    task -= p->first_task;
    int first = task % p->strip_blocks * p->strips_per_task, last = first + p->strips_per_task;
    int t0 = task / p->strip_blocks * j->tokens_per_task, end = t0 + j->tokens_per_task;
    if (last > moe_strips(p->w)) last = moe_strips(p->w);
    if (end > j->num_tokens) end = j->num_tokens;
    int step = moe_span_strips(j->ctx, p->w);
    if (!step) step = last - first;
    for (int stop; first < last; first = stop) {
        stop = last - first < step ? last : first + step;
        struct moe_span span = moe_span(j->ctx, p->w, first, stop, j->spans + (size_t)worker * j->span_bytes);
        struct moe_runs runs = moe_runs(p->w, first, stop);
        for (int t = t0; t < end; t += MOE_TILE_TOKENS)
            linear_group(j, p, &span, runs, t, end - t < MOE_TILE_TOKENS ? end - t : MOE_TILE_TOKENS);
    }
}

static void plan_linear(struct moe_ctx *ctx, struct linear_job *j) {
    size_t total = 0;
    for (int m = 0; m < j->num_parts; m++) total += moe_data_bytes(j->parts[m].w);
    size_t task_bytes = moe_task_bytes(total, ctx->num_threads);
    int blocks = 0;
    for (int m = 0; m < j->num_parts; m++) {
        struct linear_part *p = &j->parts[m];
        int strips = moe_strips(p->w), most = MAX_TASK_ROWS / p->w->layout->strip_rows;
        size_t per_task = moe_whole_strips(p->w->layout, task_bytes / p->w->layout->strip_bytes(p->w->cols) + 1);
        p->strips_per_task = per_task < (size_t)most ? (int)per_task : most;
        p->strip_blocks = (strips + p->strips_per_task - 1) / p->strips_per_task;
        blocks += p->strip_blocks;
    }
    /* Small weights and many tokens: cut the tokens as well. */
    int groups = (j->num_tokens + MOE_MAX_TOKENS - 1) / MOE_MAX_TOKENS, cuts = 4 * ctx->num_threads / blocks;
    if (cuts < 1) cuts = 1;
    if (cuts > groups) cuts = groups;
    j->tokens_per_task = (groups + cuts - 1) / cuts * MOE_MAX_TOKENS;
    cuts = (j->num_tokens + j->tokens_per_task - 1) / j->tokens_per_task;
    j->num_tasks = 0;
    for (int m = 0; m < j->num_parts; m++) {
        j->parts[m].first_task = j->num_tasks;
        j->num_tasks += j->parts[m].strip_blocks * cuts;
    }
    if (total * (size_t)j->num_tokens > INLINE_BYTES) {
        moe_parallel(ctx, j->num_tasks, linear_task, j);
        return;
    }
    for (int task = 0; task < j->num_tasks; task++) linear_task(j, task, 0);
}

/* Every form that some matrix wants is made once. */
static int run_linear(struct moe_ctx *ctx, const struct moe_matrix *const *w, float *const *y, int num_matrices,
                      const float *x, int num_tokens, int add) {
    int cols = w[0]->cols, wanted[MOE_NUM_ACT] = {0};
    size_t offset[MOE_NUM_ACT] = {0}, bytes = 0, span_bytes = 0;
    for (int m = 0; m < num_matrices; m++) {
        wanted[moe_form(ctx, w[m])] = 1;
        if (moe_span_bytes(ctx, w[m]) > span_bytes) span_bytes = moe_span_bytes(ctx, w[m]);
    }
    for (int form = MOE_ACT_Q8_32; form < MOE_NUM_ACT; form++) {
        offset[form] = bytes;
        if (wanted[form]) bytes += (size_t)num_tokens * moe_activation_bytes(form, cols);
    }
    size_t spans_at = bytes + moe_round64((size_t)num_matrices * sizeof(struct linear_part));
    char *scratch = moe_scratch(ctx, spans_at + (size_t)ctx->num_threads * span_bytes);
    if (!scratch) return MOE_NO_MEMORY;
    for (int form = MOE_ACT_Q8_32; form < MOE_NUM_ACT; form++)
        if (wanted[form]) moe_activate(ctx, scratch + offset[form], form, x, 0, num_tokens, cols);
    struct linear_part *parts = (struct linear_part *)(void *)(scratch + bytes);
    for (int m = 0; m < num_matrices; m++) {
        int form = moe_form(ctx, w[m]);
        parts[m] = (struct linear_part){.w = w[m], .y = y[m], .act = scratch + offset[form],
                                        .act_stride = moe_activation_bytes(form, cols)};
        if (form == MOE_ACT_F32) {
            parts[m].act = (const char *)x;
            parts[m].act_stride = (size_t)cols * 4;
        }
    }
    struct linear_job job = {.ctx = ctx, .vec = ctx->vec, .parts = parts, .num_parts = num_matrices, .num_tokens =
                             num_tokens,
                             .add = add, .spans = scratch + spans_at, .span_bytes = span_bytes};
    plan_linear(ctx, &job);
    return MOE_OK;
}

int moe_linear(struct moe_ctx *ctx, const struct moe_matrix *const *w, float *const *y, int num_matrices,
               const float *x, int num_tokens, int add) {
    if (!ctx || !w || !y || !x || num_matrices < 0 || num_tokens < 0) return MOE_BAD_ARGUMENT;
    for (int m = 0; m < num_matrices; m++)
        if (!y[m] || !moe_matrix_ok(w[m]) || w[m]->cols != w[0]->cols) return MOE_BAD_ARGUMENT;
    if (!num_matrices || !num_tokens) return MOE_OK;
    uint32_t saved = moe_enter_for(ctx, w);
    return moe_leave(ctx, saved, run_linear(ctx, w, y, num_matrices, x, num_tokens, add));
}

/* ---- embedding ---- */
struct embed_job {
    float *y;
    const struct moe_matrix *w;
    const struct moe_layout *exact;
    const int32_t *ids;
    char *spans; /* [threads] strips of a compact matrix */
    size_t strip_bytes;
    int num_tokens, tokens_per_task;
};

static void embed_task(void *arg, int task, int worker) {
    const struct embed_job *j = arg;
    const struct moe_matrix *w = j->w;
    int strips = moe_strips(w), strip_rows = j->exact->strip_rows;
    int first = task * j->tokens_per_task, last = first + j->tokens_per_task;
    for (int t = first; t < last && t < j->num_tokens; t++) {
        int id = j->ids[t], row = j->exact->scattered ? id % strips * strip_rows + id / strips : id;
        const void *data = w->data;
        if (w->storage) {
            int strip = row / strip_rows;
            struct moe_span span = {0};
            recode_span(&span, w, strip, strip + 1, j->spans + (size_t)worker * j->strip_bytes);
            data = span.data;
            row %= strip_rows;
        }
        j->exact->dequantize_row(j->y + (int64_t)t * w->cols, data, w->cols, row);
    }
}

int moe_embed(struct moe_ctx *ctx, float *y, const struct moe_matrix *w, const int32_t *ids, int num_tokens) {
    if (!ctx || !y || !ids || num_tokens < 0 || !moe_matrix_ok(w)) return MOE_BAD_ARGUMENT;
    for (int t = 0; t < num_tokens; t++)
        if (ids[t] < 0 || ids[t] >= w->rows) return MOE_BAD_ARGUMENT;
    if (w->layout->activation == MOE_ACT_Q8_256_ROTATED) return MOE_NO_KERNEL; /* its rows are not the weights */
    struct embed_job job = {.y = y, .w = w, .exact = scalar_layout(w->layout->name), .ids = ids,
                            .num_tokens = num_tokens, .tokens_per_task = TASK_ELEMENTS / w->cols + 1};
    if (!job.exact || !job.exact->dequantize_row) return MOE_NO_KERNEL;
    uint32_t saved = moe_enter_for(ctx, w);
    if (w->storage) {
        job.strip_bytes = moe_round64(w->layout->strip_bytes(w->cols));
        job.spans = moe_scratch(ctx, (size_t)ctx->num_threads * job.strip_bytes);
        if (!job.spans) return moe_leave(ctx, saved, MOE_NO_MEMORY);
    }
    moe_parallel(ctx, (num_tokens + job.tokens_per_task - 1) / job.tokens_per_task, embed_task, &job);
    return moe_leave(ctx, saved, MOE_OK);
}
