// How x86 kernels cut the rows of m into tiles for which a block is unpacked once.
#pragma once

#include <cstdint>
#include <utility>

#include "../inline.h"

namespace lowbit {
namespace {

// How many of the remaining rows the next tile takes: up to `most`. A last tile of one row would unpack a block for that row
// alone. So most + 1 rows are cut in half: 5 rows become tiles of 3 and 2 where the most is 4.
constexpr int tile_rows(int64_t remaining, int most) {
  return remaining == most + 1 ? most / 2 + 1 : remaining < most ? static_cast<int>(remaining) : most;
}

// Calls tile(row, rows, number, tiles) for all rows of m. `rows`: a constant from 1 to MostRows; `number`: the tile's, from 0.
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
