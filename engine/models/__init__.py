"""Model families, one file each, found by their Hugging Face model_type = file name."""

from importlib import import_module
from pathlib import Path

from ..errors import ConfigError

# model_type -> file of the family that computes the same.
ALIASES = {"kimi_k2": "deepseek_v3", "mistral": "llama"}


def known() -> list[str]:
    """The model_types this version can run."""
    files = {p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_")}
    return sorted(files | ALIASES.keys())


def family(model_type: str):
    """Module of a model_type. Raises ConfigError with the list of known ones."""
    if model_type not in known():
        raise ConfigError(f"architecture {model_type!r} is not supported; supported: {', '.join(known())}")
    return import_module(f"{__name__}.{ALIASES.get(model_type, model_type)}")
