#!/bin/sh
# run-sanitize.sh: the parity program under the address and undefined-behaviour sanitizers. Every strip, storage row and
# activation is followed by a fence, so an over-read of one byte is seen. Then run-threads.sh, for the thread sanitizer.
set -eu
cd "$(dirname "$0")/../.."
echo "run-sanitize: parity program under address and undefined sanitizers"
out=${OUT:-build/native/sanitize}
mkdir -p "$(dirname "$out")"
echo 'int main(void) { return 0; }' | ${CC:-cc} -fsanitize=address,undefined -x c - -o "$out.probe" 2> /dev/null ||
    { echo "run-sanitize: skipped, the compiler's sanitizer runtime is missing (libasan, libubsan; for clang libclang-rt-dev)"; exit 77; }
# Without the scope check: the sixteen-lane helpers of the scalar tier would take minutes to compile. -O1 with sanitizers
# raises false "maybe uninitialized"; the wheel's build keeps that warning.
tests/native/build.sh "$out" -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-address-use-after-scope -fno-sanitize-recover=all -Wno-maybe-uninitialized
# Not detect_stack_use_after_return: its stack frames do not keep the 32-byte alignment that gcc 12 vectors rely on.
UBSAN_OPTIONS=print_stacktrace=1 "$out"
tests/native/run-threads.sh || [ $? -eq 77 ]
