// The program that x86_cost.py runs. It executes kernels instruction by instruction (the trap flag), and prints a line for each
// call: "kernel TAB task TAB units TAB instructions"; with --blocks, "TAB address*times" for each executed address follows.
// Only instructions of this program count: the kernels, but not the C library's memcpy, which differs by CPU.
//
//   x86_cost [--blocks] [--check] [PART...] kernels that this CPU runs and whose name contains a PART, if given; --check: some
//                                               tasks of some widths
//
//   linear_*     task "symmetric|affine g<group size> m<rows>"   unit: 128 weights, for one row of activations
//   quantize_*   task "f32|bf16 g<group size>"                   unit: one activation
//   attention_*  task "<cache> prompt|token"                     unit: 128 products

#include <ucontext.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "../kernels/pack.h"
#include "../kernels/registry.h"
#include "attention_calls.h"

extern "C" const char __executable_start, etext;

namespace lowbit::bench {
namespace {

bool with_blocks = false, check = false;
std::vector<std::string> parts;

// Executed addresses in an open-addressing table, because a signal handler must not allocate.
struct Count {
  uintptr_t address;
  int64_t times;
};
constexpr size_t kSlots = size_t{1} << 16;
Count counts[kSlots];
int64_t executed;

void step(int, siginfo_t*, void* context) {
  const auto* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const uintptr_t address = static_cast<uintptr_t>(registers[REG_RIP]);
  if (address < reinterpret_cast<uintptr_t>(&__executable_start) || address >= reinterpret_cast<uintptr_t>(&etext)) {
    return;
  }
  ++executed;
  size_t slot = (address * 0x9e3779b97f4a7c15u) >> 48;
  while (counts[slot].times != 0 && counts[slot].address != address) slot = (slot + 1) % kSlots;
  counts[slot].address = address;
  ++counts[slot].times;
}

// Counts only the call, not the few instructions that switch the flag.
template <class Args>
[[gnu::noinline]] void stepped(void (*run)(const Args&), const Args& args) {
  __asm__ volatile("pushfq\n\torq $0x100, (%%rsp)\n\tpopfq" ::: "memory", "cc");
  run(args);
  __asm__ volatile("pushfq\n\tandq $~0x100, (%%rsp)\n\tpopfq" ::: "memory", "cc");
}

template <class Args>
void count(const char* name, const std::string& task, int64_t units, void (*run)(const Args&), const Args& args) {
  run(args);  // not counted: work of the first call alone
  std::memset(counts, 0, sizeof counts);
  executed = 0;
  stepped(run, args);
  std::printf("%s\t%s\t%lld\t%lld", name, task.c_str(), static_cast<long long>(units),
              static_cast<long long>(executed));
  if (with_blocks) {
    std::vector<Count> found;
    std::copy_if(counts, counts + kSlots, std::back_inserter(found), [](const Count& each) { return each.times > 0; });
    std::sort(found.begin(), found.end(), [](const Count& a, const Count& b) { return a.address < b.address; });
    for (const Count& each : found) {
      std::printf("\t%llx*%lld", static_cast<unsigned long long>(each.address), static_cast<long long>(each.times));
    }
  }
  std::printf("\n");
}

void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message());
  std::exit(1);
}

// Memory aligned to 64 bytes, as in the operators.
template <class T>
T* allocate(int64_t count) {
  const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  T* const memory = static_cast<T*>(std::aligned_alloc(64, bytes));
  if (memory == nullptr) std::abort();
  std::memset(static_cast<void*>(memory), 1, bytes);
  return memory;
}

void count_linear(const LinearKernel& kernel, Mapping mapping, int64_t group_size, int64_t m) {
  constexpr int64_t kOutputs = 64;
  const int64_t inputs = m > 1 ? 256 : 512;
  Layout layout;
  require(make_layout(kOutputs, inputs, kernel.bits, group_size, mapping, false, &layout));
  LinearArgs args{};
  args.panels = allocate<uint8_t>(layout.total_bytes) + layout.header_bytes;
  args.layout = layout;
  args.panel_end = layout.panels;
  args.a = allocate<int8_t>(m * inputs);
  args.scales = allocate<float>(m * layout.segments);
  args.sums = allocate<int32_t>(m * layout.segments);
  if (has_mins(mapping)) args.group_sums = allocate<float>(m * layout.groups);
  args.m = m;
  args.out = allocate<float>(m * kOutputs);
  args.out_dtype = DType::f32;
  args.out_stride = kOutputs;
  static char* const scratch = allocate<char>(kLinearScratchBytes);
  args.scratch = scratch;
  const std::string task = std::string(has_mins(mapping) ? "affine" : "symmetric") + " g" +
                           std::to_string(group_size) + " m" + std::to_string(m);
  count(kernel.name, task, m * kOutputs * inputs / 128, kernel.run, args);
}

void count_quantize(const QuantizeKernel& kernel, DType dtype, int64_t group_size) {
  constexpr int64_t kInputs = 1024;
  float* const x = allocate<float>(kInputs);  // 16-bit types use the first half of the memory
  for (int64_t i = 0; i < kInputs; ++i) store_from_f32(x, dtype, i, static_cast<float>(i * 37 % 201 - 100) / 16.0f);
  constexpr int64_t kMostSegments = kInputs / kHalfInputs;
  const QuantizeArgs args{x, dtype, kInputs, kInputs, group_size, allocate<int8_t>(kInputs),
                          allocate<float>(kMostSegments), allocate<int32_t>(kMostSegments), nullptr};
  const std::string task = std::string(dtype == DType::f32 ? "f32" : "bf16") + " g" + std::to_string(group_size);
  count(kernel.name, task, kInputs, kernel.run, args);
}

// Four query heads share one KV head, all 64 wide. Queries are at the last four of 256 positions, or at the last one alone.
void count_attention(const AttentionKernel& kernel, CacheType cache, const char* name, bool prompt) {
  constexpr int64_t kWidth = 64, kPositions = 256, kHeads = 4;
  const auto memory = [](int64_t count, CacheType type) {
    char* const values = allocate<char>(count * 4);
    if (has_scales(type)) return values;  // every byte is valid codes
    const DType dtype = type == CacheType::f32 ? DType::f32 : type == CacheType::bf16 ? DType::bf16 : DType::f16;
    for (int64_t i = 0; i < count; ++i) store_from_f32(values, dtype, i, static_cast<float>(i * 37 % 201 - 100) / 64.0f);
    return values;
  };
  const void* q[kAttentionRows];
  void* out[kAttentionRows];
  int64_t begins[kAttentionRows] = {}, ends[kAttentionRows], products = 0;
  const int64_t rows = prompt ? kAttentionRows : kHeads;
  for (int64_t row = 0; row < rows; ++row) {
    q[row] = memory(kWidth, CacheType::f32);
    out[row] = allocate<float>(kWidth);
    ends[row] = kPositions - (rows - 1 - row) / kHeads;
    products += 2 * ends[row] * kWidth;
  }
  const char* const scales = has_scales(cache) ? memory(kPositions, CacheType::f32) : nullptr;
  const AttentionArgs args{rows, q, out, begins, ends, nullptr, memory(kPositions * kWidth, key_type(cache)),
                           memory(kPositions * kWidth, value_type(cache)), scales, scales, DType::f32, cache, kWidth,
                           kWidth, 0.2f, 0.0f, allocate<float>(attention_scratch(kWidth, kWidth))};
  count(kernel.name, std::string(name) + (prompt ? " prompt" : " token"), products / 128, kernel.run, args);
}

bool wanted(const std::string& name, IsaBits isa) {
  const auto matches = [&](const std::string& part) { return name.find(part) != std::string::npos; };
  return isa != kPortable && (isa & ~cpu_isa()) == 0 &&
         (parts.empty() || std::any_of(parts.begin(), parts.end(), matches));
}

void count_all() {
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    const LinearKernel& kernel = linear_kernel(i);
    if (!wanted(kernel.name, kernel.isa)) continue;
    if (check && kernel.bits != 2 && kernel.bits != 4 && kernel.bits != 8) continue;
    const bool two_rows = kernel.m_least == 2 && kernel.several_streams;
    const int64_t m = kernel.m_least == 1 ? 1 : two_rows ? 2 : std::max<int64_t>(kernel.m_least, 16);
    if (check && m > 1 && kernel.bits != 4) continue;
    for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
      for (const int64_t group_size : {32, 128}) {
        if (check && (has_mins(mapping) || (group_size != 32 && m > 1))) continue;
        count_linear(kernel, mapping, group_size, m);
        // Numbers of rows of speculative decoding and of small batches.
        if (m > 2 && kernel.m_least <= 4 && mapping == Mapping::symmetric) count_linear(kernel, mapping, group_size, 4);
      }
    }
  }
  for (size_t i = 0; i < quantize_kernel_count(); ++i) {
    const QuantizeKernel& kernel = quantize_kernel(i);
    if (!wanted(kernel.name, kernel.isa)) continue;
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const int64_t group_size : {32, 128}) count_quantize(kernel, dtype, group_size);
    }
  }
  for_attention(wanted, [](const AttentionKernel& kernel, CacheType cache, const char* name, bool prompt) {
    if (!check || cache == CacheType::f32 || cache == CacheType::bf16) count_attention(kernel, cache, name, prompt);
  });
}

}  // namespace
}  // namespace lowbit::bench

int main(int argc, char** argv) {
  lowbit::pin_streams(lowbit::Streams::one);  // the same count on every CPU
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--blocks") {
      lowbit::bench::with_blocks = true;
    } else if (argument == "--check") {
      lowbit::bench::check = true;
    } else {
      lowbit::bench::parts.push_back(argument);
    }
  }
  struct sigaction action {};
  action.sa_sigaction = lowbit::bench::step;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGTRAP, &action, nullptr);
  lowbit::bench::count_all();
  return 0;
}
