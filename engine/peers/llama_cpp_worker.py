"""llama.cpp behind a pipe, run as a script by any Python that has llama-cpp-python: a JSON object per line in and out.

Imports nothing of this package. The process is the peer's own because a build of it may crash (some do in their
re-packed kernels) and because two thread pools in one process disturb each other.
"""

import json
import sys
import time


class LlamaCpp:
    """llama.cpp through llama-cpp-python's C calls. repack: its default, weights copied into buffers of its own."""

    def __init__(self, path: str, threads: int, positions: int, repack: bool):
        import llama_cpp
        import numpy as np

        self.np, self.lib = np, llama_cpp
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = repack
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp cannot load it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = positions, 512, 512
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def _decode(self, ids) -> int:
        tokens = (self.lib.llama_token * len(ids))(*ids)
        if self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit("llama_decode failed")
        logits = self.lib.llama_get_logits_ith(self.context, -1)
        return int(self.np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def prefill(self, ids: list[int]) -> int:
        """Greedy token behind ids in an empty cache."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        for start in range(0, len(ids), 512):
            token = self._decode(ids[start : start + 512])
        return token

    def step(self, token: int, position: int) -> int:
        return self._decode([token])

    def facts(self) -> dict:
        text = " ".join(self.lib.llama_print_system_info().decode().split())
        tier = "avx512" if "AVX512 = 1" in text else "avx2"
        return {"tier": tier, "version": self.lib.__version__, "features": text, "vocab_size": self.vocab_size}


def answer(engine: LlamaCpp, order: dict) -> dict:
    """order: {"prompt": ids, "tokens": N}. Seconds of the prompt and of N steps behind it, and the N + 1 tokens."""
    started = time.perf_counter()
    found = [engine.prefill(order["prompt"])]
    prompt_done = time.perf_counter()
    for i in range(order["tokens"]):
        found.append(engine.step(found[-1], len(order["prompt"]) + i))
    return {"prefill_s": prompt_done - started, "decode_s": time.perf_counter() - prompt_done, "ids": found}


def main() -> None:
    options = json.loads(sys.argv[1])
    engine = LlamaCpp(options["path"], options["threads"], options["positions"], options["repack"])
    count = min(64, options["positions"])
    engine.prefill([i % engine.vocab_size for i in range(count)])  # where broken re-packed kernels fall over
    print(json.dumps(engine.facts()), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
