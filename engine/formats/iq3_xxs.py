"""Four values per entry of a 256-entry codebook, a scale per 32: y = d * (s + 1/2) / 2 * grid * sign."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 18

FORMAT = Format(
    name="iq3_xxs",
    version=1,
    block_len=256,
    block_bytes=98,
    layout="nib8_iq3_xxs",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=None,
    source="GGUF type IQ3_XXS; gguf.quants.IQ3_XXS",
)
