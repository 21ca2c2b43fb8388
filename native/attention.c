/* The key/value cache and attention over it: which chunks a query sees, how the work is split, in which order chunks
 * are merged. The arithmetic of one chunk is native/ops/attention_chunk.c.
 *
 * A query at position p sees positions max(0, p - window + 1) .. p, cut at multiples of MOE_ATTENTION_CHUNK. Every
 * chunk is computed alone; the first one starts the result, the others are merged in ascending order, a sink last, as
 * a chunk of maximum `sink`, sum 1 and no value; then out / sum. So a result depends on (query, cache, position,
 * window) alone: not on the tokens beside it, the split of a prompt, or the threads.
 *
 * The cache is a ring: position p is in slot p % capacity, and capacity is a multiple of the chunk, so a chunk never
 * wraps. */
#include "internal.h"
#include "moe.h"

enum { CHUNK = MOE_ATTENTION_CHUNK };
enum { BLOCK_TOKENS = 32 };        /* tokens of one task: they share converted keys and values */
enum { CONVERT_QUERIES = 4 };      /* from here on it pays to convert a float16 chunk once for all of its queries */
enum { MIN_PART_HEADS = 8 };       /* query heads of one task that share converted keys */
enum { TASKS_PER_THREAD = 4 };     /* with fewer tasks than that, chunks are spread over tasks too */
enum { MIN_SEGMENT_CHUNKS = 4 };   /* chunks that are worth a task */
enum { PARALLEL_ELEMENTS = 32768 };  /* stores below this size are not worth waking a worker */
static const size_t max_partial_floats = (size_t)1 << 24;

static int kv_is_valid(const struct moe_kv *kv) {
    return kv && kv->k && kv->num_heads > 0 && kv->head_dim > 0 && kv->head_dim % 8 == 0 && kv->value_dim > 0 &&
           kv->value_dim % 8 == 0 && (kv->v || kv->value_dim <= kv->head_dim) && kv->capacity > 0 &&
           kv->capacity % CHUNK == 0 && (kv->is_f32 == 0 || kv->is_f32 == 1);
}
static int range_is_valid(int first_position, int num_tokens) {
    return first_position >= 0 && num_tokens >= 0 && first_position <= INT32_MAX - num_tokens;
}
static char *kv_row(const struct moe_kv *kv, void *base, int width, int head, int position) {
    const size_t slot = (size_t)head * (size_t)kv->capacity + (size_t)(position % kv->capacity);
    return (char *)base + slot * (size_t)width * (kv->is_f32 ? 4 : 2);
}

struct store_job {
    struct moe_ctx *ctx;
    struct moe_kv *kv;
    const float *k, *v;
    int first_position;
};

static void store_rows(const struct store_job *job, void *base, const float *x, int width, int t) {
    const struct moe_kv *kv = job->kv;
    for (int h = 0; h < kv->num_heads; h++) {
        const float *row = x + ((size_t)t * (size_t)kv->num_heads + (size_t)h) * (size_t)width;
        void *slot = kv_row(kv, base, width, h, job->first_position + t);
        if (kv->is_f32) __builtin_memcpy(slot, row, (size_t)width * 4);
        else job->ctx->vec->f32_to_f16(slot, row, width);
    }
}

static void store_token(void *arg, int t, int worker) {
    const struct store_job *job = arg;
    (void)worker;
    store_rows(job, job->kv->k, job->k, job->kv->head_dim, t);
    if (job->kv->v) store_rows(job, job->kv->v, job->v, job->kv->value_dim, t);
}

int moe_kv_store(struct moe_ctx *ctx, struct moe_kv *kv, const float *k, const float *v, int first_position,
                 int num_tokens) {
    if (!ctx || !kv_is_valid(kv) || !range_is_valid(first_position, num_tokens) || num_tokens > kv->capacity)
        return MOE_BAD_ARGUMENT;
    if (num_tokens == 0) return MOE_OK;
    if (!k || (kv->v && !v)) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    struct store_job job = {ctx, kv, k, v, first_position};
    if ((int64_t)num_tokens * kv->num_heads * kv->head_dim < PARALLEL_ELEMENTS)
        for (int t = 0; t < num_tokens; t++) store_token(&job, t, 0);
    else
        moe_parallel(ctx, num_tokens, store_token, &job);
    return moe_leave(ctx, saved, MOE_OK);
}

struct attention_job {
    struct moe_ctx *ctx;
    float *out;
    const float *q, *sinks;
    const struct moe_kv *kv;
    int num_tokens, num_heads, group; /* group: query heads per key/value head */
    int part, parts;                  /* query heads of one task, and how many such parts a group has */
    int first_position, window;
    float scale;
    int block, num_blocks;            /* tokens per task, and how many such blocks */
    float *worker; /* per worker: keys [CHUNK, D], values [CHUNK, V], out [V], max and sum [block * part] */
    size_t worker_floats;
    int first_chunk, num_chunks;      /* of the spread mode: every chunk that some token sees */
    int segment;                      /* chunks per task */
    float *partial;                   /* [T * N, num_chunks, V + 2]: out, max, sum of each chunk */
};

static int first_visible(const struct attention_job *job, int position) {
    return job->window > 0 && position >= job->window ? position - job->window + 1 : 0;
}

/* The query heads of one task: part of the group of one key/value head. */
struct heads { int kv_head, first, count; };
static struct heads heads_of(const struct attention_job *job, int unit) {
    const int part = unit % job->parts, first = part * job->part, rest = job->group - first;
    const int kv_head = unit / job->parts;
    return (struct heads){kv_head, kv_head * job->group + first, rest < job->part ? rest : job->part};
}
static int num_units(const struct attention_job *job) { return job->kv->num_heads * job->parts; }

/* Keys and values of one chunk, from position `first` on. */
struct chunk_view {
    struct moe_kv_rows rows;
    int first;
};

static struct chunk_view open_chunk(const struct attention_job *job, int head, int first, int last, int num_queries,
                                    float *buffer) {
    const struct moe_kv *kv = job->kv;
    struct chunk_view view = {{.head_dim = kv->head_dim, .value_dim = kv->value_dim, .is_f32 = kv->is_f32}, first};
    struct moe_kv_rows *rows = &view.rows;
    rows->k = kv_row(kv, kv->k, kv->head_dim, head, first);
    rows->v = kv->v ? kv_row(kv, kv->v, kv->value_dim, head, first) : rows->k;
    rows->value_stride = kv->v ? kv->value_dim : kv->head_dim;
    if (!kv->is_f32 && num_queries >= CONVERT_QUERIES) { /* the same values, so the same bits */
        const int64_t n = last - first + 1;
        float *k = buffer, *v = kv->v ? k + CHUNK * (size_t)kv->head_dim : k;
        job->ctx->vec->f16_to_f32(k, rows->k, n * kv->head_dim);
        if (kv->v) job->ctx->vec->f16_to_f32(v, rows->v, n * kv->value_dim);
        rows->k = k, rows->v = v, rows->is_f32 = 1;
    }
    return view;
}

/* The rows of a chunk that the token at `position` sees; returns how many. */
static int visible_rows(const struct attention_job *job, int chunk, int position, int *first) {
    int last = chunk * CHUNK + CHUNK - 1;
    *first = first_visible(job, position);
    if (*first < chunk * CHUNK) *first = chunk * CHUNK;
    if (last > position) last = position;
    return last - *first + 1;
}

static void run_chunk(const struct attention_job *job, const struct chunk_view *view, int first, int n, size_t row,
                      float *out, float *max, float *sum) {
    const size_t skip = (size_t)(first - view->first) * (view->rows.is_f32 ? 4 : 2);
    struct moe_kv_rows rows = view->rows;
    rows.k = (const char *)rows.k + skip * (size_t)rows.head_dim;
    rows.v = (const char *)rows.v + skip * (size_t)rows.value_stride;
    job->ctx->attn->chunk(out, max, sum, job->q + row * (size_t)rows.head_dim, &rows, n, job->scale);
}

/* Sink, then out / sum. `zero` [V] holds no value. */
static void finish(const struct attention_job *job, int head, float *out, float max, float sum, float *zero) {
    const int width = job->kv->value_dim;
    if (job->sinks) {
        for (int d = 0; d < width; d++) zero[d] = 0.0f;
        job->ctx->attn->merge(out, &max, &sum, zero, job->sinks[head], 1.0f, width);
    }
    for (int d = 0; d < width; d++) out[d] /= sum;
}

/* Some query heads of one key/value head, a block of tokens, all chunks: merged as they come. */
static void attend_block(void *arg, int task, int worker) {
    const struct attention_job *job = arg;
    const struct heads heads = heads_of(job, task % num_units(job));
    const int block = job->num_blocks - 1 - task / num_units(job); /* long ones first */
    const int t0 = block * job->block, t1 = t0 + job->block < job->num_tokens ? t0 + job->block : job->num_tokens;
    const int lowest = first_visible(job, job->first_position + t0), highest = job->first_position + t1 - 1;
    const size_t width = (size_t)job->kv->value_dim;
    float *buffer = job->worker + (size_t)worker * job->worker_floats;
    float *part = buffer + CHUNK * ((size_t)job->kv->head_dim + width), *max = part + width,
          *sum = max + job->block * job->part;

    for (int c = lowest / CHUNK; c <= highest / CHUNK; c++) {
        const int from = c * CHUNK > lowest ? c * CHUNK : lowest;
        const int to = c * CHUNK + CHUNK - 1 < highest ? c * CHUNK + CHUNK - 1 : highest;
        struct chunk_view view = open_chunk(job, heads.kv_head, from, to, (t1 - t0) * heads.count, buffer);
        for (int t = t0; t < t1; t++) {
            const int position = job->first_position + t;
            int first, n = visible_rows(job, c, position, &first);
            if (n <= 0) continue;
            for (int g = 0; g < heads.count; g++) {
                const int i = (t - t0) * heads.count + g;
                const size_t row = (size_t)t * (size_t)job->num_heads + (size_t)(heads.first + g);
                float *out = job->out + row * width, part_max, part_sum;
                if (first_visible(job, position) >= c * CHUNK) {
                    run_chunk(job, &view, first, n, row, out, &max[i], &sum[i]);
                } else {
                    run_chunk(job, &view, first, n, row, part, &part_max, &part_sum);
                    job->ctx->attn->merge(out, &max[i], &sum[i], part, part_max, part_sum, job->kv->value_dim);
                }
            }
        }
    }
    for (int t = t0; t < t1; t++)
        for (int g = 0; g < heads.count; g++) {
            const int i = (t - t0) * heads.count + g, h = heads.first + g;
            finish(job, h, job->out + ((size_t)t * (size_t)job->num_heads + (size_t)h) * width, max[i], sum[i], part);
        }
}

static float *partial_at(const struct attention_job *job, size_t row, int chunk) {
    return job->partial +
           (row * (size_t)job->num_chunks + (size_t)(chunk - job->first_chunk)) * ((size_t)job->kv->value_dim + 2);
}

/* Spread mode, first step: some query heads, all tokens, some chunks, kept apart. */
static void attend_segment(void *arg, int task, int worker) {
    const struct attention_job *job = arg;
    const struct heads heads = heads_of(job, task % num_units(job));
    const int end = job->first_chunk + job->num_chunks, width = job->kv->value_dim;
    const int begin = job->first_chunk + task / num_units(job) * job->segment;
    const int lowest = first_visible(job, job->first_position), highest = job->first_position + job->num_tokens - 1;
    float *buffer = job->worker + (size_t)worker * job->worker_floats;
    for (int c = begin; c < begin + job->segment && c < end; c++) {
        const int from = c * CHUNK > lowest ? c * CHUNK : lowest;
        const int to = c * CHUNK + CHUNK - 1 < highest ? c * CHUNK + CHUNK - 1 : highest;
        struct chunk_view view = open_chunk(job, heads.kv_head, from, to, job->num_tokens * heads.count, buffer);
        for (int t = 0; t < job->num_tokens; t++) {
            int first, n = visible_rows(job, c, job->first_position + t, &first);
            for (int g = 0; n > 0 && g < heads.count; g++) {
                const size_t row = (size_t)t * (size_t)job->num_heads + (size_t)(heads.first + g);
                float *part = partial_at(job, row, c);
                run_chunk(job, &view, first, n, row, part, part + width, part + width + 1);
            }
        }
    }
}

/* Second step: one query head, all of its chunks in order. */
static void merge_row(void *arg, int task, int worker) {
    const struct attention_job *job = arg;
    const int width = job->kv->value_dim, position = job->first_position + task / job->num_heads;
    const int first = first_visible(job, position) / CHUNK, last = position / CHUNK;
    float *out = job->out + (size_t)task * (size_t)width, *zero = job->worker + (size_t)worker * job->worker_floats;
    float *part = partial_at(job, (size_t)task, first), max = part[width], sum = part[width + 1];
    __builtin_memcpy(out, part, (size_t)width * 4);
    for (int c = first + 1; c <= last; c++) {
        part = partial_at(job, (size_t)task, c);
        job->ctx->attn->merge(out, &max, &sum, part, part[width], part[width + 1], width);
    }
    finish(job, task % job->num_heads, out, max, sum, zero);
}

/* Slots that a query needs must not have been taken by a later token of the same call. */
static int cache_reaches_back(const struct attention_job *job) {
    const int64_t last = (int64_t)job->first_position + job->num_tokens;
    const int64_t windowed = (int64_t)job->window + job->num_tokens - 1;
    return job->kv->capacity >= (job->window > 0 && windowed < last ? windowed : last);
}

/* Large groups (latent attention has one for all heads) are cut when there are too few tasks. */
static void choose_parts(struct attention_job *job) {
    const int threads = job->ctx->num_threads, tasks = job->kv->num_heads * job->num_blocks;
    const int wanted = threads == 1 ? 1 : (TASKS_PER_THREAD * threads + tasks - 1) / tasks,
              most = job->group / MIN_PART_HEADS;
    const int parts = wanted < most ? wanted : most;
    job->part = parts > 1 ? (job->group + parts - 1) / parts : job->group;
    job->parts = (job->group + job->part - 1) / job->part;
}

/* Chunks per task when heads and tokens alone give too few tasks; 0: do not spread. */
static int choose_segment(const struct attention_job *job) {
    const int threads = job->ctx->num_threads, tasks = num_units(job) * job->num_blocks;
    if (threads == 1 || job->num_blocks > 1 || tasks >= TASKS_PER_THREAD * threads ||
        job->num_chunks < 2 * MIN_SEGMENT_CHUNKS)
        return 0;
    const size_t rows = (size_t)job->num_tokens * (size_t)job->num_heads;
    if (rows * (size_t)job->num_chunks * ((size_t)job->kv->value_dim + 2) > max_partial_floats) return 0;
    const int wanted = (TASKS_PER_THREAD * threads + tasks - 1) / tasks,
              chunks = (job->num_chunks + wanted - 1) / wanted;
    return chunks > MIN_SEGMENT_CHUNKS ? chunks : MIN_SEGMENT_CHUNKS;
}

static int run_attention(struct attention_job *job) {
    struct moe_ctx *ctx = job->ctx;
    const size_t width = (size_t)job->kv->value_dim, rows = (size_t)job->num_tokens * (size_t)job->num_heads;
    job->block = job->num_tokens < BLOCK_TOKENS ? job->num_tokens : BLOCK_TOKENS;
    job->num_blocks = (job->num_tokens + job->block - 1) / job->block;
    job->first_chunk = first_visible(job, job->first_position) / CHUNK;
    job->num_chunks = (job->first_position + job->num_tokens - 1) / CHUNK - job->first_chunk + 1;
    choose_parts(job);
    job->segment = choose_segment(job);
    const size_t chunk_floats = CHUNK * ((size_t)job->kv->head_dim + width) + width;
    job->worker_floats = moe_round64((chunk_floats + 2 * (size_t)job->block * (size_t)job->part) * 4) / 4;
    const size_t shared = job->segment ? rows * (size_t)job->num_chunks * (width + 2) : 0;
    job->worker = moe_scratch(ctx, ((size_t)ctx->num_threads * job->worker_floats + shared) * 4);
    if (!job->worker) return MOE_NO_MEMORY;
    job->partial = job->worker + (size_t)ctx->num_threads * job->worker_floats;
    if (!job->segment) {
        moe_parallel(ctx, num_units(job) * job->num_blocks, attend_block, job);
        return MOE_OK;
    }
    moe_parallel(ctx, num_units(job) * ((job->num_chunks + job->segment - 1) / job->segment), attend_segment, job);
    moe_parallel(ctx, (int)rows, merge_row, job);
    return MOE_OK;
}

int moe_attention(struct moe_ctx *ctx, float *out, const float *q, const struct moe_kv *kv, int num_tokens,
                  int num_heads, int first_position, float scale, int window, const float *sinks) {
    if (!ctx || !kv_is_valid(kv) || !range_is_valid(first_position, num_tokens)) return MOE_BAD_ARGUMENT;
    if (num_heads <= 0 || num_heads % kv->num_heads || window < 0) return MOE_BAD_ARGUMENT;
    if (num_tokens == 0) return MOE_OK;
    if (!out || !q || out == q) return MOE_BAD_ARGUMENT;
    struct attention_job job = {.ctx = ctx, .out = out, .q = q, .sinks = sinks, .kv = kv, .num_tokens = num_tokens,
                                .num_heads = num_heads, .group = num_heads / kv->num_heads,
                                .first_position = first_position, .window = window, .scale = scale};
    if (!cache_reaches_back(&job)) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    return moe_leave(ctx, saved, run_attention(&job));
}
