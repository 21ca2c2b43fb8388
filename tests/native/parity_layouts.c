/* Codecs and layout kernels. The blocks that feed them are found without knowing any format: random bytes that the
 * format's own check_row accepts, some of them chosen for moderate weights, some with every byte pushed to an
 * extreme. */
#include "parity.h"

enum {
    MAX_ROWS = PARITY_SMALL ? 17 : 33, /* 33: five strips, more than one pass of every tile */
    MAX_COLS = 2048,
    MAX_BLOCK_BYTES = 1024,
    TOKENS = MOE_MAX_TOKENS,
    STORAGE_BYTES = 1 << 19,
    STRIPS_BYTES = 1 << 19,
    ACT_BYTES = 8192 + 64,
    POOL = 16,
};
enum data_kind { MODERATE, RANDOM, EXTREME, QUANTIZED, NUM_KINDS };
static const char *const kind_label[] = {"moderate data, cols", "random data, cols", "extreme data, cols",
                                         "quantized data, cols"};
#if PARITY_SMALL
static const int cols_list[] = {32, 96, 512};
static const int rows_list[] = {9};
static const int tokens_list[] = {1, 2, 3, 8};
enum { LAST_KIND = QUANTIZED, TRIES = 60 };
#else
static const int cols_list[] = {1, 17, 32, 64, 96, 100, 256, 512, 768, 1536, 2048};
static const int rows_list[] = {1, 7, 8, 9, 17, 33};
static const int tokens_list[] = {1, 2, 3, 4, 5, 6, 7, 8};
enum { LAST_KIND = QUANTIZED, TRIES = 200 };
#endif
#define LENGTH(a) ((int)(sizeof(a) / sizeof(a)[0]))

static _Alignas(64) unsigned char storage[STORAGE_BYTES]; /* rows end where it ends, so a fence can follow them */
static _Alignas(64) unsigned char strips_want[STRIPS_BYTES + 64], strips_got[STRIPS_BYTES + 64];
static _Alignas(64) unsigned char acts[TOKENS][ACT_BYTES];
static _Alignas(64) unsigned char pool[POOL][MAX_BLOCK_BYTES];
static float x_rows[TOKENS][MAX_COLS], one_row[MAX_COLS], want[TOKENS][MAX_ROWS];
static float out[TOKENS][MAX_ROWS + 2 * PARITY_GUARD + 1];
static double magnitude[TOKENS][MAX_ROWS], exact[TOKENS][MAX_ROWS];

static const struct moe_layout *layout_of(struct parity *p, int tier, const char *name) {
    const char *error;
    struct moe_ctx ctx = {.tier = tier};
    const struct moe_layout *l = moe_select_layout(&ctx, name, &error);
    if (!l) parity_fail(p, error);
    return l;
}
static const struct moe_format *format_of(struct parity *p, int tier, const char *name) {
    const char *error;
    struct moe_ctx ctx = {.tier = tier};
    const struct moe_format *f = moe_select_format(&ctx, name, &error);
    if (!f) parity_fail(p, error);
    return f;
}

/* Why these two cannot be tested together, or NULL. */
static const char *mismatch(const struct moe_format *f, const struct moe_layout *l) {
    if (f->block_len < 1 || f->block_bytes < 1 || f->row_extra_bytes < 0 ||
        f->block_bytes + f->row_extra_bytes > MAX_BLOCK_BYTES)
        return "block size out of range";
    if (l->strip_rows != 1 && l->strip_rows != 8) return "strip_rows is neither 1 nor 8";
    if (l->activation < MOE_ACT_F32 || l->activation >= MOE_NUM_ACT) return "unknown activation form";
    if (l->block_len % f->block_len && f->block_len % l->block_len) return "block_len of format and layout do not fit";
    return 0;
}
/* Long rows once: they differ from the others in nothing but their length. */
static int wanted(int kind, int cols) { return cols <= 768 || kind == MODERATE; }
static int fits(const struct moe_format *f, const struct moe_layout *l, int cols) {
    return cols % f->block_len == 0 && cols % l->block_len == 0 &&
           (l->activation == MOE_ACT_F32 || cols % moe_act_block(l->activation) == 0);
}
static size_t row_bytes_of(const struct moe_format *f, int cols) {
    return (size_t)(cols / f->block_len) * (size_t)f->block_bytes + (size_t)f->row_extra_bytes;
}

/* ---- storage blocks: each is a row of one block, with the bytes behind the blocks if the format has any ---- */
static int unit_bytes(const struct moe_format *f) { return f->block_bytes + f->row_extra_bytes; }
static int finite_block(const struct moe_format *f, const void *block) {
    return !f->check_row || f->check_row(block, f->block_len) < 0;
}

static void random_block(struct parity *p, const struct moe_format *f, unsigned char *block) {
    for (int tries = 0; tries < 1000; tries++) {
        for (int i = 0; i < unit_bytes(f); i++) block[i] = (unsigned char)parity_u32(p);
        if (finite_block(f, block)) return;
    }
    __builtin_memset(block, 0, (size_t)unit_bytes(f));
}

/* Largest |weight| of a block, through the scalar codec and the layout's own decoder. */
static float block_magnitude(const struct moe_format *f, const struct moe_layout *l, const unsigned char *block) {
    int span = f->block_len > l->block_len ? f->block_len : l->block_len;
    static _Alignas(64) unsigned char row[MAX_COLS * 4];
    float most = 0;
    if (!l->dequantize_row || span > MAX_COLS || row_bytes_of(f, span) > sizeof row) return 1;
    for (int i = 0; i < span / f->block_len; i++)
        __builtin_memcpy(row + i * f->block_bytes, block, (size_t)unit_bytes(f));
    f->encode_strip(strips_got, row, row_bytes_of(f, span), 1, span);
    l->dequantize_row(one_row, strips_got, span, 0);
    for (int i = 0; i < span; i++) {
        float a = one_row[i] < 0 ? -one_row[i] : one_row[i];
        if (!(a <= most)) most = a;
    }
    return most;
}

static void fill_pool(struct parity *p, const struct moe_format *f, const struct moe_layout *l, int kind) {
    static const unsigned char extremes[] = {0x00, 0xff, 0x80, 0x7f, 0x01, 0xf0, 0x0f, 0x81};
    for (int b = 0; b < POOL; b++) {
        unsigned char *block = pool[b];
        random_block(p, f, block);
        for (int tries = 0; kind != RANDOM && tries < TRIES; tries++) {
            float most = block_magnitude(f, l, block);
            if (most > 1e-4f && most < 256.0f) break;
            random_block(p, f, block);
        }
        for (int i = 0; kind == EXTREME && i < unit_bytes(f); i++) { /* as far as the scales stay finite */
            unsigned char kept = block[i];
            block[i] = extremes[b % LENGTH(extremes)];
            if (!finite_block(f, block)) block[i] = kept;
        }
    }
}

/* MAX_ROWS storage rows that end at the end of `storage`; returns row 0. */
static unsigned char *fill_rows(struct parity *p, const struct moe_format *f, int kind, int cols) {
    size_t row_bytes = row_bytes_of(f, cols);
    unsigned char *rows = storage + STORAGE_BYTES - MAX_ROWS * row_bytes;
    for (int r = 0; r < MAX_ROWS; r++) {
        unsigned char *row = rows + (size_t)r * row_bytes;
        if (kind == QUANTIZED) {
            for (int c = 0; c < cols; c++) one_row[c] = r == 3 ? 0.0f : parity_unit(p) * parity_unit(p);
            __builtin_memset(strips_got, 0x5a, row_bytes); /* over two fillings: every byte of the row is written */
            __builtin_memset(row, 0xa5, row_bytes);
            f->quantize_row(strips_got, one_row, cols);
            f->quantize_row(row, one_row, cols);
            parity_bytes(p, row, strips_got, row_bytes); /* into the hash: quantizers agree between machines */
        } else {
            for (int b = 0; b < cols / f->block_len; b++)
                __builtin_memcpy(row + b * f->block_bytes, pool[parity_u32(p) % POOL], (size_t)unit_bytes(f));
        }
    }
    return rows;
}

static void encode_rows(unsigned char *strips, const struct moe_format *f, const struct moe_layout *l,
                        const unsigned char *rows_in, int rows, int cols) {
    size_t row_bytes = row_bytes_of(f, cols), strip_bytes = l->strip_bytes(cols);
    for (int r = 0; r < rows; r += l->strip_rows, strips += strip_bytes)
        f->encode_strip(strips, rows_in + (size_t)r * row_bytes, row_bytes,
                        rows - r < l->strip_rows ? rows - r : l->strip_rows, cols);
}

/* ---- codecs ---- */
static void check_encode(struct parity *p, const struct moe_format *ref, const struct moe_format *f,
                         const struct moe_layout *l, int kind, int cols) {
    size_t row_bytes = row_bytes_of(ref, cols), n = l->strip_bytes(cols);
    if (n > STRIPS_BYTES || MAX_ROWS * row_bytes > STORAGE_BYTES) {
        parity_fail(p, "strip or rows too large for the test");
        return;
    }
    unsigned char *rows = fill_rows(p, ref, kind, cols);
    for (int num_rows = 1; num_rows <= l->strip_rows; num_rows++) {
        unsigned char *in = rows + (size_t)(MAX_ROWS - num_rows) * row_bytes;
        parity_where(p, kind_label[kind], cols, "rows", num_rows, 0, 0);
        __builtin_memset(strips_want, 0x5a, n);
        __builtin_memset(strips_got, 0xa5, n + 64);
        ref->encode_strip(strips_want, in, row_bytes, num_rows, cols);
        PARITY_FENCE(strips_got + n, 64);
        f->encode_strip(strips_got, in, row_bytes, num_rows, cols);
        PARITY_UNFENCE(strips_got + n, 64);
        parity_bytes(p, strips_got, strips_want, n);
        for (int i = 0; i < 64; i++)
            if (strips_got[n + (size_t)i] != 0xa5) parity_fail(p, "wrote past the strip");
    }
}

/* ---- formats whose rows do not stand alone: a whole matrix at a time, activations float32 ---- */
enum { GROUP_STRIPS = 3, GROUP_MAX_ROWS = 96 };
static const int group_cols[] = {32, 96, 544};
static float group_want[TOKENS][GROUP_MAX_ROWS], group_out[TOKENS][GROUP_MAX_ROWS + 2 * PARITY_GUARD];

static const char *group_mismatch(const struct moe_format *f, const struct moe_layout *l) {
    if (!l->scattered || l->activation != MOE_ACT_F32) return "no scattered layout of float32 activations";
    if (l->strip_rows != f->group_rows || f->group_rows * GROUP_STRIPS > GROUP_MAX_ROWS)
        return "group_rows out of range";
    return f->quantize_group && f->check_group ? 0 : "the scalar codec table has an empty slot";
}

/* A matrix of GROUP_STRIPS groups: quantized numbers with random codes in front of them. Returns its bytes. */
static size_t group_matrix(struct parity *p, const struct moe_format *f, int cols) {
    static float x[GROUP_MAX_ROWS * MAX_COLS];
    int rows = f->group_rows * GROUP_STRIPS;
    size_t bytes = (size_t)rows * row_bytes_of(f, cols);
    for (int i = 0; i < rows * cols; i++) x[i] = parity_unit(p) * (i % 7 ? 1.0f : 0.03f);
    for (int g = 0; g < GROUP_STRIPS; g++) f->quantize_group(storage, x, rows, cols, g);
    for (size_t i = 0; i < bytes / 2; i++) storage[i] = (unsigned char)parity_u32(p);
    for (int g = 0; g < GROUP_STRIPS; g++)
        if (f->check_group(storage, rows, cols, g) >= 0) parity_fail(p, "a quantized scale is not finite");
    return bytes;
}

static void encode_groups(unsigned char *strips, const struct moe_format *f, const struct moe_layout *l, int cols) {
    int rows = f->group_rows * GROUP_STRIPS;
    for (int g = 0; g < GROUP_STRIPS; g++)
        f->encode_group(strips + (size_t)g * l->strip_bytes(cols), storage, rows, cols, g);
}

static int check_group_format(struct parity *p, const struct moe_format *ref, const struct moe_format *f,
                              const struct moe_layout *l) {
    const char *why = group_mismatch(ref, l);
    if (why) { parity_fail(p, why); return 0; }
    for (int c = 0; c < LENGTH(group_cols); c++) {
        size_t n = GROUP_STRIPS * l->strip_bytes(group_cols[c]);
        if (group_matrix(p, ref, group_cols[c]) > STORAGE_BYTES || n > STRIPS_BYTES) {
            parity_fail(p, "too large for the test");
            return 0;
        }
        parity_where(p, "groups, cols", group_cols[c], 0, 0, 0, 0);
        __builtin_memset(strips_want, 0x5a, n);
        __builtin_memset(strips_got, 0xa5, n + 64);
        encode_groups(strips_want, ref, l, group_cols[c]);
        encode_groups(strips_got, f, l, group_cols[c]);
        parity_bytes(p, strips_got, strips_want, n);
        for (int i = 0; i < 64; i++)
            if (strips_got[n + (size_t)i] != 0xa5) parity_fail(p, "wrote past the strips");
    }
    return LENGTH(group_cols);
}

static float activation_value(struct parity *p, int token, int c);

/* A strip to float32 against the scalar tier's decoder, row by row. */
static void check_floats(struct parity *p, const struct moe_layout *ref, const struct moe_layout *l,
                         const unsigned char *strip, int cols) {
    static float decoded[32 * MAX_COLS + 2 * PARITY_GUARD];
    float *at = decoded + PARITY_GUARD;
    if (!l->dequantize_strip && l->strip_rows == 1) return;
    if (!l->dequantize_strip || !ref->dequantize_row || l->strip_rows > 32) {
        parity_fail(p, "strips cannot be decoded to float32");
        return;
    }
    parity_poison(at, (size_t)l->strip_rows * (size_t)cols);
    l->dequantize_strip(at, strip, cols);
    parity_untouched(p, decoded, PARITY_GUARD, "wrote before the decoded strip");
    parity_untouched(p, at + l->strip_rows * cols, PARITY_GUARD, "wrote past the decoded strip");
    for (int r = 0; r < l->strip_rows; r++) {
        ref->dequantize_row(one_row, strip, cols, r);
        parity_words(p, (const uint32_t *)(const void *)(at + r * cols), (const uint32_t *)(const void *)one_row,
                     (size_t)cols);
    }
}

/* The reference is the scalar kernel on one token at a time. */
static int check_group_layout(struct parity *p, const struct moe_layout *ref, const struct moe_layout *l,
                              const struct moe_format *f) {
    const char *why = group_mismatch(f, ref);
    if (why) { parity_fail(p, why); return 0; }
    for (int c = 0; c < LENGTH(group_cols); c++) {
        const void *x[TOKENS];
        int cols = group_cols[c], rows = f->group_rows * GROUP_STRIPS;
        group_matrix(p, f, cols);
        encode_groups(strips_got, f, ref, cols);
        check_floats(p, ref, l, strips_got, cols);
        for (int t = 0; t < TOKENS; t++) {
            float *y = group_want[t];
            for (int i = 0; i < cols; i++) x_rows[t][i] = activation_value(p, t, i);
            x[t] = x_rows[t];
            ref->matmul(&y, strips_got, rows, cols, 0, GROUP_STRIPS, x + t, 1);
        }
        for (int k = 0; k < LENGTH(tokens_list); k++) {
            float *y[TOKENS];
            parity_where(p, "groups, cols", cols, "tokens", tokens_list[k], 0, 0);
            for (int t = 0; t < tokens_list[k]; t++) parity_poison(y[t] = group_out[t] + PARITY_GUARD, (size_t)rows);
            l->matmul(y, strips_got, rows, cols, 1, GROUP_STRIPS, x, tokens_list[k]); /* as threads share a matrix */
            l->matmul(y, strips_got, rows, cols, 0, 1, x, tokens_list[k]);
            for (int t = 0; t < tokens_list[k]; t++) parity_floats(p, y[t], group_want[t], (size_t)rows);
        }
    }
    return LENGTH(group_cols);
}

void parity_formats(struct parity *p) {
    for (int i = 0; i < moe_format_count(); i++) {
        const struct moe_format *table = moe_format_at(i);
        if (!moe_same_name(table->tier, p->tier)) continue;
        parity_begin(p, "format", table->name);
        parity_reused(p, table->same_as, table->why);
        const struct moe_format *f = format_of(p, p->ctx.tier, table->name), *ref = format_of(p, 0, table->name);
        const struct moe_layout *l = ref ? layout_of(p, 0, ref->layout) : 0;
        const char *why = l && !ref->group_rows ? mismatch(ref, l) : 0;
        if (why) parity_fail(p, why);
        if (f && ref &&
            (f->version != ref->version || f->block_len != ref->block_len || f->block_bytes != ref->block_bytes ||
             f->row_extra_bytes != ref->row_extra_bytes || !moe_same_name(f->layout, ref->layout)))
            parity_fail(p, "the tiers describe the format differently");
        int tested = f && l && ref->group_rows ? check_group_format(p, ref, f, l) : 0;
        for (int kind = 0; f && l && !why && !ref->group_rows && kind <= LAST_KIND; kind++) {
            if (kind == QUANTIZED && !ref->quantize_row) continue;
            if (kind != QUANTIZED) fill_pool(p, ref, l, kind);
            for (int c = 0; c < LENGTH(cols_list); c++)
                if (wanted(kind, cols_list[c]) && fits(ref, l, cols_list[c]))
                    check_encode(p, ref, f, l, kind, cols_list[c]), tested++;
        }
        if (f && l && !why && !tested) parity_fail(p, "no row length fits");
        parity_end(p);
    }
}

/* ---- kernels ---- */
static float activation_value(struct parity *p, int token, int c) {
    float u = parity_unit(p);
    switch (token) {
    case 1: return 0.75f;                          /* every code +127 */
    case 2: return c & 1 ? -3.0f : 3.0f;
    case 3: return 0.0f;
    case 4: return c % 37 == 5 ? 900.0f : u;       /* outliers */
    case 5: return u * 1e-38f;                     /* subnormal scales */
    case 6: return u * 1e4f;
    case 7: return -1.0f;                          /* every code -127 */
    default: return u;
    }
}

/* Returns the kernel's pointer to the activations of one token, its last byte followed by a fence. */
static const void *activation(struct parity *p, const struct moe_layout *l, int token, int cols) {
    unsigned char *act = acts[token];
    size_t block = (size_t)moe_act_block(l->activation), n = (size_t)cols;
    size_t bytes = l->activation == MOE_ACT_F32 ? 4 * n
                                                : moe_round64(n) + moe_round64(n / block * 4) +
                                                      moe_round64(n / 16 * 2) + moe_round64(n / 32 * 4);
    for (int c = 0; c < cols; c++) x_rows[token][c] = activation_value(p, token, c);
    PARITY_UNFENCE(act, ACT_BYTES);
    if (l->activation == MOE_ACT_F32) __builtin_memcpy(act, x_rows[token], bytes);
    else
        p->vec_scalar->quantize_q8(act, x_rows[token], cols,
                                   block == 256 ? MOE_ACT_Q8_256 : MOE_ACT_Q8_32); /* unrotated: keeps the extremes */
    PARITY_FENCE(act + bytes, ACT_BYTES - bytes);
    return act;
}

/* The scalar kernel against double: same weights (its own decoder) and the same activations. */
static void check_against_double(struct parity *p, const struct moe_layout *l, const void *const *x, int cols) {
    size_t strip_bytes = l->strip_bytes(cols);
    double difference = 0, size = 0;
    for (int r = 0; r < MAX_ROWS; r++) {
        l->dequantize_row(one_row, strips_want + (size_t)(r / l->strip_rows) * strip_bytes, cols, r % l->strip_rows);
        for (int t = 0; t < TOKENS; t++) {
            exact[t][r] = magnitude[t][r] = 0;
            struct moe_act_view v = moe_act_view(x[t], l->activation, cols);
            for (int c = 0; c < cols; c++) {
                double a = l->activation == MOE_ACT_F32 ? x_rows[t][c]
                                                        : (double)v.d[c / moe_act_block(l->activation)] * v.q[c];
                exact[t][r] += a * one_row[c];
                magnitude[t][r] += a * one_row[c] < 0 ? -a * one_row[c] : a * one_row[c];
            }
        }
    }
    for (int t = 0; t < TOKENS; t++, difference = size = 0) {
        for (int r = 0; r < MAX_ROWS; r++) {
            double d = (double)want[t][r] - exact[t][r];
            difference += d < 0 ? -d : d;
            size += magnitude[t][r];
        }
        parity_where(p, "cols", cols, "token", t, 0, 0);
        if (!(difference <= 1e-6 * size + 1e-37)) parity_fail(p, "scalar kernel is away from the double product");
    }
}

static void check_matmul(struct parity *p, const struct moe_layout *l, const void *const *x, int rows, int cols,
                         int tokens, int first, int last) {
    float *y[TOKENS];
    int strips = (rows + l->strip_rows - 1) / l->strip_rows, from = first * l->strip_rows,
        to = last * l->strip_rows < rows ? last * l->strip_rows : rows;
    for (int t = 0; t < tokens; t++) {
        y[t] = out[t] + PARITY_GUARD + 1; /* never 64-byte aligned */
        parity_poison(y[t], (size_t)rows);
    }
    size_t used = (size_t)strips * l->strip_bytes(cols);
    PARITY_FENCE(strips_got + used, sizeof strips_got - used);
    l->matmul(y, strips_got, rows, cols, first, last, x, tokens);
    PARITY_UNFENCE(strips_got + used, sizeof strips_got - used);
    for (int t = 0; t < tokens; t++) {
        parity_untouched(p, y[t] - PARITY_GUARD, (size_t)(PARITY_GUARD + from), "wrote before the rows asked for");
        parity_untouched(p, y[t] + to, (size_t)(PARITY_GUARD + rows - to), "wrote past the rows asked for");
        parity_words(p, (const uint32_t *)(const void *)(y[t] + from), (const uint32_t *)(const void *)(want[t] + from),
                     (size_t)(to - from));
    }
}

/* The tile on as many tokens as it takes: those of the test over and over, in another company each time. */
static void check_tile(struct parity *p, const struct moe_layout *l, const void *const *x, int rows, int cols,
                       int first, int last) {
    static float results[MOE_TILE_TOKENS][MAX_ROWS + 2 * PARITY_GUARD + 1];
    float *y[MOE_TILE_TOKENS];
    const void *many[MOE_TILE_TOKENS];
    int from = first * l->strip_rows, to = last * l->strip_rows < rows ? last * l->strip_rows : rows;
    for (int tokens = 8; tokens <= MOE_TILE_TOKENS; tokens += tokens == 8 ? 16 : 8) {
        parity_where(p, "cols", cols, "rows", rows, "tokens of the tile", tokens);
        for (int t = 0; t < tokens; t++) {
            many[t] = x[(3 * t + t / 8) % TOKENS];
            parity_poison(y[t] = results[t] + PARITY_GUARD + 1, (size_t)rows);
        }
        if (l->tile) l->tile(y, strips_got, rows, cols, first, last, many, tokens);
        else for (int t = 0; t < tokens; t += 8) l->matmul(y + t, strips_got, rows, cols, first, last, many + t, 8);
        for (int t = 0; t < tokens; t++) {
            const float *w = want[(3 * t + t / 8) % TOKENS];
            parity_untouched(p, y[t] - PARITY_GUARD, (size_t)(PARITY_GUARD + from), "wrote before the rows asked for");
            parity_untouched(p, y[t] + to, (size_t)(PARITY_GUARD + rows - to), "wrote past the rows asked for");
            parity_words(p, (const uint32_t *)(const void *)(y[t] + from), (const uint32_t *)(const void *)(w + from),
                         (size_t)(to - from));
        }
    }
}

/* The reference is the scalar kernel on one token at a time, so equality also proves that the width does not matter. */
static void check_layout(struct parity *p, const struct moe_layout *ref, const struct moe_layout *l,
                         const struct moe_format *f, int kind, int cols) {
    const void *x[TOKENS];
    int strips = (MAX_ROWS + ref->strip_rows - 1) / ref->strip_rows;
    size_t strip_bytes = ref->strip_bytes(cols);
    if (l->strip_bytes(cols) != strip_bytes) { parity_fail(p, "the tiers disagree about strip_bytes"); return; }
    if ((size_t)strips * strip_bytes > STRIPS_BYTES || MAX_ROWS * row_bytes_of(f, cols) > STORAGE_BYTES) {
        parity_fail(p, "rows too large for the test");
        return;
    }
    unsigned char *rows_in = fill_rows(p, f, kind, cols);
    encode_rows(strips_want, f, ref, rows_in, MAX_ROWS, cols);
    parity_where(p, kind_label[kind], cols, "decoded rows", 0, 0, 0);
    for (int s = 0; s < strips; s++) check_floats(p, ref, l, strips_want + (size_t)s * strip_bytes, cols);
    for (int t = 0; t < TOKENS; t++) {
        float *y = out[0] + PARITY_GUARD;
        x[t] = activation(p, ref, t, cols);
        parity_poison(y, MAX_ROWS);
        ref->matmul(&y, strips_want, MAX_ROWS, cols, 0, strips, x + t, 1);
        __builtin_memcpy(want[t], y, MAX_ROWS * 4);
    }
    if (l == ref && kind == MODERATE && ref->dequantize_row) check_against_double(p, ref, x, cols);
    for (int r = 0; r < LENGTH(rows_list); r++) {
        int rows = rows_list[r], num_strips = (rows + ref->strip_rows - 1) / ref->strip_rows;
        encode_rows(strips_got, f, ref, rows_in, rows, cols);
        check_tile(p, l, x, rows, cols, 0, num_strips);
        if (num_strips > 1) { /* as threads share a matrix */
            check_tile(p, l, x, rows, cols, 1, num_strips);
            if (!PARITY_SMALL) check_tile(p, l, x, rows, cols, 0, num_strips - 1);
        }
        for (int k = 0; k < LENGTH(tokens_list); k++) {
            parity_where(p, kind_label[kind], cols, "rows", rows, "tokens", tokens_list[k]);
            check_matmul(p, l, x, rows, cols, tokens_list[k], 0, num_strips);
            if (num_strips > 1 && k % 3 == 0) { /* as threads share a matrix */
                check_matmul(p, l, x, rows, cols, tokens_list[k], num_strips - 1, num_strips);
                check_matmul(p, l, x, rows, cols, tokens_list[k], 0, 1);
                check_matmul(p, l, x, rows, cols, tokens_list[k], num_strips / 2, num_strips / 2);
            }
        }
    }
    for (int t = 0; t < TOKENS; t++) PARITY_UNFENCE(acts[t], ACT_BYTES);
}

static int check_layout_with(struct parity *p, const struct moe_layout *ref, const struct moe_layout *l,
                             const struct moe_format *f) {
    int tested = 0;
    const char *why = mismatch(f, ref);
    if (why) parity_fail(p, why);
    for (int kind = 0; !why && kind <= LAST_KIND; kind++) {
        if (kind == QUANTIZED && !f->quantize_row) continue;
        if (kind != QUANTIZED) fill_pool(p, f, ref, kind);
        for (int c = 0; c < LENGTH(cols_list); c++)
            if (wanted(kind, cols_list[c]) && fits(f, ref, cols_list[c]))
                check_layout(p, ref, l, f, kind, cols_list[c]), tested++;
    }
    return tested;
}

void parity_layouts(struct parity *p) {
    for (int i = 0; i < moe_layout_count(); i++) {
        const struct moe_layout *table = moe_layout_at(i);
        int tested = 0;
        if (!moe_same_name(table->tier, p->tier)) continue;
        parity_begin(p, "layout", table->name);
        parity_reused(p, table->same_as, table->why);
        const struct moe_layout *l = layout_of(p, p->ctx.tier, table->name), *ref = layout_of(p, 0, table->name);
        if (l && ref &&
            (l->activation != ref->activation || l->block_len != ref->block_len || l->strip_rows != ref->strip_rows))
            parity_fail(p, "the tiers describe the layout differently");
        for (int j = 0; l && ref && j < moe_format_count(); j++) {
            const struct moe_format *f = moe_format_at(j);
            if (!moe_same_name(f->tier, "scalar") || !moe_same_name(f->layout, table->name)) continue;
            if (f->group_rows) { tested += check_group_layout(p, ref, l, f); continue; }
            if (!f->encode_strip) { parity_fail(p, "a scalar codec table has no encode_strip"); continue; }
            tested += check_layout_with(p, ref, l, f);
        }
        if (!tested) parity_fail(p, "no compiled format re-codes to this layout, so nothing was tested");
        parity_end(p);
    }
}
