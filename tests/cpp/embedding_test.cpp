// Every kernel of the embedding table. Portable kernels are compared with the contract in float32 (equal bits) and float64 (a
// derived bound), all others with the portable kernel of their width (equal bits).

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "support/coverage.h"
#include "support/guarded.h"
#include "support/reference.h"

namespace lowbit::test {
namespace {

struct Case {
  const char* name;
  int64_t n, k, group_size;
  float magnitude = 0.02f;
  int64_t misaligned = 0;
  Wall wall = Wall::after;
  bool padding_is_garbage = false;
};

constexpr Case kCases[] = {
    {.name = "one_block", .n = 16, .k = 32, .group_size = 32},
    {.name = "several_blocks", .n = 33, .k = 160, .group_size = 32},
    {.name = "n_1", .n = 1, .k = 64, .group_size = 32},
    {.name = "k_1", .n = 17, .k = 1, .group_size = 0},
    {.name = "k_3", .n = 17, .k = 3, .group_size = 16},
    {.name = "k_15", .n = 5, .k = 15, .group_size = 16},
    {.name = "k_16", .n = 5, .k = 16, .group_size = 16},
    {.name = "k_17", .n = 5, .k = 17, .group_size = 0},
    {.name = "k_31", .n = 5, .k = 31, .group_size = 32},
    {.name = "k_33", .n = 5, .k = 33, .group_size = 32},
    {.name = "one_group", .n = 16, .k = 64, .group_size = 64},
    {.name = "group_beyond_k", .n = 16, .k = 40, .group_size = 256},
    {.name = "short_last_group", .n = 16, .k = 100, .group_size = 64},
    {.name = "groups_16", .n = 20, .k = 81, .group_size = 16},
    {.name = "groups_48", .n = 20, .k = 149, .group_size = 48},
    {.name = "groups_80", .n = 20, .k = 200, .group_size = 80},
    {.name = "groups_128", .n = 20, .k = 300, .group_size = 128},
    {.name = "per_channel", .n = 20, .k = 100, .group_size = 0},
    {.name = "unaligned_1", .n = 33, .k = 80, .group_size = 32, .misaligned = 1},
    {.name = "unaligned_6", .n = 33, .k = 80, .group_size = 16, .misaligned = 6},
    {.name = "wall_before", .n = 33, .k = 80, .group_size = 16, .wall = Wall::before},
    {.name = "wall_before_small", .n = 1, .k = 1, .group_size = 0, .wall = Wall::before},
    {.name = "huge_weights", .n = 16, .k = 64, .group_size = 32, .magnitude = 1e36f},
    {.name = "tiny_weights", .n = 16, .k = 64, .group_size = 32, .magnitude = 1e-8f},
    {.name = "subnormal_weights", .n = 16, .k = 64, .group_size = 32, .magnitude = 1e-40f},
    {.name = "garbage_padding", .n = 21, .k = 53, .group_size = 32, .padding_is_garbage = true},
};

std::vector<uint8_t> run(const EmbeddingKernel& kernel, EmbeddingArgs args, Wall wall) {
  Guarded out(args.layout.k * size_of(args.out_dtype), wall);
  std::memset(out.data(), 0x5c, static_cast<size_t>(out.size()));
  args.out = out.data();
  kernel.run(args);
  EXPECT_TRUE(out.intact()) << "wrote outside of the output";
  return out.bytes();
}

std::vector<uint8_t> run_contract(const Decoded& weights, int64_t row, DType dtype) {
  std::vector<float> values;
  for (int64_t i = 0; i < weights.k; ++i) {
    values.push_back(contract_embedding(weights, row, i));
    const Bounded exact = exact_embedding(weights, row, i);
    if (!std::isfinite(values.back())) {
      EXPECT_GT(std::fabs(exact.value) + exact.bound, 0x1.fffffep127);
    } else {
      EXPECT_LE(std::fabs(values.back() - exact.value), exact.bound) << "value [" << row << ", " << i << "]";
    }
  }
  return to_bytes(values, dtype);
}

class EmbeddingRow : public testing::TestWithParam<RowRef> {
 protected:
  bool case_is_right(const EmbeddingKernel& kernel, const Case& c, Mapping mapping) {
    const Layout layout = layout_of(c.n, c.k, kernel.bits, c.group_size, mapping, false);
    Random random(static_cast<uint64_t>(kernel.bits * 1000 + c.n + c.k));
    const std::vector<uint8_t> bytes = packed(random_weights(layout, random, c.magnitude));
    Guarded buffer(layout.total_bytes, c.wall, c.misaligned);
    std::memcpy(buffer.data(), bytes.data(), bytes.size());
    if (c.padding_is_garbage) scramble_padding(buffer.data(), layout, random);
    buffer.freeze();
    const Decoded weights = decode(buffer.data(), layout);
    for (const int64_t row : {int64_t{0}, c.n / 3, c.n / 2, c.n - 1}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        const std::string what = std::string(kernel.name) + " " + c.name +
                                 " " + name_of(mapping) + " " + name_of(dtype) + " row " + std::to_string(row);
        SCOPED_TRACE(what);
        set_current_case(what.c_str());
        const EmbeddingArgs args{buffer.data() + layout.header_bytes, layout, row, nullptr, dtype};
        const EmbeddingKernel& portable = choose_embedding(layout, kPortable);
        const std::vector<uint8_t> expected =
            kernel.isa == kPortable ? run_contract(weights, row, dtype) : run(portable, args, c.wall);
        EXPECT_TRUE(same_bits(run(kernel, args, c.wall), expected, dtype));
        EXPECT_TRUE(buffer.intact()) << "wrote to the weights";
        if (HasFailure()) return false;
      }
    }
    return true;
  }
};

TEST_P(EmbeddingRow, SameBits) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const EmbeddingKernel& kernel = embedding_kernel(GetParam().index);
  note_exercised(kernel.name);
  for (const Case& c : kCases) {
    for (const Mapping mapping : mappings_in(kernel.mappings)) {
      if (!case_is_right(kernel, c, mapping)) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, EmbeddingRow, testing::ValuesIn(embedding_rows()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EmbeddingRow);

}  // namespace
}  // namespace lowbit::test
