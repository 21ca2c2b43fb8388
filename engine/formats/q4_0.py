"""32 four-bit codes and an fp16 scale: y = (q - 8) * d."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 2

FORMAT = Format(
    name="q4_0",
    version=1,
    block_len=32,
    block_bytes=18,
    layout="nib8_q4_0",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=0.0885,
    source="GGUF type Q4_0; gguf.quants.Q4_0",
)
