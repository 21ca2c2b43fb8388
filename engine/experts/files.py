"""The files that experts are read from, opened for direct, buffered or mapped reading, and how that was chosen."""

import errno
import mmap
import os

from ..errors import ExpertReadError
from .places import ExpertPlaces

_PROBE_BYTES = 1 << 20


class _Refused(Exception):
    """Direct reads do not work here; the text says why."""


class ExpertFiles:
    """Descriptors of the expert files.

    mode: "direct", "buffered" or "mmap", what is in effect. note: why it is not what was asked for, or None.
    sources: per file (direct descriptor or -1, buffered descriptor, mapping or None), as in places.file_names.
    """

    def __init__(self, places: ExpertPlaces, wanted: str):
        self.places, self.note = places, None
        self.mode = "direct" if wanted == "auto" else wanted
        self.paths = [places.files.path_of(name) for name in places.file_names]
        self._open: list[int] = []
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise

    def _open_all(self) -> None:
        places = self.places
        buffered = [self._descriptor(path, 0) for path in self.paths]
        for descriptor in buffered:
            # The kernel's read-ahead (megabytes on some disks) would fetch experts that nobody asked for.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        direct = [-1] * len(buffered)
        if self.mode == "direct":
            try:
                direct = [self._descriptor(path, os.O_DIRECT) for path in self.paths]
                self._probe(direct, buffered)
            except _Refused as reason:
                self.mode, direct = "buffered", [-1] * len(buffered)
                self.note = f"direct reads do not work here ({reason}); buffered reads are used"
        mappings = [None] * len(buffered)
        if self.mode == "mmap":
            mappings = [self._map(descriptor) for descriptor in buffered]
        if self.mode == "direct":
            # What checks and loading left there is memory that nobody reads again.
            for name in places.file_names:
                places.files.release_file(name)
        self.sources = list(zip(direct, buffered, mappings, strict=True))

    def _descriptor(self, path, flags: int) -> int:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        except OSError as error:
            if flags and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                raise _Refused(f"{path}: the file system refuses O_DIRECT") from None
            raise ExpertReadError(f"{path}: cannot be opened: {error.strerror}") from error
        self._open.append(descriptor)
        return descriptor

    def _probe(self, direct: list[int], buffered: list[int]) -> None:
        """Compare the first block of an expert, read directly, with a buffered read of the same bytes."""
        name, begin, nbytes = self.places.first_range()
        number, nbytes = self.places.file_names.index(name), min(nbytes, _PROBE_BYTES)
        block = mmap.mmap(-1, nbytes)
        try:
            got = os.preadv(direct[number], [block], begin)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise _Refused(f"{self.paths[number]}: {error.strerror}") from None
            raise ExpertReadError(f"{self.paths[number]}: read at {begin}: {error.strerror}") from error
        compared = os.pread(buffered[number], nbytes, begin)
        os.posix_fadvise(buffered[number], begin, nbytes, os.POSIX_FADV_DONTNEED)
        if bytes(block[:got]) != compared[:got] or not got:
            raise _Refused(f"{self.paths[number]}: they return other bytes than buffered ones")

    def _map(self, descriptor: int) -> mmap.mmap:
        mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        mapping.madvise(mmap.MADV_RANDOM)  # see above: no read-ahead of unwanted experts
        return mapping

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())
