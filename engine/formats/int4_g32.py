"""4-bit integers with a float32 scale per 32 columns: y = v * s."""

from ._base import Format
from ._integers import int4_dequantize

FORMAT = Format(
    name="int4-g32",
    version=1,
    block_len=32,
    block_bytes=20,
    layout="nib8_int4_g32",
    ggml_type=None,
    dequantize=int4_dequantize(32),
    max_relative_error=0.1,
    source="our own; native/formats/int4.c draws the bytes",
)
