"""What the Qwen families share: windows that are switched off, and layers of which some have no experts."""

from dataclasses import dataclass

from ..config import ConfigReader
from ..errors import ConfigError
from ..kernels import lib
from ..moe import Router
from . import _decoder as decoder
from . import _gguf as gguf

# Sizes of windows that use_sliding_window switches off.
HARMLESS = decoder.HARMLESS | {"sliding_window", "max_window_layers"}


def refuse_sliding_window(read: ConfigReader) -> None:
    """Refuse the keys by which Qwen models switch a window on; no released model does."""
    read.only("use_sliding_window", False)
    read.only("use_mrope", False)
    layer_types = read.strings("layer_types", [])
    if any(kind != "full_attention" for kind in layer_types):
        raise ConfigError("config.json: layer_types other than full_attention are not supported")


@dataclass(frozen=True, kw_only=True)
class SparseConfig(decoder.DecoderConfig):
    """A model in which the layers listed, and all but every decoder_sparse_step-th, have a dense MLP and no experts."""

    intermediate_size: int  # of dense layers
    moe_intermediate_size: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]

    @property
    def dense_layers(self) -> frozenset[int]:
        layers, step = range(self.num_hidden_layers), self.decoder_sparse_step
        return frozenset(n for n in layers if n in self.mlp_only_layers or (n + 1) % step)


def sparse_fields(read: ConfigReader, num_experts: str = "num_experts") -> dict:
    """The fields of SparseConfig beside those of attention; num_experts: the family's key for it."""
    return decoder.expert_fields(read, num_experts) | {
        "intermediate_size": read.integer("intermediate_size"),
        "moe_intermediate_size": read.integer("moe_intermediate_size"),
        "norm_topk_prob": read.boolean("norm_topk_prob", False),
        "decoder_sparse_step": read.integer("decoder_sparse_step", 1),
        "mlp_only_layers": tuple(read.integers("mlp_only_layers")),
    }


def sparse_from_gguf(keys, norm_topk_prob: bool) -> dict:
    """Those fields in the spelling of config.json; every layer of such a file has experts.

    norm_topk_prob: what llama.cpp's graph does where the file is silent.
    """
    return {
        "intermediate_size": keys.integer("feed_forward_length"),
        "moe_intermediate_size": gguf.expert_width(keys),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "norm_topk_prob": keys.boolean("expert_weights_norm", norm_topk_prob),
    }


def make_mlp(c: SparseConfig, n: int, weights, buffers, make_shared=lambda: None):
    """The MLP of layer n: dense, or experts by softmax then top-k; make_shared: makes the shared expert beside them."""
    if n in c.dense_layers:
        return decoder.DenseMLP(f"layers.{n}.mlp", c.intermediate_size, c.hidden_size, weights, buffers)
    router, shared = Router(lib.MOE_SOFTMAX_THEN_TOPK, c.norm_topk_prob), make_shared()
    return decoder.MoeMLP(c, n, c.moe_intermediate_size, weights, buffers, router, shared=shared)
