"""Model families, one file each, found by their Hugging Face model_type = file name."""

from importlib import import_module
from pathlib import Path

from ..errors import ConfigError


def known() -> list[str]:
    """The model_types this version can run."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def family(model_type: str):
    """Module of a model_type. Raises ConfigError with the list of known ones."""
    if model_type not in known():
        raise ConfigError(f"architecture {model_type!r} is not supported; supported: {', '.join(known())}")
    return import_module(f"{__name__}.{model_type}")
