"""The cases of crosscheck_llama_cpp.py: configurations, file formats, and where the two engines differ on purpose.

A case's config is one of the golden configurations, widened to rows of 256 so that every file format fits, or a
variant of it that stresses one thing.
"""

import math
from dataclasses import dataclass

# llama.cpp's numbers of whole-file formats; None: as converted.
FORMATS = {
    "f32": None, "released": None, "q8_0": 7, "q4_0": 2, "q4_k": 14, "q6_k": 18, "iq4_xs": 30, "iq3_s": 26, "mxfp4": 38,
    "f16": 1, "bf16": 32, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 11, "q5_k": 16, "iq4_nl": 25,
    "tq1_0": 36, "tq2_0": 37, "iq1_s": 24, "iq1_m": 31, "iq2_xxs": 19, "iq2_xs": 20, "iq2_s": 29, "iq3_xxs": 23,
}  # fmt: skip
EVERY_FAMILY = ("f32", "q8_0", "q4_0", "q4_k", "q6_k", "iq4_xs", "iq3_s")
MOE_ONLY = ("mxfp4",)  # its rule: experts in MXFP4, the rest in Q8_0
EVERY_FORMAT = "qwen3_moe"  # the case that runs in all of FORMATS
NEED_IMPORTANCE = {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs"}  # an importance matrix: here all ones
# Scales over 256 values: both engines round the activations that meet these weights alike.
SUPER_BLOCKS = {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "iq3_s", "tq1_0", "tq2_0", *NEED_IMPORTANCE}


@dataclass(frozen=True)
class Case:
    """config: config.json. prompt: tokens before the greedy ones. options: of the converter. family: the module in
    engine/models that reads the file. blocks: experts are stored in MXFP4, as gpt-oss is released."""

    config: dict
    formats: tuple[str, ...] = ("f32",)
    prompt: int = 40
    options: tuple = ()
    blocks: bool = False

    @property
    def family(self) -> str:
        return self.config["model_type"]


WIDTH = 256  # of every row, so that super-blocks fit; `llama` has heads of 24, whose o_proj falls back
SIZES = dict.fromkeys(
    ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH
)
LATENT_SIZES = {
    "kv_lora_rank": 256, "q_lora_rank": 256, "qk_nope_head_dim": 256, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}

SIZES_OF_DENSE = {key: WIDTH for key in ("hidden_size", "intermediate_size")}

# Configurations of the golden files that llama.cpp's graph of the architecture does not compute.
UNSUPPORTED = {
    "qwen2_moe_mixed": "layers without experts, renormalised top-k",
    "qwen3_moe_plain": "layers without experts, top-k that is not renormalised",
    "mixtral_window": "the converter records no sliding window",
    "mistral": "the converter records no sliding window",
}

# Where llama.cpp computes something else than the published model. rule: what each does. truth: whose word counts.
# compared: how the case steps around the difference, so that everything else is still compared.
_ROUND = math.exp(8 * math.log(200 / (2 * math.pi)) / 5 * (1 + 1e-6))
DEVIATIONS = {
    "gpt_oss: YaRN": {
        "rule": "The ramp between kept and stretched frequencies has two borders, which are real numbers. The released "
        'config.json says "truncate": false: they stay so. llama.cpp rounds them outwards to whole pairs.',
        "truth": "config.json and transformers; the GGUF file does not record the key, millstream never rounds gpt-oss",
        "compared": "with a theta for which both borders are whole numbers, less a millionth",
    },
    "gpt_oss: swiglu_limit": {
        "rule": "The file does not record the limit. Both engines use 7, the released value.",
        "truth": "config.json; a checkpoint with another limit is only right from its Hugging Face directory",
        "compared": "with a limit of 7",
    },
    "deepseek_v2: groups": {
        "rule": "A group of experts is judged, in DeepSeek-V2, by its best expert. llama.cpp judges groups of every "
        "model by the sum of their two best, which is DeepSeek-V3's rule.",
        "truth": "transformers and the model's own code (group_limited_greedy); millstream follows them",
        "compared": "with one group; the choice of groups itself is proven against transformers only",
    },
    "yarn: beta_fast, beta_slow": {
        "rule": "The converter writes them when config.json has them. llama.cpp reads them for other architectures "
        "only and uses 32 and 1.",
        "truth": "config.json, whose values the file holds; millstream uses them",
        "compared": "with 32 and 1",
    },
    "deepseek2: YaRN without mscale_all_dim": {
        "rule": "A checkpoint without that key puts 0.1 ln(factor) + 1 into cos and sin, and nothing into the scores. "
        "llama.cpp, when the file has no yarn_log_multiplier, scales the scores by its square as well.",
        "truth": "transformers; released models have the key",
        "compared": "with the key, at 0.707 and 1",
    },
    "olmoe: clip_qkv": {
        "rule": "millstream clamps q, k and v where attention.clamp_kqv says so. llama.cpp neither writes nor reads "
        "the key for this architecture.",
        "truth": "transformers; the released model has no clip",
        "compared": "without a clip",
    },
    "sigmoid routers: renormalisation": {
        "rule": "The sum of the kept weights is the divisor. The models add 1e-20; llama.cpp uses at least 6.1e-5.",
        "truth": "transformers",
        "compared": "as it is: sums that small do not occur",
    },
}  # fmt: skip
# What the cases change for it.
ADAPTED = {
    "gpt_oss": {
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 200, "beta_fast": 32.0,
            "beta_slow": 1.0, "rope_theta": _ROUND, "truncate": False,
        },
    },
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
}  # fmt: skip


def cases() -> dict[str, Case]:
    """Name -> Case: one per golden configuration in many formats, then the variants in float32."""
    import family_models
    import latent_and_sink_models
    import tiny_models

    olmoe = {key: value for key, value in tiny_models.hf_config("mha_base").items() if key != "torch_dtype"}
    golden = {"olmoe": olmoe} | family_models.CONFIGS | latent_and_sink_models.CONFIGS
    found = {}
    for name, config in golden.items():
        if name in UNSUPPORTED or name == "gpt_oss_mxfp4":
            continue
        config = config | ADAPTED.get(name, {})
        config |= {key: size for key, size in SIZES.items() if key in config}
        config |= {key: size for key, size in LATENT_SIZES.items() if config.get(key)}
        if config.get("head_dim", 24) != 24:
            config["head_dim"] = WIDTH // config["num_attention_heads"]
        config |= {key: count for key, count in EXPERTS.items() if key in config}
        config["vocab_size"] = tiny_models.TOKENIZER_SIZE
        if config["model_type"] == "deepseek_v2" and not config["q_lora_rank"]:
            config["num_hidden_layers"] = 27  # llama.cpp knows the variant without q_a by that number
        if config["model_type"] == "deepseek_v3":
            config["scoring_func"] = "sigmoid"  # the converter reads a key that transformers leaves out
        sparse = any(key in config for key in EXPERTS)
        formats = (
            tuple(kind for kind in FORMATS if kind != "released")
            if name == EVERY_FORMAT
            else EVERY_FAMILY + MOE_ONLY * sparse
        )
        found[name] = Case(config, formats)
    found["mistral_no_window"] = variant(Case(golden["mistral"] | SIZES_OF_DENSE), sliding_window=None)
    found["gpt_oss_released"] = Case(found["gpt_oss"].config, ("released",), blocks=True)
    return found | {name: variant(found[base], **what) for name, (base, what) in VARIANTS.items()}


def variant(base: Case, prompt: int = 40, options: tuple = (), formats: tuple[str, ...] = ("f32",), **changes) -> Case:
    """base with changes of its config; None removes a key."""
    config = base.config | changes
    return Case({k: v for k, v in config.items() if v is not None or base.config.get(k, "") is None}, formats, prompt,
                options)  # fmt: skip


def _rope(kind: str, theta: float = 10000.0, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}, "rope_theta": None}


def _yarn(factor: float, original: int, **more) -> dict:
    return _rope("yarn", factor=factor, original_max_position_embeddings=original, **more)


_LONG = {"max_position_embeddings": 1024}
_QUANTIZED = {"formats": ("f32", "q8_0", "q4_k")}


def _heads(query: int, kv: int, **more) -> dict:
    return {"num_attention_heads": query, "num_key_value_heads": kv, **more} | _QUANTIZED


_LLAMA3 = _rope(
    "llama3", 500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
# name -> (case it is made from, what changes). Each stresses one rule or one shape.
VARIANTS = {
    # Shapes: heads, head widths, ratios of queries to keys, vocabularies, numbers of experts and layers; rows of q8_0
    # and q4_k that end a strip early.
    "olmoe_heads_of_40": ("olmoe", _heads(4, 4) | {"hidden_size": 160}),
    "qwen3_moe_one_kv_head": ("qwen3_moe", _heads(5, 1, head_dim=80)),
    "qwen3_moe_3_to_1": ("qwen3_moe", _heads(6, 2, head_dim=72)),
    "qwen3_8_to_1_heads_of_8": ("qwen3", _heads(8, 1, head_dim=8)),
    "llama_heads_of_256": ("llama_bias", _heads(2, 1, head_dim=256)),
    "mixtral_heads_of_120": ("mixtral", _heads(3, 3, head_dim=120)),
    "olmoe_vocab_303": ("olmoe", {"vocab_size": 303} | _QUANTIZED),
    "qwen2_moe_vocab_301": ("qwen2_moe", {"vocab_size": 301} | _QUANTIZED),
    "gpt_oss_vocab_297": ("gpt_oss", {"vocab_size": 297} | _QUANTIZED),
    "gpt_oss_5_experts": ("gpt_oss", {"num_local_experts": 5, "num_experts_per_tok": 2} | _QUANTIZED),
    "qwen3_moe_top_1": ("qwen3_moe", {"num_experts_per_tok": 1} | _QUANTIZED),
    "olmoe_all_experts": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 6} | _QUANTIZED),
    "mixtral_2_experts": ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1} | _QUANTIZED),
    "granitemoe_one_layer": ("granitemoe", {"num_hidden_layers": 1} | _QUANTIZED),
    # Tied heads.
    "qwen3_moe_tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "granitemoe_tied": ("granitemoe", {"tie_word_embeddings": True}),
    "mixtral_tied": ("mixtral", {"tie_word_embeddings": True}),
    "deepseek_v3_tied": ("deepseek_v3", {"tie_word_embeddings": True}),
    # Rotation: scalings, parts of a head.
    "llama_linear": ("llama_bias", _rope("linear", factor=4.0)),
    "llama_yarn": ("llama_bias", _yarn(8.0, 32)),
    "llama3_theta": ("llama", _LLAMA3),
    "mixtral_llama3": ("mixtral", _LLAMA3),
    "mixtral_linear": ("mixtral", _rope("linear", factor=2.0)),
    "qwen2_yarn": ("qwen2", _yarn(4.0, 64)),
    "qwen2_moe_yarn": ("qwen2_moe", _yarn(4.0, 64)),
    "qwen3_yarn_long": ("qwen3", _yarn(4.0, 64) | {"prompt": 150}),
    "qwen3_moe_yarn": ("qwen3_moe", _yarn(40.0, 16, beta_fast=32.0, beta_slow=1.0)),
    "olmoe_linear": ("olmoe", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "glm4_moe_quarter_rotated": ("glm4_moe", _rope("default", 1e6, partial_rotary_factor=0.25)),
    "glm4_moe_yarn": ("glm4_moe", _yarn(4.0, 64, partial_rotary_factor=0.5)),
    "granitemoe_linear": ("granitemoe", _rope("linear", factor=2.0)),
    # Windows, against a prompt of 40 and 64 more.
    "gpt_oss_window_1": ("gpt_oss", {"sliding_window": 1}),
    "gpt_oss_window_40": ("gpt_oss", {"sliding_window": 40}),
    "gpt_oss_window_41": ("gpt_oss", {"sliding_window": 41}),
    "gpt_oss_window_never_reached": ("gpt_oss", {"sliding_window": 200}),
    # Without YaRN: the 1e-6 of the theta above is 4e-4 of a logit after 700 positions.
    "gpt_oss_long_prompt": ("gpt_oss", {"prompt": 700, "sliding_window": 96} | _LONG | _rope("default", 150000.0)),
    "gpt_oss_no_yarn": ("gpt_oss", _rope("default", 150000.0)),
    # Routing and experts beside the routed ones.
    "deepseek_v3_not_renormalised": ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 0.7}),
    "deepseek_v3_1_of_2_groups": ("deepseek_v3", {"n_group": 2, "topk_group": 1}),  # llama.cpp aborts on 2 of 2
    "deepseek_v3_one_group": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "deepseek_v3_no_dense_layer": ("deepseek_v3", {"first_k_dense_replace": 0, "n_shared_experts": 3}),
    "deepseek_v3_two_dense_layers": ("deepseek_v3", {"first_k_dense_replace": 2, "n_shared_experts": 1}),
    "deepseek_v3_no_yarn": ("deepseek_v3", _rope("default")),
    "deepseek_v2_mscale_1": ("deepseek_v2", _yarn(40.0, 32, mscale=1.0, mscale_all_dim=1.0)),
    "deepseek_v2_long_prompt": ("deepseek_v2", {"prompt": 600} | _LONG),
    "glm4_moe_renormalised_unscaled": ("glm4_moe", {"routed_scaling_factor": 1.0, "n_shared_experts": 2}),
    "glm4_moe_dense_mix": ("glm4_moe_groups", {"first_k_dense_replace": 1, "num_hidden_layers": 4}),
    "qwen2_moe_wide_shared": ("qwen2_moe", {"shared_expert_intermediate_size": 384}),
    # Files in parts. (The converter fuses gate and up for none of these architectures.)
    "olmoe_split": ("olmoe", {"options": (("split_max_tensors", 7),)}),
    "deepseek_v3_split": ("deepseek_v3", {"options": (("split_max_tensors", 9),)}),
}  # fmt: skip
