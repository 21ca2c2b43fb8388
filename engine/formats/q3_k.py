"""256 codes of 3 bits, 6-bit signed sub-scales per 16: y = d * (sc - 32) * (q - 4)."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 11

FORMAT = Format(
    name="q3_k",
    version=1,
    block_len=256,
    block_bytes=110,
    layout="nib8_q3_k",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=None,
    source="GGUF type Q3_K; gguf.quants.Q3_K",
)
