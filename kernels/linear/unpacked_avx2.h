// Many rows of m on AVX2 without VNNI, for codes of 6 and 7 bits. One or two vpmaddubsw fill an int16, so the int32 sums are
// updated every line or two and must be in registers. Unpacking within a tile would need these registers, and half as many
// instructions as the tile's products. So a panel is unpacked once, to a byte per code, and all tiles of a call read it.
//
// Measured on Zen 3: 1.1 to 1.45 times as fast from 16 rows on, slower with 8. At 5 bits its speed is only 0.75 to 1.0: there
// are not enough registers for both halves of four lines, so each broadcast would be loaded twice.
#pragma once

#include "linear_avx2.h"

namespace lowbit {
namespace {

// Number of lines whose sums of two products fit in int16.
constexpr int lines_in_int16(int bits) { return 32767 / (2 * 127 * ((1 << bits) - 1)); }

constexpr bool is_unpacked(int bits) { return lines_in_int16(bits) == 1 || lines_in_int16(bits) == 2; }

template <int Bits, int Rows>
struct UnpackedSums {
  static constexpr int kBits = Bits, kRows = Rows;
  static constexpr bool kAffine = false, kHalves = false, kOffsetLate = false, kInterleaved = false, kUnpacked = true;
  static constexpr bool kAsks = true, kStarts = true;
  static constexpr int kRun = lines_in_int16(Bits);
  using Input = int8_t;

  Sums32 sum[Rows][2];

  LOWBIT_INLINE void begin(const Layout&, Sums32*) {}

  LOWBIT_INLINE void start(int i, const int32_t* value) {
    sum[i][0] = sum[i][1] = reinterpret_cast<Sums32>(broadcast4(value));
  }

  static constexpr Starts starts(bool affine) { return {affine ? 0 : -level_offset(Bits), Starts::word}; }

  LOWBIT_INLINE void next_block() {}

  LOWBIT_INLINE void end(Sums32 (&totals)[Rows][2]) const {
    unrolled<2 * Rows>([&](auto i) LOWBIT_INLINE { totals[i / 2][i % 2] = sum[i / 2][i % 2]; });
  }

  template <int First, int Lines>
  LOWBIT_INLINE void add(const uint8_t* block, const int8_t* const (&a)[Rows]) {
    const __m256i ones = _mm256_set1_epi16(1);
    unrolled<Lines / kRun>([&](auto run) LOWBIT_INLINE {
      constexpr int kLine = First + run * kRun;
      __m256i codes[kRun][2];
      unrolled<2 * kRun>([&](auto n) LOWBIT_INLINE {
        codes[n / 2][n % 2] = load32(block + (2 * kLine + n) * kLineBytes / 2);
        settle(codes[n / 2][n % 2]);
      });
      unrolled<Rows>([&](auto i) LOWBIT_INLINE {
        Sums16 pairs[2];
        unrolled<kRun>([&](auto line) LOWBIT_INLINE {
          const __m256i a4 = broadcast4(a[i] + 4 * (kLine + line));
          unrolled<2>([&](auto h) LOWBIT_INLINE {
            const Sums16 products = reinterpret_cast<Sums16>(_mm256_maddubs_epi16(codes[line][h], a4));
            pairs[h] = line == 0 ? products : pairs[h] + products;
            settle(pairs[h]);
          });
        });
        unrolled<2>([&](auto h) LOWBIT_INLINE {
          sum[i][h] += reinterpret_cast<Sums32>(_mm256_madd_epi16(reinterpret_cast<__m256i>(pairs[h]), ones));
          settle(sum[i][h]);
        });
      });
    });
  }
};

constexpr int64_t unpacked_bytes(const Layout& layout) { return layout.blocks * kBlockLines * kLineBytes; }

inline int64_t unpacked_scratch(const void*, const Layout& layout, int64_t, int) {
  return unpacked_bytes(layout) + kLinearScratchBytes;
}

// Unpacks a panel's codes, for groups of whole blocks.
template <int Bits>
void unpack_panel(const Layout& layout, const uint8_t* at, uint8_t* to) {
  const int64_t group_blocks = layout.group_inputs() / kBlockInputs;
  for (int64_t blocks = layout.blocks; blocks > 0; blocks -= group_blocks, at += layout.group_bytes) {
    for (int64_t block = 0; block < blocks && block < group_blocks; ++block, at += Bits * kLineBytes) {
      unrolled<kBlockLines>([&](auto line) LOWBIT_INLINE {
        for (int h = 0; h < 2; ++h, to += kLineBytes / 2) {
          const __m256i codes = unpack_line<Bits, line>(at + h * kLineBytes / 2);
          _mm256_store_si256(reinterpret_cast<__m256i*>(to), codes);
        }
      });
    }
  }
}

template <int Bits>
void run_unpacked(const LinearArgs& args, RunRow one_row) {
  static constexpr RunTile kTiles[] = {run_tile<UnpackedSums<Bits, 2>, Groups::segments>,
                                       run_tile<UnpackedSums<Bits, 3>, Groups::segments>,
                                       run_tile<UnpackedSums<Bits, 4>, Groups::segments>};
  const Starts starts = UnpackedSums<Bits, 2>::starts(has_mins(args.layout.mapping));
  run_tiles(args, kTiles, one_row, &starts, unpacked_bytes(args.layout), unpack_panel<Bits>);
}

}  // namespace
}  // namespace lowbit
