# Sanitizers, random inputs, mutants and static analysis. SECURITY.md and docs/measurements/reliability.md have the results.

# The C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer. Failed allocations must return an error. Operators run
# with portable kernels and with this machine's best; calls of many chunks, which test code that all ISAs share, only with the
# best. AVX2 kernels are left out if the CPU has AVX-512; SANITIZE_EVERY_KERNEL=ON includes them and takes minutes more.
SANITIZE_EVERY_KERNEL ?= OFF
test-sanitize: $(VENV)/requirements
	scripts/need.sh test
	$(call preset,sanitize,-DLOWBIT_SANITIZE_EVERY_KERNEL=$(SANITIZE_EVERY_KERNEL))
	$(CTEST) --preset sanitize

# Operators called from Python under the same sanitizers, with hostile bytes and arguments. The C++ tests cover vector kernels.
# -S keeps the editable install from finding its own libraries.
SANITIZED := $(abspath build/sanitize-python)
test-sanitize-python: $(VENV)/installed
	scripts/need.sh test
	$(call preset,sanitize-python,-DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir))
	rm -rf $(SANITIZED)/site && mkdir $(SANITIZED)/site
	cp -r python/lowbit $(SANITIZED)/site && cp $(SANITIZED)/*.so $(SANITIZED)/site/lowbit
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  PYTHONPATH=$(SANITIZED)/site:$$($(BIN)/python -c \
	    'import sys; print(":".join(path for path in sys.path if "site-packages" in path))') \
	  $(BIN)/python -S -m pytest -q -p no:cacheprovider -k 'not compile' $(SANITIZED_TESTS:%=tests/python/%.py)
SANITIZED_TESTS := packed/test_hostile_bytes project/test_errors packed/test_slices operators/test_linears \
  layers/test_experts packed/test_pack layers/test_embedding quantizing/test_quantize

# Many threads call every operator under ThreadSanitizer, with the portable kernels and with this machine's best.
test-tsan: $(VENV)/cmake
	scripts/need.sh test
	$(CONFIGURE) --preset host
	$(BIN)/cmake --build --preset tsan -j $(JOBS)
	LOWBIT_ISA=portable build/test-host/tests/cpp/race_tests 10000
	build/test-host/tests/cpp/race_tests 10000

# Reads of uninitialized memory: kernels and operators under Clang's MemorySanitizer, eight minutes of CPU time.
# intercept_strlen is off because the C++ library, which makes the names of tests, is not instrumented.
test-msan: export MSAN_OPTIONS := intercept_strlen=0:allocator_may_return_null=1
test-msan: $(VENV)/cmake
	scripts/need.sh msan
	$(call preset,msan)
	$(CTEST) --preset msan
	LOWBIT_ISA=avx512vnni build/test-msan/tests/cpp/operator_tests --gtest_brief=1 --gtest_filter='-*InChunks*'

# Tests that take too long for every change: operators and kernels that all CPUs share on every emulated CPU, and thousands of
# random inputs, different in every run.
soak: build-test-arm build/x86-emulator build-test-host $(VENV)/installed ## slow: all tests on all emulated CPUs, random inputs
	$(EMULATED) $@
	$(MAKE) --no-print-directory -j $(JOBS) --output-sync X86_OPERATORS='*' $(X86_RUNS)
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

# FUZZ random inputs; SEED selects others. Failures are printed with seed and number.
FUZZ ?= 1000000
SEED ?= 1

# Randomly damaged packed matrices in every operator and kernel of this machine, under the sanitizers: a million take an hour of
# one core. Without sanitizers, build/test-host/tests/cpp/packed_fuzz runs as many in a minute.
fuzz: $(VENV)/requirements
	scripts/need.sh test
	$(call preset,fuzz)
	nice build/fuzz/tests/cpp/packed_fuzz $(FUZZ) $(SEED)

# The same for damaged plans: a million take two minutes.
fuzz-plan: $(VENV)/requirements
	scripts/need.sh test
	$(call preset,fuzz)
	nice build/fuzz/tests/cpp/plan_fuzz $(FUZZ) $(SEED)

# The same for damaged files of tokens.
fuzz-tokens: $(VENV)/installed
	scripts/need.sh test
	$(call preset,fuzz)
	$(BIN)/python tests/python/support/tokens_for_fuzz.py build/fuzz
	for file in build/fuzz/*.tokens; do nice build/fuzz/tests/cpp/tokens_fuzz $$file $(FUZZ) $(SEED) || exit 1; done

# The same checks with coverage-guided inputs of libFuzzer, on one core for SECONDS; build/fuzz-inputs keeps the inputs. `make
# packed-fuzz-inputs` then makes the file of inputs that the C++ tests repeat in every run.
SECONDS ?= 3600
FUZZ_INPUTS := tests/cpp/packed_fuzz_inputs.bin
build-fuzz-guided: $(VENV)/cmake
	scripts/need.sh msan
	$(call preset,fuzz-guided)
	mkdir -p build/fuzz-inputs

fuzz-guided: build-fuzz-guided
	cd build && nice fuzz-guided/tests/cpp/packed_guided fuzz-inputs -max_len=4096 -max_total_time=$(SECONDS) \
	  -seed=$(SEED) -print_final_stats=1

packed-fuzz-inputs: build-fuzz-guided
	rm -rf build/fuzz-fewer && mkdir build/fuzz-fewer
	cd build && nice fuzz-guided/tests/cpp/packed_guided -set_cover_merge=1 -use_counters=0 -max_len=1024 fuzz-fewer fuzz-inputs
	build/fuzz-guided/tests/cpp/packed_fuzz --join $(FUZZ_INPUTS) build/fuzz-fewer/*
	build/fuzz-guided/tests/cpp/packed_fuzz --inputs $(FUZZ_INPUTS)

# Randomly damaged files for `lowbit import`, on one core: FUZZ files of GGUF, and a quarter as many of each other format.
# ExecuTorch programs with damaged calls of our operators: FUZZ of each operator and kind, at most ten per second.
FUZZ_PYTHON = LOWBIT_FUZZ=$(FUZZ) LOWBIT_FUZZ_SEED=$(SEED) nice $(BIN)/python -m pytest
fuzz-import: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(FUZZ_PYTHON) tests/python/importing/test_importing_hostile.py -k 'mutants_of'

fuzz-pte: $(VENV)/installed
	$(FUZZ_PYTHON) -rP tests/python/exports/test_pte_fuzz.py

# Damaged files, hostile requests, disconnecting clients, kills and full disks, through commands and servers. Prints a table of
# outcomes. ATTACK='--only gguf,http --cases 200 --seed 3' selects parts, ATTACK=--quick a few cases of each.
.PHONY: attack
attack: $(VENV)/installed
	nice $(BIN)/python tests/attack/run.py --seed $(SEED) $(ATTACK)

# Mutation testing: after a change to the source, some test must fail. By default it changes a few places of every file;
# MUTANTS='--sample 100 kernels/pack.cpp' selects others.
mutants: build-test-host $(VENV)/installed
	nice $(BIN)/python scripts/mutants.py $(MUTANTS)

# clang-tidy with Clang's static analyzer: .clang-tidy lists the checks and why others are off. TIDY='ops/splice.cpp' selects
# files; all take nine minutes of CPU time. GCC-only options are removed, because Clang does not know them; the analysis is the
# same.
TIDY ?= $$(sed -nE 's,^ *"file": "$(CURDIR)/((kernels|ops)/[^"]*)".*,\1,p' build/tidy/compile_commands.json | sort -u)
tidy: build-test-host
	scripts/need.sh tidy
	mkdir -p build/tidy
	$(BIN)/ninja -C build/test-host -t compdb | sed -E 's/ -fno-(tree-[a-z]+|schedule-insns)//g' > build/tidy/compile_commands.json
	printf '%s\n' $(TIDY) | nice xargs -P $(JOBS) -n 1 clang-tidy-19 -p build/tidy --quiet
