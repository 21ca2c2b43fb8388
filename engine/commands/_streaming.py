"""Options for models whose experts are larger than memory, and the figures of such a run."""

from contextlib import contextmanager

import click

from ..config import CACHE_POLICIES, IO_MODES, LOOKAHEAD_MODES, RuntimeConfig
from ._output import note, size

_OPTIONS = (
    click.option("--ram", type=click.FloatRange(min=0, min_open=True), metavar="GIB",
                 help="Memory this process may take (default: what it can have without swapping or being killed)."),
    click.option("--io", type=click.Choice(IO_MODES), default="auto", show_default=True,
                 help="How experts that do not fit are read; auto tries direct reads on the model's own file."),
    click.option("--readers", type=click.IntRange(1, 64), metavar="N", help="Threads that read experts (default 4)."),
    click.option("--lookahead", type=click.Choice(LOOKAHEAD_MODES), default="auto", show_default=True,
                 help="Read what the next layer will probably want while the disk is idle; auto: while that pays."),
    click.option("--lock", is_flag=True, help="Lock weights in memory; the limit is checked first."),
    click.option("--expert-slots", type=click.IntRange(min=1), metavar="N",
                 help="Keep N experts in memory, whatever would fit (default: as many as --ram allows)."),
    click.option("--cache-policy", type=click.Choice(CACHE_POLICIES), default=CACHE_POLICIES[0], show_default=True,
                 help="Who leaves the cache: by use, weight and recency; least recently; least frequently used."),
    click.option("--pin", metavar="FILE|auto", help="Keep the experts that a usage history or route trace names most "
                 "in memory; auto: the history beside the model."),
    click.option("--history", type=click.Choice(["on", "off"]), default="on", show_default=True,
                 callback=lambda _context, _option, value: value == "on",
                 help="Keep count of the experts used, beside the model, for --pin auto."),
)  # fmt: skip


def options(command):
    """--ram, --io, --readers, --expert-slots, --cache-policy, --pin, --history."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def print_plan(loaded) -> None:
    """The plan on stderr, when there is one: before a run."""
    for line in loaded.stream.notes() if loaded.stream else _fitting_notes(loaded):
        note(line)


def _fitting_notes(loaded) -> list[str]:
    lines = [f"experts: {size(loaded.read_bytes)} read in at load"] if loaded.read_bytes else []
    if loaded.options.io == "mmap":
        lines.append("experts: mapped, not read in at load (--io mmap)")
    lines += [f"locked: {size(loaded.locked_bytes)}"] if loaded.locked_bytes else []
    return lines + _idle_notes(loaded)


def _idle_notes(loaded) -> list[str]:
    """A line that names the options that only count for experts that are streamed. No error: whether they fit depends
    on the memory that is free today, and a script should not fail for that."""
    used = {"lock"} | ({"readers"} if loaded.read_bytes else set()) | ({"io"} if loaded.options.io == "mmap" else set())
    if loaded.options.expert_layout == "auto" and loaded.expert_layout.name in ("fast", "compact"):
        used.add("ram")  # it decided between the two
    names = [option.name for option in _named_options() if option.name not in used] + ["cut_drafts"]
    idle = [name for name in names if getattr(loaded.options, name) != getattr(RuntimeConfig(), name)]
    if not idle:
        return []
    listed = ", ".join("--" + name.replace("_", "-") for name in idle)
    return [f"note: everything fits into memory and nothing is streamed, so {listed} changes nothing"]


def _named_options() -> list[click.Option]:
    return options(click.command()(lambda: None)).params


def load(model, **options):
    """engine.load with a bar while experts are read."""
    import engine

    from ._progress import Meter

    with Meter("experts") as meter:
        return engine.load(model, progress=meter.update, **options)


@contextmanager
def usage_history(loaded, say=note):
    """Counts the experts of a run and adds them to the history beside the model, when experts are streamed.

    say: takes the line about it at the end.
    """
    if not (loaded.stream and loaded.options.history):
        yield
        return
    from ..experts.history import UsageRecorder, history_path, model_fingerprint, update_history

    recorder = UsageRecorder(loaded.model, model_fingerprint(loaded.files))
    recorder.start()
    try:
        yield
    finally:
        recorder.stop()
        if recorder.usage.tokens:
            say(update_history(history_path(loaded.files), recorder.usage))


def print_summary(loaded) -> None:
    """The counters on stderr, when experts were streamed: after a run."""
    if loaded is not None and loaded.stream:
        from ..experts.stream import summary

        note(summary(loaded.stream.stats()))


def stats(loaded) -> dict | None:
    """The counters for --json, or None when nothing was streamed."""
    return loaded.stream.stats() if loaded.stream else None
