"""256 codes of 6 bits, int8 sub-scales per 16: y = d * sc * (q - 32)."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 14

FORMAT = Format(
    name="q6_k",
    version=1,
    block_len=256,
    block_bytes=210,
    layout="byte8_q6_k",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=0.0184,
    source="GGUF type Q6_K; gguf.quants.Q6_K; quantizer in native/formats/q6_k.c",
)
