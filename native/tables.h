/* The part of the C surface that kernels implement: compute layouts and storage formats. moe.h includes it; files that
 * are compiled once per tier need nothing else of moe.h, so a new call there does not recompile them. The text between
 * the cffi marks is part of the cdef. */
#ifndef MOE_TABLES_H
#define MOE_TABLES_H
#include <stddef.h>
#include <stdint.h>
/* cffi-begin */
/* How a layout's kernel wants its activations. */
enum moe_activation {
    MOE_ACT_F32 = 0,    /* float32 as they are */
    MOE_ACT_Q8_32 = 1,  /* int8 with a float32 scale per 32 columns */
    MOE_ACT_Q8_256 = 2, /* int8 with a float32 scale per 256 columns */
    MOE_ACT_Q8_256_ROTATED = 3, /* rotated (native/rotation.h), then like MOE_ACT_Q8_256 */
    MOE_ACT_F32_ROTATED = 4     /* rotated and left float32; no layout has it, the float arithmetic makes it */
};

/* A compute layout on one tier. */
struct moe_layout {
    const char *name;    /* registry name, e.g. "nib8_iq4_xs" */
    const char *tier;    /* tier this table was compiled for, e.g. "avx2" */
    const char *same_as; /* NULL, or the tier whose table this tier reuses on purpose */
    const char *why;     /* NULL, or the reason for same_as */
    int activation;      /* enum moe_activation */
    int block_len;       /* cols is a multiple of this */
    int strip_rows;      /* 8 interleaved rows, or 1 for row-major float layouts */
    /* 0: strip s holds rows s * strip_rows and the following. 1: rows s, s + n, s + 2 n ... of a matrix with n strips,
     * whose number of rows is a multiple of strip_rows. */
    int scattered;
    size_t (*strip_bytes)(int cols);
    /* y[t][r] = sum_c W[r][c] * x[t][c] for the rows of strips [first, last), clipped to `rows`; 1 <= T <= 8.
     * w is strip 0; y[t] is row 0 of token t; x[t] is in the layout's activation form. */
    void (*matmul)(float *const *y, const void *w, int rows, int cols, int first, int last, const void *const *x,
                   int num_tokens);
    /* NULL, or matmul for a multiple of 8 tokens up to MOE_TILE_TOKENS: the same bits for less time per token. */
    void (*tile)(float *const *y, const void *w, int rows, int cols, int first, int last, const void *const *x,
                 int num_tokens);
    int strips_at_once; /* the kernel takes as many strips as one: cut matrices at multiples of it */
    /* One row back to float32, in the storage format's own rounding. `row` counts in the order of the strips: its place
     * is row % strip_rows of strip row / strip_rows. Scalar tier only. */
    void (*dequantize_row)(float *y, const void *w, int cols, int row);
    /* One strip to float32 [strip_rows][cols], every tier, the bits of dequantize_row. NULL where a strip is one row of
     * floats, which needs none. */
    void (*dequantize_strip)(float *out, const void *strip, int cols);
};

/* A storage format's codec on one tier: how its rows become strips of its layout, losslessly. */
struct moe_format {
    const char *name;
    const char *tier;
    const char *same_as;
    const char *why;
    int version;         /* of the byte layout; a file with another one is refused */
    int block_len;       /* weights per block */
    int block_bytes;     /* bytes per block */
    int row_extra_bytes; /* bytes behind the blocks of a row (a scale of the whole row), mostly 0 */
    const char *layout;  /* name of the compute layout it re-codes to */
    /* num_rows (1..strip_rows) storage rows, row_bytes apart, into one strip; absent rows become zero weights. */
    void (*encode_strip)(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols);
    /* cols floats into storage blocks, deterministic. NULL where the format is read only. Scalar tier only. */
    void (*quantize_row)(void *blocks, const float *x, int cols);
    /* Index of the first block whose scale is not finite, or -1. Scalar tier only. */
    int (*check_row)(const void *blocks, int cols);
    /* Formats whose rows do not stand alone: group_rows rows share data, the matrix is stored as a whole (its length
     * is still rows * cols / block_len * block_bytes), rows are a multiple of group_rows, and these three take the
     * place of the functions above. group j of rows / group_rows is strip j of the layout. 0 and NULL for all other
     * formats. */
    int group_rows;
    void (*encode_group)(void *strip, const void *matrix, int rows, int cols, int group);
    void (*quantize_group)(void *matrix, const float *x, int rows, int cols, int group);
    int (*check_group)(const void *matrix, int rows, int cols, int group); /* block of columns, or -1 */
};
/* cffi-end */
#endif
