"""256 codes of 2 bits, fp16 scale: y = (q - 1) * d."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 35

FORMAT = Format(
    name="tq2_0",
    version=1,
    block_len=256,
    block_bytes=66,
    layout="nib8_tq",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=None,
    source="GGUF type TQ2_0; gguf.quants.TQ2_0",
)
