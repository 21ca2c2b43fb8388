#!/bin/sh
# run-emulated.sh [compiler flags]: the AVX-512 sources on SIMDe against the scalar tables. Proves the source's logic on
# a CPU without AVX-512; the machine code is bochs/run.sh's subject. -O1: two thirds of the compile time, same results.
set -eu
cd "$(dirname "$0")/../.."
echo "run-emulated: AVX-512 sources on SIMDe, bit for bit against scalar"
cc=${CC:-cc}
echo '#include <simde/x86/avx512.h>' | $cc -E -x c - > /dev/null 2>&1 ||
    { echo "run-emulated: skipped, package libsimde-dev is missing"; exit 77; }
grep -q avx2 /proc/cpuinfo || { echo "run-emulated: skipped, this CPU has no AVX2, which the emulation runs on"; exit 77; }
out=${OUT:-build/native/emulated}
mkdir -p "$(dirname "$out")"
# SIMDe's own headers and -O1 together raise false "maybe uninitialized"; the wheel's build keeps that warning
MOE_EMULATE_AVX512=1 TIERS="scalar avx2 avx512_emu" tests/native/build.sh "$out" -O1 -Wno-maybe-uninitialized "$@"
"$out" avx512_emu scalar
