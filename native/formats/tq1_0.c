/* tq1_0: 256 values of -1, 0, 1 in 54 bytes, five trits a byte.
 *
 *    0  48 bytes: 32 bytes of five trits (trit n of byte l is value 32 * n + l), then 16 bytes (160 + 16 * n + l)
 *   48  4 bytes of four trits (value 240 + 4 * n + l)
 *   52  fp16 d
 *   y = (t - 1) * d; trit n of byte b = ((b * 3^n mod 256) * 3) >> 8
 *
 * Produced by GGUF quantizers for ternary models. Layout nib8_tq (codes t, offset 1), lossless: 54 bytes become 130. */
#include "rows8.h"
#if MOE_TIER_ID == MOE_AVX512
MOE_FORMAT_SAME_AS(tq1_0, avx2, ROWS8_REASON);
#else
struct block { uint8_t q[48]; uint8_t tail[4]; uint8_t d[2]; };
_Static_assert(sizeof(struct block) == 54, "tq1_0 block");

#if MOE_TIER_ID == MOE_SCALAR
MOE_INLINE void trits(uint8_t *code, const uint8_t *q, int bytes, int count) {
    static const uint8_t power[5] = {1, 3, 9, 27, 81};
    for (int n = 0; n < count; n++)
        for (int l = 0; l < bytes; l++) code[bytes * n + l] = (uint8_t)((uint8_t)(q[l] * power[n]) * 3 >> 8);
}
static void unpack(struct strip_super *u, const uint8_t *block) {
    const struct block *b = (const void *)block;
    u->d = get16(b->d);
    trits(u->code, b->q, 32, 5);
    trits(u->code + 160, b->q + 32, 16, 5);
    trits(u->code + 240, b->tail, 4, 4);
}
#else
MOE_INLINE __m256i times3(__m256i q) { return _mm256_add_epi8(_mm256_add_epi8(q, q), q); }
/* q * 3 >> 8 of every byte: 1 from 86, 2 from 171. */
MOE_INLINE __m256i trit8(__m256i q) {
    const __m256i one = _mm256_set1_epi8(86), two = _mm256_set1_epi8((char)171);
    __m256i a = _mm256_cmpeq_epi8(_mm256_max_epu8(q, one), q), b = _mm256_cmpeq_epi8(_mm256_max_epu8(q, two), q);
    return _mm256_sub_epi8(_mm256_setzero_si256(), _mm256_add_epi8(a, b));
}
/* One trit of 4n columns, after which the next one is at hand. */
MOE_INLINE void put_trits(uint8_t *code, __m256i *q, int n) {
    for (int j = 0; j < n; j += 2) put_nibbles(code + 16 * j, trit8(q[j]), trit8(q[j + 1]));
    for (int j = 0; j < n; j++) q[j] = times3(q[j]);
}
MOE_INLINE void block8(uint8_t *scales, uint8_t *code, const uint8_t *p, size_t stride) {
    __m256i s[4], q[8];
    dwords4(s, p + 38, stride);
    put_high_half(scales, s[3]);
    dwords8(q, p, stride);
    for (int n = 0; n < 5; n++) put_trits(code + 128 * n, q, 8);
    dwords4(q, p + 32, stride);
    for (int n = 0; n < 5; n++) put_trits(code + 640 + 64 * n, q, 4);
    dwords4(s, p + 36, stride);
    q[0] = q[1] = s[3];
    q[1] = times3(q[1]); /* the second four columns are the next trit of the same bytes */
    for (int n = 0; n < 2; n++) {
        put_trits(code + 960 + 32 * n, q, 2);
        for (int j = 0; j < 2; j++) q[j] = times3(q[j]); /* two trits further */
    }
}
static const struct block absent = {.q = {[0 ... 47] = 128}, .tail = {128, 128, 128, 128}};
#endif
static void encode_strip(void *strip, const void *rows, size_t row_bytes, int num_rows, int cols) {
    ENCODE_SUPERS(.block_bytes = 54, .bits = 4, .zero = 1);
}
SCALAR_ONLY(static int check_row(const void *blocks, int cols) { return check_f16(blocks, cols / 256, 54, 52, -1); })

MOE_EXPORT_FORMAT(tq1_0, .version = 1, .block_len = 256, .block_bytes = 54, .layout = "nib8_tq",
                  .encode_strip = encode_strip, SCALAR_ONLY(.check_row = check_row));
#endif
