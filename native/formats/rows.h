/* What the unquantized formats share: rows are copied as they are, a "scale" is the value itself. */
#ifndef MOE_FORMAT_ROWS_H
#define MOE_FORMAT_ROWS_H
#include "tier.h"

MOE_INLINE void rows_copy(void *out, const void *in, size_t bytes) {
    char *o = (char *)out;
    const char *p = (const char *)in;
    for (size_t i = 0; i < bytes; i++) o[i] = p[i];
}
MOE_INLINE void rows_put(void *blocks, int i, uint16_t h) { __builtin_memcpy((char *)blocks + 2 * (size_t)i, &h, 2); }

/* A strip of these layouts is one row. */
static inline void encode_32(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    (void)row_bytes, (void)num_rows;
    rows_copy(strip, rows, (size_t)cols * 4);
}
static inline void encode_16(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    (void)row_bytes, (void)num_rows;
    rows_copy(strip, rows, (size_t)cols * 2);
}

/* First value whose exponent field is all ones. */
static inline int check_f32(const void *blocks, int cols) {
    for (int c = 0; c < cols; c++) {
        uint32_t u;
        __builtin_memcpy(&u, (const char *)blocks + 4 * (size_t)c, 4);
        if ((u & 0x7f800000) == 0x7f800000) return c;
    }
    return -1;
}
MOE_INLINE int check_16(const void *blocks, int cols, uint16_t exponent) {
    for (int c = 0; c < cols; c++) {
        uint16_t h;
        __builtin_memcpy(&h, (const char *)blocks + 2 * (size_t)c, 2);
        if ((h & exponent) == exponent) return c;
    }
    return -1;
}
static inline int check_f16(const void *blocks, int cols) { return check_16(blocks, cols, 0x7c00); }
static inline int check_bf16(const void *blocks, int cols) { return check_16(blocks, cols, 0x7f80); }
#endif
