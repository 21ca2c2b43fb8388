"""What bench_streaming.py prints: one line per result, and the tables and targets of a file of results, as Markdown."""

import json
from collections import defaultdict

MISSING = "-"


def setting(text: str) -> tuple[str, object]:
    """NAME=VALUE, the value as JSON where it is."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def is_done(record: dict) -> bool:
    return not {"not_run", "failed"} & set(record["result"])


def name_of(record: dict) -> str:
    share = "" if record["share"] is None else f" {record['share']:g} %"
    isa = f" {record['isa']}" if record["isa"] and record["arm"] in ("resident", "millstream") else ""
    return f"{record['router']} {record['arm']}{share}{isa}"


def progress_of(result: dict) -> str:
    """How far an arm came, and the cap if that ended it."""
    warm, asked = result["warm_up_tokens"], result["warm_up_asked"]
    text = f"{warm} warm-up tokens" if warm == asked else f"{warm} of {asked} warm-up tokens (time is up)"
    text += f", {result['tokens']} measured"
    return text if result["tokens"] == result["asked"] else f"{text} of {result['asked']} (cap {result['cap_s']:g} s)"


def line(record: dict) -> str:
    """One result for the terminal."""
    result, name = record["result"], name_of(record)
    if not is_done(record):
        return (
            f"{name:32} not run: {result['not_run']}"
            if "not_run" in result
            else f"{name:32} FAILED: {result['failed']}"
        )
    if "mb_s" in result:
        return f"{name:32} " + ", ".join(f"{k}: {v:.0f} MB/s" for k, v in result["mb_s"].items())
    text = (
        f"{name:32} {result['tok_s']:6.2f} tok/s  {ms(result):7.1f} ms/token, {result['cpu_ms']:.1f} ms of CPU  "
        f"{result['read_bytes_per_token'] / 1e6:.1f} MB/token"
    )
    c = result["counted"]
    if c and c["misses"]:
        device = result.get("device_mb_s")
        text += (
            f"  {rate(c):.0f} MB/s while reading"
            + (f" (device {device[0]:.0f}, {device[1]:.0f}, in bursts {result['burst_mb_s']:.0f})" if device else "")
            + f"  {hit_rate(c):.1f} % hits  wait {per_token(result, 'wait_s'):.1f} ms"
            f"  re-coding {per_token(result, 'recode_s'):.1f} ms/token on the readers"
        )  # fmt: skip
    return f"{text}  ({progress_of(result)})"


def ms(result: dict) -> float:
    return 1000 * result["seconds"] / result["tokens"]


def per_token(result: dict, name: str) -> float:
    """Milliseconds per token of a counter in seconds."""
    return 1000 * result["counted"].get(name, 0.0) / result["tokens"]


def rate(counted: dict) -> float:
    return counted["bytes"] / counted["busy_s"] / 1e6 if counted["busy_s"] else 0.0


def hit_rate(counted: dict) -> float:
    return 100 * counted["hits"] / max(1, counted["hits"] + counted["misses"])


def resident_ms(results: list[dict], streamed: dict) -> float | None:
    """Mean of the resident arms over the positions that `streamed` measured: those of its own call, if it had some."""
    first, last, found = streamed["warm_up_tokens"], streamed["warm_up_tokens"] + streamed["tokens"], []
    for result in [r for r in results if r["call"] == streamed["call"]] or results:
        at = result["warm_up_tokens"]
        if at <= first and at + result["tokens"] >= last:
            found += result["each_ms"][first - at : last - at]
    return sum(found) / len(found) if found else None


def figures(found: dict, residents: list[dict], expert_mean: float) -> dict:
    """Of one share. found: arm -> result. None where something is missing."""
    ours, as_found, small = (found.get(arm) for arm in ("millstream", "llama", "llama-128k"))
    names = ("tok_s", "ms", "resident", "wait", "rest", "rest_percent", "hits", "mb_token", "mb_s", "burst", "device",
             "of_burst", "of_device", "bytes_over_misses", "over_best", "over_found")  # fmt: skip
    row = dict.fromkeys(names)
    if ours is None:
        return row
    counted = ours["counted"]
    row["tok_s"], row["ms"], row["resident"] = ours["tok_s"], ms(ours), resident_ms(residents, ours)
    row["mb_token"] = ours["read_bytes_per_token"] / 1e6
    row["wait"] = per_token(ours, "wait_s")
    if row["resident"] is not None:
        row["rest"] = row["ms"] - row["resident"] - row["wait"]
        row["rest_percent"] = 100 * row["rest"] / row["ms"]
    if counted:
        row["hits"] = hit_rate(counted)
    if counted and counted["misses"]:
        row["mb_s"], row["device"] = rate(counted), sum(ours["device_mb_s"]) / 2
        row["of_device"] = row["mb_s"] / row["device"]
        row["burst"], row["of_burst"] = ours["burst_mb_s"], row["mb_s"] / ours["burst_mb_s"]
        row["bytes_over_misses"] = counted["bytes"] / counted["misses"] / expert_mean
    peers = [peer["tok_s"] for peer in (as_found, small) if peer]
    row["over_best"] = ours["tok_s"] / max(peers) if len(peers) == 2 else None
    row["over_found"] = ours["tok_s"] / as_found["tok_s"] if as_found else None
    return row


ROWS = (
    ("millstream, tok/s", "tok_s", "{:.2f}"),
    ("ms/token", "ms", "{:.1f}"),
    ("of it: resident, ms", "resident", "{:.1f}"),
    ("of it: read wait, ms", "wait", "{:.1f}"),
    ("of it: the rest, ms", "rest", "{:.1f}"),
    ("the rest, %", "rest_percent", "{:.1f}"),
    ("hit rate, %", "hits", "{:.1f}"),
    ("MB read per token", "mb_token", "{:.1f}"),
    ("bytes / bytes of the misses", "bytes_over_misses", "{:.3f}"),
    ("MB/s while reading", "mb_s", "{:.0f}"),
    ("device in bursts of a layer's misses, MB/s", "burst", "{:.0f}"),
    ("device in a steady stream, MB/s", "device", "{:.0f}"),
    ("of the device in bursts", "of_burst", "{:.2f}"),
    ("of the device in a steady stream", "of_device", "{:.2f}"),
    ("millstream / better llama.cpp", "over_best", "{:.2f}"),
    ("millstream / llama.cpp as found", "over_found", "{:.2f}"),
)


VERDICTS = {True: "reached", False: "missed", None: "has no target"}


def at_least(below_100: float, at_100: float | None):
    """A target of a share below 100 %, and of 100 % (None: none there, and so is the answer)."""

    def reached(value: float, share: float) -> bool | None:
        wanted = at_100 if share >= 100 else below_100
        return None if wanted is None else value >= wanted

    return reached


# Name, figure, whether a value reaches it at this share.
TARGETS = (
    ("the wait explains the difference to resident (rest within 5 %)", "rest_percent", lambda x, _: abs(x) <= 5),
    (">= 90 % of the device's bandwidth at the same request size and depth (bursts)", "of_burst", at_least(0.9, None)),
    ("bytes <= 1.05 x the misses'", "bytes_over_misses", lambda x, _: x <= 1.05),
    (">= 2 x the better llama.cpp, never slower at 100 %", "over_best", at_least(2, 1)),
    (">= 10 x llama.cpp as found", "over_found", at_least(10, 1)),
)


def peer_cell(result: dict | None) -> str:
    if result is None:
        return MISSING
    cut = "" if result["tokens"] == result["asked"] else f" in {result['cap_s']:g} s"
    read, warm = result["read_bytes_per_token"] / 1e6, result["warm_up_tokens"]
    return f"{result['tok_s']:.2f} ({read:.0f} MB; {result['tokens']}{cut} after {warm})"


def _table(head: str, shares: list[float], rows: list[tuple[str, list[str]]]) -> list[str]:
    lines = [f"| {head} | " + " | ".join(f"{share:g} %" for share in shares) + " |", "|" + " --- |" * (len(shares) + 1)]
    return lines + [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows]


def _router_lines(router: str, isa: str | None, records: list[dict]) -> list[str]:
    mine = [r for r in records if r["isa"] == isa or r["arm"].startswith("llama")]
    shares = sorted({r["share"] for r in mine if r["share"] is not None})
    residents = [r["result"] for r in mine if r["arm"] == "resident"]
    found = {share: {r["arm"]: r["result"] for r in mine if r["share"] == share} for share in shares}
    model = records[0]["model"]
    table = {share: figures(found[share], residents, model["expert_bytes"] / model["experts"]) for share in shares}
    tiers = sorted({r["result"]["isa"] for r in mine if r["arm"] in ("resident", "millstream")})
    rows = [(name, [MISSING if table[s][key] is None else form.format(table[s][key]) for s in shares])
            for name, key, form in ROWS]  # fmt: skip
    for arm, name in (("llama", "llama.cpp as found, tok/s"), ("llama-128k", "llama.cpp, 128 KiB read-ahead, tok/s")):
        rows.insert(-2, (name, [peer_cell(found[s].get(arm)) for s in shares]))
    lines = _table(f"{router} router, {', '.join(tiers) or MISSING}", shares, rows)
    speeds = [f"{1000 * r['tokens'] / sum(r['each_ms']):.2f}" for r in residents]
    if speeds:
        lines += ["", f"Resident, first and last of each call: {', '.join(speeds)} tok/s."]
    lines.append("")
    for name, key, reached in TARGETS:
        cells = []
        for share in shares:
            value = table[share][key]
            verdict = "not run" if value is None else VERDICTS[reached(value, share)]
            cells.append(f"{share:g} % {verdict}")
        lines.append(f"- {name}: {', '.join(cells)}")
    return [*lines, ""]


def markdown(records: list[dict]) -> str:
    """Tables, targets and provenance of a file of results; of each arm the last counts, of resident all."""
    if not records:
        return "no results"
    run, machine = records[0]["run"], records[0]["run"]["machine"]
    done = [r for r in records if is_done(r)]
    lines = [
        f"Revision {run['revision']}; {machine['cpu']}, {machine['cpus']} CPUs, {machine['memory_mib'] >> 10} GiB, "
        f"Linux {machine['kernel']}; {run['settings']['threads']} threads; "
        f"{records[0]['time']} - {records[-1]['time']}",
        "llama.cpp's cells: tok/s (MB read per token; tokens measured after tokens of warm-up).",
        "",
    ]
    by_router = defaultdict(list)
    for record in done:
        by_router[record["router"]].append(record)
    for router, found in by_router.items():
        kept = found[:]
        for arm, share, isa in {(r["arm"], r["share"], r["isa"]) for r in found}:
            same = [r for r in found if (r["arm"], r["share"], r["isa"]) == (arm, share, isa)]
            for old in same[:-1] if arm != "resident" else ():
                kept.remove(old)
        for isa in sorted({r["isa"] for r in kept if r["arm"] == "millstream"}, key=str):
            lines += _router_lines(router, isa, kept)
    lines += [f"- {line(r).strip()}" for r in records if r["arm"] == "device" or not is_done(r)]
    commands = dict.fromkeys(r["command"] for r in records)
    return "\n".join([*lines, "", *(f"    {command}" for command in commands)])
