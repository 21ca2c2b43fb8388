/* Expert streamer: slots of memory, and threads that read experts into them while others compute.
 *
 * A slot is free -> reserved (queued) -> reading (without the lock) -> resident, or failed until somebody has heard of it,
 * then free again. Which expert goes into which slot is the caller's decision; a slot in use is refused.
 *
 * Readers claim a chunk of the oldest request at a time, so several share one large expert and experts become resident
 * one after the other, in the order in which they were asked for. Whoever reads the last chunk of a piece re-codes what
 * lies in it, while others read the next piece. A speculative request gives way at every chunk: its
 * chunks are claimed only while no wanted read is queued or under way.
 *
 * One mutex guards all states; it is held for a few list operations, never during a read or a re-coding. */
#define _GNU_SOURCE
#include "linear.h"
#include "moe.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, MAX_FILES = 4096, MAX_RETRIES = 4, NONE = -1 };
enum slot_state { FREE, RESERVED, READING, RESIDENT, FAILED };
enum list_name { WANTED, SPECULATIVE, WANTED_DONE, SPECULATIVE_DONE, NUM_LISTS };

struct slot {
    enum slot_state state;
    int uses;
    int64_t key;                    /* what is in it or on its way */
    int speculative;
    int list, previous, next;       /* in which list; neighbours */
    int piece;                      /* next chunk to claim: piece and place in it; piece == num_pieces: none left */
    int64_t place;
    int chunks;                     /* claimed and not read yet */
    int chunks_of[MOE_STREAM_PIECES]; /* the same by piece */
    int recoding;                   /* pieces that are being re-coded */
    int staging;                    /* buffer that re-coding reads from, or NONE */
    int error;                      /* of the first chunk that failed: see moe_stream_event */
    int error_file;
    int64_t error_offset;
};

struct source {
    int direct_fd, buffered_fd;
    const char *mapping;
    atomic_int direct_refused; /* EINVAL was seen: buffered from now on */
};

struct chunk {
    int slot, piece, file;
    char *to;                  /* where byte `begin` goes */
    int64_t begin, end;        /* of the file, multiples of PAGE */
    int64_t first, last;       /* bytes that are wanted, inside of it */
};

struct moe_streamer {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    struct slot *slots;
    char *memory, *staging_memory;
    int num_slots, num_readers, num_started, num_staging, stop;
    int64_t slot_bytes, staging_bytes, chunk_bytes;
    int heads[NUM_LISTS], tails[NUM_LISTS];
    int *free_staging, num_free_staging;
    int wanted_chunks, chunks;         /* under way */
    int wanted_left;                   /* wanted requests that are not in WANTED_DONE yet */
    int64_t busy_since;
    const struct moe_stream_expert *experts;
    int64_t num_experts;
    struct source files[MAX_FILES];
    int num_files;
    struct moe_stream_stats stats;
    struct moe_stream_fault fault;
    atomic_int faulty;
    uint64_t fault_state;
    struct moe_call_log *log;          /* NULL: calls are not recorded */
    pid_t owner;
    pthread_t *readers;
};

/* ---- lists of slots ---- */
static void append(struct moe_streamer *s, enum list_name list, int slot) {
    struct slot *x = &s->slots[slot];
    x->list = list;
    x->next = NONE;
    x->previous = s->tails[list];
    if (x->previous == NONE) s->heads[list] = slot;
    else s->slots[x->previous].next = slot;
    s->tails[list] = slot;
}

static void take_out(struct moe_streamer *s, int slot) {
    struct slot *x = &s->slots[slot];
    if (x->list == NONE) return;
    if (x->previous == NONE) s->heads[x->list] = x->next;
    else s->slots[x->previous].next = x->next;
    if (x->next == NONE) s->tails[x->list] = x->previous;
    else s->slots[x->next].previous = x->previous;
    x->list = NONE;
}

/* ---- one read ---- */
/* Made-up trouble for tests: 1 when this read is to fail, with errno set. Sleeps first when asked to. */
static int injected(struct moe_streamer *s, int64_t *nbytes) {
    pthread_mutex_lock(&s->lock);
    const struct moe_stream_fault fault = s->fault;
    uint64_t random = s->fault_state = s->fault_state * 6364136223846793005u + 1442695040888963407u;
    pthread_mutex_unlock(&s->lock);
    uint64_t r = random >> 33;
    if (fault.max_sleep_us > 0) usleep((useconds_t)(r % (uint64_t)fault.max_sleep_us));
    if (fault.short_percent > 0 && (int)(r / 128 % 100) < fault.short_percent && *nbytes > 1) *nbytes = *nbytes / 2 + 1;
    errno = fault.error;
    return fault.fail_percent > 0 && (int)(r / 16384 % 100) < fault.fail_percent;
}

static int64_t read_once(struct moe_streamer *s, int fd, char *to, int64_t nbytes, int64_t offset) {
    if (atomic_load(&s->faulty) && injected(s, &nbytes)) return -1;
    return pread(fd, to, (size_t)nbytes, offset);
}

static int worth_a_retry(int error) { return error == EIO || error == EAGAIN || error == ETIMEDOUT || error == EBUSY; }

/* Bytes [from, to) of the file to `at`; an early end is an error only before `need`. Returns 0, errno, or MOE_STREAM_EARLY_END. */
static int read_range(struct moe_streamer *s, int fd, int direct, char *at, int64_t from, int64_t to, int64_t need) {
    int retries = 0;
    while (from < need) {
        int64_t got = read_once(s, fd, at, to - from, from);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && worth_a_retry(errno) && retries < MAX_RETRIES) {
            int error = errno;
            struct timespec pause = {0, 500000L << (2 * retries++)};
            nanosleep(&pause, 0);
            pthread_mutex_lock(&s->lock);
            s->stats.retries++;
            pthread_mutex_unlock(&s->lock);
            errno = error;
            continue;
        }
        if (got < 0) return errno;
        if (!got) return MOE_STREAM_EARLY_END;
        if (direct && got < to - from && from + got < need) {
            got -= got % PAGE; /* direct reads go on from whole pages only */
            if (!got) return EINVAL; /* no way forward here: the buffered descriptor takes over */
        }
        from += got;
        at += got;
    }
    return 0;
}

static int shorter_than(int fd, int64_t nbytes) {
    struct stat now;
    return !fstat(fd, &now) && now.st_size < nbytes;
}

/* Bytes [from, to) of a mapped file to `at`. The kernel copies: where the file was cut or its disk fails, a load of our own
 * would be a SIGBUS, which kills the process, and this is an error. */
static int copy_mapped(struct moe_streamer *s, const struct source *f, char *at, int64_t from, int64_t to) {
    int64_t nbytes = to - from;
    if (shorter_than(f->buffered_fd, to)) return MOE_STREAM_EARLY_END;
    if (atomic_load(&s->faulty) && injected(s, &nbytes)) return errno;
    while (from < to) {
        struct iovec here = {at, (size_t)(to - from)}, there = {(void *)(uintptr_t)(f->mapping + from), (size_t)(to - from)};
        ssize_t got = process_vm_readv(getpid(), &here, 1, &there, 1, 0);
        if (got < 0 && (errno == ENOSYS || errno == EPERM)) { /* forbidden here: the check above is all there is */
            memcpy(at, f->mapping + from, (size_t)(to - from));
            return 0;
        }
        if (got <= 0) return shorter_than(f->buffered_fd, to) ? MOE_STREAM_EARLY_END : EIO;
        from += got;
        at += got;
    }
    return shorter_than(f->buffered_fd, to) ? MOE_STREAM_EARLY_END : 0; /* cut inside its last page: zeros were copied */
}

static int fetch(struct moe_streamer *s, const struct chunk *c) {
    struct source *f = &s->files[c->file];
    char *first = c->to + (c->first - c->begin);
    if (f->mapping) return copy_mapped(s, f, first, c->first, c->last);
    if (f->direct_fd >= 0 && !atomic_load(&f->direct_refused)) {
        int error = read_range(s, f->direct_fd, 1, c->to, c->begin, c->end, c->last);
        if (error != EINVAL) return error;
        atomic_store(&f->direct_refused, 1);
        pthread_mutex_lock(&s->lock);
        s->stats.direct_refused++;
        pthread_mutex_unlock(&s->lock);
    }
    return read_range(s, f->buffered_fd, 0, first, c->first, c->last, c->last);
}

/* ---- chunks ---- */
static char *target_of(struct moe_streamer *s, const struct slot *x, int slot) {
    return x->staging == NONE ? s->memory + slot * s->slot_bytes : s->staging_memory + x->staging * s->staging_bytes;
}

static int64_t page_below(int64_t n) { return n / PAGE * PAGE; }
static int64_t page_above(int64_t n) { return (n + PAGE - 1) / PAGE * PAGE; }

/* The next chunk of the request that may be read now; 0 when there is none. */
static int claim(struct moe_streamer *s, struct chunk *c) {
    int slot = s->heads[WANTED];
    if (slot == NONE && !s->wanted_chunks) slot = s->heads[SPECULATIVE];
    if (slot == NONE) return 0;
    struct slot *x = &s->slots[slot];
    const struct moe_stream_expert *e = &s->experts[x->key];
    if (x->state == RESERVED) {
        if (e->num_recodes) x->staging = s->free_staging[--s->num_free_staging];
        x->state = READING;
        s->stats.experts++;
        s->stats.reads += e->num_pieces;
    }
    const struct moe_stream_piece *p = &e->pieces[x->piece];
    int64_t begin = page_below(p->offset), end = page_above(p->offset + p->nbytes);
    c->slot = slot;
    c->piece = x->piece;
    c->file = p->file;
    c->begin = begin + x->place;
    c->end = end - c->begin <= s->chunk_bytes + s->chunk_bytes / 4 ? end : c->begin + s->chunk_bytes; /* no small rest */
    c->first = c->begin > p->offset ? c->begin : p->offset;
    c->last = c->end < p->offset + p->nbytes ? c->end : p->offset + p->nbytes;
    c->to = target_of(s, x, slot) + p->slot_offset + x->place;
    x->place = c->end - begin;
    if (c->end == end) {
        x->piece++;
        x->place = 0;
        if (x->piece == e->num_pieces) take_out(s, slot);
    }
    x->chunks++;
    x->chunks_of[c->piece]++;
    s->wanted_chunks += !x->speculative;
    if (!s->chunks++) s->busy_since = moe_now_ns();
    return 1;
}

/* The matrices that lie in one piece. */
static void recode(struct moe_streamer *s, int slot, int piece, const char *from) {
    const struct moe_stream_expert *e = &s->experts[s->slots[slot].key];
    const struct moe_stream_piece *p = &e->pieces[piece];
    for (int i = 0; i < e->num_recodes; i++) {
        const struct moe_stream_recode *r = &e->recodes[i];
        if (r->piece != piece) continue;
        const char *rows = from + p->slot_offset + p->offset % PAGE + r->from;
        char *to = s->memory + slot * s->slot_bytes + r->to;
        if (r->format) moe_encode_serial(to, r->format, r->layout, rows, r->rows, r->cols);
        else memcpy(to, rows, (size_t)r->nbytes);
    }
}

static void finish_request(struct moe_streamer *s, int slot) {
    struct slot *x = &s->slots[slot];
    if (x->staging != NONE) s->free_staging[s->num_free_staging++] = x->staging;
    x->staging = NONE;
    x->state = x->error ? FAILED : RESIDENT;
    s->stats.failures += x->error != 0;
    append(s, x->speculative ? SPECULATIVE_DONE : WANTED_DONE, slot);
    s->wanted_left -= !x->speculative;
    pthread_cond_broadcast(&s->done);
}

static void finish_chunk(struct moe_streamer *s, const struct chunk *c, int error, int64_t started) {
    struct slot *x = &s->slots[c->slot];
    int64_t now = moe_now_ns();
    s->stats.service_ns += now - started;
    s->stats.calls++;
    s->stats.bytes += error ? 0 : c->last - c->first;
    if (x->speculative) s->stats.speculative_bytes += error ? 0 : c->last - c->first;
    s->wanted_chunks -= !x->speculative;
    if (!--s->chunks) s->stats.busy_ns += now - s->busy_since;
    if (error && !x->error) {
        x->error = error;
        x->error_file = c->file;
        x->error_offset = c->first;
        take_out(s, c->slot); /* nothing more of it is read */
        x->piece = s->experts[x->key].num_pieces;
    }
    x->chunks--;
    int piece_read = !--x->chunks_of[c->piece] && x->piece > c->piece;
    if (piece_read && x->staging != NONE && !x->error) {
        const char *from = s->staging_memory + x->staging * s->staging_bytes;
        x->recoding++; /* until it is none again the request stays what it is: key, staging and slot */
        pthread_mutex_unlock(&s->lock);
        recode(s, c->slot, c->piece, from);
        pthread_mutex_lock(&s->lock);
        x->recoding--;
        s->stats.recode_ns += moe_now_ns() - now;
    }
    if (!x->chunks && !x->recoding && x->piece == s->experts[x->key].num_pieces) finish_request(s, c->slot);
    if (!s->wanted_chunks && s->heads[SPECULATIVE] != NONE) pthread_cond_broadcast(&s->work);
}

static void *reader_main(void *arg) {
    struct moe_streamer *s = arg;
    struct chunk c;
    moe_float_defaults();
    pthread_mutex_lock(&s->lock);
    while (!s->stop) {
        if (!claim(s, &c)) {
            pthread_cond_wait(&s->work, &s->lock);
            continue;
        }
        pthread_mutex_unlock(&s->lock);
        int64_t started = moe_now_ns();
        int error = fetch(s, &c);
        pthread_mutex_lock(&s->lock);
        finish_chunk(s, &c, error, started);
    }
    pthread_mutex_unlock(&s->lock);
    return 0;
}

/* ---- life ---- */
static char *map_memory(int64_t nbytes) {
    if (!nbytes) return 0;
    void *p = mmap(0, (size_t)nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return 0;
    madvise(p, (size_t)nbytes, MADV_HUGEPAGE); /* fewer pages to fault in, to pin for a read, and to look up */
    return p;
}

static int start_readers(struct moe_streamer *s) {
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; s->num_started < s->num_readers; s->num_started++)
        if (pthread_create(&s->readers[s->num_started], 0, reader_main, s)) break;
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return s->num_started == s->num_readers;
}

static int init(struct moe_streamer *s) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&s->lock, 0);
    pthread_cond_init(&s->work, 0);
    pthread_cond_init(&s->done, &attr);
    pthread_condattr_destroy(&attr);
    for (int i = 0; i < NUM_LISTS; i++) s->heads[i] = s->tails[i] = NONE;
    for (int i = 0; i < s->num_slots; i++) s->slots[i].list = s->slots[i].staging = NONE;
    for (int i = 0; i < s->num_staging; i++) s->free_staging[s->num_free_staging++] = i;
    s->memory = map_memory(s->num_slots * s->slot_bytes);
    s->staging_memory = map_memory(s->num_staging * s->staging_bytes);
    return s->memory && (s->staging_memory || !s->staging_bytes);
}

struct moe_streamer *moe_streamer_create(const struct moe_stream_expert *experts, int64_t num_experts, int num_slots,
                                         int64_t slot_bytes, int64_t staging_bytes, int num_readers, int64_t chunk_bytes,
                                         const char **error) {
    *error = "an argument is out of range";
    if (!experts || num_experts < 1 || num_slots < 1 || slot_bytes < PAGE || slot_bytes % PAGE || staging_bytes < 0 ||
        staging_bytes % PAGE || num_readers < 1 || num_readers > 256 || chunk_bytes < PAGE || chunk_bytes % PAGE)
        return 0;
    *error = "out of memory";
    struct moe_streamer *s = calloc(1, sizeof *s);
    if (!s) return 0;
    s->experts = experts;
    s->num_experts = num_experts;
    s->num_slots = num_slots;
    s->slot_bytes = slot_bytes;
    s->staging_bytes = staging_bytes;
    s->chunk_bytes = chunk_bytes;
    s->num_readers = num_readers;
    /* Begun requests: one per reader, and the partly claimed head of each queue. */
    s->num_staging = staging_bytes ? num_readers + 2 : 0;
    s->owner = getpid();
    s->slots = calloc((size_t)num_slots, sizeof *s->slots);
    s->free_staging = calloc((size_t)s->num_staging + 1, sizeof *s->free_staging);
    s->readers = calloc((size_t)num_readers, sizeof *s->readers);
    if (!s->slots || !s->free_staging || !s->readers) {
        free(s->slots);
        free(s->free_staging);
        free(s->readers);
        free(s);
        return 0;
    }
    int ok = init(s);
    if (ok) {
        *error = "a thread could not be started";
        ok = start_readers(s);
    }
    if (ok) return s;
    moe_streamer_destroy(s);
    return 0;
}

void moe_streamer_destroy(struct moe_streamer *s) {
    if (s->owner == getpid()) { /* threads do not survive a fork, and locks may be held by one that is gone */
        pthread_mutex_lock(&s->lock);
        s->stop = 1;
        pthread_cond_broadcast(&s->work);
        pthread_mutex_unlock(&s->lock);
        for (int i = 0; i < s->num_started; i++) pthread_join(s->readers[i], 0);
        pthread_mutex_destroy(&s->lock);
        pthread_cond_destroy(&s->work);
        pthread_cond_destroy(&s->done);
    }
    if (s->memory) munmap(s->memory, (size_t)(s->num_slots * s->slot_bytes));
    if (s->staging_memory) munmap(s->staging_memory, (size_t)(s->num_staging * s->staging_bytes));
    free(s->slots);
    free(s->free_staging);
    free(s->readers);
    moe_free_call_log(s->log);
    free(s);
}

int moe_streamer_add_file(struct moe_streamer *s, int direct_fd, int buffered_fd, const void *mapping) {
    if (!s || buffered_fd < 0 || s->num_files == MAX_FILES) return MOE_BAD_ARGUMENT;
    pthread_mutex_lock(&s->lock);
    int file = s->num_files++;
    s->files[file].direct_fd = direct_fd;
    s->files[file].buffered_fd = buffered_fd;
    s->files[file].mapping = mapping;
    pthread_mutex_unlock(&s->lock);
    return file;
}

void *moe_streamer_slot(struct moe_streamer *s, int slot) { return s->memory + slot * s->slot_bytes; }

void moe_streamer_set_fault(struct moe_streamer *s, const struct moe_stream_fault *fault) {
    pthread_mutex_lock(&s->lock);
    s->fault = *fault;
    s->fault_state = fault->seed;
    atomic_store(&s->faulty, 1);
    pthread_mutex_unlock(&s->lock);
}

/* ---- recorded calls ---- */
/* Bracket of the calls that are recorded: takes the lock. What a caller waits for it is not in the call. */
static int64_t begin_call(struct moe_streamer *s) {
    pthread_mutex_lock(&s->lock);
    return s->log ? moe_now_ns() : 0;
}

static void end_call(struct moe_streamer *s, const char *function, int64_t started) {
    if (s->log && started)
        moe_add_call(s->log, &(struct moe_call){.function = function, .start_ns = started, .end_ns = moe_now_ns()});
    pthread_mutex_unlock(&s->lock);
}

int moe_streamer_record(struct moe_streamer *s, int on) {
    if (s->owner != getpid()) return MOE_NO_THREAD;
    pthread_mutex_lock(&s->lock);
    int status = moe_switch_log(&s->log, on);
    pthread_mutex_unlock(&s->lock);
    return status;
}

void moe_streamer_take_calls(struct moe_streamer *s, struct moe_calls *taken) {
    if (s->owner != getpid()) {
        *taken = (struct moe_calls){0};
        return;
    }
    pthread_mutex_lock(&s->lock);
    moe_take_log(s->log, taken);
    pthread_mutex_unlock(&s->lock);
}

/* ---- requests ---- */
static int fits(const struct moe_streamer *s, const struct moe_stream_expert *e) {
    int64_t room = e->num_recodes ? s->staging_bytes : s->slot_bytes;
    if (e->num_pieces < 1 || e->num_pieces > MOE_STREAM_PIECES || e->num_recodes < 0 || e->num_recodes > MOE_STREAM_PIECES)
        return 0;
    for (int i = 0; i < e->num_pieces; i++) {
        const struct moe_stream_piece *p = &e->pieces[i];
        if (p->file < 0 || p->file >= s->num_files || p->offset < 0 || p->nbytes < 1) return 0;
        if (p->slot_offset < 0 || p->slot_offset % PAGE) return 0;
        if (p->slot_offset + page_above(p->offset + p->nbytes) - page_below(p->offset) > room) return 0;
    }
    for (int i = 0; i < e->num_recodes; i++) {
        const struct moe_stream_recode *r = &e->recodes[i];
        if (!r->layout || r->piece < 0 || r->piece >= e->num_pieces || r->from < 0 || r->to < 0 || r->to % 64) return 0;
        int64_t rows = r->format ? (int64_t)moe_row_bytes(r->format, r->cols) * r->rows : r->nbytes;
        int64_t strips = (int64_t)moe_matrix_bytes(r->layout, r->rows, r->cols);
        if (r->nbytes != rows || r->from + rows > e->pieces[r->piece].nbytes || r->to + strips > s->slot_bytes) return 0;
        if (!r->format && rows != strips) return 0;
    }
    return 1;
}

static int request_ok(const struct moe_streamer *s, int64_t key, int slot) {
    return slot >= 0 && slot < s->num_slots && key >= 0 && key < s->num_experts && fits(s, &s->experts[key]);
}

int moe_streamer_request(struct moe_streamer *s, const int64_t *keys, const int32_t *slots, int count, int speculative) {
    if (!s || count < 0) return MOE_BAD_ARGUMENT;
    if (s->owner != getpid()) return MOE_NO_THREAD;
    int status = MOE_OK;
    int64_t begun = begin_call(s);
    for (int i = 0; i < count && !status; i++) {
        if (!request_ok(s, keys[i], slots[i])) status = MOE_BAD_ARGUMENT;
        else if (s->slots[slots[i]].uses || (s->slots[slots[i]].state != FREE && s->slots[slots[i]].state != RESIDENT) ||
                 s->slots[slots[i]].list != NONE)
            status = MOE_IN_USE;
    }
    for (int i = 0; i < count && !status; i++) {
        struct slot *x = &s->slots[slots[i]];
        if (x->state == RESERVED) continue; /* named twice */
        x->state = RESERVED;
        x->key = keys[i];
        x->uses = !speculative;
        x->speculative = speculative;
        x->piece = x->error = 0;
        x->place = 0;
        append(s, speculative ? SPECULATIVE : WANTED, slots[i]);
        s->wanted_left += !speculative;
    }
    pthread_cond_broadcast(&s->work);
    end_call(s, __func__, begun);
    return status;
}

int moe_streamer_promote(struct moe_streamer *s, int slot) {
    if (!s || slot < 0 || slot >= s->num_slots) return MOE_BAD_ARGUMENT;
    struct slot *x = &s->slots[slot];
    int64_t begun = begin_call(s);
    int found = x->speculative && (x->state == RESERVED || x->state == READING || x->list == SPECULATIVE_DONE);
    if (found) {
        x->speculative = 0;
        x->uses++;
        s->wanted_chunks += x->state == READING ? x->chunks : 0;
        s->wanted_left += x->list != SPECULATIVE_DONE;
        int queued = x->list;
        take_out(s, slot);
        if (queued == SPECULATIVE) append(s, WANTED, slot);
        if (queued == SPECULATIVE_DONE) append(s, WANTED_DONE, slot);
        pthread_cond_broadcast(&s->work);
    }
    end_call(s, __func__, begun);
    return found ? MOE_OK : MOE_BAD_ARGUMENT;
}

int moe_streamer_drop_speculative(struct moe_streamer *s) {
    int dropped = 0;
    int64_t begun = begin_call(s);
    for (int slot = s->heads[SPECULATIVE], next; slot != NONE; slot = next) {
        struct slot *x = &s->slots[slot];
        next = x->next;
        if (x->state != RESERVED) continue; /* begun: its other chunks are under way or will be */
        take_out(s, slot);
        x->state = FAILED;
        x->error = ECANCELED;
        append(s, SPECULATIVE_DONE, slot);
        dropped++;
    }
    end_call(s, __func__, begun);
    return dropped;
}

int moe_streamer_use(struct moe_streamer *s, const int32_t *slots, int count, int change) {
    int status = MOE_OK;
    int64_t begun = begin_call(s);
    for (int i = 0; i < count; i++) {
        if (slots[i] < 0 || slots[i] >= s->num_slots || s->slots[slots[i]].state != RESIDENT ||
            s->slots[slots[i]].uses + change < 0)
            status = MOE_BAD_ARGUMENT;
        else s->slots[slots[i]].uses += change;
    }
    end_call(s, __func__, begun);
    return status;
}

/* ---- completions ---- */
static int pop_events(struct moe_streamer *s, enum list_name list, struct moe_stream_event *events, int max_events) {
    int count = 0;
    while (count < max_events && s->heads[list] != NONE) {
        int slot = s->heads[list];
        struct slot *x = &s->slots[slot];
        take_out(s, slot);
        events[count++] = (struct moe_stream_event){x->key, slot, x->error, x->error_file, x->error_offset};
        if (x->state != FAILED) continue;
        x->state = FREE;
        x->uses = 0;
    }
    return count;
}

int moe_streamer_next(struct moe_streamer *s, struct moe_stream_event *events, int max_events, int timeout_ms) {
    if (!s || !events || max_events < 1) return MOE_BAD_ARGUMENT;
    if (s->owner != getpid()) return MOE_NO_THREAD;
    int64_t begun = begin_call(s);
    if (s->heads[WANTED_DONE] == NONE && s->wanted_left && timeout_ms > 0) {
        int64_t started = moe_now_ns(), until = started + (int64_t)timeout_ms * 1000000;
        struct timespec end = {until / 1000000000, until % 1000000000};
        while (s->heads[WANTED_DONE] == NONE)
            if (pthread_cond_timedwait(&s->done, &s->lock, &end)) break;
        s->stats.wait_ns += moe_now_ns() - started;
    }
    int count = pop_events(s, WANTED_DONE, events, max_events);
    end_call(s, __func__, begun);
    return count;
}

int moe_streamer_poll_speculative(struct moe_streamer *s, struct moe_stream_event *events, int max_events) {
    int64_t begun = begin_call(s);
    int count = pop_events(s, SPECULATIVE_DONE, events, max_events);
    end_call(s, __func__, begun);
    return count;
}

static int any_unfinished(const struct moe_streamer *s) {
    for (int i = 0; i < s->num_slots; i++)
        if (s->slots[i].state == RESERVED || s->slots[i].state == READING) return 1;
    return 0;
}

static void drop_queued(struct moe_streamer *s, enum list_name list) {
    for (int slot = s->heads[list], next; slot != NONE; slot = next) {
        struct slot *x = &s->slots[slot];
        next = x->next;
        if (x->state != RESERVED) continue;
        take_out(s, slot);
        x->state = FREE;
        s->wanted_left -= !x->speculative;
    }
}

int moe_streamer_reset(struct moe_streamer *s, int64_t *keys, int timeout_ms) {
    if (!s || !keys) return MOE_BAD_ARGUMENT;
    if (s->owner != getpid()) return MOE_NO_THREAD;
    int64_t until = moe_now_ns() + (int64_t)timeout_ms * 1000000;
    struct timespec end = {until / 1000000000, until % 1000000000};
    pthread_mutex_lock(&s->lock);
    drop_queued(s, WANTED);
    drop_queued(s, SPECULATIVE);
    int late = 0;
    while (any_unfinished(s) && !late) late = pthread_cond_timedwait(&s->done, &s->lock, &end) != 0;
    late = late && any_unfinished(s);
    for (int slot = 0; slot < s->num_slots && !late; slot++) {
        struct slot *x = &s->slots[slot];
        take_out(s, slot);
        if (x->state == FAILED) x->state = FREE;
        x->uses = 0;
        keys[slot] = x->state == RESIDENT ? x->key : -1;
    }
    pthread_mutex_unlock(&s->lock);
    return late ? MOE_IN_USE : MOE_OK;
}

void moe_streamer_stats(struct moe_streamer *s, struct moe_stream_stats *stats) {
    int owned = s->owner == getpid(); /* after a fork the lock may be held by a thread that is gone */
    if (owned) pthread_mutex_lock(&s->lock);
    *stats = s->stats;
    stats->free_slots = stats->used_slots = 0;
    for (int i = 0; i < s->num_slots; i++) {
        stats->free_slots += s->slots[i].state == FREE;
        stats->used_slots += s->slots[i].uses > 0;
    }
    stats->unfinished = s->wanted_left;
    if (owned) pthread_mutex_unlock(&s->lock);
}

int moe_lock_memory(const void *data, size_t nbytes) { return mlock(data, nbytes) ? errno : 0; }
