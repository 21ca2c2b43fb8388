"""Make tests/data/golden/rope.json: frequencies and attention factors of every scaling rule, by transformers.

Needs the extra `oracle` (torch, transformers); its rules work in float32, so they agree to about 1e-6.
"""

import json
from pathlib import Path

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

OUT = Path(__file__).resolve().parents[1] / "tests" / "data" / "golden" / "rope.json"
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, part of the head": {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "llama3 of the model's positions": LLAMA3,
    "yarn": YARN,
    "yarn, large theta": YARN | {"rope_theta": 1e6, "original_max_position_embeddings": 4096, "factor": 40.0},
    "yarn, not truncated": YARN | {"truncate": False, "rope_theta": 150000.0},
    "yarn, own ramp": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, attention factor": YARN | {"attention_factor": 0.75},
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, mscale of one kind": YARN | {"mscale": 0.707},
    "yarn, no extension": YARN | {"factor": 1.0},
    "yarn, empty ramp": YARN | {"original_max_position_embeddings": 6, "beta_fast": 1.0, "beta_slow": 1.0},
    "yarn, part of the head": YARN | {"partial_rotary_factor": 0.25},
}


def main():
    found = []
    for name, rule in CASES.items():
        parameters = {"rope_theta": 10000.0, **rule}
        config = LlamaConfig(
            hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_parameters=dict(parameters)
        )
        inv_freq, factor = ROPE_INIT_FUNCTIONS[rule["rope_type"]](config, "cpu")
        found.append({"name": name, "head_dim": 64, "max_position_embeddings": 512, "rope_parameters": parameters,
                      "inv_freq": inv_freq.tolist(), "attention_factor": factor})  # fmt: skip
    OUT.write_text("[\n" + ",\n".join(json.dumps(case) for case in found) + "\n]\n")


if __name__ == "__main__":
    main()
