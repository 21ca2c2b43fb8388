/* The top of the AVX2 and the AVX-512 kernel, on the tier's strip_super and strip_group: blocks of columns in order,
 * strips in order, a body per number of tokens. */
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
        }
        return;
    }
    for (; col < end; col += 32) {
        strip_group(s, acc, p, x, col, T, R, table);
        strip_next_code(s, &p, 32, R);
        if (s.span == 16) strip_next_scale(s, &p, 2, R);
        else if (s.span && (col + 32) % (size_t)s.span == 0) strip_next_scale(s, &p, 1, R);
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
#endif
