#!/usr/bin/env bash
# Sets up Bochs, which emulates x86 CPUs with AVX-512, AVX-VNNI and AMX on any machine, and a Linux for it; needs neither root
# nor a screen. scripts/emulate_x86.sh runs a program on it.
#   scripts/x86_emulator.sh DIRECTORY
# Everything comes from Debian 13. Bochs is compiled, to fix its AMX. About 35 MB to download, 20 MB on disk.
# DEBIAN_MIRROR selects the mirror; by default that of this machine's apt, or else debootstrap's.
set -euo pipefail

target=${1:?usage: scripts/x86_emulator.sh DIRECTORY}
# shellcheck source=scripts/debian.sh
. "$(dirname "$0")/debian.sh"

# Downloads to packages/, unpacks in root/; the sources of Bochs go to bochs/.
fetch() {
  echo "x86 emulator: fetching Debian packages"
  debian_apt_in "$new/apt" amd64 trixie deb deb-src
  cd "$new/packages"
  debian_apt apt-get update
  debian_apt apt-cache depends linux-image-cloud-amd64
  linux=$(sed -n 's/^ *Depends: \(linux-image-.*\)/\1/p' "$new/apt/log")
  debian_apt apt-get download "$linux" bochsbios vgabios isolinux syslinux-common busybox-static
  debian_apt apt-get source --download-only --tar-only bochs
  for package in *.deb; do dpkg-deb -x "$package" "$new/root"; done
  tar -xf bochs_*.orig.tar.* -C "$new/bochs" --strip-components=1
}

# mend FILE EDIT: changes a source of Bochs 3.0 by a sed edit, which must match.
mend() {
  sed -e "$2" "$1" >mended
  ! cmp -s "$1" mended || { echo "Bochs' $1 is not as expected: nothing to do for $2" >&2; exit 1; }
  cp mended "$1"
}

# Bochs treats every byte in products of int8 tiles as unsigned; this makes the signed ones signed. (S and U in a name: signed
# and unsigned, for the first and second factor; xbyte and ybyte are their bytes.)
mend_products() {
  mend cpu/avx/amx.cc '/^[A-Z].* DPBDSS(/,/^}/ s/Bit8u/Bit8s/g'
  mend cpu/avx/amx.cc '/^[A-Z].* DPBDSU(/,/^}/ { /xbyte\[4\]/ s/Bit8u/Bit8s/g }'
  mend cpu/avx/amx.cc '/^[A-Z].* DPBDUS(/,/^}/ { /ybyte\[4\]/ s/Bit8u/Bit8s/g }'
}

# Tiles are lost when processes switch.
mend_saved_tiles() {
  # Rows and bytes per row are swapped.
  mend cpu/xsave.cc 's/\(vmm16u(8+n) *=.*\)\.rows;/\1.bytes_per_row;/'
  mend cpu/xsave.cc 's/\(vmmubyte(48+n) *=.*\)\.bytes_per_row;/\1.rows;/'
  # Only 8 of 16 rows are saved.
  mend cpu/xsave.cc 's/row < BX_TILE_REGISTERS/row < BX_TILE_MAX_ROWS/'
  # Tiles in use are marked as unused.
  mend cpu/xsave.cc 's/tile_use_tracker == 0/tile_use_tracker != 0/'
}

# XFD, a trap at the first use of a tile, is missing, and without it Linux does not enable AMX. It has two system registers:
# which state traps (here xfd[0]), and which one did (xfd[1]).
add_xfd() {
  # CPUID reports XFD, and that tiles use it.
  mend cpu/cpuid.cc '/BX_ISA_XSAVES/ { n; s/(1<<3);/(1<<3) | (1<<4);/ }'
  mend cpu/cpuid.cc 's/^      leaf->ecx = (cpu->ia32_xss_suppmask .*/&\n      if (subfunction == 18) leaf->ecx |= 4;/'
  # While tiles trap, AMX is off in Bochs, and an AMX instruction raises the trap.
  mend cpu/proc_ctrl.cc '/^void .*BX_CPU_C::handleAvxModeChange/i Bit64u xfd[2];  // XFD and XFD_ERROR'
  mend cpu/proc_ctrl.cc 's/^ *if (! long64_mode() .*OSXSAVE() ||$/&\n      (xfd[0] \& BX_XCR0_XTILEDATA_MASK) ||/'
  local trap='xfd[1] = BX_XCR0_XTILEDATA_MASK; exception(BX_NM_EXCEPTION, 0);'
  mend cpu/proc_ctrl.cc "/::BxNoAMX/,/BX_ASSERT/ s/^  BX_ASSERT/  $trap\n&/"
  # Handle the two registers among those that Bochs does not know.
  local is_xfd='if (index == BX_MSR_IA32_XFD || index == BX_MSR_IA32_XFD_ERROR)'
  local read='*msr = xfd[index - BX_MSR_IA32_XFD]; return true;'
  local write='xfd[index - BX_MSR_IA32_XFD] = val_64; handleAvxModeChange(); return true;'
  mend cpu/msr.cc '/^bool .*::handle_unknown_rdmsr(/i extern Bit64u xfd[2];'
  mend cpu/msr.cc "/^bool .*::handle_unknown_rdmsr(/,/{/ s/^{/&\n  $is_xfd { $read }/"
  mend cpu/msr.cc "/^bool .*::handle_unknown_wrmsr(/,/{/ s/^{/&\n  $is_xfd { $write }/"
}

# Arrow Lake executes AVX-VNNI-INT8, but CPUID does not report it.
list_vnni_int8() {
  local place=cpu/cpudb/intel/arrow_lake.cc
  mend $place '/AVX-VNNI-INT8 instr/,/leaf->edx/ s/leaf->edx = .*/leaf->edx = get_std_cpuid_leaf_7_subleaf_1_edx();/'
}

compile() {
  echo "x86 emulator: compiling Bochs"
  {
    ./configure --quiet --enable-x86-64 --enable-cpu-level=6 --enable-avx --enable-evex --enable-amx \
      --enable-all-optimizations --disable-docbook --with-nogui --without-x CFLAGS="-O2 -w" CXXFLAGS="-O2 -w" &&
      make -j "${JOBS:-2}" bochs CXX="${CMAKE_CXX_COMPILER_LAUNCHER:-} g++"
  } >"$new/make.log" 2>&1 || {
    tail -n 20 "$new/make.log" >&2
    exit 1
  }
}

# Copies what scripts/emulate_x86.sh needs to done/.
collect() {
  mkdir "$new/done"
  cd "$new/done"
  cp "$new/bochs/bochs" "$new"/root/usr/share/bochs/BIOS-bochs-latest "$new"/root/usr/share/vgabios/vgabios.bin \
    "$new"/root/usr/lib/ISOLINUX/isolinux.bin "$new"/root/usr/lib/syslinux/modules/bios/ldlinux.c32 \
    "$new"/root/usr/bin/busybox .
  cp "$new"/root/boot/vmlinuz-* vmlinuz
  strip bochs
}

need_tools g++ make xz
# Built under another name and renamed at the end, so that the directory is always complete.
new=$target.new
rm -rf "$new"
mkdir -p "$new"/{packages,root,bochs}
new=$(cd "$new" && pwd)
target=${new%.new}
fetch
cd "$new/bochs"
mend_products
mend_saved_tiles
add_xfd
list_vnni_int8
compile
collect
rm -rf "$target"
mv "$new/done" "$target"
rm -rf "$new"
