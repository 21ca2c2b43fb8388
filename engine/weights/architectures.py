"""Which tensors a model has: every template of its family expanded to names, roles and shapes.

The templates and the rules for config.json belong to the family's file in engine/models; readers and converters ask
here. Knows nothing of files or of formats.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..errors import ConfigError
from ..models import family, known
from .errors import MissingTensorError, UnknownArchitectureError
from .views import View

ROLES = ("embed", "head", "attention", "norm", "bias", "router", "gate_up", "down", "shared", "mlp")
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")  # in the order of an expert record
_EXPERT = re.compile(rf"^layers\.(\d+)\.mlp\.experts\.(\d+)\.{EXPERT_PARTS[0]}$")
# Ten times the largest published model; a broken config must not exhaust memory while it is being checked.
_MAX_EXPERTS = 250_000
# Names made for tensors that the file does not list, so that an incomplete file gets a message that names them. A
# config that needs more belongs to another model, and the table of its names alone could fill memory.
_MAX_UNLISTED = 100_000


class Expected(NamedTuple):
    """What a model needs: role, logical shape ([rows, cols], or [length] of a vector), and its name in the source: a
    checkpoint's (or a views.View, or several to choose from), or what slices.parse reads in a GGUF file."""

    role: str
    shape: tuple[int, ...]
    checkpoint_name: str | View | tuple


def expert_matrix_name(layer: int, expert: int, part: str) -> str:
    return f"layers.{layer}.mlp.experts.{expert}.{part}"


def expert_ids(names: Iterable[str]) -> list[tuple[int, int]]:
    """(layer, expert) of every routed expert among the tensor names."""
    return [(int(found[1]), int(found[2])) for found in map(_EXPERT.match, names) if found]


def expert_record_name(layer: int, expert: int) -> str:
    """Name of an expert's one contiguous record inside its safetensors file."""
    return f"layers.{layer}.experts.{expert}"


def role_of(name: str) -> str:
    """Role of a tensor name or template in our spelling.

    "gate_up" and "down" are routed experts, "shared" the experts that every token takes, "mlp" the feed-forward of a
    layer without experts and the projection in front of a layer for multi-token prediction; "norm" and "bias" are
    float32 vectors. Raises: KeyError for a name without a role.
    """
    last = name.rsplit(".", 1)[-1]
    if last.endswith("norm"):
        return "norm"
    if last.endswith(("bias", "sinks")):
        return "bias"
    if ".self_attn." in name:
        return "attention"
    if last in ("router", "shared_expert_gate"):
        return "router"
    if ".shared_expert" in name:
        return "shared"
    if ".experts." in name:
        return {"gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}[last]
    return {"embed_tokens": "embed", "lm_head": "head", "eh_proj": "mlp",
            "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}[last]  # fmt: skip


def _layers(module, checked, template: str) -> Iterable[int | None]:
    """Layers that have the template's tensor: all of them, unless the family's `layers_of` says otherwise."""
    if "{n}" not in template:
        return (None,)
    layers_of = getattr(module, "layers_of", None)
    return layers_of(checked, template) if layers_of else range(checked.num_hidden_layers)


def model_config(architecture: str, config: dict):
    """The family's checked Config.

    Raises: UnknownArchitectureError with the list of known ones; ConfigError for a key that is missing, impossible or
    changes the mathematics in a way that is not computed here.
    """
    if architecture not in known():
        raise UnknownArchitectureError(
            f"architecture {architecture!r} is not supported by this version (supported: {', '.join(known())})"
        )
    checked = family(architecture).Config.from_dict(config)
    if checked.num_hidden_layers * max(checked.num_experts, 1) > _MAX_EXPERTS:
        raise ConfigError(
            f"config.json: num_hidden_layers {checked.num_hidden_layers} x num_experts {checked.num_experts} is out of "
            f"range (at most {_MAX_EXPERTS})"
        )
    return checked


def output_axis(architecture: str) -> int | None:
    """Axis of a checkpoint's matrices that is the output dimension, or None where the family does not say."""
    return getattr(family(architecture), "OUTPUT_AXIS", None)


def readable_quantization(architecture: str) -> tuple[str, ...]:
    """The quant_method values of quantized checkpoints that the family's views read as they are."""
    return getattr(family(architecture), "READABLE_QUANTIZATION", ()) if architecture in known() else ()


def _refuse_too_many(module, templates: Iterable[str], checked, num_listed: int) -> None:
    """Count before a name is made."""
    layers, experts = checked.num_hidden_layers, checked.num_experts
    needed = sum(len(_layers(module, checked, name)) * (experts if "{e}" in name else 1) for name in templates)
    if needed > num_listed + _MAX_UNLISTED:
        raise MissingTensorError(
            f"config.json: num_hidden_layers {layers} and num_experts {experts} need {needed} tensors, {num_listed} "
            "are there; config and weights belong to different models"
        )


def expected_tensors(
    architecture: str, config: dict, num_listed: int = 0, source_names: Mapping[str, object] | None = None
) -> dict[str, Expected]:
    """Every tensor of the model: embedding, then layer by layer with each expert's matrices together, norm, head.

    num_listed: tensors that the file lists. source_names: template -> name in the source (or several to choose from);
    None takes the checkpoint's, TENSORS. Raises: as model_config; MissingTensorError for a config that needs so many
    more that even their names are too many.
    """
    checked = model_config(architecture, config)
    module = family(architecture)
    source_names = module.TENSORS if source_names is None else source_names
    templates = module.shapes(checked)
    _refuse_too_many(module, templates, checked, num_listed)
    return _expanded(templates, checked, source_names, lambda template: _layers(module, checked, template))


def mtp_tensors(
    architecture: str,
    config: dict,
    is_listed: Callable[[object], bool],
    source_names: Mapping[str, object] | None = None,
) -> dict[str, Expected]:
    """Every tensor of the model's layer for multi-token prediction, named and ordered as expected_tensors does.

    is_listed: whether the source has what a checkpoint_name says. {} where family or config have no such layer, or the
    source lacks a part of it: many copies of checkpoints were made without it.
    """
    checked, module = model_config(architecture, config), family(architecture)
    if not hasattr(module, "mtp_shapes") or not checked.num_extra_layers:
        return {}
    source_names, layer = module.TENSORS if source_names is None else source_names, (checked.num_hidden_layers,)
    found = _expanded(module.mtp_shapes(checked), checked, source_names, lambda template: layer)
    return found if all(is_listed(want.checkpoint_name) for want in found.values()) else {}


def _expanded(
    templates: Mapping[str, tuple], checked, source_names: Mapping[str, object], layers
) -> dict[str, Expected]:
    """Templates with layers and experts filled in, in order. layers: template -> its layers."""
    found = []
    for template, shape in templates.items():
        role, source = role_of(template), source_names[template]
        part = EXPERT_PARTS.index(template.rsplit(".", 1)[-1]) if role in ("gate_up", "down") else 0
        experts = range(checked.num_experts) if "{e}" in template else (None,)
        for n in layers(template):
            # Before all layers: the embedding. After them: the final norm and the head.
            place = n if n is not None else -1 if role == "embed" else checked.num_hidden_layers
            for e in experts:
                # Only the matrices of an expert stand together; what else there is one of per expert comes before.
                order = (place, -1 if role not in ("gate_up", "down") else e, part)
                want = Expected(role, tuple(shape), _filled(source, n, e))
                found.append((order, template.format(n=n, e=e), want))
    found.sort(key=lambda item: item[0])  # stable: templates of one layer keep the family's order
    return {name: expected for _, name, expected in found}


def _filled(source, n: int | None, e: int | None):
    """A source name or View, or each of several, with layer and expert filled in."""
    if isinstance(source, View):
        return source.filled(n, e)
    return source.format(n=n, e=e) if isinstance(source, str) else tuple(_filled(one, n, e) for one in source)
