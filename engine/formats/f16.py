"""IEEE binary16; the quantizer rounds to nearest even."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 1

FORMAT = Format(
    name="f16",
    version=1,
    block_len=1,
    block_bytes=2,
    layout="rows_f16",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=3e-4,
    source="IEEE 754",
)
