"""As iq1_s with a scale per 16 and a shift per 8; the fp16 scale is scattered over four words."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 29

FORMAT = Format(
    name="iq1_m",
    version=1,
    block_len=256,
    block_bytes=56,
    layout="nib8_iq1_m",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=None,
    source="GGUF type IQ1_M; gguf.quants.IQ1_M",
)
