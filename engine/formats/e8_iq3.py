"""The codebook of iq3_xxs over rotated rows: y = sign * grid / 2 * d * (c + 1/2) / 2. Rows hold W Q, so activations are
rotated before the product."""

import numpy as np

from ._base import Format
from ._rotation import rotate


def dequantize(storage: np.ndarray, cols: int) -> np.ndarray:
    """uint8 [rows, row bytes] -> the rotated rows, float32 [rows, cols]."""
    from gguf import quants

    quants.IQ3_XXS.init_grid()
    grid = quants.IQ3_XXS.grid.reshape(256, 4).astype(np.float32) / 2
    blocks = np.ascontiguousarray(storage, dtype=np.uint8).reshape(-1, 98)
    words = np.ascontiguousarray(blocks[:, 64:96]).view("<u4")
    d = np.ascontiguousarray(blocks[:, 96:]).view("<f2").astype(np.float32)
    scale = d * ((words >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.5)
    stored = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    bits = stored[..., None] >> np.arange(7, dtype=np.uint32) & 1
    bits = np.concatenate([bits, bits.sum(-1, keepdims=True) & 1], axis=-1)  # the number of negatives is even
    sign = np.where(bits == 0, np.float32(1), np.float32(-1)).reshape(-1, 8, 32)
    values = grid[blocks[:, :64]].reshape(-1, 8, 32)
    return (scale[..., None] * values * sign).astype(np.float32).reshape(len(storage), cols)


FORMAT = Format(
    name="e8-iq3",
    version=1,
    block_len=256,
    block_bytes=98,
    layout="nib8_e8_iq3",
    ggml_type=None,
    dequantize=dequantize,
    max_relative_error=0.217,
    source="own format; quantizer in native/formats/e8_iq3.c",
    rotate=rotate,
)
