"""256 codes of 5 bits, 6-bit sub-scales and minima per 32: y = d * sc * q - dmin * mn."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 13

FORMAT = Format(
    name="q5_k",
    version=1,
    block_len=256,
    block_bytes=176,
    layout="byte8_q5_k",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=0.0367,
    source="GGUF type Q5_K; gguf.quants.Q5_K; quantizer in native/formats/q5_k.c",
)
