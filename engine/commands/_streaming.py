"""Options for models whose experts are larger than memory, and the figures of such a run."""

import click

from ._output import note

_OPTIONS = (
    click.option("--ram", type=click.FloatRange(min=0, min_open=True), metavar="GIB",
                 help="Memory this process may take (default: what it can have without swapping or being killed)."),
    click.option("--io", type=click.Choice(["auto", "direct", "buffered", "mmap"]), default="auto", show_default=True,
                 help="How experts that do not fit are read; auto tries direct reads on the model's own file."),
    click.option("--readers", type=click.IntRange(1, 64), metavar="N", help="Threads that read experts (default 4)."),
    click.option("--expert-slots", type=click.IntRange(min=1), metavar="N",
                 help="Keep N experts in memory, whatever would fit (default: as many as --ram allows)."),
)  # fmt: skip


def options(command):
    """--ram, --io, --readers, --expert-slots."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def print_plan(loaded) -> None:
    """The plan on stderr, when there is one: before a run."""
    for line in loaded.stream.notes() if loaded.stream else ():
        note(line)


def print_summary(loaded) -> None:
    """The counters on stderr, when experts were streamed: after a run."""
    if loaded is not None and loaded.stream:
        from ..experts.stream import summary

        note(summary(loaded.stream.stats()))


def stats(loaded) -> dict | None:
    """The counters for --json, or None when nothing was streamed."""
    return loaded.stream.stats() if loaded.stream else None
