"""32 E2M1 codes with a power-of-two scale: y = T[q] * 2^(e - 128)."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 39

FORMAT = Format(
    name="mxfp4",
    version=1,
    block_len=32,
    block_bytes=17,
    layout="nib8_mxfp4",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=0.1163,
    source="GGUF type MXFP4; gguf.quants.MXFP4; quantizer in native/formats/mxfp4.c",
)
