"""The map of kernels and codecs per tier equals the reviewed file: a hole or a reused tier is text somebody read.

Regenerate with: python tests/test_kernel_matrix.py > tests/data/kernel_matrix.txt"""

import re
import sys
from pathlib import Path

import pytest

from engine import kernels

REVIEWED = Path(__file__).parent / "data" / "kernel_matrix.txt"
REVIEWED_TIERS = {"scalar", "avx2", "avx512"}


def matrix():
    lines = []
    for kind, tables in (("layout", kernels.layouts()), ("format", kernels.formats())):
        for t in tables:
            if t.tier in REVIEWED_TIERS:
                own = f"same-as {t.same_as}: {t.why}" if t.same_as else "own"
                tile = ", tile" if kind == "layout" and kernels.has_tile(t) else ""
                lines.append(f"{kind} {t.name} {t.tier} {own}{tile}")
    return lines


def test_kernel_matrix_equals_reviewed_file():
    if REVIEWED_TIERS - {name for name, _, _ in kernels.tiers()}:
        pytest.skip("the reviewed file is for x86-64")
    assert matrix() == REVIEWED.read_text().splitlines(), "regenerate tests/data/kernel_matrix.txt and review it"


@pytest.mark.parametrize("tables", [kernels.layouts(), kernels.formats()], ids=["layouts", "formats"])
def test_every_name_answers_on_every_tier(tables):
    names = {t.name for t in tables}
    assert {(t.name, t.tier) for t in tables} == {(name, tier) for name in names for tier, _, _ in kernels.tiers()}


def test_no_own_table_has_an_empty_slot():
    for t in kernels.layouts():
        if not t.same_as:
            assert t.cdata.matmul and t.cdata.strip_bytes and t.cdata.block_len and t.cdata.strip_rows, (t.name, t.tier)
            assert t.cdata.dequantize_row or t.tier != "scalar", t.name
    for t in kernels.formats():
        if not t.same_as:
            group = t.cdata.group_rows  # such a format has the functions for groups instead
            encode = t.cdata.encode_group if group else t.cdata.encode_strip
            check = t.cdata.check_group if group else t.cdata.check_row
            assert encode and t.cdata.layout and t.cdata.block_bytes, (t.name, t.tier)
            assert check or t.tier != "scalar", t.name


def test_own_codecs_of_vector_tiers_are_written_for_them():
    """Portable C that is compiled once more for a tier is no code of its own: its source has the tier's registers."""
    folder = Path(__file__).parent.parent / "native" / "formats"
    written = {}
    for source in folder.glob("*.c"):
        text = source.read_text()
        # what a codec shares with one other stands in their header; the helpers of all prove nothing
        shared = set(re.findall(r'#include "(\w+\.h)"', text)) - {"rows8.h", "grid.h", "grid_strip.h"}
        written |= dict.fromkeys(
            re.findall(r"EXPORT_FORMAT\((\w+)", text),
            text + "".join((folder / header).read_text() for header in shared if (folder / header).exists()),
        )
    for t in kernels.formats():
        if t.tier != "scalar" and not t.same_as:
            assert re.search(r"__m(256|512)i|dwords[48]\(", written[t.name.replace("-", "_")]), (t.name, t.tier)


def test_reused_tables_say_why_and_lead_to_code():
    for tables in (kernels.layouts(), kernels.formats()):
        by_key = {(t.name, t.tier): t for t in tables}
        for t in tables:
            if t.same_as:
                assert t.why and not by_key[t.name, t.same_as].same_as, (t.name, t.tier)


def test_layout_has_a_tile_or_a_reason():
    for t in kernels.layouts():
        if not t.same_as:
            assert kernels.has_tile(t) == (kernels.no_tile_reason(t) is None), (t.name, t.tier)
            assert kernels.has_tile(t) == (t.tier.startswith("avx512") and t.name.startswith(("nib8_", "byte8_"))), (
                t.name,
                t.tier,
            )


@pytest.mark.parametrize("tier", [name for name, supported, _ in kernels.tiers() if supported])
def test_forced_tier_selects_its_own_tables(tier):
    context = kernels.Context(tier=tier, num_threads=1)
    for tables, select in ((kernels.layouts(), context.layout), (kernels.formats(), context.format)):
        for t in tables:
            if t.tier == tier:
                assert kernels.text(select(t.name).tier) == (t.same_as or tier)


if __name__ == "__main__":
    sys.stdout.write("\n".join(matrix()) + "\n")
