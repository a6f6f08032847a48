// How x86 kernels cut the rows of m into tiles for which a block is unpacked once.
#pragma once

#include <cstdint>
#include <utility>

#include "../inline.h"

namespace lowbit {
namespace {

// How many of `left` rows the next tile takes, `most` or fewer. No row but an only one pays for unpacking alone: tiles
// of up to 4 take 5 rows as 3 and 2.
constexpr int tile_rows(int64_t left, int most) {
  return left == most + 1 ? most / 2 + 1 : left < most ? static_cast<int>(left) : most;
}

// Calls tile(row, rows, number, tiles), `rows` a constant from 1 to MostRows, over all rows of m: tile `number` of so many.
template <int MostRows, class Tile>
LOWBIT_INLINE inline void for_each_tile(int64_t m, Tile tile) {
  const int64_t tiles = (m + MostRows - 1) / MostRows;
  int64_t number = 0;
  for (int64_t row = 0; row < m; ++number) {
    const int rows = tile_rows(m - row, MostRows);
    [&]<int... I>(std::integer_sequence<int, I...>) LOWBIT_INLINE {
      ((rows == I + 1 ? tile(row, std::integral_constant<int, I + 1>(), number, tiles) : void()), ...);
    }(std::make_integer_sequence<int, MostRows>());
    row += rows;
  }
}

}  // namespace
}  // namespace lowbit
