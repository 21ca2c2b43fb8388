"""Upper half of a binary32; the quantizer rounds to nearest even."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 30

FORMAT = Format(
    name="bf16",
    version=1,
    block_len=1,
    block_bytes=2,
    layout="rows_bf16",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=2.4e-3,
    source="GGUF type BF16",
)
