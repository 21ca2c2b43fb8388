#!/bin/sh
# run-threads.sh [ROUNDS]: the engine's drivers and thread pool, several callers at once, and the expert streamer under the
# thread sanitizer; any data race fails. PLAIN=1 runs the same programs without the sanitizer.
set -eu
cd "$(dirname "$0")/../.."
echo "run-threads: drivers and thread pool, several contexts and callers${PLAIN:+, no sanitizer}"
out=${OUT:-build/native/threads${PLAIN:+-plain}}
mkdir -p "$(dirname "$out")"
sanitizer="-g -fsanitize=thread"
[ -z "${PLAIN:-}" ] || sanitizer=
echo 'int main(void) { return 0; }' | ${CC:-cc} $sanitizer -x c - -o "$out.probe" 2> /dev/null ||
    { echo "run-threads: skipped, the compiler's thread sanitizer runtime (libtsan) is missing"; exit 77; }
# The sanitizer needs the usual address layout; some kernels randomise more bits than it expects.
run=
if ! "$out.probe" 2> /dev/null; then
    run="setarch -R"
    $run "$out.probe" || { echo "run-threads: skipped, the thread sanitizer does not start on this kernel"; exit 77; }
fi
# shellcheck disable=SC2086
ENGINE=1 MAIN=tests/native/threads.c tests/native/build.sh "$out" -O1 $sanitizer -Wno-maybe-uninitialized
TSAN_OPTIONS=halt_on_error=1 $run "$out" "$@"
echo "run-threads: expert streamer, reads that sleep, fall short and fail"
# shellcheck disable=SC2086
ENGINE=1 MAIN=tests/native/stream_stress.c tests/native/build.sh "$out-stream" -O1 $sanitizer -Wno-maybe-uninitialized
TSAN_OPTIONS=halt_on_error=1 $run "$out-stream"
