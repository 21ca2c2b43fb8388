#!/bin/sh
# bochs/run.sh [CPU model ...]: the kernels' machine code, AVX-512 included, on an emulated bare CPU, and the choice of
# tiers with it. Default models: corei7_icelake_u, which runs every tier, and corei7_skylake_x, which has no VNNI, so that
# the avx512 tier must be skipped for that reason. The short walk of the parity program; its hashes are compared with the
# same objects run natively.
set -eu
cd "$(dirname "$0")/../../.."
echo "bochs: kernel machine code on emulated CPUs with and without AVX-512 VNNI"
missing=
need() { [ -e "$2" ] || command -v "$2" > /dev/null || missing="$missing $1"; }
need bochs bochs
need bochs-term /usr/lib/x86_64-linux-gnu/bochs/plugins/libbx_term_gui.so
need bochsbios /usr/share/bochs/BIOS-bochs-latest
need vgabios /usr/share/bochs/VGABIOS-lgpl-latest
need grub-pc-bin /usr/lib/grub/i386-pc/multiboot.mod
need grub-common grub-mkrescue
need xorriso xorriso
need mtools mformat
need bsdutils script
[ "$(uname -m)" = x86_64 ] || { echo "bochs: skipped, the objects are for x86_64"; exit 77; }
[ -z "$missing" ] || { echo "bochs: skipped, packages are missing:$missing"; exit 77; }

here=tests/native
out=${OUT:-build/native/bochs}
mkdir -p "$(dirname "$out")"
# A compiler that protects stacks or branches by default must not do so here; without, the wheel's objects serve as they are.
defaults=$(${CC:-cc} -E -dM -x c - < /dev/null)
bare=
case $defaults in *__SSP*) bare="$bare -fno-stack-protector" ;; esac
case $defaults in *__CET__*) bare="$bare -fcf-protection=none" ;; esac
# shellcheck disable=SC2086
MAIN="$here/main.c $here/bochs/cmain.c $here/parity.c $here/parity_layouts.c $here/parity_ops.c" NO_LINK=1 \
    COMMON_CFLAGS="-DPARITY_SMALL=1 -fno-tree-loop-distribute-patterns" $here/build.sh "$out" $bare
work=$out.d
cc=${CC:-cc}
$cc -c $here/bochs/boot.S -o "$work/boot.o"
# shellcheck disable=SC2046
ld -m elf_x86_64 -n -z noexecstack --no-warn-rwx-segments -T $here/bochs/link.ld -o "$work/kernel64" \
    "$work/boot.o" $(grep -v 'test.main.o' "$work/link.txt") "$($cc -print-libgcc-file-name)"
# shellcheck disable=SC2046
$cc $(grep -v 'test.cmain.o' "$work/link.txt") -o "$work/native"
"$work/native" scalar > "$work/native.txt"
mkdir -p "$work/iso/boot/grub"
objcopy -O elf32-i386 "$work/kernel64" "$work/iso/boot/kernel"
printf 'set timeout=0\nmenuentry parity { multiboot /boot/kernel\nboot }\n' > "$work/iso/boot/grub/grub.cfg"
grub-mkrescue -o "$work/boot.iso" "$work/iso" > "$work/grub.txt" 2>&1

run_model() {
    cat > "$work/bochsrc" <<EOF
megs: 64
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model=$1, count=1, ips=50000000, reset_on_triple_fault=0
ata0: enabled=1
ata0-master: type=cdrom, path=$work/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$work/serial.txt
display_library: term
panic: action=fatal
clock: sync=none
EOF
    echo continue > "$work/rc" # Debian's build starts in its debugger and wants a terminal
    rm -f "$work/serial.txt"
    TERM=xterm timeout 300 script -qfc "bochs -q -f $work/bochsrc -rc $work/rc" /dev/null > "$work/bochs.txt" 2>&1 || true
    tr -d '\000\r' < "$work/serial.txt" > "$work/$1.txt"
}

status=0
fail() { echo "bochs: $*"; status=1; }
[ $# -gt 0 ] || set -- corei7_icelake_u corei7_skylake_x
for model in "$@"; do
    run_model "$model"
    report=$work/$model.txt
    grep -v -e '^END' -e ': passed$' "$report" | sed "s/^/$model: /" || true
    grep -q '^END' "$report" || fail "$model did not reach the end; see $work/bochs.txt"
    grep -q ' 00 failed,' "$report" || fail "$model: checks failed"
    [ "$(grep '^hash scalar' "$report")" = "$(grep '^hash scalar' "$work/native.txt")" ] || fail "$model: hash differs from the native run"
    case $model in
    corei7_icelake_u) grep -q '^hash avx512 ' "$report" || fail "$model: the avx512 tier did not run" ;;
    corei7_skylake_x) grep -q '^tier avx512: skipped, this CPU lacks AVX512_VNNI' "$report" || fail "$model: the avx512 tier was not refused for its reason" ;;
    esac
done
exit $status
