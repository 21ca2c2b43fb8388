"""`millstream generate`: continue a prompt, text to stdout as it comes, figures to stderr."""

import sys

import click

from ..errors import ConfigError
from . import _conversation, _options, _profile, _recoding, _sampling, _speculation, _streaming, _tuned
from ._output import decode_utf8, note, read_text_file, size, write, write_json

INTERRUPTED = "interrupted"


def _without_final_newline(text: str) -> str:
    # Files and pipes end with a newline that is no part of what was written.
    return text.removesuffix("\n").removesuffix("\r")


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """Return the prompt from the argument, the file, or stdin. Raises ConfigError or click.UsageError."""
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("PROMPT and --prompt-file exclude each other")
    if prompt_file is not None:
        return _without_final_newline(decode_utf8(read_text_file(prompt_file), prompt_file))
    if prompt is not None and prompt != "-":
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ConfigError("PROMPT: not valid UTF-8") from None
        return prompt
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise click.UsageError("give a PROMPT, --prompt-file FILE, or text on stdin")
    return _without_final_newline(decode_utf8(sys.stdin.buffer.read(), "stdin"))


def describe_stats(generation, finish_reason: str) -> str:
    stats = generation.stats
    reused = f" ({stats.reused_tokens} more were in the cache)" if stats.reused_tokens else ""
    return (
        f"prefill {stats.prompt_tokens - stats.reused_tokens} tokens in {stats.prefill_s:.3f} s "
        f"({stats.prefill_tok_s:.1f} tok/s){reused}; "
        f"decode {stats.generated_tokens} tokens in {stats.decode_s:.3f} s ({stats.decode_tok_s:.1f} tok/s); "
        f"finish: {finish_reason}; peak RSS {size(stats.peak_rss_bytes)}; load {stats.load_s:.2f} s"
    )


def describe_spec(stats) -> str:
    """One line on what speculation did, and what it was worth."""
    from ..spec import describe

    r = stats.report()
    windows = ", ".join(f"{n} rows {count}" for n, count in r["windows"].items())
    sources = ", ".join(f"{name} {s['accepted']}/{s['drafted']}" for name, s in r["sources"].items()) or "no drafts"
    by_position = describe.acceptance(r)
    accepted = f"{sources} (by position {by_position})" if by_position else sources
    gain = f"; {describe.gain(r)}"
    if r["experts_per_round"]:
        extra = "" if r["extra_expert_bytes"] is None else f", {size(r['extra_expert_bytes'])} more than plain steps"
        gain = f"; {r['experts_per_round']:.1f} experts a round{extra}{gain}"
    if r["cut_windows"] is not None:
        gain += f"; {r['cut_windows']} windows cut short by {r['cut_drafts']} drafts"
    if said := describe.troubles(r):
        gain += f"; {said}"
    if r["policy"] == "auto":
        gain += f"; auto switched {len(r['switches'])} times, last: {r['reason']}"
    return (
        f"spec: {r['rounds']} rounds of {r['ms_per_round']:.2f} ms, {r['tokens_per_round']:.2f} tokens a round; "
        f"accepted {accepted}; windows: {windows or 'none'}{gain}"
    )


def report(loaded, prompt: str, generation, text: str, finish_reason: str, sources: dict) -> dict:
    """The --json object. Fields that were not reached before an interruption are null or empty."""
    if generation is None:
        return {"text": text, "finish_reason": finish_reason, "prompt": prompt}
    stats = generation.stats
    rates = {"prefill_tok_s": stats.prefill_tok_s, "decode_tok_s": stats.decode_tok_s}
    return {
        "text": text,
        "finish_reason": finish_reason,
        "prompt": prompt,
        "prompt_token_ids": list(map(int, generation.prompt_token_ids)),
        "token_ids": list(map(int, generation.token_ids)),
        "model": str(loaded.files.path),
        "architecture": loaded.files.architecture,
        "isa": loaded.context.tier,
        "threads": loaded.context.num_threads,
        "context": loaded.max_context,
        "kv": loaded.options.kv,
        "kv_bytes": loaded.kv_bytes,
        "arith": loaded.context.arith,
        "expert_layout": loaded.expert_layout.name,
        "expert_layout_reason": loaded.expert_layout.reason,
        "sampling": _sampling.settings(generation.sampling),
        "sampling_sources": sources,
        "stats": {
            **vars(stats),
            **rates,
            "spec": stats.spec and stats.spec.report(),
            "streamer": _streaming.stats(loaded),
            "recoded": _recoding.stats(loaded),
        },
    }


class Run:
    """One generation from load to summary; keeps what there is when it is interrupted."""

    def __init__(self, prompt: str, as_json: bool, profiling: _profile.Profiling):
        self.prompt, self.as_json, self.profiling = prompt, as_json, profiling
        self.loaded = self.generation = self.cache = None
        self.sources: dict[str, str] = {}
        self.pieces: list[str] = []
        self.late_notes: list[str] = []

    def __call__(self, runtime: dict, sampling_flags: dict, context: dict, route_trace: str | None, **options) -> None:
        _sampling.check_flags(sampling_flags)
        self.loaded = _streaming.load(runtime.pop("model"), **runtime)
        note(_options.describe(self.loaded))
        for line in _options.format_notes(self.loaded):
            note(line)
        _streaming.print_plan(self.loaded)
        _recoding.watch(self.loaded)
        sampling, self.sources = _sampling.choose_sampling(self.loaded, sampling_flags)
        note(_sampling.describe_sampling(sampling, self.sources))
        options["session"], self.cache = _conversation.open_session(self.loaded, context["prompt_cache"])
        if context["chat"]:
            chosen = (context["chat_template"], context["system"])
            conversation = _conversation.open_conversation(self.loaded, *chosen, session=options.pop("session"))
            self.generation = conversation.ask(self.prompt, sampling=sampling, **options)
        else:
            self.generation = self.loaded.generate(self.prompt, sampling=sampling, **options)
        say = self.late_notes.append  # the text comes first
        around = self.profiling.around(self.loaded, self.generation)
        history, show = _streaming.usage_history(self.loaded, say), self.profiling.timed(write)
        with _options.route_trace(self.loaded, route_trace, say), history, around:
            for piece in self.generation:
                self.pieces.append(piece)
                if not self.as_json:
                    show(piece)

    def finish(self, interrupted: bool) -> None:
        """Close the text and print the summary."""
        reason = INTERRUPTED if interrupted else self.generation.finish_reason
        if self.generation is not None and not self.generation.stats.peak_rss_bytes:
            from ..hardware import peak_rss_bytes

            self.generation.stats.peak_rss_bytes = peak_rss_bytes()
        text = "".join(self.pieces)
        if self.as_json:
            write_json(report(self.loaded, self.prompt, self.generation, text, reason, self.sources))
        elif text and not text.endswith("\n"):
            write("\n")
        for line in self.late_notes:
            note(line)
        if self.generation is not None and self.generation.stats.spec is not None:
            note(describe_spec(self.generation.stats.spec))
        note(describe_stats(self.generation, reason) if self.generation is not None else f"finish: {reason}")
        if self.cache is not None:
            note(self.cache.save())
        _recoding.print_summary(self.loaded)
        _streaming.print_summary(self.loaded)
        self.profiling.finish(self.generation)


@click.command()
@click.argument("prompt", required=False)
@click.option("--prompt-file", "-f", metavar="FILE", help="Read the prompt from a file, less its final newline.")
@_options.runtime_options
@_streaming.options
@click.option("--ctx", type=click.IntRange(min=1), metavar="N", help="Context in tokens (default: the model's).")
@click.option("--max-tokens", "-n", type=click.IntRange(min=0), default=256, show_default=True, metavar="N",
              help="Tokens to generate at most.")  # fmt: skip
@_sampling.options
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token.")
@click.option("--chat", is_flag=True, help="PROMPT is a user's message: render it with the chat template.")
@_conversation.chat_options
@_conversation.prompt_cache_option
@_options.route_trace_option
@_speculation.spec_options
@_profile.options
@_options.json_option
@click.pass_context
def generate(
    click_context, prompt, prompt_file, max_tokens, stop, ignore_eos, route_trace, spec, draft, as_json, **options
):
    """Continue PROMPT (or a file, or stdin) and print the new text.

    Sampler settings come from the model's generation_config.json unless an option sets them; those in use are printed
    on stderr. Ctrl-C ends the text cleanly with exit code 130.
    """
    runtime = {"model": options.pop("model")} | _options.take_runtime(options)
    context = {name: options.pop(name) for name in ("chat", "chat_template", "system", "prompt_cache")}
    _conversation.check_chat_options(context["chat"], context["chat_template"], context["system"])
    run = Run(read_prompt(prompt, prompt_file), as_json, _profile.Profiling(_profile.take(options)))
    try:
        spec, draft = _tuned.apply(click_context, runtime, spec, draft)
        choices = _speculation.spec_choices(spec, draft, runtime["draft_model"], runtime["cut_drafts"])
        runtime["mtp"] = "mtp" in choices["draft"]
        limits = {"max_tokens": max_tokens, "stop": list(stop), "ignore_eos": ignore_eos}
        run(runtime, options, context, route_trace, **limits, **choices)
    except KeyboardInterrupt:
        run.finish(interrupted=True)
        click_context.exit(130)
    run.finish(interrupted=False)
