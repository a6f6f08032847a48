# Wheels, and builds for other systems: docs/platforms.md.

# Cross-built with the headers of this machine's torch and the libraries of the oldest torch for Arm. The backend tags wheels
# for the running Python; the last step corrects the tags.
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

# The wheels for Linux, for manylinux_2_28: CPython 3.11 to 3.14 whose headers are available, on x86-64 and 64-bit Arm.
# WHEELS='--processors x86_64 --pythons 3.11' selects some of them.
wheels: build/wheel-tools/installed $(VENV)/requirements $(ARM_PYTHON) ## wheels for Linux (x86-64, Arm), to dist/
	scripts/need.sh test
	CMAKE_CXX_COMPILER_LAUNCHER=$(CCACHE) $(BIN)/python scripts/wheels.py $(WHEELS)

build/wheel-tools/installed: scripts/wheels.txt | $(VENV)/requirements
	$(BIN)/python -m venv build/wheel-tools
	build/wheel-tools/bin/python -m pip install -q --no-compile -r scripts/wheels.txt
	touch $@

# Tests those wheels with every version of torch, each in a separate directory; downloads 6 GB the first time.
# TEST_WHEELS='--only x86_64:3.11:2.15.0' selects one of them.
test-wheels: build/wheel-tools/installed $(VENV)/requirements
	$(BIN)/python scripts/test_wheels.py $(TEST_WHEELS)

# Cross-built by Zig's Clang, with its caches in build/zig; the first build also compiles parts of C libraries.
ZIG_CACHES = ZIG_GLOBAL_CACHE_DIR=$(abspath build/zig) ZIG_LOCAL_CACHE_DIR=$(abspath build/zig)
zig-preset = $(call preset,$(1),-DCMAKE_CXX_COMPILER_LAUNCHER= \
  -DLOWBIT_ZIG=$$(ls $(abspath build)/wheel-tools/lib/python*/site-packages/ziglang/zig))
MACOS := $(abspath build/macos-packages)

# The oldest supported torch, which runs on the oldest systems, and executorch.
$(MACOS)/installed: | $(VENV)/requirements
	$(BIN)/python -m pip install -q --root-user-action=ignore --no-deps --no-compile --only-binary=:all: --upgrade \
	  --platform macosx_11_0_arm64 --platform macosx_14_0_arm64 --python-version 311 --implementation cp --abi cp311 \
	  --abi none --target $(MACOS) torch===2.10.0 executorch==1.5.1
	touch $@

$(MACOS)/libc++.tbd: $(MACOS)/installed scripts/macos_libraries.py | build/wheel-tools/installed
	build/wheel-tools/bin/python scripts/macos_libraries.py libc++ --minimum 11.0 $@ \
	  $(MACOS)/torch/lib/libc10.dylib $(MACOS)/torch/lib/libtorch_cpu.dylib

# WHEELS='--pythons 3.11' selects one; the test builds that one, in another directory than a release.
wheel-macos: $(VENV)/requirements $(MACOS)/libc++.tbd
	$(ZIG_CACHES) $(BIN)/python scripts/wheel_macos.py $(WHEELS)

test-macos-build: $(VENV)/requirements $(MACOS)/libc++.tbd
	$(ZIG_CACHES) $(BIN)/python scripts/wheel_macos.py --pythons 3.11 --quick --output build/macos-wheel

# Converts liblowbit.dylib of a release wheel to a library that Linux can load. The C++ tests of the Arm Linux build call its
# code under QEMU, as on Macs from M1 to M4. Builds the wheel for CPython 3.11, or uses MACOS_WHEEL=FILE. Not in test-all,
# because the optimized wheel takes minutes to compile, and the wheel of test-macos-build has other code.
test-macos-run: $(VENV)/requirements $(MACOS)/libc++.tbd build-test-arm build/arm-emulator
	[ -n "$(MACOS_WHEEL)" ] || $(ZIG_CACHES) $(BIN)/python scripts/wheel_macos.py --pythons 3.11 --output build/macos-release
	tests/macos/run.sh "$$(ls $(or $(MACOS_WHEEL),build/macos-release/*.whl))" build/test-arm $(abspath build/macos-run) \
	  $(abspath build/arm-emulator)

# The static libraries for iOS, with the operators for ExecuTorch. Zig cannot link programs for iOS, so every symbol is looked
# up instead.
test-ios-build: $(VENV)/requirements $(MACOS)/libc++.tbd
	$(call zig-preset,ios)
	build/wheel-tools/bin/python scripts/macos_libraries.py static --minimum 14.0 \
	  --system $$(ls build/wheel-tools/lib/python*/site-packages/ziglang/lib/libc/darwin/libSystem.tbd) \
	  --libraries $(MACOS)/torch/lib/libc10.dylib $(MACOS)/torch/lib/libtorch_cpu.dylib $(MACOS)/executorch/lib/*.dylib \
	  --built build/ios/liblowbit.a build/ios/liblowbit_executorch.a

test-windows-build: $(VENV)/requirements build/wheel-tools/installed
	$(call zig-preset,windows-x86_64)
	$(call zig-preset,windows-aarch64)

# lowbit.dll and the C++ tests for Windows, run under Wine with the instruction sets of this CPU: the same tests as on Linux,
# with the same bits. Tests that need Linux or another compiler are left out.
test-windows-run: $(VENV)/requirements build/wheel-tools/installed
	scripts/need.sh test
	scripts/need.sh wine
	$(call zig-preset,windows)
	scripts/wine.sh cmd /c ver  # makes the Windows installation that the tests share
	$(CTEST) --preset windows

# Static programs on emulated CPUs of phones, with pages of 16 KiB where QEMU supports them. The first target is closest to
# Android without the NDK: musl and LLVM's C++ library, by Zig's Clang.
test-android-like: $(VENV)/requirements build/wheel-tools/installed build/arm-emulator
	scripts/need.sh test
	$(call zig-preset,android-like)
	$(EMULATED) phones build/android-like

# The same with the NDK in ANDROID_NDK: a job of .github/workflows/tests.yml, whose machine has it. It has only been run there.
test-android: $(VENV)/cmake build/arm-emulator
	scripts/need.sh test
	[ -f "$(ANDROID_NDK)/build/cmake/android.toolchain.cmake" ] || \
	  { echo "ANDROID_NDK is '$(ANDROID_NDK)'; expected the directory of Android's NDK" >&2; exit 1; }
	$(call preset,android)
	$(EMULATED) phones build/android
