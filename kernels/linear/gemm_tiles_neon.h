// The tiles of gemm_neon.h: up to 8 rows of m times some quarters of a panel (4 outputs each), through a piece of k.
//
//   groups of one segment   8 rows x 1 quarter: 8 int32 sums, 8 float sums that stay in registers for the whole piece
//   longer groups           8 rows x 1 quarter: 8 int32 sums, 8 sums of products (P); the float sums are in memory, updated
//                           once per group
//
// Both use 8 registers for activations (16 inputs of each row) and 4 for weights. Fewer rows take more quarters at once.
//
// The values that a tile reads for each segment are in a stream, in reading order, as registers of 16 bytes:
//   kStarts   the start values of the integer sums, including the bits of c (ukernel.h)
//   kScales   t of each row
//   kStarts   first segment of a group only: -c * t, so that P is one fma; later segments subtract c, which is exact
//   kScales   last segment of an affine group only: S of each row
#pragma once

#include "panel_neon.h"
#include "registers_neon.h"

namespace lowbit {
namespace {

constexpr int kTileRows = 8;
constexpr int kPieceBlocks = 16;
constexpr int kSegmentBlocks = kSegmentInputs / kBlockInputs;
constexpr int kHalfQuarterBytes = 64;  // 4 lines of an unpacked block
constexpr int kHalfBytes = kQuarters * kHalfQuarterBytes;
constexpr int kHalvesBytes = kPieceBlocks * kHalfBytes;  // distance from the first halves of the blocks to the second halves
constexpr int kQuarterFloats = 4 * kTileRows;  // float sums of a tile
constexpr int kTileFloats = kQuarters * kQuarterFloats;

// Number of registers of a tile's rows in memory, padded to a multiple of four if that saves a load. Values after the rows are
// never used.
constexpr int registers_of(int rows) { return rows == 3 ? 4 : rows == 6 || rows == 7 ? 8 : rows; }

// The unit of groups, and of the loops: blocks, or half blocks for groups of 16 inputs, of which each is a segment.
enum class Step { block, half };

// If a tile keeps sums of two rows with equal start values, 8 rows store each start value once: half the stores, and half the
// bytes to read. With fewer rows this would need more instructions.
template <class Tile>
constexpr bool starts_once(int rows) { return Tile::kRowStep == 2 && rows == kTileRows; }

// Number of registers of a segment's start values in memory.
template <class Tile>
constexpr int starts_of(int rows) { return starts_once<Tile>(rows) ? rows / 2 : registers_of(rows); }

// Inputs and outputs of tiles: some rows of m, one panel, one piece of k.
struct TileArgs {
  int64_t tiles;           // adjacent tiles with the same number of rows
  int64_t blocks;          // number of blocks in memory
  const uint8_t* weights;  // first halves of the blocks, each of 4 quarters, then the second halves: Tile::store_pairs()
  const uint8_t* a;        // per half block: registers_of(rows) registers in the order of Tile::copy_block()
  const uint8_t* stream;   // the stream of the first tile
  const float* scales;     // per group and quarter: 4 scales; affine: then 4 mins
  float* acc;              // float sums; per quarter 8 registers, the first ones used, in the order of Tile
  float* products;         // P of a group that is longer than a piece, stored like acc; equal to acc if there is one group
  int64_t groups, group_steps;
  bool affine;
  bool begins, ends;       // whether groups begin and end in the piece; if not, it has whole segments of one group
  bool single;             // whether there is only one group; then its P, and not float sums, is in memory between pieces

  // Segments per group, or in the part of a group.
  int64_t segments() const { return (group_steps + kSegmentBlocks - 1) / kSegmentBlocks; }

  // Bytes of the stream that a tile reads per group.
  template <class Tile>
  int64_t group_bytes(int rows) const {
    const int starts = starts_of<Tile>(rows), scales = Tile::scales_of(rows);
    return 16 * (segments() * (starts + scales) + (begins ? starts : 0) + (affine && ends ? scales : 0));
  }
};

// Loads the next registers_of(Rows) registers; the first `Rows` are used.
template <int Rows, int First, class Vector>
LOWBIT_INLINE inline void next_rows(const uint8_t*& at, Vector (&to)[Rows]) {
  Vector all[registers_of(Rows)];
  next<registers_of(Rows), First>(at, all);
  unroll<Rows>([&](auto i) LOWBIT_INLINE { to[i] = all[i]; });
}

// Loads all rows to registers that the compiler chooses. For sums in a loop, because GCC would copy or spill named registers.
template <int Rows, class Vector>
LOWBIT_INLINE inline void load_rows(const void* from, Vector (&to)[Rows]) {
  unroll<(Rows + 1) / 2>([&](auto p) LOWBIT_INLINE {
    constexpr int kRow = 2 * p, kNext = kRow + 1 < Rows ? kRow + 1 : kRow;
    load_pair<16 * kRow, kNext != kRow>(from, to[kRow], to[kNext]);
  });
}

// `At`: offset from `to` in bytes.
template <int At = 0, int Rows, class Vector>
LOWBIT_INLINE inline void store_rows(void* to, const Vector (&v)[Rows]) {
  unroll<(Rows + 1) / 2>([&](auto p) LOWBIT_INLINE {
    constexpr int kRow = 2 * p, kNext = kRow + 1 < Rows ? kRow + 1 : kRow;
    store_pair<At + 16 * kRow, kNext != kRow>(to, v[kRow], v[kNext]);
  });
}

// Loads the next start values of a segment, or the next -c * t.
template <class Tile, int Rows, int First, class Vector>
LOWBIT_INLINE inline void next_starts(const uint8_t*& at, Vector (&to)[Rows]) {
  if constexpr (starts_once<Tile>(Rows)) {
    Vector even[4], odd[4];
    Four<First>::template load<0>(at, even);
    Four<First + 4>::load(at, odd);
    unroll<4>([&](auto p) LOWBIT_INLINE { to[2 * p] = even[p], to[2 * p + 1] = odd[p]; });
  } else {
    next_rows<Rows, First>(at, to);
  }
}

// pin() for `Count` of the sums that next_starts() began.
template <class Tile, int Count, int First, int Rows, class Vector>
LOWBIT_INLINE inline void pin_sums(Vector (&sums)[Rows]) {
  if constexpr (starts_once<Tile>(Rows) && Count == Rows) {
    Vector even[4], odd[4];
    unroll<4>([&](auto p) LOWBIT_INLINE { even[p] = sums[2 * p], odd[p] = sums[2 * p + 1]; });
    pin<4, First>(even);
    pin<4, First + 4>(odd);
    unroll<4>([&](auto p) LOWBIT_INLINE { sums[2 * p] = even[p], sums[2 * p + 1] = odd[p]; });
  } else {
    pin<Count, First>(sums);
  }
}

// Adds the products of half a block to the sums of `Pass` quarters.
template <class Tile, int Rows, int Pass>
LOWBIT_INLINE inline void add_half(const uint8_t*& a, const uint8_t*& weights, int32x4_t (&sums)[Pass][Rows]) {
  uint8x16_t inputs[Rows];
  next_rows<Rows, 4>(a, inputs);
  unroll<Pass>([&](auto q) LOWBIT_INLINE {
    uint8x16_t lines[4];
    constexpr int kSkipped = q + 1 < Pass ? 0 : (kQuarters - Pass) * kHalfQuarterBytes;
    Four<0>::load<kHalfQuarterBytes + kSkipped>(weights, lines);
    Tile::template add_half<Rows>(sums[q], lines, inputs);
#if defined(__clang__)
    in_order(sums[q]);  // Clang would mix the halves and spill; GCC does not, but would copy sums here
#endif
  });
}

// `weights`: those of the next half and of the half after it.
template <class Tile, Step Size, int Rows, int Pass>
LOWBIT_INLINE inline void add_step(const uint8_t*& a, const uint8_t* (&weights)[2], int32x4_t (&sums)[Pass][Rows]) {
  add_half<Tile>(a, weights[0], sums);
  if constexpr (Size == Step::block) {
    add_half<Tile>(a, weights[1], sums);
  } else {
    const uint8_t* next = weights[1];
    weights[1] = weights[0];
    weights[0] = next;
  }
}

template <int Count, int Rows>
LOWBIT_INLINE inline void add_scaled(float32x4_t (&y)[Rows], const float32x4_t (&scales)[Count],
                                     const float32x4_t (&values)[Rows]) {
  unroll<Rows>([&](auto i) LOWBIT_INLINE {
    y[i] = vfmaq_f32(y[i], scales[i % Count], values[i]);
  });
}

// Adds an affine group's mins times S.
template <class Tile, int Rows>
LOWBIT_INLINE inline void add_mins(float32x4_t (&y)[Rows], const float32x4_t (&mins)[Tile::kScales],
                                   const float32x4_t* group_sums) {
  unroll<Rows>([&](auto i) LOWBIT_INLINE {
    y[i] = Tile::template add_by_row<i>(y[i], mins[i % Tile::kScales], group_sums);
  });
}

// Loads the next t, or S, of a tile's rows.
template <class Tile, int Rows, int First = 0>
LOWBIT_INLINE inline void next_row_scales(const uint8_t*& at, float32x4_t (&to)[4]) {
  next<Tile::scales_of(Rows), First>(at, to);
}

// P after the first segment of a group.
template <class Tile, int Rows, int First>
LOWBIT_INLINE inline void first_product(const uint8_t*& at, const int32x4_t (&sums)[Rows], const float32x4_t* t,
                                        float32x4_t (&product)[Rows]) {
  next_starts<Tile, Rows, First>(at, product);
  unroll<Rows>([&](auto i) LOWBIT_INLINE {
    product[i] = Tile::template add_by_row<i>(product[i], vreinterpretq_f32_s32(sums[i]), t);
  });
}

// Loads the scales of quarter `Q` of `Pass`; affine: and its mins.
template <class Tile, bool Affine, int Pass, int Q>
LOWBIT_INLINE inline void next_scales(const uint8_t*& at, float32x4_t (&scales)[Tile::kScales],
                                      float32x4_t (&mins)[Tile::kScales]) {
  constexpr int kBytes = 16 + (Q + 1 < Pass ? 0 : (kQuarters - Pass) * (Affine ? 32 : 16));
  if constexpr (Affine) {
    Tile::template next_scales_and_mins<kBytes + 16>(at, scales, mins);
  } else {
    Tile::template next_scales<kBytes>(at, scales);
  }
}

// Groups of one segment that have `Steps` steps.
template <class Tile, Step Size, int Rows, bool Affine, int Pass, int Steps>
LOWBIT_INLINE inline void run_short(const TileArgs& args, int quarter) {
  const uint8_t* a = args.a;
  const uint8_t* weights[2] = {args.weights + kHalfQuarterBytes * quarter,
                               args.weights + kHalfQuarterBytes * quarter + kHalvesBytes};
  const uint8_t* scales = reinterpret_cast<const uint8_t*>(args.scales + (Affine ? 8 : 4) * quarter);
  const uint8_t* stream = args.stream;
  float32x4_t y[Pass][Rows];
  const auto acc = [&](int q) LOWBIT_INLINE {
    return args.acc + kQuarterFloats * (quarter + q);
  };
  unroll<Pass>([&](auto q) LOWBIT_INLINE { load_rows(acc(q), y[q]); });
  const auto settle = [](auto& sums) LOWBIT_INLINE {
    if constexpr (Pass == 1) {
      pin<Rows, 24>(sums);
    } else {
      in_order(sums);
    }
  };
  const auto next_group = [&]() LOWBIT_INLINE {
    int32x4_t sums[Pass][Rows];
    const uint8_t* from;
    unroll<Pass>([&](auto q) LOWBIT_INLINE {
      from = stream;
      next_starts<Tile, Rows, 16 + 4 * q>(from, sums[q]);
    });
    unroll<Steps>([&](auto) LOWBIT_INLINE { add_step<Tile, Size>(a, weights, sums); });
    const uint8_t* const row_scales = from;
    unroll<Pass>([&](auto q) LOWBIT_INLINE {
      float32x4_t product[Rows], t[4], scale[Tile::kScales], min[Tile::kScales];
      pin_sums<Tile, (Pass == 1 || Rows < 4 ? Rows : 4), 16 + 4 * q>(sums[q]);
      from = row_scales;
      next_row_scales<Tile, Rows>(from, t);
      first_product<Tile, Rows, 4>(from, sums[q], t, product);
      next_scales<Tile, Affine, Pass, q>(scales, scale, min);
      add_scaled(y[q], scale, product);
      settle(y[q]);
      if constexpr (Affine) {
        next_row_scales<Tile, Rows, 4>(from, t);
        add_mins<Tile>(y[q], min, t);
        settle(y[q]);
      }
    });
    stream = from;
  };
  // Two blocks per iteration, which saves half of the loop's overhead.
  constexpr int kTurn = (Size == Step::block ? 2 : 4) / Steps;
  for (int64_t turns = args.groups / kTurn; turns != 0; --turns) {
    unroll<kTurn>([&](auto) LOWBIT_INLINE { next_group(); });
  }
  if constexpr (kTurn > 1) {
    for (int64_t rest = args.groups % kTurn; rest != 0; --rest) next_group();
  }
  unroll<Pass>([&](auto q) LOWBIT_INLINE { store_rows(acc(q), y[q]); });
}

// Adds a segment of `Blocks` blocks to P of its group.
template <class Tile, int Rows, int Pass, bool First, int Blocks>
LOWBIT_INLINE inline void add_segment(const uint8_t*& a, const uint8_t* (&weights)[2], const uint8_t*& stream,
                                      float32x4_t (&product)[Pass][Rows]) {
  int32x4_t sums[Pass][Rows];
  const uint8_t* from;
  unroll<Pass>([&](auto q) LOWBIT_INLINE {
    from = stream;
    next_starts<Tile, Rows, 16 + 16 / Pass * q>(from, sums[q]);
  });
  unroll<Blocks>([&](auto) LOWBIT_INLINE {
    add_step<Tile, Step::block>(a, weights, sums);
    if constexpr (Pass == 1) pin_sums<Tile, Rows, 16>(sums[0]);
  });
  const uint8_t* const row_scales = from;
  unroll<Pass>([&](auto q) LOWBIT_INLINE {
    float32x4_t t[4];
    from = row_scales;
    next_row_scales<Tile, Rows>(from, t);
    if constexpr (First) {
      first_product<Tile, Rows, Pass == 1 ? 24 : 4>(from, sums[q], t, product[q]);
    } else {
      unroll<Rows>([&](auto i) LOWBIT_INLINE {
        const float32x4_t value = vsubq_f32(vreinterpretq_f32_s32(sums[q][i]), vdupq_n_f32(kShift));
        product[q][i] = Tile::template add_by_row<i>(product[q][i], value, t);
      });
    }
    if constexpr (Pass == 1) {
      pin_sums<Tile, Rows, 24>(product[q]);
    } else {
      in_order(product[q]);
    }
  });
  stream = from;
}

// Adds P of a group to the float sums, which are read from `old` and written to `acc`.
template <class Tile, int Rows, bool Affine, int Pass>
LOWBIT_INLINE inline void end_group(const float* old, float* acc, const uint8_t*& scales, const uint8_t*& stream,
                                    const float32x4_t (&product)[Pass][Rows]) {
  float32x4_t group_sums[4];
  if constexpr (Affine) next_row_scales<Tile, Rows, 8>(stream, group_sums);
  unroll<Pass>([&](auto q) LOWBIT_INLINE {
    float32x4_t scale[Tile::kScales], min[Tile::kScales];
    next_scales<Tile, Affine, Pass, q>(scales, scale, min);
    const auto* from = reinterpret_cast<const uint8_t*>(old + kQuarterFloats * q);
    unroll<(Rows + 3) / 4>([&](auto four) LOWBIT_INLINE {
      constexpr int kFirst = 4 * four, kRows = Rows - kFirst < 4 ? Rows - kFirst : 4;
      float32x4_t y[kRows], value[kRows];
      next_rows<kRows, 4>(from, y);
      unroll<kRows>([&](auto i) LOWBIT_INLINE { value[i] = product[q][kFirst + i]; });
      add_scaled(y, scale, value);
      if constexpr (Affine) {
        unroll<kRows>([&](auto i) LOWBIT_INLINE {
          y[i] = Tile::template add_by_row<kFirst + i>(y[i], min[i % Tile::kScales], group_sums);
        });
      }
      store_rows<kQuarterFloats * 4 * q + 64 * four>(acc, y);
    });
  });
}

// Groups of several segments. `Whole`: only whole groups without a last block; otherwise also a part of a group, and weights
// with and without mins share the function.
template <class Tile, int Rows, bool Affine, int Pass, bool Whole>
LOWBIT_INLINE inline void run_long(const TileArgs& args, int quarter) {
  static constexpr float kZeros[Pass * kQuarterFloats] = {};
  const uint8_t* a = args.a;
  const uint8_t* weights[2] = {args.weights + kHalfQuarterBytes * quarter,
                               args.weights + kHalfQuarterBytes * quarter + kHalvesBytes};
  const uint8_t* scales = reinterpret_cast<const uint8_t*>(args.scales + (args.affine ? 8 : 4) * quarter);
  const uint8_t* stream = args.stream;
  float* acc = args.acc + kQuarterFloats * quarter;
  float* products = args.products + kQuarterFloats * quarter;
  const float* old = args.single ? kZeros : acc;
  const int64_t more_segments = args.group_steps / kSegmentBlocks - 1;
  int64_t groups = args.groups;
  do {
    float32x4_t product[Pass][Rows];
    const auto add = [&](auto first, auto blocks) LOWBIT_INLINE {
      add_segment<Tile, Rows, Pass, first, blocks>(a, weights, stream, product);
    };
    if constexpr (Whole) {
      add(Index<1>{}, Index<kSegmentBlocks>{});
      int64_t more = more_segments;
      do {
        add(Index<0>{}, Index<kSegmentBlocks>{});
      } while (--more != 0);
    } else {
      int64_t blocks = args.group_steps;
      if (args.begins) {  // with a whole segment, because a group of one block has another loop
        add(Index<1>{}, Index<kSegmentBlocks>{});
        blocks -= kSegmentBlocks;
      } else {
        unroll<Pass>([&](auto q) LOWBIT_INLINE { load_rows(products + kQuarterFloats * q, product[q]); });
      }
      for (; blocks >= kSegmentBlocks; blocks -= kSegmentBlocks) add(Index<0>{}, Index<kSegmentBlocks>{});
      if (blocks != 0) add(Index<0>{}, Index<1>{});
      if (!args.ends) {
        unroll<Pass>([&](auto q) LOWBIT_INLINE { store_rows(products + kQuarterFloats * q, product[q]); });
        return;
      }
    }
    if (Whole ? Affine : args.affine) {
      end_group<Tile, Rows, true>(old, acc, scales, stream, product);
    } else {
      end_group<Tile, Rows, false>(old, acc, scales, stream, product);
    }
  } while (--groups != 0);
}

// The loop for a piece: groups of one segment of one or two steps, groups of whole segments, or others.
enum class Groups { one_step, two_steps, whole_segments, any };

template <class Tile, Step Size, int Rows, bool Affine, Groups Kind>
void run_tiles(const TileArgs& all) {
  TileArgs args = all;
  constexpr int kPass = Tile::template kPass<Rows>;
  const int64_t stream_bytes = args.groups * args.template group_bytes<Tile>(Rows);
  for (; args.tiles > 0; --args.tiles) {
    for (int quarter = 0; quarter < kQuarters; quarter += kPass) {
      if constexpr (Kind == Groups::one_step || Kind == Groups::two_steps) {
        run_short<Tile, Size, Rows, Affine, kPass, Kind == Groups::one_step ? 1 : 2>(args, quarter);
      } else {
        run_long<Tile, Rows, Affine, kPass, Kind == Groups::whole_segments>(args, quarter);
      }
    }
    args.a += args.blocks * registers_of(Rows) * kBlockInputs;
    args.stream += stream_bytes;
    args.acc += kTileFloats;
    args.products += kTileFloats;
  }
}

template <class Tile, Step Size, int Rows, bool Affine>
auto tiles_for(const TileArgs& piece) {
  if constexpr (Size == Step::block) {
    const int64_t steps = piece.begins && piece.ends ? piece.group_steps : 0;
    if (steps == 2) return run_tiles<Tile, Size, Rows, Affine, Groups::two_steps>;
    if (steps > 0 && steps % kSegmentBlocks == 0) return run_tiles<Tile, Size, Rows, Affine, Groups::whole_segments>;
    if (steps != 1) return run_tiles<Tile, Size, Rows, false, Groups::any>;
  }
  return run_tiles<Tile, Size, Rows, Affine, Groups::one_step>;
}

}  // namespace
}  // namespace lowbit
