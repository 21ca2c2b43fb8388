"""Settings that `millstream tune` found for this model on this machine, where an option is not given."""

from click.core import ParameterSource

from ..atomic_file import beside
from ..config import TUNE_ENDING
from ._output import note


def apply(click_context, runtime: dict, spec: str) -> str:
    """Fill in `runtime`; returns the value of --spec. Prints what is used, or why a file is not.

    Where there are settings, runtime["model"] becomes the opened model, so that it is opened once.
    """
    from ..runtime import SHIPPED_MODEL

    path = runtime["model"] or SHIPPED_MODEL
    if not beside(path, TUNE_ENDING).exists():
        return spec
    from ..tune import load_settings
    from ..weights import open_model

    runtime["model"] = files = open_model(path)
    settings, problem = load_settings(files)
    if problem:
        note(problem)
    given = {name for name in settings if click_context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    used = {name: value for name, value in settings.items() if name not in given}
    if used:
        note("tuned: " + ", ".join(f"{name.replace('_', '-')} {value}" for name, value in used.items()))
    spec = str(used.pop("spec", spec))
    runtime.update(used)
    return spec
