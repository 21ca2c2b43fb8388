/* Every table of every tier this CPU can run, against the scalar tables, bit for bit. Each tier's outputs are also
 * hashed in the same order, so that two machines can be compared by their printed hashes. */
#include "parity.h"

#define DECLARE_OPS(tier)                                     \
    extern const struct moe_vector_ops moe_ops_vector_##tier; \
    extern const struct moe_attention_ops moe_ops_attention_##tier;
MOE_ALL_TIERS(DECLARE_OPS)
#define VECTOR_ADDRESS(tier)    &moe_ops_vector_##tier,
#define ATTENTION_ADDRESS(tier) &moe_ops_attention_##tier,
static const struct moe_vector_ops *const vector_ops[] = {MOE_ALL_TIERS(VECTOR_ADDRESS)};
static const struct moe_attention_ops *const attention_ops[] = {MOE_ALL_TIERS(ATTENTION_ADDRESS)};
const char *const *parity_only;

/* ---- report ---- */
void parity_number(struct parity *p, uint64_t value, int base, int min_digits) {
    char text[24];
    int at = 23;
    text[at] = 0;
    do {
        text[--at] = "0123456789abcdef"[value % (unsigned)base];
        value /= (unsigned)base;
    } while (value || 23 - at < min_digits);
    p->emit(text + at);
}

static void name_line(struct parity *p, const char *kind, const char *name) {
    p->emit(kind);
    p->emit(" ");
    p->emit(name);
    p->emit(" ");
    p->emit(p->tier);
}

/* Data depend on the check's name, never on the tier or on what ran before. */
void parity_begin(struct parity *p, const char *kind, const char *name) {
    p->bad = 0;
    p->label[0] = 0;
    p->random = 0xcbf29ce484222325u;
    for (const char *s = name; *s; s++) p->random = (p->random ^ (unsigned char)*s) * 0x100000001b3u;
    name_line(p, kind, name);
}

void parity_where(struct parity *p, const char *l0, int n0, const char *l1, int n1, const char *l2, int n2) {
    p->label[0] = l0, p->label[1] = l1, p->label[2] = l2;
    p->number[0] = n0, p->number[1] = n1, p->number[2] = n2;
}

void parity_fail(struct parity *p, const char *reason) {
    if (p->bad++) return;
    p->emit(": FAILED, ");
    p->emit(reason);
    for (int i = 0; i < 3 && p->label[0]; i++) {
        if (!p->label[i]) continue;
        p->emit(i ? ", " : " at ");
        p->emit(p->label[i]);
        p->emit(" ");
        if (p->number[i] < 0) p->emit("-");
        parity_number(p, (uint64_t)(p->number[i] < 0 ? -(int64_t)p->number[i] : p->number[i]), 10, 1);
    }
}

void parity_end(struct parity *p) {
    p->emit(p->bad ? "\n" : ": passed\n");
    if (p->bad) p->failed++;
    else p->passed++;
}

/* Which tier reuses which table is part of the report: a hole must be seen. */
void parity_reused(struct parity *p, const char *tier, const char *why) {
    if (!tier) return;
    p->emit(" (reuses ");
    p->emit(tier);
    p->emit(": ");
    p->emit(why ? why : "");
    p->emit(")");
    if (!why || !*why) parity_fail(p, "reuses a table without a reason");
}

/* ---- data: splitmix64, the same on every machine ---- */
uint32_t parity_u32(struct parity *p) {
    uint64_t z = p->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}
float parity_unit(struct parity *p) { return (float)(int32_t)(parity_u32(p) >> 8) / 8388608.0f - 1.0f; }
float parity_wide(struct parity *p) {
    uint32_t u = parity_u32(p);
    return moe_bits_f32((u & 0x807fffff) | (107 + (u >> 23 & 255) % 41) << 23);
}

/* ---- comparison ---- */
static void hash_word(struct parity *p, uint32_t u) { /* FNV-1a on words; the shift lets high bits reach the low ones */
    p->hash = (p->hash ^ u) * 0x100000001b3u;
    p->hash ^= p->hash >> 32;
}

void parity_bytes(struct parity *p, const void *got, const void *want, size_t n) {
    const unsigned char *g = got, *w = want;
    for (size_t i = 0; i < n; i++) {
        hash_word(p, g[i]);
        if (g[i] != w[i]) parity_fail(p, "bytes differ");
    }
}

void parity_words(struct parity *p, const uint32_t *got, const uint32_t *want, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t g = parity_is_nan(got[i]) ? 0x7fc00000u : got[i], w = parity_is_nan(want[i]) ? 0x7fc00000u : want[i];
        hash_word(p, g);
        if (got[i] == PARITY_POISON) parity_fail(p, "an output was left unwritten");
        if (g == w) continue;
        if (!p->bad) {
            parity_fail(p, "bits differ");
            p->emit(": element ");
            parity_number(p, i, 10, 1);
            p->emit(" is 0x");
            parity_number(p, got[i], 16, 8);
            p->emit(", scalar 0x");
            parity_number(p, want[i], 16, 8);
        }
    }
}

void parity_poison(float *y, size_t n) {
    for (size_t i = 0; i < n + 2 * PARITY_GUARD; i++) __builtin_memcpy(y - PARITY_GUARD + i, &PARITY_POISON, 4);
}

void parity_untouched(struct parity *p, const float *y, size_t n, const char *reason) {
    for (size_t i = 0; i < n; i++)
        if (moe_f32_bits(y[i]) != PARITY_POISON) parity_fail(p, reason);
}

void parity_floats(struct parity *p, const float *got, const float *want, size_t n) {
    parity_untouched(p, got - PARITY_GUARD, PARITY_GUARD, "wrote before the output");
    parity_untouched(p, got + n, PARITY_GUARD, "wrote past the output");
    parity_words(p, (const uint32_t *)(const void *)got, (const uint32_t *)(const void *)want, n);
}

/* ---- walk ---- */
static int wanted(const char *tier) {
    if (!parity_only) return 1;
    for (int i = 0; parity_only[i]; i++)
        if (moe_same_name(parity_only[i], tier)) return 1;
    return 0;
}

static void run_tier(struct parity *p, int tier) {
    p->ctx.tier = tier;
    p->vec = vector_ops[tier];
    p->attn = attention_ops[tier];
    p->hash = 0xcbf29ce484222325u;
    parity_formats(p);
    parity_layouts(p);
    parity_vector_ops(p);
    parity_attention_ops(p);
    p->emit("hash ");
    p->emit(p->tier);
    p->emit(PARITY_SMALL ? " small " : " full ");
    parity_number(p, p->hash, 16, 16);
    p->emit("\n");
}

int parity_run(void (*emit)(const char *text)) {
    struct parity p = {.emit = emit, .vec_scalar = vector_ops[0], .attn_scalar = attention_ops[0]};
    uint64_t first_hash = 0;
    for (int i = 0; parity_only && parity_only[i]; i++) {
        p.tier = parity_only[i];
        if (moe_tier_supported(p.tier)) continue;
        parity_begin(&p, "tier", "by name");
        parity_fail(&p, "not built or not supported here");
        parity_end(&p);
    }
    for (int tier = 0; tier < moe_tier_count(); tier++) {
        p.tier = moe_tier_name(tier);
        if (!wanted(p.tier)) continue;
        if (!moe_tier_supported(p.tier)) {
            const char *missing = moe_tier_missing(p.tier);
            p.skipped++;
            emit("tier ");
            emit(p.tier);
            emit(": skipped, this CPU lacks ");
            emit(missing ? missing : "?");
            emit("\n");
            continue;
        }
        run_tier(&p, tier);
        if (!first_hash) first_hash = p.hash;
        parity_begin(&p, "outputs", "hash");
        if (p.hash != first_hash) parity_fail(&p, "differs from the first tier's");
        parity_end(&p);
    }
    parity_number(&p, (uint64_t)p.passed, 10, 2);
    emit(" passed, ");
    parity_number(&p, (uint64_t)p.failed, 10, 2);
    emit(" failed, ");
    parity_number(&p, (uint64_t)p.skipped, 10, 2);
    emit(" skipped\n");
    return p.failed;
}
