/* Helpers of the codecs that fill eight-row strips (native/layouts/strip8.h has the geometry). */
#ifndef MOE_FORMAT_STRIP_H
#define MOE_FORMAT_STRIP_H
#include "tier.h"

MOE_INLINE uint16_t get16(const uint8_t *p) { uint16_t v; __builtin_memcpy(&v, p, 2); return v; }
MOE_INLINE uint32_t get32(const uint8_t *p) { uint32_t v; __builtin_memcpy(&v, p, 4); return v; }
MOE_INLINE void put16(uint8_t *p, uint16_t v) { __builtin_memcpy(p, &v, 2); }
MOE_INLINE void put32(uint8_t *p, uint32_t v) { __builtin_memcpy(p, &v, 4); }
MOE_INLINE int finite16(uint16_t h) { return (h & 0x7c00) != 0x7c00; }

/* Sixteen bytes "low nibbles are elements 0..15, high nibbles 16..31" of row r into 128 code bytes of nib8: group g
 * takes columns 8g..8g+3 as low and 8g+4..8g+7 as high nibbles. */
MOE_INLINE void put_nib8(uint8_t *code, int r, const uint8_t *q) {
    for (int h = 0; h < 2; h++) { /* eight source bytes: columns 8h.. (low) and 16 + 8h.. (high) */
        uint32_t a = get32(q + 8 * h), b = get32(q + 8 * h + 4);
        put32(code + 32 * h + 4 * r, (a & 0x0f0f0f0f) | (b & 0x0f0f0f0f) << 4);
        put32(code + 32 * (h + 2) + 4 * r, (a >> 4 & 0x0f0f0f0f) | (b & 0xf0f0f0f0));
    }
}
MOE_INLINE void clear(uint8_t *p, size_t n) { for (size_t i = 0; i < n; i++) p[i] = 0; }
#endif
