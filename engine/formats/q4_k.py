"""256 codes of 4 bits, 6-bit sub-scales and minima per 32: y = d * sc * q - dmin * mn."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 12

FORMAT = Format(
    name="q4_k",
    version=1,
    block_len=256,
    block_bytes=144,
    layout="nib8_q4_k",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=0.0734,
    source="GGUF type Q4_K; gguf.quants.Q4_K; quantizer in native/formats/q4_k.c",
)
