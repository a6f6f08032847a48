// Every kernel of the recurrence table has the bits of the portable kernel, for any split of a text, and stays within its
// memory. tests/python/hf/test_recurrent.py compares the chosen kernels with the definition.

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "support/coverage.h"
#include "support/guarded.h"
#include "support/random.h"
#include "support/reference.h"

namespace lowbit::test {
namespace {

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

struct Case {
  DType dtype;
  int64_t tokens, width, columns;
  bool per_row, delta, norm;
  float odd;  // one number of v and of the decays; 0: none
};

void fill(Guarded& memory, DType dtype, float scale, Random& random) {
  for (int64_t i = 0; i < memory.size() / size_of(dtype); ++i) {
    store_from_f32(memory.data(), dtype, i, scale * random.normal());
  }
}

// Outputs and state, after calls that begin at the given tokens.
std::vector<uint8_t> run(const RecurrenceKernel& kernel, const Case& one, const std::vector<int64_t>& begins) {
  Random random(static_cast<uint64_t>(one.tokens * 131 + one.width * 7 + one.columns));
  const int64_t item = size_of(one.dtype), panels = (one.columns + 15) / 16;
  Guarded q(one.tokens * one.width * item), k(q.size()), v(one.tokens * one.columns * item), out(v.size());
  Guarded decay(one.tokens * (one.per_row ? one.width : 1) * 4), beta(one.tokens * 4);
  Guarded state(panels * one.width * 16 * 4), scratch(linear_attention_scratch(one.width) * 4);
  for (Guarded* memory : {&q, &k, &v}) fill(*memory, one.dtype, 1.0f, random);
  for (int64_t i = 0; i < decay.size() / 4; ++i) decay.as<float>()[i] = -random.unit();
  for (int64_t i = 0; i < one.tokens; ++i) beta.as<float>()[i] = random.unit();
  if (one.odd != 0.0f) {
    store_from_f32(v.data(), one.dtype, one.tokens / 2 * one.columns, one.odd);
    decay.as<float>()[decay.size() / 4 - 1] = one.odd;
  }
  std::memset(state.data(), 0xff, static_cast<size_t>(state.size()));  // NaN, which a new text must not read
  for (Guarded* memory : {&q, &k, &v, &decay, &beta}) memory->freeze();
  for (size_t i = 0; i < begins.size(); ++i) {
    const int64_t begin = begins[i], end = i + 1 < begins.size() ? begins[i + 1] : one.tokens;
    LinearAttentionArgs args{};
    args.q = q.data() + begin * one.width * item;
    args.k = k.data() + begin * one.width * item;
    args.v = v.data() + begin * one.columns * item;
    args.q_step = args.k_step = one.width;
    args.v_step = args.out_step = one.columns;
    args.decay_step = one.per_row ? one.width : 1;
    args.decay = decay.as<float>() + begin * args.decay_step;
    args.beta = one.delta ? beta.as<float>() + begin : nullptr;
    args.beta_step = 1;
    args.decay_per_row = one.per_row;
    args.fresh = begin == 0;
    args.state = state.as<float>();
    args.out = out.data() + begin * one.columns * item;
    args.dtype = one.dtype;
    args.tokens = end - begin;
    args.width = one.width;
    args.value_width = one.columns;
    args.scale = 0.25f;
    args.norm_epsilon = one.norm ? 1e-6f : 0.0f;
    args.scratch = scratch.as<float>();
    kernel.linear_attention(args);
  }
  for (const Guarded* memory : {&q, &k, &v, &out, &decay, &beta, &state, &scratch}) {
    EXPECT_TRUE(memory->intact()) << "wrote outside of its memory";
  }
  std::vector<uint8_t> all = out.bytes();
  if (one.odd == 0.0f) {  // NaNs in a state may have any bits
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t lanes = one.columns - panel * 16 < 16 ? one.columns - panel * 16 : 16;
      for (int64_t i = 0; i < one.width; ++i) {
        const uint8_t* const row = state.data() + (panel * one.width + i) * 64;
        all.insert(all.end(), row, row + lanes * 4);
      }
    }
  }
  return all;
}

std::vector<uint8_t> run_conv(const RecurrenceKernel& kernel, DType dtype, int64_t tokens, int64_t taps, int64_t channels,
                              bool bias, bool silu, int64_t cut) {
  Random random(static_cast<uint64_t>(tokens * 31 + taps * 7 + channels));
  const int64_t item = size_of(dtype);
  Guarded x(tokens * channels * item), weight(taps * channels * item), biases(channels * item);
  Guarded state((taps - 1) * channels * item), out(x.size());
  for (Guarded* memory : {&x, &weight, &biases}) {
    fill(*memory, dtype, 4.0f, random);
    memory->freeze();
  }
  std::memset(state.data(), 0xff, static_cast<size_t>(state.size()));
  for (int64_t begin = 0; begin < tokens; begin = begin == 0 ? cut : tokens) {
    const int64_t end = begin == 0 ? cut : tokens;
    kernel.short_conv({x.data() + begin * channels * item, channels, weight.data(), channels, bias ? biases.data() : nullptr,
                       state.data(), channels, out.data() + begin * channels * item, channels, dtype, end - begin, taps,
                       channels, silu, begin == 0});
  }
  for (const Guarded* memory : {&x, &weight, &biases, &state, &out}) {
    EXPECT_TRUE(memory->intact()) << "wrote outside of its memory";
  }
  std::vector<uint8_t> all = out.bytes(), last = state.bytes();
  all.insert(all.end(), last.begin(), last.end());
  return all;
}

class RecurrenceRow : public testing::TestWithParam<RowRef> {};

TEST_P(RecurrenceRow, LinearAttention) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const RecurrenceKernel& kernel = recurrence_kernel(GetParam().index);
  note_exercised(kernel.name);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kOdd[] = {0.0f, 0.0f, std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity, -1e30f, 2.0f};
  int64_t number = 0;
  for (const int64_t width : {1, 7, 16, 24, 128}) {
    for (const int64_t columns : {1, 5, 16, 40, 112}) {
      for (const bool per_row : {false, true}) {
        for (const bool delta : {false, true}) {
          ++number;
          const Case one{kTypes[number % 3], 1 + number % 37, width, columns, per_row, delta, number % 2 != 0,
                         kOdd[number % 7]};
          const std::string what = std::string(kernel.name) + " width " + std::to_string(width) + " columns " +
                                   std::to_string(columns) + " case " + std::to_string(number);
          SCOPED_TRACE(what);
          set_current_case(what.c_str());
          const std::vector<uint8_t> expected = run(choose_recurrence(kPortable), one, {0});
          EXPECT_EQ(run(kernel, one, {0}), expected);
          if (one.tokens > 3) EXPECT_EQ(run(kernel, one, {0, 1, 3}), expected);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(RecurrenceRow, ShortConv) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const RecurrenceKernel& kernel = recurrence_kernel(GetParam().index);
  note_exercised(kernel.name);
  int64_t number = 0;
  for (const int64_t taps : {1, 2, 3, 4, 16}) {
    for (const int64_t channels : {1, 15, 16, 70}) {
      for (const bool silu : {false, true}) {
        ++number;
        const int64_t tokens = 1 + number % 9;
        const DType dtype = kTypes[number % 3];
        const std::string what = std::string(kernel.name) + " taps " + std::to_string(taps) + " channels " +
                                 std::to_string(channels) + " case " + std::to_string(number);
        SCOPED_TRACE(what);
        set_current_case(what.c_str());
        const auto results = [&](const RecurrenceKernel& row, int64_t cut) {
          return run_conv(row, dtype, tokens, taps, channels, number % 4 < 2, silu, cut);
        };
        const std::vector<uint8_t> expected = results(choose_recurrence(kPortable), tokens);
        for (const int64_t cut : {tokens, int64_t{1}, (tokens + 1) / 2}) EXPECT_EQ(results(kernel, cut), expected);
        if (HasFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, RecurrenceRow, testing::ValuesIn(recurrence_rows()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RecurrenceRow);

}  // namespace
}  // namespace lowbit::test
