#!/bin/sh
# run-baseline.sh: a CPU without AVX (qemu's Nehalem). No AVX instruction may be in what such a CPU executes: the objects
# of the scalar tier and the common ones are searched for them, the parity program must run and skip the other tiers for
# their missing feature, and the Python extension, where it is built, must load, create a context on the scalar tier,
# compute and refuse a higher tier.
set -eu
cd "$(dirname "$0")/../.."
echo "run-baseline: parity program and Python extension on a CPU without AVX"
[ "$(uname -m)" = x86_64 ] || { echo "run-baseline: skipped, not x86_64"; exit 77; }
command -v qemu-x86_64 > /dev/null || { echo "run-baseline: skipped, package qemu-user is missing"; exit 77; }
out=${OUT:-build/native/baseline}
cpu=${CPU:-Nehalem}
mkdir -p "$(dirname "$out")"
COMMON_CFLAGS=-DPARITY_SMALL=1 tests/native/build.sh "$out" # the short walk: qemu computes floats in software

for object in $(grep -e '\.scalar\.o$' -e 'common\.' "$out.d/link.txt"); do
    if objdump -d --no-show-raw-insn "$object" | grep -m 3 -E '%[yz]mm|[[:space:]]v[a-z0-9]+[[:space:]].*%xmm'; then
        echo "run-baseline: AVX instructions in $object"
        exit 1
    fi
done

qemu-x86_64 -cpu "$cpu" "$out" > "$out.txt" || { grep FAILED "$out.txt"; exit 1; }
grep -e '^tier' -e '^hash' "$out.txt"
tail -n 1 "$out.txt"
grep -q '^tier avx2: skipped, this CPU lacks AVX2' "$out.txt" || { echo "run-baseline: avx2 was not refused"; exit 1; }
grep -q '^tier avx512: skipped' "$out.txt" || { echo "run-baseline: avx512 was not refused"; exit 1; }

python=$("${PYTHON:-python3}" -c 'import os, sys; print(sys.executable)') # not a launcher script
if ! "$python" -c 'import engine._native' 2> /dev/null; then
    echo "run-baseline: the Python extension is not built here; only the C program was checked"
    exit 0
fi
qemu-x86_64 -cpu "$cpu" "$python" - <<'EOF'
from engine import _native

ffi, lib = _native.ffi, _native.lib
error = ffi.new("char const **")
ctx = lib.moe_ctx_create(ffi.NULL, 2, error)
assert ctx, ffi.string(error[0])
tier = ffi.string(lib.moe_ctx_tier(ctx)).decode()
assert tier == "scalar", tier
for name in (b"avx2", b"avx512"):
    assert not lib.moe_ctx_create(name, 1, error), name
    print("python extension:", name.decode(), "refused:", ffi.string(error[0]).decode())
x, y = ffi.new("float[]", [3.0, -4.0, 0.5, 1.0]), ffi.new("float[4]")
assert lib.moe_softmax(ctx, y, x, 1, 4) == 0
assert abs(sum(y) - 1) < 1e-6
lib.moe_ctx_destroy(ctx)
print("python extension: loads, selects", tier, "and computes")
EOF
