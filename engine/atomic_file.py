"""Files that appear under their name only when they are complete and on disk, and where those about a model lie."""

import os
import re
from pathlib import Path

_DESCRIPTORS = {"/dev/stdout": 1, "/dev/stderr": 2}
_DESCRIPTOR = re.compile(r"(?:/dev/fd|/proc/self/fd)/(\d{1,6})")


def beside(model: str | Path, ending: str) -> Path:
    """Where a file about a model is kept: a snapshot `dir` has `dir` + ending beside it, `file.gguf` has its own."""
    path = Path(model).absolute()
    return path.with_name(path.name + ending)


def stream_of(path: str | Path) -> int | Path | None:
    """What to write to where no file may take the place of `path`: a descriptor this process has open (/dev/stdout,
    /dev/fd/3), a device, a pipe. None for a file, or a name that is free."""
    if match := _DESCRIPTOR.fullmatch(str(path)):
        return int(match[1])
    if (descriptor := _DESCRIPTORS.get(str(path))) is not None:
        return descriptor
    path = Path(path)
    return path if path.exists() and not path.is_file() and not path.is_dir() else None


class AtomicFile:
    """Context manager: `.handle` is a binary file under a temporary name beside `path`; a clean exit renames it.

    On an exception nothing is left. A link stays one: the file it leads to is replaced. What is no file (a device, a
    pipe, see `stream_of`) is written to as it is. Raises OSError where the directory cannot be written.
    """

    def __init__(self, path: str | Path):
        self.path, self._temporary = Path(path), None

    def __enter__(self) -> "AtomicFile":
        stream = stream_of(self.path)
        if stream is not None:  # a descriptor's copy shares its place in the file
            self.handle = os.fdopen(os.dup(stream), "wb") if isinstance(stream, int) else stream.open("wb")
            return self
        self._target = Path(os.path.realpath(self.path))
        self._temporary = self._target.with_name(f".{self._target.name}.tmp-{os.getpid()}")
        self.handle = self._temporary.open("w+b")
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self.handle.flush()
                if self._temporary is not None:
                    os.fsync(self.handle.fileno())
                    self._temporary.replace(self._target)
        finally:
            self.handle.close()
            if self._temporary is not None:
                self._temporary.unlink(missing_ok=True)
