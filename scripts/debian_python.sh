#!/usr/bin/env bash
# Unpacks a CPython of another Debian release or processor, with its C headers, in a directory. Installs nothing, needs no root.
#   scripts/debian_python.sh VERSION ARCHITECTURE DIRECTORY      3.13 or 3.14; x86_64 or aarch64
#   DIRECTORY/bin/python ...      runs it (another processor's under QEMU); DIRECTORY/include has Python.h
# 30 MB to download, 120 MB on disk. DEBIAN_MIRROR selects the mirror; by default that of this machine's apt, or else
# debootstrap's.
set -euo pipefail

version=${1:?usage: scripts/debian_python.sh VERSION ARCHITECTURE DIRECTORY}
architecture=${2:?}
target=${3:?}
case $version in
  3.13) suite=trixie ;;
  3.14) suite=forky ;;
  *) echo "no Debian release has CPython $version; expected 3.13 or 3.14" >&2; exit 1 ;;
esac
case $architecture in
  x86_64) debian=amd64 loader=ld-linux-x86-64.so.2 ;;
  aarch64) debian=arm64 loader=ld-linux-aarch64.so.1 ;;
  *) echo "the architecture is '$architecture'; expected x86_64 or aarch64" >&2; exit 1 ;;
esac
# shellcheck source=scripts/debian.sh
. "$(dirname "$0")/debian.sh"

# Built under another name and renamed at the end, so that the directory is always complete.
new=$target.new
rm -rf "$new"
mkdir -p "$new"/{root/usr/lib,bin}
new=$(cd "$new" && pwd)
debian_apt_in "$new/apt" $debian "$suite"
debian_apt apt-get update
debian_apt apt-get install -y --download-only \
  "python$version-minimal" "libpython$version-stdlib" "libpython$version-dev" libstdc++6
ln -s usr/lib "$new/root/lib"
ln -s usr/lib "$new/root/lib64"
for package in "$new"/apt/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x -C "$new/root" --no-same-owner --no-same-permissions --keep-directory-symlink \
    --exclude=./usr/share --exclude=./usr/include/linux --exclude=./usr/sbin --exclude=./etc --exclude=./var --exclude='*.a'
done
rm -rf "$new/apt"
# Debian's Python.h includes this header by the processor's directory, which another compiler does not search.
triple=$architecture-linux-gnu
cp "$new/root/usr/include/$triple/python$version/pyconfig.h" "$new/root/usr/include/python$version/pyconfig.h"
ln -s "root/usr/include/python$version" "$new/include"

# With its own loader, because its C library may be newer than this machine's. argv[0] becomes sys.executable.
cat >"$new/bin/python" <<WRAPPER
#!/bin/sh
self=\$(readlink -f "\$0")
root=\${self%/bin/*}/root
export PYTHONHOME="\$root/usr" PYTHONNOUSERSITE=1
if [ "\$(uname -m)" = $architecture ]; then
  exec "\$root/usr/lib/$loader" --argv0 "\$self" \\
    --library-path "\$root/usr/lib/$triple:\$root/usr/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}" \\
    "\$root/usr/bin/python$version" "\$@"
fi
export QEMU_LD_PREFIX="\$root"
exec qemu-$architecture -0 "\$self" "\$root/usr/bin/python$version" "\$@"
WRAPPER
chmod +x "$new/bin/python"
[ -e "$new/root/usr/lib/$loader" ] || ln -s "$triple/$loader" "$new/root/usr/lib/$loader"
found=$("$new/bin/python" -c 'import platform, sys; print("%d.%d %s" % (*sys.version_info[:2], platform.machine()))')
if [ "$found" != "$version $architecture" ]; then
  echo "found Python $found; expected $version $architecture" >&2
  exit 1
fi
rm -rf "$target"
mv "$new" "$target"
