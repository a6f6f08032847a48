// Times packing and every kernel of the tables that this machine's CPU can run, on one thread.
//
//   kernels_bench                                   everything, briefly, with weights that stay in the caches
//   kernels_bench --lowbit_memory                   weights larger than the caches, as in a model
//   kernels_bench --benchmark_filter=a8w4           one width; all of Google Benchmark's options work
//
// A linear kernel is timed as NAME/m<rows of activations>/g<group size>, optionally followed by "/affine" or "/levels".
//
// items_per_second counts weights (linear, packing) or values (quantization, embedding), bytes_per_second packed
// bytes (attention: keys and values) that were read; both per second of CPU time, so that other work on the machine
// disturbs less. The header prints the read bandwidth of one thread for scale: a GEMV from memory cannot be faster.

#include <benchmark/benchmark.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "../kernels/pack.h"
#include "../kernels/registry.h"
#include "../ops/read_bandwidth.h"

namespace lowbit::bench {
namespace {

constexpr int64_t kGroupSize = 32;
constexpr int64_t kRows[] = {1, 4, 8, 16, 64, 128};  // of activations; kernels for several rows run all of these
constexpr int64_t kGroupSizes[] = {kGroupSize, 16};

struct Shape {
  int64_t n, k;
};
Shape shape{1024, 2048};  // 1 MiB of weights at 4 bits
bool from_memory = false;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
template <class T>
using Aligned = std::unique_ptr<T[], Free>;

template <class T>
Aligned<T> allocate(int64_t count) {
  const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  T* memory = static_cast<T*>(std::aligned_alloc(64, bytes));
  if (memory == nullptr) std::abort();
  std::memset(static_cast<void*>(memory), 1, bytes);
  return Aligned<T>(memory);
}

void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message());
  std::abort();
}

struct Weights {
  Layout layout;
  std::vector<uint8_t> codes;
  std::vector<float> scales, mins;
  Aligned<uint8_t> packed;
  std::vector<uint64_t> checksums;

  Weights(int bits, Mapping mapping, int64_t group_size = kGroupSize) {
    constexpr int8_t kLevels[kMostLevels] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    require(make_layout(shape.n, shape.k, bits, group_size, mapping, false, &layout,
                        has_table(mapping) ? kLevels : nullptr));
    codes.resize(static_cast<size_t>(shape.n * shape.k));
    uint32_t state = 1;
    for (uint8_t& code : codes) code = static_cast<uint8_t>((state = state * 1664525u + 1013904223u) >> (32 - bits));
    scales.assign(static_cast<size_t>(shape.n * layout.groups), 0.01f);
    if (has_mins(mapping)) mins.assign(scales.size(), -0.08f);
    packed = allocate<uint8_t>(layout.total_bytes);
    checksums.resize(static_cast<size_t>(layout.panels));
    pack();
  }
  void pack() {
    const PackArgs args{codes.data(), scales.data(), mins.empty() ? nullptr : mins.data(), nullptr};
    require(pack_panels(layout, args, 0, layout.panels, packed.get(), checksums.data()));
    seal(layout, checksums.data(), packed.get());
  }
};

// Only one matrix is kept, because all benchmarks of a matrix run one after another.
const Weights& weights_of(int bits, Mapping mapping, int64_t group_size = kGroupSize) {
  static std::unique_ptr<Weights> kept;
  if (kept == nullptr || kept->layout.bits != bits || kept->layout.mapping != mapping ||
      kept->layout.group_size != group_size) {
    kept.reset();
    kept = std::make_unique<Weights>(bits, mapping, group_size);
  }
  return *kept;
}

void linear(benchmark::State& state, const LinearKernel* kernel, int64_t m, Mapping mapping, int64_t group_size) {
  const Weights& w = weights_of(kernel->bits, mapping, group_size);
  const auto a = allocate<int8_t>(m * w.layout.blocks * kBlockInputs);
  const auto scales = allocate<float>(m * w.layout.segments), group_sums = allocate<float>(m * w.layout.groups);
  const auto sums = allocate<int32_t>(m * w.layout.segments);
  const auto out = allocate<float>(m * w.layout.n);
  LinearArgs args{};
  args.panels = w.packed.get() + w.layout.header_bytes;
  args.layout = w.layout;
  args.panel_end = w.layout.panels;
  args.a = a.get();
  args.scales = scales.get();
  args.sums = sums.get();
  if (has_mins(mapping)) args.group_sums = group_sums.get();
  args.m = m;
  args.out = out.get();
  args.out_dtype = DType::f32;
  args.out_stride = w.layout.n;
  const bool own = kernel->scratch_bytes != nullptr;
  const auto scratch = allocate<char>(own ? kernel->scratch_bytes(kernel->context, w.layout, m, 1) : kLinearScratchBytes);
  args.scratch = scratch.get();
  for (auto unused : state) {
    kernel->run(args);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * w.layout.n * w.layout.k);
  state.SetBytesProcessed(state.iterations() * w.layout.total_bytes);
  state.counters["GMAC/s"] = benchmark::Counter(static_cast<double>(m * w.layout.n * w.layout.k) * 1e-9,
                                                benchmark::Counter::kIsIterationInvariantRate);
}

void embedding(benchmark::State& state, const EmbeddingKernel* kernel) {
  const Weights& w = weights_of(kernel->bits, Mapping::symmetric);
  const auto out = allocate<float>(w.layout.k);
  EmbeddingArgs args{w.packed.get() + w.layout.header_bytes, w.layout, 0, out.get(), DType::f32};
  for (auto unused : state) {
    args.row = (args.row + 389) % w.layout.n;
    kernel->run(args);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * w.layout.k);
}

void quantize(benchmark::State& state, const QuantizeKernel* kernel, DType dtype) {
  const int64_t k = shape.k / kBlockInputs * kBlockInputs, segments = k / kHalfInputs;  // rounded down to whole blocks
  const auto x = allocate<uint8_t>(k * size_of(dtype));
  for (int64_t i = 0; i < k; ++i) store_from_f32(x.get(), dtype, i, static_cast<float>(i % 201 - 100) * 0.01f);
  const auto a = allocate<int8_t>(k);
  const auto sums = allocate<int32_t>(segments);
  const auto scales = allocate<float>(segments);
  const QuantizeArgs args{.x = x.get(),
                          .x_dtype = dtype,
                          .k = k,
                          .k_padded = k,
                          .group_inputs = kGroupSize,
                          .a = a.get(),
                          .scales = scales.get(),
                          .sums = sums.get(),
                          .group_sums = nullptr};
  for (auto unused : state) {
    kernel->run(args);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * k);
}

// One KV head of 64 inputs and the four query heads that share it. Queries are at the last position of a text, or at all
// positions.
void attention(benchmark::State& state, const AttentionKernel* kernel, DType dtype, CacheType cache, bool prefill) {
  constexpr int64_t kWidth = 64, kGroup = 4;
  const int64_t length = prefill ? 512 : 1024, head = length * kWidth;
  const int64_t heads = !prefill && from_memory ? 256 : 1;
  const int64_t rows = prefill ? length * kGroup : kGroup;
  const auto fill = [&](int64_t count, CacheType type) {
    auto values = allocate<uint8_t>(count * 4);
    for (int64_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(i * 40503 % 2001 - 1000) * 1e-3f;
      const DType half = type == CacheType::bf16 ? DType::bf16 : DType::f16;
      if (has_scales(type)) {  // any byte is two 4-bit codes
        values.get()[i] = static_cast<uint8_t>(static_cast<int8_t>(value * 127.0f));
      } else {
        store_from_f32(values.get(), type == CacheType::f32 ? DType::f32 : half, i, value);
      }
    }
    return values;
  };
  const int64_t key_bytes = cache_bytes(key_type(cache), head), value_bytes = cache_bytes(value_type(cache), head);
  const auto keys = fill(heads * head, key_type(cache)), values = fill(heads * head, value_type(cache));
  const auto q = fill(kAttentionRows * kWidth, cache_type_of(dtype));
  const auto scales = fill(length, CacheType::f32);
  const void* const used_scales = has_scales(cache) ? scales.get() : nullptr;
  const auto out = allocate<uint8_t>(kAttentionRows * kWidth * size_of(dtype));
  const auto scratch = allocate<float>(attention_scratch(kWidth, kWidth));
  const void* q_rows[kAttentionRows];
  void* out_rows[kAttentionRows];
  for (int64_t r = 0; r < kAttentionRows; ++r) {
    q_rows[r] = q.get() + r * kWidth * size_of(dtype);
    out_rows[r] = out.get() + r * kWidth * size_of(dtype);
  }
  int64_t at = 0, products = 0;
  for (auto unused : state) {
    for (int64_t begin = 0; begin < rows; begin += kAttentionRows) {
      int64_t begins[kAttentionRows] = {}, lengths[kAttentionRows], count = 0;
      for (; count < kAttentionRows && begin + count < rows; ++count) {
        lengths[count] = prefill ? (begin + count) / kGroup + 1 : length;
        products += 2 * lengths[count] * kWidth;
      }
      kernel->run({count, q_rows, out_rows, begins, lengths, nullptr, keys.get() + at * key_bytes,
                   values.get() + at * value_bytes, used_scales, used_scales, dtype, cache, kWidth, kWidth, 0.2f,
                   0.0f, scratch.get()});
    }
    at = (at + 1) % heads;
    benchmark::ClobberMemory();
  }
  if (!prefill) state.SetBytesProcessed(state.iterations() * (key_bytes + value_bytes));
  state.counters["GMAC/s"] = benchmark::Counter(static_cast<double>(products) * 1e-9, benchmark::Counter::kIsRate);
}

void pack(benchmark::State& state, int bits, Mapping mapping) {
  Weights w(bits, mapping);
  for (auto unused : state) {
    w.pack();
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * w.layout.n * w.layout.k);
}

// In GB/s, on one thread.
double read_gbs() {
  constexpr int64_t kBytes = int64_t{256} << 20;
  const auto memory = allocate<uint8_t>(kBytes);
  return 1e-9 * read_bandwidth(memory.get(), kBytes, 1, 2).bytes_per_second;
}

bool runs_here(IsaBits isa) { return (isa & ~cpu_isa()) == 0; }

void register_all() {
  for (size_t i = 0; i < quantize_kernel_count(); ++i) {
    const QuantizeKernel* row = &quantize_kernel(i);
    if (!runs_here(row->isa)) continue;
    for (const auto& [dtype, name] : {std::pair{DType::f32, "f32"}, {DType::bf16, "bf16"}, {DType::f16, "f16"}}) {
      benchmark::RegisterBenchmark((std::string(row->name) + "/" + name).c_str(), quantize, row, dtype);
    }
  }
  for (size_t i = 0; i < attention_kernel_count(); ++i) {
    const AttentionKernel* row = &attention_kernel(i);
    if (!runs_here(row->isa)) continue;
    for (const auto& [dtype, cache, name] :
         {std::tuple{DType::f32, CacheType::f32, "f32"}, {DType::bf16, CacheType::bf16, "bf16"},
          {DType::f16, CacheType::f16, "f16"}, {DType::f32, CacheType::bf16, "f32_bf16_cache"},
          {DType::f32, CacheType::i8, "f32_int8_cache"}, {DType::f32, CacheType::i4, "f32_int4_cache"},
          {DType::f32, CacheType::i8_i4, "f32_int8_int4_cache"}}) {
      const std::string base = std::string(row->name) + "/" + name;
      benchmark::RegisterBenchmark((base + "/decode").c_str(), attention, row, dtype, cache, false);
      benchmark::RegisterBenchmark((base + "/prefill").c_str(), attention, row, dtype, cache, true);
    }
  }
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Mapping mapping : kMappings) {
      const char* what = has_mins(mapping) ? "/affine" : has_table(mapping) ? "/levels" : "";
      for (const int64_t group_size : kGroupSizes) {
        for (size_t i = 0; i < linear_kernel_count(); ++i) {
          const LinearKernel* row = &linear_kernel(i);
          if (row->bits != bits || !runs_here(row->isa)) continue;
          if ((row->mappings & bit_of(mapping)) == 0) continue;
          for (const int64_t m : kRows) {
            if (m < row->m_least || (row->m_least == 1 && m > 1)) continue;
            const std::string name = std::string(row->name) + "/m" + std::to_string(m) + "/g" +
                                     std::to_string(group_size) + what;
            benchmark::RegisterBenchmark(name.c_str(), linear, row, m, mapping, group_size);
          }
        }
      }
    }
    for (size_t i = 0; i < embedding_kernel_count(); ++i) {
      const EmbeddingKernel* row = &embedding_kernel(i);
      if (row->bits == bits && runs_here(row->isa)) benchmark::RegisterBenchmark(row->name, embedding, row);
    }
  }
  for (int bits = 1; bits <= 8; ++bits) {
    const std::string name = "pack_w" + std::to_string(bits);
    benchmark::RegisterBenchmark(name.c_str(), pack, bits, Mapping::symmetric);
    benchmark::RegisterBenchmark((name + "/affine").c_str(), pack, bits, Mapping::affine);
  }
}

}  // namespace
}  // namespace lowbit::bench

int main(int argc, char** argv) {
  using namespace lowbit::bench;
  // Short by default; options of the command line come later and override it.
  char min_time[] = "--benchmark_min_time=0.03";
  std::vector<char*> args = {argv[0], min_time};
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--lowbit_memory") == 0) {
      from_memory = true;
      shape = {16384, 8192};  // 64 MiB of weights at 4 bits
    } else {
      args.push_back(argv[i]);
    }
  }
  int count = static_cast<int>(args.size());
  benchmark::Initialize(&count, args.data());
  if (benchmark::ReportUnrecognizedArguments(count, args.data())) return 1;
  char bandwidth[32];
  std::snprintf(bandwidth, sizeof bandwidth, "%.1f GB/s", read_gbs());
  benchmark::AddCustomContext("read bandwidth of one thread", bandwidth);
  benchmark::AddCustomContext("weights", std::to_string(shape.n) + " x " + std::to_string(shape.k));
  register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
