"""The profile as one self-contained page: inline SVG, no scripts, nothing loaded from elsewhere."""

import itertools
import math
from html import escape

from .report import STAGE_PHASES

COLOURS = {
    "embed": "#8c8c8c", "attention": "#4c78a8", "router": "#9ecae9", "expert_gate_up": "#f58518", "quantize": "#ffbf79",
    "expert_down": "#e45756", "read_wait": "#b279a2", "head": "#54a24b", "sample": "#88d27a", "draft": "#72b7b2",
    "verify": "#b6e3e0", "python": "#d8b5a5", "load": "#9d755d", "tokenize": "#d6c9bf", "other": "#e6e6e6",
}  # fmt: skip
LIGHT = ("router", "quantize", "sample", "verify", "python", "draft", "tokenize", "other")  # dark text on these
# Per token over time there are fewer parts: name, colour, and whose native time it is.
STACK = (("attention", COLOURS["attention"], "attention"), ("experts", COLOURS["expert_gate_up"], "mlp"),
         ("read_wait", COLOURS["read_wait"], None), ("head", COLOURS["head"], "head"),
         ("Python and the rest", COLOURS["python"], None))  # fmt: skip
WIDTH, BAR_HEIGHT, PLOT_HEIGHT, CELL, MAX_COLUMNS = 900, 34, 160, 26, 300
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } svg { display: block; max-width: 100%; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } .verdict { background: #fff4e0; padding: .6rem .8rem; }
.key span { display: inline-block; margin-right: 1rem; } .key i { display: inline-block; width: .8em; height: .8em;
margin-right: .3em; } .note { color: #666; } text { font: 11px system-ui, sans-serif; fill: #333; }
text.light { fill: #fff; }
"""


def _svg(height: float, body: list[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(label)}">{"".join(body)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.01):.2f}" height="{height:.2f}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _stacked(phases: dict, wall_s: float, per: int, label: str) -> str:
    """One bar: the phases of an average token (or of the whole prefill), side by side."""
    x, body = 0.0, []
    for name in STAGE_PHASES:
        width = WIDTH * phases.get(name, 0.0) / wall_s if wall_s else 0.0
        ms = phases.get(name, 0.0) * 1e3 / max(per, 1)
        body.append(_rect(x, 0, width, BAR_HEIGHT, COLOURS[name], f"{name}: {ms:.3f} ms, {width / WIDTH:.1%}"))
        if width > 34:
            text = f"{name} {width / WIDTH:.0%}" if width > 7 * len(name) + 35 else f"{width / WIDTH:.0%}"
            shade = "" if name in LIGHT else ' class="light"'
            body.append(f'<text x="{x + 4:.1f}" y="{BAR_HEIGHT / 2 + 4}"{shade}>{text}</text>')
        x += width
    return _svg(BAR_HEIGHT, body, label)


def _line(points: list[tuple[float, float]], colour: str, title: str) -> list[str]:
    """A line over the whole width; y from 0 to its largest value, which is written at the left."""
    if not points:
        return []
    top, last = max(y for _, y in points) or 1.0, points[-1][0] or 1.0
    path = " ".join(f"{WIDTH * x / last:.1f},{PLOT_HEIGHT - (PLOT_HEIGHT - 16) * y / top:.1f}" for x, y in points)
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"><title>{escape(title)}</title>'
        "</polyline>",
        f'<text x="2" y="11">{top:.4g} {escape(title)}</text>',
    ]


def _framed(body: list[str], title: str, last: str) -> str:
    """A plot with its frame and what stands at both ends of its x axis."""
    frame = f'<rect width="{WIDTH}" height="{PLOT_HEIGHT}" fill="#fafafa" stroke="#ddd"/>'
    ends = f'<text x="2" y="{PLOT_HEIGHT + 13}">0</text>'
    ends += f'<text x="{WIDTH}" y="{PLOT_HEIGHT + 13}" text-anchor="end">{escape(last)}</text>'
    return _svg(PLOT_HEIGHT + 18, [frame, *body, ends], title)


def _plot(points, colour: str, title: str) -> str:
    return _framed(_line(points, colour, title), title, f"{points[-1][0]} tokens")


def _wait_ns(before: dict | None, after: dict | None) -> float:
    return after["wait_ns"] - before["wait_ns"] if before and after else 0.0


def _columns(rounds: list[dict], before: dict) -> list[tuple[int, list[float]]]:
    """(tokens, ms per token by part of STACK) of each round, or of several together where there are too many. before:
    the streamer's counters when the first began."""
    group, columns = -(-len(rounds) // MAX_COLUMNS), []
    for i in range(0, len(rounds), group):
        some = rounds[i : i + group]
        tokens = sum(r["tokens"] for r in some)
        native = {part: sum(r["native"].get(part, 0) for r in some) for part in ("attention", "mlp", "head")}
        wait = min(_wait_ns(rounds[i - 1]["stream"] if i else before, some[-1]["stream"]), native["mlp"])
        total = sum(r["end"] - r["start"] for r in some)
        rest = max(total - sum(native.values()), 0)
        ns = (native["attention"], native["mlp"] - wait, wait, native["head"], rest)
        columns.append((tokens, [part / 1e6 / tokens for part in ns]))
    return columns


def _stack_over_tokens(rounds: list[dict], before: dict) -> list[str]:
    """One column per round, as wide as it made tokens, stacked by part; the few highest are cut off."""
    if not rounds:
        return []
    columns = _columns(rounds, before)
    heights = sorted(sum(parts) for _, parts in columns)
    top = min(heights[-1], 1.5 * heights[int(0.95 * (len(heights) - 1))]) or 1.0
    scale, step = (PLOT_HEIGHT - 18) / top, WIDTH / sum(tokens for tokens, _ in columns)
    x, done, body = 0.0, 0, []
    for tokens, parts in columns:
        y, done = float(PLOT_HEIGHT), done + tokens
        for (name, colour, _), ms in zip(STACK, parts, strict=True):
            height = min(ms * scale, y - 18)
            if height > 0.05:
                y -= height
                title = f"token {done}: {name} {ms:.3f} ms of {sum(parts):.3f} ms"
                body.append(_rect(x, y, max(step * tokens - 0.3, 0.5), height, colour, title))
        x += step * tokens
    cut = f"; the highest, {heights[-1]:.3g} ms, is cut off" if heights[-1] > top else ""
    body.append(f'<text x="4" y="12">top: {top:.3g} ms per token{cut}</text>')
    key = "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for name, colour, _ in STACK)
    return [f'<p class="key">{key}</p>', _framed(body, "time per token, stacked", f"{done} tokens")]


def _over_tokens(rounds: list[dict], before: dict) -> list[str]:
    parts = ["<h2>Time per token</h2>", *_stack_over_tokens(rounds, before)]
    if not before:
        return parts
    hits, megabytes, done = [], [], 0
    for r, (a, b) in zip(rounds, itertools.pairwise([before, *(r["stream"] for r in rounds)]), strict=True):
        asked = b["hits"] + b["misses"] - a["hits"] - a["misses"]
        hit, read = (
            (b["hits"] - a["hits"]) / asked * 100 if asked else 0.0,
            (b["bytes"] - a["bytes"]) / 1e6 / r["tokens"],
        )
        for x in (done, done + r["tokens"]):  # as wide as the round made tokens
            hits.append((x, hit))
            megabytes.append((x, read))
        done += r["tokens"]
    parts += ["<h2>Experts from disk</h2>", _plot(hits, COLOURS["head"], "% of experts found in memory")]
    return [*parts, _plot(megabytes, COLOURS["read_wait"], "MB read per token")]


def _heat_map(experts: dict[int, list[int]]) -> list[str]:
    if not any(map(any, experts.values())):
        return []
    parts = ["<h2>Experts used</h2>", '<p class="note">A row is a layer, a column an expert; darker is more often.</p>']
    columns = max(len(row) for row in experts.values())
    cell = min(CELL, (WIDTH - 60) / columns)
    top = max((max(row) for row in experts.values()), default=1) or 1
    every = max(1, math.ceil(13 / cell))  # labels that would touch are left out
    bottom = 8 + len(experts) * cell  # the first label may be taller than its row
    body = [f'<text x="{60 + e * cell:.1f}" y="{bottom + 13:.1f}">{e}</text>' for e in range(0, columns, 2 * every)]
    parts.append(f'<p class="key"><span><i style="background:hsl(24 85% 96%)"></i>0 uses</span>'
                 f'<span><i style="background:hsl(24 85% 36%)"></i>{top} uses</span></p>')  # fmt: skip
    for y, (layer, row) in enumerate(sorted(experts.items())):
        if y % every == 0:
            body.append(f'<text x="0" y="{8 + y * cell + cell / 2 + 4:.1f}">layer {layer}</text>')
        for e, count in enumerate(row):
            shade = f"hsl(24 85% {96 - 60 * count / top:.0f}%)"
            body.append(
                _rect(60 + e * cell, 8 + y * cell, cell - 0.5, cell - 0.5, shade, f"layer {layer} expert {e}: {count}")
            )
    parts.append(_svg(bottom + 18, body, "uses of experts by layer"))
    return parts


def _acceptance(spec: dict | None) -> list[str]:
    if not spec or not spec["rounds"]:
        return []
    parts, body, step = ["<h2>Drafts accepted by position</h2>"], [], WIDTH / 8
    for i, chance in enumerate(spec["acceptance_by_position"]):
        height = (PLOT_HEIGHT - 30) * (chance or 0.0)
        if chance is None:  # never drafted
            continue
        label = f"{chance:.0%}"
        body.append(
            _rect(i * step, PLOT_HEIGHT - 15 - height, step - 8, height, COLOURS["draft"], f"draft {i + 1}: {label}")
        )
        body.append(f'<text x="{i * step:.0f}" y="{PLOT_HEIGHT - 3}">draft {i + 1}: {label}</text>')
    parts += [_svg(PLOT_HEIGHT, body, "share of drafts accepted by position")] if body else []
    parts.append(
        f"<p>{spec['rounds']} rounds, {spec['tokens_per_round']:.2f} tokens a round, "
        f"{spec['accepted']} of {spec['drafted']} drafts accepted.</p>"
    )
    return parts


def _kernels(rows: list[dict], when: str) -> list[str]:
    if not rows:
        return []
    cells = "".join(
        f"<tr><td>{escape(r['role'])}</td><td>{escape(r['format'])}</td><td>{r['seconds']:.3f}</td>"
        f"<td>{r['bytes'] / 1e9:.2f}</td><td>{r['gb_s']:.2f}</td></tr>"
        for r in rows
    )
    head = "<tr><th>product</th><th>format</th><th>seconds</th><th>GB</th><th>GB/s</th></tr>"
    return [f"<h2>Weights read {when}</h2>", f"<table>{head}{cells}</table>"]


def page(report: dict, profiler) -> str:
    """HTML of a profile (what profile_report returned) and the profiler that took it."""
    return document([section(report, profiler)])


def document(sections: list[str]) -> str:
    """Sections one below the other, as a page."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>millstream profile</title>'
        f"<style>{STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def section(report: dict, profiler, title: str = "millstream profile") -> str:
    """The part of a page that shows one run."""
    decode, prefill = report["decode"], report["prefill"]
    shown = [name for name in COLOURS if decode["phases"][name] or prefill["phases"][name]]
    key = "".join(f'<span><i style="background:{COLOURS[name]}"></i>{name}</span>' for name in shown)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(report['model'])}, tier {report['isa']}; {prefill['tokens']} tokens of prompt in "
        f"{prefill['wall_s']:.3f} s, {decode['tokens']} tokens in {decode['wall_s']:.3f} s.</p>",
    ]
    average = [
        f"<h2>An average token: {decode['wall_s'] * 1e3 / max(decode['tokens'], 1):.4g} ms</h2>",
        _stacked(decode["phases"], decode["wall_s"], decode["tokens"], "time of an average token by phase"),
    ]
    prompt = [
        f"<h2>Prefill: {prefill['wall_s'] * 1e3:.4g} ms</h2>",
        _stacked(prefill["phases"], prefill["wall_s"], 0, "time of the prefill by phase"),
    ]
    key = f'<p class="key">{key}</p>'
    body.append(f'<p class="verdict">{escape(report["verdict"])}</p>')
    if profiler.rounds:
        body += [key, *average, *prompt]
        body += [
            *_over_tokens(profiler.rounds, profiler.stream_at_decode),
            *_kernels(decode["kernels"], "while decoding"),
        ]
    else:
        body += [key, *prompt, *_kernels(prefill["kernels"], "in the prefill")]
    body += [*_heat_map(profiler.experts), *_acceptance(report["spec"])]
    return "".join(body)
