"""Configurations of the families that route by softmax, and of dense ones, for golden files of tiny random models.

One entry per rule that an engine can get wrong; files, weights and golden results are made and read like those of
latent_and_sink_models.
"""

from latent_and_sink_models import _COMMON as COMMON

_MOE = COMMON | {"num_key_value_heads": 2, "num_hidden_layers": 3, "num_experts_per_tok": 3}
_QWEN2_MOE = _MOE | {
    "model_type": "qwen2_moe", "num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    "intermediate_size": 96, "rope_theta": 1e6,
}  # fmt: skip
_QWEN3_MOE = _MOE | {
    "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 48, "intermediate_size": 96, "head_dim": 32,
}  # fmt: skip
_MIXTRAL = _MOE | {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 64, "rope_theta": 1e6}
_GRANITE = _MOE | {
    "model_type": "granitemoe", "num_local_experts": 8, "intermediate_size": 48, "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4, "residual_multiplier": 0.6, "logits_scaling": 4.0, "rope_theta": 10000.0,
}  # fmt: skip
_DENSE = COMMON | {"num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 96, "rope_theta": 10000.0}

CONFIGS = {
    "qwen2_moe": _QWEN2_MOE | {"norm_topk_prob": False},
    # Layers 0 and 2 by the step, layer 3 by the list have no experts.
    "qwen2_moe_mixed": _QWEN2_MOE | {
        "norm_topk_prob": True, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3],
        "tie_word_embeddings": True,
    },
    "qwen3_moe": _QWEN3_MOE | {"norm_topk_prob": True, "rope_theta": 1e6},
    "qwen3_moe_plain": _QWEN3_MOE | {
        "norm_topk_prob": False, "attention_bias": True, "mlp_only_layers": [0], "head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
        },
    },
    "mixtral": _MIXTRAL | {"rms_norm_eps": 1e-3},
    "mixtral_window": _MIXTRAL | {
        "sliding_window": 21, "head_dim": 24,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    },
    "granitemoe": _GRANITE,
    "granitemoe_bias": _GRANITE | {
        "attention_bias": True, "logits_scaling": 0.5, "residual_multiplier": 1.0, "embedding_multiplier": 1.0,
    },
    "llama": _DENSE | {
        "model_type": "llama", "head_dim": 24, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_theta": 10000.0,
        },
    },
    "llama_bias": _DENSE | {"model_type": "llama", "attention_bias": True},
    "mistral": _DENSE | {"model_type": "mistral", "sliding_window": 21},
    "qwen2": _DENSE | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": _DENSE | {"model_type": "qwen3", "head_dim": 32, "rope_theta": 1e6},
}  # fmt: skip
