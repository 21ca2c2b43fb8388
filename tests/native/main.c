/* parity [TIER ...]: the parity walk as a program; with names, only those tiers. The thread pool has no part in it. */
#include "parity.h"
#include <stdio.h>

struct moe_pool *moe_pool_create(int num_threads) { (void)num_threads; return NULL; }
void moe_pool_destroy(struct moe_pool *pool) { (void)pool; }
void moe_free_call_log(struct moe_call_log *log) { (void)log; }
static void emit(const char *text) { fputs(text, stdout); }

int main(int argc, char **argv) {
    if (argc > 1) parity_only = (const char *const *)(argv + 1);
    return parity_run(emit) != 0;
}
