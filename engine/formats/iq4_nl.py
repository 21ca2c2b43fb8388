"""32 codes of a non-linear 4-bit codebook, fp16 scale: y = d * K[q]."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 20

FORMAT = Format(
    name="iq4_nl",
    version=1,
    block_len=32,
    block_bytes=18,
    layout="nib8_iq4_nl",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=0.0775,
    source="GGUF type IQ4_NL; gguf.quants.IQ4_NL; quantizer in native/formats/iq4_nl.c",
)
