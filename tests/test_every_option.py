"""Every option of every command changes a printed figure, or is an error where it would do nothing.

Options are found by asking click: one without an entry in CASES fails. A case runs its command with and without the
option; `shows` must match what is printed with it and not what is printed without. In this process, on small models.
"""

import functools
import json
import re
import shlex
import shutil

import mtp_models
import pytest
import tiny_models
from click.testing import CliRunner
from gguf import GGMLQuantizationType
from gguf_models import write_gguf
from option_cases import THREADS, TOOLS, USUAL_TOOLS, case

from engine import disk_bandwidth, doctor, machine_speed
from engine.cli import cli
from engine.errors import EngineError
from engine.runtime import SHIPPED_MODEL

PROMPT = "And Moses said, And Moses said, And"
STREAM = ["--expert-slots", "8"]
SAMPLED = ["--temperature", "1", "--seed", "1"]
SPEC = ["--spec", "4"]


USUAL_GENERATE = ("generate", PROMPT)
RUNTIME = {
    "model": [case("-m {gguf}", r"^model: \S+tiny.gguf", text=True)],
    "threads": [case(f"--threads {THREADS}", f" {THREADS} threads")],
    "isa": [case("--isa scalar", r"tier scalar")],
    "kv": [case("--kv f32", r"kv f32")],
    "expert_layout": [
        case("--expert-layout compact", r"experts compact", ["-m", "{blocks}"]),
        case("--expert-layout compact", refused="there are no storage rows to keep"),
    ],
    "arith": [case("--arith float", r"arithmetic float")],
    "force_tokenizer": [
        case("--force-tokenizer none", refused="'none' is not known", base=["-m", "{gguf}"]),
        case("--force-tokenizer olmo", refused="only for GGUF files"),
    ],
}
STREAMING = {
    "ram": [
        case("--ram 0.5", r"of 0\.50 GiB \(--ram 0\.5\)", STREAM),
        case("--ram 0.5", r"so --ram changes nothing"),
        case("--ram 0.5", r"experts fast \(.* fit into \d{3} MiB\)", ["-m", "{blocks}"]),
    ],
    "io": [
        case("--io buffered", r"io buffered", STREAM),
        case("--io direct", r"slots of .* io direct"),
        case("--io buffered", r"so --io changes nothing"),
        case("--io mmap", r"^experts: mapped, not read in"),
    ],
    "readers": [case("--readers 2", r" 2 readers", STREAM), case("--readers 2", r"so --readers changes nothing")],
    "lookahead": [
        case("--lookahead off", r"look-ahead off", STREAM),
        case("--lookahead on", r"so --lookahead changes"),
    ],
    "lock": [case("--lock", r"locked")],
    "expert_slots": [case("--expert-slots 9", r"experts: 9 of 24"), case("--expert-slots 1", refused="slots")],
    "cache_policy": [
        case("--cache-policy lru", r"policy lru", STREAM),
        case("--cache-policy lru", r"so --cache-policy"),
    ],
    "pin": [case("--pin {history}", r"^pinned: ", STREAM), case("--pin auto", r"so --pin changes nothing")],
    "history": [
        case("--history on", r"^usage history: .* tokens added", [*STREAM, "--history", "off"]),
        case("--history off", r"so --history changes nothing"),
    ],
}
SPECULATION = {
    "spec": [case("--spec 4", r"^spec: |accepted")],
    "draft": [case("--draft lookup,model", r"lookup \d+/\d",
                   [*SPEC, "--draft-model", "{model}", "--draft", "model", "-n", "60"]),
              case("--draft mtp", r"accepted mtp \d+/\d", [*SPEC, "-m", "{mtp}", "--draft", "lookup"]),
              case("--draft mtp", refused="it has none; choose another draft source", base=SPEC),
              case("--draft lookup", refused="do nothing without --spec")],
    "cut_drafts": [case("--cut-drafts on", r"spec: .* windows cut short", [*SPEC, *STREAM, "--cut-drafts", "off"]),
                   case("--cut-drafts off", r"so --cut-drafts changes nothing", SPEC),
                   case("--cut-drafts off", refused="does nothing without --spec")],
    "draft_model": [case("--draft-model {model}", r"accepted .*model \d", SPEC),
                    case("--draft-model {model}", refused="do nothing without --spec"),
                    case("--draft-model {model}", refused="does nothing with --draft lookup",
                         base=[*SPEC, "--draft", "lookup"])],
}  # fmt: skip
SAMPLING = {
    "temperature": [case("--temperature 3", r"temperature 3\.0 \(flag\)", SAMPLED, text=True)],
    "top_k": [case("--top-k 1", r"top_k 1 \(flag\)", SAMPLED, text=True), case("--top-k 5", r"top_k changes nothing")],
    "top_p": [case("--top-p 0.1", r"top_p 0\.1 ", SAMPLED, text=True), case("--top-p 0.5", r"top_p changes nothing")],
    "min_p": [case("--min-p 0.9", r"min_p 0\.9 ", SAMPLED, text=True), case("--min-p 0.5", r"min_p changes nothing")],
    "repeat_penalty": [case("--repeat-penalty 3", r"repeat_penalty 3\.0 \(flag\)", text=True)],
    "repeat_last_n": [case("--repeat-last-n 1", r"repeat_last_n 1 ", ["--repeat-penalty", "3"], text=True)],
    "frequency_penalty": [case("--frequency-penalty 9", r"frequency_penalty 9\.0 \(flag\)", text=True)],
    "presence_penalty": [case("--presence-penalty 20", r"presence_penalty 20\.0 \(flag\)", text=True)],
    "seed": [case("--seed 7", r"seed 7 \(flag\)", SAMPLED, text=True), case("--seed 7", r"seed changes nothing")],
}  # fmt: skip
GENERATE = {
    "prompt": [case("", r"prefill 3 tokens", command=("generate", "In the beginning"), plain=USUAL_GENERATE)],
    "prompt_file": [
        case("--prompt-file {prompt}", r"prefill 3 tokens", command=("generate",), stdin="And Moses said unto")
    ],
    "ctx": [case("--ctx 64", r"context 64"), case("--ctx 4", refused="context")],
    "max_tokens": [case("-n 5", r"decode 5 tokens", text=True)],
    "stop": [case("--stop {word}", r"finish: stop", text=True)],
    "ignore_eos": [case("--ignore-eos", r"decode 8 tokens .* finish: length", ["-m", "{ends}"], text=True)],
    "chat": [case("--chat", refused="template")],
    "chat_template": [
        case("--chat-template {other}", r"^chat: \S+other", ["--chat", "--chat-template", "{template}"], text=True),
        case("--chat-template {template}", refused="does nothing without --chat"),
    ],
    "system": [
        case(
            "--system 'David the king of all Israel and of Judah'",
            r"prefill 2\d tokens",
            ["--chat", "--chat-template", "{template}"],
            text=True,
        ),
        case("--system 'David the king of all Israel and of Judah'", refused="does nothing without --chat"),
    ],
    "prompt_cache": [case("--prompt-cache {cache}", r"^prompt cache: ")],
    "route_trace": [case("--route-trace {out}/trace", r"^route trace: ")],
    "profile": [case("--profile", r"expert_gate_up")],
    "profile_layers": [case("--profile-layers", r"(?s)layer.*\n *2 ", ["--profile"])],
    "profile_json": [case("--profile-json {out}/profile.json", r"^profile json: ")],
    "profile_html": [case("--profile-html {out}/profile.html", r"^profile html: ")],
    "trace": [case("--trace {out}/trace.json", r"^trace: ")],
    "as_json": [case("--json", r'"token_ids": \[', text=True)],
}
PERPLEXITY = {
    "text_file": [case("--text {other}", r"^perplexity: 3\d tokens", text=True)],
    "ctx": [case("--ctx 8", r"windows of 8,", text=True), case("--ctx 999999", refused="exceeds")],
    "stride": [case("--stride 4", r"10 windows\)", text=True)],
    "score": [case("--score all", r"scoring all", text=True)],
    "route_trace": [case("--route-trace {out}/trace2", r"^route trace: ")],
    "as_json": [case("--json", r'"perplexity": ', text=True)],
}
CHAT = {
    **{name: GENERATE[name] for name in ("ctx", "prompt_cache")},
    "ctx": [case("--ctx 64", r"context 64")],
    "max_tokens": [case("-n 5", r"decode 5 tokens", text=True)],
    "stop": [case("--stop era", r"finish: stop", text=True)],
    "chat_template": [case("--chat-template {other}", r"^chat: \S+other", text=True)],
    "system": [case("--system 'David the king of all Israel and of Judah'", r"prefill 1\d tokens", text=True)],
    "truncate": [case("--truncate", r"oldest messages were forgotten", ["--ctx", "24"], text=True,
                      stdin="In the\n" * 4, may_fail=True)],
}  # fmt: skip
BENCH = {
    "model": [case("-m {gguf}", r"^model: \S+tiny.gguf")],
    "model_argument": [
        case("{gguf}", r"^model: \S+tiny.gguf", model=False),
        case("{gguf}", refused="give one of them"),
    ],
    "prefill": [case("--prefill 3", r"^prefill 3 ")],
    "decode": [case("--decode 3", r"^decode 3 ")],
    "depth": [
        case("--depth 5", r"^decode 2 @ 5 "),
        case("--depth 5", refused="does nothing", base=["--decode", "0", "--prefill", "2"]),
    ],
    "arms": [case("--arm threads=1", r"threads=1"), case("--arm speed=1", refused="speed")],
    "against": [case("--against llama.cpp", refused="needs a model that is a .gguf file")],
    "peer_python": [
        case(
            "--peer-python /nowhere/python",
            refused="cannot be started",
            base=["-m", "{gguf}", "--against", "llama.cpp"],
        ),
        case("--peer-python x", refused="does nothing without --against"),
    ],
    "profile": [case("--profile", r"(?s)^decode 2, default:\n.*expert_gate_up")],
    "profile_layers": [case("--profile-layers", r"(?s)layer.*\n *2 ", ["--profile"])],
    "profile_json": [case("--profile-json {out}/profile.json", r"^profile json: ")],
    "profile_html": [case("--profile-html {out}/profile.html", r"^profile html: ")],
    "trace": [case("--trace {out}/trace.json", r"^trace: ")],
    "repeat": [case("--repeat 2", r'"samples": \[\s+[\d.]+,\s+[\d.]+\s+\]', ["--json"])],
    "save": [case("--save {out}/b.json", r"^written: \S+b.json")],
    "csv_file": [case("--csv {out}/b.csv", r"^written: \S+b.csv")],
    "markdown": [case("--markdown {out}/b.md", r"^written: \S+b.md")],
    "compare": [
        case(
            "--compare {bench} {fast}",
            r" 9\.000 .*faster",
            command=("bench", "--compare", "{bench}", "{bench}"),
            model=False,
        ),
        case("--compare {bench} {bench}", refused="would do nothing", base=["--prefill", "8"]),
    ],
    "as_json": [case("--json", r'"results"')],
}
CASES = {
    "generate": {**RUNTIME, **STREAMING, **SPECULATION, **SAMPLING, **GENERATE},
    "perplexity": {**RUNTIME, **STREAMING, **PERPLEXITY},
    "chat": {**RUNTIME, **STREAMING, **SPECULATION, **SAMPLING, **CHAT},
    "bench": BENCH,
    **TOOLS,
}
USUAL = {
    "generate": USUAL_GENERATE,
    "perplexity": ("perplexity", "--text", "{text}", "--ctx", "16"),
    "chat": ("chat", "--chat-template", "{template}"),
    "bench": ("bench", "--prefill", "0", "--decode", "2", "--repeat", "1"),
    **USUAL_TOOLS,
}
SHORT = {"generate": ("-n", "8", "--temperature", "0"), "chat": ("-n", "8", "--temperature", "0")}


def invoke(args, stdin=None):
    """(exit code, stdout, everything printed and the error)"""
    done = CliRunner().invoke(cli, [str(arg) for arg in args], input=stdin)
    error = done.exception if isinstance(done.exception, EngineError) else None
    if done.exception is not None and error is None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return (2 if error else done.exit_code), done.stdout, f"{done.stdout}\n{done.stderr}\n{error or ''}"


@functools.cache
def plain_run(args, stdin):
    """A run without an option, which many cases share."""
    return invoke(args, stdin)


def decoded(model):
    """The --json object of a usual run."""
    return json.loads(invoke(["generate", PROMPT, "-m", model, *SHORT["generate"], "--json"])[1])


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Files that the cases name."""
    out = tmp_path_factory.mktemp("options")
    model = shutil.copytree(SHIPPED_MODEL, out / "model")
    write_gguf(out / "tiny.gguf", "mha_base")
    mtp_models.checkpoint(out / "mtp", "glm4_moe")
    write_gguf(out / "blocks.gguf", "mha_base", {"ffn": GGMLQuantizationType.Q8_0})
    texts = {"prompt": "In the beginning\n", "template": "{% for m in messages %}{{ m.content }} {% endfor %}",
             "other": "{% for m in messages %}({{ m.content }} and {{ m.content }}) {% endfor %}"}  # fmt: skip
    texts["text"] = "In the beginning God created the heaven and the earth. And the earth was without form. " * 3
    for name, text in texts.items():
        (out / name).write_text(text)
    found, ends = decoded(model), out / "ends"
    tiny_models.make_hf_dir(ends, "mha_base")
    third = {"eos_token_id": decoded(ends)["token_ids"][2]}
    (ends / "generation_config.json").write_text(json.dumps(third))
    invoke(["generate", PROMPT, "-m", model, "-n", 4, *STREAM])  # leaves a usage history
    invoke(["bench", "-m", model, *USUAL["bench"][1:], "--save", out / "bench"])
    twice = json.loads((out / "bench").read_text())
    twice["results"][0]["median"] *= 9
    (out / "fast").write_text(json.dumps(twice))
    word = re.findall(r"\w+", found["text"])[1]
    tiny_models.make_hf_dir(out / "hf", "mha_base")
    names = {name: out / name for name in (*texts, "model", "mtp", "ends", "bench", "fast", "cache", "hf")}
    return {
        **names,
        "config": out / "hf" / "config.json",
        "out": out,
        "gguf": out / "tiny.gguf",
        "blocks": out / "blocks.gguf",
        "history": out / "model.usage.json",
        "word": word,
    }


@pytest.fixture(scope="module", autouse=True)
def shipped_model_untouched():
    """What a run leaves beside a model would change the runs of other tests."""
    before = sorted(SHIPPED_MODEL.parent.iterdir())
    yield
    assert sorted(SHIPPED_MODEL.parent.iterdir()) == before


@pytest.fixture(scope="module", autouse=True)
def measured_once():
    """`plan` asks for the same speeds in every case, and no case is about them; nor about those of `doctor`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("model_speed", "loop_seconds", "recode_gb_s", "disk_speed", "stream_call_seconds"):
            patch.setattr(machine_speed, name, _once(getattr(machine_speed, name)))
        for name in ("SPEED_BYTES", "COMPACT_SPEED_BYTES"):
            patch.setattr(doctor, name, 1)
        patch.setattr(disk_bandwidth, "SECONDS_EACH", 0.01)
        yield


def _once(measure):
    known = {}

    def kept(*args, **options):
        key = options.get("window"), args[-1] if measure.__name__ == "disk_speed" else None
        if key not in known:
            known[key] = measure(*args, **options)
        return known[key]

    return kept


def every_case():
    for command, options in CASES.items():
        for option, cases in options.items():
            for number, found in enumerate(cases):
                yield pytest.param(command, found, id=f"{command}-{option}-{number}")


def test_every_command_has_cases():
    assert set(CASES) == set(cli.commands)


@pytest.mark.parametrize("command", CASES)
def test_every_option_has_a_case(command):
    assert {param.name for param in cli.commands[command].params} == set(CASES[command])


@pytest.mark.parametrize(("command", "found"), list(every_case()))
def test_option_changes_a_figure_or_is_refused(command, found, places):
    def expand(words):
        return [str(word).format(**places) for word in words]

    base = [
        *(found.command or USUAL[command]),
        *(["-m", "{model}"] * found.model),
        *SHORT.get(command, ()),
        *found.base,
    ]
    stdin = found.stdin or ("In the\nAnd the\n" if command == "chat" else None)
    code, text, printed = invoke(expand([*base, *shlex.split(found.args)]), stdin)
    if found.refused:
        assert code == 2, printed
        assert found.refused in printed
        assert text == ""
        return
    assert code == 0, printed
    assert re.search("(?m)" + found.shows, printed), printed
    base = [*found.plain, *base[len(found.command or USUAL[command]) :]] if found.plain else base
    plain_code, plain_text, plain = plain_run(tuple(expand(base)), stdin)
    assert plain_code == 0 or found.may_fail, plain
    assert not re.search("(?m)" + found.shows, plain), plain
    if found.text:
        assert text != plain_text
