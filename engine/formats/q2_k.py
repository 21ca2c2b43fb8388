"""256 codes of 2 bits, 4-bit sub-scales and minima per 16: y = d * sc * q - dmin * mn."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 10

FORMAT = Format(
    name="q2_k",
    version=1,
    block_len=256,
    block_bytes=84,
    layout="nib8_q2_k",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=None,
    source="GGUF type Q2_K; gguf.quants.Q2_K",
)
