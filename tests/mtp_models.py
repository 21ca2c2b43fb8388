"""The tiny DeepSeek-V3 and GLM-4.5 of the golden files with a layer for multi-token prediction behind the others, in
the published names. Shapes of the layer's own tensors are written down here; its decoder layer is like the one before.
"""

from pathlib import Path

import latent_and_sink_models as models
import numpy as np

NAMES = ("deepseek_v3", "glm4_moe")
LAYER = 3  # num_hidden_layers of both


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes of the layer."""
    file = models.golden(name)
    hidden, before = file["config"]["hidden_size"], f"model.layers.{LAYER - 1}."
    layer = {f"model.layers.{LAYER}.{k.removeprefix(before)}": s for k, s in file["shapes"].items() if before in k}
    p = f"model.layers.{LAYER}"
    return layer | {
        f"{p}.enorm.weight": (hidden,),
        f"{p}.hnorm.weight": (hidden,),
        f"{p}.eh_proj.weight": (hidden, 2 * hidden),
        f"{p}.shared_head.norm.weight": (hidden,),
    }


def weights(name: str) -> dict[str, np.ndarray]:
    """float32 weights of the whole checkpoint, with the copies of embedding and head that released ones hold."""
    file = models.golden(name)
    own = models.make_weights(file["shapes"], file["seed"])
    copies = {
        f"model.layers.{LAYER}.embed_tokens.weight": own["model.embed_tokens.weight"].copy(),
        f"model.layers.{LAYER}.shared_head.head.weight": own["lm_head.weight"].copy(),
    }
    return own | models.make_weights(shapes(name), file["seed"]) | copies


def knowing(weights):
    """The same with a layer that is always right: decoder layers that add nothing (o_proj and down_proj are zero) make
    the next token a function of the present one, and eh_proj = [1 | 0] lets the layer compute that of its own token."""
    p = f"model.layers.{LAYER}."
    silent = {n: np.zeros_like(w) for n, w in weights.items() if n.endswith(("o_proj.weight", "down_proj.weight"))}
    width = len(weights["model.norm.weight"])
    return weights | silent | {
        f"{p}eh_proj.weight": np.concatenate([np.eye(width), np.zeros((width, width))], 1).astype(np.float32),
        f"{p}enorm.weight": np.ones(width, np.float32),
        f"{p}shared_head.norm.weight": weights["model.norm.weight"].copy(),
    }  # fmt: skip


def checkpoint(folder: Path, name: str, tensors: dict[str, np.ndarray] | None = None) -> Path:
    return models.write_hf_dir(folder, models.golden(name)["config"], tensors or weights(name))
