/* Included first by every file that is compiled once per tier (native/formats, native/layouts, native/ops). The build
 * sets MOE_TIER (the name) and MOE_TIER_ID. Such a file must end each tier branch with an EXPORT or a SAME_AS, so a
 * tier without an answer does not compile, and a reused one carries its reason. No global in such a file may need
 * run-time initialisation: the library loads on CPUs that cannot run the higher tiers. */
#ifndef MOE_TIER_H
#define MOE_TIER_H
#include "internal.h"
#define MOE_SCALAR 0
#define MOE_AVX2   1
#define MOE_AVX512 2
#define MOE_NEON   3
#ifndef MOE_TIER_ID
#error "this file is compiled once per tier by native/build.py, with MOE_TIER and MOE_TIER_ID set"
#endif
#if MOE_TIER_ID == MOE_SCALAR && defined(__AVX__)
#error "the scalar tier must be built for the baseline CPU; remove -march/-mavx from CFLAGS"
#endif
#if MOE_TIER_ID == MOE_AVX2 && defined(__AVX512F__)
#error "the avx2 tier must not see AVX-512 flags; remove -march from CFLAGS"
#endif
#ifdef __FAST_MATH__
#error "fast-math breaks the canonical arithmetic; remove it from CFLAGS"
#endif
#ifdef MOE_EMULATE_AVX512
#include "simde_avx512.h"
#elif MOE_TIER_ID == MOE_NEON
#include <arm_neon.h>
#elif MOE_TIER_ID != MOE_SCALAR
#include <immintrin.h>
#endif
/* A table's name is its C identifier; a name with a '-' is given after it and wins. */
#pragma GCC diagnostic ignored "-Woverride-init"
#define MOE_CAT_(a, b) a##b
#define MOE_CAT(a, b)  MOE_CAT_(a, b)
#define MOE_STR_(a)    #a
#define MOE_STR(a)     MOE_STR_(a)
#define MOE_INLINE     static inline __attribute__((always_inline))
/* moe_layout_<name>_<tier>, moe_format_<name>_<tier>, moe_ops_<name>_<tier> */
#define MOE_EXPORT_LAYOUT(id, ...) \
    const struct moe_layout MOE_CAT(moe_layout_##id##_, MOE_TIER) = { \
        .name = #id, .tier = MOE_STR(MOE_TIER), __VA_ARGS__}
#define MOE_LAYOUT_SAME_AS(id, other, reason) MOE_EXPORT_LAYOUT(id, .same_as = #other, .why = reason)
#define MOE_EXPORT_FORMAT(id, ...) \
    const struct moe_format MOE_CAT(moe_format_##id##_, MOE_TIER) = { \
        .name = #id, .tier = MOE_STR(MOE_TIER), __VA_ARGS__}
#define MOE_FORMAT_SAME_AS(id, other, reason) MOE_EXPORT_FORMAT(id, .same_as = #other, .why = reason)
#define MOE_EXPORT_OPS(id, ...) \
    const struct moe_##id##_ops MOE_CAT(moe_ops_##id##_, MOE_TIER) = {.tier = MOE_STR(MOE_TIER), __VA_ARGS__}
#endif
