#!/bin/sh
# Runs the tests that depend on transformers, safetensors, typer and rich with the oldest versions that pyproject.toml allows.
# Everything else, such as torch, comes from the virtual environment whose bin directory is BIN.
#   scripts/test_versions.sh BIN DIRECTORY [JOBS]     DIRECTORY: the second environment
set -eu

bin=$1
directory=$2
jobs=${3:-2}
oldest=$("$bin/python" -c '
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for requirement in project["optional-dependencies"]["llm"]:
    name, version = re.match(r"([a-z0-9_-]+)>=([0-9.]+)", requirement).groups()
    print(f"{name}=={version}")')

if [ "$(cat "$directory/made" 2>/dev/null)" != "$oldest" ]; then
  rm -rf "$directory"
  "$bin/python" -m venv "$directory"
  # shellcheck disable=SC2086 (one word per requirement)
  "$directory/bin/python" -m pip install -q $oldest
  # The first environment's packages come after its own. addsitedir also follows the links of lowbit's editable install.
  packages='import sysconfig; print(sysconfig.get_path("purelib"))'
  echo "import site; site.addsitedir('$("$bin/python" -c "$packages")')" \
    >"$("$directory/bin/python" -c "$packages")/first.pth"
  printf '#!/bin/sh\nexec "$(dirname "$0")/python" -c "import sys; from lowbit.cli import main; sys.exit(main())" "$@"\n' \
    >"$directory/bin/lowbit"
  chmod +x "$directory/bin/lowbit"
  echo "$oldest" >"$directory/made"
fi
echo "== the oldest versions:" $oldest
"$directory/bin/python" -m pytest -n "$jobs" --dist loadfile --durations 5 \
  tests/python/checkpoint/test_checkpoint*.py tests/python/layers/test_conv1d.py tests/python/hf/test_transformers*.py \
  tests/python/llm/test_llm.py tests/python/llm/test_decoder_release.py tests/python/llm/test_chat.py \
  tests/python/llm/test_fallback.py \
  tests/python/cli/test_cli_quantize.py tests/python/cli/test_cli_generate.py tests/python/cli/test_cli_errors.py
