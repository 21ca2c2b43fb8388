"""Where output goes: stdout carries the product (text or JSON) and nothing else, stderr everything else."""

import errno
import json
import math
import os
import re
import sys
import textwrap
from pathlib import Path

import click

from ..atomic_file import AtomicFile, stream_of
from ..errors import ConfigError, EngineError


class OutputError(EngineError):
    """The product could not be written."""

    exit_code = 1


class ReaderGone(Exception):
    """Nobody reads stdout any more. No OSError: click has ways of its own with those."""


def write(text: str) -> None:
    """Write product text to stdout at once. Raises ReaderGone when the reader is gone, OutputError otherwise."""
    if sys.stdout is None:  # started with stdout closed
        raise OutputError("stdout: it is closed, so the result has nowhere to go")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        raise OutputError(f"stdout: cannot be written: {error.strerror}") from None


def _finite(value):
    """JSON has no infinity: a figure that does not exist (an error of one sample) becomes null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(content: dict) -> None:
    """Write one JSON object and a newline to stdout."""
    write(json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def note(text: str) -> None:
    """Write a line to stderr; nobody listening there is no reason to stop."""
    try:
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)
    except OSError:
        pass


def require_writable(option: str, path: str) -> None:
    """Refuse before any work a path that `write_file` could not write after it. Raises ConfigError."""
    try:
        why = _obstacle(path)
    except OSError as error:  # a name that is too long
        why = error.errno
    if why:
        raise ConfigError(f"{option} {path}: cannot be written: {os.strerror(why)}")


def refuse_same_file(named: dict[str, str | None]) -> None:
    """Raise ConfigError where two options name one file, of which the second would take the place of the first.

    named: option -> path, None where it was not given.
    """
    seen: dict[str, str] = {}
    for option, path in named.items():
        if path is None or stream_of(path) is not None:
            continue
        first = seen.setdefault(os.path.realpath(path), option)
        if first != option:
            raise ConfigError(f"{first} and {option} both name {path}; give each its own file")


def _obstacle(path: str) -> int:
    """The errno of writing to `path`, 0 for none."""
    stream, parent = stream_of(path), Path(os.path.realpath(path)).parent
    if isinstance(stream, int):
        return 0 if _is_open(stream) else errno.EBADF
    if stream is not None:
        return 0 if os.access(stream, os.W_OK) else errno.EACCES
    if Path(path).is_dir():
        return errno.EISDIR
    if not parent.is_dir():
        return errno.ENOTDIR if parent.exists() else errno.ENOENT
    return 0 if os.access(parent, os.W_OK) else errno.EACCES


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def write_file(option: str, path: str, text: str) -> int:
    """Write `text` to what an option names, a file complete or not at all; returns its bytes. Raises ConfigError."""
    data = text.encode()
    try:
        with AtomicFile(path) as file:
            file.handle.write(data)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror or error}") from None
    return len(data)


def silence(stream) -> None:
    """Point a stream whose reader is gone to /dev/null, so that closing it at exit raises nothing."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def decode_utf8(data: bytes, where: str) -> str:
    """Return `data` as text. Raises ConfigError with the place of the first bad byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not valid UTF-8 at byte {error.start}") from None


def read_text_file(path: str) -> bytes:
    """Return a file's bytes. Raises ConfigError when it cannot be read."""
    try:
        with click.open_file(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def size(num_bytes: float) -> str:
    """Bytes for people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def wrap(text: str, width: int = 100) -> str:
    """Lines of a report for people, none longer than `width` where words allow; what goes on is indented."""
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        if len(line) > width
        else line
        for line in text.split("\n")
    )


def _is_figure(cell) -> bool:
    return isinstance(cell, int | float) or re.fullmatch(r"-?\d+(\.\d+)?", str(cell)) is not None


def table(rows: list[tuple], header: tuple) -> str:
    """Columns padded to their widest cell; numbers to the right."""
    cells = [tuple(map(str, row)) for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [bool(rows) and all(_is_figure(row[i]) for row in rows) for i in range(len(header))]
    lines = []
    for row in cells:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
