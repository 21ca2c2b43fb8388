/* Shared by native/layouts/hqq5.c and native/formats/hqq5_ax0_g32.c: the bytes of a strip.
 *
 * A strip is one row group: 32 rows that share a scale and a zero in every column. Per block of 32 columns, 768 bytes,
 * 6.0 bits per weight, which is what the storage takes:
 *
 *     0  32 fp16 scales, one per column
 *    64  32 fp16 zeros
 *   128  codes: [5 planes][32 rows][4 bytes]
 *
 * Columns are in eight sets of four (set g is columns 4g .. 4g + 3; byte k of a row's four is column 4g + k). Byte i of
 * the five planes keeps the code of set i in its low five bits. The codes of sets 5, 6 and 7 fill the upper three bits:
 *
 *   plane     bits 5-7
 *     0       set 5, bits 0-2
 *     1       set 6, bits 0-2
 *     2       set 7, bits 0-2
 *     3       set 5, bits 3-4; set 7, bit 3
 *     4       set 6, bits 3-4; set 7, bit 4
 *
 * Five sets need one AND; nibbles and a plane of fifth bits would cost half as many operations again. The helpers work
 * on the four bytes of a row at once. */
#ifndef MOE_HQQ5_H
#define MOE_HQQ5_H
#include "tier.h"
enum { HQQ5_ROWS = 32, HQQ5_META = 128, HQQ5_PLANE = 128, HQQ5_BLOCK = HQQ5_META + 5 * HQQ5_PLANE };

MOE_INLINE size_t hqq5_strip_bytes(int cols) { return (size_t)cols / 32 * HQQ5_BLOCK; }

/* Eight words of four codes each to five plane words. */
MOE_INLINE void hqq5_pack(uint32_t *plane, const uint32_t *set) {
    plane[0] = set[0] | (set[5] & 0x07070707) << 5;
    plane[1] = set[1] | (set[6] & 0x07070707) << 5;
    plane[2] = set[2] | (set[7] & 0x07070707) << 5;
    plane[3] = set[3] | (set[5] & 0x18181818) << 2 | (set[7] & 0x08080808) << 4;
    plane[4] = set[4] | (set[6] & 0x18181818) << 2 | (set[7] & 0x10101010) << 3;
}
MOE_INLINE void hqq5_unpack(uint32_t *set, const uint32_t *plane) {
    for (int i = 0; i < 5; i++) set[i] = plane[i] & 0x1f1f1f1f;
    set[5] = (plane[0] >> 5 & 0x07070707) | (plane[3] >> 2 & 0x18181818);
    set[6] = (plane[1] >> 5 & 0x07070707) | (plane[4] >> 2 & 0x18181818);
    set[7] = (plane[2] >> 5 & 0x07070707) | (plane[3] >> 4 & 0x08080808) | (plane[4] >> 3 & 0x10101010);
}
/* The 32 codes of one row in a block. */
MOE_INLINE void hqq5_codes(uint8_t *q, const uint8_t *block, int row) {
    uint32_t plane[5], set[8];
    for (int i = 0; i < 5; i++) __builtin_memcpy(&plane[i], block + HQQ5_META + i * HQQ5_PLANE + 4 * row, 4);
    hqq5_unpack(set, plane);
    __builtin_memcpy(q, set, 32);
}
#endif
