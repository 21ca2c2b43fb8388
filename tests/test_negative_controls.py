"""What must go wrong does: a decoder with a planted mistake, a table that lost an entry, a tier without code.

Each case compiles a broken copy of a source of the package, and asks the same question that the real one answers."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine._native import ffi
from kernel_oracle import LAYOUTS, activation, dequantize, matmul, pointer, random_storage, seeded

from engine import kernels
from engine.formats import FORMATS

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def compile_shared(folder, *sources, defines=()):
    out = folder / "broken.so"
    command = ["cc", "-O1", "-std=gnu11", "-shared", "-fPIC", f"-I{ROOT / 'native'}", f"-I{folder}", *defines]
    done = subprocess.run([*command, "-o", str(out), *map(str, sources)], capture_output=True, text=True, check=False)
    return out, done


SCALAR = ("-DMOE_TIER=scalar", "-DMOE_TIER_ID=0")


def iq4_xs_error(folder, old, new):
    """Relative error of the product with strips from a codec that has `old` replaced by `new`."""
    text = (ROOT / "native/formats/iq4_xs.c").read_text()
    assert text.count(old) == 1
    (folder / "iq4_xs.c").write_text(text.replace(old, new))
    library, done = compile_shared(folder, folder / "iq4_xs.c", defines=(*SCALAR, f"-I{ROOT / 'native/formats'}"))
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    codec = ffi.cast("struct moe_format *", ctypes.addressof(ctypes.c_char.in_dll(loaded, "moe_format_iq4_xs_scalar")))
    cols = 1024
    storage = random_storage("iq4_xs", 8, cols, seeded("negative"), limit=1e4)
    layout = LAYOUTS["nib8_iq4_xs", "scalar"]
    strip = kernels.aligned_empty(layout.strip_bytes(cols))
    codec.encode_strip(pointer(strip), pointer(storage), storage.shape[1], 8, cols)
    token, values = activation(seeded("token").standard_normal(cols), layout.activation)
    want = FORMATS["iq4_xs"].dequantize(storage, cols).astype(np.float64) @ values
    got = matmul(layout, strip, 8, cols, [token]).view(np.float32)[0].astype(np.float64)
    equal = np.array_equal(dequantize("nib8_iq4_xs", strip, 8, cols), FORMATS["iq4_xs"].dequantize(storage, cols))
    return np.abs(got - want).sum() / np.abs(want).sum(), equal


def test_iq4_xs_without_the_32_fails_by_orders_of_magnitude(tmp_path):
    right, equal = iq4_xs_error(tmp_path, "<< 4) - 32)", "<< 4) - 32 )")  # the same, compiled the same way
    assert right <= 1e-6 and equal
    (tmp_path / "wrong").mkdir()
    wrong, equal = iq4_xs_error(tmp_path / "wrong", "<< 4) - 32)", "<< 4))")
    assert wrong > 1e5 * max(right, 1e-7) and wrong > 0.3 and not equal


# ---- tables ----
STUBS = """
#include "internal.h"
#include "moe.h"
#include "kernel_tables.h"
#define LAYOUT(n, t) const struct moe_layout moe_layout_##n##_##t = {.name = #n, .tier = #t};
#define FORMAT(n, t) const struct moe_format moe_format_##n##_##t = {.name = #n, .tier = #t};
#define OPS(t) const struct moe_vector_ops moe_ops_vector_##t = {.tier = #t}; \\
    const struct moe_attention_ops moe_ops_attention_##t = {.tier = #t};
MOE_LAYOUTS(LAYOUT)
MOE_FORMATS(FORMAT)
MOE_ALL_TIERS(OPS)
struct moe_pool *moe_pool_create(int n) { static int pool; (void)n; return (void *)&pool; }
void moe_pool_destroy(struct moe_pool *p) { (void)p; }
void moe_free_call_log(struct moe_call_log *log) { (void)log; }
"""


def dispatch(folder, removed=None):
    """dispatch.c with tables that have no functions; one entry removed. The tables' names are the package's own."""
    header = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path.insert(0, 'native'); import build; print(build.kernel_tables())"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (folder / "kernel_tables.h").write_text(header)
    own = header
    if removed:
        name, tier = removed
        assert own.count(f"X({name}, {tier})") >= 1
        own = own.replace(f"X({name}, {tier})", "")
    (folder / "stub").mkdir()
    (folder / "stub" / "kernel_tables.h").write_text(own)
    (folder / "stub" / "stubs.c").write_text(STUBS)
    objects = []
    for source, include in ((ROOT / "native/dispatch.c", folder), (folder / "stub" / "stubs.c", folder / "stub")):
        out = folder / f"{source.stem}.o"
        command = [
            "cc",
            "-std=gnu11",
            "-fPIC",
            "-c",
            f"-I{include}",
            f"-I{ROOT / 'native'}",
            "-o",
            str(out),
            str(source),
        ]
        subprocess.run(command, check=True)
        objects.append(out)
    return compile_shared(folder, *objects)[0]


def test_a_table_that_lost_an_entry_does_not_load(tmp_path):
    """Every (name, tier) pair is a symbol that dispatch.c refers to: one that is not compiled is missed at load."""
    tier = kernels.tiers()[-1][0]
    library = dispatch(tmp_path, ("iq4_xs", tier))
    with pytest.raises(OSError, match=f"undefined symbol: moe_format_iq4_xs_{tier}"):
        ctypes.CDLL(str(library), mode=2)  # RTLD_NOW, as Python loads extensions


def test_an_empty_table_loads_and_is_never_used(tmp_path):
    """The complete set loads; tables without functions are refused when they are selected."""
    loaded = ctypes.CDLL(str(dispatch(tmp_path)), mode=2)
    loaded.moe_ctx_create.restype = ctypes.c_void_p
    error = ctypes.c_char_p()
    context = ctypes.c_void_p(loaded.moe_ctx_create(b"scalar", 1, ctypes.byref(error)))
    for select, name in (("moe_select_layout", b"nib8_iq4_xs"), ("moe_select_format", b"iq4_xs")):
        call = getattr(loaded, select)
        call.restype = ctypes.c_void_p
        assert call(context, name, ctypes.byref(error)) is None
        assert b"empty slot" in error.value
    loaded.moe_ctx_destroy(context)


@pytest.mark.parametrize("source", ["formats/iq4_xs.c", "layouts/rows.c"])
def test_a_tier_without_code_does_not_compile(tmp_path, source):
    _, done = compile_shared(tmp_path, ROOT / "native" / source, defines=("-DMOE_TIER=future", "-DMOE_TIER_ID=9"))
    assert done.returncode != 0
    assert "for this tier; write one or state" in done.stderr
