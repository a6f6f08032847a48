# Everything a newcomer needs: `make demo`, `make test`. All of it stays in this directory (.venv, build, demo-out).

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
VENV := .venv
BIN := $(abspath $(VENV))/bin
CMAKE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja
SOURCES := $(shell find kernels ops cmake -type f) CMakeLists.txt pyproject.toml

# The Arm CPUs that the cross-built tests are emulated on, each with the ISAs that must be covered there.
ARM_CPUS := cortex-a53:neon cortex-a76:neon,neondot max,sve=off:neon,neondot,i8mm

# Where executorch and lowbit for Arm lie as in an Arm machine's site-packages.
ARM_SITE := build/arm-site

.PHONY: demo test test-x86 test-arm test-arm-runner test-python bench arm-cost clean

demo: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(BIN)/python examples/minilm/demo.py --output demo-out

test: test-x86 test-arm test-arm-runner test-python

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

# examples/cpp for Arm: what a .pte computes there, under QEMU, beside PyTorch here.
test-arm-runner: $(VENV)/installed $(ARM_SITE)/executorch.stamp
	scripts/need.sh test
	$(CMAKE) -S . -B build/test-arm -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux-gnu.cmake) \
	  -DLOWBIT_BUILD_EXECUTORCH=ON -DLOWBIT_EXECUTORCH_DIR=$(abspath $(ARM_SITE)/executorch)
	$(BIN)/cmake --build build/test-arm -j $(JOBS) --target lowbit lowbit_executorch
	$(BIN)/cmake --install build/test-arm --prefix $(ARM_SITE)/lowbit
	$(CMAKE) -S examples/cpp -B build/arm-runner -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux-gnu.cmake) \
	  -DPT2_RUNNER=OFF -Dlowbit_DIR=$(abspath $(ARM_SITE)/lowbit/lib/cmake/lowbit) \
	  -Dexecutorch_DIR=$(abspath $(ARM_SITE)/executorch/lib/cmake/executorch)
	$(BIN)/cmake --build build/arm-runner -j $(JOBS)
	HF_HUB_OFFLINE=1 LOWBIT_TEST_ARM_RUNNER=$(abspath build/arm-runner/pte_runner) \
	  $(BIN)/python -m pytest tests/python/test_cpp_runners.py

# The wheel for Arm has ExecuTorch's C++ runtime, which is the same for every version of Python.
$(ARM_SITE)/executorch.stamp: requirements.txt | $(VENV)/requirements
	rm -rf $(ARM_SITE) build/arm-wheel
	$(BIN)/python -m pip download -q --no-deps --only-binary=:all: -d build/arm-wheel --platform manylinux_2_28_aarch64 \
	  --implementation cp --python-version 311 --abi cp311 $$(sed -n 's/^\(executorch==[0-9.]*\).*/\1/p' requirements.txt)
	$(BIN)/python -m zipfile -e build/arm-wheel/executorch-*.whl $(ARM_SITE)
	touch $@

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
