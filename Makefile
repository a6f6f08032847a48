# `make help` lists the common targets. The others are in make/*.mk, C++ builds in CMakePresets.json, emulated CPUs in
# scripts/emulated.sh. Everything stays in this directory: .venv, build, dist, demo-out.

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
VENV := .venv
BIN := $(abspath $(VENV))/bin
CMAKE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja
SOURCES := $(shell find kernels ops cmake adapters -type f) CMakeLists.txt pyproject.toml
PYTHON_SOURCES := $(shell find python -type f -not -path '*/__pycache__/*')

# A second compilation of the same file with the same flags costs nothing where there is ccache (scripts/need.sh test).
CCACHE = $$(command -v ccache || true)
export CCACHE_BASEDIR ?= $(CURDIR)
CONFIGURE = $(CMAKE) -DCMAKE_CXX_COMPILER_LAUNCHER=$(CCACHE) $(if $(GTEST_DIR),-DLOWBIT_GTEST_DIR=$(abspath $(GTEST_DIR)))
# The compiler by the name that CMake finds it by: ccache takes another name for another compiler.
INSTALL_ENVIRONMENT = CXX=$${CXX:-c++} CMAKE_CXX_COMPILER_LAUNCHER=$(CCACHE)
INSTALL = $(INSTALL_ENVIRONMENT) $(BIN)/python -m pip
CTEST := $(BIN)/ctest -j $(JOBS) --output-on-failure --no-tests=error

# $(call preset,NAME) configures and builds a preset. $(call preset,NAME,OPTIONS) gives the configuration further options.
define preset
	$(CONFIGURE) --preset $(1) $(2)
	$(BIN)/cmake --build --preset $(1) -j $(JOBS)
endef

# pip would compile 20 000 files of Python, most of which nothing imports (--no-compile below). Python does it for those
# that are imported, and has to keep that: the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

# Whole files in parallel: most tests use one thread, and the fixtures of a file are made once.
# Threads of torch that wait would spin, and take the CPU from the other processes: as many again run at the same time.
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

# What runs on this machine in minutes, and Arm on one emulated CPU: what a change needs. One part after the other, each on all
# cores; with `make -j 2 --output-sync test` two at a time, so that no core waits for the last test of a part (.ci/run).
test: lint typecheck test-x86 test-python test-arm test-arm-python ## what a change needs: this machine, one emulated Arm CPU

# That, and the rest: whole models, every emulated CPU, the sanitizers, what needs an Arm torch.
test-all: test ## everything that CI runs on a change, half an hour or more
	$(MAKE) --no-print-directory test-more

# What takes longest comes first, so that no core waits for it at the end.
TEST_MORE = test-python-more test-sanitize $(X86_MORE) test-x86-without-avx test-vllm test-macos-build \
  test-arm-clang test-arm-cpus test-arm-sme2 test-arm-python-cpus test-arm-python-sme2 test-kleidiai docs
# The emulated CPUs run what is built for this machine.
ifeq ($(shell uname -m),x86_64)
X86_MORE := $(X86_RUNS)
endif
# The runners for Arm are tested with the files that those of this machine are: exporting these takes longest. What several
# parts need is built before (-o: and not again): make begins a part that has to wait for something after all that need not.
BUILT := build-test-host build-test-arm arm-python-results
test-more: build-arm-runner $(BUILT)
	LOWBIT_TEST_ARM_RUNNERS=$(ARM_RUNNER) $(MAKE) --no-print-directory $(BUILT:%=-o %) $(TEST_MORE)

# What compiles C++ comes first: .ci/run does that while pip installs the rest.
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

# What the tests download and set up: `.ci/run` does it beside other work. The first is what `make test` has of it.
fetch-first: $(VENV)/requirements $(ARM_PYTHON)
fetch: fetch-first build/x86-emulator build/arm-emulator build/docs-env vllm-environment $(MACOS)/libc++.tbd

build-test-host: $(VENV)/cmake
	scripts/need.sh test
	$(call preset,host)

test-x86: build-test-host ## C++ on this machine, of any architecture
	$(CTEST) --preset host

# The markers are in pyproject.toml: `more` are the files that compile, calibrate or train whole models.
test-python: $(VENV)/installed ## Python, without the files of whole models; test-python-more has these
	scripts/need.sh test
	HF_HUB_OFFLINE=1 $(PYTEST) -m 'not more'

test-python-more: $(VENV)/installed
	scripts/need.sh test
	HF_HUB_OFFLINE=1 $(PYTEST) -m more

# Format and lint of all Python, by ruff; `make format` mends what it can. Blocks that stand in two places. Seconds.
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

# Which lines the tests of this machine run, in C++ and in Python, and which branches in Python: totals and the worst files
# here, all of it in build/coverage.
coverage: $(VENV)/installed ## lines that the tests of this machine run: totals, worst files, build/coverage
	scripts/need.sh test
	JOBS=$(JOBS) HF_HUB_OFFLINE=1 scripts/coverage.sh $(BIN) build/coverage

clean: ## removes .venv and everything that was built
	rm -rf $(VENV) build dist demo-out
