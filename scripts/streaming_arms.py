"""The child processes of bench_streaming.py: one engine, fixed token ids, one JSON object on stdout.

    python streaming_arms.py millstream '{"model": ..., "ids": [...], ...}'

Both engines are fed the same ids one at a time, so that routing and work are the same and no sampling is timed. After
`warm_up_s` seconds or `warm_up_tokens` the measured part begins; it ends after `seconds` or with the ids. Bytes read
are those of /proc/self/io: what the block layer fetched for this process, by reads and by page faults.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def bytes_read() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise OSError("/proc/self/io: no read_bytes")


def measure(step, ids: list[int], job: dict, counters=dict) -> dict:
    """step(id, position) runs one token. Returns seconds per token and what was counted in the measured part."""
    position, started = 0, time.perf_counter()
    while position < min(job["warm_up_tokens"], len(ids) - 1) and time.perf_counter() - started < job["warm_up_s"]:
        step(ids[position], position)
        position += 1
    warm_up = {"tokens": position, "seconds": time.perf_counter() - started}
    before, read_before = counters(), bytes_read()
    begin, seconds = time.perf_counter(), []
    while position < len(ids) and (not seconds or time.perf_counter() - begin < job["seconds"]):
        token_start = time.perf_counter()
        step(ids[position], position)
        seconds.append(time.perf_counter() - token_start)
        position += 1
    elapsed, after = time.perf_counter() - begin, counters()
    ordered = sorted(seconds)
    return {
        "warm_up": warm_up,
        "tokens": len(seconds),
        "seconds": elapsed,
        "tok_s": len(seconds) / elapsed,
        "token_s": {"p50": ordered[len(ordered) // 2], "p95": ordered[int(len(ordered) * 0.95)], "max": ordered[-1]},
        "read_bytes_per_token": (bytes_read() - read_before) / len(seconds),
        "counted": {key: after[key] - before[key] for key in after},
    }


def run_millstream(job: dict) -> dict:
    import numpy as np

    import engine

    started = time.perf_counter()
    loaded = engine.load(job["model"], threads=job["threads"], isa=job["isa"], ctx=job["ctx"], **job["options"])
    load_s = time.perf_counter() - started
    kv, ids = loaded.new_kv(), np.array(job["ids"], np.int32)
    stream = getattr(loaded, "stream", None)
    names = ("hits", "misses", "bytes", "reads", "service_s", "wait_s", "busy_s", "recode_s")

    def step(_, position):
        loaded.model.forward(ids[position : position + 1], kv, position)

    def counters():
        return {} if stream is None else {name: stream.stats()[name] for name in names}

    result = measure(step, job["ids"], job, counters)
    plan = {} if stream is None else {k: v for k, v in stream.stats().items() if k not in names}
    return {**result, "load_s": load_s, "isa": loaded.context.tier, "stream": plan}


def run_llama(job: dict) -> dict:
    import llama_cpp
    from llama_cpp import llama_cpp as low_level

    defaults = low_level.llama_model_default_params

    def mapped_only():
        # Re-packed copies of the weights would be anonymous memory of the size of the model: killed under the limit.
        params = defaults()
        params.use_extra_bufts = False
        return params

    low_level.llama_model_default_params = mapped_only
    started = time.perf_counter()
    settings = {"n_threads": job["threads"], "n_threads_batch": job["threads"], "n_ctx": job["ctx"], "n_batch": 32}
    model = llama_cpp.Llama(job["model"], use_mmap=True, use_mlock=False, verbose=False, **settings)
    load_s = time.perf_counter() - started
    result = measure(lambda token, _: model.eval([token]), job["ids"], job)
    return {**result, "load_s": load_s, "version": llama_cpp.__version__}


if __name__ == "__main__":
    arms = {"millstream": run_millstream, "llama": run_llama}
    print(json.dumps(arms[sys.argv[1]](json.loads(sys.argv[2]))))
