/* C surface of the engine: everything Python can call. The text between the cffi marks, behind that of tables.h,
 * is also the cdef, so it holds no macros. Nothing here prints, exits, reads the environment or touches Python.
 *
 * Two nouns: a *context* (struct moe_ctx) is a CPU tier plus a thread pool plus scratch memory; a *matrix*
 * (struct moe_matrix) is weights in a compute layout. Calls on one context are serialised by its lock; contexts are
 * independent of each other. Calls return MOE_OK or a negative status and leave outputs unspecified on failure.
 *
 * Shapes in comments: T tokens, H hidden, N heads, K key/value heads, D head_dim, E experts, A experts per token,
 * I expert width, V vocabulary. All arrays are row-major and contiguous. Results are bit-identical for every tier,
 * thread count and number of tokens per call (docs/arithmetic.md). */
#ifndef MOE_H
#define MOE_H
#include <stddef.h>
#include <stdint.h>
#include "tables.h"
/* cffi-begin */
enum moe_status {
    MOE_OK = 0, /* -1 is no status: moe_check_rows returns it for "none" */
    MOE_BAD_ARGUMENT = -2,
    MOE_NO_MEMORY = -3,
    MOE_NO_KERNEL = -4,
    MOE_NONFINITE = -5,
    MOE_NO_THREAD = -6,
    MOE_IN_USE = -7
};

struct moe_ctx;

/* What quantized weights meet in products (docs/arithmetic.md). */
enum moe_arith {
    MOE_ARITH_CANONICAL = 0, /* activations quantized to int8 per block */
    MOE_ARITH_FLOAT = 1      /* float32 activations, weights dequantized to float32 */
};

struct moe_matrix {
    const void *data;                 /* strips; with `storage`, that format's rows at any address */
    const struct moe_layout *layout;
    const float *bias;                /* [rows] or NULL */
    int rows;
    int cols;
    const struct moe_format *storage; /* NULL: data holds strips. Else compact: each strip is re-coded into scratch
                                       * right before use, once for all tokens of a task. Same bits. */
};

enum moe_expert_activation {
    MOE_SWIGLU = 0,        /* silu(gate) * up */
    MOE_SWIGLU_CLAMPED = 1 /* gate clamped above, up both ways at limit: gate * sigmoid(1.702 gate) * (up + 1) */
};
struct moe_expert {
    struct moe_matrix gate; /* [I, H] */
    struct moe_matrix up;   /* [I, H] */
    struct moe_matrix down; /* [H, I] */
    int activation;         /* enum moe_expert_activation */
    float limit;            /* of MOE_SWIGLU_CLAMPED, above 0 */
};

/* Keys and values of one layer. Position p lives in slot p % capacity of every head. */
struct moe_kv {
    void *k;       /* [K, capacity, D] */
    void *v;       /* [K, capacity, V]; NULL: a value is the first V numbers of its key (latent attention) */
    int num_heads; /* K */
    int head_dim;  /* D */
    int value_dim; /* V */
    int capacity;
    int is_f32;    /* 0: float16, 1: float32 */
};

enum moe_router_score {
    MOE_SOFTMAX_THEN_TOPK = 0, /* softmax over all experts, then the top k of it */
    MOE_TOPK_THEN_SOFTMAX = 1, /* top k of the logits, then softmax over those */
    MOE_SIGMOID_THEN_TOPK = 2  /* sigmoid of every logit, then the top k of it */
};
enum moe_group_score { MOE_GROUP_MAX = 0, MOE_GROUP_TOP2_SUM = 1 };
struct moe_router_rule {
    int score;               /* enum moe_router_score */
    int norm_topk_prob;      /* 1: kept scores are divided by their sum + norm_epsilon */
    float scale;             /* routed scaling factor, 1 where the family has none */
    float norm_epsilon;
    const float *correction; /* NULL, or [E]: added to the scores for the selection, not to the weights */
    int num_groups;          /* 0: no groups; otherwise E / num_groups neighbours form one, and only the experts of */
    int top_groups;          /* the top_groups best groups can be selected */
    int group_score;         /* enum moe_group_score, of scores + correction */
};

struct moe_sampling {
    float temperature;    /* 0: greedy */
    int top_k;            /* 0: off */
    float top_p;          /* 1: off */
    float min_p;          /* 0: off */
    float repeat_penalty; /* 1: off; logits > 0 are divided, others multiplied */
    float frequency_penalty;
    float presence_penalty;
    uint64_t seed;
};

/* ---- tiers, tables, context (dispatch.c) ---- */
int moe_tier_count(void);
const char *moe_tier_name(int i);                 /* worst first; NULL past the end */
int moe_tier_supported(const char *tier);
const char *moe_tier_missing(const char *tier);   /* first CPU feature this machine lacks for it, or NULL */
int moe_layout_count(void);
const struct moe_layout *moe_layout_at(int i);    /* every (layout, tier) table, reused ones included */
int moe_format_count(void);
const struct moe_format *moe_format_at(int i);
/* max_tier NULL: the best this CPU runs. Otherwise exactly that tier; *error says why not. num_threads >= 1. */
struct moe_ctx *moe_ctx_create(const char *max_tier, int num_threads, const char **error);
void moe_ctx_destroy(struct moe_ctx *ctx);
const char *moe_ctx_tier(const struct moe_ctx *ctx);
int moe_ctx_num_threads(const struct moe_ctx *ctx);
/* Of every product on this context from now on; a new context is canonical. */
int moe_ctx_set_arith(struct moe_ctx *ctx, int arith);
/* The context's own tier for that name; NULL with *error set, never another tier in silence. */
const struct moe_layout *moe_select_layout(const struct moe_ctx *ctx, const char *name, const char **error);
const struct moe_format *moe_select_format(const struct moe_ctx *ctx, const char *name, const char **error);

/* ---- recorded calls (calls.c) ---- */
enum moe_time { /* parts of calls, as the caller waits for them */
    MOE_TIME_QUANTIZE = 0, /* activations into their integer forms, in every product */
    MOE_TIME_GATE_UP = 1,  /* experts' gate and up with what lies between them and down */
    MOE_TIME_DOWN = 2,
    MOE_NUM_TIMES = 3
};
/* One call of a function that takes a context, or of one that asks a streamer for something. */
struct moe_call {
    const char *function;           /* its name, at the same address in every call */
    const void *subject;            /* what it worked with, which says whose it is: the weights of a norm, w of products
                                     * and of moe_embed, table of moe_experts; else NULL */
    int64_t start_ns, end_ns;       /* CLOCK_MONOTONIC */
    int64_t part_ns[MOE_NUM_TIMES]; /* within it */
    int64_t num_experts;            /* of moe_experts: that many entries of `experts` below are its own */
};
struct moe_expert_use { /* an expert of a call of moe_experts */
    int32_t expert;
    int32_t num_tokens;
};
struct moe_calls {
    const struct moe_call *calls;         /* [num_calls], in the order in which they ended */
    const struct moe_expert_use *experts; /* [num_experts], call by call */
    int64_t num_calls, num_experts;
    int64_t lost;                         /* for want of memory */
};
/* Begin to record the calls of a context, and the time of its tasks; or end it and forget what was not taken. Off is
 * how a context starts; then a call looks at one pointer more. MOE_IN_USE: somebody records already. */
int moe_record(struct moe_ctx *ctx, int on);
/* What was recorded since the last time. It may be looked at until the next one, or until recording ends. */
void moe_take_calls(struct moe_ctx *ctx, struct moe_calls *taken);
/* busy_ns [num_threads]: ns in which each thread computed while calls were recorded; the first is the callers', in
 * calls and not waiting for the others. */
void moe_busy_times(struct moe_ctx *ctx, int64_t *busy_ns);

/* ---- weights (linear.c) ---- */
size_t moe_matrix_bytes(const struct moe_layout *layout, int rows, int cols);
/* Storage rows -> strips, all threads. out holds moe_matrix_bytes. */
int moe_encode(struct moe_ctx *ctx, void *out, const struct moe_format *format, const struct moe_layout *layout,
               const void *rows_in, int rows, int cols);
/* float32 [rows, cols] -> storage rows, all threads. */
int moe_quantize(struct moe_ctx *ctx, void *out, const char *format, const float *x, int64_t rows, int cols);
/* Groups [first, last) of a matrix whose rows share data: out and x are the whole matrix. */
int moe_quantize_groups(struct moe_ctx *ctx, void *out, const char *format, const float *x, int64_t rows, int cols,
                        int64_t first, int64_t last);
/* First (row * blocks_per_row + block) with a non-finite scale, or -1; < -1 is a status. With group_rows: the row is
 * the number of the group, which is its first row. */
int64_t moe_check_rows(struct moe_ctx *ctx, const char *format, const void *rows_in, int64_t rows, int cols);
/* 16-bit floats <-> float32, round to nearest even; kind 0 f16, 1 bf16. */
int moe_to_f32(struct moe_ctx *ctx, float *out, const void *in, int64_t n, int kind);
int moe_from_f32(struct moe_ctx *ctx, void *out, const float *in, int64_t n, int kind);
/* Bytes of one token's activations in a form, and the conversion itself (T tokens, that many bytes apart). */
size_t moe_activation_bytes(int activation, int cols);
int moe_quantize_activations(struct moe_ctx *ctx, void *out, int activation, const float *x, int num_tokens, int cols);
/* y[m] [T, rows_m] = x [T, cols] W_m^T + bias_m, (added to what y holds when add = 1). One x for several matrices. */
int moe_linear(struct moe_ctx *ctx, const struct moe_matrix *const *w, float *const *y, int num_matrices,
               const float *x, int num_tokens, int add);
/* y [T, cols] = rows ids[t] of w, compact or not. */
int moe_embed(struct moe_ctx *ctx, float *y, const struct moe_matrix *w, const int32_t *ids, int num_tokens);

/* ---- other layers (layers.c, attention.c, rope.c) ---- */
/* y[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight, for num_rows rows of `width`; y may be x. */
int moe_rmsnorm(struct moe_ctx *ctx, float *y, const float *x, const float *weight, int64_t num_rows, int width,
                float eps);
/* The same in place for the first `width` numbers of rows that are `stride` apart. */
int moe_rmsnorm_part(struct moe_ctx *ctx, float *x, const float *weight, int64_t num_rows, int width, int64_t stride,
                     float eps);
int moe_clip(struct moe_ctx *ctx, float *x, int64_t n, float limit); /* clamp to [-limit, limit] */
int moe_softmax(struct moe_ctx *ctx, float *y, const float *x, int64_t num_rows, int width);
int moe_scale(struct moe_ctx *ctx, float *x, int64_t n, float factor);
/* y[r] += sigmoid(gate[r]) * x[r], rows of `width`. */
int moe_add_gated(struct moe_ctx *ctx, float *y, const float *x, const float *gate, int64_t num_rows, int width);
int moe_swiglu(struct moe_ctx *ctx, float *y, const float *gate, const float *up, int64_t n); /* silu(gate) * up */
int moe_swiglu_clamped(struct moe_ctx *ctx, float *y, const float *gate, const float *up, int64_t n, float limit);
int moe_sigmoid(struct moe_ctx *ctx, float *y, const float *x, int64_t n); /* y may be x */
/* inv_freq[i] = theta^(-2i/rotary_dim) rounded to float32, i < rotary_dim/2. */
int moe_rope_inv_freq(float *inv_freq, double theta, int rotary_dim);
/* The same in double, before rounding, and the natural logarithm of a normal x > 0: what a scaling rule starts from.
 * Both correct to the last bit or next to it, and alike on every machine. */
int moe_rope_frequencies(double *frequencies, double theta, int rotary_dim);
double moe_log(double x);
/* cos, sin [num_positions, half]: of the float32 product position * inv_freq, times scale. */
int moe_rope_table(float *cosines, float *sines, const float *inv_freq, int half, int first_position, int num_positions,
                   float scale);
/* Rotate x [T, N, D] in place; token t uses table row first_position + t. interleaved 0: pairs (j, j + rotary_dim/2);
 * 1: pairs (2j, 2j + 1). Dimensions past rotary_dim stay. */
int moe_rope(struct moe_ctx *ctx, float *x, int num_tokens, int num_heads, int head_dim, int rotary_dim,
             const float *cosines, const float *sines, int first_position, int interleaved);
/* k [T, K, D], v [T, K, V] into the slots of positions first_position ...; v is not looked at where kv has no
 * values. */
int moe_kv_store(struct moe_ctx *ctx, struct moe_kv *kv, const float *k, const float *v, int first_position,
                 int num_tokens);
/* q [T, N, D], out [T, N, V]; token t at position first_position + t sees positions max(0, p - window + 1) .. p (window
 * 0: all). sinks: NULL or [N] logits that take part in the softmax without a value. */
int moe_attention(struct moe_ctx *ctx, float *out, const float *q, const struct moe_kv *kv, int num_tokens,
                  int num_heads, int first_position, float scale, int window, const float *sinks);

/* ---- latent attention (latent.c) ---- */
/* One matrix per head: w [N * rows, cols] holds them one after the other, rows = w->rows / num_heads. For every token
 * and head y[t][n] [rows] = W_n x[t][n][0 .. cols), then y[t][n][rows ..) = the `tail` numbers of x[t][n] behind the
 * first cols. x [T, N, cols + more], y [T, N, rows + tail]; x_width is the length of a head's row in x. */
int moe_linear_heads(struct moe_ctx *ctx, const struct moe_matrix *w, float *y, const float *x, int num_tokens,
                     int num_heads, int x_width, int tail);

/* ---- mixture of experts (experts.c) ---- */
/* logits [T, E] -> ids, weights [T, A] in rank order; ties go to the lowest id. */
int moe_route(struct moe_ctx *ctx, int32_t *ids, float *weights, const float *logits, int num_tokens, int num_experts,
              int num_experts_per_tok, const struct moe_router_rule *rule);
/* Group assignments t * A + rank by expert: expert_ids ascending, assignments of expert i at offsets[i] ..
 * offsets[i+1]. Returns the number of distinct experts or a status. Arrays hold min(E, T*A), that + 1, T*A entries. */
int moe_route_plan(struct moe_ctx *ctx, int32_t *expert_ids, int32_t *offsets, int32_t *assignments, const int32_t *ids,
                   int num_tokens, int num_experts_per_tok, int num_experts);
/* out[a] [H] = down(activation(gate x_t, up x_t)) for every assignment a of the listed experts; t = a / A; table is
 * indexed by expert id. Other rows of out [T*A, H] stay untouched, so experts can be run as they arrive. */
int moe_experts(struct moe_ctx *ctx, float *out, const struct moe_expert *const *table, const int32_t *expert_ids,
                const int32_t *offsets, const int32_t *assignments, int num_experts, const float *x, int num_tokens,
                int num_experts_per_tok);
/* y[t] += sum over ranks, in rank order, weights[t][rank] * out[t * A + rank]. MOE_NONFINITE if any y is not finite. */
int moe_experts_combine(struct moe_ctx *ctx, float *y, const float *out, const float *weights, int num_tokens,
                        int num_experts_per_tok, int hidden_size);
/* MOE_OK, or MOE_NONFINITE. */
int moe_check_finite(struct moe_ctx *ctx, const float *x, int64_t n);

/* ---- expert streamer (streamer.c) ---- */
enum { MOE_STREAM_PIECES = 3, MOE_STREAM_EARLY_END = -1 };
/* Bytes [offset, offset + nbytes) of a file. They are read in whole pages of 4096 to slot_offset, a multiple of 4096,
 * so the first of them lies at slot_offset + offset % 4096. */
struct moe_stream_piece {
    int32_t file;        /* number from moe_streamer_add_file */
    int64_t offset;
    int64_t nbytes;
    int64_t slot_offset;
};
/* nbytes of storage rows at `from` in a piece become strips at `to` in the slot (a multiple of 64). format NULL: they
 * are strips already. */
struct moe_stream_recode {
    const struct moe_format *format;
    const struct moe_layout *layout;
    int32_t rows, cols;
    int32_t piece;
    int64_t from, to, nbytes;
};
/* Where an expert lies. Without recodes its pieces are read into the slot, with them into a buffer of the
 * streamer's. */
struct moe_stream_expert {
    int32_t num_pieces, num_recodes;
    struct moe_stream_piece pieces[MOE_STREAM_PIECES];
    struct moe_stream_recode recodes[MOE_STREAM_PIECES];
};
struct moe_stream_event {
    int64_t key;
    int32_t slot;
    int32_t error;        /* 0: resident. Otherwise errno or MOE_STREAM_EARLY_END, and the slot is free again */
    int32_t error_file;
    int64_t error_offset;
};
struct moe_stream_stats {
    int64_t experts, reads, calls;    /* requests begun, their pieces, read calls (chunks) */
    int64_t bytes, speculative_bytes; /* wanted bytes of chunks that arrived; bytes includes the speculative ones */
    int64_t service_ns, busy_ns;      /* in reads: summed over readers; at least one under way */
    int64_t recode_ns, wait_ns;       /* re-coding by readers; callers of moe_streamer_next asleep */
    int64_t retries, failures, direct_refused;
    int64_t free_slots, used_slots, unfinished; /* now: free, with a use count, requests not heard of */
};
struct moe_stream_fault { /* for tests: what to do to reads */
    int32_t fail_percent, error, short_percent, max_sleep_us;
    uint64_t seed;
};
/* experts [num_experts] stay the caller's and are indexed by key. slot_bytes, staging_bytes (0: nothing is re-coded)
 * and chunk_bytes are multiples of 4096; num_readers + 2 staging buffers are made. NULL with *error set. */
struct moe_streamer *moe_streamer_create(const struct moe_stream_expert *experts, int64_t num_experts, int num_slots,
                                         int64_t slot_bytes, int64_t staging_bytes, int num_readers,
                                         int64_t chunk_bytes, const char **error);
void moe_streamer_destroy(struct moe_streamer *s); /* reads under way are waited for */
/* The number of the file, or a status. direct_fd -1: none. mapping: NULL, or the file's bytes to copy from instead. */
int moe_streamer_add_file(struct moe_streamer *s, int direct_fd, int buffered_fd, const void *mapping);
void *moe_streamer_slot(struct moe_streamer *s, int slot);
/* Read experts keys[i] into slots[i], in this order. Slots are free, or resident and not in use; else MOE_IN_USE and
 * nothing is done. A wanted request holds one use of its slot; a speculative one none. */
int moe_streamer_request(struct moe_streamer *s, const int64_t *keys, const int32_t *slots, int count, int speculative);
/* A speculative request that is wanted now: as if it had been asked for so, behind those that were. */
int moe_streamer_promote(struct moe_streamer *s, int slot);
/* Speculative requests that have not begun end with ECANCELED. Returns how many. */
int moe_streamer_drop_speculative(struct moe_streamer *s);
int moe_streamer_use(struct moe_streamer *s, const int32_t *slots, int count, int change);
/* Wanted requests in order of completion, those that are there, waiting for the first at most timeout_ms. Returns their
 * number; 0 when the time is over or nothing is on its way. */
int moe_streamer_next(struct moe_streamer *s, struct moe_stream_event *events, int max_events, int timeout_ms);
int moe_streamer_poll_speculative(struct moe_streamer *s, struct moe_stream_event *events, int max_events);
/* For a caller that lost track (an interrupted call): drops what is queued, waits at most timeout_ms for what is under
 * way, forgets events and uses. keys [num_slots]: the expert that is resident in each slot, or -1. MOE_IN_USE: time is
 * over, call again. */
int moe_streamer_reset(struct moe_streamer *s, int64_t *keys, int timeout_ms);
void moe_streamer_stats(struct moe_streamer *s, struct moe_stream_stats *stats);
/* As for a context; recorded are request, promote, drop_speculative, use, next and poll_speculative. */
int moe_streamer_record(struct moe_streamer *s, int on);
void moe_streamer_take_calls(struct moe_streamer *s, struct moe_calls *taken);
/* mlock: 0 or errno. */
int moe_lock_memory(const void *data, size_t nbytes);
void moe_streamer_set_fault(struct moe_streamer *s, const struct moe_stream_fault *fault);

/* ---- sampling (sampler.c) ---- */
/* One token from logits [V]. history: the ids that penalties look at. The draw depends on (seed, position) only. */
int moe_sample(struct moe_ctx *ctx, int32_t *token, const float *logits, int vocab_size,
               const struct moe_sampling *sampling, const int32_t *history, int history_len, uint64_t position);
/* Uniform double in [0, 1) for (seed, position). */
double moe_draw(uint64_t seed, uint64_t position);
/* out[t] = natural-log probability of targets[t] under logits [T, V]. */
int moe_token_logprobs(struct moe_ctx *ctx, double *out, const float *logits, const int32_t *targets, int num_tokens,
                       int vocab_size);
/* cffi-end */
#endif
