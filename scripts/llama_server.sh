#!/bin/sh
# Builds llama.cpp's server from the sources of `make bench-peers`, for `bench/serving.py --http`.
#   scripts/llama_server.sh BIN      BIN: the bin directory of the virtual environment that make bench-peers filled
set -eu

bin=$1
target=$(dirname "$bin")/ggml
work=build/bench-peers
if [ ! -f "$work/ggml/CMakeCache.txt" ]; then
  echo "$0: $work has no build of llama.cpp; run make bench-peers first" >&2
  exit 1
fi
# Without its web page, which would be downloaded, and without HTTPS.
"$bin/cmake" -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_APP=OFF \
  -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF "$work/ggml" >"$work/configure-server.log"
nice "$bin/cmake" --build "$work/ggml" --target llama-server
cp -P "$work"/ggml/bin/lib*.so* "$work/ggml/bin/llama-server" "$target/"
