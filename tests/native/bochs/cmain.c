/* Bare-metal main: parity_run() with its report on the first serial port, then Bochs' power-off port. What the compiler
 * and dispatch.c expect of a C library is here; anything more in a kernel fails to link, which is the point. */
#include "parity.h"

static void outb(uint16_t port, uint8_t v) { __asm__ volatile("outb %0, %1" ::"a"(v), "Nd"(port)); }
static uint8_t inb(uint16_t port) {
    uint8_t v;
    __asm__ volatile("inb %1, %0" : "=a"(v) : "Nd"(port));
    return v;
}
static void emit(const char *text) {
    for (; *text; text++) {
        while (!(inb(0x3fd) & 0x20)) {}
        outb(0x3f8, (uint8_t)*text);
    }
}

void *memset(void *to, int c, size_t n) {
    char *p = to;
    while (n--) *p++ = (char)c;
    return to;
}
void *memcpy(void *restrict to, const void *restrict from, size_t n) {
    char *p = to;
    const char *q = from;
    while (n--) *p++ = *q++;
    return to;
}
void *memmove(void *to, const void *from, size_t n) {
    char *p = to;
    const char *q = from;
    if (p <= q) while (n--) *p++ = *q++;
    else while (n--) p[n] = q[n];
    return to;
}
int memcmp(const void *a, const void *b, size_t n) {
    const unsigned char *p = a, *q = b;
    for (; n--; p++, q++)
        if (*p != *q) return *p - *q;
    return 0;
}
void *calloc(size_t n, size_t size) { (void)n; (void)size; return 0; }
void free(void *p) { (void)p; }
struct moe_pool *moe_pool_create(int num_threads) { (void)num_threads; return 0; }
void moe_pool_destroy(struct moe_pool *pool) { (void)pool; }
void moe_free_call_log(struct moe_call_log *log) { (void)log; }

void cmain(void);
void cmain(void) {
    outb(0x3fb, 0x80); /* divisor latch on: 115200 baud, then 8N1, FIFOs on */
    outb(0x3f8, 1);
    outb(0x3f9, 0);
    outb(0x3fb, 3);
    outb(0x3fa, 7);
    parity_run(emit);
    emit("END.............................\n"); /* Bochs drops what is still in the UART at power-off */
    for (const char *s = "Shutdown"; *s; s++) outb(0x8900, (uint8_t)*s);
}
