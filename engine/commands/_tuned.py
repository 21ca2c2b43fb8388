"""Settings that `millstream tune` found for this model on this machine, where an option is not given."""

from click.core import ParameterSource

from ..atomic_file import beside
from ..config import TUNE_ENDING
from ._output import note


def apply(click_context, runtime: dict, spec: str, draft: str | None) -> tuple[str, str | None]:
    """Fill in `runtime`; returns the values of --spec and --draft. Prints what is used, or why a file is not.

    Where there are settings, runtime["model"] becomes the opened model, so that it is opened once.
    """
    from ..runtime import SHIPPED_MODEL

    path = runtime["model"] or SHIPPED_MODEL
    if not beside(path, TUNE_ENDING).exists():
        return spec, draft
    from ..tune import SPECULATION, label, load_settings
    from ..weights import open_model

    runtime["model"] = files = open_model(path)
    settings, problem = load_settings(files)
    if problem:
        note(problem)
    given = {
        name
        for name in (*settings, *SPECULATION)
        if click_context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if given & set(SPECULATION):  # a draft source is nothing without its window
        given |= set(SPECULATION)
    used = {name: value for name, value in settings.items() if name not in given}
    if used:
        note(f"tuned: {label(used)}")
    spec, draft = str(used.pop("spec", spec)), used.pop("draft", draft)
    runtime.update(used)
    return spec, draft
