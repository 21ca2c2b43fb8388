"""Train the bundled tiny OLMoE model on a two-core CPU: tokenizer, then training with held-out monitoring.

Owns the byte-level BPE tokenizer, the sampling of domains, the schedule and the training checkpoints.
scripts/make_corpus.py makes the text before it; scripts/export_tiny_moe.py evaluates and exports after it.

    python scripts/train_tiny_moe.py tokenizer --work build/corpus
    python scripts/train_tiny_moe.py train --work build/corpus --heldout tests/data/heldout --minutes 75
"""

import argparse
import ctypes
import itertools
import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from make_corpus import DOMAINS
from tiny_moe_model import ModelConfig, Muon, TinyMoe
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
MICRO_BATCH_TOKENS = 2048
# (progress from which it holds, window length): most tokens in short windows, the end at the full context.
WINDOWS = ((0.0, 256), (0.35, 512), (0.65, 1024), (0.85, 2048))
WARMUP_STEPS = 50
DECAY_FROM = 0.3  # constant rate before it, linear to zero after it
BALANCE_WEIGHT, Z_WEIGHT = 0.01, 1e-4
# Domains are drawn in proportion to size ** this: small ones are repeated more, but not without bound.
SAMPLING_POWER = 0.6
MONITORED_BYTES = 20_000  # of each held-out text


def read_documents(work, domain):
    with (work / f"{domain}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def train_tokenizer(work, vocab_size):
    """GPT-2 style byte-level BPE on equal amounts of every domain."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = {domain: read_documents(work, domain) for domain in DOMAINS}
    share = min(sum(map(len, documents)) for documents in texts.values())
    sample = []
    for documents in texts.values():
        random.Random(0).shuffle(documents)
        joined = "\n".join(documents)[: 2 * share]
        sample += [joined[start : start + 10_000] for start in range(0, len(joined), 10_000)]
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(work / "tokenizer.json"))
    return tokenizer


def tokenize_corpus(tokenizer, work):
    """One stream of ids per domain, every document after an end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    for domain in DOMAINS:
        documents = read_documents(work, domain)
        random.Random(1).shuffle(documents)
        encoded = [encoding.ids for encoding in tokenizer.encode_batch(documents)]
        ids = np.fromiter(itertools.chain.from_iterable([end, *ids] for ids in encoded), dtype=np.uint16)
        np.save(work / f"{domain}.npy", ids)
        total = sum(len(text.encode()) for text in documents)
        print(f"{domain}: {len(ids):,} tokens, {total / len(ids):.2f} bytes each", file=sys.stderr)


class Batches:
    """Windows drawn at random; a function of (seed, step), so that a resumed run goes on with the same data."""

    def __init__(self, work, seed):
        self.streams = [np.load(work / f"{domain}.npy") for domain in DOMAINS]
        weights = np.array([len(stream) for stream in self.streams]) ** SAMPLING_POWER
        self.weights = weights / weights.sum()
        self.seed = seed

    def micro_batches(self, step, count, window):
        generator = np.random.default_rng((self.seed, step))
        for _ in range(count):
            rows = MICRO_BATCH_TOKENS // window
            domains = generator.choice(len(self.streams), size=rows, p=self.weights)
            ids = np.stack([self.window(generator, self.streams[domain], window) for domain in domains])
            ids = torch.from_numpy(ids.astype(np.int64))
            yield ids[:, :-1], ids[:, 1:]

    @staticmethod
    def window(generator, stream, window):
        start = generator.integers(0, len(stream) - window)
        return stream[start : start + window + 1]


def prepare_thread():
    # Both settings belong to the calling thread.
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


class Workers:
    """Two threads with one compute thread each. On a shared machine this beats two threads inside every operation,
    where the slower one is waited for at each of thousands of barriers per step."""

    def __init__(self, threads):
        self.pool = ThreadPoolExecutor(threads, initializer=prepare_thread)

    def run(self, function, jobs):
        return list(self.pool.map(function, jobs))


class Trainer:
    def __init__(self, args, config):
        self.args = args
        torch.manual_seed(args.seed)
        self.model = TinyMoe(config, compiled=True)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.parameters = list(self.model.parameters())
        self.muon = Muon(self.model)
        rest = [(name, p) for name, p in self.model.named_parameters() if name not in self.muon.names]
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for _, p in rest if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for _, p in rest if p.dim() == 1], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            eps=1e-10,
        )
        self.workers = Workers(args.threads)
        self.batches = Batches(args.work, args.seed)
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    def progress(self):
        return min(self.seconds / (60 * self.args.minutes), 1.0)

    def rate_factor(self):
        decay = min(1.0, (1.0 - self.progress()) / (1.0 - DECAY_FROM))
        return min(1.0, (self.step + 1) / WARMUP_STEPS) * decay

    def gradients_of(self, batch):
        ids, targets = batch
        loss, balance, z_loss, choices = self.model.loss(ids, targets, torch.bfloat16)
        total = loss + BALANCE_WEIGHT * balance + Z_WEIGHT * z_loss
        gradients = torch.autograd.grad(total, self.parameters)
        usage = torch.stack(
            [torch.bincount(chosen.flatten(), minlength=self.model.config.num_experts) for chosen in choices]
        )
        return loss.item(), balance.item(), gradients, usage

    def train_step(self):
        window = [length for start, length in WINDOWS if self.progress() >= start][-1]
        batches = list(self.batches.micro_batches(self.step, self.args.micro_batches, window))
        results = self.workers.run(self.gradients_of, batches)
        count = len(results)
        sums = [sum(parts) / count for parts in zip(*(result[2] for result in results), strict=True)]
        factor = self.rate_factor()
        for parameter, gradient in zip(self.parameters, sums, strict=True):
            parameter.grad = gradient
        self.muon.step(dict(zip(self.names, sums, strict=True)), self.args.muon_lr * factor, self.workers.run)
        for group in self.adam.param_groups:
            group["lr"] = self.args.adam_lr * factor
        self.adam.step()
        self.step += 1
        self.tokens += count * MICRO_BATCH_TOKENS
        usage = sum(result[3] for result in results).float()
        return (
            sum(result[0] for result in results) / count,
            sum(result[1] for result in results) / count,
            window,
            usage / usage.sum(1, keepdim=True),
        )

    def save(self, path):
        state = {
            "model": self.model.state_dict(),
            "adam": self.adam.state_dict(),
            "muon": self.muon.buffers,
            "config": self.model.config.as_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(path)

    def resume(self, path):
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        for buffer, saved in zip(self.muon.buffers, state["muon"], strict=True):
            buffer.copy_(saved)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]

    def heldout_bits(self, texts):
        """Quick figure: windows of 1024 without overlap, bf16 compute; the exact one is export_tiny_moe's."""
        result = {}
        for domain, (ids, num_bytes) in texts.items():
            rows = [
                (ids[start : start + 1025][:-1][None], ids[start : start + 1025][1:][None])
                for start in range(0, len(ids) - 1, 1024)
            ]
            nats = sum(self.workers.run(self.nats_of, rows))
            result[domain] = round(float(nats / np.log(2) / num_bytes), 4)
        return result

    @torch.no_grad()
    def nats_of(self, row):
        ids, targets = row
        if not hasattr(self, "plain"):
            self.plain = TinyMoe(self.model.config)
            self.plain.load_state_dict(self.model.state_dict(), assign=True)
        logits = self.plain.logits(ids, torch.bfloat16)[0]
        return float(torch.nn.functional.cross_entropy(logits, targets[0], reduction="sum"))


def heldout_ids(tokenizer, directory):
    texts = {}
    for domain in DOMAINS:
        text = (directory / f"{domain}.txt").read_bytes()[:MONITORED_BYTES].decode("utf-8", "ignore")
        ids = [tokenizer.token_to_id(END_OF_TEXT), *tokenizer.encode(text).ids]
        texts[domain] = (torch.tensor(ids), len(text.encode()))
    return texts


def log(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def train(args):
    keep_freed_memory()
    prepare_thread()
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    trainer = Trainer(args, ModelConfig(vocab_size=tokenizer.get_vocab_size()))
    checkpoint = args.work / "checkpoint.pt"
    if args.resume:
        trainer.resume(checkpoint)
    texts = heldout_ids(tokenizer, args.heldout)
    log(f"{sum(p.numel() for p in trainer.parameters):,} parameters, sampling {trainer.batches.weights.round(3)}")
    before, window_tokens, window_seconds = time.monotonic(), 0, 0.0
    losses, saved = [], trainer.seconds
    while trainer.progress() < 1.0:
        loss, balance, window, usage = trainer.train_step()
        now = time.monotonic()
        # The clock runs only in training steps: evaluation and pauses do not eat the schedule.
        trainer.seconds, window_seconds, before = trainer.seconds + now - before, window_seconds + now - before, now
        window_tokens += args.micro_batches * MICRO_BATCH_TOKENS
        losses.append(loss)
        if trainer.step % args.log_every == 0 or trainer.step < 5:
            left = 60 * args.minutes - trainer.seconds
            log(
                f"step {trainer.step} loss {np.mean(losses):.3f} balance {balance:.3f} "
                f"experts {usage.min():.2f}-{usage.max():.2f} window {window} rate {trainer.rate_factor():.3f} "
                f"{window_tokens / window_seconds:,.0f} tok/s {trainer.tokens / 1e6:.2f} M tokens "
                f"ETA {max(left, 0) / 60:.1f} min"
            )
            losses, window_tokens, window_seconds = [], 0, 0.0
        if trainer.seconds - saved > 60 * args.save_minutes or trainer.progress() >= 1.0:
            saved = trainer.seconds
            trainer.save(checkpoint)
            log(f"held-out bits per byte {trainer.heldout_bits(texts)}")
            before = time.monotonic()


def keep_freed_memory():
    """Tell glibc to reuse large blocks: mapping them anew for each tensor costs more than the arithmetic."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_arena_max, m_mmap_max, m_trim_threshold = -8, -4, -1
        libc.mallopt(m_arena_max, 1)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    tokenizer = commands.add_parser("tokenizer", help="train the tokenizer and tokenize the corpus")
    tokenizer.add_argument("--vocab-size", type=int, default=4096)
    training = commands.add_parser("train", help="train the model; the schedule follows the clock")
    training.add_argument("--heldout", type=Path, required=True)
    training.add_argument("--minutes", type=float, default=75, help="training time; the rate decays to zero over it")
    training.add_argument("--micro-batches", type=int, default=2, help=f"of {MICRO_BATCH_TOKENS} tokens in a step")
    training.add_argument("--muon-lr", type=float, default=0.02)
    training.add_argument("--adam-lr", type=float, default=0.004)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--threads", type=int, default=2)
    training.add_argument("--log-every", type=int, default=20)
    training.add_argument("--save-minutes", type=float, default=4)
    training.add_argument("--resume", action="store_true", help="go on from the checkpoint in the work directory")
    for command in (tokenizer, training):
        command.add_argument("--work", type=Path, required=True, help="the directory make_corpus.py wrote")
    args = parser.parse_args()
    if args.command == "tokenizer":
        tokenize_corpus(train_tokenizer(args.work, args.vocab_size), args.work)
    else:
        train(args)


if __name__ == "__main__":
    main()
