"""Checkpoints that are quantized already: what their config.json says, and FP8 with block scales back to float32.

Source: the DeepSeek-V3 release: weights in E4M3, and per block of 128 x 128 one float32 `weight_scale_inv` that the
block is multiplied by.
"""

import numpy as np

from .checkpoint import read_rows
from .errors import DtypeError, MissingTensorError, QuantizedSourceError, ShapeError
from .safetensors import SourceTensor

FP8_DTYPE = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"
# What an fp8 quantization_config may say; other keys could change what the bytes mean.
_HARMLESS_KEYS = {"quant_method", "fmt", "weight_block_size", "activation_scheme", "modules_to_not_convert"}


def method_of(config: dict) -> str | None:
    """quant_method of config.json, "unknown" where it has none, None for a checkpoint that is not quantized."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    return str(quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization)


def refuse_quantized(config: dict, readable: tuple[str, ...]) -> None:
    """readable: methods whose tensors the family's views read. FP8 with block scales is read for every family.

    Raises: QuantizedSourceError naming the method.
    """
    method = method_of(config)
    if method is None or method in readable:
        return
    if method != "fp8":
        raise QuantizedSourceError(
            f"config.json: quantization_config is present (method {method!r}); of quantized checkpoints only fp8 with "
            "block scales is read here, get the bf16, f16 or f32 one"
        )
    block_size(config)


def block_size(config: dict) -> tuple[int, int]:
    """(rows, cols) of a block of an fp8 checkpoint. Raises: QuantizedSourceError for another kind of fp8."""
    quantization = config["quantization_config"]
    if not isinstance(quantization, dict):
        raise QuantizedSourceError(f"config.json: quantization_config = {quantization!r}, expected an object")
    size, kind = quantization.get("weight_block_size"), quantization.get("fmt", "e4m3")
    unknown = sorted(set(quantization) - _HARMLESS_KEYS)
    is_pair = isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n < 1 << 20 for n in size)
    if not is_pair or kind != "e4m3" or unknown:
        raise QuantizedSourceError(
            f"config.json: quantization_config fp8 with fmt {kind!r}, weight_block_size {size!r}"
            f"{', unknown keys ' + ', '.join(unknown) if unknown else ''}; only e4m3 with blocks such as [128, 128] is "
            "read here"
        )
    return size[0], size[1]


def _e4m3_table() -> np.ndarray:
    """float32 of all 256 codes: sign, four exponent bits (bias 7), three mantissa bits, no infinities; 127: NaN."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_E4M3 = _e4m3_table()


class Fp8Source:
    """An FP8 matrix [rows, cols] with its scales, used by converters as a float32 SourceTensor is."""

    dtype, format = "F32", None

    def __init__(self, tensor: SourceTensor, scales: SourceTensor, block: tuple[int, int]):
        self.tensor, self.block = tensor, block
        self.name, self.path, self.shape, self.nbytes = tensor.name, tensor.path, tensor.shape, tensor.nbytes
        want = (
            tuple(-(-n // size) for n, size in zip(tensor.shape, block, strict=True)) if len(tensor.shape) == 2 else ()
        )
        if scales.shape != want:
            raise ShapeError(
                f"{scales.path}: tensor {scales.name}: shape {list(scales.shape)}, expected {list(want)} for blocks of "
                f"{list(block)} of {list(tensor.shape)}"
            )
        if scales.dtype != "F32":
            raise DtypeError(f"{scales.path}: tensor {scales.name}: dtype {scales.dtype}, expected F32")
        self._scales = scales
        self._values: np.ndarray | None = None

    def rows(self, first: int, last: int) -> np.ndarray:
        """uint8 bytes of float32 rows [first, last)."""
        if self._values is None:
            shape = self._scales.shape
            self._values = read_rows(self._scales, 0, shape[0]).view("<f4").reshape(shape)
        cols = self.shape[1]
        values = _E4M3[read_rows(self.tensor, first, last)].reshape(-1, cols)
        scales = self._values[np.arange(first, last) // self.block[0]]
        values *= np.repeat(scales, self.block[1], axis=1)[:, :cols]
        return values.reshape(-1).view(np.uint8)


def fp8_source(tensor: SourceTensor, tensors: dict[str, SourceTensor], config: dict) -> Fp8Source:
    """Raises: MissingTensorError without scales, ShapeError, DtypeError, QuantizedSourceError."""
    scales = tensors.get(tensor.name + SCALE_SUFFIX)
    if scales is None:
        raise MissingTensorError(
            f"{tensor.path}: tensor {tensor.name} is {FP8_DTYPE}, but there is no {tensor.name}{SCALE_SUFFIX}; the "
            "download is incomplete or the checkpoint is of another kind"
        )
    return Fp8Source(tensor, scales, block_size(config))
