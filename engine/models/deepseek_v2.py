"""DeepSeek-V2: latent attention, leading dense layers, shared experts, softmax routing, greedy or limited to groups.

Source: transformers `DeepseekV2ForCausalLM` (modeling_deepseek_v2.py). Reads with _decoder.py, _latent.py and
_deepseek.py. Kept probabilities are not renormalised, but scaled.
"""

from dataclasses import dataclass

from ..config import ConfigReader
from ..kernels import lib
from ..moe import Groups, Router
from . import _deepseek as deepseek
from . import _latent as latent

HARMLESS = deepseek.HARMLESS
GREEDY, GROUPS = "greedy", "group_limited_greedy"


@dataclass(frozen=True, kw_only=True)
class Config(deepseek.RoutedConfig, latent.LatentConfig):
    """config.json of a DeepSeek-V2 model, checked."""

    topk_method: str

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        read.only("scoring_func", "softmax")
        read.only("topk_method", GREEDY, GROUPS)
        read.only("mlp_bias", False)
        result = cls(
            **latent.latent_fields(read, theta=10000.0, eps=1e-6),
            **deepseek.routed_fields(read, norm=False, dense=0),
            topk_method=read.text("topk_method", GREEDY),
        )
        # The model's own code divides only on the path of another kind of routing; nothing released asks for it.
        read.only("norm_topk_prob", False)
        read.finish(HARMLESS)
        return result


OUTPUT_AXIS = 0  # weights are those of nn.Linear: [out, in]
TENSORS = deepseek.TENSORS
layers_of = deepseek.layers_of
GGUF_ARCHITECTURE, GGUF_TENSORS = deepseek.GGUF_ARCHITECTURE, deepseek.GGUF_TENSORS


def gguf_matches(keys) -> bool:
    return deepseek.gating_function(keys) == deepseek.SOFTMAX


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys."""
    config = deepseek.latent_from_gguf(keys)
    return config | {"topk_method": GROUPS if config["n_group"] > 1 else GREEDY}


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template that this model has."""
    return latent.latent_shapes(c) | deepseek.mlp_shapes(c, correction=False)


class Model(latent.LatentDecoder):
    """A loaded DeepSeek-V2."""

    config_class = Config

    def make_mlp(self, n: int, weights):
        c = self.config
        groups = Groups(c.n_group, c.topk_group, lib.MOE_GROUP_MAX) if c.topk_method == GROUPS else None

        def router():
            return Router(lib.MOE_SOFTMAX_THEN_TOPK, False, c.routed_scaling_factor, groups=groups)

        return deepseek.make_mlp(c, n, weights, self.buffers, router)
