# Everything a newcomer needs: `make demo`, `make test`. All of it stays in this directory (.venv, build, demo-out).

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
VENV := .venv
BIN := $(abspath $(VENV))/bin
CMAKE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja
SOURCES := $(shell find kernels ops cmake -type f) CMakeLists.txt pyproject.toml

# The Arm CPUs that the cross-built tests are emulated on, each with the ISAs that must be covered there.
ARM_CPUS := cortex-a53:neon cortex-a76:neon,neondot max,sve=off:neon,neondot,i8mm

.PHONY: demo test test-x86 test-arm test-python bench bench-doc bench-peers bench-kernels arm-cost clean

demo: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(BIN)/python examples/minilm/demo.py --output demo-out

test: test-x86 test-arm test-python

$(VENV)/requirements: requirements.txt
	PYTHON=$(PYTHON) scripts/need.sh build
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements.txt
	touch $@

$(VENV)/installed: $(VENV)/requirements $(SOURCES)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	touch $@

test-x86: $(VENV)/requirements
	scripts/need.sh test
	$(CMAKE) -S . -B build/test-host -DLOWBIT_BUILD_TESTS=ON
	$(BIN)/cmake --build build/test-host -j $(JOBS)
	$(BIN)/ctest --test-dir build/test-host -j $(JOBS) --output-on-failure --no-tests=error

test-arm: $(VENV)/requirements
	scripts/need.sh test
	$(CMAKE) -S . -B build/test-arm -DLOWBIT_BUILD_TESTS=ON \
	  -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux-gnu.cmake)
	$(BIN)/cmake --build build/test-arm -j $(JOBS)
	set -e; for cpu in $(ARM_CPUS); do \
	  echo "== aarch64, emulated $${cpu%%:*}, must cover $${cpu##*:}"; \
	  QEMU_CPU=$${cpu%%:*} LOWBIT_REQUIRE_ISA=$${cpu##*:} \
	    $(BIN)/ctest --test-dir build/test-arm -j $(JOBS) --output-on-failure --no-tests=error; \
	done

test-python: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/python

# lowbit beside torch, and beside onnxruntime and llama.cpp's ggml after `make bench-peers`, with this machine's roofs.
COMPARE = $(BIN)/python bench/compare.py --roofs build/bench/bench/roofs
bench: $(VENV)/installed
	$(call build-bench,roofs)
	$(COMPARE) $(BENCH)

# The same, written to docs/bench.md, docs/bench.json and docs/bench.png.
bench-doc: $(VENV)/installed
	$(call build-bench,roofs)
	$(COMPARE) --output docs/bench $(BENCH)

bench-peers: $(VENV)/requirements
	scripts/bench_peers.sh $(BIN)

# Every kernel that this CPU runs, beside the read bandwidth of this machine.
bench-kernels: $(VENV)/requirements
	$(call build-bench,kernels_bench)
	build/bench/bench/kernels_bench $(BENCH)

define build-bench
	scripts/need.sh bench
	$(CMAKE) -S . -B build/bench -DLOWBIT_BUILD_BENCH=ON
	$(BIN)/cmake --build build/bench -j $(JOBS) --target $(1)
endef

# Counts the instructions of the Arm kernels: docs/arm_cost.md.
arm-cost: $(VENV)/requirements
	scripts/need.sh test
	$(BIN)/python bench/arm_cost.py

clean:
	rm -rf $(VENV) build dist demo-out
