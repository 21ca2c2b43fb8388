#!/bin/sh
# run-arm.sh: the portable sources cross-compiled for aarch64 (and any tier native/build.py has for it), run under qemu
# on a CPU with and one without the dot product; the hashes must be those of a native build of the scalar tier. The
# drivers (rotary tables, attention, experts, sampling) are compared in the same way.
set -eu
cd "$(dirname "$0")/../.."
echo "run-arm: aarch64 build under qemu, same output hashes as this machine"
missing=
command -v aarch64-linux-gnu-gcc > /dev/null || missing="$missing gcc-aarch64-linux-gnu"
[ -e /usr/aarch64-linux-gnu/lib/libc.a ] || missing="$missing libc6-dev-arm64-cross"
command -v qemu-aarch64 > /dev/null || missing="$missing qemu-user"
[ -z "$missing" ] || { echo "run-arm: skipped, packages are missing:$missing"; exit 77; }

out=${OUT:-build/native/arm}
mkdir -p "$(dirname "$out")"
TIERS=scalar tests/native/build.sh "$out-host"
MOE_MACHINE=aarch64 CC=aarch64-linux-gnu-gcc tests/native/build.sh "$out" -static
"$out-host" scalar > "$out-host.txt"
want=$(sed -n 's/^hash scalar //p' "$out-host.txt")
for cpu in max cortex-a72; do
    qemu-aarch64 -cpu $cpu "$out" > "$out-$cpu.txt" || { grep FAILED "$out-$cpu.txt"; exit 1; }
    got=$(sed -n 's/^hash [a-z0-9_]* //p' "$out-$cpu.txt" | sort -u)
    echo "aarch64 $cpu: $(tail -n 1 "$out-$cpu.txt"), hash $got"
    [ "$got" = "$want" ] || { echo "run-arm: this machine's scalar tier has hash $want"; exit 1; }
done

ENGINE=1 MAIN=tests/native/threads.c TIERS=scalar tests/native/build.sh "$out-host-drivers"
ENGINE=1 MAIN=tests/native/threads.c MOE_MACHINE=aarch64 CC=aarch64-linux-gnu-gcc tests/native/build.sh "$out-drivers" -static
"$out-host-drivers" 1 > "$out-host-drivers.txt"
qemu-aarch64 "$out-drivers" 1 > "$out-drivers.txt" || { grep FAILED "$out-drivers.txt"; exit 1; }
want=$(grep '^hash drivers' "$out-host-drivers.txt")
got=$(grep '^hash drivers' "$out-drivers.txt")
echo "aarch64 max: $(tail -n 1 "$out-drivers.txt"), $got"
[ "$got" = "$want" ] || { echo "run-arm: the drivers of this machine give: $want"; exit 1; }
