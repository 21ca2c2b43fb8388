"""32 codes of 5 bits, fp16 scale: y = (q - 16) * d."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 6

FORMAT = Format(
    name="q5_0",
    version=1,
    block_len=32,
    block_bytes=22,
    layout="byte8_q5_0",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=0.0437,
    source="GGUF type Q5_0; gguf.quants.Q5_0; quantizer in native/formats/q5_0.c",
)
