"""256 ternary values, five trits a byte, fp16 scale: y = (t - 1) * d."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 34

FORMAT = Format(
    name="tq1_0",
    version=1,
    block_len=256,
    block_bytes=54,
    layout="nib8_tq",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=None,
    source="GGUF type TQ1_0; gguf.quants.TQ1_0",
)
