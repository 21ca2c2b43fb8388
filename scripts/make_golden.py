"""Make tests/data/golden/*.npz: transformers' OLMoE on the tiny random models of tests/tiny_models.py.

Needs the extra `oracle` (torch, transformers). Every file is checked before it is written: all keys loaded, loaded
parameters equal to the stored ones, cached decoding equal to a full forward, agreement with the float64 numpy
reference, comfortable margins, and no broken rule that would go unnoticed.

    python scripts/make_golden.py [NAME ...]              write the golden files
    python scripts/make_golden.py --find-seeds [NAME ...] print, per config, the first seed with good margins (no torch)
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch: one thread, one order of additions
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import reference_olmoe as reference  # noqa: E402
import tiny_models  # noqa: E402

GOLDEN_DIR = ROOT / "tests" / "data" / "golden"
NUM_GREEDY = 80
MIN_MARGIN = 5e-3  # top-1 minus top-2 logit over max |logit|, every greedy step
MIN_ROUTER_GAP = 1e-3  # (last chosen - first rejected) / last chosen probability, every token and layer
MIN_PROMPT_ROUTER_GAP = 3e-2  # same, prompt tokens only: 16-bit weights still choose the same experts
MIN_DISTINCT = 30  # different tokens among the greedy ones
MAX_REFERENCE_ERROR = 1e-5
MIN_MISTAKE_ERROR = 1e-2


def encode_prompt():
    """Return the prompt's ids under the tiny tokenizer."""
    from tokenizers import Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.make_hf_dir(folder, "mha_base")
        return Tokenizer.from_file(str(path / "tokenizer.json")).encode(tiny_models.PROMPT).ids


def margins(logits, scale):
    """Return (top-1 - top-2) / scale per row of logits [T, V]."""
    top = np.sort(logits, axis=-1)[:, -2:]
    return (top[:, 1] - top[:, 0]) / scale


def router_gap(trace, num_active):
    """Return the smallest relative gap between the last chosen and the first rejected expert."""
    gaps = []
    for _, _, probs in trace:
        ranked = -np.sort(-probs, axis=-1)
        gaps.append(1.0 - ranked[:, num_active] / ranked[:, num_active - 1])
    return float(np.min(gaps))


# ---------------------------------------------------------------------------------------------------------------------
# Seed search: numpy only, gives up on a seed at its first weak step
# ---------------------------------------------------------------------------------------------------------------------


def seed_is_good(config, seed, prompt_ids):
    """Run the reference greedily and return whether margins, routing gaps and variety all hold."""
    weights = reference.float64_weights(tiny_models.make_weights(config, seed))
    trace = []
    reference.forward(weights, config, prompt_ids, trace=trace)
    if router_gap(trace, config["num_experts_per_tok"]) < MIN_PROMPT_ROUTER_GAP:
        return False
    ids, scale = list(prompt_ids), 0.0
    forbidden = {tiny_models.EOS_TOKEN_ID, tiny_models.PAD_TOKEN_ID}
    for _ in range(NUM_GREEDY):
        logits = reference.forward(weights, config, ids)
        scale = max(scale, float(np.max(np.abs(logits))))
        ids.append(int(np.argmax(logits[-1])))
        # a later, larger max |logit| shrinks earlier margins, hence the check of all rows below
        if ids[-1] in forbidden or margins(logits[-1:], scale)[0] < MIN_MARGIN:
            return False
    trace = []
    logits = reference.forward(weights, config, ids[:-1], trace=trace)
    steps = logits[len(prompt_ids) - 1 :]
    return bool(
        margins(steps, np.max(np.abs(logits))).min() >= MIN_MARGIN
        and router_gap(trace, config["num_experts_per_tok"]) >= MIN_ROUTER_GAP
        and len(set(ids[len(prompt_ids) :])) >= MIN_DISTINCT
    )


def find_seeds(names, max_seeds=20000):
    """Print the first good seed of each config, to be recorded in tiny_models.CONFIGS."""
    prompt_ids = encode_prompt()
    for name in names:
        config = tiny_models.hf_config(name)
        seed = next((s for s in range(max_seeds) if seed_is_good(config, s, prompt_ids)), None)
        print(f"{name}: seed {seed}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The oracle
# ---------------------------------------------------------------------------------------------------------------------


def load_oracle(path):
    """Load with transformers: float32, eager attention and experts; refuse any missing or unexpected key."""
    import torch
    from transformers import OlmoeForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model, info = OlmoeForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    problems = {key: value for key, value in info.items() if value}
    assert not problems, f"{path}: loading reported {problems}"
    assert model.config._attn_implementation == "eager" and model.config._experts_implementation == "eager"
    return model.eval()


def check_parameters(model, weights):
    """Assert that the model holds every stored tensor bit for bit, fused experts included, and nothing else."""
    loaded = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    num_experts = model.config.num_experts
    for layer in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate_up, down = loaded.pop(prefix + "gate_up_proj"), loaded.pop(prefix + "down_proj")
        assert gate_up.shape[0] == down.shape[0] == num_experts
        for expert in range(num_experts):
            gate_rows, up_rows = np.split(gate_up[expert], 2)
            loaded[f"{prefix}{expert}.gate_proj.weight"] = gate_rows
            loaded[f"{prefix}{expert}.up_proj.weight"] = up_rows
            loaded[f"{prefix}{expert}.down_proj.weight"] = down[expert]
    assert loaded.keys() == weights.keys(), loaded.keys() ^ weights.keys()
    for name, array in weights.items():
        assert np.array_equal(loaded[name], array), f"{name} differs from the file"


def check_stored_values(path, weights):
    """Assert that the safetensors library reads our hand-written file back to the same values."""
    from safetensors.numpy import load_file

    stored = load_file(path / "model.safetensors")
    assert stored.keys() == weights.keys()
    assert all(np.array_equal(stored[name], array) for name, array in weights.items())


class Recorder:
    """Collects router choices, and the share of q/k/v values beyond clip_qkv, through forward hooks."""

    def __init__(self, model):
        self.routes = []  # (ids [T, A], weights [T, A]) per layer, in call order
        self.clipped_shares = []
        self.limit = model.config.clip_qkv
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(self._on_router)
            for module in (layer.self_attn.q_norm, layer.self_attn.k_norm, layer.self_attn.v_proj):
                module.register_forward_hook(self._on_qkv)

    def _on_router(self, _module, _inputs, output):
        _logits, top_weights, top_ids = output
        self.routes.append((top_ids.numpy().copy(), top_weights.numpy().copy()))

    def _on_qkv(self, _module, _inputs, output):
        if self.limit is not None:  # the clamp is in place: measure now
            self.clipped_shares.append(float((output.abs() > self.limit).float().mean()))


def run_oracle(model, prompt_ids):
    """Prefill, then cached greedy decoding; EOS has no effect. Return the arrays of the golden file."""
    import torch
    from transformers import DynamicCache

    recorder, cache = Recorder(model), DynamicCache(config=model.config)
    with torch.inference_mode():
        prefill = model(torch.tensor([prompt_ids]), cache=cache).logits[0]
        routes = recorder.routes[:]
        greedy, steps = [int(prefill[-1].argmax())], []
        while len(greedy) < NUM_GREEDY:
            steps.append(model(torch.tensor([[greedy[-1]]]), cache=cache).logits[0, -1])
            greedy.append(int(steps[-1].argmax()))
        decode = torch.stack(steps)
        full = model(torch.tensor([[*prompt_ids, *greedy[:-1]]]), use_cache=False).logits[0]
    cached = torch.cat([prefill, decode]).numpy()
    assert cache.get_seq_length() == len(prompt_ids) + NUM_GREEDY - 1
    assert reference.relative_error(cached, full.numpy()) <= MAX_REFERENCE_ERROR, "cached decoding differs"
    assert all(share > 0.02 for share in recorder.clipped_shares), "clip_qkv clips next to nothing"
    return {
        "prompt_ids": np.array(prompt_ids, np.int32),
        "greedy_ids": np.array(greedy, np.int32),
        "prefill_logits": prefill.numpy(),
        "decode_logits": decode.numpy(),
        "router_ids": np.stack([ids for ids, _ in routes]).astype(np.int16),
        "router_weights": np.stack([chosen for _, chosen in routes]),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Checks against the numpy reference
# ---------------------------------------------------------------------------------------------------------------------


def check_against_reference(arrays, config, weights):
    """Assert agreement and comfortable margins; return the measured figures."""
    weights = reference.float64_weights(weights)
    num_prompt, trace = len(arrays["prompt_ids"]), []
    ids = [*arrays["prompt_ids"], *arrays["greedy_ids"][:-1]]
    golden = np.concatenate([arrays["prefill_logits"], arrays["decode_logits"]])
    ours = reference.forward(weights, config, ids, trace=trace)
    error = reference.relative_error(ours, golden)
    assert error <= MAX_REFERENCE_ERROR, error
    for layer, (top_ids, top_weights, _) in enumerate(trace):
        assert np.array_equal(top_ids[:num_prompt], arrays["router_ids"][layer]), layer
        assert reference.relative_error(top_weights[:num_prompt], arrays["router_weights"][layer]) <= 1e-5, layer
    margin = float(margins(golden[num_prompt - 1 :], np.max(np.abs(golden))).min())
    num_active = config["num_experts_per_tok"]
    gap = router_gap(trace, num_active)
    prompt_gap = router_gap([(None, None, probs[:num_prompt]) for _, _, probs in trace], num_active)
    greedy = arrays["greedy_ids"].tolist()
    assert margin >= MIN_MARGIN, margin
    assert gap >= MIN_ROUTER_GAP and prompt_gap >= MIN_PROMPT_ROUTER_GAP, (gap, prompt_gap)
    assert len(set(greedy)) >= MIN_DISTINCT, "greedy continuation collapses"
    assert tiny_models.EOS_TOKEN_ID not in greedy, "an engine that stops at EOS would stop early"
    return {"error": error, "min_margin": margin, "min_router_gap": gap, "min_prompt_router_gap": prompt_gap}


def measure_mistakes(arrays, config, weights):
    """Return {rule: relative change of the prefill logits}; assert that each is large."""
    weights = reference.float64_weights(weights)
    errors = {}
    for rule in reference.mistakes_that_bite(config):
        logits = reference.forward(weights, config, arrays["prompt_ids"], **{rule: True})
        errors[rule] = reference.relative_error(logits, arrays["prefill_logits"])
        assert errors[rule] > MIN_MISTAKE_ERROR, (rule, errors[rule])
    return errors


def make_golden(name):
    """Build, run, check and write one golden file; print its figures."""
    import torch
    import transformers

    seed, config = tiny_models.golden_seed(name), tiny_models.hf_config(name)
    weights = tiny_models.make_weights(config, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.make_hf_dir(folder, name)
        check_stored_values(path, weights)
        model = load_oracle(path)
    check_parameters(model, weights)
    arrays = run_oracle(model, encode_prompt())
    figures = check_against_reference(arrays, config, weights)
    mistakes = measure_mistakes(arrays, config, weights)
    arrays |= {
        "seed": np.int64(seed),
        "config_json": np.array(json.dumps(config, sort_keys=True)),
        "weights_sha256": np.array(tiny_models.weights_sha256(weights)),
        **{key: np.float64(value) for key, value in figures.items() if key != "error"},
        "torch_version": np.array(torch.__version__),
        "transformers_version": np.array(transformers.__version__),
    }
    GOLDEN_DIR.mkdir(parents=True, exist_ok=True)
    file = GOLDEN_DIR / f"{name}.npz"
    np.savez_compressed(file, **arrays)
    print(f"{name}: seed {seed}, " + ", ".join(f"{key} {value:.1e}" for key, value in figures.items()))
    print(f"    {len(set(arrays['greedy_ids'].tolist()))} distinct tokens, {file.stat().st_size} bytes")
    print("    broken rules: " + ", ".join(f"{rule} {value:.2f}" for rule, value in mistakes.items()), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="configs of tests/tiny_models.py (default: all)")
    parser.add_argument(
        "--find-seeds", action="store_true", help="search seeds with the numpy reference, write nothing"
    )
    args = parser.parse_args()
    names = args.names or list(tiny_models.CONFIGS)
    if args.find_seeds:
        find_seeds(names)
        return
    for name in names:
        make_golden(name)


if __name__ == "__main__":
    main()
