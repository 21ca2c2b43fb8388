"""Write a large synthetic GGUF of the shape of OLMoE-1B-7B: random weights, a tokenizer that works, the same bytes for
the same options. For speed and memory measurements; the text it generates means nothing.

    python scripts/make_big_gguf.py OUT.gguf --format q4_0 [--layers 16] [--seed 1] [--uniform-router] [--skew 0.5]

Blocks are random in every code bit and have scales that give weights of the standard deviation of a trained model, also
for formats that millstream cannot quantize. Sixteen layers take 2.7 to 7 GB.
"""

import json
import sys
import time
from math import prod
from pathlib import Path

import click
import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, HEADS, EXPERTS, TOP, WIDTH, VOCAB, CONTEXT = 2048, 16, 64, 8, 1024, 50304, 4096
STD = 0.02  # of the weights
CHUNK_BLOCKS = 1 << 18
# Attention and embedding, head: as the common quantization recipes leave them.
DENSE = {"mxfp4": "q8_0"}
HEAD = {"q8_0": "q8_0", "mxfp4": "q8_0", "f16": "f16", "bf16": "bf16"}


def _half(values) -> np.ndarray:
    """float32 [n] as the bytes of float16 [n, 2]."""
    return np.asarray(values, np.float16)[:, None].view(np.uint8)


def _spread(rng, n: int, mean: float) -> np.ndarray:
    """Scales around a mean, none zero."""
    return mean * rng.uniform(0.75, 1.25, n)


def _scale_at(position: int, unit: float):
    """Blocks with one float16 scale; unit: rms of the weights of a random block whose scale is 1.

    Codes have a mean that is not zero, so the scales have random signs.
    """

    def fix(rng, blocks):
        signs = 1 - 2 * rng.integers(0, 2, len(blocks))
        blocks[:, position : position + 2] = _half(_spread(rng, len(blocks), STD / unit) * signs)

    return fix


def _with_minimum(rng, blocks):
    """q4_k, q5_k: sub-scales equal sub-minima, and the minimum is half of the code range: zero mean."""
    top = 15 if blocks.shape[1] == 144 else 31
    d = _spread(rng, len(blocks), STD / (37 * top * 0.31))
    blocks[:, 0:2], blocks[:, 2:4] = _half(d), _half(d * top / 2)
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = blocks[:, 12:16] & 15 | blocks[:, 12:16] << 4


def _mxfp4(rng, blocks):
    exponent = 128 + round(np.log2(STD / 9.3))
    blocks[:, 0] = rng.integers(exponent - 1, exponent + 1, len(blocks), endpoint=True)


FIXES = {
    "q4_0": _scale_at(0, 4.6),
    "q5_0": _scale_at(0, 9.2),
    "q8_0": _scale_at(0, 74.0),
    "iq4_nl": _scale_at(0, 70.0),
    "iq4_xs": _scale_at(0, 70.0 * 18.5),
    "iq3_s": _scale_at(0, 8.0 * 18.5),
    "iq2_xs": _scale_at(0, 56.0),
    "q3_k": _scale_at(108, 18.5 * 2.3),
    "q4_k": _with_minimum,
    "q5_k": _with_minimum,
    "q6_k": _scale_at(208, 74.0 * 18.5),
    "mxfp4": _mxfp4,
}


def random_blocks(rng, kind: str, shape: tuple[int, ...]):
    """Chunks of random storage bytes, uint8, of a tensor."""
    if kind in ("f16", "bf16"):
        raise click.UsageError("f16 and bf16 are for --head only")
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[Type[kind.upper()]]
    left = prod(shape) // block_len
    while left:
        count = min(left, CHUNK_BLOCKS)
        blocks = np.frombuffer(rng.bytes(count * block_bytes), np.uint8).reshape(count, block_bytes).copy()
        FIXES[kind](rng, blocks)
        left -= count
        yield blocks


def router_weights(rng, skew: float) -> np.ndarray:
    """float32 [E, H]. skew: 0 makes all experts alike; 1 lets the first be picked far more often than the last."""
    weights = rng.standard_normal((EXPERTS, HIDDEN), np.float32) * np.float32(STD)
    return weights * np.linspace(1 + skew, 1 - skew / 2, EXPERTS, dtype=np.float32)[:, None]


def add_tokenizer(writer) -> None:
    """The byte-level vocabulary of the shipped model, padded with unused ids."""
    path = ROOT / "engine" / "data" / "tiny-moe" / "hf" / "tokenizer.json"
    spec = json.loads(path.read_text(encoding="utf-8"))
    ids = {**spec["model"]["vocab"], **{token["content"]: token["id"] for token in spec["added_tokens"]}}
    special = {token["id"] for token in spec["added_tokens"]}
    tokens = [f"[PAD{i}]" for i in range(VOCAB)]
    for token, i in ids.items():
        tokens[i] = token
    used = set(ids.values())
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("olmo")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 if i in used else 5 for i in range(VOCAB)])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(next(iter(sorted(special))))
    writer.add_add_bos_token(False)


def add_keys(writer, layers: int) -> None:
    writer.add_name("synthetic OLMoE-1B-7B shape")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP)
    writer.add_quantization_version(2)


def plan(layers: int, kind: str, uniform_router: bool, skew: float) -> list[tuple]:
    """(name, shape, format or function of rng that makes float32 values) of every tensor, in the file's order."""
    dense, head = DENSE.get(kind, kind), HEAD.get(kind, "q6_k")
    norm_scale = 0.05 if uniform_router else 1.0

    def norm(scale=1.0, length=HIDDEN):
        return (length,), lambda rng: (rng.uniform(0.8, 1.2, length) * scale).astype(np.float32)

    found = [("token_embd.weight", (VOCAB, HIDDEN), dense)]
    for n in range(layers):
        p = f"blk.{n}"
        found += [(f"{p}.attn_norm.weight", *norm(norm_scale))]
        found += [(f"{p}.attn_{part}.weight", (HIDDEN, HIDDEN), dense) for part in ("q", "k", "v", "output")]
        found += [(f"{p}.attn_{part}_norm.weight", *norm()) for part in ("q", "k")]
        found += [
            (f"{p}.ffn_norm.weight", *norm()),
            (f"{p}.ffn_gate_inp.weight", (EXPERTS, HIDDEN), lambda rng: router_weights(rng, skew)),
            (f"{p}.ffn_gate_exps.weight", (EXPERTS, WIDTH, HIDDEN), kind),
            (f"{p}.ffn_up_exps.weight", (EXPERTS, WIDTH, HIDDEN), kind),
            (f"{p}.ffn_down_exps.weight", (EXPERTS, HIDDEN, WIDTH), kind),
        ]
    return [*found, ("output_norm.weight", *norm()), ("output.weight", (VOCAB, HIDDEN), head)]


def announce(writer, name: str, shape, kind) -> int:
    """Put a tensor into the directory; returns its bytes."""
    if not isinstance(kind, str):
        nbytes = 4 * prod(shape)
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes)
        return nbytes
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[Type[kind.upper()]]
    row = (*shape[:-1], shape[-1] // block_len * block_bytes)
    writer.add_tensor_info(name, row, np.dtype(np.uint8), prod(row), raw_dtype=Type[kind.upper()])
    return prod(row)


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--format", "kind", type=click.Choice(sorted(FIXES)), default="q4_0", show_default=True)
@click.option("--layers", type=click.IntRange(1, 64), default=16, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--uniform-router", is_flag=True, help="attn_norm x 0.05: the text matters less, the token more.")
@click.option("--skew", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Some experts more often.")
def main(out, kind, layers, seed, uniform_router, skew):
    """Write OUT."""
    started, temporary = time.monotonic(), out.with_name(out.name + ".tmp")
    writer = gguf.GGUFWriter(temporary, "olmoe")
    add_keys(writer, layers)
    add_tokenizer(writer)
    tensors = plan(layers, kind, uniform_router, skew)
    total = sum(announce(writer, name, shape, content) for name, shape, content in tensors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    file, done, shown = writer.fout[0], 0, started
    for index, (_, shape, content) in enumerate(tensors):
        rng = np.random.default_rng([seed, index])
        writer.write_padding(file, file.tell())
        for chunk in [content(rng)] if callable(content) else random_blocks(rng, content, shape):
            file.write(chunk)
            done += chunk.nbytes
        if time.monotonic() - shown > 5:
            shown = time.monotonic()
            rate = done / (shown - started)
            left = (total - done) / rate
            print(f"{done >> 20} of {total >> 20} MiB, {rate / 1e6:.0f} MB/s, {left:.0f} s left", file=sys.stderr)
    writer.write_padding(file, file.tell())
    writer.close()
    temporary.rename(out)
    print(f"{out}: {out.stat().st_size} bytes, {kind}, {layers} layers, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
