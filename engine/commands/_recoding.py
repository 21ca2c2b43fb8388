"""What the command line says about experts that are re-coded as they are used."""

import time

from ._output import note, size

INTERVAL_S = 5.0


def watch(loaded) -> None:
    """Print a line every few seconds while re-coding goes on; a model that is quickly done says nothing."""
    if loaded.loader.recoder is not None:
        loaded.loader.recoder.progress = _Lines()


class _Lines:
    """Called after every expert with bytes done, bytes of all experts, and seconds spent."""

    def __init__(self):
        self._last = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int, seconds: float) -> None:
        now = time.monotonic()
        if now - self._last < INTERVAL_S:
            return
        self._last = now
        rate = done_bytes / seconds if seconds else 0.0
        left = f", at most {(total_bytes - done_bytes) / rate:.0f} s left" if rate else ""
        note(f"experts: {size(done_bytes)} of {size(total_bytes)} re-coded, {size(rate)}/s{left}")


def print_summary(loaded) -> None:
    """One line for the end of a run, where anything was re-coded."""
    recoder = loaded.loader.recoder if loaded is not None else None
    if recoder is not None and recoder.done_bytes:
        done, total = size(recoder.done_bytes), size(recoder.total_bytes)
        note(f"experts: {done} of {total} were used and re-coded, in {recoder.seconds:.2f} s")


def stats(loaded) -> dict | None:
    """The same for --json."""
    recoder = loaded.loader.recoder
    if recoder is None:
        return None
    return {"bytes": recoder.done_bytes, "total_bytes": recoder.total_bytes, "seconds": recoder.seconds}
