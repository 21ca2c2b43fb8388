/* One token from logits.
 *
 * 1. Penalties, over the distinct ids of the history: l > 0 ? l / repeat : l * repeat, then l - count * frequency, then
 *    l - presence. A NaN or +Inf after that is MOE_NONFINITE; -Inf excludes a token; so is nothing but -Inf.
 * 2. temperature 0: the largest logit, ties to the lowest id. Done.
 * 3. Candidates in descending order of logit, ties to the lowest id. Probability p = exp((l - max) / temperature) in
 *    float, as the integer weight floor(2^40 p): sums of weights are exact, so no order of summation shows, and a tail
 *    need not be sorted. Weight 0 (p < 9.1e-13) is no candidate; the first one has weight 2^40.
 * 4. top_k keeps the first k. top_p keeps the shortest prefix with weight >= top_p * total of what is left. min_p keeps
 *    the prefix before the first weight below floor(2^40 min_p).
 * 5. The draw: with r = 53 random bits of (seed, position) the first candidate whose cumulative weight exceeds
 *    floor(r * total / 2^53).
 *
 * Cost: one vectorised pass for the maximum. With a small top_k a second look at the blocks that can hold one of the k
 * largest; otherwise exp of everything and a distribution over buckets of about equal (l - max) / temperature, which
 * are sorted one by one only as far as the draw or a cut reaches. */
#include "internal.h"
#include "moe.h"

enum { BLOCK = 64 };              /* logits per recorded maximum */
enum { NUM_BUCKETS = 2048 };
enum { RUN = 16 };                /* sorted by insertion before merging */
enum { MAX_VOCABULARY = 1 << 23 }; /* 2^40 * 2^23 fits 63 bits */
#define LOWEST_EXPONENT (-28.0f)   /* exp of it is below 2^-40 = exp(-27.73) */

struct sampler {
    const float *logits; /* [V] after penalties */
    int vocab_size;
    float max;
    float *block_max;    /* [ceil(V / BLOCK)] */
    int num_blocks;
    /* Candidates in ascending order of id. */
    int num_candidates;
    const int32_t *ids;  /* NULL: candidate j is token j */
    const float *value;  /* logits */
    float *exponent, *p;
    /* Ranks: candidates by bucket; buckets before `next_bucket` are sorted and end at rank `sorted`. */
    int32_t *order, *spare;
    int num_ranked, next_bucket, sorted;
    int32_t bucket_end[NUM_BUCKETS];
    uint64_t total;
};

static uint64_t mix64(uint64_t z) { /* finalizer of splitmix64 (Steele, Lea, Flood 2014) */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static uint64_t draw_bits(uint64_t seed, uint64_t position) {
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    return mix64(mix64(seed + golden) + (position + 1) * golden) >> 11;
}
double moe_draw(uint64_t seed, uint64_t position) { return (double)draw_bits(seed, position) * 0x1p-53; }

static uint64_t weight_of(float p) { return (uint64_t)(int64_t)(p * 0x1p40f); }

/* Largest of n logits; *bad becomes nonzero when one is NaN or +Inf. Eight lanes, so that compilers vectorise it. */
static float scan_block(const float *x, int n, int32_t *bad) {
    float m[8], max = -__builtin_inff();
    int32_t b[8] = {0};
    int i = 0;
    for (int j = 0; j < 8; j++) m[j] = max;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) {
            int32_t bits;
            __builtin_memcpy(&bits, x + i + j, 4);
            m[j] = x[i + j] > m[j] ? x[i + j] : m[j];
            b[j] |= (bits >= 0x7f800000) | ((bits < 0) & (bits > (int32_t)0xff800000));
        }
    for (int j = 0; j < 8; j++) {
        max = m[j] > max ? m[j] : max;
        *bad |= b[j];
    }
    for (; i < n; i++) {
        *bad |= !(x[i] < __builtin_inff());
        max = x[i] > max ? x[i] : max;
    }
    return max;
}

static int scan(struct sampler *s) {
    int32_t bad = 0;
    s->max = -__builtin_inff();
    for (int b = 0; b < s->num_blocks; b++) {
        const int left = s->vocab_size - b * BLOCK;
        s->block_max[b] = scan_block(s->logits + b * BLOCK, left < BLOCK ? left : BLOCK, &bad);
        s->max = s->block_max[b] > s->max ? s->block_max[b] : s->max;
    }
    return bad || s->max == -__builtin_inff() ? MOE_NONFINITE : MOE_OK;
}

static int32_t first_largest(const struct sampler *s) {
    int b = 0;
    while (s->block_max[b] != s->max) b++;
    int32_t id = b * BLOCK;
    while (s->logits[id] != s->max) id++;
    return id;
}

/* counts: [V], no contents needed: only entries of the history are touched. */
static void penalize(float *logits, int32_t *counts, const struct moe_sampling *sampling, const int32_t *history,
                     int history_len) {
    for (int i = 0; i < history_len; i++) counts[history[i]] = 0;
    for (int i = 0; i < history_len; i++) counts[history[i]]++;
    for (int i = 0; i < history_len; i++) {
        const int32_t id = history[i];
        if (!counts[id]) continue; /* done at its first occurrence */
        float l = logits[id];
        l = l > 0 ? l / sampling->repeat_penalty : l * sampling->repeat_penalty;
        l -= (float)counts[id] * sampling->frequency_penalty;
        l -= sampling->presence_penalty;
        logits[id] = l;
        counts[id] = 0;
    }
}

/* Integers in the order of the floats (no NaN). */
static int32_t ordered(float f) {
    const int32_t bits = (int32_t)moe_f32_bits(f);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

/* The k-th largest block maximum: at least k logits are not below it. Bisection over the bits of the float. */
static float kth_block_max(const struct sampler *s, int k) {
    int64_t low = INT32_MIN, high = ordered(s->max);
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        int count = 0;
        for (int b = 0; b < s->num_blocks; b++) count += ordered(s->block_max[b]) >= (int32_t)middle;
        if (count >= k) low = middle;
        else high = middle - 1;
    }
    const int32_t bits = (int32_t)low < 0 ? (int32_t)low ^ 0x7fffffff : (int32_t)low;
    return moe_bits_f32((uint32_t)bits);
}

/* Candidates that can be among the k largest, in order of id. */
static void collect(struct sampler *s, int32_t *ids, float *value, int k) {
    const float threshold = kth_block_max(s, k);
    int n = 0;
    for (int b = 0; b < s->num_blocks; b++) {
        if (s->block_max[b] < threshold) continue;
        const int end = (b + 1) * BLOCK < s->vocab_size ? (b + 1) * BLOCK : s->vocab_size;
        for (int i = b * BLOCK; i < end; i++) {
            ids[n] = i;
            value[n] = s->logits[i];
            n += s->logits[i] >= threshold;
        }
    }
    s->ids = ids;
    s->value = value;
    s->num_candidates = n;
}

/* Buckets divide what the exponents span (at a high temperature that is little). */
static float bucket_scale(const struct sampler *s) {
    float lowest = -1e-6f;
    for (int j = 0; j < s->num_candidates; j++)
        if (s->exponent[j] < lowest && s->exponent[j] >= LOWEST_EXPONENT) lowest = s->exponent[j];
    return (NUM_BUCKETS - 1) / lowest;
}
static int bucket_of(float exponent, float scale) {
    const int bucket = (int)(exponent * scale);
    return bucket < NUM_BUCKETS ? bucket : NUM_BUCKETS - 1;
}

/* Weights, their total, and the candidates distributed over buckets. */
static void distribute(struct sampler *s, const struct moe_vector_ops *vec, float temperature) {
    int32_t start[NUM_BUCKETS] = {0};
    for (int j = 0; j < s->num_candidates; j++) s->exponent[j] = (s->value[j] - s->max) / temperature;
    vec->exp(s->p, s->exponent, s->num_candidates);
    s->total = 0;
    const float scale = bucket_scale(s);
    for (int j = 0; j < s->num_candidates; j++) {
        if (!(s->exponent[j] >= LOWEST_EXPONENT) || !weight_of(s->p[j])) continue;
        s->total += weight_of(s->p[j]);
        start[bucket_of(s->exponent[j], scale)]++;
    }
    s->num_ranked = 0;
    for (int b = 0; b < NUM_BUCKETS; b++) {
        const int32_t count = start[b];
        start[b] = s->num_ranked;
        s->num_ranked += count;
        s->bucket_end[b] = s->num_ranked;
    }
    for (int j = 0; j < s->num_candidates; j++) {
        if (!(s->exponent[j] >= LOWEST_EXPONENT) || !weight_of(s->p[j])) continue;
        s->order[start[bucket_of(s->exponent[j], scale)]++] = j;
    }
    s->next_bucket = s->sorted = 0;
}

/* Stable merge sort by descending value: equal values keep their order of id. */
static void sort_ranks(int32_t *order, int32_t *spare, const float *value, int n) {
    if (n <= RUN) {
        for (int i = 1; i < n; i++) {
            const int32_t x = order[i];
            int j = i;
            for (; j > 0 && value[order[j - 1]] < value[x]; j--) order[j] = order[j - 1];
            order[j] = x;
        }
        return;
    }
    const int half = n / 2;
    sort_ranks(order, spare, value, half);
    sort_ranks(order + half, spare, value, n - half);
    if (value[order[half - 1]] >= value[order[half]]) return;
    __builtin_memcpy(spare, order, (size_t)half * sizeof *order);
    for (int i = 0, j = half, out = 0; i < half; out++) {
        if (j < n && value[order[j]] > value[spare[i]]) order[out] = order[j++];
        else order[out] = spare[i++];
    }
}

/* Candidate at a rank < num_ranked, with as much sorted as that takes. */
static int32_t at_rank(struct sampler *s, int rank) {
    while (rank >= s->sorted) {
        const int end = s->bucket_end[s->next_bucket++];
        sort_ranks(s->order + s->sorted, s->spare, s->value, end - s->sorted);
        s->sorted = end;
    }
    return s->order[rank];
}
static uint64_t weight_at(struct sampler *s, int rank) { return weight_of(s->p[at_rank(s, rank)]); }

static void cut(struct sampler *s, const struct moe_sampling *sampling) {
    int keep = s->num_ranked;
    if (sampling->top_k > 0 && sampling->top_k < keep) {
        keep = sampling->top_k;
        s->total = 0;
        for (int r = 0; r < keep; r++) s->total += weight_at(s, r);
    }
    if (sampling->top_p < 1) {
        const double wanted = (double)sampling->top_p * (double)s->total;
        uint64_t sum = weight_at(s, 0);
        int r = 1;
        while (r < keep && (double)sum < wanted) sum += weight_at(s, r++);
        keep = r;
        s->total = sum;
    }
    if (sampling->min_p > 0) {
        const uint64_t least = weight_of(sampling->min_p);
        uint64_t sum = weight_at(s, 0);
        int r = 1;
        for (; r < keep && weight_at(s, r) >= least; r++) sum += weight_at(s, r);
        s->total = sum;
    }
}

static int32_t draw(struct sampler *s, const struct moe_sampling *sampling, uint64_t position) {
    const uint64_t target = (uint64_t)((unsigned __int128)draw_bits(sampling->seed, position) * s->total >> 53);
    uint64_t sum = 0;
    int r = 0;
    while ((sum += weight_at(s, r)) <= target) r++; /* ends: target < total */
    const int32_t candidate = at_rank(s, r);
    return s->ids ? s->ids[candidate] : candidate;
}

static int is_finite(float x) { return x > -__builtin_inff() && x < __builtin_inff(); }

static int sampling_is_valid(const struct moe_sampling *p) {
    return p && p->temperature >= 0 && is_finite(p->temperature) && p->top_k >= 0 && p->top_p > 0 && p->top_p <= 1 &&
           p->min_p >= 0 && p->min_p < 1 && p->repeat_penalty > 0 && is_finite(p->repeat_penalty) &&
           is_finite(p->frequency_penalty) && is_finite(p->presence_penalty);
}

static int run_sampler(struct moe_ctx *ctx, int32_t *token, const float *logits, int vocab_size,
                       const struct moe_sampling *sampling, const int32_t *history, int history_len,
                       uint64_t position) {
    const size_t array = moe_round64((size_t)vocab_size * 4); /* six of them and a block list */
    const int num_blocks = (vocab_size + BLOCK - 1) / BLOCK;
    char *memory = moe_scratch(ctx, 6 * array + moe_round64((size_t)num_blocks * 4));
    if (!memory) return MOE_NO_MEMORY;
    float *penalized = (float *)(void *)memory, *value = (float *)(void *)(memory + array);
    struct sampler s = {
        .logits = logits, .vocab_size = vocab_size, .num_blocks = num_blocks, .num_candidates = vocab_size};
    int32_t *ids = (int32_t *)(void *)(memory + 2 * array);
    s.exponent = (float *)(void *)(memory + 3 * array);
    s.p = (float *)(void *)(memory + 4 * array);
    s.order = (int32_t *)(void *)(memory + 5 * array);
    s.block_max = (float *)(void *)(memory + 6 * array);

    if (history_len > 0 &&
        (sampling->repeat_penalty != 1 || sampling->frequency_penalty != 0 || sampling->presence_penalty != 0)) {
        __builtin_memcpy(penalized, logits, (size_t)vocab_size * 4);
        penalize(penalized, ids, sampling, history, history_len);
        s.logits = penalized;
    }
    int status = scan(&s);
    if (status != MOE_OK) return status;
    if (sampling->temperature == 0) {
        *token = first_largest(&s);
        return MOE_OK;
    }
    s.value = s.logits;
    if (sampling->top_k > 0 && sampling->top_k < num_blocks) collect(&s, ids, value, sampling->top_k);
    distribute(&s, ctx->vec, sampling->temperature);
    s.spare = (int32_t *)(void *)s.exponent; /* not needed any more */
    cut(&s, sampling);
    *token = draw(&s, sampling, position);
    return MOE_OK;
}

int moe_sample(struct moe_ctx *ctx, int32_t *token, const float *logits, int vocab_size,
               const struct moe_sampling *sampling, const int32_t *history, int history_len, uint64_t position) {
    if (!ctx || !token || !logits || vocab_size < 1 || vocab_size > MAX_VOCABULARY || history_len < 0)
        return MOE_BAD_ARGUMENT;
    if (!sampling_is_valid(sampling) || (history_len > 0 && !history)) return MOE_BAD_ARGUMENT;
    for (int i = 0; i < history_len; i++)
        if (history[i] < 0 || history[i] >= vocab_size) return MOE_BAD_ARGUMENT;
    uint32_t saved = moe_enter(ctx);
    return moe_leave(ctx, saved, run_sampler(ctx, token, logits, vocab_size, sampling, history, history_len, position));
}
