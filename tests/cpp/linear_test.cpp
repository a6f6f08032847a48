// Every kernel of the linear table. Portable kernels are compared with plain loops over the same packed bytes: the contract in
// float32 (equal bits) and float64 (a derived bound). All others are compared with the portable kernel of their width (equal
// bits).

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "support/coverage.h"
#include "support/guarded.h"
#include "support/reference.h"
#include "support/scratch.h"

namespace lowbit::test {
namespace {

// Kind of activations. Except for random ones, every code is the highest, or zero.
enum class Values { random, lowest, highest, lowest_by_zero };
enum class ActivationScale { ordinary, huge, largest, tiny, subnormal, zero, not_a_number };

struct Case {
  const char* name;
  int64_t m, n, k, group_size;
  int64_t panel_begin = 0, panel_end = -1;  // -1: all
  int64_t extra_stride = 0;
  int64_t misaligned = 0;  // distance of the packed bytes from the guard page
  Wall wall = Wall::after;
  Values values = Values::random;
  ActivationScale scale = ActivationScale::ordinary;
  bool padding_is_garbage = false;
};

std::vector<Case> cases_for(const LinearKernel& row) {
  const int64_t m = row.m_least, n = row.n_step;
  std::vector<Case> cases = {
      {.name = "exact_tile", .m = m, .n = n, .k = 64, .group_size = 32},
      {.name = "tile_plus_one", .m = m + 1, .n = n + 1, .k = 96, .group_size = 32},
      {.name = "two_tiles_less_one", .m = 2 * m - 1, .n = 2 * n - 1, .k = 96, .group_size = 96},
      {.name = "two_tiles_and_three", .m = 2 * m + 3, .n = 2 * n + 3, .k = 64, .group_size = 64},
      {.name = "m_1", .m = 1, .n = 32, .k = 128, .group_size = 32},
      {.name = "m_2", .m = 2, .n = 16, .k = 64, .group_size = 32},
      {.name = "m_3", .m = 3, .n = 16, .k = 64, .group_size = 32},
      {.name = "m_4", .m = 4, .n = 16, .k = 64, .group_size = 32},
      {.name = "m_5", .m = 5, .n = 16, .k = 64, .group_size = 32},
      {.name = "m_6", .m = 6, .n = 16, .k = 64, .group_size = 16},
      {.name = "m_7", .m = 7, .n = 16, .k = 64, .group_size = 0},
      {.name = "odd_n", .m = 2, .n = 37, .k = 64, .group_size = 32},
      {.name = "n_1", .m = 3, .n = 1, .k = 64, .group_size = 32},
      {.name = "n_15", .m = 1, .n = 15, .k = 64, .group_size = 32},
      {.name = "k_1", .m = 2, .n = 17, .k = 1, .group_size = 0},
      {.name = "k_1_group_16", .m = 5, .n = 3, .k = 1, .group_size = 16},
      {.name = "k_16", .m = 2, .n = 16, .k = 16, .group_size = 16},
      {.name = "k_17", .m = 2, .n = 16, .k = 17, .group_size = 0},
      {.name = "k_17_group_16", .m = 4, .n = 16, .k = 17, .group_size = 16},
      {.name = "k_31", .m = 1, .n = 16, .k = 31, .group_size = 32},
      {.name = "k_33", .m = 4, .n = 16, .k = 33, .group_size = 32},
      {.name = "one_group", .m = 4, .n = 16, .k = 64, .group_size = 64},
      {.name = "group_beyond_k", .m = 4, .n = 16, .k = 40, .group_size = 256},
      {.name = "half_group_beyond_k", .m = 4, .n = 16, .k = 40, .group_size = 272},
      {.name = "short_last_group_32", .m = 4, .n = 16, .k = 50, .group_size = 32},
      {.name = "short_last_group_64", .m = 1, .n = 16, .k = 100, .group_size = 64},
      {.name = "groups_16", .m = 4, .n = 20, .k = 96, .group_size = 16},
      {.name = "groups_16_ending_in_half", .m = 5, .n = 20, .k = 81, .group_size = 16},
      {.name = "groups_48", .m = 4, .n = 20, .k = 149, .group_size = 48},
      {.name = "groups_48_whole", .m = 1, .n = 20, .k = 144, .group_size = 48},
      {.name = "groups_80", .m = 4, .n = 20, .k = 200, .group_size = 80},
      {.name = "groups_96", .m = 5, .n = 20, .k = 330, .group_size = 96},
      {.name = "groups_128", .m = 4, .n = 20, .k = 300, .group_size = 128},
      {.name = "many_rows_and_panels", .m = 75, .n = 150, .k = 330, .group_size = 32},
      {.name = "groups_544_many_rows", .m = 43, .n = 40, .k = 1100, .group_size = 544},
      {.name = "groups_512", .m = 6, .n = 20, .k = 1300, .group_size = 512},
      {.name = "per_channel", .m = 4, .n = 20, .k = 100, .group_size = 0},
      {.name = "per_channel_long", .m = 1, .n = 16, .k = 1000, .group_size = 0},
      {.name = "many_rows", .m = 67, .n = 16, .k = 80, .group_size = 32},
      {.name = "many_rows_16", .m = 35, .n = 16, .k = 80, .group_size = 16},
      {.name = "long_groups", .m = m + 1, .n = 16, .k = 700, .group_size = 320},
      {.name = "long_groups_ending_in_half", .m = m + 1, .n = 16, .k = 1100, .group_size = 528},
      {.name = "unaligned_1", .m = 4, .n = 33, .k = 80, .group_size = 32, .misaligned = 1},
      {.name = "unaligned_2", .m = 1, .n = 33, .k = 80, .group_size = 16, .misaligned = 2},
      {.name = "unaligned_7", .m = 5, .n = 33, .k = 80, .group_size = 0, .misaligned = 7},
      {.name = "wall_before", .m = 4, .n = 33, .k = 80, .group_size = 32, .wall = Wall::before},
      {.name = "wall_before_small", .m = 1, .n = 1, .k = 1, .group_size = 16, .wall = Wall::before},
      {.name = "some_panels", .m = 4, .n = 75, .k = 64, .group_size = 32, .panel_begin = 1, .panel_end = 3},
      {.name = "last_panel", .m = 5, .n = 75, .k = 64, .group_size = 32, .panel_begin = 4, .panel_end = 5},
      {.name = "no_panels", .m = 4, .n = 75, .k = 64, .group_size = 32, .panel_begin = 2, .panel_end = 2},
      {.name = "stride_plus_1", .m = 5, .n = 37, .k = 64, .group_size = 32, .extra_stride = 1},
      {.name = "stride_plus_50", .m = 3, .n = 16, .k = 64, .group_size = 32, .extra_stride = 50},
      {.name = "lowest_activations", .m = m, .n = 16, .k = 256, .group_size = 128, .values = Values::lowest},
      {.name = "highest_activations", .m = m, .n = 16, .k = 256, .group_size = 48, .values = Values::highest},
      {.name = "lowest_activations_16", .m = m, .n = 16, .k = 80, .group_size = 16, .values = Values::lowest},
      {.name = "highest_activations_64", .m = m, .n = 16, .k = 160, .group_size = 64, .values = Values::highest},
      {.name = "lowest_by_zero", .m = m, .n = 16, .k = 256, .group_size = 128, .values = Values::lowest_by_zero},
      {.name = "lowest_activations_8_rows", .m = 8, .n = 16, .k = 256, .group_size = 128, .values = Values::lowest},
      {.name = "lowest_160", .m = 8, .n = 16, .k = 320, .group_size = 160, .values = Values::lowest},
      {.name = "highest_256", .m = 9, .n = 16, .k = 512, .group_size = 256, .values = Values::highest},
      {.name = "lowest_256", .m = 9, .n = 16, .k = 512, .group_size = 256, .values = Values::lowest},
      {.name = "lowest_per_channel", .m = 9, .n = 16, .k = 4128, .group_size = 0, .values = Values::lowest},
      {.name = "highest_32", .m = m, .n = 16, .k = 64, .group_size = 32, .values = Values::highest},
      {.name = "lowest_by_zero_32", .m = m, .n = 16, .k = 64, .group_size = 32, .values = Values::lowest_by_zero},
      {.name = "huge_outputs", .m = 4, .n = 16, .k = 64, .group_size = 32, .scale = ActivationScale::huge},
      {.name = "tiny_outputs", .m = 4, .n = 16, .k = 64, .group_size = 32, .scale = ActivationScale::tiny},
      {.name = "subnormal_outputs", .m = 4, .n = 16, .k = 64, .group_size = 32, .scale = ActivationScale::subnormal},
      {.name = "largest_scales", .m = 9, .n = 16, .k = 2064, .group_size = 0, .values = Values::highest,
       .scale = ActivationScale::largest},
      {.name = "subnormal_long_groups", .m = 9, .n = 16, .k = 640, .group_size = 320, .scale = ActivationScale::subnormal},
      {.name = "zero_scales", .m = 4, .n = 16, .k = 64, .group_size = 32, .scale = ActivationScale::zero},
      {.name = "nan_scales", .m = 4, .n = 16, .k = 64, .group_size = 32, .scale = ActivationScale::not_a_number},
      {.name = "garbage_padding", .m = 4, .n = 21, .k = 53, .group_size = 32, .padding_is_garbage = true},
      {.name = "garbage_padding_16", .m = 1, .n = 5, .k = 21, .group_size = 16, .padding_is_garbage = true},
  };
  // Every split of the rows into tiles and chunks, with groups of one block, several blocks, and longer than a piece.
  if (row.m_least > 1) {
    for (int64_t rows = 2; rows <= 33; ++rows) {
      cases.push_back({.name = "rows_32", .m = rows, .n = 16, .k = 64, .group_size = 32});
      cases.push_back({.name = "rows_64", .m = rows, .n = 16, .k = 160, .group_size = 64});
    }
    // Groups that end within a block: of 16 inputs, and longer ones that begin in either half of a block, as do pieces of k.
    for (int64_t rows = 2; rows <= 17; ++rows) {
      cases.push_back({.name = "rows_16", .m = rows, .n = 16, .k = 208, .group_size = 16});
      cases.push_back({.name = "rows_48", .m = rows, .n = 16, .k = 170, .group_size = 48});
    }
    cases.push_back({.name = "rows_16_pieces", .m = 62, .n = 32, .k = 1104, .group_size = 16});
    cases.push_back({.name = "rows_48_pieces", .m = 21, .n = 32, .k = 1050, .group_size = 48});
    cases.push_back({.name = "rows_96_pieces", .m = 20, .n = 37, .k = 1120, .group_size = 96});
    cases.push_back({.name = "rows_96_pieces_16", .m = 16, .n = 35, .k = 2112, .group_size = 96});
    cases.push_back({.name = "rows_112_pieces", .m = 10, .n = 32, .k = 1000, .group_size = 112});
    cases.push_back({.name = "rows_144_pieces", .m = 9, .n = 16, .k = 1300, .group_size = 144});
    cases.push_back({.name = "rows_272_pieces", .m = 8, .n = 16, .k = 900, .group_size = 272});
    cases.push_back({.name = "rows_528_pieces", .m = 9, .n = 16, .k = 1200, .group_size = 528});
    cases.push_back({.name = "rows_1040_pieces", .m = 4, .n = 16, .k = 2200, .group_size = 1040});
    for (int64_t rows = 2; rows <= 8; ++rows) {
      cases.push_back({.name = "rows_per_channel", .m = rows, .n = 32, .k = 600, .group_size = 0});
    }
    cases.push_back({.name = "four_chunks", .m = 97, .n = 16, .k = 64, .group_size = 32});
    cases.push_back({.name = "two_chunks", .m = 65, .n = 16, .k = 288, .group_size = 32});
    cases.push_back({.name = "two_chunks_long_groups", .m = 69, .n = 80, .k = 320, .group_size = 0});
    // More activations than stay in a second-level cache, in chunks of an odd number of rows, for an odd number of panels.
    if (row.m_least >= 32) cases.push_back({.name = "chunks_of_a_cache", .m = 101, .n = 33, .k = 6144, .group_size = 64});
  }
  // More rows than the scratch memory holds, over more panels than one pass reads; and rows so long that a tile needs more
  // scratch memory.
  if (row.scratch_bytes != nullptr) {
    cases.push_back({.name = "rows_beyond_scratch", .m = 45, .n = 150, .k = 2080, .group_size = 80});
    cases.push_back({.name = "long_rows", .m = 9, .n = 18, .k = 20512, .group_size = 128});
  }
  return cases;
}

// Everything that one call reads.
struct Input {
  Decoded weights;  // only for comparisons with the contract, because decoding bit by bit is slow
  Guarded packed, a, scales, sums, group_sums;
  LinearArgs args{};

  Input(const Case& c, const Layout& layout, const std::vector<uint8_t>& bytes, bool decoded, Random& random)
      : packed(layout.total_bytes, c.wall, c.misaligned),
        a(c.m * layout.blocks * 32, c.wall),
        scales(c.m * layout.segments * 4, c.wall),
        sums(c.m * layout.segments * 4, c.wall),
        group_sums(layout.mapping == Mapping::affine ? c.m * layout.groups * 4 : 4, c.wall) {
    std::memcpy(packed.data(), bytes.data(), bytes.size());
    if (c.padding_is_garbage) scramble_padding(packed.data(), layout, random);
    if (decoded) weights = decode(packed.data(), layout);
    const std::vector<Segment> segments = segments_of(layout.k, layout.group_inputs());
    EXPECT_EQ(layout.segments, static_cast<int64_t>(segments.size()));
    std::memset(a.data(), 0, static_cast<size_t>(a.size()));
    for (int64_t row = 0; row < c.m; ++row) {
      int8_t* values = a.as<int8_t>() + row * layout.blocks * 32;
      for (int64_t i = 0; i < layout.k; ++i) {
        values[i] = static_cast<int8_t>(c.values == Values::random    ? random.between(int64_t{-127}, 127)
                                        : c.values == Values::highest ? 127
                                                                      : -127);
      }
      float* const row_scales = scales.as<float>() + row * layout.segments;
      int32_t* const row_sums = sums.as<int32_t>() + row * layout.segments;
      for (size_t s = 0; s < segments.size(); ++s) {
        row_scales[s] = segment_scale(c.scale, random);
        row_sums[s] = std::accumulate(values + segments[s].begin, values + segments[s].end, 0);
      }
      if (layout.mapping != Mapping::affine) continue;
      const std::vector<float> of_groups = contract_group_sums(segments, row_scales, row_sums);
      std::memcpy(group_sums.as<float>() + row * layout.groups, of_groups.data(), of_groups.size() * sizeof(float));
    }
    for (Guarded* buffer : all()) buffer->freeze();

    args.panels = packed.data() + layout.header_bytes;
    args.layout = layout;
    args.panel_begin = c.panel_begin;
    args.panel_end = c.panel_end < 0 ? layout.panels : c.panel_end;
    args.a = a.as<int8_t>();
    args.scales = scales.as<float>();
    args.sums = sums.as<int32_t>();
    args.group_sums = layout.mapping == Mapping::affine ? group_sums.as<float>() : nullptr;
    args.m = c.m;
    args.out_stride = layout.n + c.extra_stride;
  }

  std::vector<Guarded*> all() { return {&packed, &a, &scales, &sums, &group_sums}; }

  // As from the quantizer: the two lowest bits of the mantissa are zero.
  static float segment_scale(ActivationScale kind, Random& random) {
    return float_from_bits(bits_of_float(any_scale(kind, random)) & ~3u);
  }

  static float any_scale(ActivationScale kind, Random& random) {
    switch (kind) {
      case ActivationScale::ordinary: return random.between(0x1p-8f, 0x1p-4f);
      case ActivationScale::huge: return random.between(1e3f, 1e6f);     // float16 outputs overflow
      case ActivationScale::largest: return random.between(0x1p103f, 0x1.fp103f);
      case ActivationScale::tiny: return random.between(1e-10f, 1e-8f);  // float16 outputs are subnormal or zero
      case ActivationScale::subnormal: return random.between(0x1p-126f, 0x1p-124f);
      case ActivationScale::zero: return 0.0f;
      case ActivationScale::not_a_number: break;
    }
    return float_from_bits(0x7fc00000u);
  }
};

int64_t out_elements(const LinearArgs& args) { return (args.m - 1) * args.out_stride + args.layout.n; }

// Runs a kernel and returns the whole output, including gaps between rows and unwritten columns.
std::vector<uint8_t> run(const LinearKernel& kernel, const Case& c, LinearArgs args, DType dtype) {
  Guarded out(out_elements(args) * size_of(dtype), c.wall);
  std::memset(out.data(), 0x5c, static_cast<size_t>(out.size()));
  args.out = out.data();
  args.out_dtype = dtype;
  args.scratch = linear_scratch(kernel, args.layout, args.m);
  kernel.run(args);
  EXPECT_TRUE(out.intact()) << "wrote outside of the output";
  return out.bytes();
}

std::vector<uint8_t> run_contract(const Input& in, bool check_bound) {
  const LinearArgs& args = in.args;
  std::vector<uint8_t> out(static_cast<size_t>(out_elements(args)) * sizeof(float), 0x5c);
  const int64_t end = std::min(args.layout.n, args.panel_end * 16);
  for (int64_t i = 0; i < args.m; ++i) {
    const int8_t* a = args.a + i * args.layout.blocks * 32;
    for (int64_t row = args.panel_begin * 16; row < end; ++row) {
      const float* const scales = args.scales + i * args.layout.segments;
      const float y = contract_linear(in.weights, row, a, scales);
      store_from_f32(out.data(), DType::f32, i * args.out_stride + row, y);
      if (!check_bound) continue;
      const Bounded exact = exact_linear(in.weights, row, a, scales);
      EXPECT_LE(std::fabs(y - exact.value), exact.bound) << "output [" << i << ", " << row << "]";
    }
  }
  return out;
}

// Converts a float32 output to another type: every kernel rounds in its last step.
std::vector<uint8_t> rounded(const std::vector<uint8_t>& f32, const LinearArgs& args, DType dtype) {
  std::vector<uint8_t> out(static_cast<size_t>(out_elements(args) * size_of(dtype)), 0x5c);
  const int64_t end = std::min(args.layout.n, args.panel_end * 16);
  for (int64_t i = 0; i < args.m; ++i) {
    for (int64_t at = i * args.out_stride + args.panel_begin * 16; at < i * args.out_stride + end; ++at) {
      store_from_f32(out.data(), dtype, at, load_as_f32(f32.data(), DType::f32, at));
    }
  }
  return out;
}

// Replaces every NaN by one bit pattern. Compilers may negate products, so the sign of NaN differs between kernels.
std::vector<uint8_t> with_one_nan(std::vector<uint8_t> values, DType dtype) {
  const int64_t size = static_cast<int64_t>(values.size()) / size_of(dtype);
  for (int64_t at = 0; at < size; ++at) {
    if (!std::isnan(load_as_f32(values.data(), dtype, at))) continue;
    store_from_f32(values.data(), dtype, at, std::numeric_limits<float>::quiet_NaN());
  }
  return values;
}

class LinearRow : public testing::TestWithParam<RowRef> {
 protected:
  // Runs one case with every mapping, bias and output type; false after the first difference.
  bool case_is_right(const LinearKernel& kernel, const Case& c) {
    for (const Mapping mapping : mappings_in(kernel.mappings)) {
      for (const bool has_bias : {false, true}) {
        const Layout layout = layout_of(c.n, c.k, kernel.bits, c.group_size, mapping, has_bias);
        const LinearKernel& portable = choose_linear(layout, c.m, kPortable);
        Random random(static_cast<uint64_t>(kernel.bits * 1000 + c.m * 100 + c.n + c.k));
        Weights weights = random_weights(layout, random);
        const int code = c.values == Values::lowest_by_zero ? 0 : (1 << kernel.bits) - 1;
        if (c.values != Values::random) std::fill(weights.codes.begin(), weights.codes.end(), code);
        Input in(c, layout, packed(weights), kernel.isa == kPortable, random);
        // The largest scales overflow on the way.
        const bool is_number = c.scale != ActivationScale::not_a_number && c.scale != ActivationScale::largest;
        // Once for all output types, because this is the slow part in an emulator.
        const std::vector<uint8_t> reference = kernel.isa == kPortable ? run_contract(in, is_number)
                                                                       : run(portable, c, in.args, DType::f32);
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
          const std::string what = std::string(kernel.name) + " " + c.name + (has_bias ? " bias " : " ") +
                                   name_of(mapping) + " " + name_of(dtype);
          SCOPED_TRACE(what);
          set_current_case(what.c_str());
          const std::vector<uint8_t> out = run(kernel, c, in.args, dtype);
          const std::vector<uint8_t> expected = rounded(reference, in.args, dtype);
          EXPECT_TRUE(test::same_bits(with_one_nan(out, dtype), with_one_nan(expected, dtype), dtype));
          for (const Guarded* buffer : in.all()) EXPECT_TRUE(buffer->intact()) << "wrote to an input";
          if (HasFailure()) return false;
        }
      }
    }
    return true;
  }
};

TEST_P(LinearRow, SameBits) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const LinearKernel& kernel = linear_kernel(GetParam().index);
  for (const Case& c : cases_for(kernel)) {
    if (!case_is_right(kernel, c)) break;
  }
  note_exercised(kernel.name);
}

// A group of a thousand segments with the largest possible integer sums.
TEST_P(LinearRow, LargestGroup) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const LinearKernel& kernel = linear_kernel(GetParam().index);
  for (const Values values : {Values::lowest, Values::highest}) {
    const Case c{
        .name = "largest_group", .m = kernel.m_least, .n = 2, .k = 65536, .group_size = 0, .values = values};
    for (const Mapping mapping : mappings_in(kernel.mappings)) {
      const Layout layout = layout_of(c.n, c.k, kernel.bits, c.group_size, mapping, false);
      Random random(kernel.bits);
      Weights weights = random_weights(layout, random);
      for (int64_t i = 0; i < c.k; ++i) {  // row 0: the highest code, row 1: the lowest
        weights.codes[static_cast<size_t>(i)] = static_cast<uint8_t>((1 << kernel.bits) - 1);
        weights.codes[static_cast<size_t>(c.k + i)] = 0;
      }
      Input in(c, layout, packed(weights), true, random);
      set_current_case((std::string(kernel.name) + " largest_group").c_str());
      EXPECT_TRUE(test::same_bits(run(kernel, c, in.args, DType::f32), run_contract(in, true), DType::f32));
      if (HasFailure()) return;
    }
  }
}

// More groups than the scratch memory holds for all rows of activations, or for a tile of 8. At one width, because widths do
// not matter here.
TEST_P(LinearRow, ManyGroups) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const LinearKernel& kernel = linear_kernel(GetParam().index);
  if (kernel.bits != 4) return;
  for (const Case& c : {Case{.name = "groups_for_15_rows", .m = 20, .n = 1, .k = 28800, .group_size = 16},
                        Case{.name = "groups_for_7_rows", .m = 8, .n = 1, .k = 58000, .group_size = 16}}) {
    for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
      const Layout layout = layout_of(c.n, c.k, kernel.bits, c.group_size, mapping, false);
      Random random(kernel.bits);
      Input in(c, layout, packed(random_weights(layout, random)), true, random);
      set_current_case((std::string(kernel.name) + " " + c.name).c_str());
      EXPECT_TRUE(test::same_bits(run(kernel, c, in.args, DType::f32), run_contract(in, true), DType::f32));
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, LinearRow, testing::ValuesIn(linear_rows()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LinearRow);

}  // namespace
}  // namespace lowbit::test
