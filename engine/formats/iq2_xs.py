"""Eight values per entry of a 512-entry codebook, a scale per 16: y = d * (s + 1/2) / 4 * grid * sign."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 17

FORMAT = Format(
    name="iq2_xs",
    version=1,
    block_len=256,
    block_bytes=74,
    layout="nib8_iq2_s",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=None,
    source="GGUF type IQ2_XS; gguf.quants.IQ2_XS",
)
