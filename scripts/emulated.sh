#!/usr/bin/env bash
# Runs tests on emulated CPUs: the rows of the table whose first word is RUN, until one fails.
#   scripts/emulated.sh RUN [BUILD]     BUILD: the build directory of the C++ tests (build/test-arm)
# To add a CPU, add a row:
#   run     a target of the Makefile; "phones" is test-android-like and test-android
#   CPU     QEMU's name of it, Bochs's in rows of emulated/
#   covers  ISAs that must be found, "-" if the tests require none
#   tests   variables NAME=VALUE, then options of ctest; a word with @ is defined below the table. QEMU=new selects the QEMU of
#           build/arm-emulator. In rows of emulated/, FLAG is Linux's name of the ISA: a CPU with it runs the tests directly
# SVE is switched off, because it is slow in QEMU and lowbit has no kernels for it.
set -euo pipefail
set -f  # the patterns in the table are for ctest
cd "$(dirname "$0")/.."

table='
# run                 CPU                    covers             tests
test-arm              cortex-a53             neon               -R @LONG
test-arm              max,sve=off            neon,neondot,i8mm  -LE soak -E @LONG
test-arm              max                    -                  -R ^isa_cap[.](none|bf16|sve2)$
test-arm              cortex-a76             -                  QEMU_PAGESIZE=65536 -R @PAGES

test-arm-cpus         cortex-a53             neon               -L cpu -E @LONG
test-arm-cpus         a64fx                  neon               -L cpu -E @LONG
test-arm-cpus         cortex-a76             neon,neondot       -L cpu -E @LONG

test-arm-sme2         max,sve=off,sme512=on  -                  QEMU=new -R ^operators[.]sme2$
test-arm-sme2         max,sve=off,sme512=on  sme2               QEMU=new -R ^(kernels|isa_cap)[.]sme
test-arm-sme2         max,sme-default-vector-length=32 sme2               QEMU=new -R ^(kernels|isa_cap)[.]sme
test-arm-sme2         max,sve=off,sme128=on  i8mm               QEMU=new -R ^isa_cap[.](sme2|none)$
test-arm-sme2         max,sve=off,sme256=on  i8mm               QEMU=new -R ^isa_cap[.](sme2|none)$

test-arm-clang        cortex-a53             neon               -R ^(isa_cap|fuzz|kernels[.]neon)[.]
test-arm-clang        cortex-a76             neon               -R ^(isa_cap[.]|fuzz[.]|@SMALL$)
test-arm-clang        max,sve=off,sme=off    neondot,i8mm       -R ^(isa_cap|kernels[.](neondot|i8mm))[.]
test-arm-clang        max,sve=off,sme512=on  sme2               QEMU=new -R ^(isa_cap|kernels[.]sme2)[.]

test-kleidiai         cortex-a76             -                  -R kleidiai
test-kleidiai         max,sve=off            -                  -R kleidiai

phones                cortex-a53             neon               @PHONE -R @PAGES
phones                cortex-a76             neondot            @PHONE -R ^(format|plan|kernels.neondot..*|operators.neondot)$
phones                cortex-a710            i8mm               QEMU=new -R ^kernels[.]i8mm[.]linear$

soak                  max,sve=off            neon,neondot,i8mm  -L soak|cpu
soak                  cortex-a53             neon
soak                  a64fx                  neon
soak                  cortex-a76             neon,neondot

test-arm-python       max,sve=off            neon,neondot,i8mm,bf16
test-arm-python-cpus  a64fx                  neon
test-arm-python-cpus  cortex-a76             neon,neondot
test-arm-python-sme2  max,sve=off,sme512=on  neon,neondot,i8mm,bf16,sme2 QEMU=new

emulated/amx          sapphire_rapids        amx                FLAG=amx_int8 kernels operators
emulated/avxvnni      arrow_lake             avxvnni            FLAG=avx_vnni kernels operators
emulated/avxvnniint8  arrow_lake             avxvnniint8        FLAG=avx_vnni_int8 kernels operators
emulated/avx512vnni   sapphire_rapids        avx512vnni         FLAG=avx512_vnni kernels
'
# The slowest tests of the NEON kernels run only on the CPU without other ISAs.
table=${table//@LONG/'^kernels[.]neon[.](linear|attention)$'}
table=${table//@PAGES/'^(format|fuzz[.]packed|@SMALL)$'}  # each buffer is between inaccessible pages
table=${table//@SMALL/'kernels[.]neon[.](quantize|embedding)'}
table=${table//@PHONE/'QEMU_PAGESIZE=16384 LOWBIT_REQUIRE_PAGE_SIZE=16384'}

# On x86 QEMU has neither AVX-512 nor AMX, so Bochs runs the programs of build/test-host. Tests of many chunks take minutes
# there and test code that all ISAs share, so only `make soak` runs them.
on_x86() { # CPU ISA FLAG=... kernels [operators]
  local cpu=$1 isa=$2 flag=${3#FLAG=} tests="${*:4}" directory=build/test-host/tests/cpp
  local kernels="LOWBIT_TEST_ISA=$isa LOWBIT_REQUIRE_ISA=$isa $directory/kernel_tests --gtest_brief=1"
  local operators="LOWBIT_ISA=$isa $directory/operator_tests --gtest_brief=1 --gtest_filter=${X86_OPERATORS:--*InChunks}"
  local caps="LOWBIT_ISA=$isa $directory/isa_cap_tests --gtest_brief=1"
  # shellcheck disable=SC2086 (words)
  if grep -qw "$flag" /proc/cpuinfo; then
    echo "== x86, on this machine, $isa: $tests"
    env $kernels
    if [ "$tests" != kernels ]; then env $operators; env $caps; fi
  elif [ "$tests" = kernels ]; then
    echo "== x86, emulated $cpu, $isa: $tests"
    scripts/emulate_x86.sh "$cpu" $kernels
  else
    echo "== x86, emulated $cpu, $isa: $tests"
    scripts/emulate_x86.sh "$cpu" $kernels --and $operators --and $caps
  fi
}

on_arm() { # RUN CPU ISAS [NAME=VALUE...] [OPTION OF CTEST...]
  local run=$1 cpu=$2 isas=$3 settings=("QEMU_CPU=$2")
  shift 3
  while [[ ${1:-} =~ ^[A-Z_]+= ]]; do
    settings+=("${1/#QEMU=new/PATH=$PWD/build/arm-emulator:$PATH}")
    shift
  done
  if [[ $run = test-arm-python* ]]; then
    echo "== Python on aarch64, emulated $cpu, must use $isas"
    env "${settings[@]}" build/arm-python/bin/python -W ignore tests/arm_python/same_bits.py check \
      build/arm-python-results.pt --isa "$isas"
  else
    echo "== aarch64, emulated $cpu, must cover $isas"
    [ "$isas" = - ] || settings+=("LOWBIT_REQUIRE_ISA=$isas")
    # shellcheck disable=SC2086 (a program and its options)
    env "${settings[@]}" ${CTEST:-ctest --output-on-failure --no-tests=error} --test-dir "$build" "$@"
  fi
}

run=${1:?usage: scripts/emulated.sh RUN [BUILD]}
build=${2:-build/test-arm}
rows=$(grep "^$run " <<<"$table") || { echo "there is no run '$run' in the table of scripts/emulated.sh" >&2; exit 1; }
mapfile -t rows <<<"$rows"  # not by a descriptor of a loop: make's jobserver has number 3 in MAKEFLAGS, and ctest would read it
for row in "${rows[@]}"; do
  read -r name cpu isas tests <<<"$row"
  # shellcheck disable=SC2086 (words)
  case $name in
    emulated/*) on_x86 "$cpu" "$isas" $tests ;;
    *) on_arm "$name" "$cpu" "$isas" $tests ;;
  esac
done
