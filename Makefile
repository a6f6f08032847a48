# `make help` lists the common targets. The others are in make/*.mk, C++ builds in CMakePresets.json, emulated CPUs in
# scripts/emulated.sh. Everything stays in this directory: .venv, build, dist, demo-out.

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
VENV := .venv
BIN := $(abspath $(VENV))/bin
CMAKE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja
SOURCES := $(shell find kernels ops plan runner cmake adapters -type f) CMakeLists.txt pyproject.toml
PYTHON_SOURCES := $(shell find python -type f -not -path '*/__pycache__/*')

# With ccache (scripts/need.sh test), compiling the same file with the same flags again costs nothing.
CCACHE = $$(command -v ccache || true)
export CCACHE_BASEDIR ?= $(CURDIR)
CONFIGURE = $(CMAKE) -DCMAKE_CXX_COMPILER_LAUNCHER=$(CCACHE) $(if $(GTEST_DIR),-DLOWBIT_GTEST_DIR=$(abspath $(GTEST_DIR)))
# Use the compiler's name as CMake finds it, because ccache treats another name as another compiler.
INSTALL_ENVIRONMENT = CXX=$${CXX:-c++} CMAKE_CXX_COMPILER_LAUNCHER=$(CCACHE)
INSTALL = $(INSTALL_ENVIRONMENT) $(BIN)/python -m pip
CTEST := $(BIN)/ctest -j $(JOBS) --output-on-failure --no-tests=error

# $(call preset,NAME) configures and builds a preset. $(call preset,NAME,OPTIONS) gives the configuration further options.
define preset
	$(CONFIGURE) --preset $(1) $(2)
	$(BIN)/cmake --build --preset $(1) -j $(JOBS)
endef

# pip would compile 20 000 Python files, most of which are never imported (hence --no-compile below). Python compiles files when
# they are imported and must keep the result, because the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

# Test files run in parallel, because most tests use one thread and fixtures are made once per file.
# Waiting threads of torch would spin and take the CPU from the other test processes.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 10

.DEFAULT_GOAL := help
include make/emulated.mk make/systems.mk make/sanitize.mk make/others.mk make/bench.mk
# Every target that is not a file: those whose names have no slash and no dot.
.PHONY: $(shell sed -nE 's/^([a-z][a-z0-9 -]*):( .*)?$$/\1/p' $(MAKEFILE_LIST))

help: ## prints these lines
	@awk -F ':.* ## ' '/^[a-z-]+[0-9]*:.* ## / {printf "%-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'All others, by topic: CONTRIBUTING.md and make/*.mk. Builds of C++ alone: cmake --list-presets'

demo: $(VENV)/installed ## installs lowbit in .venv, quantizes a model, compares its speed and results with torch
	HF_HUB_OFFLINE=1 $(BIN)/python examples/minilm/demo.py --output demo-out

# The tests that every change needs, which .ci/run runs: this machine's, in minutes, and Arm on one emulated CPU. Parts run one
# after the other, each on all cores; `make -j 2 --output-sync test` runs two at a time, so that no core waits for the last test
# of a part (.ci/run).
test: lint typecheck test-x86 test-python test-arm test-arm-python ## tests for every change: this machine, one emulated Arm CPU

# `test` and the rest: tests that take long, every emulated CPU, the sanitizers.
test-all: test ## everything that .github/workflows/tests.yml runs on Linux, an hour or more
	$(MAKE) --no-print-directory test-more

# The longest parts come first, so that no core waits for them at the end.
TEST_MORE = test-python-more test-sanitize test-tsan $(X86_MORE) test-x86-without-avx test-vllm test-macos-build \
  test-arm-clang test-arm-cpus test-arm-sme2 test-arm-python-cpus test-arm-python-sme2 test-kleidiai docs
# The emulated CPUs run programs built for this machine.
ifeq ($(shell uname -m),x86_64)
X86_MORE := $(X86_RUNS)
endif
# The runners for Arm are tested with the exported files of this machine's, because exporting takes longest. Shared
# prerequisites are built first and not again (-o), because make starts targets that must wait after all others.
BUILT := build-test-host build-test-arm arm-python-results
test-more: build-arm-runner $(BUILT)
	LOWBIT_TEST_ARM_RUNNERS=$(ARM_RUNNER) $(MAKE) --no-print-directory $(BUILT:%=-o %) $(TEST_MORE)

# Targets that compile C++ come first: .ci/run builds them while pip installs the rest.
$(VENV)/cmake: requirements.txt
	PYTHON=$(PYTHON) scripts/need.sh build
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $$(grep -E '^(cmake|ninja)==' requirements.txt)
	touch $@

$(VENV)/requirements: requirements.txt $(VENV)/cmake
	$(BIN)/python -m pip install -q --no-compile -r requirements.txt
	touch $@

$(VENV)/installed: $(VENV)/requirements $(SOURCES)
	$(INSTALL_ENVIRONMENT) $(BIN)/python scripts/build_progress.py build/install.log \
	  $(BIN)/python -m pip install -v --no-build-isolation --no-deps -e .
	touch $@

# Downloads and setup for the tests. `make test` needs only the first, which `.ci/run` does while the kernels compile.
fetch-first: $(VENV)/requirements $(ARM_PYTHON)
fetch: fetch-first build/x86-emulator build/arm-emulator build/docs-env vllm-environment $(MACOS)/libc++.tbd

build-test-host: $(VENV)/cmake
	scripts/need.sh test
	$(call preset,host)

test-x86: build-test-host ## C++ tests on this machine, whatever its architecture
	$(CTEST) --preset host

# The markers are in pyproject.toml. `more` marks tests that take long.
test-python: $(VENV)/installed ## Python tests, without those that take long: test-python-more
	scripts/need.sh test
	HF_HUB_OFFLINE=1 $(PYTEST) -m 'not more'

test-python-more: $(VENV)/installed
	scripts/need.sh test
	scripts/need.sh rust
	HF_HUB_OFFLINE=1 $(PYTEST) -m more

# Format and lint of all Python, by ruff (`make format` fixes what it can), and duplicated blocks. Takes seconds.
lint: $(VENV)/requirements ## checks the format and style of all Python, and for duplicated blocks of code; seconds
	$(BIN)/ruff format --check --diff .
	$(BIN)/ruff check .
	$(BIN)/python tests/structure/check_duplicates.py .

format: $(VENV)/requirements ## formats all Python, and corrects what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(VENV)/requirements ## checks the types of the package, by mypy; seconds
	$(BIN)/python -m mypy --cache-dir build/mypy

docs: $(VENV)/installed build/docs-env ## builds the site in build/site, checks links, opens pages in a browser
	scripts/need.sh test
	NO_MKDOCS_2_WARNING=1 build/docs-env/bin/mkdocs build --quiet
	PYTHONPATH=tests/python/support $(PYTEST) tests/docs

build/docs-env: docs/requirements.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install -q --no-compile -r docs/requirements.txt
	touch $@

# Coverage of C++ lines and of Python lines and branches by this machine's tests: prints totals and the worst files, writes
# details to build/coverage.
coverage: $(VENV)/installed ## lines that the tests of this machine run: totals, worst files, build/coverage
	scripts/need.sh test
	JOBS=$(JOBS) HF_HUB_OFFLINE=1 scripts/coverage.sh $(BIN) build/coverage

clean: ## removes .venv and everything that was built
	rm -rf $(VENV) build dist demo-out
