#!/bin/sh
# build.sh OUT [compiler flags]: a C test program from exactly the sources, tiers and flags of the wheel, plus the flags
# given here. Runs from the top of the tree. Objects stay in OUT.d.
#   CC           compiler (default cc); MOE_MACHINE=aarch64 with a cross compiler
#   MAIN         the program's own C files (default: the parity program)
#   ENGINE=1     link all of native/*.c (threads and drivers) and not only dispatch.c
#   COMMON_CFLAGS, LDFLAGS, NO_LINK=1 (stop after the objects)
set -eu
out=$1
shift
here=tests/native
main=${MAIN:-$here/main.c $here/parity.c $here/parity_layouts.c $here/parity_ops.c}
common=native/dispatch.c
[ -z "${ENGINE:-}" ] || common=$(echo native/*.c)
rm -rf "$out.d"
mkdir -p "$out.d"
python='import sys; sys.path.insert(0, "native"); import build'
python3 -c "$python; print(build.kernel_tables(), end='')" > "$out.d/kernel_tables.h"
python3 native/build.py > "$out.d/objects.txt"
base="$(python3 -c "$python; print(*build.CFLAGS)") -I$here -I$out.d"
{
    while read -r tier src args; do
        folder=$(basename "$(dirname "$src")")
        echo "$args $* -c $src -o $out.d/$folder.$(basename "$src" .c).$tier.o"
    done < "$out.d/objects.txt"
    for src in $common; do echo "$base ${COMMON_CFLAGS:-} $* -c $src -o $out.d/common.$(basename "$src" .c).o"; done
    for src in $main; do echo "$base ${COMMON_CFLAGS:-} $* -c $src -o $out.d/test.$(basename "$src" .c).o"; done
} | xargs -P "${JOBS:-$(nproc)}" -L 1 "${CC:-cc}"
[ -n "${NO_LINK:-}" ] || ${CC:-cc} "$@" "$out.d"/*.o -o "$out" ${LDFLAGS:--pthread}
