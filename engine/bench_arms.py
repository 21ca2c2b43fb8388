"""Arms of a benchmark: options as text, what cannot be one and why, and the settings that an arm really ran with."""

import dataclasses

from .config import RuntimeConfig, check_draft_sources, parse_spec
from .errors import ConfigError
from .sampler import SamplingParams

SAMPLING = {field.name: str(field.type) for field in dataclasses.fields(SamplingParams)}
RUNTIME = {field.name: str(field.type) for field in dataclasses.fields(RuntimeConfig)}
del RUNTIME["mtp"], RUNTIME["history"]  # see REFUSED
KINDS = RUNTIME | SAMPLING | {"spec": "int | str", "draft": "str"}
PROFILE = ("profile", "profile_layers", "profile_json", "profile_html", "trace")
# Options of `generate` that are none of an arm -> why.
REFUSED = {
    "model": "all arms run MODEL; compare two models with two --save files and --compare",
    "mtp": "say draft=mtp",
    "history": "a benchmark never adds to the usage history",
    "max_tokens": "--decode says how many tokens",
    "ignore_eos": "it is always on: arms must decode as many tokens",
    "stop": "it would end a test early; --decode says how many tokens",
    "prompt_cache": "prompts are computed every time, that is what prefill measures",
    "route_trace": "recording is not measured; use generate --route-trace",
    "json": "it is an option of bench itself",
    **dict.fromkeys(("prompt", "prompt_file", "chat", "chat_template", "system"),
                    "arms run fixed token ids, not a text; --prefill says how many"),
    **dict.fromkeys(PROFILE, "it is an option of bench itself, for all arms"),
}  # fmt: skip


def parse_arm(text: str) -> dict:
    """ "spec=4,threads=2" as a dictionary. Raises ConfigError for a name that is no option, or a bad value."""
    options = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if name in REFUSED:
            raise ConfigError(f"--arm {text}: {name.replace('_', '-')} is no option of an arm: {REFUSED[name]}")
        if not equals or name not in KINDS:
            raise ConfigError(f"--arm {text}: got {part!r}, expected NAME=VALUE with one of {', '.join(sorted(KINDS))}")
        if name in options:
            raise ConfigError(f"--arm {text}: {name} is given twice")
        options[name] = _value(KINDS[name], value.strip(), text)
    _check(options, text)
    return options


def _value(kind: str, value: str, where: str):
    if "bool" in kind:
        if value not in ("true", "false", "on", "off"):
            raise ConfigError(f"--arm {where}: got {value!r}, expected on or off")
        return value in ("true", "on")
    for number, name in ((int, "int"), (float, "float")):
        if name in kind and value != "auto":
            try:
                return number(value)
            except ValueError:
                if "str" not in kind:
                    raise ConfigError(f"--arm {where}: got {value!r}, expected a number") from None
    return value


def _check(options: dict, where: str) -> None:
    """Refuse choices of speculation that would do nothing, and settings out of range, before a model is loaded."""
    SamplingParams(**{name: options[name] for name in SAMPLING if name in options})
    if "draft" in options:  # a comma ends an option
        options["draft"] = options["draft"].split("+")
        check_draft_sources(options["draft"])
    idle = [name for name in ("draft", "draft_model", "cut_drafts") if name in options]
    if idle and parse_spec(options.get("spec", 0)) in (0, 1):
        raise ConfigError(f"--arm {where}: {', '.join(idle)} does nothing without spec=N or spec=auto")
    drafting = options.get("draft", [])
    if "model" in drafting and "draft_model" not in options:
        raise ConfigError(f"--arm {where}: draft=model needs draft_model=DIR")
    if "draft_model" in options and "draft" in options and "model" not in drafting:
        raise ConfigError(f"--arm {where}: draft_model does nothing with draft={'+'.join(drafting)}")


def split_options(options: dict) -> tuple[dict, dict, dict]:
    """(options of load, settings of a draw, {"spec": ..., "draft": ...}) of an arm. Draws are greedy by default."""
    runtime = {"ctx": None} | {name: value for name, value in options.items() if name in RUNTIME}
    sampling = {name: value for name, value in options.items() if name in SAMPLING}
    speculation = {"spec": options.get("spec", 0), "draft": options.get("draft")}
    if "mtp" in (speculation["draft"] or ()):
        runtime["mtp"] = True
    return runtime, sampling, speculation


def settings(engine, sampling: SamplingParams, spec, draft) -> dict:
    """Everything that an arm ran with, as it turned out to be: JSON values by name."""
    options, context, stream = engine.options, engine.context, engine.stream
    found = {
        "model": str(engine.files.path), "isa": context.tier, "threads": context.num_threads, "arith": context.arith,
        "kv": options.kv, "ctx": engine.max_context, "expert_layout": engine.expert_layout.name,
        "force_tokenizer": options.force_tokenizer, "spec": spec, "draft": draft,
        "draft_model": options.draft_model, "cut_drafts": options.cut_drafts,
        "ram_bytes": round(options.ram * 2**30) if options.ram else None, "lock": options.lock, "pin": options.pin,
        "slots": None, "experts": None, "io": options.io, "readers": None, "cache_policy": None, "lookahead": None,
        "sampling": dataclasses.asdict(sampling),
    }  # fmt: skip
    if stream:
        found |= {
            "ram_bytes": stream.budget.total_bytes if options.ram else None,
            "slots": stream.plan.num_slots, "experts": stream.plan.num_experts, "io": stream.expert_files.mode,
            "readers": stream.cache.readers, "cache_policy": stream.cache.policy.name,
            "lookahead": options.lookahead if stream.cache.lookahead else "off",
        }  # fmt: skip
    return found


def differences(before: dict, after: dict) -> list[dict]:
    """What two results were not measured alike with: {"arm" (None: all), "setting", "before", "after"} each."""
    found = []
    pairs = [(None, before, after, ("cpu",))]
    arms = before.get("arms", {}), after.get("arms", {})
    pairs += [(arm, arms[0][arm], arms[1][arm], None) for arm in arms[1] if arm in arms[0]]
    for arm, old, new, names in pairs:
        for name in names or dict.fromkeys([*old, *new]):
            if old.get(name) != new.get(name):
                found.append({"arm": arm, "setting": name, "before": old.get(name), "after": new.get(name)})
    return found
