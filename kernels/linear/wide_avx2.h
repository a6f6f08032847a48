// Several rows of m on AVX2 without VNNI, for codes that vpmaddubsw would have to multiply in two halves, because it saturates.
// Both operands are widened to int16 instead: activations once for all panels of a call, weights once for all rows of a tile.
//
//   line (64 bytes): row 0: 4 codes | row 1: 4 codes | ... | row 15: 4 codes       two ymm registers
//   codes 0 and 2 of each row, then codes 1 and 3, in int16: shifts, no shuffles   two registers each
//   vpmaddwd by the broadcast of activations 0 and 2, or 1 and 3: 16 rows x 1 sum of 2 products, in int32
//
// Activations are stored in pairs in the same order, so that a broadcast is a load and does not occupy a multiplication port.
// The widened numbers are levels (symmetric) or codes (affine), so sums start at zero.
#pragma once

#include "linear_avx2.h"

namespace lowbit {
namespace {

// Panels per widening of activations if the scratch memory holds only some of a call's rows. These panels stay in a cache in
// the meantime.
constexpr int64_t kWidePanels = 8;

template <int Bits, bool Affine, bool Halves, int Rows>
struct WideSums {
  static constexpr int kBits = Bits, kRows = Rows;
  static constexpr bool kAffine = Affine, kHalves = Halves, kOffsetLate = false, kInterleaved = true, kUnpacked = false;
  static constexpr bool kAsks = false, kStarts = false;  // the widened numbers depend on the mapping
  using Input = int16_t;

  __m256i table;  // of levels
  Sums32 sum[Rows][2];

  LOWBIT_INLINE void begin(const Layout& layout, Sums32*) {
    if constexpr (is_by_table(Bits)) {
      table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(layout.levels)));
    }
  }

  LOWBIT_INLINE void start(int i, const int32_t*) { sum[i][0] = sum[i][1] = Sums32{}; }

  static constexpr Starts starts(bool) { return {0, Starts::word}; }

  LOWBIT_INLINE void next_block() {}

  LOWBIT_INLINE void end(Sums32 (&totals)[Rows][2]) const {
    unrolled<2 * Rows>([&](auto i) LOWBIT_INLINE { totals[i / 2][i % 2] = sum[i / 2][i % 2]; });
  }

  template <int First, int Lines>
  LOWBIT_INLINE void add(const uint8_t* block, const int16_t* a) {
    unrolled<Lines>([&](auto line) LOWBIT_INLINE {
      constexpr int kLine = First + line;
      unrolled<2>([&](auto odd) LOWBIT_INLINE {
        const __m256i words[2] = {widened<kLine, odd>(block), widened<kLine, odd>(block + kLineBytes / 2)};
        unrolled<Rows>([&](auto i) LOWBIT_INLINE {
          const __m256i a2 = broadcast4(a + i * kBlockInputs + 4 * kLine + 2 * odd);
          unrolled<2>([&](auto h) LOWBIT_INLINE {
            sum[i][h] += reinterpret_cast<Sums32>(_mm256_madd_epi16(words[h], a2));
            settle(sum[i][h]);
          });
        });
      });
    });
  }

 private:
  // Half a line in int16: the numbers for codes 0 and 2 of each row, or for codes 1 and 3.
  template <int J, bool Odd>
  LOWBIT_INLINE __m256i widened(const uint8_t* packed) const {
    if constexpr (Affine) {
      const __m256i codes = unpack_line<Bits, J>(packed);
      return Odd ? _mm256_srli_epi16(codes, 8) : _mm256_and_si256(codes, _mm256_set1_epi16(0xff));
    } else {
      const __m256i levels = read_levels<J>(packed);
      return _mm256_srai_epi16(Odd ? levels : _mm256_slli_epi16(levels, 8), 8);
    }
  }

  template <int J>
  LOWBIT_INLINE __m256i read_levels(const uint8_t* packed) const {
    if constexpr (is_by_table(Bits)) {
      return _mm256_shuffle_epi8(table, unpack_line<code_bits(Bits), J>(packed));
    } else if constexpr (Bits == 8) {
      return load32(packed + J * kLineBytes);  // stored as levels
    } else {
      return _mm256_sub_epi8(unpack_line<Bits, J, level_factor(Bits) - 1>(packed), byte_mask(level_offset(Bits)));
    }
  }
};

// Widens a block of activations.
LOWBIT_INLINE inline void widen(const int8_t* a, int16_t* to) {
  const __m256i bytes = load32(reinterpret_cast<const uint8_t*>(a));
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
  const __m256i low = _mm256_unpacklo_epi32(even, odd), high = _mm256_unpackhi_epi32(even, odd);
  __m256i* const words = reinterpret_cast<__m256i*>(to);
  _mm256_store_si256(words, _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_store_si256(words + 1, _mm256_permute2x128_si256(low, high, 0x31));
}

// Widens all rows of the call; the rows of a tile are interleaved block by block.
inline void widen_rows(const LinearArgs& args, int16_t* to) {
  const int64_t blocks = args.layout.blocks;
  for_each_tile<kMostRows>(args.m, [&](int64_t row, int rows, int64_t, int64_t) {
    for (int i = 0; i < rows; ++i) {
      const int8_t* a = args.a + (row + i) * blocks * kBlockInputs;
      int16_t* at = to + (row * blocks + i) * kBlockInputs;
      for (int64_t block = 0; block < blocks; ++block, a += kBlockInputs, at += rows * kBlockInputs) widen(a, at);
    }
  });
}

constexpr int64_t wide_row_bytes(const Layout& layout) { return layout.blocks * kBlockInputs * int64_t{sizeof(int16_t)}; }

// The widened rows of one tile may need more than kLinearScratchBytes.
inline int64_t wide_scratch(const void*, const Layout& layout, int64_t m, int) {
  const int64_t least = (m < kMostRows ? m : kMostRows) * wide_row_bytes(layout);
  return least < kLinearScratchBytes ? kLinearScratchBytes : least;
}

// Calls run(call) with widened activations, for some rows and panels at a time.
inline void with_widened_rows(const LinearArgs& args, void (*run)(const LinearArgs&, RunRow), RunRow one_row) {
  const int64_t fitting = kLinearScratchBytes / wide_row_bytes(args.layout);
  const int64_t most = fitting < kMostRows ? kMostRows : fitting / kMostRows * kMostRows;
  const int64_t panels = args.m <= most ? args.panel_end - args.panel_begin : kWidePanels;
  for (int64_t panel = args.panel_begin; panel < args.panel_end; panel += panels) {
    for (int64_t row = 0; row < args.m; row += most) {
      LinearArgs call = some_rows(args, row, args.m - row < most ? args.m - row : most);
      call.panel_begin = panel;
      call.panel_end = args.panel_end - panel < panels ? args.panel_end : panel + panels;
      widen_rows(call, static_cast<int16_t*>(args.scratch));
      call.activations = args.scratch;
      run(call, one_row);
    }
  }
}

}  // namespace
}  // namespace lowbit
