"""Replays routing through expert caches: policies x capacities, with Belady's bound. Nothing of a model is run.

    python scripts/simulate_cache.py                                  # all shapes and workloads, a minute or two
    python scripts/simulate_cache.py --shapes olmoe --tokens 1000 --json out.json
    python scripts/simulate_cache.py --trace FILE                     # recorded by generate --route-trace
    python scripts/simulate_cache.py --half-lives 0.5,1,2,4,8         # what the decaying policies' constant does
    python scripts/simulate_cache.py --recall 0.5,0.8 --ahead-reads 1,4   # when reading ahead pays
    python scripts/simulate_cache.py --pin-shares 0,0.5   # slots given for good to the most used of the first half

Capacities are percent of all experts. Printed per cell: hit rate of decoding in percent; "of best" is a policy's hits
as a share of Belady's, averaged over the cells that hold a token's demand (layers * top-k), the others apart.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from cache_replay import Access, Belady, LookAhead, Replay, merge, schedule
from synthetic_routes import SHAPES, WORKLOADS, Shape, route

from engine.errors import ConfigError, EngineError
from engine.experts.policy import DEFAULT_POLICY, POLICIES, make_policy
from engine.experts.policy_decay import DecayedUse
from engine.experts.route_trace import RecordedTrace


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--trace", type=Path, action="append", default=[], help="recorded routing instead")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--half-lives", type=numbers, help="try these in place of each decaying policy's own")
    parser.add_argument("--capacities", type=numbers, default=[10.0, 25.0, 50.0, 75.0], help="percent of all experts")
    parser.add_argument("--tokens", type=int, default=150, help="tokens generated")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of the prompt, in one call")
    parser.add_argument("--recall", type=numbers, help="also replay with reads ahead, by a predictor of this recall")
    parser.add_argument("--ahead-reads", type=numbers, default=[2.0], help="experts the disk reads while a layer runs")
    parser.add_argument("--pin-shares", type=numbers, help="also replay the second half with pinned experts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def candidates(args) -> dict[str, type]:
    """Column name -> policy class; with --half-lives one column per value."""
    result = {}
    for name in args.policies.split(","):
        make_policy(name, 1, 1)  # refuses unknown names
        policy = POLICIES[name]
        if args.half_lives and issubclass(policy, DecayedUse):
            for value in args.half_lives:
                result[f"{name}/{value:g}"] = type(policy.__name__, (policy,), {"half_life": value})
        else:
            result[name] = policy
    return result


def sources(args) -> list[tuple]:
    """What is replayed: (trace path,) or (shape name, workload name) each."""
    if args.trace:
        return [(path,) for path in args.trace]
    names = [(shape, workload) for shape in args.shapes.split(",") for workload in args.workloads.split(",")]
    for shape, workload in names:
        if shape not in SHAPES or workload not in WORKLOADS:
            raise ConfigError(f"{shape}, {workload}: shapes are {', '.join(SHAPES)}; workloads {', '.join(WORKLOADS)}")
    return names


def accesses_of(source: tuple, args) -> tuple[str, Shape, list[Access]]:
    """(name, shape, access list) of a source."""
    if len(source) == 1:
        trace = RecordedTrace(source[0])
        h = trace.header
        shape = Shape(h.architecture, h.num_layers, h.num_experts, h.num_experts_per_tok)
        return source[0].name, shape, [merge(r.layer, h.num_experts, r.ids, r.weights) for r in trace]
    shape, workload = SHAPES[source[0]], WORKLOADS[source[1]]
    ids, weights = route(shape, workload, args.prompt + args.tokens, args.seed)
    return workload.name, shape, list(schedule(ids, weights, shape.num_experts, args.prompt))


def replay_all(accesses: list[Access], shape: Shape, percent: float, policies: dict[str, type]) -> dict:
    """One cell: the counts of every policy and of Belady at one capacity."""
    num_keys, top = shape.num_layers * shape.num_experts, shape.num_experts_per_tok
    capacity = max(top, round(num_keys * percent / 100))
    cell = {"percent": percent, "capacity": capacity, "below_demand": capacity < shape.num_layers * top, "policies": {}}
    for name, policy in {**policies, "belady": None}.items():
        chosen = Belady(accesses) if policy is None else policy(capacity, num_keys)
        counts = Replay(chosen, capacity).run(accesses)
        cell["policies"][name] = {
            "hit_rate": counts.hit_rate,
            "misses_per_token": counts.decode_misses * shape.num_layers * top / max(1, counts.decode_uses),
            "prefill_misses": counts.prefill_misses,
            "prefill_distinct": counts.prefill_uses,
        }
    return cell


def print_source(name: str, shape: Shape, cells: list[dict]) -> None:
    print(f"\n{shape.name} ({shape.num_layers} x {shape.num_experts}, top {shape.num_experts_per_tok}), {name}")
    print("  capacity     " + "".join(f"{policy:>10}" for policy in cells[0]["policies"]))
    for cell in cells:
        rates = "".join(f"{100 * p['hit_rate']:10.1f}" for p in cell["policies"].values())
        mark = "  below one token's demand" if cell["below_demand"] else ""
        print(f"  {cell['percent']:3.0f} % {cell['capacity']:6d} {rates}{mark}")


def summary(results: list[dict], names: list[str]) -> dict[str, dict]:
    """Hits as a share of Belady's: mean and worst, above and below the demand of one token; wins."""
    out = {}
    for name in names:
        shares: dict[bool, list[float]] = {False: [], True: []}
        for cell in (cell for result in results for cell in result["cells"]):
            best = cell["policies"]["belady"]["hit_rate"]
            if best > 0:
                shares[cell["below_demand"]].append(cell["policies"][name]["hit_rate"] / best)
        above, below = shares[False], shares[True]
        out[name] = {
            "of_best": sum(above) / len(above) if above else None,
            "worst": min(above) if above else None,
            "of_best_below_demand": sum(below) / len(below) if below else None,
        }
    return out


def print_summary(table: dict[str, dict]) -> None:
    def percent(value):
        return "       -" if value is None else f"{100 * value:8.1f}"

    print("\npolicy        of best   worst  of best, below one token's demand   (percent of Belady's hits)")
    for name, row in table.items():
        values = (percent(row[key]) for key in ("of_best", "worst", "of_best_below_demand"))
        mark = "   default" if name == DEFAULT_POLICY else ""
        print(f"{name:12} " + " ".join(values) + mark)


def read_ahead(accesses: list[Access], shape: Shape, percent: float, args) -> list[dict]:
    """Default policy with and without reads ahead. All reads are counted, whoever asked for them."""
    num_keys, rows = shape.num_layers * shape.num_experts, []
    capacity = max(shape.num_experts_per_tok, round(num_keys * percent / 100))
    plain = Replay(make_policy(DEFAULT_POLICY, capacity, num_keys), capacity).run(accesses)
    for recall in args.recall:
        for reads in map(int, args.ahead_reads):
            ahead = LookAhead(recall, reads, shape.num_experts, args.seed)
            counts = Replay(make_policy(DEFAULT_POLICY, capacity, num_keys), capacity, ahead=ahead).run(accesses)
            issued = counts.ahead_used + counts.ahead_wasted
            base = max(1, plain.decode_misses)
            rows.append(
                {
                    "percent": percent, "recall": recall, "reads_per_layer": reads,
                    "waited_for": counts.decode_misses / base, "read": (counts.decode_misses + issued) / base,
                    "used": counts.ahead_used, "wasted": counts.ahead_wasted,
                }
            )  # fmt: skip
    return rows


def print_ahead(rows: list[dict]) -> None:
    print("  read ahead: capacity  recall  reads/layer  waited for  read in all  wasted  (1 = misses without it)")
    for r in rows:
        wasted = r["wasted"] / max(1, r["used"] + r["wasted"])
        print(
            f"              {r['percent']:6.0f} %  {r['recall']:6.2f}  {r['reads_per_layer']:11d}  "
            f"{r['waited_for']:10.2f}  {r['read']:11.2f}  {100 * wasted:4.0f} %"
        )


def pinned(accesses: list[Access], shape: Shape, percent: float, args) -> dict:
    """Hit rate of the second half by share of the slots that hold the most used experts of the first half for good."""
    num_keys, half = shape.num_layers * shape.num_experts, len(accesses) // 2
    capacity = max(2 * shape.num_experts_per_tok, round(num_keys * percent / 100))
    uses = Counter(key for access in accesses[:half] for key in access.keys)
    ranked = [key for key, _ in uses.most_common()]
    rates = {}
    for share in args.pin_shares:
        keys = ranked[: min(int(capacity * share), capacity - shape.num_experts_per_tok)]
        policy = make_policy(DEFAULT_POLICY, capacity, num_keys)
        rates[f"{share:g}"] = Replay(policy, capacity, keys).run(accesses[half:]).hit_rate
    return {"percent": percent, "hit_rate": rates}


def print_pinned(rows: list[dict]) -> None:
    print("  pinned share of slots:  " + "  ".join(f"{share:>5}" for share in rows[0]["hit_rate"]))
    for row in rows:
        rates = "  ".join(f"{100 * rate:5.1f}" for rate in row["hit_rate"].values())
        print(f"                   {row['percent']:3.0f} %  {rates}")


def run_source(source: tuple, args) -> dict:
    """All cells of one source."""
    name, shape, accesses = accesses_of(source, args)
    cells = [replay_all(accesses, shape, percent, candidates(args)) for percent in args.capacities]
    result = {"source": name, "shape": vars(shape), "calls_x_layers": len(accesses), "cells": cells}
    if args.recall:
        result["read_ahead"] = [row for p in args.capacities for row in read_ahead(accesses, shape, p, args)]
    if args.pin_shares:
        result["pinned"] = [pinned(accesses, shape, percent, args) for percent in args.capacities]
    return result


def main() -> None:
    args = parse_arguments()
    names, found, results, started = list(candidates(args)), sources(args), [], time.perf_counter()
    with ProcessPoolExecutor(args.jobs) as pool:
        for result in pool.map(run_source, found, [args] * len(found)):
            results.append(result)
            print_source(result["source"], Shape(**result["shape"]), result["cells"])
            if args.recall:
                print_ahead(result["read_ahead"])
            if args.pin_shares:
                print_pinned(result["pinned"])
            seconds = time.perf_counter() - started
            left = seconds / len(results) * (len(found) - len(results))
            note = f"{len(results)} of {len(found)} replayed, {seconds:.0f} s, about {left:.0f} s left"
            print(note, file=sys.stderr, flush=True)
    table = summary(results, names)
    print_summary(table)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "trace")}
        args.json.write_text(json.dumps({"settings": settings, "results": results, "summary": table}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except EngineError as error:
        sys.exit(f"error: {error}")
