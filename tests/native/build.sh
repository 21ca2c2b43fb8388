#!/bin/sh
# build.sh OUT [compiler flags]: a C test program from exactly the sources, tiers and flags of the wheel, plus the flags
# given here. Runs from the top of the tree. Objects are reused while source, headers and command are the same: those of
# the tiers, which take nearly all of the time, by every program with the same compiler and flags (build/native/tiers),
# the program's own in OUT.d. OUT.d/link.txt lists them.
#   CC           compiler (default cc); MOE_MACHINE=aarch64 with a cross compiler
#   MAIN         the program's own C files (default: the parity program)
#   ENGINE=1     link all of native/*.c (threads and drivers) and not only dispatch.c
#   TIERS        build only these (default: all of native/build.py)
#   COMMON_CFLAGS, LDFLAGS, NO_LINK=1 (stop after the objects), JOBS
set -eu
out=$1
shift
here=tests/native
main=${MAIN:-$here/main.c $here/parity.c $here/parity_layouts.c $here/parity_ops.c}
common=native/dispatch.c
[ -z "${ENGINE:-}" ] || common=$(echo native/*.c)
tiers=build/native/tiers/$(echo "${CC:-cc} $*" | cksum | cut -d ' ' -f 1)
mkdir -p "$out.d" "$tiers"
exec 9> "$tiers/lock" # two builds that share objects wait for each other
if command -v flock > /dev/null; then flock 9; fi

python='
import os, sys
sys.path.insert(0, "native")
import build
only = os.environ.get("TIERS", "").split()
for table in (build.TIERS, build.ALL_TIERS):
    for tier in [t for t in table if only and t not in only]:
        del table[tier]
'
python3 -c "$python
print(build.kernel_tables(), end='')" > "$out.d/kernel_tables.new"
cmp -s "$out.d/kernel_tables.new" "$out.d/kernel_tables.h" || mv "$out.d/kernel_tables.new" "$out.d/kernel_tables.h"
python3 -c "$python
for source, tier, flags in build.objects():
    print(tier, source, *flags)" > "$out.d/objects.txt"
base="$(python3 -c "$python
print(*build.CFLAGS)") -I$here -I$out.d"

: > "$out.d/link.txt"
newest_header=$(ls -t native/*.h native/*/*.h $here/*.h | head -n 1)
job() { # OBJECT SOURCE FLAGS HEADER: print the compiler arguments unless the object is up to date
    object=$1.o
    echo "$object" >> "$out.d/link.txt"
    command="$3 -c $2 -o $object"
    if [ -f "$object" ] && [ "${CC:-cc} $command" = "$(cat "$object.cmd" 2>/dev/null)" ] &&
        [ -z "$(find "$2" "$newest_header" $4 -newer "$object")" ]; then return; fi
    rm -f "$object"
    echo "${CC:-cc} $command" > "$object.cmd"
    echo "$command"
}
{
    while read -r tier src args; do
        job "$tiers/$(basename "$(dirname "$src")").$(basename "$src" .c).$tier" "$src" "$args $*" ""
    done < "$out.d/objects.txt"
    for src in $common; do job "$out.d/common.$(basename "$src" .c)" "$src" "$base ${COMMON_CFLAGS:-} $*" "$out.d/kernel_tables.h"; done
    for src in $main; do job "$out.d/test.$(basename "$src" .c)" "$src" "$base ${COMMON_CFLAGS:-} $*" "$out.d/kernel_tables.h"; done
} > "$out.d/jobs.txt"
# $CC may hold options of its own, such as a launcher
# shellcheck disable=SC2086
xargs -r -P "${JOBS:-$(nproc)}" -L 1 ${CC:-cc} < "$out.d/jobs.txt"
[ -z "${NO_LINK:-}" ] || exit 0
link="${CC:-cc} $* $(cat "$out.d/link.txt") ${LDFLAGS:--pthread}"
if [ -s "$out.d/jobs.txt" ] || [ ! -f "$out" ] || [ "$link" != "$(cat "$out.d/link.cmd" 2>/dev/null)" ]; then
    rm -f "$out.d/link.cmd"
    $link -o "$out.d/linked"
    mv "$out.d/linked" "$out"
    echo "$link" > "$out.d/link.cmd"
fi
