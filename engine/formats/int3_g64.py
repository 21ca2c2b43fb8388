"""3-bit integers with a float32 scale per 64 columns: y = (u - 4) * s."""

from ._base import Format
from ._integers import int3_dequantize

FORMAT = Format(
    name="int3-g64",
    version=1,
    block_len=64,
    block_bytes=28,
    layout="nib8_int3_g64",
    ggml_type=None,
    dequantize=int3_dequantize,
    max_relative_error=0.258,
    source="our own; native/formats/int3_g64.c draws the bytes",
)
