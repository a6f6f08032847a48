// Every kernel of the attention table. The portable kernel is compared with the contract in float32 (equal bits) and float64 (a
// derived bound), all others with the portable kernel (equal bits).

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>

#include "support/attention_reference.h"
#include "support/coverage.h"
#include "support/guarded.h"
#include "support/random.h"

namespace lowbit::test {
namespace {

// Content of the queries and the text.
enum class Content {
  usual, sharp, huge, rising, tiny, nan_in_q, nan_in_k, infinite_q, infinite_k, infinite_v, subnormal,
  far_apart
};

constexpr float kFactor = 0.2f;

// Options of some models.
struct More {
  int64_t window = 0;       // 0: none
  float cap = 0.0f;         // AttentionArgs::cap
  bool sinks = false;
  int64_t value_width = 0;  // 0: as wide as the keys
};

// Types of queries and outputs, and of the caches.
struct Kind {
  DType dtype;
  CacheType cache;

  std::string name() const {
    constexpr const char* kNames[] = {"f32", "bf16", "f16", "int8", "int4", "int8,int4"};
    return std::string(name_of(dtype)) + " over " + kNames[static_cast<int>(cache)];
  }
  // 4-bit keys and values have other widths.
  int64_t fit(int64_t width) const { return value_type(cache) == CacheType::i4 ? (width + 31) / 32 * 32 : width; }
};

constexpr Kind kKinds[] = {{DType::f32, CacheType::f32},  {DType::bf16, CacheType::bf16}, {DType::f16, CacheType::f16},
                           {DType::f32, CacheType::i8},   {DType::f32, CacheType::bf16},  {DType::f32, CacheType::f16},
                           {DType::bf16, CacheType::i8},  {DType::f16, CacheType::i8_i4}, {DType::bf16, CacheType::f32},
                           {DType::f16, CacheType::bf16}, {DType::f32, CacheType::i4},    {DType::bf16, CacheType::i8_i4},
                           {DType::f16, CacheType::i4}};
constexpr size_t kKindCount = std::size(kKinds);

// A 4-bit code: half of the byte at `index`.
void store_code(void* base, int64_t index, bool upper, float level) {
  int code = 0;
  while (level_of_code(code) != level) ++code;
  uint8_t& byte = static_cast<uint8_t*>(base)[index];
  byte = static_cast<uint8_t>(upper ? (byte & 15) | code << 4 : (byte & 0xf0) | code);
}

void store_cached(void* base, CacheType cache, int64_t index, float value) {  // not for 4 bits
  if (cache != CacheType::i8) {
    return store_from_f32(base, cache == CacheType::f32 ? DType::f32 : cache == CacheType::bf16 ? DType::bf16 : DType::f16,
                          index, value);
  }
  static_cast<int8_t*>(base)[index] = static_cast<int8_t>(value);
}

// A text of one head of keys and values, and queries for rows of given lengths.
struct Problem {
  int64_t width, value_width;
  Kind kind;
  DType dtype;
  float cap;
  std::vector<int64_t> begins, lengths;
  std::vector<std::vector<float>> q;
  std::vector<float> given_keys, given_values;  // in order of positions
  std::vector<float> keys, values;              // as in the caches: the levels of codes
  std::vector<float> key_scales, value_scales;  // of codes, by position
  std::vector<float> sinks;                     // per row, or empty
  Guarded q_bytes, key_panels, value_bytes, key_scale_bytes, value_scale_bytes;

  int64_t item() const { return size_of(dtype); }
  int64_t panels() const { return (length() + 15) / 16 * 16; }
  int64_t length() const { return lengths.back(); }

  Problem(int64_t width, Kind kind, const std::vector<int64_t>& lengths, Content content, Wall wall,
          int64_t misaligned, Random& random, const More& more = {})
      : width(kind.fit(width)), value_width(kind.fit(more.value_width > 0 ? more.value_width : width)), kind(kind),
        dtype(kind.dtype), cap(more.cap), lengths(lengths),
        q_bytes(static_cast<int64_t>(lengths.size()) * this->width * size_of(dtype), wall, misaligned),
        key_panels(cache_bytes(key_type(kind.cache), panels() * this->width), wall, misaligned),
        value_bytes(cache_bytes(value_type(kind.cache), lengths.back() * value_width), wall, misaligned),
        key_scale_bytes(scale_bytes(), wall, misaligned), value_scale_bytes(scale_bytes(), wall, misaligned) {
    width = this->width;
    for (const int64_t length : lengths) {
      begins.push_back(more.window > 0 && more.window < length ? length - more.window : 0);
      if (more.sinks) sinks.push_back(3.0f * random.normal());
    }
    const auto make = [&](int64_t count, float magnitude) {
      std::vector<float> made;
      for (int64_t i = 0; i < count; ++i) made.push_back(magnitude * random.normal());
      return made;
    };
    const float magnitude = content == Content::sharp ? 40.0f : content == Content::huge ? 3e3f
                            : content == Content::tiny ? 1e-6f : 1.0f;
    for (size_t r = 0; r < lengths.size(); ++r) q.push_back(make(width, magnitude));
    keys = make(length() * width, content == Content::huge ? 3e3f : 1.0f);
    values = make(length() * value_width, content == Content::tiny ? 1e-6f : 1.0f);
    if (content == Content::rising) {  // every score exceeds the earlier ones: a new maximum in every block
      for (auto& row : q) row.assign(row.size(), 1.0f);
      for (int64_t j = 0; j < length(); ++j) keys[static_cast<size_t>(j * width)] += 0.125f * static_cast<float>(j);
    }
    if (content == Content::far_apart) {  // all the weight is at the first position, or at one of the last
      for (auto& row : q) row.assign(row.size(), 100.0f);
      for (int64_t i = 0; i < width; ++i) keys[static_cast<size_t>(i)] = 3.0f;
    }
    if (content == Content::subnormal) {  // about 2^-126 * 127: at and below the smallest scale of an int8 cache
      for (size_t i = 0; i < keys.size(); ++i) keys[i] *= i / static_cast<size_t>(width) % 2 != 0 ? 0x1p-119f : 0x1p-121f;
      for (size_t i = 0; i < values.size(); ++i) values[i] *= 0x1p-119f;
      for (int64_t i = 0; i < value_width; ++i) values[static_cast<size_t>(i)] = 0.0f;
    }
    const float infinity = float_from_bits(0x7f800000u), nan = float_from_bits(0xffc12345u);
    const size_t some = static_cast<size_t>(length() / 2 * width + 3);
    const size_t some_value = static_cast<size_t>(length() / 2 * value_width + 3);
    if (content == Content::nan_in_q) q.back()[1] = nan;
    if (content == Content::infinite_q) q.back()[1] = -infinity;
    if (content == Content::nan_in_k) keys[some] = nan;
    if (content == Content::infinite_k) keys[some] = infinity;
    if (content == Content::infinite_v) values[some_value] = -infinity;

    // Rounds the numbers to the type.
    const auto round = [&](std::vector<float>& numbers) { numbers = from_bytes(to_bytes(numbers, dtype), dtype); };
    for (auto& row : q) round(row);
    round(keys);
    round(values);
    given_keys = keys;
    given_values = values;
    const CacheType key_cache = key_type(kind.cache), value_cache = value_type(kind.cache);
    to_cache(key_cache, keys, width, key_scales, key_scale_bytes);
    to_cache(value_cache, values, value_width, value_scales, value_scale_bytes);
    for (size_t r = 0; r < q.size(); ++r) {
      const std::vector<uint8_t> bytes = to_bytes(q[r], dtype);
      std::memcpy(q_bytes.data() + r * bytes.size(), bytes.data(), bytes.size());
    }
    for (int64_t n = 0; n < static_cast<int64_t>(values.size()); ++n) {
      const float value = values[static_cast<size_t>(n)];
      const int64_t i = n % value_width;
      if (value_cache != CacheType::i4) store_cached(value_bytes.data(), value_cache, n, value);
      else store_code(value_bytes.data(), n / value_width * value_width / 2 + i / 32 * 16 + i % 16, i % 32 >= 16, value);
    }
    std::memset(key_panels.data(), 0xff, static_cast<size_t>(key_panels.size()));  // NaN after the text
    for (int64_t j = 0; j < length(); ++j) {
      for (int64_t i = 0; i < width; ++i) {
        const int64_t quad = (j / 16 * width / 4 + i / 4) * 64 + j % 16 * 4 + i % 4;
        const int64_t at = key_cache == CacheType::i8 ? quad : ((j / 16) * width + i) * 16 + j % 16;
        const float key = keys[static_cast<size_t>(j * width + i)];
        if (key_cache != CacheType::i4) store_cached(key_panels.data(), key_cache, at, key);
        else store_code(key_panels.data(), (j / 16 * width / 2 + i / 2) * 16 + j % 16, i % 2 != 0, key);
      }
    }
    for (Guarded* input : {&q_bytes, &key_panels, &value_bytes, &key_scale_bytes, &value_scale_bytes}) input->freeze();
  }

  int64_t scale_bytes() const { return has_scales(kind.cache) ? panels() * 4 : 4; }

  // Keys or values in cache format, and their scales; NaN after the text.
  void to_cache(CacheType cache, std::vector<float>& numbers, int64_t wide, std::vector<float>& scales,
                Guarded& bytes) const {
    std::memset(bytes.data(), 0xff, static_cast<size_t>(bytes.size()));
    if (!has_scales(cache)) {
      const DType type = cache == CacheType::f32 ? DType::f32 : cache == CacheType::bf16 ? DType::bf16 : DType::f16;
      numbers = from_bytes(to_bytes(numbers, type), type);
      return;
    }
    for (int64_t j = 0; j < length(); ++j) {
      const auto at = numbers.begin() + j * wide;
      const bool paired = cache == CacheType::i4;
      const QuantizedPosition position =
          paired ? contract_quantize_rotated({at, at + wide}) : contract_quantize_position({at, at + wide});
      std::transform(position.codes.begin(), position.codes.end(), at,
                     [&](int8_t code) { return paired ? level_of_code(code) : static_cast<float>(code); });
      scales.push_back(position.scale);
      store_from_f32(bytes.data(), DType::f32, j, position.scale);
    }
  }
  const void* scales(const Guarded& bytes) const { return has_scales(kind.cache) ? bytes.data() : nullptr; }

  // Rows [begin, end) in one call.
  std::vector<uint8_t> run(const AttentionKernel& kernel, int64_t begin, int64_t end) const {
    const int64_t row_bytes = value_width * item();
    Guarded out((end - begin) * row_bytes);
    Guarded scratch(attention_scratch(width, value_width) * 4);
    std::memset(scratch.data(), 0xff, static_cast<size_t>(scratch.size()));
    const void* q_rows[kAttentionRows];
    void* out_rows[kAttentionRows];
    for (int64_t r = begin; r < end; ++r) {
      q_rows[r - begin] = q_bytes.data() + r * width * item();
      out_rows[r - begin] = out.data() + (r - begin) * row_bytes;
    }
    kernel.run({end - begin, q_rows, out_rows, begins.data() + begin, lengths.data() + begin,
                sinks.empty() ? nullptr : sinks.data() + begin, key_panels.data(), value_bytes.data(),
                scales(key_scale_bytes), scales(value_scale_bytes), dtype, kind.cache, width, value_width, kFactor, cap,
                scratch.as<float>()});
    EXPECT_TRUE(out.intact() && scratch.intact()) << "wrote outside of the output or the scratch";
    EXPECT_TRUE(q_bytes.intact() && key_panels.intact() && value_bytes.intact() && key_scale_bytes.intact() &&
                value_scale_bytes.intact())
        << "wrote to an input";
    return out.bytes();
  }

  // Runs all rows, at most `most` per call.
  std::vector<uint8_t> run(const AttentionKernel& kernel, int64_t most) const {
    std::vector<uint8_t> all;
    const int64_t rows = static_cast<int64_t>(lengths.size());
    for (int64_t begin = 0; begin < rows; begin += most) {
      const std::vector<uint8_t> some = run(kernel, begin, begin + most < rows ? begin + most : rows);
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }

  // Runs all rows, which see the same positions, span by span from last to first.
  std::vector<uint8_t> run_spans(const AttentionKernel& kernel) const {
    const int64_t rows = static_cast<int64_t>(lengths.size()), row_bytes = value_width * item();
    const int64_t first = begins[0] / kAttentionSpan, spans = (length() - 1) / kAttentionSpan + 1 - first;
    const int64_t size = attention_partial(rows, value_width);
    Guarded out(rows * row_bytes), scratch(attention_scratch(width, value_width) * 4), partials(spans * size * 4);
    for (Guarded* memory : {&scratch, &partials}) std::memset(memory->data(), 0xff, static_cast<size_t>(memory->size()));
    const void* q_rows[kAttentionRows];
    void* out_rows[kAttentionRows];
    for (int64_t r = 0; r < rows; ++r) {
      q_rows[r] = q_bytes.data() + r * width * item();
      out_rows[r] = out.data() + r * row_bytes;
    }
    for (int64_t span = spans - 1; span >= 0; --span) {
      const int64_t begin = (first + span) * kAttentionSpan, end = begin + kAttentionSpan;
      const std::vector<int64_t> from(lengths.size(), std::max(begin, begins[0]));
      const std::vector<int64_t> to(lengths.size(), std::min(end, length()));
      kernel.run({rows, q_rows, nullptr, from.data(), to.data(), sinks.empty() || span > 0 ? nullptr : sinks.data(),
                  key_panels.data(), value_bytes.data(), scales(key_scale_bytes), scales(value_scale_bytes), dtype,
                  kind.cache, width, value_width, kFactor, cap, scratch.as<float>(), partials.as<float>() + span * size});
    }
    kernel.join({rows, spans, partials.as<float>(), out_rows, dtype, kind.cache, value_width});
    EXPECT_TRUE(out.intact() && scratch.intact() && partials.intact()) << "wrote outside of its memory";
    return out.bytes();
  }

  std::vector<uint8_t> run_contract(bool bounded) const {
    std::vector<uint8_t> all;
    for (size_t r = 0; r < q.size(); ++r) {
      const Sight sight{begins[r], lengths[r], cap, sinks.empty() ? nullptr : &sinks[r],
                        key_scales.empty() ? nullptr : key_scales.data(),
                        value_scales.empty() ? nullptr : value_scales.data(), key_type(kind.cache) == CacheType::i4,
                        value_type(kind.cache) == CacheType::i4};
      const std::vector<float> row = contract_attention(q[r], kFactor, keys, values, value_width, sight);
      if (bounded) {
        const std::vector<Bounded> exact = exact_attention(q[r], kFactor, keys, values, value_width, sight);
        for (size_t i = 0; i < row.size(); ++i) {
          EXPECT_LE(std::fabs(row[i] - exact[i].value), exact[i].bound) << "value [" << r << ", " << i << "]";
          EXPECT_LT(exact[i].bound, 0.1) << "a bound that says nothing";
        }
      }
      const std::vector<uint8_t> bytes = to_bytes(row, dtype);
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
};

// As in the operator: `group` rows for each of `count` positions from `start` on.
std::vector<int64_t> lengths_of(int64_t start, int64_t count, int64_t group) {
  std::vector<int64_t> lengths;
  for (int64_t r = 0; r < count * group; ++r) lengths.push_back(start + r / group + 1);
  return lengths;
}

class AttentionRow : public testing::TestWithParam<RowRef> {
 protected:
  bool is_right(const AttentionKernel& kernel, const Problem& problem, bool bounded, const std::string& what) {
    SCOPED_TRACE(what);
    set_current_case((std::string(kernel.name) + " " + what).c_str());
    const std::vector<uint8_t> expected = kernel.isa == kPortable ? problem.run_contract(bounded)
                                                                  : problem.run(choose_attention(kPortable), 16);
    EXPECT_TRUE(same_bits(problem.run(kernel, 16), expected, problem.dtype));
    return !HasFailure();
  }
};

TEST_P(AttentionRow, SameBits) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const AttentionKernel& kernel = attention_kernel(GetParam().index);
  note_exercised(kernel.name);
  // Each width runs with one type, because emulators are slow.
  constexpr int64_t kWidths[] = {16, 32, 64, 80, 128};
  uint64_t index = 0;
  for (const int64_t group : {1, 2, 3, 4}) {
    for (const int64_t count : {1, 2, 7, 16, 33}) {
      for (const int64_t start : {0, 5, 15, 16, 17, 300}) {
        const Kind kind = kKinds[++index % kKindCount];
        const int64_t width = kWidths[(index + index / 30) % 5];
        Random random(index);
        const Problem problem(width, kind, lengths_of(start, count, group), Content::usual,
                              index % 2 != 0 ? Wall::after : Wall::before, index % 7 == 0 ? 1 : 0, random);
        const std::string what = kind.name() + " width " + std::to_string(width) + " group " +
                                 std::to_string(group) + " count " + std::to_string(count) + " start " +
                                 std::to_string(start);
        if (!is_right(kernel, problem, true, what)) return;
      }
    }
  }
}

// Lengths that the operator does not use, all widths up to the largest, extreme contents.
TEST_P(AttentionRow, SameBitsAtTheLimits) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const AttentionKernel& kernel = attention_kernel(GetParam().index);
  const std::vector<std::vector<int64_t>> shapes = {
      {1}, {256}, {257}, {1, 256, 257, 600}, {3, 3, 3, 250, 255, 256, 256, 257, 511, 512, 513}, {40, 41, 42, 43, 44}};
  for (int content = 0; content <= static_cast<int>(Content::far_apart); ++content) {
    for (size_t shape = 0; shape < shapes.size(); ++shape) {
      for (const Kind& kind : kKinds) {
        for (const int64_t misaligned : {0, 2}) {
          // Mixed types run in turn, because emulators are slow.
          if (cache_type_of(kind.dtype) != kind.cache && (shape + static_cast<size_t>(&kind - kKinds)) % 3 != 0) continue;
          Random random(shape + 100);
          const int64_t width = content == 0 && shape < 4 ? 256 : 48;
          const Problem problem(width, kind, shapes[shape], static_cast<Content>(content), Wall::after, misaligned,
                                random);
          const std::string what = kind.name() + " content " + std::to_string(content) + " shape " +
                                   std::to_string(shape) + " misaligned " + std::to_string(misaligned);
          if (!is_right(kernel, problem, content == 0, what)) return;
        }
      }
    }
  }
}

// Windows, caps, sinks, and values that are wider or narrower than keys.
TEST_P(AttentionRow, SameBitsOfOtherScores) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const AttentionKernel& kernel = attention_kernel(GetParam().index);
  uint64_t index = 0;
  for (const int64_t window : {0, 1, 2, 7, 16, 100, 256, 300}) {
    for (const float cap : {0.0f, 1.0f, 72.0f}) {
      for (const int64_t start : {0, 40, 250, 509, 700}) {
        const Kind kind = kKinds[++index % kKindCount];
        const More more{window, cap, index % 2 != 0, index % 4 == 0 ? 32 : index % 4 == 1 ? 96 : 0};
        const Content content = index % 11 == 0 ? Content::sharp : index % 7 == 0 ? Content::far_apart : Content::usual;
        Random random(index);
        const Problem problem(index % 7 == 0 ? 192 : 64, kind, lengths_of(start, 9, 2), content,
                              index % 2 != 0 ? Wall::after : Wall::before, 0, random, more);
        const std::string what = kind.name() + " window " + std::to_string(window) + " cap " +
                                 std::to_string(cap) + " start " + std::to_string(start);
        if (!is_right(kernel, problem, content == Content::usual, what)) return;
      }
    }
  }
}

// Positions that a row does not see may hold anything.
TEST_P(AttentionRow, OutOfTheWindow) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const AttentionKernel& kernel = attention_kernel(GetParam().index);
  for (const Content content : {Content::nan_in_k, Content::infinite_k, Content::infinite_v}) {  // at position 300
    for (const int64_t window : {5, 150, 284}) {
      for (const CacheType cache : {CacheType::f32, CacheType::i8_i4, CacheType::i4}) {
        Random random(3);
        const Problem problem(48, {DType::f32, cache}, lengths_of(584, 16, 1), content, Wall::after, 0, random, {window});
        if (!is_right(kernel, problem, false, "window " + std::to_string(window))) return;
        for (const float value : from_bytes(problem.run(kernel, 16), DType::f32)) EXPECT_TRUE(std::isfinite(value));
      }
    }
  }
}

TEST_P(AttentionRow, RowsDoNotDependOnEachOther) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const AttentionKernel& kernel = attention_kernel(GetParam().index);
  for (const Kind& kind : {kKinds[0], kKinds[1], kKinds[2], kKinds[3], kKinds[10]}) {
    for (const Content content : {Content::usual, Content::rising, Content::nan_in_q, Content::infinite_v}) {
      Random random(7);
      for (const int64_t window : {0, 40}) {
        const Problem problem(80, kind, {1, 5, 6, 7, 20, 200, 255, 256, 257, 258, 270, 290, 300, 300, 520, 521}, content,
                              Wall::after, 0, random, {window, window > 0 ? 3.0f : 0.0f, window > 0});
        const std::vector<uint8_t> together = problem.run(kernel, 16);
        for (const int64_t most : {1, 2, 3, 5, 7}) {
          EXPECT_TRUE(same_bits(problem.run(kernel, most), together, kind.dtype)) << "with " << most << " rows at once";
        }
      }
    }
  }
}

// Spans computed separately, in any order, and joined give the result of one call.
TEST_P(AttentionRow, SpansOnTheirOwn) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const AttentionKernel& kernel = attention_kernel(GetParam().index);
  uint64_t index = 0;
  for (const int64_t length : {512, 513, 1024, 1100, 2049}) {
    for (const int64_t rows : {1, 3, 16}) {
      for (const int64_t window : {0, 600}) {
        const Kind kind = kKinds[++index % kKindCount];
        const Content content = index % 5 == 0 ? Content::rising : index % 7 == 0 ? Content::infinite_k : Content::usual;
        const More more{window, index % 3 == 0 ? 3.0f : 0.0f, index % 2 != 0, index % 4 == 0 ? 32 : 0};
        Random random(index);
        const Problem problem(48, kind, std::vector<int64_t>(static_cast<size_t>(rows), length), content, Wall::after, 0,
                              random, more);
        SCOPED_TRACE(kind.name() + " length " + std::to_string(length) + " rows " + std::to_string(rows) + " window " +
                     std::to_string(window));
        const std::vector<uint8_t> expected = problem.run(kernel, 16);
        if (rows == 1) {
          ASSERT_TRUE(same_bits(expected, kernel.isa == kPortable ? problem.run_contract(false)
                                                                  : problem.run(choose_attention(kPortable), 16),
                                kind.dtype));
        }
        ASSERT_TRUE(same_bits(problem.run_spans(kernel), expected, kind.dtype));
      }
    }
  }
}

// A text written position by position, or several positions at a time, gives the keys and values that `run` reads, and nothing
// else is written.
TEST_P(AttentionRow, WritesWhatItReads) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const AttentionKernel& kernel = attention_kernel(GetParam().index);
  constexpr int64_t kLength = 55;
  constexpr Content kContents[] = {Content::usual, Content::tiny,       Content::nan_in_k, Content::infinite_k,
                                   Content::huge,  Content::infinite_v, Content::subnormal};
  // Positions of each call: one at a time; pieces that begin and end anywhere in a panel, with whole panels between; all.
  const std::vector<std::vector<int64_t>> pieces_of = {std::vector<int64_t>(kLength, 1), {3, 2, 11, 1, 35, 3}, {kLength}};
  size_t index = 0;
  for (const Kind& kind : kKinds) {
    const DType dtype = kind.dtype;
    for (const int64_t asked : {16, 80, 256}) {
      const int64_t width = kind.fit(asked);
      for (const int64_t step : {1, 3}) {
        for (const int64_t misaligned : {0, 2}) {
          Random random(static_cast<uint64_t>(width + step));
          const Content content = kContents[++index % std::size(kContents)];
          const Problem problem(width, kind, {kLength}, content, Wall::after, misaligned, random);
          const std::vector<int64_t>& pieces = pieces_of[kernel.writes_several ? index % pieces_of.size() : 0];
          SCOPED_TRACE(kind.name() + " content " + std::to_string(static_cast<int>(content)) + " pieces " +
                       std::to_string(pieces.size()));
          Guarded keys(problem.key_panels.size(), Wall::after, misaligned);
          Guarded values(problem.value_bytes.size(), Wall::after, misaligned);
          std::memset(keys.data(), 0xff, static_cast<size_t>(keys.size()));
          std::memset(values.data(), 0xff, static_cast<size_t>(values.size()));
          Guarded key_scales(problem.scale_bytes(), Wall::after, misaligned);
          Guarded value_scales(problem.scale_bytes(), Wall::after, misaligned);
          std::memset(key_scales.data(), 0xff, static_cast<size_t>(key_scales.size()));
          std::memset(value_scales.data(), 0xff, static_cast<size_t>(value_scales.size()));
          // A position begins 2 (keys) or 1 (values) elements after the end of the one before.
          const int64_t row = (width - 1) * step + 1, k_row = row + 2, v_row = row + 1;
          Guarded k((kLength * k_row - 2) * size_of(dtype)), v((kLength * v_row - 1) * size_of(dtype));
          for (int64_t position = 0; position < kLength; ++position) {
            for (int64_t i = 0; i < width; ++i) {
              const size_t at = static_cast<size_t>(position * width + i);
              store_from_f32(k.data(), dtype, position * k_row + i * step, problem.given_keys[at]);
              store_from_f32(v.data(), dtype, position * v_row + i * step, problem.given_values[at]);
            }
          }
          std::vector<int64_t> begins(pieces.size());
          std::exclusive_scan(pieces.begin(), pieces.end(), begins.begin(), int64_t{0});
          for (size_t n = 0; n < pieces.size(); ++n) {
            const size_t piece = n * 7 % pieces.size();  // in any order
            const int64_t position = begins[piece];
            const bool scaled = has_scales(kind.cache);
            AttentionWriteArgs args{k.data() + position * k_row * size_of(dtype), v.data() + position * v_row * size_of(dtype),
                                    step, step, keys.data(), values.data(), scaled ? key_scales.data() : nullptr,
                                    scaled ? value_scales.data() : nullptr, position, dtype, kind.cache, width, width};
            if (pieces[piece] > 1) args.positions = pieces[piece];
            args.k_position_step = k_row;
            args.v_position_step = v_row;
            kernel.write(args);
          }
          EXPECT_TRUE(keys.intact() && values.intact() && key_scales.intact() && value_scales.intact())
              << "wrote outside of the caches";
          EXPECT_EQ(key_scales.bytes(), problem.key_scale_bytes.bytes());
          EXPECT_EQ(value_scales.bytes(), problem.value_scale_bytes.bytes());
          EXPECT_EQ(keys.bytes(), problem.key_panels.bytes());
          EXPECT_EQ(values.bytes(), problem.value_bytes.bytes());
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, AttentionRow, testing::ValuesIn(attention_rows()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AttentionRow);

}  // namespace
}  // namespace lowbit::test
