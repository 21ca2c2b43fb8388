"""32 int8 and an fp16 scale: y = q * d."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 8

FORMAT = Format(
    name="q8_0",
    version=1,
    block_len=32,
    block_bytes=34,
    layout="byte8_q8_0",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=0.0055,
    source="GGUF type Q8_0; gguf.quants.Q8_0",
)
