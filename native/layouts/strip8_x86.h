/* What the AVX2 and the AVX-512 kernel of eight-row strips share: where they read, which activations, the row of
 * blocks. The including header has defined STRIPS (strips beside each other in a register), TILE_SETS (such registers
 * of rows at once in the tile, else one: R in the functions), strip_floats and strip_ints (one number per
 * row). strip8_run.h has what comes on top. */
#ifndef MOE_STRIP8_X86_H
#define MOE_STRIP8_X86_H
#include "strip8.h"
/* Code this far ahead, which runs into the next strip's scales by itself: first to L2, then to L1. */
enum { STRIP_AHEAD_L1 = 2048, STRIP_AHEAD_L2 = 8192 };
MOE_INLINE void strip_prefetch(const char *code) {
    _mm_prefetch(code + STRIP_AHEAD_L1, _MM_HINT_T0);
    _mm_prefetch(code + STRIP_AHEAD_L2, _MM_HINT_T1);
}
#define STRIP_UNROLL _Pragma("GCC unroll 16")
/* Fixes where a sum is updated. Without it gcc reassociates the adds, holds many products and spills them. */
#define STRIP_PIN(v) __asm__ volatile("" : "+x"(v))

/* Activations of the call: the parts lie at the same distances in every token. */
struct strip_x {
    const char *q[MOE_MAX_TOKENS], *size[MOE_MAX_TOKENS]; /* size: |q| */
    size_t d, sum16;
};
MOE_INLINE struct strip_x strip_x(struct strip_spec s, const void *const *x, int cols, int num_tokens) {
    struct strip_x v;
    struct moe_act_view a = moe_act_view(x[0], strip_activation(s), cols);
    for (int t = 0; t < num_tokens; t++) v.q[t] = v.size[t] = (const char *)x[t];
    v.d = (size_t)((const char *)a.d - v.q[0]);
    v.sum16 = (size_t)((const char *)a.sum16 - v.q[0]);
    return v;
}

/* Scales and codes of R * STRIPS strips from some column on. In the tile the codes are unpacked (strip_spec.unpacked),
 * those of all strips in code[0]. */
enum { MAX_STRIPS = STRIPS * TILE_SETS };
struct strip_at {
    const char *scale[MAX_STRIPS], *code[MAX_STRIPS];
};
MOE_INLINE struct strip_at strip_at(struct strip_spec s, const char *strip, int rows, int cols, int R) {
    struct strip_at p;
    for (int i = 0; i < STRIPS * R; i++) { /* past the last row: the first strip again */
        p.scale[i] = strip + (8 * i < rows ? (size_t)i * strip_size(s, cols) : 0);
        p.code[i] = p.scale[i] + strip_code_offset(s, cols);
    }
    return p;
}
MOE_INLINE void strip_next_code(struct strip_spec s, struct strip_at *p, int columns, int R) {
    if (s.unpacked) p->code[0] += columns / 32 * R * STRIP_UNPACKED_BYTES;
    for (int i = 0; i < STRIPS * R && !s.unpacked; i++) p->code[i] += columns / 32 * strip_code_stride(s);
}
MOE_INLINE void strip_next_scale(struct strip_spec s, struct strip_at *p, int spans, int R) {
    for (int i = 0; i < STRIPS * R; i++) p->scale[i] += spans * strip_scale_stride(s);
}

MOE_INLINE int32_t strip_load4(const char *p) {
    int32_t v;
    __builtin_memcpy(&v, p, 4);
    return v;
}
#endif
