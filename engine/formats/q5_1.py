"""32 codes of 5 bits, fp16 scale and minimum: y = q * d + m."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 7

FORMAT = Format(
    name="q5_1",
    version=1,
    block_len=32,
    block_bytes=24,
    layout="byte8_q5_1",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=0.039,
    source="GGUF type Q5_1; gguf.quants.Q5_1; quantizer in native/formats/q5_1.c",
)
