/* Row-major float weights, stored as they come: rows_f32, rows_f16, rows_bf16. A strip is one row of any length.
 *
 * Arithmetic: sixteen virtual lanes per (row, token); element i is fused into lane i mod 16, an incomplete last group
 * counts as +0, the lanes meet in the fixed tree of v16_reduce_add. Rows and tokens are tiled only to keep enough
 * independent sums in flight; a tile never changes an order. */
#include "vec16.h"
#define ROWS_UNROLL _Pragma("GCC unroll 8")

enum { ROWS_BLOCK = 4 };
enum rows_kind { ROWS_F32, ROWS_F16, ROWS_BF16 };
#if MOE_TIER_ID == MOE_AVX512
enum { ROWS_SUMS = 16 }; /* registers for sums: a v16 is one of 32 */
#elif MOE_TIER_ID == MOE_AVX2
enum { ROWS_SUMS = 4 };  /* a v16 is two of 16 */
#elif MOE_TIER_ID == MOE_SCALAR
enum { ROWS_SUMS = 1 };
#else
#error "rows: no kernel for this tier; write one or state MOE_LAYOUT_SAME_AS with a reason"
#endif

MOE_INLINE size_t rows_width(int kind) { return kind == ROWS_F32 ? 4 : 2; }

MOE_INLINE v16 rows_load(const char *w, int kind) {
    if (kind == ROWS_F32) return v16_load((const float *)(const void *)w);
    return kind == ROWS_F16 ? v16_load_f16((const uint16_t *)(const void *)w)
                            : v16_load_bf16((const uint16_t *)(const void *)w);
}
MOE_INLINE v16 rows_load_n(const char *w, int kind, int n) { /* the last n < 16, zero-filled */
    char part[64] = {0};
    for (size_t i = 0; i < (size_t)n * rows_width(kind); i++) part[i] = w[i];
    return rows_load(part, kind);
}

/* R rows from w, T tokens. */
MOE_INLINE void rows_tile(float *const *y, const char *w, size_t row_bytes, int cols, const float *const *x, int kind,
                          int R, int T) {
    v16 acc[16];
    ROWS_UNROLL for (int i = 0; i < R * T; i++) acc[i] = v16_zero();
    int c = 0;
    for (; c + 16 <= cols; c += 16)
        ROWS_UNROLL for (int r = 0; r < R; r++) {
            v16 a = rows_load(w + (size_t)r * row_bytes + (size_t)c * rows_width(kind), kind);
            ROWS_UNROLL for (int t = 0; t < T; t++) acc[r * T + t] = v16_fma(a, v16_load(x[t] + c), acc[r * T + t]);
        }
    if (c < cols)
        ROWS_UNROLL for (int r = 0; r < R; r++) {
            v16 a = rows_load_n(w + (size_t)r * row_bytes + (size_t)c * rows_width(kind), kind, cols - c);
            ROWS_UNROLL for (int t = 0; t < T; t++)
                acc[r * T + t] = v16_fma(a, v16_load_n(x[t] + c, cols - c), acc[r * T + t]);
        }
    ROWS_UNROLL for (int r = 0; r < R; r++)
        ROWS_UNROLL for (int t = 0; t < T; t++) y[t][r] = v16_reduce_add(acc[r * T + t]);
}

/* T <= 4 tokens: as many rows at once as there are registers for. */
MOE_INLINE void rows_range(float *const *y, const char *w, int cols, int first, int last, const float *const *x,
                           int kind, int T) {
    size_t row_bytes = (size_t)cols * rows_width(kind);
    const int R = ROWS_SUMS / T > 4 ? 4 : ROWS_SUMS / T > 0 ? ROWS_SUMS / T : 1;
    int row = first;
    float *out[4];
    for (; row + R <= last; row += R) {
        ROWS_UNROLL for (int t = 0; t < T; t++) out[t] = y[t] + row;
        rows_tile(out, w + (size_t)row * row_bytes, row_bytes, cols, x, kind, R, T);
    }
    for (; row < last; row++) {
        ROWS_UNROLL for (int t = 0; t < T; t++) out[t] = y[t] + row;
        rows_tile(out, w + (size_t)row * row_bytes, row_bytes, cols, x, kind, 1, T);
    }
}

MOE_INLINE void rows_matmul(float *const *y, const void *w, int rows, int cols, int first, int last,
                            const void *const *xv, int num_tokens, int kind) {
    const float *x[MOE_MAX_TOKENS];
    for (int t = 0; t < num_tokens; t++) x[t] = (const float *)xv[t];
    if (last > rows) last = rows;
    for (int end; first < last; first = end) { /* all tokens over a few rows while those are in the nearest cache */
        end = last - first < ROWS_BLOCK ? last : first + ROWS_BLOCK;
        for (int t = 0; t < num_tokens; t += 4) {
            switch (num_tokens - t) {
            case 1: rows_range(y + t, w, cols, first, end, x + t, kind, 1); break;
            case 2: rows_range(y + t, w, cols, first, end, x + t, kind, 2); break;
            case 3: rows_range(y + t, w, cols, first, end, x + t, kind, 3); break;
            default: rows_range(y + t, w, cols, first, end, x + t, kind, 4); break;
            }
        }
    }
}

#if MOE_TIER_ID == MOE_SCALAR
MOE_INLINE void rows_dequantize(float *y, const void *weights, int cols, int row, int kind) {
    const char *w = (const char *)weights + (size_t)row * (size_t)cols * rows_width(kind);
    for (int c = 0; c < cols; c++) {
        const char *p = w + (size_t)c * rows_width(kind);
        uint16_t h;
        if (kind == ROWS_F32) {
            __builtin_memcpy(&y[c], p, 4);
        } else {
            __builtin_memcpy(&h, p, 2);
            y[c] = kind == ROWS_F16 ? moe_f16_f32(h) : moe_bf16_f32(h);
        }
    }
}
#define ROWS_DEQUANTIZE(id, kind) \
    static void dequantize_##id(float *y, const void *w, int cols, int row) { rows_dequantize(y, w, cols, row, kind); }
#define ROWS_DEQUANTIZE_FIELD(id) dequantize_##id
#else
#define ROWS_DEQUANTIZE(id, kind)
#define ROWS_DEQUANTIZE_FIELD(id) 0
#endif
#define ROWS_FUNCTIONS(id, kind)                                                                                     \
    static size_t strip_bytes_##id(int cols) { return (size_t)cols * rows_width(kind); }                             \
    static void matmul_##id(float *const *y, const void *w, int rows, int cols, int first, int last,                 \
                            const void *const *x, int num_tokens) {                                                  \
        rows_matmul(y, w, rows, cols, first, last, x, num_tokens, kind);                                             \
    }                                                                                                                \
    ROWS_DEQUANTIZE(id, kind)
#define ROWS_TABLE(id)                                                                                               \
    .activation = MOE_ACT_F32, .block_len = 1, .strip_rows = 1, .strip_bytes = strip_bytes_##id,                     \
    .matmul = matmul_##id, .dequantize_row = ROWS_DEQUANTIZE_FIELD(id)

ROWS_FUNCTIONS(f32, ROWS_F32)
ROWS_FUNCTIONS(f16, ROWS_F16)
ROWS_FUNCTIONS(bf16, ROWS_BF16)

MOE_EXPORT_LAYOUT(rows_f32, ROWS_TABLE(f32));
MOE_EXPORT_LAYOUT(rows_f16, ROWS_TABLE(f16));
MOE_EXPORT_LAYOUT(rows_bf16, ROWS_TABLE(bf16));
