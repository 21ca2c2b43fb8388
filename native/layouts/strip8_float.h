/* Eight-row strips back to float32, for the arithmetic on float activations: the values of strip_dequantize_row, bit
 * for bit, as rows that the kernel of rows_f32 reads. Eight bytes of a row's codes become eight neighbouring columns,
 * so a load of 32 bytes is a small piece of each row and nothing is gathered. Included by strip8.h. */
#ifndef MOE_STRIP8_FLOAT_H
#define MOE_STRIP8_FLOAT_H
#if MOE_TIER_ID == MOE_AVX2 || MOE_TIER_ID == MOE_AVX512

/* The float scales of eight rows. */
MOE_INLINE __m256 strip_scales8(struct strip_spec s, const uint8_t *sc) {
    if (s.scale == STRIP_F32) return _mm256_loadu_ps((const float *)(const void *)sc);
    if (s.scale == STRIP_F16)
        return _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const void *)sc)),
                             _mm256_set1_ps(1.0f / (float)(1 << s.shift)));
    const __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)sc)), one = _mm256_set1_epi32(1);
    if (s.scale == STRIP_E8M0) { /* 2^(e-128): 0x00200000 << e where that is subnormal */
        __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), v);
        __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(v, one), 23);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(v, one)));
    }
    const __m256i e = _mm256_and_si256(_mm256_srli_epi32(v, 3), _mm256_set1_epi32(15)),
                  m = _mm256_and_si256(v, _mm256_set1_epi32(7));
    __m256i normal =
        _mm256_or_si256(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(119)), 23), _mm256_slli_epi32(m, 20));
    __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(m), _mm256_set1_ps(0.0009765625f));
    __m256 d = _mm256_blendv_ps(_mm256_castsi256_ps(normal), small,
                                _mm256_castsi256_ps(_mm256_cmpeq_epi32(e, _mm256_setzero_si256())));
    return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(v, _mm256_set1_epi32(0x7f))), d);
}
MOE_INLINE __m256 strip_bytes8(const uint8_t *p, int is_signed) {
    __m128i v = _mm_loadl_epi64((const void *)p);
    return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(v) : _mm256_cvtepu8_epi32(v));
}

/* Scale and minimum of eight rows at column `col` of a span: what a weight is multiplied with, and what is added. */
MOE_INLINE void strip_factors8(struct strip_spec s, float *scale, float *minimum, const uint8_t *sc, int col) {
    __m256 d = strip_scales8(s, sc);
    if (s.sub) d = _mm256_mul_ps(d, strip_bytes8(sc + strip_sub_at(s) + 8 * (col / s.sub), 1));
    _mm256_store_ps(scale, d);
    if (!s.min) return;
    __m256 m = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(sc + 8 * strip_scale_bytes(s))));
    if (s.span == 256) /* subtracted: the sum with the negative product is the same rounding */
        m = _mm256_xor_ps(_mm256_mul_ps(m, strip_bytes8(sc + strip_min_at(s) + 8 * (col / s.sub), 0)),
                          _mm256_set1_ps(-0.0f));
    _mm256_store_ps(minimum, m);
}

/* Columns 8g .. 8g + 7 of a block of 32: eight int8 of each row at w + 8 * strip_place[row]. */
static const int strip_place[8] = {0, 1, 4, 5, 2, 3, 6, 7};
MOE_INLINE void strip_codes8(struct strip_spec s, int8_t *w, const uint8_t *code, int g) {
    __m256i a, b;
    if (s.bits == 8) {
        a = _mm256_loadu_si256((const void *)(code + 64 * g));
        b = _mm256_loadu_si256((const void *)(code + 64 * g + 32));
    } else {
        const __m256i low = _mm256_set1_epi8(15), v = _mm256_loadu_si256((const void *)(code + 32 * g));
        a = _mm256_and_si256(v, low), b = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
        if (s.table) {
            const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)s.table));
            a = _mm256_shuffle_epi8(table, a), b = _mm256_shuffle_epi8(table, b);
        } else {
            const __m256i offset = _mm256_set1_epi8((char)s.offset);
            a = _mm256_sub_epi8(a, offset), b = _mm256_sub_epi8(b, offset);
        }
    }
    _mm256_store_si256((void *)w, _mm256_unpacklo_epi32(a, b));        /* rows 0 1 | 4 5 */
    _mm256_store_si256((void *)(w + 32), _mm256_unpackhi_epi32(a, b)); /* rows 2 3 | 6 7 */
}

MOE_INLINE void strip_dequantize_plain(struct strip_spec s, float *out, const uint8_t *strip, int cols) {
    const uint8_t *code = strip + strip_code_offset(s, cols);
    _Alignas(32) float scale[8], minimum[8];
    _Alignas(32) int8_t w[64];
    for (int col = 0; col < cols; col += 8) {
        const int in_span = s.span ? col % s.span : 0;
        if (col % 16 == 0)
            strip_factors8(s, scale, minimum, strip + (s.span ? col / s.span * strip_scale_stride(s) : 0), in_span);
        strip_codes8(s, w, code + (size_t)(col / 32) * (size_t)strip_code_stride(s), col / 8 % 4);
        for (int r = 0; r < 8; r++) {
            __m256 v =
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(w + 8 * strip_place[r]))));
            v = _mm256_mul_ps(_mm256_broadcast_ss(scale + r), v);
            if (s.min) v = _mm256_add_ps(v, _mm256_broadcast_ss(minimum + r));
            _mm256_storeu_ps(out + (size_t)r * (size_t)cols + col, v);
        }
    }
}
#endif

#if MOE_TIER_ID == MOE_AVX512
/* MXFP4 through bf16. A nibble looks up the bf16 of its doubled E2M1 value; the block's power of two is then an integer
 * added to the exponent field. Zeros have no exponent to add to and must stay zero: vptestmw against 0x7fff finds the
 * lanes that are not zero, and the zero-masked add writes the others as zero. Exact for exponents 2 .. 252; a strip
 * with another one (subnormal or infinite values) is decoded the plain way. */
MOE_INLINE int strip_e8m0_is_plain(const uint8_t *sc, int n) { /* n bytes, a multiple of 8; all in 2 .. 252? */
    __m128i bad = _mm_setzero_si128();
    for (int i = 0; i < n; i += 8) {
        __m128i v = _mm_sub_epi8(_mm_loadl_epi64((const void *)(sc + i)), _mm_set1_epi8(2)); /* 0 .. 250 are right */
        bad = _mm_or_si128(bad, _mm_subs_epu8(v, _mm_set1_epi8((char)250)));
    }
    return _mm_cvtsi128_si64(bad) == 0;
}
MOE_INLINE void strip_store_bf16(float *row, float *next, __m256i v) { /* eight columns of two rows */
    __m512i f = _mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16);
    _mm256_storeu_ps(row, _mm256_castsi256_ps(_mm512_castsi512_si256(f)));
    _mm256_storeu_ps(next, _mm256_castsi256_ps(_mm512_extracti64x4_epi64(f, 1)));
}
MOE_INLINE void strip_dequantize_mxfp4(struct strip_spec s, float *out, const uint8_t *strip, int cols) {
    /* bf16 of 0 1 2 3 4 6 8 12 and 0 -1 -2 -3 -4 -6 -8 -12, two to a dword */
    const __m512i table =
        _mm512_broadcast_i64x4(_mm256_setr_epi32(0x3f800000, 0x40404000, 0x40c04080, 0x41404100, (int)0xbf800000,
                                                 (int)0xc040c000, (int)0xc0c0c080, (int)0xc140c100));
    const __m512i magnitude = _mm512_set1_epi16(0x7fff), low = _mm512_set1_epi16(15);
    const uint8_t *code = strip + strip_code_offset(s, cols);
    const size_t n = (size_t)cols;
    for (int b = 0; b < cols / 32; b++, code += 128) {
        /* (e - 128) << 7 in 16 bits, eight lanes per row: rows 0 2 4 6 and 1 3 5 7 */
        __m512i rows = _mm512_sub_epi64(_mm512_cvtepu8_epi64(_mm_loadl_epi64((const void *)(strip + 8 * b))),
                                        _mm512_set1_epi64(128));
        rows = _mm512_and_si512(_mm512_slli_epi64(rows, 7), _mm512_set1_epi64(0xffff));
        rows = _mm512_or_si512(rows, _mm512_slli_epi64(rows, 16));
        rows = _mm512_or_si512(rows, _mm512_slli_epi64(rows, 32));
        const __m512i even = _mm512_unpacklo_epi64(rows, rows), odd = _mm512_unpackhi_epi64(rows, rows);
        for (int g = 0; g < 4; g++) {
            __m512i v = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(code + 32 * g)));
            __m512i a = _mm512_and_si512(v, low), c = _mm512_srli_epi16(v, 4);
            __m512i x = _mm512_permutexvar_epi16(_mm512_unpacklo_epi64(a, c), table);
            __m512i y = _mm512_permutexvar_epi16(_mm512_unpackhi_epi64(a, c), table);
            x = _mm512_maskz_add_epi16(_mm512_test_epi16_mask(x, magnitude), x, even);
            y = _mm512_maskz_add_epi16(_mm512_test_epi16_mask(y, magnitude), y, odd);
            float *at = out + 32 * b + 8 * g;
            strip_store_bf16(at, at + 2 * n, _mm512_castsi512_si256(x));
            strip_store_bf16(at + 4 * n, at + 6 * n, _mm512_extracti64x4_epi64(x, 1));
            strip_store_bf16(at + n, at + 3 * n, _mm512_castsi512_si256(y));
            strip_store_bf16(at + 5 * n, at + 7 * n, _mm512_extracti64x4_epi64(y, 1));
        }
    }
}
#endif

/* One strip to float32 [8][cols]. */
MOE_INLINE void strip_dequantize(struct strip_spec s, float *out, const void *strip, int cols) {
#if MOE_TIER_ID == MOE_AVX512
    if (s.scale == STRIP_E8M0 && strip_e8m0_is_plain(strip, cols / 32 * 8)) {
        strip_dequantize_mxfp4(s, out, strip, cols);
        return;
    }
#endif
#if MOE_TIER_ID == MOE_AVX2 || MOE_TIER_ID == MOE_AVX512
    strip_dequantize_plain(s, out, strip, cols);
#else
    for (int r = 0; r < 8; r++) strip_dequantize_row(s, out + (size_t)r * (size_t)cols, strip, cols, r);
#endif
}
#endif
