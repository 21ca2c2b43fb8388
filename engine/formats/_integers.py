"""Numpy definitions of our own integer formats, written from their byte layouts."""

import numpy as np


def int8_row_dequantize(storage: np.ndarray, cols: int) -> np.ndarray:
    """uint8 [rows, cols + 4] -> float32 [rows, cols]."""
    storage = np.ascontiguousarray(storage, np.uint8).reshape(-1, cols + 4)
    scale = np.ascontiguousarray(storage[:, cols:]).view("<f4")
    return np.ascontiguousarray(storage[:, :cols]).view(np.int8).astype(np.float32) * scale


def _groups(storage: np.ndarray, block_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales float32 [n, 1] and code bytes [n, block_bytes - 4] of all groups."""
    blocks = np.ascontiguousarray(storage, np.uint8).reshape(-1, block_bytes)
    return np.ascontiguousarray(blocks[:, :4]).view("<f4"), blocks[:, 4:]


def int4_dequantize(group: int):
    """Decoder of int4-g{group}: low nibble = even column, stored value v + 8."""

    def dequantize(storage: np.ndarray, cols: int) -> np.ndarray:
        scale, codes = _groups(storage, 4 + group // 2)
        v = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), group).astype(np.float32) - 8
        return (v * scale).reshape(-1, cols)

    return dequantize


def int3_dequantize(storage: np.ndarray, cols: int) -> np.ndarray:
    """Decoder of int3-g64: 16 bytes of low pairs, 8 bytes of high bits, stored value v + 4."""
    scale, codes = _groups(storage, 28)
    low = (codes[:, :16, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 64)
    high = (codes[:, 16:, None] >> np.arange(8, dtype=np.uint8) & 1).reshape(-1, 64)
    return (((low | high << 2).astype(np.float32) - 4) * scale).reshape(-1, cols)
