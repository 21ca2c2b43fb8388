"""The child processes of bench_streaming.py: one engine, fixed token ids, one JSON object on stdout.

    python streaming_arms.py millstream '{"model": ..., "ids": [...], ...}'

Both engines are fed the same ids one at a time, so that routing and work are the same and no sampling is timed. The
first `warm_up_tokens` are not measured, the next `tokens` are. Seconds may cut both short: `warm_up_s`, `seconds`; then
the result says how far it came. Bytes read are those of /proc/self/io: what the block layer fetched for this process,
by reads and by page faults.
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


def _run_tokens(step, first: int, last: int, seconds: float) -> list[float]:
    """step(position) for positions first .. last - 1, while there is time, once at least. Returns seconds per token."""
    taken, started = [], time.perf_counter()
    for position in range(first, last):
        now = time.perf_counter()
        if taken and now - started >= seconds:
            break
        step(position)
        taken.append(time.perf_counter() - now)
    return taken


def measure(step, job: dict, counters=dict) -> dict:
    """step(position) runs one token. Returns seconds per token and what was counted in the measured part."""
    first = len(_run_tokens(step, 0, job["warm_up_tokens"], job["warm_up_s"]))
    warm_up_ended, cpu_before = time.perf_counter(), time.process_time()
    before, read_before = counters(), bytes_read()
    seconds = _run_tokens(step, first, first + job["tokens"], job["seconds"])
    elapsed, after = time.perf_counter() - warm_up_ended, counters()
    ordered, count = sorted(seconds), len(seconds)
    return {
        "warm_up_tokens": first,
        "warm_up_asked": job["warm_up_tokens"],
        "tokens": count,
        "asked": job["tokens"],
        "seconds": elapsed,
        "cap_s": job["seconds"],
        "tok_s": count / elapsed,
        "cpu_ms": 1000 * (time.process_time() - cpu_before) / count,
        "each_ms": [round(1000 * s, 3) for s in seconds],
        "token_s": {"p50": ordered[count // 2], "p95": ordered[int(count * 0.95)], "max": ordered[-1]},
        "read_bytes_per_token": (bytes_read() - read_before) / count,
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
    names = ("hits", "misses", "miss_calls", "bytes", "reads", "service_s", "wait_s", "busy_s", "recode_s")

    def counters():
        return {} if stream is None else {name: stream.stats()[name] for name in names}

    result = measure(lambda at: loaded.model.forward(ids[at : at + 1], kv, at), job, counters)
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
    result = measure(lambda at: model.eval([job["ids"][at]]), job)
    return {**result, "load_s": load_s, "isa": "its own choice", "version": llama_cpp.__version__}


if __name__ == "__main__":
    arms = {"millstream": run_millstream, "llama": run_llama}
    print(json.dumps(arms[sys.argv[1]](json.loads(sys.argv[2]))))
