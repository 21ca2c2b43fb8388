"""32 unsigned 4-bit codes, fp16 scale and minimum: y = q * d + m."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 3

FORMAT = Format(
    name="q4_1",
    version=1,
    block_len=32,
    block_bytes=20,
    layout="nib8_q4_1",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=0.08,
    source="GGUF type Q4_1; gguf.quants.Q4_1; quantizer in native/formats/q4_1.c",
)
