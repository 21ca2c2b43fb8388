"""256 signed ternary vectors of eight from a codebook, shifted by 1/8: y = d * (2s + 1) * (grid +- 1/8)."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 19

FORMAT = Format(
    name="iq1_s",
    version=1,
    block_len=256,
    block_bytes=50,
    layout="nib8_iq1_s",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=None,
    source="GGUF type IQ1_S; gguf.quants.IQ1_S",
)
