"""Progress on stderr: a bar with rate and time left on a terminal, a plain line now and then anywhere else."""

import sys
import time

from ._output import note, size

PLAIN_INTERVAL_S = 5.0


def _rate(number: float, unit: str) -> str:
    if unit != "bytes" and 0 < number < 1:
        return f"{1 / number:.1f} s each"
    return f"{size(number) if unit == 'bytes' else f'{number:,.{int(number < 10)}f} {unit}'}/s"


def _parts(done: float, total: float, unit: str) -> str:
    return f"{size(done)} of {size(total)}" if unit == "bytes" else f"{done:,.0f} of {total:,.0f} {unit}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Meter:
    """Context manager; call `update` with what is done so far. unit: "bytes", or a plural such as "tokens"."""

    def __init__(self, label: str, unit: str = "bytes"):
        self._label, self._unit = label, unit
        self._start = self._last_line = time.monotonic()
        self._bar = self._task = None

    def __enter__(self) -> "Meter":
        if sys.stderr is not None and sys.stderr.isatty():
            self._bar = self._make_bar()
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=None, rate="", left="")
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.stop()

    @staticmethod
    def _make_bar():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                   TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[left]}"))  # fmt: skip
        return Progress(*columns, console=Console(stderr=True), transient=True)

    def update(self, done: float, total: float, detail: str = "") -> None:
        """Show `done` of `total` units."""
        now = time.monotonic()
        elapsed = max(now - self._start, 1e-9)
        rate = done / elapsed
        text, left = _parts(done, total, self._unit), ""
        if self._bar is not None:
            if rate:
                text, left = f"{text}, {_rate(rate, self._unit)}", f"{_duration((total - done) / rate)} left"
            self._bar.update(self._task, completed=done, total=total, rate=text, left=f"{left} {detail}".strip())
        elif done >= total or now - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = now
            percent = 100 * done / total if total else 100
            if rate:
                left = f", {_rate(rate, self._unit)}, {_duration((total - done) / rate)} left"
            note(f"{self._label}: {text} ({percent:.0f} %){left}" + (f" - {detail}" if detail else ""))
