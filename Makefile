# Everything a newcomer needs: `make demo`, `make test`. All of it stays in this directory (.venv, build, demo-out).

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
VENV := .venv
BIN := $(abspath $(VENV))/bin
CMAKE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja
SOURCES := $(shell find kernels ops cmake -type f) CMakeLists.txt pyproject.toml

# The Arm CPUs that the cross-built tests are emulated on, each with the ISAs that must be covered there.
ARM_CPUS := cortex-a53:neon a64fx:neon cortex-a76:neon,neondot max,sve=off:neon,neondot,i8mm

.PHONY: demo test test-x86 test-arm test-sanitize test-python bench bench-arm arm-cost clean

demo: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(BIN)/python examples/minilm/demo.py --output demo-out

test: test-x86 test-arm test-sanitize test-python

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

# The C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer.
test-sanitize: $(VENV)/requirements
	scripts/need.sh test
	$(CMAKE) -S . -B build/test-sanitize -DLOWBIT_BUILD_TESTS=ON -DLOWBIT_SANITIZE=address,undefined
	$(BIN)/cmake --build build/test-sanitize -j $(JOBS)
	$(BIN)/ctest --test-dir build/test-sanitize -j $(JOBS) --output-on-failure --no-tests=error

test-python: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/python

# Every kernel that this CPU runs, beside the read bandwidth of this machine.
bench: $(VENV)/requirements
	scripts/need.sh bench
	$(CMAKE) -S . -B build/bench -DLOWBIT_BUILD_BENCH=ON
	$(BIN)/cmake --build build/bench -j $(JOBS)
	build/bench/bench/kernels_bench $(BENCH)

# The same benchmarks as one file for a 64-bit Arm Linux machine: copy it there and run it. QEMU shows that it runs.
bench-arm: build/benchmark/source $(VENV)/requirements
	scripts/need.sh test
	$(CMAKE) -S . -B build/bench-arm -DLOWBIT_BUILD_BENCH=ON -DLOWBIT_BENCHMARK_DIR=$(abspath build/benchmark/source) \
	  -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux-gnu.cmake)
	$(BIN)/cmake --build build/bench-arm -j $(JOBS) --target kernels_bench
	qemu-aarch64 build/bench-arm/bench/kernels_bench --benchmark_filter=quantize_neon/f32 --benchmark_min_time=0.001
	@echo "Emulated: the time above means nothing. For Arm hardware: build/bench-arm/bench/kernels_bench"

build/benchmark/source:
	scripts/benchmark_sources.sh build/benchmark

# What the Arm kernels cost, in instructions, in modelled cycles and in projected tokens per second: docs/arm_cost.md.
arm-cost: $(VENV)/requirements $(ARM_PYTHON)
	scripts/need.sh arm-cost
	$(BIN)/python bench/arm_cost.py

clean:
	rm -rf $(VENV) build dist demo-out
