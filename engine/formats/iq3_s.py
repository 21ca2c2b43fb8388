"""Four values per entry of a 512-entry codebook, a scale per 32: y = d * (1 + 2s) * grid * sign."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 21

FORMAT = Format(
    name="iq3_s",
    version=1,
    block_len=256,
    block_bytes=110,
    layout="nib8_iq3_s",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=None,
    source="GGUF type IQ3_S; gguf.quants.IQ3_S",
)
