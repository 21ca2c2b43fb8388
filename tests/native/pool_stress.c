/* Thread pool under a sanitizer: batches of every size, callers that share a context, workers met awake, falling asleep
 * and asleep, experts whose last block quantizes for all, contexts that come and go. Build and run:
 *   ENGINE=1 MAIN=tests/native/pool_stress.c tests/native/build.sh OUT -g -O1 -fsanitize=thread \
 *     -Wno-maybe-uninitialized
 *   OUT [seconds] */
#define _GNU_SOURCE
#include "internal.h"
#include "moe.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_BATCH = 300, CALLERS = 3, WIDTH = 3000, ROWS = 12 };
enum { SIDE = 256, NUM_EXPERTS = 4, TOKENS = 21, PER_TOKEN = 2 };

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct batch {
    int num_threads;
    int runs[MAX_BATCH]; /* plain on purpose: two runs of one task are a race */
    atomic_int wrong;
};

static void count_task(void *arg, int task, int worker) {
    struct batch *b = arg;
    b->runs[task]++;
    if (worker < 0 || worker >= b->num_threads) b->wrong = 1;
    for (volatile int i = 0; i < task % 7 * 40; i++) continue;
}

static int batches(struct moe_ctx *ctx, unsigned *seed, int rounds) {
    for (int round = 0; round < rounds; round++) {
        struct batch b = {.num_threads = ctx->num_threads};
        int n = rand_r(seed) % MAX_BATCH, pause_us = rand_r(seed) % 120;
        uint32_t saved = moe_enter(ctx);
        moe_parallel(ctx, n, count_task, &b);
        moe_leave(ctx, saved, MOE_OK);
        for (int i = 0; i < MAX_BATCH; i++)
            if (b.runs[i] != (i < n)) return printf("task %d of %d ran %d times\n", i, n, b.runs[i]), 1;
        if (b.wrong) return printf("worker index out of range\n"), 1;
        if (pause_us > 60) usleep((unsigned)pause_us);
    }
    return 0;
}

struct caller {
    struct moe_ctx *ctx;
    double end;
    int failed;
};

static void *call_softmax(void *arg) {
    struct caller *c = arg;
    float *x = malloc(sizeof(float) * WIDTH * ROWS), *y = malloc(sizeof(float) * WIDTH * ROWS);
    for (int i = 0; i < WIDTH * ROWS; i++) x[i] = (float)(i % 97) * 0.1f;
    while (seconds() < c->end) {
        if (moe_softmax(c->ctx, y, x, ROWS, WIDTH)) c->failed = 1;
        for (int i = WIDTH; i < WIDTH * ROWS; i += WIDTH + 97) if (!(y[i] > 0)) c->failed = 1;
    }
    free(x);
    free(y);
    return 0;
}

/* Strips of a q8_0 matrix [SIDE, SIDE]. */
static int make_matrix(struct moe_ctx *ctx, struct moe_matrix *w, unsigned *seed) {
    const char *error;
    const struct moe_format *format = moe_select_format(ctx, "q8_0", &error);
    const struct moe_layout *layout = format ? moe_select_layout(ctx, format->layout, &error) : 0;
    if (!layout) return printf("%s\n", error), 1;
    float *x = malloc(sizeof(float) * SIDE * SIDE);
    void *stored =
        malloc((size_t)SIDE * (size_t)(SIDE / format->block_len * format->block_bytes + format->row_extra_bytes));
    void *strips = aligned_alloc(64, moe_round64(moe_matrix_bytes(layout, SIDE, SIDE)));
    for (int i = 0; i < SIDE * SIDE; i++) x[i] = (float)(rand_r(seed) % 2001 - 1000) * 1e-4f;
    int failed = moe_quantize(ctx, stored, "q8_0", x, SIDE, SIDE) ||
                 moe_encode(ctx, strips, format, layout, stored, SIDE, SIDE);
    *w = (struct moe_matrix){.data = strips, .layout = layout, .rows = SIDE, .cols = SIDE};
    free(x);
    free(stored);
    return failed;
}

/* All threads against one thread. */
static int experts(struct moe_ctx *ctx, struct moe_ctx *alone, unsigned *seed) {
    static float x[TOKENS * SIDE], want[TOKENS * PER_TOKEN * SIDE], got[TOKENS * PER_TOKEN * SIDE];
    struct moe_expert e[NUM_EXPERTS];
    const struct moe_expert *table[NUM_EXPERTS];
    int32_t ids[TOKENS * PER_TOKEN], chosen[NUM_EXPERTS], offsets[NUM_EXPERTS + 1], assignments[TOKENS * PER_TOKEN];
    int failed = 0;
    for (int i = 0; i < NUM_EXPERTS; i++) {
        table[i] = &e[i];
        failed |=
            make_matrix(ctx, &e[i].gate, seed) | make_matrix(ctx, &e[i].up, seed) | make_matrix(ctx, &e[i].down, seed);
    }
    for (int i = 0; i < TOKENS * SIDE; i++) x[i] = (float)(rand_r(seed) % 2001 - 1000) * 1e-3f;
    for (int round = 0; round < 20 && !failed; round++) {
        for (int t = 0; t < TOKENS; t++) {
            ids[2 * t] = (int32_t)(rand_r(seed) % NUM_EXPERTS);
            ids[2 * t + 1] = (ids[2 * t] + 1) % NUM_EXPERTS;
        }
        int n = moe_route_plan(alone, chosen, offsets, assignments, ids, TOKENS, PER_TOKEN, NUM_EXPERTS);
        failed |= moe_experts(alone, want, table, chosen, offsets, assignments, n, x, TOKENS, PER_TOKEN) != MOE_OK;
        failed |= moe_experts(ctx, got, table, chosen, offsets, assignments, n, x, TOKENS, PER_TOKEN) != MOE_OK;
        failed |= memcmp(want, got, sizeof want) != 0;
    }
    for (int i = 0; i < NUM_EXPERTS; i++) {
        free((void *)e[i].gate.data);
        free((void *)e[i].up.data);
        free((void *)e[i].down.data);
    }
    if (failed) printf("experts differ or failed\n");
    return failed;
}

static int one_context(int num_threads, double duration, unsigned *seed) {
    const char *error;
    struct moe_ctx *ctx = moe_ctx_create(0, num_threads, &error);
    struct moe_ctx *alone = moe_ctx_create(0, 1, &error);
    if (!ctx || !alone) return printf("%s\n", error), 1;
    int failed = batches(ctx, seed, 400) | experts(ctx, alone, seed);
    pthread_t threads[CALLERS];
    struct caller callers[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        callers[i] = (struct caller){ctx, seconds() + duration, 0};
        pthread_create(&threads[i], 0, call_softmax, &callers[i]);
    }
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(threads[i], 0);
        failed |= callers[i].failed;
    }
    moe_ctx_destroy(ctx);
    moe_ctx_destroy(alone);
    return failed;
}

int main(int argc, char **argv) {
    double total = argc > 1 ? atof(argv[1]) : 5.0;
    unsigned seed = 1;
    int failed = 0;
    for (int num_threads = 1; num_threads <= 6; num_threads++) failed |= one_context(num_threads, total / 6, &seed);
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed;
}
