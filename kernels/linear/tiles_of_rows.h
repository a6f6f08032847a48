// How x86 kernels cut the rows of m into tiles for which a block is unpacked once.
#pragma once

#include <cstdint>
#include <type_traits>

namespace lowbit {
namespace {

// Calls tile(row, rows), `rows` a constant from 1 to MostRows, over all rows of m. With MostRows 4, 5 rows are 3 and 2: no
// row but an only one pays for unpacking alone.
template <int MostRows, class Tile>
[[gnu::always_inline]] inline void for_each_tile(int64_t m, Tile tile) {
  static_assert(MostRows == 1 || MostRows == 4);
  for (int64_t row = 0; row < m;) {
    if constexpr (MostRows == 1) {
      tile(row++, std::integral_constant<int, 1>());
    } else {
      const int64_t left = m - row;
      switch (left == 5 ? 3 : left < 4 ? left : 4) {
        case 1: tile(row, std::integral_constant<int, 1>()); row += 1; break;
        case 2: tile(row, std::integral_constant<int, 2>()); row += 2; break;
        case 3: tile(row, std::integral_constant<int, 3>()); row += 3; break;
        default: tile(row, std::integral_constant<int, 4>()); row += 4; break;
      }
    }
  }
}

}  // namespace
}  // namespace lowbit
