"""Options of speculation: --spec, --draft, --draft-model, --cut-drafts."""

import click

from ..config import RuntimeConfig, check_draft_sources, parse_spec
from ..errors import ConfigError


def spec_options(command):
    """--spec, --draft, --draft-model, --cut-drafts."""
    command = click.option(
        "--cut-drafts",
        type=click.Choice(["on", "off"]),
        default="on",
        show_default=True,
        callback=lambda _context, _option, value: value == "on",
        help="While streaming, drop drafts whose experts cost more reading than they promise.",
    )(command)
    command = click.option(
        "--draft-model", metavar="DIR", help="A small model with the same tokens that drafts (turns on --draft model)."
    )(command)
    command = click.option(
        "--draft", metavar="NAMES", help="Draft sources, comma-separated, first come first: lookup, mtp, model."
    )(command)
    return click.option(
        "--spec",
        default="0",
        show_default=True,
        metavar="N|auto",
        help="Rows of a verify window (drafts + 1), up to 8; 0: plain decode; auto: whatever is fastest.",
    )(command)


def spec_choices(spec: str, draft: str | None, draft_model: str | None, cut_drafts: bool) -> dict:
    """Arguments of Engine.generate. Raises ConfigError for a choice that would do nothing."""
    rows = parse_spec(spec)
    names = (
        [name.strip() for name in draft.split(",")] if draft is not None else ["lookup"] + ["model"] * bool(draft_model)
    )
    check_draft_sources(names)
    if rows in (0, 1) and (draft is not None or draft_model):
        raise ConfigError("--draft and --draft-model do nothing without --spec N or --spec auto")
    if rows in (0, 1) and cut_drafts != RuntimeConfig.cut_drafts:
        raise ConfigError("--cut-drafts does nothing without --spec N or --spec auto")
    if "model" in names and not draft_model:
        raise ConfigError("--draft model needs --draft-model DIR")
    if draft_model and "model" not in names:
        raise ConfigError(f"--draft-model does nothing with --draft {draft}")
    return {"spec": rows, "draft": names}
