// The 256-bit linear kernels apart from their integer dot products: panels, groups and the float part (ukernel.h).
//
// 16 output rows are the int32 lanes of two registers, one for each half of a line. A kernel hands in its sums:
//   kBits, kRows, kHalves   width; rows of activations at once; whether groups may end in the middle of a block
//   kRunBlocks              blocks that may be added between begin_run() and end_run()
//   add<First, Lines>(...)  the products of some lines of a block
//   total                   in int32, in kSplit registers that are added up once per group
#pragma once

#include <immintrin.h>

#include <utility>

#include "../bits/simd_avx2.h"
#include "../bits/unpack_avx2.h"
#include "../ukernel.h"
#include "tiles_of_rows.h"

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
  __m256i total[Rows][2][Split];  // of the two halves of a line

  // Starts a group, with -2^(bits-1) times its activation sum when symmetric.
  template <bool Affine>
  [[gnu::always_inline]] void start(const int32_t* group_sum, int64_t stride) {
    for (int i = 0; i < Rows; ++i) {
      __m256i first = _mm256_setzero_si256();
      if constexpr (!Affine && level_factor(Bits) == 1) {
        first = _mm256_sub_epi32(first, _mm256_slli_epi32(broadcast4(group_sum + i * stride), Bits - 1));
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

// Some rows of activations times one panel.
template <class Sums, bool Affine>
[[gnu::always_inline]] inline void tile(const LinearArgs& args, const uint8_t* panel, int64_t row, int64_t column) {
  constexpr int Rows = Sums::kRows;
  const Layout& layout = args.layout;
  const int64_t stride = layout.blocks * kBlockInputs;
  const int64_t groups = layout.groups;
  const int8_t* a = args.a + row * stride;
  const int32_t* group_sums = args.group_sums + row * groups;
  const uint8_t* at = panel;  // walks the panel from front to back

  Float16 acc[Rows];
  for (int i = 0; i < Rows; ++i) acc[i].half[0] = acc[i].half[1] = _mm256_setzero_ps();
  Sums sums;

  constexpr int64_t kBlockBytes = Sums::kBits * kLineBytes, kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  const auto finish_group = [&](int64_t group, const uint8_t* scales) __attribute__((always_inline)) {
    const Float16 scale = load16<DType::f16>(scales);
    for (int i = 0; i < Rows; ++i) {
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
  };

  if constexpr (!Sums::kHalves) {
    const int64_t group_blocks = layout.group_inputs() / kBlockInputs;
    int64_t left = layout.blocks;
    for (int64_t group = 0; group < groups; ++group) {
      sums.template start<Affine>(group_sums + group, groups);
      int64_t count = left < group_blocks ? left : group_blocks;
      left -= count;
      while (count > 0) {
        int64_t run = count < Sums::kRunBlocks ? count : Sums::kRunBlocks;
        count -= run;
        sums.begin_run();
        for (; run > 0; --run, at += kBlockBytes, a += kBlockInputs) {
          sums.template add<0, 8>(at, a, stride);
        }
        sums.end_run();
      }
      finish_group(group, at);
      at += kGroupBytes;
    }
  } else {
    const int64_t group_halves = layout.group_size / kHalfInputs;
    int64_t left = group_halves, group = 0;
    sums.template start<Affine>(group_sums, groups);
    const uint8_t* scales;
    const auto end_of_half = [&]() __attribute__((always_inline)) {
      if (--left > 0) return;
      finish_group(group, scales);
      scales += kGroupBytes;
      left = group_halves;
      if (++group < groups) sums.template start<Affine>(group_sums + group, groups);
    };
    for (int64_t b = 0; b < layout.blocks; ++b, at = scales, a += kBlockInputs) {
      scales = at + kBlockBytes;
      sums.template add<0, 4>(at, a, stride);
      end_of_half();
      if (group == groups) break;  // k ends in the first half of the last block
      sums.template add<4, 4>(at, a, stride);
      end_of_half();
    }
    if (group < groups) finish_group(group, scales);
  }

  const uint8_t* head = panel + layout.head_offset;
  const Float16 row_scale = load16<DType::f32>(head);
  const Float16 row_sum = load16<DType::f32>(head + 4 * kPanelRows);
  const Float16 bias = load16<DType::f32>(head + 8 * kPanelRows);
  for (int i = 0; i < Rows; ++i) {
    const __m256 zero = _mm256_set1_ps(args.zeros[row + i]), a_scale = _mm256_set1_ps(args.scales[row + i]);
    Float16 y;
    for (int h = 0; h < 2; ++h) {
      const __m256 corrected = _mm256_fnmadd_ps(zero, row_sum.half[h], acc[i].half[h]);
      y.half[h] = _mm256_fmadd_ps(_mm256_mul_ps(a_scale, row_scale.half[h]), corrected, bias.half[h]);
    }
    store_first(args.out, args.out_dtype, (row + i) * args.out_stride + column, y, layout.n - column);
  }
}

template <template <int Bits, int Rows, bool Halves> class Sums, int Bits, bool Affine, bool Halves, int MostRows>
void run_panels(const LinearArgs& args) {
  for (int64_t p = args.panel_begin; p < args.panel_end; ++p) {
    const uint8_t* panel = args.panels + p * args.layout.panel_bytes;
    for_each_tile<MostRows>(args.m, [&](int64_t row, auto rows) __attribute__((always_inline)) {
      tile<Sums<Bits, rows(), Halves>, Affine>(args, panel, row, p * kPanelRows);
    });
  }
}

template <template <int Bits, int Rows, bool Halves> class Sums, int Bits, int MostRows>
void run(const LinearArgs& args) {
  const bool affine = args.layout.mapping == Mapping::affine;
  if (args.layout.group_inputs() % kBlockInputs != 0) {  // half blocks are rare: not worth a tile of several rows
    return affine ? run_panels<Sums, Bits, true, true, 1>(args) : run_panels<Sums, Bits, false, true, 1>(args);
  }
  affine ? run_panels<Sums, Bits, true, false, MostRows>(args) : run_panels<Sums, Bits, false, false, MostRows>(args);
}

}  // namespace
}  // namespace lowbit
