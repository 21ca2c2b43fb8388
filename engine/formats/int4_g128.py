"""4-bit integers with a float32 scale per 128 columns: y = v * s."""

from ._base import Format
from ._integers import int4_dequantize

FORMAT = Format(
    name="int4-g128",
    version=1,
    block_len=128,
    block_bytes=68,
    layout="nib8_int4_g128",
    ggml_type=None,
    dequantize=int4_dequantize(128),
    max_relative_error=0.121,
    source="our own; native/formats/int4.c draws the bytes",
)
