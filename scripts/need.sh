#!/bin/sh
# Checks that tools are installed, and installs missing ones on Debian and Ubuntu.
#   scripts/need.sh build|test|bench|arm-cost|workflows|tidy|msan|wine|speech|rust, or clang VERSION
# Names the missing packages and fails if it cannot install them.
set -u

# macOS: only Xcode's compiler is needed; tests take GoogleTest from GTEST_DIR (Makefile).
if [ "$(uname -s)" = Darwin ]; then
  command -v c++ >/dev/null || { echo "There is no C++ compiler. Install Xcode's: xcode-select --install" >&2; exit 1; }
  exit 0
fi

missing=""
need() { # need PACKAGE CHECK...
  package=$1
  shift
  "$@" >/dev/null 2>&1 || missing="$missing $package"
}
has() { command -v "$1"; }

as_root=""
[ "$(id -u)" = 0 ] || as_root="sudo -n"
can_install() { command -v apt-get && $as_root true; }

need g++ has g++
# The tests' build reuses objects of the installed library through it. A build also works without it.
can_install >/dev/null 2>&1 && need ccache has ccache
# A venv needs ensurepip, which is a separate package in Debian.
need python3-venv "${PYTHON:-python3}" -c 'import venv, ensurepip'
if [ "${1:-build}" = test ] || [ "${1:-build}" = arm-cost ]; then
  need qemu-user has qemu-aarch64
  need g++-aarch64-linux-gnu has aarch64-linux-gnu-g++
  need ccache has ccache
  need googletest test -f /usr/src/googletest/CMakeLists.txt
  # Builds C programs as users do without CMake: tests/python/project/test_builds.py
  need pkgconf has pkg-config
  # Another compiler for the SME2 kernels, and a reader of its objects: cmake/isa.cmake. Without them the kernels are left out.
  if ! has clang++-19 >/dev/null 2>&1 && apt-cache show clang-19 llvm-19 >/dev/null 2>&1; then
    need clang-19 has clang++-19
    need llvm-19 has llvm-objdump-19
  fi
  # Traces system calls that change the disk: tests/python/support/crash_states.py
  need strace has strace
  # Builds a Turkish locale: tests/python/machine/test_locale.py
  need locales test -f /usr/share/i18n/locales/tr_TR
  # The emulated Arm Python: scripts/arm_python.sh
  need debootstrap test -x /usr/sbin/debootstrap
  need debian-archive-keyring test -f /usr/share/keyrings/debian-archive-keyring.gpg
  need gpgv has gpgv
  # The emulated x86 CPUs: scripts/x86_emulator.sh, scripts/emulate_x86.sh
  need make has make
  # A headless browser, if the distribution has it: tests/python/tools/test_report.py
  if ! has chromium >/dev/null 2>&1 && apt-cache show chromium-headless-shell >/dev/null 2>&1; then
    need chromium-headless-shell has chromium-headless-shell
  fi
  need xz-utils has xz
  need cpio has cpio
  need xorriso has xorriso
fi
if [ "${1:-build}" = tidy ]; then
  need clang-tidy-19 has clang-tidy-19
fi
if [ "${1:-build}" = clang ]; then
  need "clang-$2" has "clang++-$2"
fi
if [ "${1:-build}" = msan ]; then
  need clang-19 has clang++-19
  need llvm-19 has llvm-symbolizer-19
  need libclang-rt-19-dev test -f /usr/lib/llvm-19/lib/clang/19/lib/linux/libclang_rt.msan-x86_64.a
  need googletest test -f /usr/src/googletest/CMakeLists.txt
fi
if [ "${1:-build}" = speech ]; then
  need espeak-ng has espeak-ng
fi
if [ "${1:-build}" = rust ]; then
  need rustc has rustc
fi
if [ "${1:-build}" = wine ]; then
  need wine64 test -x /usr/lib/wine/wine64
fi
if [ "${1:-build}" = workflows ]; then
  need npm has npm
fi
if [ "${1:-build}" = bench ]; then
  need libbenchmark-dev test -f /usr/include/benchmark/benchmark.h
fi
if [ "${1:-build}" = arm-cost ]; then
  # LLVM 17 has the first models of the cores; distributions have a package for each version.
  majors() { sed -n 's/^llvm-\(mca-\)\{0,1\}\([0-9][0-9]*\)$/\2/p' | sort -n | awk '$1 >= 17'; }
  # shellcheck disable=SC2046 (one word per directory)
  if [ -z "$(ls $(echo "$PATH" | tr : ' ') 2>/dev/null | grep mca | majors)" ] &&
    ! llvm-mca --version 2>/dev/null | grep -Eq 'version (1[7-9]|[2-9][0-9])\.'; then
    package=$(apt-cache pkgnames llvm- 2>/dev/null | majors | head -n 1)
    missing="$missing llvm-${package:-19}"
  fi
fi
[ -z "$missing" ] && exit 0

if can_install >/dev/null 2>&1; then
  echo "Installing system packages:$missing"
  # shellcheck disable=SC2086 (the list is meant to split)
  $as_root apt-get update -q >/dev/null &&
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >/dev/null &&
    exit 0
fi
echo "Missing system packages:$missing" >&2
echo "Install them (Debian or Ubuntu: sudo apt-get install --no-install-recommends$missing) and run this again." >&2
exit 1
