"""Registry: every sibling module that defines FORMAT is a weight format, under its own name."""

from importlib import import_module
from pathlib import Path

from engine.errors import FormatError

from ._base import Format

__all__ = ["FORMATS", "Format", "format_of_ggml_type", "get_format"]

MODULES = (
    import_module(f"{__name__}.{path.stem}")
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if not path.stem.startswith("_")
)
FORMATS: dict[str, Format] = {module.FORMAT.name: module.FORMAT for module in MODULES}


def get_format(name: str) -> Format:
    """The format of that name. Raises: FormatError with the list of known names."""
    if name not in FORMATS:
        raise FormatError(f"unknown weight format {name!r}; this version knows {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of_ggml_type(ggml_type: int) -> Format | None:
    """The format that reads a GGUF type id, or None."""
    return next((f for f in FORMATS.values() if f.ggml_type == ggml_type), None)
