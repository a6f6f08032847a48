#!/bin/sh
# Tests the liblowbit of a macOS wheel under QEMU with the C++ tests for Linux on Arm: `make test-macos-run`.
#   tests/macos/run.sh WHEEL TESTS OUTPUT EMULATOR
# TESTS: a directory with liblowbit.so and tests/cpp, built by GCC (`make build-test-arm`). OUTPUT: a directory for new files.
# EMULATOR: a directory with a qemu-aarch64 that has SME2 (`make build/arm-emulator`).
set -eu
wheel=$(realpath "$1") tests=$(realpath "$2") output=$3 emulator=$4
here=$(dirname "$0")
compile="aarch64-linux-gnu-g++ -std=c++20 -O1 -Wall -Wextra -Werror"
rm -rf "$output"
mkdir -p "$output"
(cd "$output" && python3 -m zipfile -e "$wheel" wheel)
dylib=$output/wheel/lowbit/liblowbit.dylib
$compile -fPIC -shared "$here/system.cpp" -o "$output/libmacos_system.so"
python3 "$here/elf_of_macho.py" "$dylib" "$output/liblowbit.so" --needs libmacos_system.so
$compile "$here/mac.cpp" -o "$output/mac" -L "$tests" -llowbit

# under MAC CPU PROGRAM...: runs with the wheel's library and pages of 16 KiB, as on every Arm Mac. The emulator for SME2 has
# only pages of 4 KiB.
under() {
  mac=$1 cpu=$2
  shift 2
  LOWBIT_TEST_MAC=$mac QEMU_PAGESIZE=16384 QEMU_CPU=$cpu \
    qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH="$output" "$@"
}

# finds MAC CPU EXPECTED: checks the instruction sets and the number of clusters with an SME2 unit (one if the system does not
# tell).
finds() {
  found=$(under "$1" "$2" "$output/mac" cpu)
  [ "$found" = "$3" ] || { echo "$1 on a $2 finds '$found'; expected '$3'" >&2; exit 1; }
  echo "== $1: $found"
}

# Its tables equal those of the build for Linux.
under m1 cortex-a76 "$output/mac" rows > "$output/rows"
QEMU_CPU=cortex-a76 qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH="$tests" "$output/mac" rows |
  diff - "$output/rows"

finds neither cortex-a76 "neon 1"  # features that the system denies are not used
finds macos11 cortex-a76 "neon neondot 1"  # without the system's feature names; every Mac has dot products
finds m1 cortex-a76 "neon neondot 2"
finds m2 max,sve=off,sme=off "neon neondot i8mm 1"

run=$tests/tests/cpp
kernels() { # kernels MAC CPU ISA FAMILY
  echo "== $1: kernels for $3, $4"
  (export LOWBIT_TEST_ISA="$3" LOWBIT_REQUIRE_ISA="$3" LOWBIT_TEST_FAMILY="$4"
    under "$1" "$2" "$run/kernel_tests" --gtest_brief=1)
}
operators() { # operators MAC CPU FILTER
  echo "== $1: operators $3"
  under "$1" "$2" "$run/operator_tests" --gtest_brief=1 --gtest_filter="$3"
}
for family in quantize embedding attention; do kernels m1 cortex-a76 neon $family; done
kernels m1 cortex-a76 neondot linear
operators m1 cortex-a76 '-*InChunks*'
(export LOWBIT_REQUIRE_PAGE_SIZE=16384; under m1 cortex-a76 "$run/format_tests" --gtest_brief=1)
under m1 cortex-a76 "$run/packed_fuzz" 1000 1
kernels m2 max,sve=off,sme=off i8mm linear

PATH=$emulator:$PATH
finds future max,sve=off,sme256=on "neon neondot i8mm 1"  # SME2 with vectors of another length
finds m4 max,sve=off,sme512=on "neon neondot i8mm sme2 3"
kernels m4 max,sve=off,sme512=on sme2 linear
operators m4 max,sve=off,sme512=on 'Linear*:Experts*:-*InChunks*'
