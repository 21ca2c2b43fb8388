/* Helpers of the codecs that fill eight-row strips (native/layouts/strip8.h has the geometry): a codec unpacks one
 * storage block into plain codes and scales, the functions here put them where the strip wants them.
 *
 * This is the scalar tier's way, a row at a time, and the definition; the vector tiers take eight rows at once
 * (rows8.h, grid.h). */
#ifndef MOE_FORMAT_STRIP_H
#define MOE_FORMAT_STRIP_H
#include "tier.h"
#if MOE_TIER_ID == MOE_SCALAR
#define SCALAR_ONLY(...) __VA_ARGS__
#else
#define SCALAR_ONLY(...)
#endif

MOE_INLINE uint16_t get16(const uint8_t *p) { uint16_t v; __builtin_memcpy(&v, p, 2); return v; }
MOE_INLINE uint32_t get32(const uint8_t *p) { uint32_t v; __builtin_memcpy(&v, p, 4); return v; }
MOE_INLINE void put16(uint8_t *p, uint16_t v) { __builtin_memcpy(p, &v, 2); }
MOE_INLINE void put32(uint8_t *p, uint32_t v) { __builtin_memcpy(p, &v, 4); }
MOE_INLINE int finite16(uint16_t h) { return (h & 0x7c00) != 0x7c00; }
MOE_INLINE int finite32(uint32_t u) { return (u & 0x7f800000) != 0x7f800000; }

/* Thirty-two codes, one per byte, of row r into the code bytes of nib8 (128) or byte8 (256). */
MOE_INLINE void put_codes(uint8_t *code, int r, const uint8_t *q, int bits) {
    if (bits == 8)
        for (int g = 0; g < 8; g++) put32(code + 32 * g + 4 * r, get32(q + 4 * g));
    else
        for (int g = 0; g < 4; g++) put32(code + 32 * g + 4 * r, get32(q + 8 * g) | get32(q + 8 * g + 4) << 4);
}
/* Nibbles of n bytes: low ones to lo[n], high ones to hi[n]. */
MOE_INLINE void split_nibbles(uint8_t *lo, uint8_t *hi, const uint8_t *q, int n) {
    for (int j = 0; j < n; j++) lo[j] = q[j] & 15;
    for (int j = 0; j < n; j++) hi[j] = q[j] >> 4;
}
MOE_INLINE void clear(uint8_t *p, size_t n) { for (size_t i = 0; i < n; i++) p[i] = 0; }

/* ---- one float scale per span of 16 .. 128 columns, or one per row ---- */
/* A unit is one storage block: `spans` float scales of scale_bytes each (and as many fp16 minima), and cols codes. */
struct strip_unit {
    uint8_t scale[4][4]; /* spans used */
    uint8_t min[2];
    uint8_t code[128];
};
struct unit_spec {
    int cols;        /* columns per storage block: 32, 64 or 128 */
    int block_bytes;
    int spans;       /* float scales per block */
    int scale_bytes; /* of one float scale: 1, 2 or 4 */
    int min;         /* 1: an fp16 minimum per span (spans is 1) */
    int bits;        /* of a code in the strip */
    int zero;        /* code of absent rows */
};
typedef void (*unpack_unit_fn)(struct strip_unit *unit, const uint8_t *block);

MOE_INLINE void encode_units(struct unit_spec s, void *strip, const void *rows, size_t row_bytes, int num_rows,
                             int cols, unpack_unit_fn unpack) {
    const size_t span_bytes = 8 * (size_t)s.scale_bytes + (s.min ? 16 : 0), unit_bytes = span_bytes * (size_t)s.spans;
    const size_t used = (size_t)(cols / s.cols) * unit_bytes, code_bytes = 32 * (size_t)s.bits;
    uint8_t *scales = strip, *code = scales + moe_round64(used), *end = code + (size_t)(cols / 32) * code_bytes;
    struct strip_unit u = {0};
    clear(scales + used, moe_round64(used) - used);
    clear(end, moe_round64((size_t)(end - code)) - (size_t)(end - code));
    for (int r = 0; r < 8; r++) {
        const uint8_t *block = (const uint8_t *)rows + (size_t)r * row_bytes;
        if (r >= num_rows) {
            clear((uint8_t *)u.scale, sizeof u.scale);
            clear(u.min, 2);
            for (int c = 0; c < s.cols; c++) u.code[c] = (uint8_t)s.zero;
        }
        for (int i = 0; i < cols / s.cols; i++) {
            uint8_t *sc = scales + unit_bytes * (size_t)i, *out = code + code_bytes * (size_t)(s.cols / 32) * (size_t)i;
            if (r < num_rows) unpack(&u, block + (size_t)s.block_bytes * (size_t)i);
            for (int j = 0; j < s.spans; j++)
                for (int k = 0; k < s.scale_bytes; k++)
                    sc[span_bytes * (size_t)j + (size_t)(s.scale_bytes * r + k)] = u.scale[j][k];
            if (s.min) put16(sc + 8 * s.scale_bytes + 2 * r, get16(u.min));
            for (int p = 0; p < s.cols / 32; p++) put_codes(out + code_bytes * (size_t)p, r, u.code + 32 * p, s.bits);
        }
    }
}

/* ---- super-blocks: one fp16 scale per 256 columns, sub-scales and minima inside ---- */
struct strip_super {
    uint16_t d, dmin;
    int8_t sub[16];
    uint8_t min[16];
    uint8_t code[256];
};
struct super_spec {
    int block_bytes;
    int subs; /* sub-scales per super-block: 0, 8 or 16 */
    int min;  /* 1: fp16 dmin and as many uint8 minima */
    int bits;
    int zero; /* code of absent rows */
};
typedef void (*unpack_super_fn)(struct strip_super *super, const uint8_t *block);

MOE_INLINE void encode_supers(struct super_spec s, void *strip, const void *rows, size_t row_bytes, int num_rows,
                              int cols, unpack_super_fn unpack) {
    const size_t stride = 16 + 8 * (size_t)s.subs + (s.min ? 16 + 8 * (size_t)s.subs : 0),
                 used = (size_t)(cols / 256) * stride;
    const int sub_at = s.min ? 32 : 16, min_at = sub_at + 8 * s.subs;
    uint8_t *scales = strip, *code = scales + moe_round64(used);
    struct strip_super u;
    clear(scales + used, moe_round64(used) - used);
    for (int r = 0; r < 8; r++) {
        const uint8_t *block = (const uint8_t *)rows + (size_t)r * row_bytes;
        if (r >= num_rows) {
            clear((uint8_t *)&u, sizeof u);
            for (int c = 0; c < 256; c++) u.code[c] = (uint8_t)s.zero;
        }
        for (int i = 0; i < cols / 256; i++) {
            uint8_t *sc = scales + stride * (size_t)i, *out = code + 256 * (size_t)s.bits * (size_t)i;
            if (r < num_rows) unpack(&u, block + (size_t)s.block_bytes * (size_t)i);
            put16(sc + 2 * r, u.d);
            for (int j = 0; j < s.subs; j++) sc[sub_at + 8 * j + r] = (uint8_t)u.sub[j];
            if (s.min) {
                put16(sc + 16 + 2 * r, u.dmin);
                for (int j = 0; j < s.subs; j++) sc[min_at + 8 * j + r] = u.min[j];
            }
            for (int p = 0; p < 8; p++) put_codes(out + 32 * s.bits * p, r, u.code + 32 * p, s.bits);
        }
    }
}

/* Six-bit (scale, minimum) pairs of Q4_K and Q5_K: twelve bytes, eight pairs. */
MOE_INLINE void unpack_pairs6(struct strip_super *u, const uint8_t *b) {
    for (int j = 0; j < 4; j++) {
        u->sub[j] = (int8_t)(b[j] & 63);
        u->min[j] = b[j + 4] & 63;
        u->sub[j + 4] = (int8_t)((b[j + 8] & 15) | (b[j] >> 6) << 4);
        u->min[j + 4] = (uint8_t)(b[j + 8] >> 4 | (b[j + 4] >> 6) << 4);
    }
}
/* Index of the first block whose fp16 at one of two offsets is not finite (second < 0: only the first), or -1. */
MOE_INLINE int check_f16(const void *blocks, int count, size_t block_bytes, int first, int second) {
    const uint8_t *b = blocks;
    for (int i = 0; i < count; i++, b += block_bytes)
        if (!finite16(get16(b + first)) || (second >= 0 && !finite16(get16(b + second)))) return i;
    return -1;
}
#endif
