"""Eight values per entry of a 256-entry codebook, a scale per 32: y = d * (s + 1/2) / 4 * grid * sign."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 16

FORMAT = Format(
    name="iq2_xxs",
    version=1,
    block_len=256,
    block_bytes=66,
    layout="nib8_iq2_xxs",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=None,
    source="GGUF type IQ2_XXS; gguf.quants.IQ2_XXS",
)
