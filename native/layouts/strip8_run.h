/* The top of the AVX2 and the AVX-512 kernel, on the tier's strip_super and strip_group: blocks of columns in order,
 * strips in order, a body per number of tokens, and the tile for many tokens. */
#ifndef MOE_STRIP8_RUN_H
#define MOE_STRIP8_RUN_H

/* acc[R * t + r] += columns [col, end), the first of which are at p. */
MOE_INLINE void strip_columns(struct strip_spec s, strip_floats *acc, struct strip_at p, struct strip_x x, size_t col,
                              size_t end, int T, int R, strip_ints table) {
    if (s.span == 256) {
        for (; col < end; col += 256) {
            strip_super(s, acc, p, x, col, T, R, table);
            strip_next_code(s, &p, 256, R);
            strip_next_scale(s, &p, 1, R);
            p.start += s.unpacked ? R * STRIP_START_BYTES : 0;
        }
        return;
    }
    for (; col < end; col += 32) {
        strip_group(s, acc, p, x, col, T, R, table);
        strip_next_code(s, &p, 32, R);
        if (s.span == 16) strip_next_scale(s, &p, 2, R);
        else if (s.span && (col + 32) % (size_t)s.span == 0) strip_next_scale(s, &p, 1, R);
        p.start += s.unpacked ? R * STRIP_START_BYTES : 0;
    }
}

MOE_INLINE void strip_range_of(struct strip_spec s, float *const *y, const void *w, int rows, int cols, int first,
                               int last, struct strip_x v, int T) {
    const strip_ints table = strip_table(s);
    if (rows > 8 * last) rows = 8 * last;
    for (int row = 8 * first; row < rows; row += 8 * STRIPS) {
        strip_floats acc[MOE_MAX_TOKENS];
        STRIP_UNROLL for (int t = 0; t < T; t++) acc[t] = strip_zero();
        const char *strip = (const char *)w + (size_t)(row / 8) * strip_size(s, cols);
        strip_columns(s, acc, strip_at(s, strip, rows - row, cols, 1), v, 0, (size_t)cols, T, 1, table);
        STRIP_UNROLL for (int t = 0; t < T; t++) strip_store(y[t] + row, acc[t], rows - row);
    }
}

MOE_INLINE void strip_range(struct strip_spec s, float *const *y, const void *w, int rows, int cols, int first,
                            int last, const void *const *x, int T) {
    struct strip_x v = strip_x(s, x, cols, T);
    if (!strip_sizes(s, cols, T)) {
        strip_range_of(s, y, w, rows, cols, first, last, v, T);
        return;
    }
    char sizes[STRIP_SIZE_TOKENS * STRIP_SIZE_COLS];
    struct strip_spec sized = s;
    sized.sizes = 1;
    strip_size_of(&v, sizes, cols, T);
    strip_range_of(sized, y, w, rows, cols, first, last, v, T);
}

/* Token counts without a body of their own run as two calls: same bits, and half the code to compile. */
MOE_INLINE void strip_matmul(struct strip_spec s, float *const *y, const void *w, int rows, int cols, int first,
                             int last, const void *const *x, int num_tokens) {
    switch (num_tokens) {
    case 1: strip_range(s, y, w, rows, cols, first, last, x, 1); break;
    case 2: strip_range(s, y, w, rows, cols, first, last, x, 2); break;
    case 3: strip_range(s, y, w, rows, cols, first, last, x, 3); break;
    case 4: strip_range(s, y, w, rows, cols, first, last, x, 4); break;
    case 8: strip_range(s, y, w, rows, cols, first, last, x, 8); break;
    }
}

/* Many tokens: a panel of columns is unpacked once into scratch that stays in L1, then the tokens go over it, a few at
 * a time; every broadcast of activations meets TILE_SETS registers of rows. The sums wait in memory between panels;
 * blocks keep their order, so the bits are those of strip_matmul. */
enum { STRIP_PANEL = 512 };
struct strip_scratch {
    _Alignas(64) char codes[STRIP_PANEL / 32 * TILE_SETS * STRIP_UNPACKED_BYTES];
    char starts[STRIP_PANEL / 16 * TILE_SETS * STRIP_START_BYTES + 64];
    strip_floats acc[MOE_TILE_TOKENS * TILE_SETS];
};
MOE_INLINE void strip_tile(struct strip_spec s, float *const *y, const void *w, int rows, int cols, int first, int last,
                           const void *const *x, int num_tokens) {
    enum { R = TILE_SETS, T = TILE_TOKENS };
    if (!strip_unpacks(s)) { /* codes that are used as they lie */
        for (int t = 0; t < num_tokens; t += 8) strip_matmul(s, y + t, w, rows, cols, first, last, x + t, 8);
        return;
    }
    struct strip_scratch m;
    struct strip_spec ready = s;
    ready.unpacked = 1;
    const strip_ints table = strip_table(s);
    if (rows > 8 * last) rows = 8 * last;
    for (int row = 8 * first; row < rows; row += 8 * STRIPS * R) {
        const char *strip = (const char *)w + (size_t)(row / 8) * strip_size(s, cols);
        struct strip_at p = strip_at(s, strip, rows - row, cols, R);
        for (int t = 0; t < num_tokens * R; t++) m.acc[t] = strip_zero();
        for (int col = 0; col < cols; col += STRIP_PANEL) {
            const int end = cols - col < STRIP_PANEL ? cols : col + STRIP_PANEL;
            strip_unpack(s, m.codes, m.starts, p, end - col, R, table);
            struct strip_at u = p;
            u.code[0] = m.codes;
            u.start = m.starts;
            for (int t = 0; t < num_tokens; t += T)
                strip_columns(ready, m.acc + R * t, u, strip_x(s, x + t, cols, T), (size_t)col, (size_t)end, T, R,
                              table);
            strip_next_code(s, &p, end - col, R);
            if (s.span) strip_next_scale(s, &p, (end - col) / (s.span ? s.span : 1), R);
        }
        for (int t = 0; t < num_tokens * R; t++) {
            const int at = row + t % R * 8 * STRIPS;
            if (at < rows) strip_store(y[t / R] + at, m.acc[t], rows - at);
        }
    }
}
#endif
