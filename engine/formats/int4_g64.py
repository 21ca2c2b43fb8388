"""4-bit integers with a float32 scale per 64 columns: y = v * s."""

from ._base import Format
from ._integers import int4_dequantize

FORMAT = Format(
    name="int4-g64",
    version=1,
    block_len=64,
    block_bytes=36,
    layout="nib8_int4_g64",
    ggml_type=None,
    dequantize=int4_dequantize(64),
    max_relative_error=0.111,
    source="our own; native/formats/int4.c draws the bytes",
)
