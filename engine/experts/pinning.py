"""Experts that are loaded first and never leave, chosen by recorded use; and the record of this run."""

from pathlib import Path

from ..errors import ConfigError
from .history import PIN_SHARE, Usage, history_path, model_fingerprint
from .route_trace import moe_blocks

AUTO = "auto"


def _usage(source: str, files, shape: tuple[int, int]) -> tuple[Path, Usage | None]:
    path = history_path(files) if source == AUTO else Path(source)
    try:
        usage = Usage.read(path)
    except FileNotFoundError:
        if source == AUTO:
            return path, None
        raise ConfigError(f"--pin {path}: no such file; give a usage history or a route trace, or auto") from None
    usage.check(path, model_fingerprint(files), shape)
    return path, usage


def check_pin_file(files, model, source: str) -> None:
    """For a model that fits, which pins nothing: what is named must be right all the same, so that the day it is needed
    holds no surprise. Raises ConfigError as pin_experts does."""
    blocks = moe_blocks(model)
    if blocks:
        _usage(source, files, (len(blocks), blocks[0].num_experts))
    elif source != AUTO:
        raise ConfigError(f"--pin: {files.path} has no routed experts; leave the option out")


def pin_experts(stream, model, source: str) -> str:
    """Pin the most used experts in an open ExpertStream; returns the line to print.

    source: a usage history, a route trace, or "auto" for the history beside the model. Raises ConfigError when the file
    is broken or another model's, ExpertReadError.
    """
    blocks, num_slots = moe_blocks(model), stream.plan.num_slots
    num_experts, top = blocks[0].num_experts, blocks[0].num_experts_per_tok
    path, usage = _usage(source, stream.files, (len(blocks), num_experts))
    if usage is None:
        return f"pinned: nothing, {path} does not exist yet; it is written at the end of a run that streams"
    # A token of one layer must find slots beside the pinned ones.
    limit = max(0, min(int(num_slots * PIN_SHARE), num_slots - top))
    keys = [blocks[layer].experts.layer * num_experts + expert for layer, expert in usage.most_used(limit)]
    stream.cache.pin(keys)
    share = sum(usage.uses.flat[at] for at in (-usage.uses).argsort(axis=None)[: len(keys)]) / max(1, usage.uses.sum())
    return (
        f"pinned: {len(keys)} experts in {len(keys)} of {num_slots} slots, {100 * share:.1f} % of the uses of "
        f"{usage.tokens:.0f} tokens in {path}"
    )
