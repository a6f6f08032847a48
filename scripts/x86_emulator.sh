#!/usr/bin/env bash
# Sets up Bochs, an emulator of x86 CPUs that have AVX-512, AVX-VNNI and AMX whatever this machine has, and a Linux for
# it: no root, no screen. scripts/emulate_x86.sh runs a program on it.
#   scripts/x86_emulator.sh DIRECTORY
# All of it is Debian 13's; Bochs is compiled, for its AMX has to be mended. About 35 MB are downloaded and 20 MB stay.
# DEBIAN_MIRROR names the mirror; without it, that of this machine's apt or debootstrap's.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
target=${1:?usage: scripts/x86_emulator.sh DIRECTORY}
for tool in apt-get /usr/sbin/debootstrap dpkg-deb g++ make patch xz; do
  command -v "$tool" >/dev/null || {
    echo "$tool is missing; \`scripts/need.sh test\` installs what is needed on Debian and Ubuntu" >&2
    exit 1
  }
done

# Built aside and renamed at the end: what has the right name is whole.
new=$target.new
rm -rf "$new"
mkdir -p "$new"/{apt/lists/partial,apt/archives/partial,packages,root,bochs}
new=$(cd "$new" && pwd)
target=${new%.new}

mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' \
  'Label: Debian' | grep -E -m 1 '^(https?|file):' || true)}
mirror=${mirror:-$(sed -n 's/^DEF_MIRROR="\(.*\)"$/\1/p' /usr/sbin/debootstrap)}
for suite in 'deb trixie' 'deb-src trixie' 'deb trixie-backports'; do
  echo "${suite% *} [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror ${suite#* } main"
done >"$new/apt/sources.list"
touch "$new/apt/status"

# Debian 13's packages beside those of this machine's apt.
apt() {
  "$1" -q -o Dir::State="$new/apt" -o Dir::State::Status="$new/apt/status" -o Dir::Cache="$new/apt" \
    -o Dir::Etc::SourceList="$new/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null -o APT::Architecture=amd64 -o APT::Architectures::=amd64 \
    -o Acquire::Languages=none -o APT::Sandbox::User= "${@:2}" >"$new/apt.log" 2>&1 || {
    tail -n 20 "$new/apt.log" >&2
    echo "$1 failed; DEBIAN_MIRROR=<URL> chooses another Debian mirror than $mirror" >&2
    exit 1
  }
}
echo "x86 emulator: fetching Debian packages"
cd "$new/packages"
apt apt-get update
# Linux 6.12, Debian 13's own, does not come up on an emulated CPU with AMX. 7.3.4 does: of its backports, that one, or
# the newest when they no longer have it.
apt apt-cache pkgnames linux-binary-
linux=linux-binary-7.3.4+deb13-cloud-amd64
grep -qFx "$linux" "$new/apt.log" ||
  linux=$(grep -E '^linux-binary-[0-9].*-cloud-amd64$' "$new/apt.log" | sort -V | tail -n 1)
apt apt-get download "$linux" bochsbios vgabios isolinux syslinux-common busybox-static
apt apt-get source --download-only --tar-only bochs
for package in *.deb; do dpkg-deb -x "$package" "$new/root"; done
tar -xf bochs_*.orig.tar.* -C "$new/bochs" --strip-components=1

cd "$new/bochs"
patch -s -p1 <"$here/bochs.patch"

echo "x86 emulator: compiling Bochs"
{
  ./configure --quiet --enable-x86-64 --enable-cpu-level=6 --enable-avx --enable-evex --enable-amx \
    --enable-all-optimizations --disable-docbook --with-nogui --without-x CFLAGS="-O2 -w" CXXFLAGS="-O2 -w" &&
    make -j "${JOBS:-2}" bochs CXX="${CMAKE_CXX_COMPILER_LAUNCHER:-} g++"
} >"$new/make.log" 2>&1 || {
  tail -n 20 "$new/make.log" >&2
  exit 1
}

mkdir "$new/done"
cd "$new/done"
cp "$new/bochs/bochs" "$new"/root/usr/share/bochs/BIOS-bochs-latest "$new"/root/usr/share/vgabios/vgabios.bin \
  "$new"/root/usr/lib/ISOLINUX/isolinux.bin "$new"/root/usr/lib/syslinux/modules/bios/ldlinux.c32 \
  "$new"/root/usr/bin/busybox .
cp "$new"/root/usr/lib/modules/*/vmlinuz .
strip bochs
rm -rf "$target"
mv "$new/done" "$target"
rm -rf "$new"
