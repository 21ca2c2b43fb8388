"""Identity of a source checkpoint: tells a file of another model of the same size from the one that was converted."""

import hashlib
from pathlib import Path

from .safetensors import read_header

METHOD = "sha256(config.json, file names, file sizes, safetensors headers, 4096 bytes of every tensor)"
_SAMPLE_BYTES = 4096


def source_fingerprint(config_path: Path, shards: list[Path]) -> dict:
    """{"method", "sha256", "files": [{"name", "bytes"}]} of config.json and the weight shards.

    Not every byte is read: of each tensor the 4096 bytes around its middle (all of it when it is shorter), so that
    a checkpoint of the same shapes with other weights differs, in seconds and not minutes.
    """
    digest = hashlib.sha256()
    digest.update(config_path.read_bytes())
    files = []
    for path in sorted(shards):
        header = read_header(path)
        files.append({"name": path.name, "bytes": header.file_bytes})
        digest.update(f"{path.name}\0{header.file_bytes}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(header.data_start))
            for tensor in sorted(header.tensors.values(), key=lambda t: (t.offset, t.name)):
                file.seek(tensor.offset + max(0, (tensor.nbytes - _SAMPLE_BYTES) // 2))
                digest.update(file.read(min(_SAMPLE_BYTES, tensor.nbytes)))
    return {"method": METHOD, "sha256": digest.hexdigest(), "files": files}
