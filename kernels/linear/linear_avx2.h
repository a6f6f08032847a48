// The 256-bit linear kernels apart from their integer dot products: panels, groups and the float part (ukernel.h).
//
// 16 output rows are the int32 lanes of two registers, one for each half of a line. A kernel hands in its sums:
//   kBits, kRows, kHalves   width; rows of activations at once; whether groups may end in the middle of a block
//   kRunBlocks              blocks that may be added between begin_run() and end_run(); 0: there are no runs
//   add<First, Lines>(...)  the products of some lines of a block
//   total                   in int32, in kSplit registers that are added up once per group
#pragma once

#include <immintrin.h>

#include <utility>

#include "../bits/simd_avx2.h"
#include "../bits/unpack_avx2.h"
#include "../ukernel.h"
#include "tiles_of_rows.h"
#include "walk_x86.h"

namespace lowbit {
namespace {

[[gnu::always_inline]] inline __m256i broadcast4(const void* at) {
  int32_t word;
  std::memcpy(&word, at, 4);
  return _mm256_set1_epi32(word);
}

// The int32 part of the sums. Exact: a group's sum is below 2^31 (kMaxGroupInputs); on the way it may wrap.
template <int Bits, int Rows, int Split>
struct Totals {
  static constexpr int kBits = Bits, kRows = Rows;
  static constexpr int kOffsetBits = is_by_table(Bits) ? 7 : Bits - 1;
  __m256i total[Rows][2][Split];  // of the two halves of a line
  Levels<Bits> levels;

  // Starts a group, with -2^(bits-1) times its activation sum when symmetric.
  template <bool Affine>
  [[gnu::always_inline]] void start(const int32_t* group_sum, int64_t stride) {
    for (int i = 0; i < Rows; ++i) {
      __m256i first = _mm256_setzero_si256();
      if constexpr (!Affine && level_factor(Bits) == 1) {
        first = _mm256_sub_epi32(first, _mm256_slli_epi32(broadcast4(group_sum + i * stride), kOffsetBits));
      }
      for (int h = 0; h < 2; ++h) {
        total[i][h][0] = first;
        for (int s = 1; s < Split; ++s) total[i][h][s] = _mm256_setzero_si256();
      }
    }
  }

  template <bool Affine>
  [[gnu::always_inline]] __m256 join(int i, int h, int32_t group_sum) const {
    __m256i sum = total[i][h][0];
    for (int s = 1; s < Split; ++s) sum = _mm256_add_epi32(sum, total[i][h][s]);
    if constexpr (!Affine && level_factor(Bits) == 2) {
      sum = _mm256_sub_epi32(_mm256_add_epi32(sum, sum), _mm256_set1_epi32(group_sum));
    }
    return _mm256_cvtepi32_ps(sum);
  }
};

// The sums of some rows of activations over one panel, for walk().
template <class Sums, bool Affine>
struct Tile {
  static constexpr int kRows = Sums::kRows;
  static constexpr int64_t kBlockBytes = code_bits(Sums::kBits) * kLineBytes;
  static constexpr int64_t kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  static constexpr int64_t kRunBlocks = Sums::kRunBlocks;

  const int32_t* group_sums;
  int64_t groups, stride;  // from a row to the next: of group_sums, of the activations
  const uint8_t* block;
  Float16 acc[kRows];
  Sums sums;

  [[gnu::always_inline]] void begin_run() { sums.begin_run(); }
  [[gnu::always_inline]] void end_run() { sums.end_run(); }
  [[gnu::always_inline]] void start(int64_t group) { sums.template start<Affine>(group_sums + group, groups); }
  [[gnu::always_inline]] void begin_block(const uint8_t* at) { block = at; }

  template <int First, int Lines>
  [[gnu::always_inline]] void add(const int8_t* a) {
    sums.template add<First, Lines>(block, a, stride);
  }

  [[gnu::always_inline]] void finish(int64_t group, const uint8_t* scales) {
    const Float16 scale = load16<DType::f16>(scales);
    for (int i = 0; i < kRows; ++i) {
      const int32_t group_sum = group_sums[i * groups + group];
      for (int h = 0; h < 2; ++h) {
        acc[i].half[h] = _mm256_fmadd_ps(scale.half[h], sums.template join<Affine>(i, h, group_sum), acc[i].half[h]);
      }
      if constexpr (Affine) {
        const Float16 min = load16<DType::f16>(scales + 2 * kPanelRows);
        const __m256 a_sum = _mm256_set1_ps(static_cast<float>(group_sum));
        for (int h = 0; h < 2; ++h) acc[i].half[h] = _mm256_fmadd_ps(min.half[h], a_sum, acc[i].half[h]);
      }
    }
  }
};

// Some rows of activations times one panel.
template <class Sums, bool Affine>
[[gnu::always_inline]] inline void tile(const LinearArgs& args, int64_t panel, int64_t row, int64_t number,
                                        int64_t tiles) {
  constexpr int Rows = Sums::kRows;
  const Layout& layout = args.layout;
  Tile<Sums, Affine> tile;
  tile.groups = layout.groups;
  tile.stride = layout.blocks * kBlockInputs;
  tile.group_sums = args.group_sums + row * tile.groups;
  tile.sums.levels.load(layout.levels);
  for (int i = 0; i < Rows; ++i) tile.acc[i].half[0] = tile.acc[i].half[1] = _mm256_setzero_ps();
  // Measured on Zen 4: two rows of 1 or 2 bits are read faster without.
  constexpr bool kAhead = Rows > 2 || (Rows == 2 && code_bits(Sums::kBits) > 2);
  walk_panel<Sums::kHalves, kAhead>(args, panel, args.a + row * tile.stride, tile, number, tiles);

  const uint8_t* head = args.panels + panel * layout.panel_bytes + layout.head_offset;
  const int64_t column = panel * kPanelRows;
  const Float16 row_scale = load16<DType::f32>(head);
  const Float16 row_sum = load16<DType::f32>(head + 4 * kPanelRows);
  const Float16 bias = load16<DType::f32>(head + 8 * kPanelRows);
  for (int i = 0; i < Rows; ++i) {
    const __m256 zero = _mm256_set1_ps(args.zeros[row + i]), a_scale = _mm256_set1_ps(args.scales[row + i]);
    Float16 y;
    for (int h = 0; h < 2; ++h) {
      const __m256 corrected = _mm256_fnmadd_ps(zero, row_sum.half[h], tile.acc[i].half[h]);
      y.half[h] = _mm256_fmadd_ps(_mm256_mul_ps(a_scale, row_scale.half[h]), corrected, bias.half[h]);
    }
    store_first(args.out, args.out_dtype, (row + i) * args.out_stride + column, y, layout.n - column);
  }
}

template <template <int Bits, int Rows, bool Halves> class Sums, int Bits, bool Affine, bool Halves, int MostRows>
void run_panels(const LinearArgs& args) {
  for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel) {
    for_each_tile<MostRows>(args.m, [&](int64_t row, auto rows, int64_t number, int64_t tiles)
                                        __attribute__((always_inline)) {
      tile<Sums<Bits, rows(), Halves>, Affine>(args, panel, row, number, tiles);
    });
  }
}

template <template <int Bits, int Rows, bool Halves> class Sums, int Bits, int MostRows>
void run(const LinearArgs& args) {
  const bool affine = args.layout.mapping == Mapping::affine;
  const bool halves = args.layout.group_inputs() % kBlockInputs != 0;
  if constexpr (can_have_levels(Bits)) {
    if (args.layout.mapping == Mapping::levels) {
      return halves ? run_panels<Sums, by_table(Bits), false, true, MostRows>(args)
                    : run_panels<Sums, by_table(Bits), false, false, MostRows>(args);
    }
  }
  if (halves) {
    return affine ? run_panels<Sums, Bits, true, true, MostRows>(args)
                  : run_panels<Sums, Bits, false, true, MostRows>(args);
  }
  affine ? run_panels<Sums, Bits, true, false, MostRows>(args) : run_panels<Sums, Bits, false, false, MostRows>(args);
}

}  // namespace
}  // namespace lowbit
