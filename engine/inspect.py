"""What is in a model: sizes by role and layer, bits per weight, bytes a token reads, tokenizer facts.

Works on the records of an opened model (engine.weights.ModelFiles) without reading weights; knows no container.
"""

import math
import re
from dataclasses import asdict, dataclass, field

from .errors import WeightsError

EXPERT_ROLES = ("gate_up", "down")
_MAX_ARRAY_ITEMS = 128  # a value per layer is shown, a vocabulary is counted
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass
class Group:
    """Tensors that are counted together. nbytes: in the file; memory_bytes: in the compute layout."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    memory_bytes: int = 0
    formats: list[str] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)

    def add(self, record, memory_bytes: int) -> None:
        self.tensors += 1
        self.parameters += math.prod(record.shape)
        self.nbytes += record.nbytes
        self.memory_bytes += memory_bytes
        for names, name in ((self.formats, record.format), (self.layouts, record.layout or "storage")):
            if name not in names:
                names.append(name)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0

    def to_json(self) -> dict:
        return {**asdict(self), "bits_per_weight": self.bits_per_weight}


def _memory_bytes(record, context) -> int:
    """Bytes that a kernel reads for the whole tensor; vectors are float32 as stored."""
    if len(record.shape) != 2 or record.layout is not None:
        return record.nbytes
    return context.matrix_bytes(context.layout_of(record.format), *record.shape)


def _layer_of(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _share(config) -> float:
    """Part of the routed experts that a token takes; config: the family's checked Config."""
    return config.num_experts_per_tok / config.num_experts if config.num_experts else 0.0


def bytes_per_token(roles: dict[str, Group], config, tied_head: bool) -> dict:
    """Bytes of weights that one decode step reads from memory, and what of it are experts.

    All dense tensors count whole, the embedding one row, the experts num_experts_per_tok of num_experts. A tied head
    reads the whole embedding. The layer for multi-token prediction does not count: only drafts use it.
    """
    experts = sum(roles[role].memory_bytes for role in EXPERT_ROLES if role in roles)
    embed = roles["embed"].memory_bytes if "embed" in roles else 0
    dense = sum(group.memory_bytes for role, group in roles.items() if role not in (*EXPERT_ROLES, "embed", "mtp"))
    dense += embed if tied_head else embed // config.vocab_size
    active = round(experts * _share(config))
    return {"dense": dense, "active_experts": active, "total": dense + active}


def active_parameters(roles: dict[str, Group], config, tied_head: bool) -> int:
    """Parameters that take part in one decode step, embedding lookup not counted."""
    experts = sum(roles[role].parameters for role in EXPERT_ROLES if role in roles)
    dense = sum(group.parameters for role, group in roles.items() if role not in (*EXPERT_ROLES, "embed", "mtp"))
    return dense + round(experts * _share(config)) + (roles["embed"].parameters if tied_head else 0)


def tokenizer_facts(files) -> dict | None:
    """Sizes, special ids and rules of the tokenizer; {"error": ...} when it cannot be used, None without one."""
    from .chat_template import templates
    from .tokenizer import Tokenizer

    if files.tokenizer_dir is None and files.gguf_metadata is None:
        return None
    try:
        tokenizer = Tokenizer.of_model(files, model_vocab_size=files.config["vocab_size"])
        chat_templates = templates(files)
    except WeightsError as error:
        return {"error": str(error)}
    return {
        "vocab_size": tokenizer.vocab_size,
        "padding_ids": tokenizer.padded_vocab_size - tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_ids": sorted(tokenizer.eos_ids),
        "adds_bos": tokenizer.adds_bos,
        "chat_template": bool(chat_templates),
    }


def gguf_facts(files) -> dict:
    """Container version, alignment, and the metadata: long arrays only as {"items": their number}."""
    metadata = {}
    for key in files.gguf_metadata:
        items = files.gguf_metadata.length(key)
        long = items is not None and items > _MAX_ARRAY_ITEMS
        metadata[key] = {"items": items} if long else files.gguf_metadata[key]
    return {"version": files.gguf_version, "alignment": files.gguf_alignment, "metadata": metadata}


def roles_of(files, context) -> dict[str, Group]:
    """Every role's tensors counted together; "mtp": all of the layer for multi-token prediction."""
    roles: dict[str, Group] = {}
    for record in files.tensors.values():
        role = "mtp" if record.name in files.mtp_names else record.role
        roles.setdefault(role, Group()).add(record, _memory_bytes(record, context))
    return roles


def inspect_model(files, context) -> dict:
    """Everything `millstream inspect` shows, ready for JSON. context: engine.kernels.Context for layout sizes."""
    roles = roles_of(files, context)
    layers: dict[int, dict[str, list[str]]] = {}
    total = Group()
    for record in files.tensors.values():
        total.add(record, _memory_bytes(record, context))
        layer = _layer_of(record.name)
        if layer is not None:
            formats = layers.setdefault(layer, {}).setdefault(record.role, [])
            if record.format not in formats:
                formats.append(record.format)
    return {
        "path": str(files.path),
        "kind": files.kind,
        "architecture": files.architecture,
        "config": files.config,
        "generation_config": files.generation_config,
        "tied_head": files.tied_head,
        "files": dict(files.files),
        "file_bytes": files.file_bytes,
        "tensor_bytes": total.nbytes,
        "memory_bytes": total.memory_bytes,
        "parameters": total.parameters,
        "active_parameters": active_parameters(roles, files.model_config, files.tied_head),
        "bits_per_weight": total.bits_per_weight,
        "bytes_per_token": bytes_per_token(roles, files.model_config, files.tied_head),
        "roles": {role: group.to_json() for role, group in roles.items()},
        "layers": {str(layer): layers[layer] for layer in sorted(layers)},
        "tokenizer": tokenizer_facts(files),
        "gguf": gguf_facts(files) if files.gguf_metadata is not None else None,
    }
