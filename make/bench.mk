# Measurements. BENCH='...' gives a benchmark its options. DOC=1 also writes the results into the documentation: on a quiet
# machine, and after `make bench-peers`.
in-doc = $(if $(DOC),$(1))

# Compares lowbit with torch, and after `make bench-peers` with onnxruntime and llama.cpp's ggml, and with this machine's peak
# rates. Writes this CPU's part of docs/bench.md and docs/bench.json, with a plot.
bench: $(VENV)/installed ## speed of lowbit and its peers: build/bench/compare.*; DOC=1 writes docs/bench.*
	$(call build-bench,roofs)
	$(BIN)/python bench/compare.py --roofs build/bench/bench/roofs $(call in-doc,--document docs/bench) $(BENCH)

# Compares language models of well-known shapes with llama.cpp and torch.
bench-llm: $(VENV)/installed
	$(BIN)/python bench/llm.py $(call in-doc,--output docs/measurements/llm) $(BENCH)

# Quality on published models, compared with llama.cpp.
bench-reality: $(VENV)/installed
	$(BIN)/python bench/reality.py $(call in-doc,--document docs/reality.md) $(BENCH)

# Answers and tasks of quantized language models. After `make bench-peers` llama.cpp's types and HumanEval, too.
bench-answers: $(VENV)/installed
	$(BIN)/python bench/answers.py $(call in-doc,--document docs/measurements/answers.md) $(BENCH)

# Retrieval with embedding models of 8 to 3 bits, on docstrings of Python.
bench-retrieval: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(BIN)/python bench/retrieval.py $(call in-doc,--document docs/measurements/embeddings.md) $(BENCH)

# Compares embedding models with OpenVINO and ONNX Runtime, and Whisper with faster-whisper, installed in separate directories.
bench-embeddings: $(VENV)/installed build/embedding-peers/installed
	PYTHONPATH=build/embedding-peers HF_HUB_OFFLINE=1 $(BIN)/python bench/embeddings.py \
	  $(call in-doc,--document docs/measurements/embeddings.md) $(BENCH)

bench-speech: $(VENV)/installed build/speech-peers/installed
	scripts/need.sh speech
	PYTHONPATH=build/speech-peers HF_HUB_OFFLINE=1 $(BIN)/python bench/speech.py \
	  $(call in-doc,--document docs/measurements/speech.md) $(BENCH)

# Without the packages that .venv also has.
build/embedding-peers/installed: bench/requirements-embeddings.txt $(VENV)/requirements
	rm -rf $(@D)
	$(BIN)/python -m pip install -q --target $(@D) -r $<
	rm -rf $(@D)/torch* $(@D)/numpy*
	touch $@

build/speech-peers/installed: bench/requirements-speech.txt $(VENV)/requirements
	rm -rf $(@D)
	$(BIN)/python -m pip install -q --target $(@D) -r $<
	rm -rf $(@D)/numpy* $(@D)/av* $(@D)/tokenizers* $(@D)/huggingface_hub*
	touch $@

bench-peers: $(VENV)/requirements
	scripts/bench_peers.sh $(BIN)

# Cost of a call on every surface, compared with torch's layer: docs/overhead.md.
bench-overhead: $(VENV)/installed
	$(BIN)/python bench/overhead.py

# Times every kernel that this CPU runs, and the read bandwidth of this machine.
bench-kernels: $(VENV)/requirements
	$(call build-bench,bench)
	build/bench/bench/kernels_bench $(BENCH)

define build-bench
	scripts/need.sh bench
	$(CONFIGURE) --preset bench
	$(BIN)/cmake --build --preset $(1) -j $(JOBS)
endef

# The kernel benchmarks as one file for a 64-bit Arm Linux machine: copy it there and run it. Here QEMU runs it as a test; on an
# Arm machine it runs directly.
ifneq ($(filter aarch64 arm64,$(shell uname -m)),)
bench-arm: bench-kernels
else
bench-arm: build/benchmark/source $(VENV)/requirements
	scripts/need.sh test
	$(call preset,bench-arm)
	qemu-aarch64 build/bench-arm/bench/kernels_bench --benchmark_filter=quantize_neon/f32 --benchmark_min_time=0.001
	@echo "Emulated: ignore the times above. For Arm hardware: build/bench-arm/bench/kernels_bench"
endif

build/benchmark/source:
	scripts/benchmark_sources.sh build/benchmark

# Cost of the Arm kernels in instructions, modeled cycles and projected tokens per second: docs/arm_cost.md. Only its SME2 part.
# Cost of the x86 kernels: docs/x86_cost.md.
arm-cost: $(VENV)/requirements $(ARM_PYTHON) build/arm-emulator
	scripts/need.sh arm-cost
	$(BIN)/python bench/arm_cost.py
	$(BIN)/python bench/arm_cost.py --sme2

arm-cost-sme2: $(VENV)/requirements build/arm-emulator
	scripts/need.sh test
	$(BIN)/python bench/arm_cost.py --sme2

x86-cost: $(VENV)/requirements build/x86-emulator
	scripts/need.sh arm-cost
	$(BIN)/python bench/x86_cost.py
