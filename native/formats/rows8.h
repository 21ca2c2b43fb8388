/* Codecs of the AVX2 tier: one block of all eight rows of a strip at once, a row per 32-bit lane, which is how a strip
 * stores them. dwords4 turns sixteen bytes of eight rows into four such registers; everything else is lane by lane.
 *
 * A codec gives a block8 function: the storage block at p and the seven that lie `stride` bytes further on each, to the
 * scales and codes of that block in the strip. It reads these blocks and nothing beside them.
 *
 * The AVX-512 tier reuses these codecs: compiled for it they run at 0.9 to 1.2 times the speed. */
#ifndef MOE_FORMAT_ROWS8_H
#define MOE_FORMAT_ROWS8_H
#include "strip.h"
#define ROWS8_REASON "a strip is eight rows, which is one AVX2 register per four bytes of a row; wider ones gain little"
#if MOE_TIER_ID == MOE_AVX2
typedef void (*block8_fn)(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride);

/* ---- lanes ---- */
/* t[k]: bytes 4k .. 4k + 3 at p, p + stride ... p + 7 * stride. What is not used costs nothing. */
MOE_INLINE void dwords4(__m256i *t, const uint8_t *p, size_t stride) {
    __m256i v[4];
    for (size_t j = 0; j < 4; j++) {
        __m128i low = _mm_loadu_si128((const void *)(p + j * stride));
        __m128i high = _mm_loadu_si128((const void *)(p + (j + 4) * stride));
        v[j] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    }
    __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
    __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    t[0] = _mm256_unpacklo_epi64(a, c);
    t[1] = _mm256_unpackhi_epi64(a, c);
    t[2] = _mm256_unpacklo_epi64(b, d);
    t[3] = _mm256_unpackhi_epi64(b, d);
}
MOE_INLINE void dwords8(__m256i *t, const uint8_t *p, size_t stride) {
    dwords4(t, p, stride);
    dwords4(t + 4, p + 16, stride);
}
/* The bits of every byte that `mask` keeps, after a shift of the lane by n to the right (n < 0: to the left). */
MOE_INLINE __m256i bits8(__m256i v, int n, int mask) {
    __m256i moved = n > 0 ? _mm256_srli_epi32(v, n) : n < 0 ? _mm256_slli_epi32(v, -n) : v;
    return _mm256_and_si256(moved, _mm256_set1_epi8((char)mask));
}
MOE_INLINE __m256i or3(__m256i a, __m256i b, __m256i c) { return _mm256_or_si256(_mm256_or_si256(a, b), c); }
/* A byte for each of bits 4g .. 4g + 3 of a lane: 0xff where it is set. */
MOE_INLINE __m256i spread4(__m256i v, int g) {
    const __m256i first = _mm256_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12,
                                           0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    const __m256i bit = _mm256_set1_epi32(g & 1 ? (int)0x80402010 : 0x08040201);
    __m256i b = _mm256_shuffle_epi8(v, _mm256_add_epi8(first, _mm256_set1_epi8((char)(g / 2))));
    return _mm256_cmpeq_epi8(_mm256_and_si256(b, bit), bit);
}

/* ---- codes ---- */
MOE_INLINE void put_lanes(uint8_t *out, __m256i v) { _mm256_storeu_si256((void *)out, v); }
/* Eight columns of nib8: a holds columns 0..3, b columns 4..7, a code below 16 in every byte. */
MOE_INLINE void put_nibbles(uint8_t *out, __m256i a, __m256i b) {
    put_lanes(out, _mm256_or_si256(a, _mm256_slli_epi32(b, 4)));
}
/* Bytes of two nibbles each: the low ones of a and b are eight columns, the high ones eight others. */
MOE_INLINE void put_nibble_pair(uint8_t *low, uint8_t *high, __m256i a, __m256i b) {
    put_lanes(low, _mm256_or_si256(bits8(a, 0, 0x0f), bits8(b, -4, 0xf0)));
    put_lanes(high, _mm256_or_si256(bits8(a, 4, 0x0f), bits8(b, 0, 0xf0)));
}
/* Bytes of four codes of two bits each: bits 2k and 2k + 1 of a and b are eight columns of the block of 32 that starts
 * at code + 128 * k. */
MOE_INLINE void put_pairs2(uint8_t *code, __m256i a, __m256i b) {
    put_nibble_pair(code, code + 256, bits8(a, 0, 0x33), bits8(b, 0, 0x33));
    put_nibble_pair(code + 128, code + 384, bits8(a, 2, 0x33), bits8(b, 2, 0x33));
}
/* 32 columns from sixteen bytes: low nibbles are columns 0..15, high nibbles 16..31. */
MOE_INLINE void put_nib8_block(uint8_t *code, const uint8_t *q, size_t stride) {
    __m256i t[4];
    dwords4(t, q, stride);
    put_nibble_pair(code, code + 64, t[0], t[1]);
    put_nibble_pair(code + 32, code + 96, t[2], t[3]);
}

/* ---- scales ---- */
/* Byte k of the eight rows to out + 8k, k = 0..3. */
MOE_INLINE __m256i by_byte(__m256i v) {
    const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
                                          0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(v, pick), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
MOE_INLINE void put_bytes4(uint8_t *out, __m256i v) { put_lanes(out, by_byte(v)); }
MOE_INLINE void put_byte(uint8_t *out, __m256i v) { _mm_storel_epi64((void *)out, _mm256_castsi256_si128(by_byte(v))); }
/* Low halves of the eight rows, then high halves. */
MOE_INLINE __m256i by_half(__m256i v) {
    const __m256i pick = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
                                          0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(v, pick), _MM_SHUFFLE(3, 1, 2, 0));
}
MOE_INLINE void put_halves(uint8_t *out, __m256i v) { put_lanes(out, by_half(v)); }
MOE_INLINE void put_low_half(uint8_t *out, __m256i v) {
    _mm_storeu_si128((void *)out, _mm256_castsi256_si128(by_half(v)));
}
MOE_INLINE void put_high_half(uint8_t *out, __m256i v) { put_low_half(out, _mm256_srli_epi32(v, 16)); }

/* unpack_pairs6 of eight rows: s[0..2] are the twelve bytes. Eight sub-scales, then eight minima. */
MOE_INLINE void put_pairs6(uint8_t *sub, uint8_t *min, const __m256i *s) {
    put_bytes4(sub, bits8(s[0], 0, 63));
    put_bytes4(sub + 32, _mm256_or_si256(bits8(s[2], 0, 0x0f), bits8(s[0], 2, 0x30)));
    put_bytes4(min, bits8(s[1], 0, 63));
    put_bytes4(min + 32, _mm256_or_si256(bits8(s[2], 4, 0x0f), bits8(s[1], 2, 0x30)));
}

/* ---- strips ---- */
/* `absent` is a storage block of zero weights with zero scales, which stands for rows that are not there. */
MOE_INLINE void encode_blocks8(int block_cols, size_t block_bytes, size_t scale_bytes, size_t code_bytes, void *strip,
                               const void *rows, size_t row_bytes, int num_rows, int cols, const void *absent,
                               block8_fn block8) {
    const size_t blocks = (size_t)(cols / block_cols), used = blocks * scale_bytes, coded = blocks * code_bytes;
    uint8_t *scales = strip, *code = scales + moe_round64(used);
    const uint8_t *p = rows;
    uint8_t few[8 * 256]; /* the last rows of a matrix, a block at a time, filled up to eight */
    clear(scales + used, moe_round64(used) - used);
    clear(code + coded, moe_round64(coded) - coded);
    if (num_rows == 8) {
        for (size_t i = 0; i < blocks; i++, p += block_bytes)
            block8(scales + scale_bytes * i, code + code_bytes * i, p, row_bytes);
        return;
    }
    for (int r = num_rows; r < 8; r++) __builtin_memcpy(few + block_bytes * (size_t)r, absent, block_bytes);
    for (size_t i = 0; i < blocks; i++, p += block_bytes) {
        for (int r = 0; r < num_rows; r++)
            __builtin_memcpy(few + block_bytes * (size_t)r, p + row_bytes * (size_t)r, block_bytes);
        block8(scales + scale_bytes * i, code + code_bytes * i, few, block_bytes);
    }
}
MOE_INLINE void encode_units8(struct unit_spec s, void *strip, const void *rows, size_t row_bytes, int num_rows,
                              int cols, const void *absent, block8_fn block8) {
    encode_blocks8(s.cols, (size_t)s.block_bytes, (size_t)(s.spans * (8 * s.scale_bytes + 16 * s.min)),
                   (size_t)(s.cols * s.bits), strip, rows, row_bytes, num_rows, cols, absent, block8);
}
MOE_INLINE void encode_supers8(struct super_spec s, void *strip, const void *rows, size_t row_bytes, int num_rows,
                               int cols, const void *absent, block8_fn block8) {
    encode_blocks8(256, (size_t)s.block_bytes, (size_t)((s.min + 1) * (16 + 8 * s.subs)), (size_t)(256 * s.bits), strip,
                   rows, row_bytes, num_rows, cols, absent, block8);
}
#elif MOE_TIER_ID != MOE_SCALAR && MOE_TIER_ID != MOE_AVX512
#error "rows8.h: no codec for this tier; write one or state MOE_FORMAT_SAME_AS with a reason"
#endif

/* The body of encode_strip, whose parameters they name: the fields of a unit_spec or super_spec. The scalar tier needs
 * `unpack`, the AVX2 tier `block8` and `absent`. */
#if MOE_TIER_ID == MOE_SCALAR
#define ENCODE_UNITS(...)                                                                                          \
    encode_units((struct unit_spec){__VA_ARGS__}, strip, rows, row_bytes, num_rows, cols, unpack)
#define ENCODE_SUPERS(...)                                                                                         \
    encode_supers((struct super_spec){__VA_ARGS__}, strip, rows, row_bytes, num_rows, cols, unpack)
#else
#define ENCODE_UNITS(...)                                                                                          \
    encode_units8((struct unit_spec){__VA_ARGS__}, strip, rows, row_bytes, num_rows, cols, &absent, block8)
#define ENCODE_SUPERS(...)                                                                                         \
    encode_supers8((struct super_spec){__VA_ARGS__}, strip, rows, row_bytes, num_rows, cols, &absent, block8)
#endif
#endif
