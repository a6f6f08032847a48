#!/usr/bin/env bash
# Sets up a 64-bit Arm Python with torch that runs under QEMU's user-mode emulation: no root, no chroot, no binfmt_misc.
#   scripts/arm_python.sh DIRECTORY
#   DIRECTORY/bin/python ...      as any python; QEMU_CPU=cortex-a76 chooses the CPU model, QEMU_PLUGIN=... a plugin
# DIRECTORY/root is Debian 12 with Python 3.11 and its headers, the packages are in its dist-packages. About 220 MB are
# downloaded and 830 MB stay. DEBIAN_MIRROR names the mirror; without it, that of this machine's apt or debootstrap's.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
target=${1:?usage: scripts/arm_python.sh DIRECTORY}
PATH=$PATH:/usr/sbin  # debootstrap's place, also on the path of others than root
# shellcheck source=scripts/debian.sh
. "$here/debian.sh"
need_tools debootstrap dpkg-deb qemu-aarch64 "$python"

# Built aside and renamed at the end: what has the right name is whole.
new=$target.new
rm -rf "$new"
mkdir -p "$new/root" "$new/bin"
new=$(cd "$new" && pwd)

mirror=$(debian_mirror)

# Only downloads, with the packages' checksums verified; unpacking them is all that a Python needs.
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
# What the emulated process shall see of this machine, and a link that leaves the directory.
rm -rf "$new"/root/{boot,dev,home,media,mnt,opt,proc,root,run,srv,sys,tmp,usr/lib/python3.11/sitecustomize.py}

# What a newer cross compiler than Debian 12's makes asks for its C and C++ libraries, which serve older programs too.
cross=/usr/aarch64-linux-gnu/lib
own=$new/root/lib/aarch64-linux-gnu
release() { grep -aom 1 'stable release version [0-9.]*[0-9]' "$1/libc.so.6"; }
if [ -f "$cross/libc.so.6" ] &&
  [ "$({ release "$cross"; release "$own"; } | sort -V | tail -n 1)" != "$(release "$own")" ]; then
  echo "Arm Python: with the cross compiler's C and C++ libraries"
  cp -a "$cross"/*.so.[0-9]* "$own"
fi

# Debian's Python.h asks for this one in the compiler's own directories, which is not where it is here.
cp "$new"/root/usr/include/{aarch64-linux-gnu/,}python3.11/pyconfig.h

# No dependencies: pip would choose those of this machine.
echo "Arm Python: fetching torch and what it needs"
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
