#!/usr/bin/env bash
# Runs a program of this machine on an emulated x86 CPU. The program gets its libraries and the variables LOWBIT_* and GTEST_*,
# and nothing else of this machine. Output and exit status are the program's.
#   scripts/emulate_x86.sh CPU [NAME=VALUE...] PROGRAM [ARGUMENT...] [--and [NAME=VALUE...] PROGRAM [ARGUMENT...]]...
# NAME=VALUE: a variable of that program alone. Several programs run one after the other, up to the first that fails; for small
# programs the boot of Linux takes longest. CPU is one that `build/x86-emulator/bochs --help cpu` lists. TIMEOUT=3600: seconds
# until it is stopped.
set -euo pipefail

emulator=$(cd "$(dirname "$0")/.." && pwd)/build/x86-emulator
cpu=${1:?usage: scripts/emulate_x86.sh CPU PROGRAM [ARGUMENT...]}
shift
: "${1:?usage: scripts/emulate_x86.sh CPU PROGRAM [ARGUMENT...]}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

[ -x "$emulator/bochs" ] || { echo "$emulator is missing: make build/x86-emulator" >&2; exit 1; }
mkdir -p "$work"/guest/{bin,dev,proc,tmp} "$work/disk"
cp "$emulator/busybox" "$work/guest/bin"
commands='' program=''
for word in "$@"; do
  if [ "$word" = --and ]; then
    commands+=' &&' program=''
  elif [ -n "$program" ]; then
    commands+=" ${word@Q}"
  elif [[ $word =~ ^[A-Z_]+= ]]; then
    commands+=" ${word%%=*}=$(printf %q "${word#*=}")"
  else
    program=$(readlink -f "$word")
    [ -x "$program" ] || { echo "$program is not an executable program" >&2; exit 1; }
    commands+=" ${program@Q}"
    libraries=$({ ldd "$program" 2>/dev/null || true; } | grep -o '/[^ )]*' || true)
    # shellcheck disable=SC2086 (one word per library)
    cp -L --parents "$program" $libraries "$work/guest"
  fi
done

# The last line has the status; Linux prints the lines after it.
cat >"$work/guest/init" <<GUEST
#!/bin/busybox sh
export PATH=/bin TERM=dumb
busybox mount -t devtmpfs dev /dev
busybox mount -t proc proc /proc
exec </dev/null >/dev/ttyS0 2>&1
busybox stty -F /dev/ttyS0 -opost
$(export -p | grep -E '^declare -x (LOWBIT|GTEST)_[A-Z_]*=' | sed 's/^declare -x/export/')
echo "program starts"
$commands
echo "
program ends: \$?"
busybox stty -F /dev/ttyS0 -opost
busybox reboot -f
GUEST
chmod +x "$work/guest/init"
(cd "$work/guest" && find . | cpio --quiet -o -H newc -R 0:0) >"$work/disk/initrd"

# Linux boots from a CD. Features that it would wait for or that Bochs lacks (5-level paging with ACPI) are switched off. Bochs
# ends at a restart.
cp "$emulator"/{vmlinuz,isolinux.bin,ldlinux.c32} "$work/disk"
cat >"$work/disk/isolinux.cfg" <<'LINUX'
default linux
label linux
  kernel vmlinuz
  append initrd=initrd console=ttyS0,115200 quiet acpi=off no5lvl mitigations=off reboot=t panic=-1
LINUX
xorriso -as mkisofs -quiet -o "$work/cd" -b isolinux.bin -c boot.cat \
  -no-emul-boot -boot-load-size 4 -boot-info-table "$work/disk" 2>"$work/xorriso"

cat >"$work/bochsrc" <<BOCHS
config_interface: textconfig
display_library: nogui
romimage: file=$emulator/BIOS-bochs-latest
vgaromimage: file=$emulator/vgabios.bin
megs: 512
cpu: model=$cpu, ips=100000000, reset_on_triple_fault=0, ignore_bad_msrs=1
clock: sync=none
ata0-master: type=cdrom, path=$work/cd, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$work/output
log: $work/log
panic: action=fatal
error: action=ignore
info: action=ignore
BOCHS
touch "$work/output" "$work/log"
timeout "${TIMEOUT:-3600}" "$emulator/bochs" -q -f "$work/bochsrc" </dev/null >"$work/bochs" 2>&1 || ended=$?

sed -e '1,/^program starts/d' -e '/^program ends: /,$d' "$work/output"
status=$(sed -n 's/^program ends: \([0-9]*\).*/\1/p' "$work/output")
if [ -z "$status" ]; then
  [ "${ended:-0}" != 124 ] || echo "the emulated CPU was stopped after ${TIMEOUT:-3600} seconds" >&2
  echo "$program did not end on the emulated $cpu; Linux and Bochs said:" >&2
  tail -n 30 "$work/output" "$work/bochs" "$work/log" >&2
  exit 1
fi
exit "$status"
