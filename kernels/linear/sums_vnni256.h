// The sums of a tile in 256-bit registers, by instructions that add four products of bytes to a 32-bit lane:
//
//   line (64 bytes): row 0: 4 codes | row 1: 4 codes | ... | row 15: 4 codes       two ymm registers
//   sums += codes x broadcast of 4 activations: 16 rows x 4 products, one int32 lane per row, no horizontal adds
//
// Nothing saturates, and all widths are handled equally. Two rows of activations have 8 accumulators, to hide the instruction's
// latency (5 cycles, up to 2 per cycle). 4 rows have 8 without splitting. One row has 4, because a segment is short and the
// products of the next segment do not wait.
//
// An ISA file defines the instruction and its operands in a class Products<Bits, Affine, Rows>:
//   begin(layout)                       called once
//   start(a_sum)                        start value of a segment's sums; a_sum: the row's sum of activations
//   start_factor(affine)                start value divided by the sum of activations
//   Codes read<J>(half)                 codes of half a line
//   add(sum, codes, a4)                 adds products; a4: four activations, repeated in each lane
#pragma once

#include "linear_avx2.h"

namespace lowbit {
namespace {

constexpr int split_for(int rows) { return rows <= 2 ? 2 : 1; }

template <template <int Bits, bool Affine, int Rows> class Products, int Bits, bool Affine, bool Halves, int Rows>
struct VnniSums {
  static constexpr int kBits = Bits, kRows = Rows, kSplit = split_for(Rows);
  static constexpr bool kAffine = Affine, kHalves = Halves, kOffsetLate = false, kInterleaved = false, kUnpacked = false;
  static constexpr bool kAsks = asks_for_mins(Bits, Rows), kStarts = true;
  static_assert(!(kAsks && Affine));
  using Input = int8_t;
  Products<Bits, Affine, Rows> products;
  Sums32 sum[Rows][2][kSplit];  // per half of a line

  LOWBIT_INLINE void begin(const Layout& layout, Sums32*) { products.begin(layout); }

  LOWBIT_INLINE void start(int i, const int32_t* value) {
    const __m256i first = Rows > 1 ? broadcast4(value) : products.start(value);
    for (auto& half : sum[i]) {
      for (int s = 0; s < kSplit; ++s) half[s] = s == 0 ? reinterpret_cast<Sums32>(first) : Sums32{};
    }
  }

  static constexpr Starts starts(bool affine) {
    return {Products<Bits, Affine, Rows>::start_factor(affine), Starts::word};
  }

  LOWBIT_INLINE void next_block() {}

  LOWBIT_INLINE void end(Sums32 (&totals)[Rows][2]) const {
    for (int i = 0; i < Rows; ++i) {
      for (int h = 0; h < 2; ++h) {
        totals[i][h] = sum[i][h][0];
        for (int s = 1; s < kSplit; ++s) totals[i][h] += sum[i][h][s];
      }
    }
  }

  template <int First, int Lines>
  LOWBIT_INLINE void add(const uint8_t* block, const int8_t* const (&a)[Rows]) {
    [&]<int... I>(std::integer_sequence<int, I...>) LOWBIT_INLINE {
      (add_line<First + I>(block, a), ...);
    }(std::make_integer_sequence<int, Lines>());
  }

 private:
  template <int J>
  LOWBIT_INLINE void add_line(const uint8_t* block, const int8_t* const (&a)[Rows]) {
    const typename Products<Bits, Affine, Rows>::Codes codes[2] = {products.template read<J>(block),
                                                                   products.template read<J>(block + kLineBytes / 2)};
    for (int i = 0; i < Rows; ++i) {
      const __m256i a4 = broadcast4(a[i] + 4 * J);
      for (int h = 0; h < 2; ++h) products.add(sum[i][h][J % kSplit], codes[h], a4);
    }
  }
};

}  // namespace
}  // namespace lowbit
