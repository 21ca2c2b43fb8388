"""Turn a training checkpoint into a Hugging Face directory, check it, and measure the exported weights.

Owns the exported files and every published figure of the model; all of them come from the bf16 weights, loaded
through transformers and computed in f32.

    python scripts/export_tiny_moe.py export --work build/corpus --out engine/data/tiny-moe/hf
    python scripts/export_tiny_moe.py evaluate --out engine/data/tiny-moe/hf --heldout tests/data/heldout
    python scripts/export_tiny_moe.py usage --out engine/data/tiny-moe/hf --heldout tests/data/heldout
    python scripts/export_tiny_moe.py sample --out engine/data/tiny-moe/hf --prompt "NAME"
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from make_corpus import DOMAINS
from safetensors.torch import save_file
from tiny_moe_model import ModelConfig, TinyMoe
from tokenizers import Tokenizer
from train_tiny_moe import END_OF_TEXT, PADDING
from transformers import GenerationConfig, OlmoeConfig, OlmoeForCausalLM

# Both programs sum in different orders; a wrong pairing, norm or expert changes logits by whole units.
MAX_LOGIT_DIFFERENCE = 1e-4
CONTEXT, STRIDE = 2048, 1024
USAGE_WINDOWS = 4


def hf_config(config, tokenizer):
    return OlmoeConfig(
        architectures=["OlmoeForCausalLM"],
        dtype="bfloat16",
        tie_word_embeddings=True,
        norm_topk_prob=False,
        num_key_value_heads=config.num_attention_heads,
        clip_qkv=None,
        router_aux_loss_coef=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=tokenizer.token_to_id(PADDING),
        **{key: value for key, value in config.as_dict().items() if key != "rope_theta"},
    )


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer, directory, context):
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_eos_token": False,
            "add_prefix_space": False,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": END_OF_TEXT,
            "model_max_length": context,
            "pad_token": PADDING,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": None,
        },
    )


def rounded_model(checkpoint):
    """The training model with its weights rounded to bf16, computing in f32."""
    state = torch.load(checkpoint)
    model = TinyMoe(ModelConfig(**state["config"]))
    model.load_state_dict({name: tensor.to(torch.bfloat16).float() for name, tensor in state["model"].items()})
    return model, state


def export(args):
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    model, state = rounded_model(args.checkpoint or args.work / "checkpoint.pt")
    # Written beside the target and renamed, so that no reader ever sees half a model.
    temporary = args.out.with_name(args.out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(model.checkpoint_tensors(), temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "model.safetensors").chmod(0o644)  # the library makes it private
    hf_config(model.config, tokenizer).save_pretrained(temporary)
    GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=tokenizer.token_to_id(PADDING),
    ).save_pretrained(temporary)
    write_tokenizer(tokenizer, temporary, model.config.max_position_embeddings)
    check_logits(temporary, model)
    shutil.rmtree(args.out, ignore_errors=True)
    temporary.replace(args.out)
    print(
        f"{args.out}: step {state['step']}, {state['tokens']:,} tokens, {state['seconds'] / 60:.1f} minutes, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters",
        file=sys.stderr,
    )


@torch.no_grad()
def check_logits(directory, model):
    reference, info = OlmoeForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value and key != "error_msgs"}
    if wrong:
        raise SystemExit(f"transformers does not load every tensor of {directory}: {wrong}")
    ids = torch.randint(0, model.config.vocab_size, (1, 300), generator=torch.Generator().manual_seed(0))
    difference = (reference(ids).logits - model.logits(ids)).abs().max().item()
    print(f"largest logit difference between transformers and the training model: {difference:.2e}", file=sys.stderr)
    if not difference <= MAX_LOGIT_DIFFERENCE:
        raise SystemExit(f"logit difference {difference} exceeds {MAX_LOGIT_DIFFERENCE}")


def load(directory):
    model = OlmoeForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model, Tokenizer.from_file(str(directory / "tokenizer.json"))


def token_ids(tokenizer, raw):
    ids = tokenizer.encode(raw.decode("utf-8")).ids
    if tokenizer.decode(ids, skip_special_tokens=False).encode() != raw:
        raise SystemExit("the tokens do not give the text back, so bits per byte would not be comparable")
    return torch.tensor([tokenizer.token_to_id(END_OF_TEXT), *ids])


@torch.no_grad()
def nats(model, ids, context, stride):
    """Summed surprise of ids[1:]: overlapping windows, every token scored once with at least context - stride
    tokens before it (fewer only in the first window)."""
    total, scored = 0.0, 1  # ids[0] is given
    while scored < len(ids):
        end = min(len(ids), context + 1 if scored == 1 else scored + stride)
        start = max(0, end - 1 - context)
        logits = model(ids[None, start : end - 1]).logits[0, scored - 1 - start :]
        total += torch.nn.functional.cross_entropy(logits, ids[scored:end], reduction="sum").item()
        scored = end
    return total


def xz_bytes(path):
    return len(subprocess.run(["xz", "-9e", "-c", str(path)], check=True, stdout=subprocess.PIPE).stdout)


def evaluate(args):
    model, tokenizer = load(args.out)
    domains = {}
    for domain in DOMAINS:
        path = args.heldout / f"{domain}.txt"
        raw = path.read_bytes()
        ids = token_ids(tokenizer, raw)
        bits = nats(model, ids, CONTEXT, STRIDE) / math.log(2) / len(raw)
        xz = 8 * xz_bytes(path) / len(raw)
        domains[domain] = {
            "bytes": len(raw),
            "tokens": len(ids) - 1,
            "xz_bits_per_byte": round(xz, 4),
            "model_bits_per_byte": round(bits, 4),
            "saving": round(1 - bits / xz, 4),
        }
        print(
            f"{domain:8} {len(raw):7,} bytes  xz {xz:.4f}  model {bits:.4f}  {1 - bits / xz:.1%} fewer",
            file=sys.stderr,
            flush=True,
        )
    settings = {
        "context": CONTEXT,
        "stride": STRIDE,
        "first_token": END_OF_TEXT,
        "weights": "bf16",
        "compute": "f32",
        "xz_command": "xz -9e -c FILE | wc -c",
        "implementation": "transformers OlmoeForCausalLM",
    }
    if args.json:
        write_json(args.json, {"settings": settings, "domains": domains})


@torch.no_grad()
def usage(args):
    """Share of each expert among the routed tokens, by layer and domain, over the first windows of each text."""
    model, tokenizer = load(args.out)
    for domain in DOMAINS:
        ids = token_ids(tokenizer, (args.heldout / f"{domain}.txt").read_bytes())
        windows = [ids[start : start + CONTEXT] for start in range(0, min(len(ids), USAGE_WINDOWS * CONTEXT), CONTEXT)]
        logits = [model(window[None], output_router_logits=True).router_logits for window in windows]
        for layer in range(model.config.num_hidden_layers):
            routed = torch.cat([window[layer].reshape(-1, model.config.num_experts) for window in logits])
            chosen = routed.topk(model.config.num_experts_per_tok, dim=-1).indices
            share = torch.bincount(chosen.flatten(), minlength=model.config.num_experts) / chosen.numel()
            print(f"| {domain} | {layer} | " + " | ".join(f"{100 * value:.0f}" for value in share) + " |")


@torch.no_grad()
def sample(args):
    model, tokenizer = load(args.out)
    torch.manual_seed(args.seed)
    ids = torch.tensor([tokenizer.encode(args.prompt).ids or [tokenizer.token_to_id(END_OF_TEXT)]])
    options = (
        {"do_sample": True, "temperature": args.temperature, "top_p": 0.95}
        if args.temperature
        else {"do_sample": False, "temperature": None, "top_p": None}
    )
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.tokens, **options)
    print(tokenizer.decode(out[0].tolist(), skip_special_tokens=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    commands = parser.add_subparsers(dest="command", required=True)
    for function in (export, evaluate, usage, sample):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("--out", type=Path, required=True, help="the Hugging Face directory")
        if function is export:
            command.add_argument("--work", type=Path, required=True, help="the training directory")
            command.add_argument("--checkpoint", type=Path, help="default: checkpoint.pt in the training directory")
        if function in (evaluate, usage):
            command.add_argument("--heldout", type=Path, required=True)
        if function is evaluate:
            command.add_argument("--json", type=Path, help="where to write the figures")
        if function is sample:
            command.add_argument("--prompt", default="")
            command.add_argument("--tokens", type=int, default=200)
            command.add_argument("--temperature", type=float, default=0.8)
            command.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.function(args)


if __name__ == "__main__":
    main()
