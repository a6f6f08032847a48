// The program that arm_cost.py runs under QEMU. It calls kernels between two markers; the QEMU plugin icount.c counts the
// instructions between the markers. It prints one line per call, in the same order: name, task, number of units. The markers
// are unallocated hints, which do nothing on a real core.
//
//   arm_cost [PART...] [^ISA...]     rows that this CPU runs, whose name contains a PART, if there is any, but no rows
//                                    of an ISA
//
//   arm_cost --bytes N K             instead: how large an N x K matrix is packed; bits, mapping, group size, bytes
//
//   linear_*     task "symmetric|affine|levels g<group size> m<rows>"   unit: 128 weights, for one row of activations
//   quantize_*   task "f32|bf16|f16 g<group size>"               unit: one activation
//   embedding_*  task "symmetric|affine|levels f32|bf16|f16"     unit: one value
//   attention_*  task "f32|bf16|f16|int8|int4|int8,int4 token|prompt"   unit: 128 products

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../kernels/pack.h"
#include "../kernels/registry.h"
#include "attention_calls.h"

namespace lowbit::bench {
namespace {

constexpr int64_t kOutputs = 128, kInputs = 1024;
constexpr int64_t kGroupSizes[] = {16, 32, 128};
constexpr int64_t kMostRows = 64;  // kernels for one row run 1; kernels for several rows run 16 and 64
// At 4 bits, symmetric, groups of 32: every m up to this for which the kernel is chosen.
constexpr int64_t kEveryRows = 33;
constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

const char* name_of(DType dtype) { return dtype == DType::f32 ? "f32" : dtype == DType::bf16 ? "bf16" : "f16"; }

constexpr int8_t kLevels[kMostLevels] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct Random {
  uint32_t state = 1;
  int below(int limit) {
    state = state * 1664525u + 1013904223u;
    return static_cast<int>((state >> 8) % static_cast<uint32_t>(limit));
  }
};

template <class Call>
void count(const char* name, const std::string& task, int64_t units, Call call) {
  call();  // not counted: lazy binding happens in the first call
  __asm__ volatile("hint #97" ::: "memory");
  call();
  __asm__ volatile("hint #98" ::: "memory");
  std::printf("%s\t%s\t%lld\n", name, task.c_str(), static_cast<long long>(units));
}

struct Weights {
  Layout layout;
  std::vector<uint8_t> packed;

  Weights(int bits, Mapping mapping, int64_t group_size) {
    require(make_layout(kOutputs, kInputs, bits, group_size, mapping, false, &layout,
                        has_table(mapping) ? kLevels : nullptr));
    Random random;
    std::vector<uint8_t> codes(static_cast<size_t>(kOutputs * kInputs));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random.below(1 << bits));
    const std::vector<float> scales(static_cast<size_t>(kOutputs * layout.groups), 0.01f);
    packed.resize(static_cast<size_t>(layout.total_bytes));
    std::vector<uint64_t> checksums(static_cast<size_t>(layout.panels));
    const PackArgs args{codes.data(), scales.data(), has_mins(mapping) ? scales.data() : nullptr, nullptr};
    require(pack_panels(layout, args, 0, layout.panels, packed.data(), checksums.data()));
    seal(layout, checksums.data(), packed.data());
  }

  static void require(const Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "%s\n", status.message());
    std::exit(1);
  }
};

void count_linear(const LinearKernel& kernel, Mapping mapping, int64_t group_size) {
  const Weights weights(kernel.bits, mapping, group_size);
  const Layout& layout = weights.layout;
  Random random;
  std::vector<int8_t> a(static_cast<size_t>(kMostRows * kInputs));
  for (int8_t& value : a) value = static_cast<int8_t>(random.below(255) - 127);
  // No kernel's cost depends on these values.
  const std::vector<int32_t> sums(static_cast<size_t>(kMostRows * layout.segments), 5);
  const std::vector<float> scales(static_cast<size_t>(kMostRows * layout.segments), 0x1.4p-7f);
  const std::vector<float> group_sums(static_cast<size_t>(kMostRows * layout.groups), 0.05f);
  std::vector<float> out(static_cast<size_t>(kMostRows * kOutputs));
  LinearArgs args{weights.packed.data() + weights.layout.header_bytes, weights.layout, 0, weights.layout.panels, a.data(),
                  scales.data(), sums.data(), has_mins(mapping) ? group_sums.data() : nullptr, 0, out.data(),
                  DType::f32, kOutputs};
  alignas(64) static char scratch[kLinearScratchBytes];
  args.scratch = scratch;
  const auto is_chosen = [&](int64_t m) {
    IsaBits isa = kernel.isa;
    size_t count;
    const IsaName* names = isa_names(&count);
    for (size_t i = 0; i < count; ++i) {
      if (names[i].bit == kernel.isa) isa = names[i].allows;
    }
    return &choose_linear(weights.layout, m, isa) == &kernel;
  };
  const bool every = kernel.bits == 4 && mapping == Mapping::symmetric && group_size == 32;
  for (int64_t m = 1; m <= kMostRows; ++m) {
    if (m < kernel.m_least) continue;
    // A kernel for one row costs the same for each of several rows.
    const bool wanted = kernel.m_least == 1 ? m == 1 : m == 16 || m == kMostRows;
    if (!wanted && !(every && m <= kEveryRows && is_chosen(m))) continue;
    args.m = m;
    const std::string task =
        std::string(name_of(mapping)) + " g" + std::to_string(group_size) + " m" + std::to_string(m);
    count(kernel.name, task, m * kOutputs * kInputs / 128, [&] { kernel.run(args); });
  }
}

void count_quantize(const QuantizeKernel& kernel, DType dtype, int64_t group_size) {
  Random random;
  std::vector<float> x(static_cast<size_t>(kInputs));  // 16-bit types use the first half of the memory
  for (int64_t i = 0; i < kInputs; ++i) {
    store_from_f32(x.data(), dtype, i, static_cast<float>(random.below(2001) - 1000) / 256.0f);
  }
  std::vector<int8_t> a(static_cast<size_t>(kInputs));
  constexpr size_t kMostSegments = kInputs / kHalfInputs;
  std::vector<int32_t> sums(kMostSegments);
  std::vector<float> scales(kMostSegments);
  const QuantizeArgs args{x.data(), dtype, kInputs, kInputs, group_size, a.data(), scales.data(), sums.data(), nullptr};
  count(kernel.name, std::string(name_of(dtype)) + " g" + std::to_string(group_size), kInputs,
        [&] { kernel.run(args); });
}

void count_embedding(const EmbeddingKernel& kernel, Mapping mapping, DType dtype) {
  const Weights weights(kernel.bits, mapping, 32);
  std::vector<float> out(static_cast<size_t>(kInputs));
  const EmbeddingArgs args{weights.packed.data() + weights.layout.header_bytes, weights.layout, 5, out.data(), dtype};
  count(kernel.name, std::string(name_of(mapping)) + " " + name_of(dtype), kInputs, [&] { kernel.run(args); });
}

// Four query heads share one KV head, all 64 wide. Queries are at the last four of 256 positions, or at the last one alone.
void count_attention(const AttentionKernel& kernel, CacheType cache, const char* name, bool prompt) {
  constexpr int64_t kWidth = 64, kPositions = 256, kHeads = 4;
  const auto values_of = [](int64_t count, CacheType type) {
    std::vector<float> values(static_cast<size_t>(count));
    if (has_scales(type)) return values;  // every byte is valid codes
    const DType dtype = type == CacheType::f32 ? DType::f32 : type == CacheType::bf16 ? DType::bf16 : DType::f16;
    for (int64_t i = 0; i < count; ++i) {
      store_from_f32(values.data(), dtype, i, static_cast<float>(i * 37 % 201 - 100) / 64.0f);
    }
    return values;
  };
  const std::vector<float> q = values_of(kWidth, CacheType::f32), scales = values_of(kPositions, CacheType::f32);
  const std::vector<float> keys = values_of(kPositions * kWidth, key_type(cache));
  const std::vector<float> values = values_of(kPositions * kWidth, value_type(cache));
  std::vector<float> out(static_cast<size_t>(kAttentionRows * kWidth)), memory;
  memory.resize(static_cast<size_t>(attention_scratch(kWidth, kWidth)) + 16);
  float* const scratch = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 / 4;
  const void* queries[kAttentionRows];
  void* outputs[kAttentionRows];
  int64_t begins[kAttentionRows] = {}, ends[kAttentionRows], products = 0;
  const int64_t rows = prompt ? kAttentionRows : kHeads;
  for (int64_t row = 0; row < rows; ++row) {
    queries[row] = q.data();
    outputs[row] = out.data() + row * kWidth;
    ends[row] = kPositions - (rows - 1 - row) / kHeads;
    products += 2 * ends[row] * kWidth;
  }
  const float* const of_codes = has_scales(cache) ? scales.data() : nullptr;
  const AttentionArgs args{rows, queries, outputs, begins, ends, nullptr, keys.data(), values.data(), of_codes, of_codes,
                           DType::f32, cache, kWidth, kWidth, 0.2f, 0.0f, scratch};
  count(kernel.name, std::string(name) + (prompt ? " prompt" : " token"), products / 128, [&] { kernel.run(args); });
}

std::vector<std::string> parts;

bool wanted(const std::string& name, IsaBits isa) {
  bool any = false, found = false;
  for (const std::string& part : parts) {
    if (part[0] == '^') {
      if (name.substr(name.rfind('_') + 1) == part.substr(1)) return false;
    } else {
      any = true;
      found = found || name.find(part) != std::string::npos;
    }
  }
  return (isa & ~cpu_isa()) == 0 && (found || !any);
}

void count_all() {
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    const LinearKernel& kernel = linear_kernel(i);
    if (!wanted(kernel.name, kernel.isa)) continue;
    for (const Mapping mapping : kMappings) {
      if ((kernel.mappings & bit_of(mapping)) == 0) continue;
      for (const int64_t group_size : kGroupSizes) count_linear(kernel, mapping, group_size);
    }
  }
  for (size_t i = 0; i < quantize_kernel_count(); ++i) {
    const QuantizeKernel& kernel = quantize_kernel(i);
    if (!wanted(kernel.name, kernel.isa)) continue;
    for (const DType dtype : kDTypes) {
      for (const int64_t group_size : kGroupSizes) count_quantize(kernel, dtype, group_size);
    }
  }
  for (size_t i = 0; i < embedding_kernel_count(); ++i) {
    const EmbeddingKernel& kernel = embedding_kernel(i);
    if (!wanted(kernel.name, kernel.isa)) continue;
    for (const Mapping mapping : kMappings) {
      if ((kernel.mappings & bit_of(mapping)) == 0) continue;
      for (const DType dtype : kDTypes) count_embedding(kernel, mapping, dtype);
    }
  }
  for_attention(wanted, count_attention);
}

void print_bytes(int64_t n, int64_t k) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
      for (const int64_t group_size : kGroupSizes) {
        Layout layout;
        Weights::require(make_layout(n, k, bits, group_size, mapping, false, &layout));
        std::printf("%d\t%s\t%lld\t%lld\n", bits, name_of(mapping), static_cast<long long>(group_size),
                    static_cast<long long>(layout.total_bytes));
      }
    }
  }
}

}  // namespace
}  // namespace lowbit::bench

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--bytes") == 0) {
    lowbit::bench::print_bytes(std::atoll(argv[2]), std::atoll(argv[3]));
    return 0;
  }
  lowbit::bench::parts.assign(argv + 1, argv + argc);
  lowbit::bench::count_all();
  return 0;
}
