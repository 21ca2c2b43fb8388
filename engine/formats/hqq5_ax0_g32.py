"""Half-quadratic quantization, 5 bits; a scale and a zero per column of 32 output rows: y = (q - zero) * scale."""

import numpy as np

from ._base import Format

GROUP_ROWS = 32


def dequantize(storage: np.ndarray, cols: int) -> np.ndarray:
    """Definition. storage: uint8 [rows, 24 * cols / 32], the bytes of a whole matrix.

    Codes of all rows first, per 32 columns 16 bytes of nibbles (low, then high) and 4 bytes of fifth bits; then for
    each row group cols fp16 scales and cols fp16 zeros. Row group j of n is rows j, j + n, j + 2n ...
    """
    rows = len(storage)
    groups, data = rows // GROUP_ROWS, np.ascontiguousarray(storage, dtype=np.uint8).reshape(-1)
    codes, meta = np.split(data, [rows * cols // 32 * 20])
    codes = codes.reshape(rows, cols // 32, 20)
    nibbles, fifth = codes[..., :16], np.unpackbits(codes[..., 16:], axis=-1, bitorder="little")
    q = (np.concatenate([nibbles & 15, nibbles >> 4], axis=-1) | fifth << 4).reshape(GROUP_ROWS, groups, cols)
    meta = meta.view("<f2").astype(np.float32).reshape(groups, 2, cols)
    scale, zero = meta[:, 0], meta[:, 1]
    return ((q.astype(np.float32) - zero) * scale).reshape(rows, cols)


FORMAT = Format(
    name="hqq5-ax0-g32",
    version=1,
    block_len=32,
    block_bytes=24,
    layout="hqq5_ax0",
    ggml_type=None,
    dequantize=dequantize,
    max_relative_error=0.042,
    source="HQQ (Badri and Shaji, half-quadratic quantization); quantizer in native/formats/hqq5_ax0_g32.c",
    group_rows=GROUP_ROWS,
    params={"axis": 0, "group": 32},
)
