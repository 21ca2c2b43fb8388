"""IEEE binary32, unquantized."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 0

FORMAT = Format(
    name="f32",
    version=1,
    block_len=1,
    block_bytes=4,
    layout="rows_f32",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=0.0,
    source="IEEE 754",
)
