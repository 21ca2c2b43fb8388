/* Record of public calls: which, with what, from when to when. A context or a streamer that records has a log, which is
 * written under its lock, a call at a time; one that does not has none, and looks at a pointer per call.
 *
 * There are two arrays of everything: one that is written, and one that the last reader looks at. Taking swaps them, so
 * nothing is copied and calls go on meanwhile. Arrays double when they are full; a call that finds no memory is counted
 * as lost and makes no entry, nor do its experts. */
#include "internal.h"
#include "moe.h"
#include <stdlib.h>
#include <time.h>

struct array {
    char *data;
    size_t used, capacity; /* bytes */
};
struct moe_call_log {
    struct moe_call current;                      /* the context's call that runs */
    struct array calls, experts;                  /* written */
    struct array taken_calls, taken_experts;      /* looked at */
    int64_t lost;
};

int64_t moe_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Room for `bytes` more, or NULL. */
static void *room(struct array *a, size_t bytes) {
    enum { FIRST = 1 << 16 };
    if (a->used + bytes > a->capacity) {
        size_t capacity = a->capacity ? a->capacity : FIRST;
        while (capacity < a->used + bytes) capacity *= 2;
        char *grown = realloc(a->data, capacity);
        if (!grown) return 0;
        a->data = grown;
        a->capacity = capacity;
    }
    return a->data + a->used;
}

static void swap(struct array *a, struct array *b) {
    struct array kept = *a;
    *a = *b;
    *b = kept;
    a->used = 0;
}

void moe_free_call_log(struct moe_call_log *log) {
    if (!log) return;
    struct array *all[] = {&log->calls, &log->experts, &log->taken_calls, &log->taken_experts};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]->data);
    free(log);
}

int moe_switch_log(struct moe_call_log **log, int on) {
    if (on && *log) return MOE_IN_USE;
    moe_free_call_log(*log);
    *log = on ? calloc(1, sizeof **log) : 0;
    return on && !*log ? MOE_NO_MEMORY : MOE_OK;
}

void moe_add_call(struct moe_call_log *log, const struct moe_call *call) {
    struct moe_call *to = room(&log->calls, sizeof *to);
    if (!to) {
        log->experts.used -= (size_t)call->num_experts * sizeof(struct moe_expert_use);
        log->lost++;
        return;
    }
    *to = *call;
    log->calls.used += sizeof *to;
}

void moe_take_log(struct moe_call_log *log, struct moe_calls *taken) {
    *taken = (struct moe_calls){0};
    if (!log) return;
    swap(&log->calls, &log->taken_calls);
    swap(&log->experts, &log->taken_experts);
    taken->calls = (const struct moe_call *)(const void *)log->taken_calls.data;
    taken->experts = (const struct moe_expert_use *)(const void *)log->taken_experts.data;
    taken->num_calls = (int64_t)(log->taken_calls.used / sizeof(struct moe_call));
    taken->num_experts = (int64_t)(log->taken_experts.used / sizeof(struct moe_expert_use));
    taken->lost = log->lost;
    log->lost = 0;
}

/* ---- calls of a context ---- */
void moe_begin_call(struct moe_call_log *log, const char *function, const void *subject) {
    log->current = (struct moe_call){.function = function, .subject = subject, .start_ns = moe_now_ns()};
}

int64_t moe_end_call(struct moe_call_log *log) {
    log->current.end_ns = moe_now_ns();
    moe_add_call(log, &log->current);
    return log->current.end_ns - log->current.start_ns;
}

int64_t moe_time_begin(const struct moe_ctx *ctx) { return ctx->log ? moe_now_ns() : 0; }

int64_t moe_time_end(struct moe_ctx *ctx, int part, int64_t started) {
    if (!started) return 0;
    int64_t now = moe_now_ns();
    ctx->log->current.part_ns[part] += now - started;
    return now;
}

void moe_note_experts(struct moe_ctx *ctx, const int32_t *expert_ids, const int32_t *offsets, int num_experts) {
    struct moe_call_log *log = ctx->log;
    if (!log) return;
    size_t bytes = (size_t)num_experts * sizeof(struct moe_expert_use);
    struct moe_expert_use *to = room(&log->experts, bytes);
    if (!to) {
        log->lost++;
        return;
    }
    for (int i = 0; i < num_experts; i++)
        to[i] = (struct moe_expert_use){expert_ids[i], offsets[i + 1] - offsets[i]};
    log->experts.used += bytes;
    log->current.num_experts = num_experts;
}

int moe_record(struct moe_ctx *ctx, int on) {
    moe_lock(ctx);
    int status = moe_switch_log(&ctx->log, on);
    moe_time_tasks(ctx->pool, ctx->log != 0);
    moe_unlock(ctx);
    return status;
}

void moe_take_calls(struct moe_ctx *ctx, struct moe_calls *taken) {
    moe_lock(ctx);
    moe_take_log(ctx->log, taken);
    moe_unlock(ctx);
}
