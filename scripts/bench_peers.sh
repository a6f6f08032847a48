#!/bin/sh
# Installs the peers of `make bench` and `make bench-llm` from PyPI into a virtual environment: onnxruntime as a wheel, and
# llama.cpp built for this CPU from the sources in llama-cpp-python, with that package's Python part.
#   scripts/bench_peers.sh BIN      BIN: the bin directory of the virtual environment, with cmake and ninja
set -eu

bin=$1
venv=$(dirname "$bin")
"$bin/python" -m pip install -q -r bench/requirements-peers.txt

llama=llama-cpp-python==0.3.36
made="$llama with libllama and scripts/amx_intrinsics.h"
[ "$(cat "$venv/ggml/version" 2>/dev/null)" = "$made" ] && exit 0
work=build/bench-peers
rm -rf "$work"
mkdir -p "$work"
# Without build isolation: pip needs scikit-build-core for the metadata, and it is already installed.
"$bin/python" -m pip download -q --no-deps --no-build-isolation --no-binary llama-cpp-python -d "$work" "$llama"
tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work" --strip-components=1
# Hides its warnings: GCC 12 prints 14,000 lines of them, about its own headers.
flags=-w
# ggml's AMX code needs this with GCC; on a CPU without AMX it is not compiled.
[ "$(uname -m)" = x86_64 ] && flags="$flags -include $PWD/scripts/amx_intrinsics.h"
# The libraries find each other in their own directory.
"$bin/cmake" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -S "$work/vendor/llama.cpp" -B "$work/ggml" \
  -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DCMAKE_C_FLAGS=-w -DCMAKE_CXX_FLAGS="$flags" \
  -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF \
  -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF >"$work/configure.log"
nice "$bin/cmake" --build "$work/ggml" --target llama
if command -v objdump >/dev/null; then
  for library in "$work"/ggml/bin/libggml-cpu.so; do
    objdump -d --no-show-raw-insn "$library" | "$bin/python" scripts/check_tile_config.py "$library"
  done
fi
CMAKE_ARGS=-DLLAMA_BUILD=OFF "$bin/python" -m pip install -q --no-build-isolation "$work"/llama_cpp_python-*.tar.gz
rm -rf "$venv/ggml"
mkdir "$venv/ggml"
cp -P "$work"/ggml/bin/libggml* "$work"/ggml/bin/libllama.* "$venv/ggml/"
find='from importlib.util import find_spec; print(find_spec("llama_cpp").submodule_search_locations[0])'
package=$("$bin/python" -c "$find")
rm -rf "$package/lib"
ln -s "$(cd "$venv/ggml" && pwd)" "$package/lib" # the package looks for its libraries there
echo "$made" >"$venv/ggml/version"
