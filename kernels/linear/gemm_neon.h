// Many rows of m on Arm, shared by the dot-product and the i8mm kernels. A `Tile` (neondot_tiles.cpp, i8mm.cpp) has the
// multiply instructions and their order of rows. gemm_tiles_neon.h has the loops of a tile, gemm_operands_neon.h prepares its
// operands, and this header calls both.
//
//   up to 64 rows of m x up to 8 panels, their float sums in the operator's scratch:
//     for each piece of k, at most 512 inputs (whole groups, or whole segments of a long group):
//       the activations, scales and start values of the rows are copied in the order in which tiles read them: once for
//       all panels
//       for each panel: codes are unpacked to bytes, scales to float32                            once for all rows
//                       tiles of up to 8 rows: exact int32 sums, then an fma per segment and one per group
//   then the panels' heads
//
// The unpacked bytes are codes (at 8 bits minus 128, as stored), or levels (1 bit symmetric, and with a table).
// A segment's integer part is sum(a * byte) + factor * A. Sums start at the second term plus the bits of c (ukernel.h).
// For many rows, unpacked bytes are cheaper than fields in place: unpacking a byte costs one instruction for all rows, joining
// the sums of fields one instruction for each row.
//
// All operands of a tile are stored in reading order, and ld1 loads 64 bytes and advances the pointer. Start values are stored
// for every lane: one load of four values replaces four dup, which would use the multiplication pipes. The float sums stay
// in the order of a tile's registers until the heads. Instructions per unit (128 weights and one row) of a tile of 8 rows,
// symmetric, from GCC 12's code, which has no spills (docs/arm_cost.md has the totals):
//   the products (8 sdot or 4 smmla), 6/8 loads of weights and activations
//   per segment           2/8 loads of starts, 1/8 of t, 1 fma; first of a group: 2/8 loads of -c * t; others: 1 (subtract)
//   per group             1 fma, 1/8 load of scales, 1/8 loop; if it has several segments, 6/8 for the float sums in memory
//   per piece             2/10 for the float sums and pointers at both ends
//   once per call         1/10 to 2/10 copying activations and starts, 3/10 to 4/10 heads and driver, at 1024 inputs
//   unpacking, / m        bits    1     2     3     4     5     6     7     8
//                         smmla   22.4  18.8  21.4  15.8  22.3  20.8  24.3  9.8   sdot 2 less (st1 of 4 registers for
//                                                                                 st2); groups of 32: 0.6 more (scales)
//     of which a block of 4 units has 2 ldp per bit, 4 times 16, 12, 14, 8, 14, 12, 14, 0 to make bytes, 16 st2
//   groups of 16          a group is half a block: double the cost per group, and the same products and loads
//   groups that end in the middle of blocks but do not have 16 inputs, which no common format has: the kernels for one row
// Rejected alternatives: tiles of 12 rows would save 0.2, but most m are not multiples of 12. Unpacking 1 bit by tables (tbl)
// would save 6 of the 22 instructions, but at half the rate: up to 20 % more cycles in the model. The contract requires the
// float operations and their order.
//
// A tile uses 18 KB of the scratch memory at a time (groups of 16: 24 KB), which fit a first-level cache: 8 of weights,
// 4 of activations, 2 to 5 of the stream (gemm_tiles_neon.h), 1 to 2 of scales. A group that is longer than a piece also
// keeps its products in the scratch memory.
#pragma once

#include "gemm_operands_neon.h"

namespace lowbit {

extern const Table<LinearKernel> kLinearNeonDot;  // one row, in the order of widths

namespace {

// The width-dependent parts.
struct Width {
  // Indexed by Step.
  void (*unpack[2])(const uint8_t* block, const TileArgs& piece, Scratch& scratch, const int8_t* levels);
  int32_t factor;  // factor of A in I
};

LOWBIT_INLINE inline void load_bias(const LinearArgs& args, int64_t panel, Heads& heads) {
  const uint8_t* bias = head(args, panel, 2);
  load_pair<0>(bias, heads.bias[0], heads.bias[1]);
  load_pair<32>(bias, heads.bias[2], heads.bias[3]);
}

template <class Tile, bool Affine>
struct Gemm {
  const LinearArgs& args;
  const Step step;
  const Width width;
  Scratch& scratch;

  Gemm(const LinearArgs& linear_args, Width w)
      : args(linear_args),
        step(linear_args.layout.group_inputs() % kBlockInputs == 0 ? Step::block : Step::half),
        width(w),
        scratch(*static_cast<Scratch*>(linear_args.scratch)) {}

  // Calls with the number of rows of a tile as a constant, at least 2.
  template <class Body>
  LOWBIT_INLINE static void with_rows(int64_t rows, Body body) {
    constexpr int kStep = Tile::kRowStep;
    if constexpr (kStep == 1) {
      switch (rows) {
        case 3: return body(Index<3>{});
        case 5: return body(Index<5>{});
        case 7: return body(Index<7>{});
        default: break;
      }
    }
    switch (rows) {
      case 2: return body(Index<2>{});
      case 4: return body(Index<4>{});
      case 6: return body(Index<6>{});
      default: return body(Index<8>{});
    }
  }

  LOWBIT_INLINE static int64_t padded(int64_t rows) {
    return (rows + Tile::kRowStep - 1) / Tile::kRowStep * Tile::kRowStep;
  }

  // Adjacent tiles of the same number of rows.
  struct Band {
    int64_t first, at;  // its first row, and that row's position in the registers of activations
    int64_t tile;       // its first tile
    int64_t tiles, height;
    void (*run)(const TileArgs&);
    TileArgs piece;
  };

  // Divides rows into tiles of 8. A last tile of 1 or 2 rows is joined with the previous 8 rows and split into two tiles of 4
  // or 5. A single row is padded.
  static int cut(int64_t rows, Band (&bands)[3]) {
    int64_t full = padded(rows) / kTileRows, rest = rows == 1 ? 2 : padded(rows) % kTileRows;
    if (full > 0 && (rest == 1 || rest == 2)) {
      full -= 1;
      rest += kTileRows;
    }
    const int64_t half = rest > kTileRows ? padded((rest + 1) / 2) : rest;
    int64_t first = 0, at = 0, tile = 0;
    int count = 0;
    const auto add = [&](int64_t tiles, int64_t height) {
      if (tiles == 0 || height == 0) return;
      bands[count++] = {first, at, tile, tiles, height, nullptr, {}};
      first += tiles * height;
      tile += tiles;
      at += tiles * registers_of(static_cast<int>(height));
    };
    add(full, kTileRows);
    add(1, half);
    add(1, rest - half);
    return count;
  }

  // Bytes of the stream that a band's tiles read per group.
  int64_t group_bytes(const Band& band, const TileArgs& piece) const {
    return band.tiles * piece.template group_bytes<Tile>(static_cast<int>(band.height));
  }

  // Copies the rows of a band, and prepares its tiles.
  void start(Band& band, int64_t row, int64_t rows, int64_t block, int64_t segment, int64_t group, const TileArgs& piece) {
    uint8_t* a = scratch.a + band.at * piece.blocks * kBlockInputs;
    band.piece = piece;
    band.piece.tiles = band.tiles;
    with_rows(band.height, [&](auto height) LOWBIT_INLINE {
      band.piece.a = a;
      uint8_t* stream = scratch.stream + (piece.stream - scratch.stream);
      for (int64_t tile = 0; tile < band.tiles; ++tile) {
        copy_tile<Tile, height, Affine>(args, piece, row + band.first + tile * height, row + rows - 1, block, segment, group,
                                        width.factor, a, stream);
        a += registers_of(height) * piece.blocks * kBlockInputs;
        stream += piece.groups * piece.template group_bytes<Tile>(height);
      }
      band.run = step == Step::half ? tiles_for<Tile, Step::half, height, Affine>(piece)
                                    : tiles_for<Tile, Step::block, height, Affine>(piece);
    });
  }

  void chunk(int64_t panel, int64_t panels, int64_t row, int64_t rows) {
    const Layout& layout = args.layout;
    const bool halves = step == Step::half;
    const int64_t step_inputs = halves ? kHalfInputs : kBlockInputs;
    const int64_t group_steps = layout.group_inputs() / step_inputs;
    const int64_t steps = halves ? (layout.k + kHalfInputs - 1) / kHalfInputs : layout.blocks;
    Band bands[3];
    const int count = cut(rows, bands);
    const Band& last = bands[count - 1];
    const int64_t panel_floats = (last.tile + last.tiles) * kTileFloats;
    std::memset(scratch.acc, 0, static_cast<size_t>(panels * panel_floats) * sizeof(float));

    TileArgs piece{};
    piece.weights = scratch.weights;
    piece.scales = scratch.scales;
    piece.affine = Affine;
    piece.single = layout.groups == 1;
    float* const products = piece.single ? scratch.acc : scratch.acc + panels * panel_floats;
    for (int64_t first = 0; first < steps; first += piece.groups * piece.group_steps) {
      const int64_t group = first / group_steps, block = halves ? first / 2 : first;
      const int64_t in_group = first - group * group_steps;
      const int64_t segment = group * layout.group_segments() + in_group / kSegmentBlocks;
      const int64_t remaining = steps - first;
      const int64_t group_rest = group_steps - in_group < remaining ? group_steps - in_group : remaining;
      const int64_t most = halves ? 2 * kPieceBlocks : kPieceBlocks;
      piece.begins = in_group == 0;
      piece.ends = group_rest <= most;
      piece.group_steps = piece.ends ? group_rest : most;
      piece.groups = 1;
      if (group_rest == group_steps && piece.ends) {  // the largest number of whole groups that fit
        int64_t bytes = 0;
        for (int b = 0; b < count; ++b) bytes += group_bytes(bands[b], piece);
        piece.groups = (remaining < most ? remaining : most) / group_steps;
        if (piece.groups * bytes > kStreamBytes) piece.groups = kStreamBytes / bytes / 2 * 2;  // without a half block
      }
      piece.blocks = piece.groups * piece.group_steps;
      if (halves) piece.blocks = (piece.blocks + 1) / 2;
      const auto unpack = width.unpack[halves];
      piece.stream = scratch.stream;
      for (int b = 0; b < count; ++b) {
        start(bands[b], row, rows, block, segment, group, piece);
        piece.stream += piece.groups * group_bytes(bands[b], piece);
      }
      const uint8_t* packed = args.panels + panel * layout.panel_bytes + layout.block_offset(block);
      for (int64_t p = 0; p < panels; ++p, packed += layout.panel_bytes) {
        unpack(packed, piece, scratch, layout.levels);
        for (int b = 0; b < count; ++b) {
          const int64_t at = p * panel_floats + bands[b].tile * kTileFloats;
          bands[b].piece.acc = scratch.acc + at;
          bands[b].piece.products = products + at;
          bands[b].run(bands[b].piece);
        }
      }
    }
    with_dtype(args.out_dtype, [&](auto dtype) LOWBIT_INLINE {
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t columns = args.layout.n - (panel + p) * kPanelRows;
        const float* acc = scratch.acc + p * panel_floats;
        if (columns >= kPanelRows) {
          finish<dtype()>(acc, panel + p, row, rows, bands, Index<kPanelRows>{});
        } else {
          finish<dtype()>(acc, panel + p, row, rows, bands, columns);
        }
      }
    });
  }

  // Stores the outputs of a panel.
  template <DType T, class Columns>
  LOWBIT_INLINE void finish(const float* acc, int64_t panel, int64_t row, int64_t rows, const Band* band,
                            Columns columns) const {
    const LinearArgs call = args;  // a copy: stores to the output cannot alias it, so it is not reloaded for every row
    Heads heads = load_heads(call, panel);
    for (const int64_t end = row + rows; row < end; ++band) {
      for (int64_t tile = 0; tile < band->tiles; ++tile, acc += kTileFloats) {
        const int64_t tile_end = end - row < band->height ? end : row + band->height;
        for (const float* sums = acc; row < tile_end; row += Tile::kRowStep, sums += 4 * Tile::kRowStep) {
          float32x4_t y[Tile::kRowStep][kQuarters];
          Tile::rows(sums, y);
          unroll<Tile::kRowStep>([&](auto next) LOWBIT_INLINE {
            if (next != 0 && row + next == tile_end) return;  // this row is a copy of the last one
            load_bias(call, panel, heads);  // loaded again, because an fma overwrites it and copies would be more instructions
            store_outputs<T>(call, panel, row + next, heads, y[next], columns);
          });
        }
        row = tile_end;
      }
    }
  }

  void run() {
    // Chunks have nearly equal numbers of whole tiles, so that no chunk unpacks for only a few rows.
    const int64_t tiles = (args.m + kTileRows - 1) / kTileRows;
    const int64_t chunks = (args.m + kChunkRows - 1) / kChunkRows;
    // Groups longer than a piece keep their products in the other half of the float sums.
    const bool keeps_products = args.layout.groups > 1 && args.layout.group_inputs() > kPieceBlocks * kBlockInputs;
    const int64_t most = keeps_products ? kChunkPanels / 2 : kChunkPanels;
    for (int64_t panel = args.panel_begin; panel < args.panel_end; panel += most) {
      const int64_t panels = args.panel_end - panel < most ? args.panel_end - panel : most;
      for (int64_t c = 0; c < chunks; ++c) {
        const int64_t row = c * tiles / chunks * kTileRows, end = (c + 1) * tiles / chunks * kTileRows;
        chunk(panel, panels, row, (end < args.m ? end : args.m) - row);
      }
    }
  }
};

template <class Tile, bool Affine>
[[gnu::noinline]] void run_gemm(const LinearArgs& args, Width width) {
  Gemm<Tile, Affine> gemm(args, width);
  gemm.run();
}

template <class Tile, int Bits>
void run_gemm(const LinearArgs& args) {
  const int64_t group_inputs = args.layout.group_inputs();
  if (group_inputs % kBlockInputs != 0 && group_inputs != kHalfInputs) return kLinearNeonDot.entries[Bits - 1].run(args);
  with_mapping<Bits>(args.layout.mapping, [&](auto bits, auto affine) {
    constexpr int kWidth = bits;
    constexpr bool kHasLevels = kWidth == 1 || is_by_table(kWidth);  // whether the bytes are levels
    constexpr int32_t kFactor = kHasLevels ? 0 : stored_flip(kWidth) - (affine ? 0 : level_offset(kWidth));
    run_gemm<Tile, affine()>(args, Width{{unpack<Tile, Step::block, kWidth, affine()>,
                                          unpack<Tile, Step::half, kWidth, affine()>}, kFactor});
  });
}

}  // namespace
}  // namespace lowbit
