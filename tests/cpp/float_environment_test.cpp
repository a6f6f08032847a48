// Results have the same bits for all float settings of threads: rounding upwards, or flushing subnormal numbers to zero.

#include "../../ops/float_environment.h"

#include <gtest/gtest.h>

#include <cfenv>
#include <functional>

#include "support/tensors.h"

namespace lowbit::test {
namespace {

// Settings that a host may have left on a thread.
struct Setting {
  const char* name;
  void (*set)();
};
#if defined(__x86_64__)
void flush_to_zero() {
  const unsigned settings = __builtin_ia32_stmxcsr() | 0x8040;
  __builtin_ia32_ldmxcsr(settings);
}
#elif defined(__aarch64__)
void flush_to_zero() {
  uint64_t settings;
  __asm__ volatile("mrs %0, fpcr" : "=r"(settings));
  __asm__ volatile("msr fpcr, %0" ::"r"(settings | 1u << 24));
}
#else
void flush_to_zero() {}
#endif
void round_up() { std::fesetround(FE_UPWARD); }
void round_to_zero() { std::fesetround(FE_TOWARDZERO); }
constexpr Setting kSettings[] = {
    {"flush to zero", flush_to_zero}, {"round up", round_up}, {"round to zero", round_to_zero}};

// 2^-126 / 3: subnormal, and rounded.
float third_of_the_least_normal() {
  volatile float least = 0x1p-126f, three = 3.0f;
  return least / three;
}

// Runs with a setting on every second thread or on all, and checks that the threads still have it afterwards.
const Setting* current;
bool every_thread;
Parallel host_with_setting() {
  return {3, [](int tasks, void (*task)(void*, int), void* context) {
            for (int i = 0; i < tasks; ++i) {
              std::thread([=] {
                if (every_thread || i % 2 == 0) current->set();
                const float before = third_of_the_least_normal();
                task(context, i);
                EXPECT_EQ(bits_of_float(third_of_the_least_normal()), bits_of_float(before)) << current->name;
              }).join();
            }
          }};
}

// `run` returns the bytes of a result on a host.
void expect_same_bits(const char* what, DType dtype, const std::function<std::vector<uint8_t>(const Parallel&)>& run) {
  const std::vector<uint8_t> expected = run({});
  for (const Setting& setting : kSettings) {
    current = &setting;
    for (const bool every : {false, true}) {
      every_thread = every;
      SCOPED_TRACE(std::string(what) + ", " + setting.name);
      EXPECT_TRUE(same_bits(run(host_with_setting()), expected, dtype)) << "on other threads";
    }
    std::thread([&] {
      setting.set();
      const std::vector<uint8_t> alone = run({}), with_others = run(host_with_setting());
      std::fesetenv(FE_DFL_ENV);
      EXPECT_TRUE(same_bits(alone, expected, dtype)) << what << ", " << setting.name << ", on the caller's thread";
      EXPECT_TRUE(same_bits(with_others, expected, dtype)) << what << ", " << setting.name << ", on the caller's too";
    }).join();
  }
}

Tensor small_values(const std::vector<int64_t>& sizes, float factor, uint64_t seed) {
  Random random(seed);
  Tensor tensor(ElementType::f32, sizes);
  for (int64_t i = 0; i < tensor.memory->size() / 4; ++i) tensor.memory->as<float>()[i] = factor * random.normal();
  return tensor;
}

TEST(FloatSettings, TheSettingsOfTheTestChangeResults) {
  const uint32_t expected = bits_of_float(third_of_the_least_normal());
  std::thread([&] {
    round_to_zero();
    const uint32_t cut = bits_of_float(third_of_the_least_normal());
    std::fesetenv(FE_DFL_ENV);
    EXPECT_NE(cut, expected);
  }).join();
#if defined(__x86_64__) || defined(__aarch64__)
  std::thread([] {
    flush_to_zero();
    const uint32_t flushed = bits_of_float(third_of_the_least_normal());
    std::fesetenv(FE_DFL_ENV);
    EXPECT_EQ(flushed, 0u);
  }).join();
#endif
}

TEST(FloatSettings, Linear) {
  Random random(1);
  const Layout layout = layout_of(200, 320, 4, 32, Mapping::affine, true);
  const Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  for (const int64_t m : {1, 3, 130}) {  // with 130 rows, threads also share the quantization
    for (const float factor : {1.0f, 1e-36f}) {
      const Tensor x = small_values({m, 320}, factor, 2);
      expect_same_bits("linear", DType::f32, [&](const Parallel& parallel) {
        Tensor out(ElementType::f32, {m, 200});
        const Status status = linear(x.view, weight.view, 200, out.view, parallel);
        EXPECT_TRUE(status.ok()) << status.message();
        return out.bytes();
      });
    }
  }
}

TEST(FloatSettings, LinearExperts) {
  Random random(7);
  const std::vector<uint8_t> one = packed(random_weights(layout_of(200, 320, 4, 32, Mapping::affine, true), random));
  Tensor weights(ElementType::u8, {2, static_cast<int64_t>(one.size())});
  for (size_t i = 0; i < 2; ++i) std::memcpy(weights.memory->data() + i * one.size(), one.data(), one.size());
  const Tensor x = small_values({130, 320}, 1e-36f, 8);
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < 130; ++i) chosen.push_back(i % 2);
  Tensor experts = index_tensor(chosen);
  const std::vector<int64_t> sizes = {130, 1};
  experts.view = view_of(experts.memory->data(), ElementType::i64, sizes, contiguous_strides(sizes));
  expect_same_bits("linear_experts", DType::f32, [&](const Parallel& parallel) {
    Tensor out(ElementType::f32, {130, 1, 200});
    const Status status = linear_experts(x.view, weights.view, experts.view, 200, out.view, parallel);
    EXPECT_TRUE(status.ok()) << status.message();
    return out.bytes();
  });
}

TEST(FloatSettings, Embedding) {
  Random random(2);
  const Layout layout = layout_of(60, 100, 3, 32, Mapping::affine, false);
  const Tensor weight = bytes_tensor(packed(random_weights(layout, random, 1e-38f)));
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < 600; ++i) indices.push_back(i % 60);
  const Tensor rows = index_tensor(indices);
  expect_same_bits("embedding", DType::f32, [&](const Parallel& parallel) {
    Tensor out(ElementType::f32, {600, 100});
    const Status status = embedding(rows.view, weight.view, 100, out.view, parallel);
    EXPECT_TRUE(status.ok()) << status.message();
    return out.bytes();
  });
}

TEST(FloatSettings, Attention) {
  const Tensor q = small_values({1, 4, 70, 32}, 1.0f, 3), k = small_values({1, 2, 70, 32}, 1.0f, 4);
  const Tensor v = small_values({1, 2, 70, 32}, 1e-38f, 5), start = index_tensor<int64_t>({0});
  expect_same_bits("attention", DType::f32, [&](const Parallel& parallel) {
    Tensor k_cache(ElementType::f32, {1, 2, 80, 32}), v_cache(ElementType::f32, {1, 2, 80, 32});
    Tensor out(ElementType::f32, {1, 70, 4, 32});
    const Status status = attention(q.view, k.view, v.view, k_cache.view, v_cache.view, start.view,
                                    {0.1767767}, out.view, parallel);
    EXPECT_TRUE(status.ok()) << status.message();
    return out.bytes();
  });
}

TEST(FloatSettings, QuantizeAndPack) {
  const Tensor weight = small_values({2000, 64}, 0.02f, 6);
  expect_same_bits("quantize and pack", DType::f32, [&](const Parallel& parallel) {
    Tensor codes(ElementType::u8, {2000, 64}), scales(ElementType::f32, {2000, 2}), mins(ElementType::f32, {2000, 2});
    Status status = quantize(weight.view, 4, 32, true, false, codes.view, scales.view, mins.view, parallel);
    EXPECT_TRUE(status.ok()) << status.message();
    Layout layout;
    status = pack_shape(codes.view, 4, 32, true, false, &layout);
    EXPECT_TRUE(status.ok()) << status.message();
    Tensor out(ElementType::u8, {layout.total_bytes});
    status = pack(codes.view, scales.view, &mins.view, nullptr, 4, 32, out.view, parallel);
    EXPECT_TRUE(status.ok()) << status.message();
    return out.bytes();
  });
}

}  // namespace
}  // namespace lowbit::test
