#!/usr/bin/env bash
# Sets up a QEMU that knows Arm's SME2, which Debian 12's does not: DIRECTORY/qemu-aarch64, one static program, no root.
#   scripts/arm_emulator.sh DIRECTORY
# It is that of Debian 13's backports. About 70 MB are downloaded and 17 MB stay.
# DEBIAN_MIRROR names the mirror; without it, that of this machine's apt or debootstrap's.
set -euo pipefail

target=${1:?usage: scripts/arm_emulator.sh DIRECTORY}
oldest=11.1  # earlier ones run SME2 wrongly, or not at all
for tool in apt-get /usr/sbin/debootstrap dpkg-deb; do
  command -v "$tool" >/dev/null || {
    echo "$tool is missing; \`scripts/need.sh test\` installs what is needed on Debian and Ubuntu" >&2
    exit 1
  }
done

# Built aside and renamed at the end: what has the right name is whole.
new=$target.new
rm -rf "$new"
mkdir -p "$new"/{apt/lists/partial,apt/archives/partial,done}
new=$(cd "$new" && pwd)

mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' \
  'Label: Debian' | grep -E -m 1 '^(https?|file):' || true)}
mirror=${mirror:-$(sed -n 's/^DEF_MIRROR="\(.*\)"$/\1/p' /usr/sbin/debootstrap)}
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie-backports main" \
  >"$new/apt/sources.list"
touch "$new/apt/status"

# Packages of that suite beside those of this machine's apt; apt checks who signed them.
architecture=$(dpkg --print-architecture)
apt() {
  "$1" -q -o Dir::State="$new/apt" -o Dir::State::Status="$new/apt/status" -o Dir::Cache="$new/apt" \
    -o Dir::Etc::SourceList="$new/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null \
    -o APT::Architecture="$architecture" -o APT::Architectures::="$architecture" \
    -o Acquire::Languages=none -o APT::Sandbox::User= "${@:2}" >"$new/apt.log" 2>&1 || {
    tail -n 20 "$new/apt.log" >&2
    echo "$1 failed; DEBIAN_MIRROR=<URL> chooses another Debian mirror than $mirror" >&2
    exit 1
  }
}
echo "Arm emulator: fetching QEMU"
cd "$new"
apt apt-get update
apt apt-get download qemu-user
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
