"""Eight values per entry of a 1024-entry codebook, a scale per 16: y = d * (s + 1/2) / 4 * grid * sign."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 22

FORMAT = Format(
    name="iq2_s",
    version=1,
    block_len=256,
    block_bytes=82,
    layout="nib8_iq2_s",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=None,
    source="GGUF type IQ2_S; gguf.quants.IQ2_S",
)
