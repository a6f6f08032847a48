#!/usr/bin/env bash
# Sets up a QEMU with Arm's SME2, which Debian 12's lacks: DIRECTORY/qemu-aarch64, one static program; needs no root.
#   scripts/arm_emulator.sh DIRECTORY
# It comes from Debian 13's backports: about 70 MB to download, 17 MB on disk.
# DEBIAN_MIRROR selects the mirror; by default that of this machine's apt, or else debootstrap's.
set -euo pipefail

target=${1:?usage: scripts/arm_emulator.sh DIRECTORY}
oldest=11.1  # earlier versions lack SME2 or run it incorrectly
# shellcheck source=scripts/debian.sh
. "$(dirname "$0")/debian.sh"

# Built under another name and renamed at the end, so that the directory is always complete.
new=$target.new
rm -rf "$new"
mkdir -p "$new/done"
new=$(cd "$new" && pwd)

echo "Arm emulator: fetching QEMU"
debian_apt_in "$new/apt" "$(dpkg --print-architecture)" trixie-backports
cd "$new"
debian_apt apt-get update
debian_apt apt-get download qemu-user
dpkg-deb --fsys-tarfile qemu-user_*.deb | tar -x -O ./usr/bin/qemu-aarch64 >done/qemu-aarch64
chmod +x done/qemu-aarch64
found=$(done/qemu-aarch64 --version | sed -n '1s/.*version \([0-9.]*\).*/\1/p')
if [ "$(printf '%s\n' "$oldest" "$found" | sort -V | head -n 1)" != "$oldest" ]; then
  echo "QEMU is $found; expected $oldest or later" >&2
  exit 1
fi
cd - >/dev/null
rm -rf "$target"
mv "$new/done" "$target"
rm -rf "$new"
