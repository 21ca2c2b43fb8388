/* Mixture of experts: routing, the grouping of tokens by expert, the experts' products and their sum.
 *
 * Experts run in two batches. First gate and up rows with SwiGLU behind them, a task being (expert, row block) over all
 * of that expert's tokens; whoever finishes an expert's last block quantizes its hidden rows, so no third barrier is
 * needed. Then the down rows. Every product is the one moe_linear would give. */
#include "linear.h"
#include <stdatomic.h>
#include <stdlib.h>

/* ---- routing ---- */
struct route_job {
    const struct moe_vector_ops *vec;
    const struct moe_router_rule *rule;
    int32_t *ids;
    float *weights;
    const float *logits;
    float *scores; /* [threads, 3, E]: scores, what is selected by, groups */
    int num_tokens, num_experts, top, tokens_per_task;
    atomic_int bad;
};

/* The `top` largest, in order, ties to the lowest id; scores are finite and get -inf where taken. */
static void take_top(int32_t *ids, float *values, float *scores, int n, int top) {
    for (int rank = 0; rank < top; rank++) {
        float best = -__builtin_inff();
        int id = 0;
        for (int e = 0; e < n; e++)
            if (scores[e] > best) { best = scores[e]; id = e; }
        ids[rank] = id;
        values[rank] = best;
        scores[id] = -__builtin_inff();
    }
}

static float group_score(const float *x, int n, int kind) {
    float first = -__builtin_inff(), second = first;
    for (int i = 0; i < n; i++) {
        if (x[i] > first) { second = first; first = x[i]; }
        else if (x[i] > second) second = x[i];
    }
    return kind == MOE_GROUP_MAX ? first : first + second;
}

/* -inf for the experts of all groups but the best */
static void mask_groups(const struct moe_router_rule *rule, float *choice, int num_experts, float *groups) {
    const int n = rule->num_groups, size = num_experts / n;
    for (int g = 0; g < n; g++) groups[g] = group_score(choice + g * size, size, rule->group_score);
    for (int rank = 0; rank < rule->top_groups; rank++) { /* taken groups become NaN, which is never the largest */
        int best = -1;
        for (int g = 0; g < n; g++)
            if (groups[g] == groups[g] && (best < 0 || groups[g] > groups[best])) best = g;
        groups[best] = __builtin_nanf("");
    }
    for (int g = 0; g < n; g++)
        for (int e = g * size; groups[g] == groups[g] && e < (g + 1) * size; e++) choice[e] = -__builtin_inff();
}

static void score_token(const struct route_job *j, float *scores, const float *logits) {
    const int n = j->num_experts;
    if (j->rule->score == MOE_SOFTMAX_THEN_TOPK) j->vec->softmax(scores, logits, n);
    else if (j->rule->score == MOE_SIGMOID_THEN_TOPK) j->vec->sigmoid(scores, logits, n);
    else for (int e = 0; e < n; e++) scores[e] = logits[e];
}

static void route_token(struct route_job *j, int64_t t, float *scores) {
    const struct moe_router_rule *rule = j->rule;
    const int n = j->num_experts;
    const float *logits = j->logits + t * n;
    float *weights = j->weights + t * j->top, *choice = scores + n;
    int32_t *ids = j->ids + t * j->top;
    if (!j->vec->all_finite(logits, n)) {
        atomic_store_explicit(&j->bad, 1, memory_order_relaxed);
        return;
    }
    score_token(j, scores, logits);
    for (int e = 0; e < n; e++) choice[e] = rule->correction ? scores[e] + rule->correction[e] : scores[e];
    if (rule->num_groups) mask_groups(rule, choice, n, choice + n);
    take_top(ids, weights, choice, n, j->top);
    for (int rank = 0; rule->correction && rank < j->top; rank++) weights[rank] = scores[ids[rank]];
    if (rule->score == MOE_TOPK_THEN_SOFTMAX) j->vec->softmax(weights, weights, j->top);
    if (rule->norm_topk_prob) {
        float sum = weights[0];
        for (int rank = 1; rank < j->top; rank++) sum += weights[rank];
        sum += rule->norm_epsilon;
        for (int rank = 0; rank < j->top; rank++) weights[rank] /= sum;
    }
    for (int rank = 0; rank < j->top; rank++) weights[rank] *= rule->scale;
}

static void route_task(void *arg, int task, int worker) {
    struct route_job *j = arg;
    int first = task * j->tokens_per_task, last = first + j->tokens_per_task;
    float *scores = j->scores + (size_t)worker * 3 * (size_t)j->num_experts;
    for (int t = first; t < last && t < j->num_tokens; t++) route_token(j, t, scores);
}

static int rule_ok(const struct moe_ctx *ctx, const struct moe_router_rule *rule, int num_experts, int top) {
    if (rule->score < MOE_SOFTMAX_THEN_TOPK || rule->score > MOE_SIGMOID_THEN_TOPK ||
        !(rule->norm_epsilon >= 0))
        return 0;
    if (rule->correction && !ctx->vec->all_finite(rule->correction, num_experts)) return 0;
    const int n = rule->num_groups;
    if (!n) return 1;
    if (n < 0 || num_experts % n || rule->top_groups < 1 || rule->top_groups > n) return 0;
    if (rule->group_score != MOE_GROUP_MAX && rule->group_score != MOE_GROUP_TOP2_SUM) return 0;
    return top <= num_experts / n * rule->top_groups && (rule->group_score == MOE_GROUP_MAX || num_experts / n >= 2);
}

int moe_route(struct moe_ctx *ctx, int32_t *ids, float *weights, const float *logits, int num_tokens, int num_experts,
              int num_experts_per_tok, const struct moe_router_rule *rule) {
    enum { TASK_SCORES = 2048 };
    if (!ctx || !ids || !weights || !logits || !rule || num_tokens < 0 || num_experts < 1) return MOE_BAD_ARGUMENT;
    if (num_experts_per_tok < 1 || num_experts_per_tok > num_experts) return MOE_BAD_ARGUMENT;
    if (!rule_ok(ctx, rule, num_experts, num_experts_per_tok)) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    float *scores = moe_scratch(ctx, (size_t)ctx->num_threads * 3 * (size_t)num_experts * sizeof *scores);
    if (!scores) return moe_leave(ctx, saved, MOE_NO_MEMORY);
    struct route_job job = {ctx->vec, rule, ids, weights, logits, scores, num_tokens, num_experts, num_experts_per_tok,
                            TASK_SCORES / num_experts + 1, 0};
    moe_parallel(ctx, (num_tokens + job.tokens_per_task - 1) / job.tokens_per_task, route_task, &job);
    return moe_leave(ctx, saved, job.bad ? MOE_NONFINITE : MOE_OK);
}

/* Counting sort, stable: assignments of one expert stay in ascending order. */
static int route_plan(int32_t *expert_ids, int32_t *offsets, int32_t *assignments, const int32_t *ids, int64_t n,
                      int num_experts) {
    for (int64_t a = 0; a < n; a++)
        if (ids[a] < 0 || ids[a] >= num_experts) return MOE_BAD_ARGUMENT;
    int32_t *next = calloc((size_t)num_experts, sizeof *next); /* first the count, then the next free place */
    if (!next) return MOE_NO_MEMORY;
    for (int64_t a = 0; a < n; a++) next[ids[a]]++;
    int distinct = 0;
    int32_t place = 0;
    for (int e = 0; e < num_experts; e++) {
        int32_t count = next[e];
        next[e] = place;
        if (!count) continue;
        expert_ids[distinct] = e;
        offsets[distinct++] = place;
        place += count;
    }
    offsets[distinct] = place;
    for (int64_t a = 0; a < n; a++) assignments[next[ids[a]]++] = (int32_t)a;
    free(next);
    return distinct;
}

int moe_route_plan(struct moe_ctx *ctx, int32_t *expert_ids, int32_t *offsets, int32_t *assignments, const int32_t *ids,
                   int num_tokens, int num_experts_per_tok, int num_experts) {
    if (!ctx || !expert_ids || !offsets || !assignments || !ids) return MOE_BAD_ARGUMENT;
    if (num_tokens < 0 || num_experts_per_tok < 1 || num_experts < 1) return MOE_BAD_ARGUMENT;
    int64_t n = (int64_t)num_tokens * num_experts_per_tok;
    if (n > INT32_MAX) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    return moe_leave(ctx, saved, route_plan(expert_ids, offsets, assignments, ids, n, num_experts));
}

/* ---- experts ---- */
/* Assignments per pass: bounds the memory for hidden rows, and keeps them in cache. */
enum { WINDOW = 1024 };

struct unit { /* one expert's assignments in this pass */
    const struct moe_expert *expert;
    const int32_t *assignments;
    int count, slot; /* hidden rows slot .. slot + count - 1 */
    int rows_per_task, first_task;           /* gate and up */
    int down_strips_per_task, first_down_task;
    atomic_int blocks_left;
};

struct experts_job {
    struct moe_ctx *ctx;
    const struct moe_vector_ops *vec;
    float *out;
    const float *x;
    char *act_x[MOE_NUM_ACT]; /* [T] per form; F32: x itself */
    size_t act_x_stride[MOE_NUM_ACT];
    float *hidden;        /* [WINDOW, hidden_stride] */
    char *act_h;          /* [WINDOW] in the form of that expert's down */
    float *up;            /* [threads, MOE_TILE_TOKENS, hidden_stride] */
    char *spans;          /* [threads]: strips of a compact gate (or down) and, gate_span_bytes on, of its up */
    struct unit *units;
    size_t hidden_stride, act_h_stride, span_bytes, gate_span_bytes;
    int num_units, hidden_size, num_experts_per_tok;
};

static int max_int(int a, int b) { return a > b ? a : b; }
static int min_int(int a, int b) { return a < b ? a : b; }
static size_t row_bytes(const struct moe_matrix *w) {
    return w->layout->strip_bytes(w->cols) / (size_t)w->layout->strip_rows;
}

static const struct unit *unit_of_task(const struct experts_job *j, int task, int down) {
    int low = 0, high = j->num_units - 1;
    while (low < high) {
        int mid = (low + high + 1) / 2;
        int first = down ? j->units[mid].first_down_task : j->units[mid].first_task;
        if (first <= task) low = mid;
        else high = mid - 1;
    }
    return &j->units[low];
}

/* Strips of rows [row0, row1), counted as the strips do. */
static struct moe_span span_of_rows(const struct experts_job *j, const struct moe_matrix *w, int row0, int row1,
                                    char *scratch) {
    int strip_rows = w->layout->strip_rows;
    return moe_span(j->ctx, w, row0 / strip_rows, (row1 + strip_rows - 1) / strip_rows, scratch);
}
static struct moe_runs runs_of_rows(const struct moe_matrix *w, int row0, int row1) {
    int strip_rows = w->layout->strip_rows;
    return moe_runs(w, row0 / strip_rows, (row1 + strip_rows - 1) / strip_rows);
}
/* Rows whose strips are ready at once: all, or those that are made in scratch. */
static int span_rows(const struct experts_job *j, const struct moe_matrix *w, int rows) {
    int strips = moe_span_strips(j->ctx, w);
    return strips ? strips * w->layout->strip_rows : rows;
}

static void multiply_rows(const struct experts_job *j, const struct moe_matrix *w, const struct moe_span *span,
                          struct moe_runs runs, float *const *y, const void *const *x, int n) {
    moe_multiply(span, y, x, n);
    for (int t = 0; w->bias && t < n; t++)
        for (int64_t k = 0, row = runs.first; k < runs.count; k++, row += runs.stride)
            j->vec->add(y[t] + row, w->bias + row, runs.len);
}

static void quantize_hidden(const struct experts_job *j, const struct unit *u) {
    const struct moe_matrix *down = &u->expert->down;
    const int form = moe_form(j->ctx, down);
    if (form == MOE_ACT_F32) return;
    for (int i = u->slot; i < u->slot + u->count; i++)
        moe_activate_row(j->vec, j->act_h + (size_t)i * j->act_h_stride, form, j->hidden + (size_t)i * j->hidden_stride,
                         down->cols);
}

static void activate_rows(const struct moe_vector_ops *vec, const struct moe_expert *e, float *gate, const float *up,
                          int64_t n) {
    if (e->activation == MOE_SWIGLU_CLAMPED) vec->swiglu_clamped(gate, gate, up, n, e->limit);
    else vec->swiglu(gate, gate, up, n);
}

/* hidden[row0 .. row1) of all tokens of the unit. */
static void gate_up_rows(const struct experts_job *j, const struct unit *u, int worker, int row0, int row1) {
    const struct moe_matrix *gate = &u->expert->gate, *up = &u->expert->up;
    char *scratch = j->spans + (size_t)worker * j->span_bytes;
    const struct moe_span gate_span = span_of_rows(j, gate, row0, row1, scratch);
    const struct moe_span up_span = span_of_rows(j, up, row0, row1, scratch + j->gate_span_bytes);
    /* Rows as the strips count them; where those are scattered, gate and up have the same strips (expert_ok). */
    const struct moe_runs runs = runs_of_rows(gate, row0, row1), up_runs = runs_of_rows(up, row0, row1);
    const int gate_form = moe_form(j->ctx, gate), up_form = moe_form(j->ctx, up);
    float *g[MOE_TILE_TOKENS], *v[MOE_TILE_TOKENS];
    const void *xg[MOE_TILE_TOKENS], *xu[MOE_TILE_TOKENS];
    for (int i = 0; i < u->count; i += MOE_TILE_TOKENS) {
        int n = min_int(u->count - i, MOE_TILE_TOKENS);
        for (int t = 0; t < n; t++) {
            size_t token = (size_t)(u->assignments[i + t] / j->num_experts_per_tok);
            g[t] = j->hidden + (size_t)(u->slot + i + t) * j->hidden_stride;
            v[t] = j->up + ((size_t)worker * MOE_TILE_TOKENS + (size_t)t) * j->hidden_stride;
            xg[t] = j->act_x[gate_form] + token * j->act_x_stride[gate_form];
            xu[t] = j->act_x[up_form] + token * j->act_x_stride[up_form];
        }
        multiply_rows(j, gate, &gate_span, runs, g, xg, n);
        multiply_rows(j, up, &up_span, up_runs, v, xu, n);
        for (int t = 0; t < n; t++)
            for (int64_t k = 0, row = runs.first; k < runs.count; k++, row += runs.stride)
                activate_rows(j->vec, u->expert, g[t] + row, v[t] + row, runs.len);
    }
}

static void gate_up_task(void *arg, int task, int worker) {
    const struct experts_job *j = arg;
    struct unit *u = (struct unit *)unit_of_task(j, task, 0);
    int row = (task - u->first_task) * u->rows_per_task, end = min_int(row + u->rows_per_task, u->expert->gate.rows);
    int step = min_int(span_rows(j, &u->expert->gate, end - row), span_rows(j, &u->expert->up, end - row));
    for (; row < end; row += step) gate_up_rows(j, u, worker, row, min_int(row + step, end));
    if (atomic_fetch_sub(&u->blocks_left, 1) == 1) quantize_hidden(j, u);
}

static void down_rows(const struct experts_job *j, const struct unit *u, int worker, int row0, int row1) {
    const struct moe_matrix *down = &u->expert->down;
    const struct moe_span span = span_of_rows(j, down, row0, row1, j->spans + (size_t)worker * j->span_bytes);
    const struct moe_runs runs = runs_of_rows(down, row0, row1);
    int is_f32 = moe_form(j->ctx, down) == MOE_ACT_F32;
    float *y[MOE_TILE_TOKENS];
    const void *x[MOE_TILE_TOKENS];
    for (int i = 0; i < u->count; i += MOE_TILE_TOKENS) {
        int n = min_int(u->count - i, MOE_TILE_TOKENS);
        for (int t = 0; t < n; t++) {
            size_t slot = (size_t)(u->slot + i + t);
            y[t] = j->out + (int64_t)u->assignments[i + t] * j->hidden_size;
            x[t] = is_f32 ? (const void *)(j->hidden + slot * j->hidden_stride) : j->act_h + slot * j->act_h_stride;
        }
        multiply_rows(j, down, &span, runs, y, x, n);
    }
}

static void down_task(void *arg, int task, int worker) {
    const struct experts_job *j = arg;
    const struct unit *u = unit_of_task(j, task, 1);
    const struct moe_matrix *down = &u->expert->down;
    int per_task = u->down_strips_per_task * down->layout->strip_rows;
    int row = (task - u->first_down_task) * per_task, end = min_int(row + per_task, down->rows);
    int step = span_rows(j, down, end - row);
    for (; row < end; row += step) down_rows(j, u, worker, row, min_int(row + step, end));
}

static int rows_at_once(const struct moe_layout *k) { return (int)moe_whole_strips(k, 1) * k->strip_rows; }

/* Cut the pass into tasks and run both batches. */
static void run_window(struct experts_job *j) {
    size_t gate_up = 0, down = 0;
    for (int i = 0; i < j->num_units; i++) {
        const struct moe_expert *e = j->units[i].expert;
        gate_up += moe_data_bytes(&e->gate) + moe_data_bytes(&e->up);
        down += moe_data_bytes(&e->down);
    }
    size_t gate_up_bytes = moe_task_bytes(gate_up, j->ctx->num_threads);
    size_t down_bytes = moe_task_bytes(down, j->ctx->num_threads);
    int tasks = 0, down_tasks = 0;
    for (int i = 0; i < j->num_units; i++) {
        struct unit *u = &j->units[i];
        const struct moe_expert *e = u->expert;
        int step = max_int(rows_at_once(e->gate.layout), rows_at_once(e->up.layout));
        size_t steps = gate_up_bytes / ((row_bytes(&e->gate) + row_bytes(&e->up)) * (size_t)step) + 1;
        size_t all_steps = ((size_t)e->gate.rows + (size_t)step - 1) / (size_t)step;
        u->rows_per_task = (int)(steps < all_steps ? steps : all_steps) * step;
        int blocks = (e->gate.rows + u->rows_per_task - 1) / u->rows_per_task;
        u->first_task = tasks;
        atomic_init(&u->blocks_left, blocks);
        tasks += blocks;
        size_t strips = moe_whole_strips(e->down.layout, down_bytes / e->down.layout->strip_bytes(e->down.cols) + 1);
        u->down_strips_per_task = strips < (size_t)moe_strips(&e->down) ? (int)strips : moe_strips(&e->down);
        u->first_down_task = down_tasks;
        down_tasks += (moe_strips(&e->down) + u->down_strips_per_task - 1) / u->down_strips_per_task;
    }
    int64_t started = moe_time_begin(j->ctx);
    moe_parallel(j->ctx, tasks, gate_up_task, j);
    started = moe_time_end(j->ctx, MOE_TIME_GATE_UP, started);
    moe_parallel(j->ctx, down_tasks, down_task, j);
    moe_time_end(j->ctx, MOE_TIME_DOWN, started);
}

static int expert_ok(const struct moe_expert *e, int hidden_size) {
    if (!e || !moe_matrix_ok(&e->gate) || !moe_matrix_ok(&e->up) || !moe_matrix_ok(&e->down)) return 0;
    if (e->activation != MOE_SWIGLU && (e->activation != MOE_SWIGLU_CLAMPED || !(e->limit > 0))) return 0;
    int a = e->gate.layout->strip_rows, b = e->up.layout->strip_rows;
    if (e->gate.layout->scattered != e->up.layout->scattered || (e->gate.layout->scattered && a != b)) return 0;
    return e->gate.cols == hidden_size && e->up.cols == hidden_size && e->down.rows == hidden_size &&
           e->up.rows == e->gate.rows && e->down.cols == e->gate.rows && max_int(a, b) % min_int(a, b) == 0;
}

struct experts_call { /* the public arguments that the steps below share */
    const struct moe_expert *const *table;
    const int32_t *expert_ids, *offsets, *assignments;
    int num_experts, num_tokens;
    int forms[MOE_NUM_ACT], rows; /* activation forms of x in use; widest expert */
    size_t gate_span, up_span, down_span; /* most scratch for compact strips */
};

static void need_span(size_t *bytes, const struct moe_ctx *ctx, const struct moe_matrix *w) {
    if (moe_span_bytes(ctx, w) > *bytes) *bytes = moe_span_bytes(ctx, w);
}

static int check_call(struct experts_call *c, const struct moe_ctx *ctx, int num_experts_per_tok, int *hidden_size,
                      size_t *act_h_stride) {
    for (int i = 0; i < c->num_experts; i++) {
        if (c->expert_ids[i] < 0 || c->offsets[i] < 0 || c->offsets[i + 1] < c->offsets[i]) return 0;
        const struct moe_expert *e = c->table[c->expert_ids[i]];
        if (!e) return 0;
        if (!i) *hidden_size = e->gate.cols;
        if (!expert_ok(e, *hidden_size)) return 0;
        c->forms[moe_form(ctx, &e->gate)] = c->forms[moe_form(ctx, &e->up)] = 1;
        c->rows = max_int(c->rows, e->gate.rows);
        need_span(&c->gate_span, ctx, &e->gate);
        need_span(&c->up_span, ctx, &e->up);
        need_span(&c->down_span, ctx, &e->down);
        int form = moe_form(ctx, &e->down);
        size_t bytes = form == MOE_ACT_F32 ? 0 : moe_activation_bytes(form, e->down.cols);
        if (bytes > *act_h_stride) *act_h_stride = bytes;
        for (int32_t k = c->offsets[i]; k < c->offsets[i + 1]; k++)
            if (c->assignments[k] < 0 || c->assignments[k] >= (int64_t)c->num_tokens * num_experts_per_tok) return 0;
    }
    return 1;
}

/* Only tokens that an expert of this call wants, each once: experts may be run one by one as they arrive. */
static void activate_tokens(struct experts_job *j, const struct experts_call *c, int32_t *tokens, char *seen) {
    int count = 0;
    for (int t = 0; t < c->num_tokens; t++) seen[t] = 0;
    for (int32_t k = c->offsets[0]; k < c->offsets[c->num_experts]; k++) {
        int t = c->assignments[k] / j->num_experts_per_tok;
        if (!seen[t]) tokens[count++] = t;
        seen[t] = 1;
    }
    for (int form = MOE_ACT_Q8_32; form < MOE_NUM_ACT; form++)
        if (c->forms[form]) moe_activate(j->ctx, j->act_x[form], form, j->x, tokens, count, j->hidden_size);
    j->act_x[MOE_ACT_F32] = (char *)j->x;
    j->act_x_stride[MOE_ACT_F32] = (size_t)j->hidden_size * sizeof(float);
}

static void *carve(char **p, size_t bytes) {
    char *at = *p;
    *p += moe_round64(bytes);
    return at;
}

static int run_experts(struct experts_job *j, const struct experts_call *c) {
    size_t window = (size_t)min_int(c->offsets[c->num_experts] - c->offsets[0], WINDOW), tokens = (size_t)c->num_tokens;
    j->hidden_stride = moe_round64((size_t)c->rows * sizeof(float)) / sizeof(float);
    for (int form = MOE_ACT_Q8_32; form < MOE_NUM_ACT; form++)
        j->act_x_stride[form] = c->forms[form] ? moe_activation_bytes(form, j->hidden_size) : 0;
    size_t up_floats = (size_t)j->ctx->num_threads * MOE_TILE_TOKENS * j->hidden_stride;
    j->gate_span_bytes = c->gate_span;
    j->span_bytes = c->gate_span + c->up_span > c->down_span ? c->gate_span + c->up_span : c->down_span;
    size_t act_x_bytes = 0, span_bytes = (size_t)j->ctx->num_threads * j->span_bytes;
    for (int form = MOE_ACT_Q8_32; form < MOE_NUM_ACT; form++) act_x_bytes += j->act_x_stride[form];
    char *p = moe_scratch(j->ctx, tokens * (act_x_bytes + 5) + window * (j->hidden_stride * 4 + j->act_h_stride) +
                                      up_floats * 4 + span_bytes + window * sizeof(struct unit) +
                                          (6 + MOE_NUM_ACT) * 64);
    if (!p) return MOE_NO_MEMORY;
    for (int form = MOE_ACT_Q8_32; form < MOE_NUM_ACT; form++)
        j->act_x[form] = carve(&p, tokens * j->act_x_stride[form]);
    j->hidden = carve(&p, window * j->hidden_stride * 4);
    j->act_h = carve(&p, window * j->act_h_stride);
    j->up = carve(&p, up_floats * 4);
    j->spans = carve(&p, span_bytes);
    j->units = carve(&p, window * sizeof(struct unit));
    int32_t *token_list = carve(&p, tokens * 4);
    activate_tokens(j, c, token_list, p);
    int filled = 0;
    for (int i = 0; i < c->num_experts; i++) {
        int32_t at = c->offsets[i], end = c->offsets[i + 1];
        while (at < end) {
            int n = min_int(end - at, (int)window - filled);
            struct unit *u = &j->units[j->num_units++];
            u->expert = c->table[c->expert_ids[i]];
            u->assignments = c->assignments + at;
            u->count = n;
            u->slot = filled;
            filled += n;
            at += n;
            if (filled < (int)window) continue;
            run_window(j);
            j->num_units = filled = 0;
        }
    }
    if (j->num_units) run_window(j);
    return MOE_OK;
}

int moe_experts(struct moe_ctx *ctx, float *out, const struct moe_expert *const *table, const int32_t *expert_ids,
                const int32_t *offsets, const int32_t *assignments, int num_experts, const float *x, int num_tokens,
                int num_experts_per_tok) {
    if (!ctx || !out || !table || !expert_ids || !offsets || !assignments || !x) return MOE_BAD_ARGUMENT;
    if (num_experts < 0 || num_tokens < 0 || num_experts_per_tok < 1) return MOE_BAD_ARGUMENT;
    struct experts_call call = {.table = table, .expert_ids = expert_ids, .offsets = offsets,
                                .assignments = assignments, .num_experts = num_experts, .num_tokens = num_tokens};
    struct experts_job job = {.ctx = ctx, .vec = ctx->vec, .out = out, .x = x,
                              .num_experts_per_tok = num_experts_per_tok};
    if (!check_call(&call, ctx, num_experts_per_tok, &job.hidden_size, &job.act_h_stride)) return MOE_BAD_ARGUMENT;
    if (!num_experts || offsets[num_experts] == offsets[0]) return MOE_OK;
    uint32_t saved = moe_enter_for(ctx, table);
    moe_note_experts(ctx, expert_ids, offsets, num_experts);
    return moe_leave(ctx, saved, run_experts(&job, &call));
}

/* ---- sum over ranks ---- */
struct combine_job {
    const struct moe_vector_ops *vec;
    float *y;
    const float *out, *weights;
    int num_tokens, top, hidden_size, tokens_per_task;
    atomic_int bad;
};

static void combine_token(struct combine_job *j, int64_t t) {
    enum { PIECE = 1024 };
    float sum[PIECE], *y = j->y + t * j->hidden_size;
    for (int c = 0; c < j->hidden_size; c += PIECE) {
        int n = min_int(j->hidden_size - c, PIECE);
        for (int rank = 0; rank < j->top; rank++) {
            const float *row = j->out + (t * j->top + rank) * j->hidden_size + c;
            float w = j->weights[t * j->top + rank];
            if (rank) j->vec->fma(sum, row, w, n);
            else j->vec->scale(sum, row, w, n);
        }
        j->vec->add(y + c, sum, n);
        if (!j->vec->all_finite(y + c, n)) atomic_store_explicit(&j->bad, 1, memory_order_relaxed);
    }
}

static void combine_task(void *arg, int task, int worker) {
    struct combine_job *j = arg;
    int first = task * j->tokens_per_task, last = min_int(first + j->tokens_per_task, j->num_tokens);
    (void)worker;
    for (int t = first; t < last; t++) combine_token(j, t);
}

int moe_experts_combine(struct moe_ctx *ctx, float *y, const float *out, const float *weights, int num_tokens,
                        int num_experts_per_tok, int hidden_size) {
    enum { TASK_TERMS = 32768 };
    if (!ctx || !y || !out || !weights) return MOE_BAD_ARGUMENT;
    if (num_tokens < 0 || num_experts_per_tok < 1 || hidden_size < 1) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    struct combine_job job = {ctx->vec, y, out, weights, num_tokens, num_experts_per_tok, hidden_size,
                              (int)(TASK_TERMS / ((int64_t)hidden_size * num_experts_per_tok)) + 1, 0};
    moe_parallel(ctx, (num_tokens + job.tokens_per_task - 1) / job.tokens_per_task, combine_task, &job);
    return moe_leave(ctx, saved, job.bad ? MOE_NONFINITE : MOE_OK);
}
