"""Settings that `millstream tune` found for this model on this machine, where an option is not given."""

import click
from click.core import ParameterSource

from ..atomic_file import beside
from ..config import TUNE_ENDING, check_draft_sources, parse_spec
from ..errors import ConfigError
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
    if bad := _damaged(click_context, settings):
        settings, problem = {}, f"note: {beside(path, TUNE_ENDING)}: not used: it is damaged: {bad}"
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


def _converted(click_context, option, value):
    """A setting as the command line would have it. Raises BadParameter or ConfigError."""
    if option.name == "spec":
        parse_spec(value)
        return value
    found = option.type.convert(str(value), option, click_context)
    if option.name == "draft":
        check_draft_sources(found.split(","))
    return found


def _damaged(click_context, settings: dict) -> str | None:
    """What no option of this command would take, or None."""
    options = {option.name: option for option in click_context.command.params}
    for name, value in settings.items():
        try:
            good = type(_converted(click_context, options[name], value)) is type(value)  # "8" and true are no numbers
        except (ConfigError, click.BadParameter):
            good = False
        if not good:
            return f"{name.replace('_', '-')} {str(value)[:60]}"
    alone = set(settings) & {"draft", "draft_model"}
    return f"{alone.pop().replace('_', '-')} without spec" if alone and "spec" not in settings else None
