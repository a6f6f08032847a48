#!/usr/bin/env bash
# Sets up a 64-bit Arm Python with torch that runs under QEMU's user-mode emulation: no root, no chroot, no binfmt_misc.
#   scripts/arm_python.sh DIRECTORY
#   DIRECTORY/bin/python ...      like any python; QEMU_CPU=cortex-a76 selects the CPU model, QEMU_PLUGIN=... a plugin
# DIRECTORY/root is Debian 12 with Python 3.11 and its headers, the packages are in its dist-packages. About 220 MB to download,
# 830 MB on disk. DEBIAN_MIRROR selects the mirror; by default that of this machine's apt, or else debootstrap's.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
target=${1:?usage: scripts/arm_python.sh DIRECTORY}
PATH=$PATH:/usr/sbin  # debootstrap is there; not on every user's path
# shellcheck source=scripts/debian.sh
. "$here/debian.sh"
need_tools debootstrap dpkg-deb qemu-aarch64 "$python"

# Built under another name and renamed at the end, so that the directory is always complete.
new=$target.new
rm -rf "$new"
mkdir -p "$new/root" "$new/bin"
new=$(cd "$new" && pwd)

mirror=$(debian_mirror)

# Only downloads packages and verifies their checksums; Python needs them unpacked, not installed.
echo "Arm Python: fetching Debian packages"
debootstrap --download-only --arch=arm64 --variant=minbase \
  --include=python3.11,libpython3.11-dev,libstdc++6 bookworm "$new/debian" "$mirror" \
  >"$new/debootstrap.log" 2>&1 || {
  tail -n 20 "$new/debootstrap.log" >&2
  echo "debootstrap failed; DEBIAN_MIRROR=<URL> chooses another Debian mirror than $mirror" >&2
  exit 1
}
for package in "$new"/debian/var/cache/apt/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x -C "$new/root" --no-same-owner --no-same-permissions \
    --exclude=./usr/share/doc --exclude=./usr/share/man --exclude=./usr/share/locale --exclude='*.a'
done
rm -rf "$new/debian" "$new/debootstrap.log"
# Files of this machine that the emulated process can see, and a link out of the directory.
rm -rf "$new"/root/{boot,dev,home,media,mnt,opt,proc,root,run,srv,sys,tmp,usr/lib/python3.11/sitecustomize.py}

# Programs of a newer cross compiler than Debian 12's need its C and C++ libraries, which also work for older programs.
cross=/usr/aarch64-linux-gnu/lib
own=$new/root/lib/aarch64-linux-gnu
release() { grep -aom 1 'stable release version [0-9.]*[0-9]' "$1/libc.so.6"; }
if [ -f "$cross/libc.so.6" ] &&
  [ "$({ release "$cross"; release "$own"; } | sort -V | tail -n 1)" != "$(release "$own")" ]; then
  echo "Arm Python: with the cross compiler's C and C++ libraries"
  cp -a "$cross"/*.so.[0-9]* "$own"
fi

# Debian's Python.h includes this header from the compiler's directories; here it is elsewhere.
cp "$new"/root/usr/include/{aarch64-linux-gnu/,}python3.11/pyconfig.h

# Without dependencies, because pip would choose those of this machine.
echo "Arm Python: fetching torch and its dependencies"
"$python" -m pip install -q --root-user-action=ignore --no-deps --no-compile --only-binary=:all: \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
  --python-version 311 --implementation cp --abi cp311 --abi abi3 --abi none \
  --target "$new/root/usr/lib/python3/dist-packages" -r "$here/arm_python.txt"

# argv[0] becomes sys.executable, so that a child Python is emulated too.
cat >"$new/bin/python" <<'WRAPPER'
#!/bin/sh
self=$(readlink -f "$0")
root=${self%/bin/*}/root
QEMU_LD_PREFIX=$root PYTHONHOME=$root/usr PYTHONNOUSERSITE=1
export QEMU_LD_PREFIX PYTHONHOME PYTHONNOUSERSITE
exec qemu-aarch64 -0 "$self" "$root/usr/bin/python3.11" "$@"
WRAPPER
chmod +x "$new/bin/python"

echo "Arm Python: first start"
"$new/bin/python" -W ignore -c '
import platform, sys, sysconfig, torch
found = (platform.machine(), sys.version_info[:2], sysconfig.get_config_var("EXT_SUFFIX"), torch.version.cuda)
expected = ("aarch64", (3, 11), ".cpython-311-aarch64-linux-gnu.so", None)
if found != expected:
    sys.exit(f"found {found}; expected {expected}")
assert torch.ones(2, 3).mm(torch.ones(3, 4)).sum() == 24
print("torch", torch.__version__, "on", platform.platform())'
rm -rf "$target"
mv "$new" "$target"
