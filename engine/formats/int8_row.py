"""A row of int8 weights with one float32 scale behind it: y = q * s."""

from ._base import Format
from ._integers import int8_row_dequantize

FORMAT = Format(
    name="int8-row",
    version=1,
    block_len=32,
    block_bytes=32,
    row_extra_bytes=4,
    layout="byte8_int8_row",
    ggml_type=None,
    dequantize=int8_row_dequantize,
    max_relative_error=0.0085,
    source="our own; native/formats/int8_row.c draws the bytes",
)
