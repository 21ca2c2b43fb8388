/* encode_strip and check_row of a grid format. Included by its codec after these are defined:
 *   BLOCK_BYTES, SUBS                                    bytes per 256 values, sub-scales per 256 values (8 or 16)
 *   uint16_t block_scale(block)                          bits of the fp16 scale
 *   void group32(word, sub, block, p)                    columns 32p..32p+31 of one row: four code words, SUBS / 8 subs
 *   WORDS_AT, WORDS                                      first byte and number of the 32-bit words that hold the rest
 *   void group32_rows8(word, sub, lanes, p)              AVX2: group32 of eight rows, from those words, lane = row
 * Absent rows: d = 0, sub-scales 0, code 0. */
#include "grid.h"

enum {
    SCALE_BYTES = 16 + 8 * SUBS, /* of a strip, per 256 columns */
    CODE_BYTES = 1024,
    SUBS32 = SUBS / 8
};

MOE_INLINE void encode_row(uint8_t *scales, uint8_t *code, int r, const uint8_t *row, int blocks) {
    for (int i = 0; i < blocks; i++, row += BLOCK_BYTES, scales += SCALE_BYTES) {
        put16(scales + 2 * r, block_scale(row));
        for (int p = 0; p < 8; p++, code += 128) {
            uint32_t word[4];
            uint8_t sub[SUBS32];
            group32(word, sub, row, p);
            for (int k = 0; k < SUBS32; k++) scales[16 + 8 * (SUBS32 * p + k) + r] = sub[k];
            for (int g = 0; g < 4; g++) put32(code + 32 * g + 4 * r, word[g]);
        }
    }
}

MOE_INLINE void absent_row(uint8_t *scales, uint8_t *code, int r, int blocks) {
    for (int i = 0; i < blocks; i++, scales += SCALE_BYTES) {
        put16(scales + 2 * r, 0);
        for (int k = 0; k < SUBS; k++) scales[16 + 8 * k + r] = 0;
        for (int g = 0; g < 32; g++, code += 32) put32(code + 4 * r, 0);
    }
}

#if MOE_TIER_ID == MOE_AVX2
MOE_INLINE void encode_rows8(uint8_t *scales, uint8_t *code, const uint8_t *rows, size_t row_bytes, int blocks) {
    __m256i lanes[WORDS];
    for (int i = 0; i < blocks; i++, rows += BLOCK_BYTES, scales += SCALE_BYTES) {
        for (int r = 0; r < 8; r++) put16(scales + 2 * r, block_scale(rows + (size_t)r * row_bytes));
        rows_to_lanes(lanes, rows + WORDS_AT, row_bytes, WORDS);
        _Pragma("GCC unroll 8")
        for (int p = 0; p < 8; p++, code += 128) {
            __m256i word[4], sub[SUBS32];
            group32_rows8(word, sub, lanes, p);
            for (int k = 0; k < SUBS32; k++) put_bytes8(scales + 16 + 8 * (SUBS32 * p + k), sub[k]);
            for (int g = 0; g < 4; g++) _mm256_storeu_si256((void *)(code + 32 * g), word[g]);
        }
    }
}
#endif

static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    const int blocks = cols / 256;
    const size_t used = (size_t)blocks * SCALE_BYTES;
    uint8_t *scales = (uint8_t *)strip, *code = scales + moe_round64(used);
    clear(scales + used, moe_round64(used) - used);
#if MOE_TIER_ID == MOE_AVX2
    if (num_rows == 8) {
        encode_rows8(scales, code, rows, row_bytes, blocks);
        return;
    }
#endif
    for (int r = 0; r < num_rows; r++)
        encode_row(scales, code, r, (const uint8_t *)rows + (size_t)r * row_bytes, blocks);
    for (int r = num_rows; r < 8; r++) absent_row(scales, code, r, blocks);
}

#if MOE_TIER_ID == MOE_SCALAR
static int check_row(const void *blocks, int cols) {
    const uint8_t *b = blocks;
    for (int i = 0; i < cols / 256; i++)
        if (!finite16(block_scale(b + BLOCK_BYTES * (size_t)i))) return i;
    return -1;
}
#endif
