"""config.json as released: every key is known, its meaning read; what would change the mathematics is refused."""

import re
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.models import _decoder, family, known

MODELS_MD = Path(__file__).resolve().parents[1] / "docs" / "models.md"

COMMON = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "bos_token_id": 0,
    "eos_token_id": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.54.0",
}  # fmt: skip
LATENT = COMMON | {
    "attention_bias": False, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1, "pretraining_tp": 1,
    "seq_aux": True, "aux_loss_alpha": 0.001, "rms_norm_eps": 1e-06, "rope_theta": 10000, "ep_size": 1,
}  # fmt: skip
CONFIGS = {
    "deepseek_v2": LATENT | {
        "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048,
        "intermediate_size": 10944, "max_position_embeddings": 163840, "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "q_lora_rank": None, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "topk_group": 1, "topk_method": "greedy", "vocab_size": 102400,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
    },
    "deepseek_v3": LATENT | {
        "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_size": 7168,
        "intermediate_size": 18432, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
    },
    "glm4_moe": COMMON | {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "pad_token_id": 151329, "head_dim": 128,
        "hidden_size": 5120, "partial_rotary_factor": 0.5, "intermediate_size": 12288,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe", "moe_intermediate_size": 1536, "norm_topk_prob": True, "num_attention_heads": 96,
        "n_group": 1, "topk_group": 1, "n_routed_experts": 160, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_hidden_layers": 92, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "num_nextn_predict_layers": 1,
        "use_qk_norm": True, "vocab_size": 151552,
    },
    "gpt_oss": COMMON | {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
        "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05, "router_aux_loss_coef": 0.9,
        "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                         "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
    },
}  # fmt: skip
CONFIGS["kimi_k2"] = CONFIGS["deepseek_v3"] | {
    "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 384, "num_attention_heads": 64,
    "num_key_value_heads": 64, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_released_config_is_read(name):
    config = family(name).Config.from_dict(CONFIGS[name])
    family(name).shapes(config)
    assert config.num_experts_per_tok == CONFIGS[name]["num_experts_per_tok"]


def test_meanings():
    read = {name: family(name).Config.from_dict(config) for name, config in CONFIGS.items()}
    v3, glm, oss = read["deepseek_v3"], read["glm4_moe"], read["gpt_oss"]
    assert v3.dense_layers == {0, 1, 2} and v3.rope.interleaved and v3.rope.rotary_dim == 64
    assert v3.attention_scale == pytest.approx(192**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2, rel=1e-12)
    assert glm.rope.rotary_dim == 64 and not glm.rope.interleaved and len(glm.dense_layers) == 3
    assert glm.unused_in_checkpoint("model.layers.92.eh_proj.weight")
    assert not glm.unused_in_checkpoint("model.layers.91.eh_proj.weight")
    assert oss.windows == (128, 0) * 12 and oss.rope.scaling.truncate is False


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"topk_group": 9}, "topk_group"),
        ("deepseek_v3", {"index_topk": 2048}, "unknown keys index_topk"),
        ("deepseek_v3", {"num_key_value_heads": 64}, "num_key_value_heads"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("glm4_moe", {"num_experts_per_tok": 200}, "num_experts_per_tok 200"),
        ("glm4_moe", {"partial_rotary_factor": 0.29}, "partial_rotary_factor"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gpt_oss", {"layer_types": ["linear_attention"] * 24}, "layer_types"),
        ("gpt_oss", {"experts_per_token": 2}, "experts_per_token"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_changed_mathematics_is_refused_by_name(name, change, message):
    with pytest.raises(ConfigError, match=message):
        family(name).Config.from_dict(CONFIGS[name] | change)


def test_harmless_keys_are_listed_in_the_documentation():
    text = re.search(r"\*\*Keys of config.json that change nothing\*\*(.*?)\n## ", MODELS_MD.read_text(), re.S)[1]
    common, _, rows = text.partition("| family |")
    assert set(re.findall(r"`(\w+)`", common)) == _decoder.HARMLESS
    listed = {}
    for names, keys in re.findall(r"^\| (`.*?) \| (.*?) \|$", rows, re.M):
        found = set(re.findall(r"`(\w+)`", keys.partition("(")[0]))
        listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), found)
    assert {name: family(name).HARMLESS - _decoder.HARMLESS for name in known()} == {
        name: listed.get(name, set()) for name in known()
    }
