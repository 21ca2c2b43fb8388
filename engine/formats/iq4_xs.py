"""256 codes of a non-linear 4-bit codebook, signed 6-bit sub-scales per 32, fp16 scale: y = d * (ls - 32) * K[q]."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 23

FORMAT = Format(
    name="iq4_xs",
    version=1,
    block_len=256,
    block_bytes=136,
    layout="nib8_iq4_xs",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=0.0785,
    source="GGUF type IQ4_XS; gguf.quants.IQ4_XS; quantizer in native/formats/iq4_xs.c",
)
