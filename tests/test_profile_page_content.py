"""What the page of --profile-html draws from: made-up rounds in, numbers out. test_profile_page.py looks at it."""

import re
from types import SimpleNamespace

import pytest

from engine.profile import page
from engine.profile.report import STAGE_PHASES

WAITS = (0.002, 0.0, 0.004)  # seconds, of rounds of one, two and one tokens


def rounds():
    """Three rounds of 10 ms, and the streamer's counters before them."""
    before = {"hits": 100, "misses": 50, "bytes": 7_000_000, "wait_ns": 10**9}
    found, now = [], before
    for (tokens, hits, misses, nbytes), wait in zip(
        ((1, 3, 1, 2_000_000), (2, 4, 0, 0), (1, 1, 3, 6_000_000)), WAITS, strict=True
    ):
        now = {"hits": now["hits"] + hits, "misses": now["misses"] + misses, "bytes": now["bytes"] + nbytes,
               "wait_ns": now["wait_ns"] + int(wait * 1e9)}  # fmt: skip
        native = {"attention": 1_000_000, "mlp": 6_000_000, "head": 2_000_000}
        found.append({"start": 0, "end": 10_000_000, "tokens": tokens, "native": native, "stream": now})
    return found, before


def test_every_round_has_its_wait():
    """The first one too: counting begins where decoding does."""
    columns = page._columns(*rounds())
    assert [tokens for tokens, _ in columns] == [1, 2, 1]
    assert [parts[2] * tokens / 1e3 for tokens, parts in columns] == pytest.approx(WAITS)
    assert [sum(parts) * tokens for tokens, parts in columns] == pytest.approx([10.0] * 3)
    resident = [r | {"stream": None} for r in rounds()[0]]
    assert [parts[2] for _, parts in page._columns(resident, {})] == [0.0] * 3


def test_reads_are_drawn_over_tokens():
    html = "".join(page._over_tokens(*rounds()))
    lines = [[tuple(map(float, point.split(","))) for point in line.split()]
             for line in re.findall(r'<polyline points="([^"]*)"', html)]  # fmt: skip
    xs, base, height = [0, 225, 225, 675, 675, 900], page.PLOT_HEIGHT, page.PLOT_HEIGHT - 16
    for line, values, top in zip(lines, ((75, 100, 25), (2, 0, 6)), (100, 6), strict=True):
        assert [x for x, _ in line] == xs
        assert [(base - y) / height * top for _, y in line[::2]] == pytest.approx(values, abs=0.1)
        assert [y for _, y in line[::2]] == [y for _, y in line[1::2]]
    assert html.count("4 tokens") == 3 and "rounds" not in html
    assert "disk" not in "".join(page._over_tokens([r | {"stream": None} for r in rounds()[0]], {}))


def test_nothing_is_drawn_of_nothing():
    stage = {"wall_s": 0.0, "phases": {name: 0.0 for name in STAGE_PHASES}, "kernels": [], "tokens": 0}
    spec = {"rounds": 0, "acceptance_by_position": [None] * 7, "tokens_per_round": None, "accepted": 0, "drafted": 0}
    report = {"prefill": stage, "decode": stage, "model": "<m>", "isa": "avx2", "verdict": "none", "spec": spec}
    profiler = SimpleNamespace(rounds=[], experts={0: [0, 0], 1: [0, 0]}, stream_at_decode={})
    html = page.page(report, profiler)
    assert "&lt;m&gt;" in html
    for word in ("Weights read", "Experts used", "Drafts accepted", "disk"):
        assert word not in html
    assert "Experts used" in page.page(report, SimpleNamespace(rounds=[], experts={0: [0, 1]}, stream_at_decode={}))


def test_counting_begins_where_decoding_does():
    """In a real run: what prefill and rounds read and waited is all there was."""
    import engine
    from engine.profile import Profiler

    half = engine.load(threads=1, expert_slots=9, history=False)
    generation = half.generate("He said,", max_tokens=12, temperature=0, ignore_eos=True)
    with Profiler(half) as profiler:
        profiler.attach(generation)
        list(generation)
    first, last = profiler.stream_at_decode, profiler.rounds[-1]["stream"]
    assert first.keys() == last.keys() and first["misses"] == profiler.io["prefill"]["misses"] > 0
    for name in ("hits", "misses", "bytes"):
        assert last[name] - first[name] == profiler.io["decode"][name]
    waited = sum(parts[2] * tokens for tokens, parts in page._columns(profiler.rounds, first))
    assert waited == pytest.approx(1e3 * profiler.io["decode"]["wait_s"], rel=0.05, abs=0.1)
