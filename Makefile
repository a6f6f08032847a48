# Everything a newcomer needs: `make demo`, `make test`. All of it stays in this directory (.venv, build, demo-out).

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
VENV := .venv
BIN := $(abspath $(VENV))/bin
CMAKE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja
SOURCES := $(shell find kernels ops cmake adapters -type f) CMakeLists.txt pyproject.toml

# The Arm CPUs that the cross-built tests are emulated on, each with the ISAs that must be covered there.
ARM_CPUS := cortex-a53:neon cortex-a76:neon,neondot max,sve=off:neon,neondot,i8mm

.PHONY: demo test test-x86 test-arm test-kleidiai test-python bench arm-cost clean

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

# The KleidiAI adapter with the KleidiAI in torch's Arm wheel: one emulated CPU for each of its kernels. ARM_ROOT is a
# Debian for 64-bit Arm with that wheel.
ARM_ROOT ?= build/arm-python/root
ARM_TORCH = $(abspath $(ARM_ROOT))/usr/lib/python3/dist-packages/torch
test-kleidiai: $(VENV)/requirements $(ARM_PYTHON)
	scripts/need.sh test
	$(CMAKE) -S . -B build/test-arm -DLOWBIT_BUILD_TESTS=ON \
	  -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux-gnu.cmake) -DLOWBIT_KLEIDIAI_DIR=$(ARM_TORCH)/include \
	  -DLOWBIT_KLEIDIAI_LIBRARY=$(ARM_TORCH)/lib/libtorch_cpu.so -DLOWBIT_KLEIDIAI_SYSROOT=$(abspath $(ARM_ROOT))
	$(BIN)/cmake --build build/test-arm -j $(JOBS) --target kleidiai_tests lowbit_kleidiai
	set -e; for cpu in cortex-a76 max,sve=off; do \
	  QEMU_CPU=$$cpu $(BIN)/ctest --test-dir build/test-arm -R kleidiai --output-on-failure --no-tests=error; \
	done

test-python: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/python

# Every kernel that this CPU runs, beside the read bandwidth of this machine.
bench: $(VENV)/requirements
	scripts/need.sh bench
	$(CMAKE) -S . -B build/bench -DLOWBIT_BUILD_BENCH=ON
	$(BIN)/cmake --build build/bench -j $(JOBS)
	build/bench/bench/kernels_bench $(BENCH)

# Counts the instructions of the Arm kernels: docs/arm_cost.md.
arm-cost: $(VENV)/requirements
	scripts/need.sh test
	$(BIN)/python bench/arm_cost.py

clean:
	rm -rf $(VENV) build dist demo-out
