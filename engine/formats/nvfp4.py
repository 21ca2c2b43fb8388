"""64 E2M1 codes, unsigned E4M3 scale per 16: y = T[q] * scale / 2."""

from ._base import Format, gguf_dequantize

GGML_TYPE = 40

FORMAT = Format(
    name="nvfp4",
    version=1,
    block_len=64,
    block_bytes=36,
    layout="nib8_nvfp4",
    ggml_type=GGML_TYPE,
    dequantize=gguf_dequantize(GGML_TYPE),
    max_relative_error=None,
    source="GGUF type NVFP4; gguf.quants.NVFP4",
)
