/* Threads of a context, its lock, its scratch memory and the floating-point mode of every thread that computes.
 *
 * A batch is a number of equal tasks. Threads claim tasks by counting `unclaimed` down with compare-and-swap, so
 * whoever succeeds holds a task of the running batch, even a worker that wakes late: the batch cannot end before its
 * tasks do. The caller never waits for a worker that holds no task. Idle workers spin for SPIN_NS at most, then sleep.
 *
 * fork: threads do not survive it, and a lock may be held by one that is gone. In a child process an inherited context
 * therefore takes no lock, starts nothing and computes on its caller (same bits); use it from one thread there, or
 * create another context. */
#define _GNU_SOURCE
#include "internal.h"
#include "moe.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

enum {
    SPIN_NS = 40000,   /* longer than the gap between two calls of one layer, shorter than anyone would notice */
    SPIN_CHECK = 16,   /* pauses between two looks at the clock */
    SCRATCH_STEP = 65536
};

struct worker {
    pthread_t thread;
    struct moe_pool *pool;
    int index;
};

struct busy { /* one thread writes it; a cache line each */
    _Alignas(64) int64_t ns;
    int64_t waited_ns; /* of the first, the caller: for workers, in the call that runs */
};

struct moe_pool {
    pthread_mutex_t call_lock;  /* one public call at a time */
    pthread_mutex_t sleep_lock; /* guards both conditions */
    pthread_cond_t work_ready, batch_done;
    /* The batch: written before `unclaimed` is published, read only by holders of a task. */
    moe_task_fn fn;
    void *arg;
    int num_tasks;
    _Alignas(64) atomic_int unclaimed;
    _Alignas(64) atomic_int unfinished;
    _Alignas(64) atomic_int sleepers; /* workers at work_ready or on their way there */
    atomic_int caller_sleeps;
    atomic_int stop;
    int spin; /* 0 when threads would have to share CPUs: spinning would then take time from a task */
    int num_threads;
    int num_started; /* workers, without the caller */
    int timing;      /* changed between batches only */
    struct busy *busy; /* [num_threads] */
    pid_t owner;
    struct worker *workers;
};

/* ---- floating-point mode: round to nearest, subnormals kept, exceptions masked ---- */
#if defined(__x86_64__)
enum { FLOAT_MODE = 0x1f80 };
static uint32_t get_float_mode(void) { return _mm_getcsr(); }
static void set_float_mode(uint32_t mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
enum { FLOAT_MODE = 0 };
static uint32_t get_float_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return (uint32_t)mode;
}
static void set_float_mode(uint32_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)mode)); }
#else
#error "threadpool.c: say how this CPU sets round-to-nearest with subnormals on"
#endif

void moe_float_defaults(void) { set_float_mode(FLOAT_MODE); }

static void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#else
    __asm__ volatile("yield");
#endif
}

/* 1 as soon as (*value != 0) == wanted, 0 when the spin budget is over. */
static int spin_until(atomic_int *value, int wanted) {
    int64_t end = moe_now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < SPIN_CHECK; i++) {
            if ((atomic_load_explicit(value, memory_order_acquire) != 0) == wanted) return 1;
            relax();
        }
    } while (moe_now_ns() < end);
    return 0;
}

/* Which process this is, without asking the system: every call wants to know, some twice. */
static pid_t this_process;
static void note_process(void) { this_process = getpid(); }
static void follow_forks(void) {
    note_process();
    pthread_atfork(0, 0, note_process);
}

static int in_child(const struct moe_pool *pool) { return pool->owner != this_process; }

/* Claim and run tasks until none is left, then report them all at once. */
static void run_tasks(struct moe_pool *pool, int worker) {
    int left = atomic_load(&pool->unclaimed), done = 0;
    int64_t started = 0;
    while (left > 0) {
        if (!atomic_compare_exchange_weak(&pool->unclaimed, &left, left - 1)) continue;
        if (!done && worker && pool->timing) started = moe_now_ns(); /* a task is held: the batch can be read */
        pool->fn(pool->arg, pool->num_tasks - left, worker);
        done++;
        left = atomic_load(&pool->unclaimed);
    }
    if (started) pool->busy[worker].ns += moe_now_ns() - started;
    if (!done || atomic_fetch_sub(&pool->unfinished, done) != done) return;
    /* Pairs with wait_done: either this load sees the sleeper or the sleeper sees zero (sequential consistency). */
    if (!atomic_load(&pool->caller_sleeps)) return;
    pthread_mutex_lock(&pool->sleep_lock);
    pthread_cond_signal(&pool->batch_done);
    pthread_mutex_unlock(&pool->sleep_lock);
}

static void *worker_main(void *arg) {
    struct worker *self = arg;
    struct moe_pool *pool = self->pool;
    while (!atomic_load(&pool->stop)) {
        set_float_mode(FLOAT_MODE);
        run_tasks(pool, self->index);
        if (pool->spin && spin_until(&pool->unclaimed, 1)) continue;
        pthread_mutex_lock(&pool->sleep_lock);
        /* Announce first, look second; moe_parallel publishes first and looks for sleepers second. */
        atomic_fetch_add(&pool->sleepers, 1);
        while (!atomic_load(&pool->unclaimed) && !atomic_load(&pool->stop))
            pthread_cond_wait(&pool->work_ready, &pool->sleep_lock);
        atomic_fetch_sub(&pool->sleepers, 1);
        pthread_mutex_unlock(&pool->sleep_lock);
    }
    return 0;
}

static int usable_cpus(void) {
#if defined(__linux__)
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
}

static int start_workers(struct moe_pool *pool) {
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int ok = 1;
    for (int i = 1; ok && i < pool->num_threads; i++) {
        struct worker *w = &pool->workers[i - 1];
        w->pool = pool;
        w->index = i;
        ok = !pthread_create(&w->thread, 0, worker_main, w);
        pool->num_started += ok;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return ok;
}

struct moe_pool *moe_pool_create(int num_threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, follow_forks);
    struct moe_pool *pool = aligned_alloc(64, moe_round64(sizeof *pool));
    if (!pool) return 0;
    *pool = (struct moe_pool){.num_threads = num_threads, .spin = num_threads <= usable_cpus(), .owner = this_process};
    pool->workers = calloc((size_t)num_threads, sizeof *pool->workers);
    pool->busy = aligned_alloc(64, (size_t)num_threads * sizeof *pool->busy);
    if (!pool->workers || !pool->busy) { free(pool->workers); free(pool->busy); free(pool); return 0; }
    for (int i = 0; i < num_threads; i++) pool->busy[i] = (struct busy){0};
    pthread_mutex_init(&pool->call_lock, 0);
    pthread_mutex_init(&pool->sleep_lock, 0);
    pthread_cond_init(&pool->work_ready, 0);
    pthread_cond_init(&pool->batch_done, 0);
    if (start_workers(pool)) return pool;
    moe_pool_destroy(pool);
    return 0;
}

void moe_pool_destroy(struct moe_pool *pool) {
    if (!in_child(pool)) {
        pthread_mutex_lock(&pool->sleep_lock);
        atomic_store(&pool->stop, 1);
        pthread_cond_broadcast(&pool->work_ready);
        pthread_mutex_unlock(&pool->sleep_lock);
        for (int i = 0; i < pool->num_started; i++) pthread_join(pool->workers[i].thread, 0);
        pthread_mutex_destroy(&pool->call_lock);
        pthread_mutex_destroy(&pool->sleep_lock);
        pthread_cond_destroy(&pool->work_ready);
        pthread_cond_destroy(&pool->batch_done);
    }
    free(pool->workers);
    free(pool->busy);
    free(pool);
}

static void wait_done(struct moe_pool *pool) {
    if (!atomic_load(&pool->unfinished)) return;
    int64_t started = pool->timing ? moe_now_ns() : 0;
    if (!pool->spin || !spin_until(&pool->unfinished, 0)) {
        pthread_mutex_lock(&pool->sleep_lock);
        atomic_store(&pool->caller_sleeps, 1);
        while (atomic_load(&pool->unfinished)) pthread_cond_wait(&pool->batch_done, &pool->sleep_lock);
        atomic_store(&pool->caller_sleeps, 0);
        pthread_mutex_unlock(&pool->sleep_lock);
    }
    if (started) pool->busy[0].waited_ns += moe_now_ns() - started;
}

void moe_parallel(struct moe_ctx *ctx, int num_tasks, moe_task_fn fn, void *arg) {
    struct moe_pool *pool = ctx->pool;
    if (num_tasks <= 1 || pool->num_threads == 1 || in_child(pool)) {
        for (int task = 0; task < num_tasks; task++) fn(arg, task, 0);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    pool->num_tasks = num_tasks;
    atomic_store(&pool->unfinished, num_tasks);
    atomic_store(&pool->unclaimed, num_tasks);
    int wake = atomic_load(&pool->sleepers);
    if (wake > 0) {
        if (wake > num_tasks - 1) wake = num_tasks - 1;
        pthread_mutex_lock(&pool->sleep_lock);
        while (wake-- > 0) pthread_cond_signal(&pool->work_ready);
        pthread_mutex_unlock(&pool->sleep_lock);
    }
    run_tasks(pool, 0);
    wait_done(pool);
}

/* ---- timing ---- */
void moe_time_tasks(struct moe_pool *pool, int on) { pool->timing = on; }

void moe_busy_times(struct moe_ctx *ctx, int64_t *busy_ns) {
    moe_lock(ctx);
    for (int i = 0; i < ctx->pool->num_threads; i++) busy_ns[i] = ctx->pool->busy[i].ns;
    moe_unlock(ctx);
}

void *moe_scratch(struct moe_ctx *ctx, size_t bytes) {
    if (bytes <= ctx->scratch_bytes) return ctx->scratch;
    size_t rounded = (bytes + SCRATCH_STEP - 1) / SCRATCH_STEP * SCRATCH_STEP;
    if (rounded < bytes) return 0;
    free(ctx->scratch); /* contents need not survive, so the old block goes first */
    ctx->scratch = aligned_alloc(64, rounded);
    ctx->scratch_bytes = ctx->scratch ? rounded : 0;
    return ctx->scratch;
}

void moe_lock(struct moe_ctx *ctx) {
    if (!in_child(ctx->pool)) pthread_mutex_lock(&ctx->pool->call_lock);
}

void moe_unlock(struct moe_ctx *ctx) {
    if (!in_child(ctx->pool)) pthread_mutex_unlock(&ctx->pool->call_lock);
}

uint32_t moe_enter_call(struct moe_ctx *ctx, const char *function, const void *subject) {
    moe_lock(ctx);
    if (ctx->log) moe_begin_call(ctx->log, function, subject);
    uint32_t saved = get_float_mode();
    set_float_mode(FLOAT_MODE);
    return saved;
}

int moe_leave(struct moe_ctx *ctx, uint32_t saved, int status) {
    set_float_mode(saved);
    if (ctx->log) {
        struct busy *caller = &ctx->pool->busy[0];
        caller->ns += moe_end_call(ctx->log) - caller->waited_ns;
        caller->waited_ns = 0;
    }
    moe_unlock(ctx);
    return status;
}
