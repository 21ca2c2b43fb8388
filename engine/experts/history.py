"""How often each expert of a model was used, kept between runs. Knows nothing of caches or files of weights."""

import hashlib


def model_fingerprint(files) -> str:
    """Identity of a model's source as hex: of the checkpoint a snapshot was made from, else of the file's directory.

    files: what engine.weights.open_model returns.
    """
    source = getattr(files, "header", None) and getattr(files.header, "source", None)
    if isinstance(source, dict) and source.get("sha256"):
        return str(source["sha256"])
    digest = hashlib.sha256()
    for name, record in sorted(files.tensors.items()):
        digest.update(f"{name}\0{record.format}\0{record.shape}\0{record.offset}\0{record.nbytes}\0".encode())
    return digest.hexdigest()
