#!/bin/sh
# Tests scripts/amx_intrinsics.h with ggml's AMX code on an emulated Sapphire Rapids. Builds ggml from the sources of `make
# bench-peers` without and with the header, and multiplies a matrix. Without the header the program should end by a signal, with
# it successfully.
#   make bench-peers build/x86-emulator
#   scripts/ggml_amx.sh BIN [SOURCES]      BIN: the bin directory of a virtual environment with cmake and ninja
set -eu

bin=$(cd "$1" && pwd)
sources=${2:-build/bench-peers}/vendor/llama.cpp
work=build/ggml-amx
for kind in asis mended; do
  flags=-w
  [ $kind = mended ] && flags="$flags -include $PWD/scripts/amx_intrinsics.h"
  "$bin/cmake" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -S "$sources" -B "$work/$kind" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_C_FLAGS=-w -DCMAKE_CXX_FLAGS="$flags" -DBUILD_SHARED_LIBS=OFF -DGGML_OPENMP=OFF -DGGML_NATIVE=OFF \
    -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON \
    -DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF >"$work-$kind.log"
  nice "$bin/cmake" --build "$work/$kind" --target ggml
  libraries=$work/$kind/ggml/src
  c++ -O2 -w -static -I "$sources/ggml/include" scripts/ggml_amx.cpp -o "$work/$kind/ggml_amx" -Wl,--start-group \
    "$libraries/libggml.a" "$libraries/libggml-cpu.a" "$libraries/libggml-base.a" -Wl,--end-group -lpthread -lm 2>&1 |
    grep -v dlopen || true
done
status=0
for kind in asis mended; do
  echo "== $kind"
  scripts/emulate_x86.sh sapphire_rapids "$work/$kind/ggml_amx" && ended=0 || ended=$?
  echo "exit status $ended"
  case $kind in asis) [ $ended -gt 128 ] || status=1 ;; mended) [ $ended = 0 ] || status=1 ;; esac
done
exit $status
