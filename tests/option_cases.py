"""Cases for the options of commands that prepare or look at a model; test_every_option.py has the rest and runs all."""

import os
from dataclasses import dataclass

THREADS = (os.cpu_count() or 1) + 1  # one that no default is


@dataclass
class Case:
    """args: the option. base: what both runs have besides. shows: pattern of the run with it only ("(?m)" is on).
    text: the product on stdout must differ, too. refused: the run with it is an error that says so."""

    args: str
    shows: str = ""
    base: tuple = ()
    text: bool = False
    refused: str = ""
    command: tuple = ()  # replaces the usual arguments
    plain: tuple = ()  # what replaces them in the run without, where the option is an argument
    stdin: str | None = None
    model: bool = True  # whether --model may be given
    may_fail: bool = False  # without the option


def case(args, shows="", base=(), **more):
    return Case(args, shows, tuple(base), **more)


def _tool(args, shows="", base=(), **more):
    return case(args, shows, base, model=False, **more)


STREAMED = ["--expert-slots", "8", "--disk", "500"]
PLAN = {
    "model": [_tool("-m {gguf}", r"tiny.gguf: architecture", command=("plan",), plain=("plan",))],
    "model_argument": [_tool("{gguf}", r"tiny.gguf: architecture", command=("plan",), plain=("plan",))],
    "config": [
        _tool("--config {config} --format q8_0", r"^\S+config.json: architecture", command=("plan", "--prompt", "8")),
        _tool("--config {config}", refused="--format NAME", command=("plan",)),
    ],
    "format_name": [
        _tool("--format q8_0", r" q8_0$", command=("plan", "--config", "{config}"), may_fail=True),
        _tool("--format q4_0", refused="does nothing without --config"),
    ],
    "ram": [_tool("--ram 0.5", r"^budget: 512.0 MiB \(--ram 0\.5\)")],
    "ctx": [_tool("--ctx 64", r"values of 64 positions")],
    "kv": [_tool("--kv f32", r"positions \(f32\)")],
    "expert_layout": [
        _tool("--expert-layout compact", r"^experts: compact", command=("plan", "{blocks}", "--prompt", "8"))
    ],
    "expert_slots": [_tool("--expert-slots 9", r"^cache: 9 of 24", command=("plan", "{model}", *STREAMED[:2]))],
    "readers": [
        _tool("--readers 2", r'"depth": 2\b', ["--expert-slots", "8", "--json"]),
        _tool("--readers 2", refused="--readers"),
    ],
    "disk_mb_s": [_tool("--disk 77", r"^disk: 77 MB/s", STREAMED), _tool("--disk 77", refused="--disk")],
    "prompt": [_tool("--prompt 5", r"prefill of 5 tokens")],
    "spec": [_tool("--spec 4", r"^speculation: a window of 4 rows"), _tool("--spec auto", refused="--spec auto")],
    "threads": [_tool(f"--threads {THREADS}", rf"tier \w+, {THREADS} threads")],
    "isa": [_tool("--isa scalar", r"tier scalar")],
    "as_json": [_tool("--json", r'"prediction": \{', text=True)],
}
TUNE = {
    "model": [case("-m {gguf}", r"^model: \S+tiny.gguf")],
    "model_argument": [
        _tool("{gguf}", r"^model: \S+tiny.gguf", plain=("tune", "{model}", "-n", "8", "--repeat", "1")),
        case("{gguf}", refused="give one of them"),
    ],
    "prompt": [
        case("--prompt 'In the beginning'", r"^prompt: 3 tokens"),
        case("--prompt In --prompt-file {prompt}", refused="exclude each other"),
    ],
    "prompt_file": [case("--prompt-file {prompt}", r"^prompt: 3 tokens")],
    "ram": [case("--ram 0.5", r"so --ram changes nothing")],
    "draft_model": [
        case("--draft-model {model}", r"^spec 2, draft model, draft-model .*: "),
        case("--draft-model {config}", refused="expected a snapshot directory"),
    ],
    "max_tokens": [case("-n 9", r"and 9 to decode"), case("-n 9999999", refused="exceed the context")],
    "repeat": [case("--repeat 2", r"2 measured rounds")],
    "dry_run": [case("--dry-run", r"^dry run: nothing is written")],
    "as_json": [case("--json", r'"written": ', text=True)],
}
HF_TO_SNAPSHOT = ("convert", "{hf}", "{out}/snapshot", "--force")
CONVERT = {
    "src": [
        _tool("", r"gate_up f32", command=("convert", "{gguf}", "{out}/snapshot", "--force"), plain=HF_TO_SNAPSHOT)
    ],
    "out": [
        _tool("", r"^\S+elsewhere: ", command=("convert", "{hf}", "{out}/elsewhere", "--force"),
              plain=HF_TO_SNAPSHOT),
        _tool("", refused="exists", command=("convert", "{hf}", "{model}")),
    ],
    "experts": [
        _tool("--format q4_0", r"gate_up q4_0, down q4_0"),
        _tool("--format q4_0", refused="without requantizing", command=("convert", "{gguf}", "{out}/tiny", "--force")),
    ],
    "gate_up": [_tool("--gate-up-format q4_0", r"gate_up q4_0, down q8_0")],
    "down": [_tool("--down-format q4_0", r"gate_up q8_0, down q4_0")],
    "dense": [_tool("--dense-format bf16", r"attention bf16")],
    "embed": [_tool("--embed-format bf16", r"embed bf16")],
    "head": [_tool("--head-format bf16", r"head bf16")],
    "layout": [_tool("--layout compute", r"layout compute")],
    "force": [
        _tool("--force", r"^\S+forced: ", command=("convert", "{hf}", "{out}/forced"), plain=HF_TO_SNAPSHOT)
    ],
    "force_tokenizer": [
        _tool("--force-tokenizer none", refused="'none' is not known",
              command=("convert", "{gguf}", "{out}/tiny", "--force")),
        _tool("--force-tokenizer gpt-2", refused="only for GGUF files"),
    ],
    "threads": [_tool(f"--threads {THREADS}", f" {THREADS} threads")],
    "as_json": [_tool("--json", r'"snapshot_bytes": ', text=True)],
}  # fmt: skip
INSPECT = {
    "path": [_tool("", r"tiny.gguf: gguf", command=("inspect", "{gguf}"), plain=("inspect", "{model}"))],
    "verify": [_tool("--verify", r"^verified: ")],
    "as_json": [_tool("--json", r'"file_bytes": ', text=True)],
}
KERNELS = {"as_json": [_tool("--json", r'"kernels": ', text=True)]}
DOCTOR = {
    "model": [_tool("--model {gguf}", r"(?s)^disk: .*\(\S+tiny.gguf")],
    "isa": [
        _tool("--isa scalar", r"scalar: runs here  <- in use \(forced by --isa\)"),
        _tool("--isa mmx", refused="tier 'mmx' is unknown"),
    ],
    "as_json": [_tool("--json", r'"checks": ', text=True)],
}
TOOLS = {
    "plan": PLAN, "tune": TUNE, "convert": CONVERT, "inspect": INSPECT, "kernels": KERNELS, "doctor": DOCTOR,
}  # fmt: skip
USUAL_TOOLS = {
    "plan": ("plan", "{model}", "--prompt", "8"),
    "tune": ("tune", "-n", "8", "--repeat", "1"),
    "convert": HF_TO_SNAPSHOT,
    "inspect": ("inspect", "{model}"),
    "kernels": ("kernels",),
    "doctor": ("doctor",),
}
