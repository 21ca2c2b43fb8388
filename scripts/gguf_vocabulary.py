"""Write GGUF files that hold a vocabulary and no weights; llama.cpp opens them with vocab_only."""

from pathlib import Path

_PREFIX = "tokenizer.ggml."


def write_vocabulary(path: Path, metadata: dict) -> Path:
    """metadata: tokenizer.* keys, as a reader returns them; the few model keys that llama.cpp wants are added."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if not key.startswith("tokenizer."):
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif key == f"{_PREFIX}scores":
            writer.add_array(key, [float(score) for score in value])
        elif isinstance(value, list):
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def copy_with_pre(source: Path, pre: str, path: Path) -> Path:
    """A copy of a file's vocabulary with another tokenizer.ggml.pre."""
    from engine.weights.gguf_header import read_header

    metadata = read_header(source).metadata
    return write_vocabulary(path, {key: metadata[key] for key in metadata} | {f"{_PREFIX}pre": pre})
