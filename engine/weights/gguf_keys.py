"""What a family's `config_from_gguf` reads: typed access to a GGUF file's keys and a look at its tensors.

Every key under the architecture's prefix must be read, listed as harmless, or absent, so that a setting that changes
the model is never ignored. Knows no family.
"""

import numpy as np

from ..errors import ConfigError
from .gguf_header import GgufTensor, Metadata

# Keys under the architecture's prefix that no family computes with: sizes that the tensors show, notes on training.
HARMLESS = {"vocab_size", "rope.scaling.finetuned", "tokens_per_batch"}
_REQUIRED = object()


class GgufKeys:
    """architecture: general.architecture. metadata: all keys. tensors: name -> GgufTensor of all shards.

    Methods take keys without the architecture's prefix ("block_count"); a default makes a key optional, None included.
    Raises: ConfigError naming file and key.
    """

    def __init__(self, where: str, metadata: Metadata, tensors: dict[str, GgufTensor], read):
        self.where, self.metadata, self.tensors, self._read = where, metadata, tensors, read
        self.architecture = self.general("architecture", str)
        self._seen: set[str] = set()

    def general(self, key: str, kind: type = str, default=_REQUIRED):
        """A value under "general."."""
        return self._typed(f"general.{key}", kind, default)

    def _typed(self, key: str, kind: type | tuple, default):
        value = self.metadata.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"{self.where}: metadata key {key} is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{self.where}: metadata key {key} = {str(value)[:60]}, expected {_KINDS[kind]}")
        return value

    def _own(self, key: str, kind: type | tuple, default):
        self._seen.add(key)
        return self._typed(f"{self.architecture}.{key}", kind, default)

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.metadata

    def integer(self, key: str, default=_REQUIRED) -> int | None:
        """A whole number; a list with one value per layer counts when all are equal."""
        found = self._own(key, (int, list), default)
        if isinstance(found, list):
            if not found or found.count(found[0]) != len(found) or type(found[0]) is not int:
                raise ConfigError(
                    f"{self.where}: metadata key {self.architecture}.{key} = {str(found)[:60]} differs between layers, "
                    "which is not supported"
                )
            return found[0]
        return found

    def number(self, key: str, default=_REQUIRED) -> float | None:
        """A number, with the digits a float32 has: 1e-05 and not 9.99999974e-06."""
        value = self._own(key, (float, int), default)
        return value if value is None or isinstance(value, int) else float(str(np.float32(value)))

    def boolean(self, key: str, default=_REQUIRED) -> bool | None:
        return self._own(key, bool, default)

    def text(self, key: str, default=_REQUIRED) -> str | None:
        return self._own(key, str, default)

    def array(self, key: str, default=_REQUIRED) -> list | None:
        return self._own(key, list, default)

    def rows(self, tensor: str) -> int:
        """Length of the slowest axis of a tensor, e.g. the vocabulary's size from the embedding."""
        return self.shape(tensor)[0]

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of a tensor of the file, slowest axis first."""
        if tensor not in self.tensors:
            raise ConfigError(f"{self.where}: tensor {tensor} is missing")
        return self.tensors[tensor].shape

    def vector(self, tensor: str) -> list[float]:
        """Values of a small float32 tensor, e.g. rope_freqs.weight."""
        self.shape(tensor)
        found = self.tensors[tensor]
        if found.format != "f32":
            raise ConfigError(f"{self.where}: tensor {tensor} is {found.format}, expected f32")
        return self._read(tensor).view("<f4").tolist()

    def finish(self, harmless: set[str] = frozenset()) -> None:
        """Refuse keys of the architecture that nobody read and that are not known to be harmless."""
        prefix = f"{self.architecture}."
        unknown = sorted(
            key for key in self.metadata if key.startswith(prefix)
            and key.removeprefix(prefix) not in self._seen | HARMLESS | harmless
        )  # fmt: skip
        if unknown:
            raise ConfigError(
                f"{self.where}: metadata keys {', '.join(unknown)} may change the mathematics of this architecture and "
                "are not computed here; update millstream"
            )


_KINDS = {str: "a text", bool: "true or false", list: "a list", (int, list): "a whole number", (float, int): "a number"}
