"""Files that appear under their name only when they are complete and on disk, and where those about a model lie."""

import os
from pathlib import Path


def beside(model: str | Path, ending: str) -> Path:
    """Where a file about a model is kept: a snapshot `dir` has `dir` + ending beside it, `file.gguf` has its own."""
    path = Path(model).absolute()
    return path.with_name(path.name + ending)


class AtomicFile:
    """Context manager: `.handle` is a binary file under a temporary name beside `path`; a clean exit renames it.

    On an exception nothing is left. Raises OSError where the directory cannot be written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._temporary = self.path.with_name(f".{self.path.name}.tmp-{os.getpid()}")

    def __enter__(self) -> "AtomicFile":
        self.handle = self._temporary.open("w+b")
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self.handle.flush()
                os.fsync(self.handle.fileno())
                self._temporary.replace(self.path)
        finally:
            self.handle.close()
            self._temporary.unlink(missing_ok=True)
