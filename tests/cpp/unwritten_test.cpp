// MemorySanitizer tracks unwritten memory through every kernel of this CPU. If one byte of an input is unwritten, it stops the
// kernel or the output counts as unwritten; if all are written, neither happens. Only in its build (make test-msan).

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

#include "../../kernels/registry.h"
#include "support/matrix.h"
#include "support/tensors.h"
#include "support/written.h"

namespace lowbit::test {
namespace {

constexpr int kSeen = 3, kNotSeen = 4;

// Whether the bytes at `out` depend on unwritten ones after `run`. Runs in a separate process, because MemorySanitizer ends it.
bool sees(const std::vector<uint8_t>& out, const std::function<void()>& run) {
  const pid_t child = fork();
  if (child == 0) {
    close(2);  // its report
    run();
    _exit(__msan_test_shadow(out.data(), out.size()) == -1 ? kNotSeen : kSeen);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_NE(WEXITSTATUS(status), 0);
  return WEXITSTATUS(status) != kNotSeen;
}

void check(const char* name, const std::vector<uint8_t>& out, const std::function<void()>& run,
           const std::vector<std::pair<const char*, std::pair<const void*, int64_t>>>& inputs) {
  const auto into_unwritten = [&] {
    forget(out.data(), static_cast<int64_t>(out.size()));
    run();
  };
  EXPECT_FALSE(sees(out, into_unwritten)) << name << ": all is written";
  EXPECT_TRUE(sees(out, [&] { forget(out.data(), 1); })) << name << ": nothing runs";
  for (const auto& [what, input] : inputs) {
    const auto& [memory, at] = input;
    EXPECT_TRUE(sees(out, [&, memory = memory, at = at] {
      forget(static_cast<const char*>(memory) + at, 1);
      into_unwritten();
    })) << name << ": " << what;
  }
}

template <class Row>
bool runs(const Row& row) {
  return (row.isa & ~cpu_isa()) == 0;
}

TEST(Unwritten, EveryQuantizeKernelIsSeenThrough) {
  constexpr int64_t kInputs = 75, kPadded = 96, kGroups = 3;
  for (size_t i = 0; i < quantize_kernel_count(); ++i) {
    const QuantizeKernel& row = quantize_kernel(i);
    if (!runs(row)) continue;
    Random random(1);
    std::vector<float> x(kInputs), scale(2);
    for (float& value : x) value = random.normal();
    alignas(64) static int8_t a[kPadded];
    std::vector<int32_t> sums(kGroups);
    std::vector<uint8_t> out(kPadded);
    check(row.name, out, [&] {
      row.run({x.data(), DType::f32, kInputs, kPadded, 32, a, sums.data(), &scale[0], &scale[1]});
      std::memcpy(out.data(), a, sizeof a);
    }, {{"the first input", {x.data(), 0}}, {"the last input", {&x.back(), 3}}});
  }
}

TEST(Unwritten, EveryLinearKernelIsSeenThrough) {
  constexpr int64_t kOutputs = 37, kInputs = 75;
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    const LinearKernel& row = linear_kernel(i);
    if (!runs(row)) continue;
    const int64_t m = row.m_least;
    Random random(2);
    const Layout layout = layout_of(kOutputs, kInputs, row.bits, 32, Mapping::symmetric, true);
    std::vector<uint8_t> weights = packed(random_weights(layout, random));
    std::vector<int8_t> a(static_cast<size_t>(m * layout.blocks * kBlockInputs), 3);
    std::vector<int32_t> sums(static_cast<size_t>(m * layout.segments), 96);
    std::vector<float> scales(static_cast<size_t>(m * layout.segments), 0.5f);
    alignas(64) static uint8_t scratch[kLinearScratchBytes];
    std::vector<uint8_t> out(static_cast<size_t>(m * kOutputs * 4));
    check(row.name, out, [&] {
      forget(scratch, sizeof scratch);
      LinearArgs args{};
      args.panels = weights.data() + layout.header_bytes;
      args.layout = layout;
      args.panel_end = layout.panels;
      args.a = a.data();
      args.scales = scales.data();
      args.sums = sums.data();
      args.m = m;
      args.out = out.data();
      args.out_dtype = DType::f32;
      args.out_stride = kOutputs;
      args.scratch = scratch;
      row.run(args);
    }, {{"an activation", {a.data(), 40}}, {"a scale of a segment", {scales.data(), 1}},
        {"a code", {weights.data(), layout.header_bytes + 5}},
        {"a bias", {weights.data(), layout.header_bytes + layout.head_offset + 132}}});
  }
}

TEST(Unwritten, EveryEmbeddingKernelIsSeenThrough) {
  constexpr int64_t kInputs = 75;
  for (size_t i = 0; i < embedding_kernel_count(); ++i) {
    const EmbeddingKernel& row = embedding_kernel(i);
    if (!runs(row)) continue;
    Random random(3);
    const Layout layout = layout_of(20, kInputs, row.bits, 32, Mapping::symmetric, false);
    std::vector<uint8_t> weights = packed(random_weights(layout, random));
    std::vector<uint8_t> out(kInputs * 4);
    check(row.name, out, [&] {
      row.run({weights.data() + layout.header_bytes, layout, 1, out.data(), DType::f32});
    }, {{"a code", {weights.data(), layout.header_bytes + 4}}});
  }
}

// The operator with this CPU's kernel, on ten positions, five of which are in the caches before the call. All caches except
// those of 4 bits, whose codes are indices, have unwritten places next to those that the operator reads. The test uses the last
// byte of a float, because rounding hides the first from MemorySanitizer.
TEST(Unwritten, TheOperatorOfAttentionIsSeenThrough) {
  constexpr int64_t kWidth = 32, kBefore = 5;
  const std::pair<ElementType, int64_t> caches[] = {
      {ElementType::f32, kWidth}, {ElementType::bf16, kWidth}, {ElementType::f16, kWidth},
      {ElementType::i8, kWidth + 4}, {ElementType::i8, kWidth / 2 + 4}};
  for (const auto& [type, cache_width] : caches) {
    Random random(4);
    const auto make = [&](int64_t heads) { return random_tensor(ElementType::f32, {1, heads, kBefore, kWidth}, random); };
    const Tensor q = make(2), k = make(1), v = make(1), sinks = random_tensor(ElementType::f32, {2}, random);
    const Tensor k_cache(type, {1, 1, 16, cache_width}), v_cache(type, {1, 1, 16, cache_width});
    if (cache_width < kWidth) {
      for (const Tensor* cache : {&k_cache, &v_cache}) accept(cache->memory->data(), cache->memory->size());
    }
    const Tensor result(ElementType::f32, {1, kBefore, 2, kWidth});
    std::vector<uint8_t> out(static_cast<size_t>(result.memory->size()));
    const auto run = [&](int64_t begin) {
      const Tensor start = index_tensor<int64_t>({begin});
      forget(result.memory->data(), result.memory->size());
      const Status status = attention(q.view, k.view, v.view, k_cache.view, v_cache.view, start.view,
                                      {0.2, 0, 0.0, &sinks.view}, result.view, {});
      EXPECT_TRUE(status.ok()) << status.message();
      std::memcpy(out.data(), result.memory->data(), out.size());
    };
    run(0);
    const std::string name = std::string("attention, ") + name_of(type) + ", " + std::to_string(cache_width) + " a position";
    check(name.c_str(), out, [&] { run(kBefore); },
          {{"a query", {q.memory->data(), 7}}, {"a key", {k.memory->data(), 11}}, {"a value", {v.memory->data(), 11}},
           {"a sink", {sinks.memory->data(), 7}}, {"a key before", {k_cache.memory->data(), 0}},
           {"a value before", {v_cache.memory->data(), 0}}});
  }
}

}  // namespace
}  // namespace lowbit::test
