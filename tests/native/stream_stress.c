/* Expert streamer under the thread sanitizer: experts stamped with their number in a file, read through a streamer
 * whose reads sleep, fall short and fail, for 1000 steps that use, evict, guess, promote and drop; one step in eight is
 * given up in the middle and the streamer reset, as after Ctrl-C. Every word of every expert is checked before its slot
 * is released, and of all that is resident after a reset; at the end every slot must be free or resident.
 *   ENGINE=1 MAIN=tests/native/stream_stress.c tests/native/build.sh OUT -g -O1 -fsanitize=thread
 *   -Wno-maybe-uninitialized
 *   OUT [steps] */
#define _GNU_SOURCE
#include "moe.h"
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NUM_EXPERTS = 48, NUM_SLOTS = 9, PER_STEP = 4, PAGE = 4096, COLS = 256 };
enum { PIECE_ROWS = 21, PIECE_BYTES = PIECE_ROWS * COLS * 4, ROOM = PIECE_BYTES + 2 * PAGE - PIECE_BYTES % PAGE };

static struct moe_stream_expert experts[NUM_EXPERTS];
static int slot_of[NUM_EXPERTS], key_of[NUM_SLOTS], coming[NUM_EXPERTS]; /* coming: asked for as a guess */
static struct moe_streamer *s;
static unsigned seed = 1;
static long errors, guesses, promoted, dropped, resets, resets_late;

static uint32_t stamp(int key, int piece, int word) { return (uint32_t)(key * 3 + piece) << 16 ^ (uint32_t)word; }

static int fail(const char *what, int key) { return printf("%s: expert %d\n", what, key), 1; }

/* Three slabs at offsets that are no multiples of a page, as in a GGUF. */
static int make_file(const char *path, int recode, const struct moe_layout *layout) {
    FILE *f = fopen(path, "wb");
    if (!f) return fail(path, 0);
    memset(experts, 0, sizeof experts);
    static uint32_t words[PIECE_BYTES / 4];
    for (int piece = 0; piece < 3; piece++) {
        long start = 352 + piece * ((long)NUM_EXPERTS * PIECE_BYTES + 1056);
        fseek(f, start, SEEK_SET);
        for (int key = 0; key < NUM_EXPERTS; key++) {
            for (int i = 0; i < PIECE_BYTES / 4; i++) words[i] = stamp(key, piece, i);
            fwrite(words, 1, PIECE_BYTES, f);
            struct moe_stream_expert *e = &experts[key];
            e->num_pieces = 3;
            e->pieces[piece] = (struct moe_stream_piece){0, start + (long)key * PIECE_BYTES, PIECE_BYTES, piece * ROOM};
            if (!recode) continue;
            e->num_recodes = 3;
            e->recodes[piece] = (struct moe_stream_recode){.layout = layout,
                                                           .rows = PIECE_ROWS,
                                                           .cols = COLS,
                                                           .piece = piece,
                                                           .to = piece * PIECE_BYTES,
                                                           .nbytes = PIECE_BYTES};
        }
    }
    return fclose(f);
}

static int check_expert(int key, int recode) {
    const char *slot = moe_streamer_slot(s, slot_of[key]);
    for (int piece = 0; piece < 3; piece++) {
        const struct moe_stream_piece *p = &experts[key].pieces[piece];
        const char *at = slot + (recode ? piece * PIECE_BYTES : p->slot_offset + p->offset % PAGE);
        for (int i = 0; i < PIECE_BYTES / 4; i++) {
            uint32_t word;
            memcpy(&word, at + 4 * i, 4);
            if (word != stamp(key, piece, i)) return fail("wrong bytes", key);
        }
    }
    return 0;
}

static void published(int key, int slot) {
    slot_of[key] = slot;
    key_of[slot] = key;
    coming[key] = 0;
}

/* A free slot, or one of an expert that is in none of `wanted`; -1 when there is none. */
static int take_slot(const int *wanted, int count) {
    int start = rand_r(&seed) % NUM_SLOTS;
    for (int i = 0; i < NUM_SLOTS; i++) {
        int slot = (start + i) % NUM_SLOTS, key = key_of[slot], needed = 0;
        if (key == -2) continue; /* on its way */
        for (int k = 0; k < count; k++) needed |= key == wanted[k];
        if (needed) continue;
        if (key >= 0) slot_of[key] = -1;
        key_of[slot] = -2;
        return slot;
    }
    return -1;
}

static void poll_guesses(void) {
    struct moe_stream_event events[NUM_SLOTS];
    int n = moe_streamer_poll_speculative(s, events, NUM_SLOTS);
    for (int i = 0; i < n; i++) {
        int key = (int)events[i].key;
        if (!events[i].error) published(key, events[i].slot);
        else key_of[events[i].slot] = -1, coming[key] = 0;
    }
}

static int ask(int key, int slot, int guess) {
    int64_t k = key;
    int32_t at = slot;
    return moe_streamer_request(s, &k, &at, 1, guess) ? fail("request", key) : 0;
}

static int guess(const int *wanted) {
    int key = rand_r(&seed) % NUM_EXPERTS;
    if (slot_of[key] >= 0 || coming[key]) return 0;
    for (int i = 0; i < PER_STEP; i++) if (key == wanted[i]) return 0; /* on its way already */
    int slot = take_slot(wanted, PER_STEP);
    if (slot < 0) return 0;
    coming[key] = slot + 1;
    guesses++;
    return ask(key, slot, 1);
}

static int finish_arrivals(int *left, int recode) {
    struct moe_stream_event events[NUM_SLOTS];
    int n = moe_streamer_next(s, events, NUM_SLOTS, 1000), bad = n < 0;
    for (int i = 0; i < n; i++) {
        int key = (int)events[i].key;
        int32_t slot = events[i].slot;
        if (events[i].error) {
            errors++;
            bad |= events[i].error != EIO; /* five times in a row: rare, or what the last run is about */
            key_of[slot] = -1;
            coming[key] = 0;
            continue;
        }
        published(key, slot);
        bad |= check_expert(key, recode);
        if (moe_streamer_use(s, &slot, 1, -1)) bad = fail("release", key);
    }
    *left -= n;
    return bad;
}

/* What is known of slots, guesses and uses is gone: only the streamer can say what is where. */
static int give_up(int recode) {
    int64_t keys[NUM_SLOTS];
    int status, bad = 0;
    while ((status = moe_streamer_reset(s, keys, (int)(rand_r(&seed) % 3))) == MOE_IN_USE) resets_late++;
    if (status) return fail("reset", status);
    resets++;
    for (int key = 0; key < NUM_EXPERTS; key++) slot_of[key] = -1, coming[key] = 0;
    for (int slot = 0; slot < NUM_SLOTS; slot++) {
        key_of[slot] = -1;
        if (keys[slot] < 0) continue;
        if (slot_of[keys[slot]] >= 0) return fail("resident twice", (int)keys[slot]);
        published((int)keys[slot], slot);
        bad |= check_expert((int)keys[slot], recode);
    }
    struct moe_stream_stats stats;
    struct moe_stream_event event;
    moe_streamer_stats(s, &stats);
    if (stats.used_slots || stats.unfinished) bad = fail("in use after a reset", (int)stats.used_slots);
    if (moe_streamer_next(s, &event, 1, 0) || moe_streamer_poll_speculative(s, &event, 1))
        bad = fail("news after a reset", 0);
    return bad;
}

static int step(int recode) {
    int wanted[PER_STEP], held[PER_STEP], num_held = 0, left = 0, bad = 0;
    for (int i = 0; i < PER_STEP; i++) wanted[i] = (rand_r(&seed) % (NUM_EXPERTS / PER_STEP)) * PER_STEP + i;
    poll_guesses();
    for (int i = 0; i < PER_STEP; i++) {
        int32_t slot = slot_of[wanted[i]];
        if (slot < 0) continue;
        if (moe_streamer_use(s, &slot, 1, 1)) bad = fail("use", wanted[i]);
        if (moe_streamer_request(s, (int64_t[]){0}, &slot, 1, 0) != MOE_IN_USE)
            bad = fail("slot in use taken", wanted[i]);
        held[num_held++] = wanted[i];
    }
    for (int i = 0; i < PER_STEP; i++) {
        int key = wanted[i];
        if (slot_of[key] >= 0) continue;
        if (coming[key] && !moe_streamer_promote(s, coming[key] - 1)) promoted++;
        else {
            int slot;
            while ((slot = take_slot(wanted, PER_STEP)) < 0) { /* guesses fill the cache: they go first */
                dropped += moe_streamer_drop_speculative(s);
                usleep(200);
                poll_guesses();
            }
            if (slot_of[key] >= 0) return fail("expert came by itself", key);
            bad |= ask(key, slot, 0);
        }
        left++;
    }
    if (rand_r(&seed) % 2) bad |= guess(wanted);
    if (rand_r(&seed) % 4 == 0) dropped += moe_streamer_drop_speculative(s);
    if (rand_r(&seed) % 8 == 0) return bad | give_up(recode);
    for (int i = 0; i < num_held; i++) {
        int32_t slot = slot_of[held[i]];
        bad |= check_expert(held[i], recode);
        if (moe_streamer_use(s, &slot, 1, -1)) bad = fail("release", held[i]);
    }
    while (left && !bad) bad |= finish_arrivals(&left, recode);
    bad |= guess(wanted);
    return bad;
}

static int settled(void) {
    struct moe_stream_stats stats;
    for (int i = 0; i < 2000; i++) { /* guesses may still be on their way */
        moe_streamer_drop_speculative(s);
        poll_guesses();
        int left = 0;
        for (int key = 0; key < NUM_EXPERTS; key++) left += coming[key] != 0;
        if (!left) break;
        usleep(1000);
    }
    moe_streamer_stats(s, &stats);
    int resident = 0;
    for (int key = 0; key < NUM_EXPERTS; key++) resident += slot_of[key] >= 0;
    if (stats.used_slots || stats.unfinished || stats.free_slots + resident != NUM_SLOTS)
        return printf("%d free, %d resident, %d in use, %d unfinished\n", (int)stats.free_slots, resident,
                      (int)stats.used_slots, (int)stats.unfinished),
               1;
    printf("%d reads, %d retries, %d failures; %ld guesses, %ld promoted, %ld dropped; %ld resets, %ld times not at "
           "once\n",
           (int)stats.reads, (int)stats.retries, (int)stats.failures, guesses, promoted, dropped, resets, resets_late);
    return 0;
}

/* Records of the streamer's calls, taken by somebody else while they are made. */
static atomic_int stop;
static long recorded;

static void *listen(void *arg) {
    int *bad = arg, ended = 0;
    int64_t last = 0;
    while (!ended) {
        ended = atomic_load(&stop);
        struct moe_calls taken;
        moe_streamer_take_calls(s, &taken);
        for (int64_t i = 0; i < taken.num_calls; i++) { /* one thread makes them: one after the other */
            const struct moe_call *c = &taken.calls[i];
            *bad |= c->start_ns < last || c->end_ns < c->start_ns || strncmp(c->function, "moe_streamer_", 13) != 0;
            last = c->end_ns;
        }
        recorded += taken.num_calls;
        *bad |= taken.lost != 0;
        usleep(100);
    }
    return 0;
}

static int run(const char *path, int steps, int recode, int fail_percent, const struct moe_layout *layout) {
    const char *error;
    if (make_file(path, recode, layout)) return 1;
    FILE *f = fopen(path, "rb");
    s = moe_streamer_create(experts, NUM_EXPERTS, NUM_SLOTS, 3 * ROOM, recode ? 3 * ROOM : 0, 4, 2 * PAGE, &error);
    if (!f || !s) return printf("%s\n", error), 1;
    moe_streamer_add_file(s, -1, fileno(f), 0);
    struct moe_stream_fault fault = {fail_percent, EIO, 20, 150, 1};
    moe_streamer_set_fault(s, &fault);
    for (int i = 0; i < NUM_EXPERTS; i++) slot_of[i] = -1, coming[i] = 0;
    for (int i = 0; i < NUM_SLOTS; i++) key_of[i] = -1;
    int bad = 0, bad_record = 0;
    pthread_t listener;
    atomic_store(&stop, 0);
    if (moe_streamer_record(s, 1) || moe_streamer_record(s, 1) != MOE_IN_USE) return fail("record", 0);
    if (pthread_create(&listener, 0, listen, &bad_record)) return fail("thread", 0);
    for (int i = 0; i < steps && !bad; i++) bad = step(recode);
    bad |= settled();
    atomic_store(&stop, 1);
    pthread_join(listener, 0);
    if (bad_record || recorded < steps) bad = fail("records", (int)recorded);
    recorded = 0;
    bad |= moe_streamer_record(s, 0);
    moe_streamer_destroy(s);
    fclose(f);
    return bad;
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 1000;
    char path[] = "/tmp/stream_stress_XXXXXX";
    const char *error;
    struct moe_ctx *ctx = moe_ctx_create(0, 1, &error);
    const struct moe_layout *layout = ctx ? moe_select_layout(ctx, "rows_f32", &error) : 0;
    int handle = mkstemp(path);
    if (handle < 0 || !layout) return fail("setup", 0);
    close(handle);
    int bad = run(path, steps, 0, 10, layout) || run(path, steps / 4, 1, 10, layout);
    long before = errors;
    bad = bad || run(path, 5, 0, 100, layout);
    bad |= errors == before; /* reads that always fail must say so */
    bad |= !resets || !resets_late || !promoted || !dropped; /* else nothing of it was tried */
    unlink(path);
    moe_ctx_destroy(ctx);
    printf("%s\n", bad ? "FAILED" : "ok");
    return bad;
}
