"""What a run of a model would take and how fast it would be, from its headers and this machine's measured speeds.

`plan_memory` decides as a run does (engine.experts.stream.plan_experts, engine.memory.make_plan); `predict` is
arithmetic on measured figures and has no other source, so that it can be tested without a clock. Whatever neither
headers nor measurements say is an assumption, and listed.
"""

from dataclasses import dataclass, replace

import numpy as np

from . import memory
from .errors import ConfigError
from .experts.cache import DEFAULT_READERS
from .experts.history import Usage, history_path, model_fingerprint
from .experts.places import ExpertPlaces
from .experts.stream import plan_experts
from .hardware import last_cache_bytes
from .inspect import bytes_per_token, roles_of
from .plan_disk import disk_figures

PREFILL_BLOCK = 512  # tokens of one forward call, as engine.runtime has it


@dataclass(frozen=True)
class MemoryChoice:
    """plan: None when everything fits without slots. places: where experts lie, None without experts or when resident.
    expert_bytes: mean bytes of an expert in the file; num_experts: of a layer."""

    layout: object
    plan: memory.Plan | None
    budget: memory.Budget
    places: ExpertPlaces | None
    dense_bytes: int
    kv_bytes: int
    positions: int

    @property
    def streams(self) -> bool:
        return self.plan is not None and self.plan.num_slots < self.plan.num_experts


def context_length(files, ctx: int | None) -> int:
    """Positions of a run, as engine.runtime takes them."""
    trained = files.model_config.max_position_embeddings
    if ctx is not None and ctx > trained:
        raise ConfigError(f"--ctx {ctx} exceeds the {trained} positions this model was made for")
    return ctx or trained


def plan_memory(files, context, options) -> MemoryChoice:
    """What is resident and how many experts fit. Raises ConfigError as a run would when memory is short."""
    if files.kind == "plan":
        options = replace(options, io="buffered")  # there is no file to look at
    positions = context_length(files, options.ctx)
    max_tokens = min(PREFILL_BLOCK, positions)
    layout, stream = plan_experts(files, context, options, positions, max_tokens)
    dense = memory.dense_bytes(files, context)
    kv = memory.kv_estimate(files.model_config, positions, max_tokens, options.kv)
    if stream is None:
        return MemoryChoice(layout, None, memory.make_budget(options.ram), None, dense, kv, positions)
    places = stream.places
    readers = options.readers or DEFAULT_READERS
    fixed = {
        "program": memory.resident_bytes() + memory.GROWTH_BYTES,
        "dense weights": dense,
        "kv cache": kv,
        "activations": memory.scratch_estimate(files, max_tokens, context.num_threads),
        "read buffers": places.staging_bytes * (readers + 2),
        "page cache": memory.PAGE_CACHE_FLOOR_BYTES,
    }
    top = files.model_config.num_experts_per_tok
    plan = memory.make_plan(stream.budget, fixed, places.slot_bytes, len(places.keys), top, options.expert_slots)
    return MemoryChoice(layout, plan, stream.budget, places, dense, kv, positions)


def recorded_usage(files) -> Usage | None:
    """The usage history beside the model, if it is this model's."""
    try:
        usage = Usage.read(history_path(files))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return usage if usage.tokens and usage.fingerprint in ("", model_fingerprint(files)) else None


def _chances(usage: Usage) -> np.ndarray:
    """Chance that a token uses an expert, the likeliest first.

    Experts that were never seen share the chance that Good and Turing give to all of them together: the share of uses
    that were an expert's only one; at most what equal chances would give them, so that few tokens prove little.
    """
    uses, total = usage.uses.ravel(), usage.uses.sum()
    unseen = uses == 0
    mass = min(float(np.sum((uses > 0) & (uses < 1.5)) / total), float(unseen.mean()))
    chances = np.where(unseen, mass / max(unseen.sum(), 1), uses / total * (1 - mass))
    return np.sort(chances * total / usage.tokens)[::-1]


def prompt_misses(usage: Usage | None, num_slots: int, num_experts: int, demand: int, tokens: int) -> float:
    """Experts that a block of `tokens` tokens uses and slots do not hold: each is read once."""
    chances = np.full(num_experts, demand / num_experts) if usage is None else _chances(usage)
    return float(np.sum(1 - (1 - np.minimum(chances, 1.0)[num_slots:]) ** tokens))


def expected_hits(usage: Usage | None, num_slots: int, num_experts: int, demand: int) -> tuple[float, str]:
    """Share of a token's experts that slots hold, and where the figure is from."""
    if num_slots >= num_experts:
        return 1.0, "all experts are in memory"
    if num_slots < demand:
        return 0.0, "assumed: a cache below the demand of one token never hits"
    if usage is not None:
        chances = _chances(usage)
        share = float(chances[:num_slots].sum() / chances.sum())
        return share, f"usage history of {usage.tokens:.0f} tokens, if the text is like those: the most used stay"
    return (
        num_slots / num_experts,
        "assumed: every expert is as likely as the others (no usage history beside the model)",
    )


def _streamed(seconds: float, expert_share: float, misses: float, waiting: float, calls: float, calls_s,
              disk_s: float, recode_s: float) -> tuple[float, str]:  # fmt: skip
    """(seconds, what takes most of them: "disk", "re-coding" or "kernels") of a forward pass when `misses` experts have
    to be read in `waiting` of its `calls` layer calls.

    A layer's reads run beside the products of the experts that are there or have arrived, so the longer of the two
    counts; re-coding and what an arrival costs take processor time, and the last arrival of a call comes after its
    reads in any case.
    """
    cached_s, arrival_s = calls_s
    computing = seconds * expert_share + misses * (recode_s + arrival_s)
    reading = misses * disk_s + waiting * arrival_s
    rest = seconds * (1 - expert_share) + calls * cached_s
    if reading > computing:
        parts = {"disk": reading, "kernels": rest}
    else:
        parts = {"re-coding": misses * recode_s, "kernels": rest + computing - misses * recode_s}
    return rest + max(computing, reading), max(parts, key=parts.get)


def predict(speed, *, loop_s: float, layers: int, expert_share: float, demand: int, miss_share: float,
            expert_bytes: float, disk_mb_s: float | None, recode_gb_s: float | None,
            prompt: int, block: int = PREFILL_BLOCK, prompt_misses: float = 0.0,
            calls_s: tuple[float, float] = (0.0, 0.0)) -> dict:  # fmt: skip
    """Tokens per second of decode and prefill.

    speed: a machine_speed.ModelSpeed. expert_share: part of a step's time that experts take. demand: experts of a
    token; miss_share: part of them that must be read; prompt_misses: experts that each block of a prompt reads;
    layers: with experts. calls_s: what a layer call from a cache takes longer, and what each expert that was missing
    costs when it arrives.
    """
    step, prefill, top, blocks = speed.step_s, speed.prefill_s, demand / layers, -(-prompt // block)
    misses = demand * miss_share
    read = recode = 0.0
    bound = "kernels"
    if misses:
        rates = {
            "disk_s": expert_bytes / (disk_mb_s * 1e6),
            "recode_s": expert_bytes / (recode_gb_s * 1e9) if recode_gb_s else 0.0,
        }
        read, recode = misses * rates["disk_s"], misses * rates["recode_s"]
        waiting = layers * (1 - (1 - miss_share) ** top)
        step, bound = _streamed(step, expert_share, misses, waiting, layers, calls_s, **rates)
        calls = layers * blocks
        prefill, _ = _streamed(prefill, expert_share, blocks * prompt_misses, calls, calls, calls_s, **rates)
    step += loop_s
    return {
        "decode_tok_s": 1 / step,
        "prefill_tok_s": prompt / prefill,
        "step_ms": step * 1e3,
        "loop_ms": loop_s * 1e3,
        "read_ms": read * 1e3,
        "recode_ms": recode * 1e3,
        "missed_bytes_per_token": misses * expert_bytes,
        "bound": bound,
    }


def describe_bytes(files, context) -> dict:
    """Bytes by role in the file and in memory, and what a decode step reads."""
    roles = roles_of(files, context)
    per_token = bytes_per_token(roles, files.model_config, files.tied_head)
    return {
        "roles": {
            name: {"nbytes": g.nbytes, "memory_bytes": g.memory_bytes, "formats": g.formats}
            for name, g in roles.items()
        },
        "bytes_per_token": per_token,
    }


def make_report(files, context, options, *, prompt: int, window: int, disk_mb_s: float | None, measure) -> dict:
    """Everything `millstream plan` prints. measure: engine.machine_speed, or something with its functions."""
    counted = describe_bytes(files, context)
    files = files.without_mtp()
    choice = plan_memory(files, context, options)
    if prompt + 1 > choice.positions:
        raise ConfigError(f"--prompt {prompt}: the context holds {choice.positions} positions; raise --ctx")
    assumptions = [f"decoding is measured behind {prompt} positions; further ones cost attention time on top"]
    if files.mtp_names:
        assumptions.append("the layer for multi-token prediction (mtp) is not loaded; --draft mtp adds its bytes")
    if files.kind == "plan":
        assumptions.append("the model is not here: matrices as storage rows of one format, routers and norms float32")
        assumptions += files.assumptions
    config, layers = files.model_config, memory.count_moe_layers(files)
    demand = layers * config.num_experts_per_tok
    num_experts, places, plan = layers * config.num_experts, choice.places, choice.plan
    slots = plan.num_slots if plan else num_experts
    usage = recorded_usage(files) if layers else None
    hit_rate, hit_source = expected_hits(usage, slots, num_experts, demand) if layers else (1.0, "no routed experts")
    nbytes = sum(group["nbytes"] for role, group in counted["roles"].items() if role in memory.EXPERT_ROLES)
    expert_bytes = nbytes / num_experts if num_experts else 0.0
    disk, recode, calls_s = None, None, (0.0, 0.0)
    recoded = [r for r in files.tensors.values() if r.role in memory.EXPERT_ROLES and r.layout is None]
    if recoded and not choice.layout.compact and choice.layout.name != "stored":
        recode = measure.recode_gb_s(context, recoded[0])
    _refuse_idle(choice.streams, {"--disk": disk_mb_s, "--readers": options.readers})
    if choice.streams:
        if options.readers is None:
            assumptions.append(f"{DEFAULT_READERS} readers")
        misses = demand * (1 - hit_rate) / layers
        disk = disk_figures(files, places, options, disk_mb_s, misses, measure, assumptions)
        calls_s = measure.stream_call_seconds(options)
    if recode and not choice.streams:
        assumptions.append(
            f"using an expert again re-codes it once ({nbytes / recode / 1e9:.1f} s for all); speeds are without"
        )
    speed = measure.model_speed(
        files, context, choice.layout.compact, prompt=prompt, max_tokens=min(PREFILL_BLOCK, choice.positions),
        kv=options.kv, window=window, pool_bytes=_pool_bytes(), mapped=plan is None,
    )  # fmt: skip
    total = sum(group["memory_bytes"] for group in counted["roles"].values())
    distinct = speed.own_bytes / total
    shared = "" if distinct > 0.9 else f", parts share memory ({distinct:.2g} of the bytes are distinct)"
    if speed.layers_run < config.num_hidden_layers:
        assumptions.append(
            f"{speed.layers_run} of {config.num_hidden_layers} layers were run, at least one of each kind; others of a "
            "kind are taken to be as fast"
        )
    assumptions.append(
        f"speeds are those of the model's shapes and formats on random weights{shared}, with experts drawn at random, "
        "on this machine as busy as it is now"
    )
    per_token = counted["bytes_per_token"]
    figures = predict(
        speed, loop_s=measure.loop_seconds(options), layers=max(layers, 1),
        expert_share=per_token["active_experts"] / max(per_token["total"], 1), demand=demand,
        miss_share=1 - hit_rate if choice.streams else 0.0, expert_bytes=expert_bytes,
        disk_mb_s=disk["mb_s"] if disk else None, recode_gb_s=recode,
        prompt=prompt, calls_s=calls_s,
        prompt_misses=prompt_misses(usage, slots, num_experts, demand, min(prompt, PREFILL_BLOCK)) if layers else 0.0,
    )  # fmt: skip
    spec = None
    if window > 1:
        window_ms = speed.step_s * speed.window_ratio * 1e3
        spec = {"rows": window, "window_ms": window_ms, "pays_from_tokens_per_round": speed.window_ratio}
        assumptions.append(
            "how many drafts are accepted depends on the text; what a window costs beside a step is without reading of "
            "experts and without the loop around the model"
        )
    spent = plan and {"roles": plan.roles, "slot_bytes": plan.slot_bytes, "planned_bytes": plan.planned_bytes}
    warning, top = None, config.num_experts_per_tok
    if layers:
        warning = memory.cliff_warning(slots, layers, top, int(expert_bytes), options.expert_slots is not None)
    return {
        "path": str(files.path),
        "architecture": files.architecture,
        **counted,
        "budget_bytes": choice.budget.total_bytes,
        "budget_source": choice.budget.source,
        "budget_note": choice.budget.note,
        "dense_bytes": choice.dense_bytes,
        "kv_bytes": choice.kv_bytes,
        "kv": options.kv,
        "positions": choice.positions,
        "expert_layout": {"name": choice.layout.name, "reason": choice.layout.reason, "bytes": choice.layout.num_bytes},
        "plan": spent,
        "slots": slots,
        "experts": num_experts,
        "demand": {"experts": demand, "layers": layers, "top": top, "expert_bytes": expert_bytes,
                   "bytes": demand * expert_bytes},
        "streams": choice.streams,
        "hit_rate": hit_rate,
        "hit_rate_source": hit_source,
        "warning": warning,
        "threads": context.num_threads,
        "tier": context.tier,
        "memory_gb_s": measure.memory_bandwidth(context),
        "disk": disk,
        "recode_gb_s": recode,
        "stream_call_s": {"cached": calls_s[0], "arrival": calls_s[1]},
        "prompt_tokens": prompt,
        "prediction": figures,
        "spec": spec,
        "assumptions": assumptions,
        "verdict": _verdict(choice.streams, figures, prompt),
    }  # fmt: skip


def _pool_bytes() -> int:
    """Memory for random weights: so much more than the last cache that steps find little of each other in it, at most
    a quarter of what is free."""
    wanted = max(1 << 30, 2 * last_cache_bytes())
    return min(wanted, memory.make_budget(None).total_bytes // 4)


def _refuse_idle(streams: bool, reading: dict) -> None:
    """Raise ConfigError for an option of reading where nothing is read."""
    for option, value in reading.items():
        if not streams and value is not None:
            raise ConfigError(f"{option}: nothing is streamed, so it does nothing; leave it out")


def _verdict(streams: bool, figures: dict, prompt: int) -> str:
    how = "will stream at" if streams else "fits in memory:"
    decode, prefill = (
        f"{x:.0f}" if x >= 100 else f"{x:.3g}" for x in (figures["decode_tok_s"], figures["prefill_tok_s"])
    )
    speeds = f"{decode} tok/s decode, {prefill} tok/s prefill of {prompt} tokens"
    return f"{how} about {speeds}"
