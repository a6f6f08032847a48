# Emulated CPUs: scripts/emulated.sh has the table of CPUs and their tests.
EMULATED = CTEST='$(CTEST)' scripts/emulated.sh

ARM_RUNNER := $(abspath build/arm-runner)
ARM_PYTHON := build/arm-python/bin/python
ARM_PYTHON_USR := $(abspath build/arm-python/root/usr)
ARM_PYTHON_PACKAGES := $(ARM_PYTHON_USR)/lib/python3/dist-packages

# x86: kernels and operators on CPUs other than this machine's.
X86_RUNS := $(shell sed -n 's/^\(emulated\/[a-z0-9]*\) .*/\1/p' scripts/emulated.sh)
test-emulated-x86:
	$(MAKE) --no-print-directory -j $(JOBS) --output-sync $(X86_RUNS)

.PHONY: $(X86_RUNS)
$(X86_RUNS): build-test-host build/x86-emulator
	@$(EMULATED) $@

# An x86-64 CPU without AVX, which runs the portable kernels: half a minute.
test-x86-without-avx: build-test-host
	set -e; [ "$$(uname -m)" = x86_64 ] || exit 0; old="env QEMU_CPU=qemu64 qemu-x86_64 build/test-host/tests/cpp"; \
	$$old/format_tests --gtest_brief=1; $$old/isa_cap_tests --gtest_brief=1; $$old/packed_fuzz 1000 1; \
	$$old/operator_tests --gtest_brief=1 --gtest_filter='Embedding*:Pack*:Splice*:Linear*:-*InChunks*'; \
	LOWBIT_TEST_ISA=portable LOWBIT_TEST_FAMILY=embedding $$old/kernel_tests --gtest_brief=1

# Tests of Clang's code, which macOS, iOS and Android use. `make soak` tests Clang 16, the oldest that lowbit supports, on both
# processors, and CI tests Clang 19 on Arm. Clang 19 on x86 is a separate job in .github/workflows/tests.yml, because it takes
# as long again.
CLANG := 19
test-x86-clang: $(VENV)/cmake
	scripts/need.sh test
	scripts/need.sh clang $(CLANG)
	$(call preset,x86-clang-$(CLANG))
	$(CTEST) --preset x86-clang-$(CLANG)

test-arm-clang: $(VENV)/cmake build/arm-emulator
	scripts/need.sh test
	scripts/need.sh clang $(CLANG)
	$(call preset,arm-clang-$(CLANG))
	$(EMULATED) $@ build/test-arm-clang-$(CLANG)

# C++ for Arm, cross-built and run by QEMU. The first target emulates a CPU with every ISA. The second tests on other CPUs that
# their kernels are found and chosen. The third tests SME2 with vectors of each length.
build-test-arm: $(VENV)/cmake
	scripts/need.sh test
	$(call preset,arm)

test-arm test-arm-cpus: build-test-arm
	$(EMULATED) $@

test-arm-sme2: build-test-arm build/arm-emulator
	$(EMULATED) $@

build/x86-emulator: scripts/x86_emulator.sh | $(VENV)/requirements
	scripts/need.sh test
	JOBS=$(JOBS) scripts/x86_emulator.sh $@

build/arm-emulator: scripts/arm_emulator.sh | $(VENV)/requirements
	scripts/need.sh test
	scripts/arm_emulator.sh $@

# The KleidiAI adapter with the KleidiAI in torch's Arm wheel: one emulated CPU for each of its kernels.
test-kleidiai: $(VENV)/requirements $(ARM_PYTHON)
	scripts/need.sh test
	$(call preset,kleidiai)
	$(EMULATED) $@ build/test-kleidiai

# Python 3.11 with torch for 64-bit Arm, under QEMU: use $(ARM_PYTHON) like any python.
$(ARM_PYTHON): scripts/arm_python.sh scripts/arm_python.txt | $(VENV)/requirements
	scripts/need.sh test
	PYTHON=$(BIN)/python scripts/arm_python.sh build/arm-python

# The wheel for users, installed with torch and executorch.
arm-python-lowbit: build/arm-python/lowbit
build/arm-python/lowbit: $(SOURCES) $(PYTHON_SOURCES) $(ARM_PYTHON) $(VENV)/requirements
	$(MAKE) --no-print-directory wheel-aarch64
	$(BIN)/python -m pip install -q --root-user-action=ignore --no-deps --no-compile --no-index --upgrade \
	  --platform linux_aarch64 --python-version 311 --implementation cp --abi cp311 --only-binary=:all: \
	  --target $(ARM_PYTHON_PACKAGES) build/wheel-aarch64/*.whl
	touch $@

# Its results in Python, compared with those of this machine.
arm-python-results: $(VENV)/installed
	$(BIN)/python tests/arm_python/same_bits.py write build/arm-python-results.pt

test-arm-python test-arm-python-cpus: arm-python-lowbit arm-python-results
	$(EMULATED) $@

test-arm-python-sme2: arm-python-lowbit arm-python-results build/arm-emulator
	$(EMULATED) $@

# examples/cpp for Arm, built with that wheel: compares a .pte under QEMU with PyTorch on this machine.
build-arm-runner: $(VENV)/installed arm-python-lowbit
	$(CONFIGURE) -S examples/cpp -B $(ARM_RUNNER) -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux-gnu.cmake) \
	  -DPT2_RUNNER=OFF -Dlowbit_DIR=$(ARM_PYTHON_PACKAGES)/lowbit/lib/cmake/lowbit \
	  -Dexecutorch_DIR=$(ARM_PYTHON_PACKAGES)/executorch/lib/cmake/executorch
	$(BIN)/cmake --build $(ARM_RUNNER) -j $(JOBS)

test-arm-runner: build-arm-runner
	HF_HUB_OFFLINE=1 LOWBIT_TEST_ARM_RUNNERS=$(ARM_RUNNER) \
	  $(PYTEST) tests/python/exports/test_cpp_runners.py tests/python/exports/test_llm_export.py \
	  tests/python/exports/test_pte_delegate.py
