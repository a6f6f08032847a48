// How x86 kernels divide the rows of m into tiles; a block is unpacked once per tile.
#pragma once

#include <cstdint>

#include "../ukernel.h"

namespace lowbit {
namespace {

// Number of rows of the next tile, at most `most`. A last tile of one row would unpack blocks for only that row, so most + 1
// rows are halved: if `most` is 4, 5 rows become tiles of 3 and 2.
constexpr int tile_rows(int64_t remaining, int most) {
  return remaining == most + 1 ? most / 2 + 1 : remaining < most ? static_cast<int>(remaining) : most;
}

// Calls tile(row, rows, number, tiles) for all rows of m. `rows`: from 1 to MostRows; `number`: the tile's number, from 0.
template <int MostRows, class Tile>
void for_each_tile(int64_t m, Tile tile) {
  const int64_t tiles = (m + MostRows - 1) / MostRows;
  int64_t number = 0;
  for (int64_t row = 0; row < m; ++number) {
    const int rows = tile_rows(m - row, MostRows);
    tile(row, rows, number, tiles);
    row += rows;
  }
}

// Restricts a call to rows [row, row + rows).
inline LinearArgs some_rows(LinearArgs args, int64_t row, int64_t rows) {
  const Layout& layout = args.layout;
  args.a += row * layout.blocks * kBlockInputs;
  args.scales += row * layout.segments;
  args.sums += row * layout.segments;
  if (args.group_sums != nullptr) args.group_sums += row * layout.groups;
  args.out = static_cast<char*>(args.out) + row * args.out_stride * size_of(args.out_dtype);
  args.m = rows;
  return args;
}

// Restricts a call to row `row` and panels [begin, end).
inline LinearArgs one_row_of(const LinearArgs& args, int64_t row, int64_t begin, int64_t end) {
  LinearArgs call = some_rows(args, row, 1);
  call.panel_begin = begin;
  call.panel_end = end;
  return call;
}

}  // namespace
}  // namespace lowbit
