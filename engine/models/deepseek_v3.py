"""DeepSeek-V3 and what is built alike (R1, Kimi K2): latent attention, sigmoid routing limited to groups.

Source: transformers `DeepseekV3ForCausalLM` (modeling_deepseek_v3.py). Reads with _decoder.py, _latent.py,
_deepseek.py and _mtp.py. A correction per expert takes part in the selection and not in the weights.
"""

from dataclasses import dataclass

from ..config import ConfigReader
from . import _deepseek as deepseek
from . import _latent as latent
from . import _mtp as mtp

HARMLESS = deepseek.HARMLESS


@dataclass(frozen=True, kw_only=True)
class Config(deepseek.RoutedConfig, latent.LatentConfig):
    """config.json of a DeepSeek-V3 model, checked."""

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        read.only("scoring_func", "sigmoid")
        read.only("topk_method", "noaux_tc")
        result = cls(
            **latent.latent_fields(read, theta=10000.0, eps=1e-6),
            **deepseek.routed_fields(read, norm=True, dense=3),
        )
        read.finish(HARMLESS)
        return result


OUTPUT_AXIS = 0  # weights are those of nn.Linear: [out, in]
TENSORS = deepseek.TENSORS | mtp.TENSORS
layers_of = deepseek.layers_of
GGUF_ARCHITECTURE, GGUF_TENSORS = deepseek.GGUF_ARCHITECTURE, deepseek.GGUF_TENSORS | mtp.GGUF_TENSORS


def gguf_matches(keys) -> bool:
    return deepseek.gating_function(keys) == deepseek.SIGMOID


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys."""
    return deepseek.latent_from_gguf(keys)


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template that this model has."""
    return latent.latent_shapes(c) | deepseek.mlp_shapes(c, correction=True)


def mtp_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """As `shapes`, of the layer for multi-token prediction."""
    return mtp.shapes(c, shapes(c))


class Model(latent.LatentDecoder):
    """A loaded DeepSeek-V3."""

    config_class = Config

    def make_mlp(self, n: int, weights):
        c = self.config
        return deepseek.make_mlp(c, n, weights, self.buffers, lambda: deepseek.sigmoid_router(c, n, weights))
