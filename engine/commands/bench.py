"""`millstream bench`: prefill and decode speed of several arms, side by side."""

import json
import shlex
import sys

import click
from click.core import ParameterSource

from ..errors import ConfigError
from . import _bench_profile, _options, _profile
from ._output import note, read_text_file, refuse_same_file, require_writable, table, write, write_file, write_json
from ._progress import Meter


class Numbers(click.ParamType):
    """Comma-separated whole numbers."""

    name = "N,N"

    def convert(self, value, param, ctx):
        try:
            found = [int(part) for part in str(value).split(",") if part]
        except ValueError:
            found = [-1]
        if any(n < 0 for n in found):
            self.fail(f"got {value!r}, expected whole numbers separated by commas", param, ctx)
        return found


def _read(path: str) -> dict:
    from ..bench import check_result

    try:
        content = json.loads(read_text_file(path))
    except ValueError:
        content = None
    check_result(content, path)
    return content


def _compare(paths, as_json: bool) -> int:
    from .. import bench as measuring
    from ..bench_arms import differences

    contents = [_read(path) for path in paths]
    rows, worse = measuring.compare(*contents)
    changed = differences(*contents)
    for d in changed:
        where = "" if d["arm"] is None else f"arm {d['arm']}: "
        note(f"not alike: {where}{d['setting']} {d['before']} before, {d['after']} after")
    lone = [measuring.only_in(*contents), measuring.only_in(*reversed(contents))]
    for path, other, found in zip(reversed(paths), paths, lone, strict=True):
        for test, arm in found:
            note(f"not compared: {test}, arm {arm}, which {other} has and {path} has not")
    if as_json:
        names = [[{"test": test, "arm": arm} for test, arm in found] for found in lone]
        write_json({"rows": rows, "slower": worse, "differences": changed, "only_before": names[0],
                    "only_after": names[1]})  # fmt: skip
    else:
        found = [
            (r["test"], r["arm"], *(f"{r[key]:.2f}" for key in ("before", "after")),
             *(f"{r[key]:.3f}" for key in ("ratio", "noise")), r["verdict"])
            for r in rows
        ]  # fmt: skip
        write(table(found, ("test", "arm", "before, tok/s", "after, tok/s", "ratio", "noise", "verdict")) + "\n")
    return 1 if worse else 0


def _save(option: str, path: str | None, text: str) -> None:
    if path is not None:
        write_file(option, path, text)
        note(f"written: {path}")


@click.command()
@_options.model_argument
@click.option("--prefill", type=Numbers(), default="128,512", show_default=True, help="Prompt lengths.")
@click.option("--decode", type=Numbers(), default="64", show_default=True, help="Tokens to decode.")
@click.option("--depth", type=Numbers(), default="0", show_default=True, help="Context before decoding.")
@click.option("--arm", "arms", multiple=True, metavar="NAME=VALUE,...",
              help="Options of an arm (threads, isa, spec, temperature ...); repeatable. The first is the "
              "yardstick.")  # fmt: skip
@click.option("--against", type=click.Choice(["llama.cpp"]), help="An arm of another engine on the same GGUF file.")
@click.option("--peer-python", metavar="PATH", help="With --against: the Python that has llama-cpp-python (default: "
              "this one).")  # fmt: skip
@click.option(
    "--repeat", type=click.IntRange(min=1), default=3, show_default=True, metavar="N", help="Measured rounds."
)
@_profile.options
@click.option("--save", metavar="FILE", help="Write the result as JSON, for --compare.")
@click.option("--csv", "csv_file", metavar="FILE", help="Write the table as CSV.")
@click.option("--markdown", metavar="FILE", help="Write the table as Markdown.")
@click.option("--compare", nargs=2, metavar="OLD NEW", help="Compare two saved results; exit code 1 on a drop.")
@_options.json_option
@click.pass_context
def bench(click_context, model_argument, compare, as_json, **options):
    """Measure prefill and decode speed of MODEL, several settings side by side.

    Arms take turns and their order rotates; the first round does not count; printed are medians with their range. With
    a --profile option every test and arm runs once more under the profiler; that run does not count.
    """
    _refuse_idle(click_context)
    options["model"] = _options.one_model(options["model"], model_argument)
    profiles = _profile.take(options)
    profiling = _bench_profile.Profiling(profiles)
    if compare:
        click_context.exit(_compare(compare, as_json))
    from .. import bench as measuring

    named = {"--save": options["save"], "--csv": options["csv_file"], "--markdown": options["markdown"]}
    for option, path in named.items():
        if path is not None:
            require_writable(option, path)
    refuse_same_file(named | _profile.files(profiles))
    tests = [measuring.Test("prefill", n) for n in options["prefill"] if n]
    tests += [measuring.Test("decode", n, d) for n in options["decode"] if n for d in options["depth"]]
    for name in (test.name for number, test in enumerate(tests) if test in tests[:number]):
        raise ConfigError(f"bench: {name} is given twice")
    if not tests:
        raise ConfigError("bench: nothing to measure; give --prefill or --decode a number")
    arms = _arms(measuring, options, max(t.tokens + max(t.depth, 1) + 1 for t in tests))
    note(_options.describe(arms[0].engine))
    for arm in arms:
        if isinstance(arm, measuring.EngineArm) and arm.engine.stream:
            note(f"{arm.name}: {arm.engine.stream.cache_line()}")
    for line in (arm.note for arm in arms if arm.note):
        note(line)
    with Meter("bench", "measurements") as meter:
        results = measuring.measure(arms, tests, options["repeat"], meter.update, profiling.collector)
    content = measuring.report(results, arms, shlex.join(["millstream", *sys.argv[1:]]))
    for arm in arms:
        arm.close()
    _save("--save", options["save"], json.dumps(content, indent=1) + "\n")
    _save("--csv", options["csv_file"], measuring.as_csv(content))
    _save("--markdown", options["markdown"], measuring.as_markdown(content))
    if as_json:
        write_json(content)
    else:
        write(measuring.as_text(content))
    profiling.finish()


def _refuse_idle(click_context) -> None:
    """Refuse options that would do nothing beside others. Raises ConfigError."""
    names = {
        p.name: p.make_metavar(click_context) if p.name == "model_argument" else p.opts[0]
        for p in click_context.command.params
    }
    given = {name for name in names if click_context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if "compare" in given and (idle := sorted(names[name] for name in given - {"compare", "as_json"})):
        raise ConfigError(f"bench --compare measures nothing, so {', '.join(idle)} would do nothing; leave it out")
    if "depth" in given and not any(click_context.params["decode"]):
        raise ConfigError("--depth does nothing with --decode 0: it is the context before decoding")
    if "peer_python" in given and "against" not in given:
        raise ConfigError("--peer-python does nothing without --against; leave it out")


def _arms(measuring, options: dict, positions: int) -> list:
    from ..bench_arms import parse_arm

    parsed = [(text or "default", parse_arm(text)) for text in (options["arms"] or ("",))]
    if len({name for name, _ in parsed}) < len(parsed):
        raise ConfigError("--arm: two arms are the same")
    model, against = options["model"], options["against"]
    if against and not str(model).endswith(".gguf"):
        raise ConfigError("--against llama.cpp needs a model that is a .gguf file")
    arms = []
    for name, arm in parsed:
        with Meter(f"{name}, experts") as meter:
            arms.append(measuring.EngineArm(name, model, arm, positions, meter.update))
    room = min(arm.engine.max_context for arm in arms)
    if positions > room:
        raise ConfigError(f"bench: {positions} positions are needed, the model's context holds {room}")
    if against:
        from ..peers.llama_cpp_arm import LlamaCppArm

        threads = arms[0].engine.context.num_threads
        arms.append(LlamaCppArm(against, model, threads, positions, options["peer_python"]))
    return arms
