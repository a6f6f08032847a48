#!/usr/bin/env bash
# Sets up a QEMU that knows Arm's SME2, which Debian 12's does not: DIRECTORY/qemu-aarch64, one static program, no root.
#   scripts/arm_emulator.sh DIRECTORY
# It is that of Debian 13's backports. About 70 MB are downloaded and 17 MB stay.
# DEBIAN_MIRROR names the mirror; without it, that of this machine's apt or debootstrap's.
set -euo pipefail

target=${1:?usage: scripts/arm_emulator.sh DIRECTORY}
oldest=11.1  # earlier ones run SME2 wrongly, or not at all
# shellcheck source=scripts/debian.sh
. "$(dirname "$0")/debian.sh"

# Built aside and renamed at the end: what has the right name is whole.
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
