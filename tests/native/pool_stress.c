/* Thread pool under a sanitizer: batches of every size, callers that share a context, workers met awake, falling asleep
 * and asleep, contexts that come and go. Build and run:
 *   ENGINE=1 MAIN=tests/native/pool_stress.c tests/native/build.sh /tmp/pool_stress -g -O1 -fsanitize=thread -Wno-maybe-uninitialized
 *   /tmp/pool_stress [seconds] */
#define _GNU_SOURCE
#include "internal.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { MAX_BATCH = 300, CALLERS = 3, WIDTH = 3000, ROWS = 12 };

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

static int one_context(int num_threads, double duration, unsigned *seed) {
    const char *error;
    struct moe_ctx *ctx = moe_ctx_create(0, num_threads, &error);
    if (!ctx) return printf("%s\n", error), 1;
    int failed = batches(ctx, seed, 400);
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
