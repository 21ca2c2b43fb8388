"""Chrome trace (Perfetto) of the native calls of a run, one lane for the decode thread, one for its rounds."""

ROUNDS, CALLS = 1, 2


def chrome_trace(profiler) -> dict:
    """The trace-event object; times in microseconds from the first event."""
    starts = [event[2] for event in profiler.events] + [r["start"] for r in profiler.rounds]
    origin = min(starts, default=0)
    events = [
        {"name": name, "ph": "M", "pid": 1, "tid": tid, "args": {"name": label}}
        for name, tid, label in (("thread_name", ROUNDS, "rounds"), ("thread_name", CALLS, "native calls"))
    ]
    for r in profiler.rounds:
        events.append({
            "name": f"round of {r['rows']}", "cat": "decode", "ph": "X", "pid": 1, "tid": ROUNDS,
            "ts": (r["start"] - origin) / 1e3, "dur": (r["end"] - r["start"]) / 1e3,
            "args": {"position": r["position"], "tokens": r["tokens"]},
        })  # fmt: skip
    for name, section, start, spent, layer in profiler.events:
        events.append({
            "name": name, "cat": section or "loop", "ph": "X", "pid": 1, "tid": CALLS,
            "ts": (start - origin) / 1e3, "dur": spent / 1e3, "args": {"layer": layer} if layer >= 0 else {},
        })  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
