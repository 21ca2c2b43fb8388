"""Tokens and their keys and values in a file, so that the next run starts where this one ended.

File: magic, uint32 version, uint32 length of a JSON header, the header, int32 tokens [n], the bytes of
KVCache.regions(n), and a BLAKE2b digest of all that. Little endian. Memory stays bounded: regions are read into the
cache and written from it. A file of another model, of other settings, or a damaged one is never used: the caller gets
the reason, computes everything, and replaces it. A file that is no prompt cache, or a newer one, is refused, so that
nothing else is overwritten.
"""

import hashlib
import json
import os
import struct
from pathlib import Path

import numpy as np

from . import __version__
from .atomic_file import AtomicFile
from .errors import ConfigError
from .session import Session

MAGIC, VERSION = b"MSPROMPT", 1
_LEAD = struct.Struct("<8sII")
_DIGEST_BYTES = 32
_MAX_HEADER = 1 << 20
_SAMPLE_BYTES = 4096


def model_digest(files) -> str:
    """SHA-256 of what determines a model's keys and values: architecture, config, and of every tensor its form and
    checksum, or the 4096 bytes in its middle where the file keeps none."""
    digest = hashlib.sha256(f"{files.architecture}\0{json.dumps(files.config, sort_keys=True)}\0".encode())
    for name, record in sorted(files.tensors.items()):
        form = (
            name,
            record.format,
            record.format_version,
            record.shape,
            sorted(record.params.items()),
            record.checksum,
        )
        digest.update(f"{form}\0".encode())
        if not record.checksum:
            data = files.read(name)
            start = max(0, (data.nbytes - _SAMPLE_BYTES) // 2)
            digest.update(data[start : start + _SAMPLE_BYTES])
    return digest.hexdigest()


class PromptCache:
    """The file of one session. Raises ConfigError at once for a path that holds something else."""

    def __init__(self, path: str | Path, session: Session, engine):
        self.path, self.session = Path(path), session
        self.identity = {
            "millstream": __version__,  # another version may round differently
            "model": model_digest(engine.files),
            "arith": getattr(engine.options, "arith", None),
            "kv": session.kv.describe(),
        }
        self._check_magic()

    def _check_magic(self) -> None:
        try:
            with self.path.open("rb") as file:
                lead = file.read(_LEAD.size)
        except FileNotFoundError:
            if not self.path.parent.is_dir():  # noticed before anything is computed
                raise ConfigError(
                    f"--prompt-cache {self.path}: there is no directory {self.path.parent}; make it"
                ) from None
            return
        except OSError as error:
            raise ConfigError(f"--prompt-cache {self.path}: cannot be read: {error.strerror}") from None
        if not lead.startswith(MAGIC):
            raise ConfigError(f"--prompt-cache {self.path}: exists and is no prompt cache; choose another name")
        if len(lead) == _LEAD.size and _LEAD.unpack(lead)[1] > VERSION:
            raise ConfigError(
                f"--prompt-cache {self.path}: version {_LEAD.unpack(lead)[1]} of the file, this millstream reads up to "
                f"{VERSION}; update millstream, or choose another name"
            )

    def restore(self) -> str:
        """Fill the session, which loses what it holds; it is empty when the file is not usable. Returns one line on
        what came of it."""
        self.session.clear()
        try:
            with self.path.open("rb") as file:
                problem = self._read(file)
        except FileNotFoundError:
            return f"prompt cache: {self.path} is new"
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        if problem:
            self.session.clear()
            return f"note: prompt cache {self.path} {problem}; the prompt is computed, and the file will be replaced"
        return f"prompt cache: {self.path}: {self.session.length} tokens"

    def _read(self, file) -> str | None:
        """Read into the session; what is wrong, or None."""
        size, digest = os.fstat(file.fileno()).st_size, hashlib.blake2b(digest_size=_DIGEST_BYTES)
        lead = file.read(_LEAD.size)
        length = _LEAD.unpack(lead)[2] if len(lead) == _LEAD.size else _MAX_HEADER + 1
        text = file.read(length) if length <= _MAX_HEADER else b""
        try:
            header = json.loads(text)
            count, identity = header["num_tokens"], dict(header["identity"])
        except (ValueError, TypeError, KeyError):
            return "is damaged (its header)"
        different = [key for key, value in self.identity.items() if identity.get(key) != _plain(value)]
        if different:
            what = {"model": "another model", "millstream": "another version of millstream"}.get(
                different[0], "other settings"
            )
            return f"is of {what}"
        if not isinstance(count, int) or not 0 < count <= self.session.kv.capacity:
            return f"holds {count} tokens, the context {self.session.kv.capacity}"
        regions = self.session.kv.regions(count)
        expected = _LEAD.size + length + 4 * count + sum(region.nbytes for region in regions) + _DIGEST_BYTES
        if size != expected:
            return f"is damaged ({size} bytes, expected {expected})"
        ids = np.empty(count, np.int32)
        for part in (lead, text):
            digest.update(part)
        for array in (ids, *regions):
            if file.readinto(memoryview(array).cast("B")) != array.nbytes:
                return "is damaged (it became shorter)"
            digest.update(memoryview(array).cast("B"))
        if file.read(_DIGEST_BYTES) != digest.digest():
            return "is damaged (its checksum)"
        self.session.restore(ids)
        return None

    def save(self) -> str:
        """Write what the session holds, under the file's name only when complete. Returns one line on it.

        Raises ConfigError when the directory cannot be written.
        """
        count, ids = self.session.length, np.ascontiguousarray(self.session.ids, "<i4")
        if count == 0:
            return f"prompt cache: {self.path}: nothing to store"
        try:
            regions = self.session.kv.regions(count)
        except ConfigError as error:
            return f"note: prompt cache {self.path} not stored: {error}"
        text = json.dumps({"num_tokens": count, "identity": self.identity}).encode()
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        try:
            with AtomicFile(self.path) as file:
                for part in (_LEAD.pack(MAGIC, VERSION, len(text)), text, ids, *regions):
                    file.handle.write(memoryview(part).cast("B"))
                    digest.update(memoryview(part).cast("B"))
                file.handle.write(digest.digest())
        except OSError as error:
            raise ConfigError(f"--prompt-cache {self.path}: cannot be written: {error.strerror}") from None
        return f"prompt cache: {self.path}: {count} tokens stored"


def _plain(value):
    """A value as it comes back from JSON."""
    return json.loads(json.dumps(value))
