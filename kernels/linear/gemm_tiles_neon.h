// The tiles of gemm_neon.h: up to 8 rows of m times some quarters of a panel (4 outputs each), through a piece of k.
//
//   groups of one block or half a block
//                         8 rows x 1 quarter: 8 int32 sums, 8 float sums that stay in registers for the whole piece
//   longer ones           8 rows x 2 quarters: 16 int32 sums; the float sums are in memory, updated once per group
//
// Both have 8 registers of activations (16 inputs of every row) and 4 of weights. Longer ones load activations half as
// often, and have sums enough for a core with four pipes of three cycles (smmla on Neoverse V1); but every group costs
// them a load and a store of every float sum, which does not pay for one block. Fewer rows take more quarters at once.
//
// Conversion: where all sums of groups are below 2^22, they start at the bits of the float kShift. They end as those of
// kShift + sum, and a subtraction, which is exact, gives float(sum), as scvtf does; but cores from Neoverse N1 to V2
// subtract four times as fast as they convert.
#pragma once

#include "panel_neon.h"
#include "registers_neon.h"

namespace lowbit {
namespace {

constexpr int kTileRows = 8;
constexpr int kPieceBlocks = 16;
constexpr int kHalfQuarterBytes = 64;  // of an unpacked block: 4 lines
constexpr int kHalfBytes = kQuarters * kHalfQuarterBytes;
constexpr int kHalvesBytes = kPieceBlocks * kHalfBytes;  // from the first halves of the blocks to the second ones
constexpr float kShift = 0x1.8p23f;
constexpr int32_t kShiftBits = 0x4b400000;
constexpr int64_t kShiftedBelow = 1 << 22;
constexpr int kQuarterFloats = 4 * kTileRows;  // of a tile's sums
constexpr int kTileFloats = kQuarters * kQuarterFloats;

// What a tile's rows take in memory, in registers: padded to whole fours where that saves a load. What lies behind the
// rows is never used.
constexpr int registers_of(int rows) { return rows == 3 ? 4 : rows == 6 || rows == 7 ? 8 : rows; }

// What a group is counted in, and what the loops add at a time: blocks, or halves of them, for groups that are an odd
// multiple of 16 inputs.
enum class Step { block, half };

// What tiles read and write: some rows of m, one panel, one piece of k.
struct TileArgs {
  int64_t tiles;           // of the same number of rows, adjacent
  int64_t blocks;          // in memory
  const uint8_t* weights;  // first halves of the blocks, each 4 quarters; then the second ones: Tile::store_pairs()
  const uint8_t* a;        // of each block and half of it: registers_of(rows), as Tile::copy_block() leaves them
  const int32_t* starts;   // of each group: kStarts<Tile, rows> registers; affine: then as many with float(A)
  const float* scales;     // of each group and quarter: 4 scales; affine: then 4 mins
  float* acc;              // the float sums: of each quarter: 8 registers, the first ones used, in the order of Tile
  int32_t* parts;          // the int32 sums of a group that is longer than a piece; as acc
  int64_t groups, group_steps;
  bool begins, ends;       // whether the piece begins and ends its groups
  bool shifted;            // whether sums start at kShiftBits
  bool odd;                // whether the first half of the first block belongs to the piece before
};

// The next registers_of(Rows) registers, of which the first ones are used.
template <int Rows, int First, class Vector>
[[gnu::always_inline]] inline void next_rows(const uint8_t*& at, Vector (&to)[Rows]) {
  Vector all[registers_of(Rows)];
  next<registers_of(Rows), First>(at, all);
  unroll<Rows>([&](auto i) __attribute__((always_inline)) { to[i] = all[i]; });
}

// All rows, in whatever registers. For sums that a loop keeps: names would make GCC copy or spill them.
template <int Rows, class Vector>
[[gnu::always_inline]] inline void load_rows(const void* from, Vector (&to)[Rows]) {
  unroll<(Rows + 1) / 2>([&](auto p) __attribute__((always_inline)) {
    constexpr int kRow = 2 * p, kNext = kRow + 1 < Rows ? kRow + 1 : kRow;
    load_pair<16 * kRow, kNext != kRow>(from, to[kRow], to[kNext]);
  });
}

// `At`: where, in bytes from `to`.
template <int At = 0, int Rows, class Vector>
[[gnu::always_inline]] inline void store_rows(void* to, const Vector (&v)[Rows]) {
  unroll<(Rows + 1) / 2>([&](auto p) __attribute__((always_inline)) {
    constexpr int kRow = 2 * p, kNext = kRow + 1 < Rows ? kRow + 1 : kRow;
    store_pair<At + 16 * kRow, kNext != kRow>(to, v[kRow], v[kNext]);
  });
}

// Where a tile keeps the sums of two rows that start alike, 8 rows have each start once in memory: half the stores, and
// half the bytes to read. Fewer rows would need more instructions for that.
template <class Tile, int Rows>
constexpr bool kStartsOnce = Tile::kRowStep == 2 && Rows == kTileRows;

// How many registers the starts of a group take in memory.
template <class Tile, int Rows>
constexpr int kStarts = kStartsOnce<Tile, Rows> ? Rows / 2 : registers_of(Rows);

// The next starts of a group.
template <class Tile, int Rows, int First>
[[gnu::always_inline]] inline void next_starts(const uint8_t*& at, int32x4_t (&to)[Rows]) {
  if constexpr (kStartsOnce<Tile, Rows>) {
    int32x4_t even[4], odd[4];
    Four<First>::template load<0>(at, even);
    Four<First + 4>::load(at, odd);
    unroll<4>([&](auto p) __attribute__((always_inline)) { to[2 * p] = even[p], to[2 * p + 1] = odd[p]; });
  } else {
    next_rows<Rows, First>(at, to);
  }
}

// The activation sums of a group as floats.
template <class Tile, int Rows, int First>
[[gnu::always_inline]] inline void next_float_sums(const uint8_t*& at, float32x4_t (&to)[Rows]) {
  if constexpr (kStartsOnce<Tile, Rows>) {
    float32x4_t each[4];
    Four<First>::load(at, each);
    unroll<Rows>([&](auto i) __attribute__((always_inline)) { to[i] = each[i / 2]; });
  } else {
    next_rows<Rows, First>(at, to);
  }
}

// pin() for `Count` of the sums that next_starts() began.
template <class Tile, int Count, int First, int Rows>
[[gnu::always_inline]] inline void pin_sums(int32x4_t (&sums)[Rows]) {
  if constexpr (kStartsOnce<Tile, Rows> && Count == Rows) {
    int32x4_t even[4], odd[4];
    unroll<4>([&](auto p) __attribute__((always_inline)) { even[p] = sums[2 * p], odd[p] = sums[2 * p + 1]; });
    pin<4, First>(even);
    pin<4, First + 4>(odd);
    unroll<4>([&](auto p) __attribute__((always_inline)) { sums[2 * p] = even[p], sums[2 * p + 1] = odd[p]; });
  } else {
    pin<Count, First>(sums);
  }
}

// Adds the products of half a block to the sums of `Pass` quarters.
template <class Tile, int Rows, int Pass>
[[gnu::always_inline]] inline void add_half(const uint8_t*& a, const uint8_t*& weights,
                                            int32x4_t (&sums)[Pass][Rows]) {
  uint8x16_t inputs[Rows];
  next_rows<Rows, 4>(a, inputs);
  unroll<Pass>([&](auto q) __attribute__((always_inline)) {
    uint8x16_t lines[4];
    constexpr int kSkipped = q + 1 < Pass ? 0 : (kQuarters - Pass) * kHalfQuarterBytes;
    Four<0>::load<kHalfQuarterBytes + kSkipped>(weights, lines);
    Tile::template add_half<Rows>(sums[q], lines, inputs);
#if defined(__clang__)
    in_order(sums[q]);  // it would mix the halves, and spill; GCC does not, and would copy sums here
#endif
  });
}

// `weights`: of the next half and of the one behind it.
template <class Tile, Step Each, int Rows, int Pass>
[[gnu::always_inline]] inline void add_step(const uint8_t*& a, const uint8_t* (&weights)[2],
                                            int32x4_t (&sums)[Pass][Rows]) {
  add_half<Tile>(a, weights[0], sums);
  if constexpr (Each == Step::block) {
    add_half<Tile>(a, weights[1], sums);
  } else {
    const uint8_t* next = weights[1];
    weights[1] = weights[0];
    weights[0] = next;
  }
}

template <int Rows>
[[gnu::always_inline]] inline void to_float(const int32x4_t (&sums)[Rows], float32x4_t (&values)[Rows]) {
  unroll<Rows>([&](auto i) __attribute__((always_inline)) {
    values[i] = vsubq_f32(vreinterpretq_f32_s32(sums[i]), vdupq_n_f32(kShift));
  });
}

template <int Count, int Rows>
[[gnu::always_inline]] inline void add_scaled(float32x4_t (&y)[Rows], const float32x4_t (&scales)[Count],
                                              const float32x4_t (&values)[Rows]) {
  unroll<Rows>([&](auto i) __attribute__((always_inline)) {
    y[i] = vfmaq_f32(y[i], scales[i % Count], values[i]);
  });
}

// The scales of quarter q of Pass and, with Affine, its mins.
template <class Tile, bool Affine, int Pass, int Q>
[[gnu::always_inline]] inline void next_scales(const uint8_t*& at, float32x4_t (&scales)[Tile::kScales],
                                               float32x4_t (&mins)[Tile::kScales]) {
  constexpr int kBytes = 16 + (Q + 1 < Pass ? 0 : (kQuarters - Pass) * (Affine ? 32 : 16));
  if constexpr (Affine) {
    Tile::template next_scales_and_mins<kBytes + 16>(at, scales, mins);
  } else {
    Tile::template next_scales<kBytes>(at, scales);
  }
}

// Groups of one step.
template <class Tile, Step Each, int Rows, bool Affine, int Pass>
[[gnu::always_inline]] inline void run_short(const TileArgs& args, int quarter) {
  const uint8_t* a = args.a;
  const uint8_t* weights[2] = {args.weights + kHalfQuarterBytes * quarter,
                               args.weights + kHalfQuarterBytes * quarter + kHalvesBytes};
  const uint8_t* scales = reinterpret_cast<const uint8_t*>(args.scales + (Affine ? 8 : 4) * quarter);
  const uint8_t* starts = reinterpret_cast<const uint8_t*>(args.starts);
  float32x4_t y[Pass][Rows];
  const auto acc = [&](int q) __attribute__((always_inline)) {
    return args.acc + kQuarterFloats * (quarter + q);
  };
  unroll<Pass>([&](auto q) __attribute__((always_inline)) { load_rows(acc(q), y[q]); });
  const auto settle = [](auto& sums) __attribute__((always_inline)) {
    if constexpr (Pass == 1) {
      pin<Rows, 24>(sums);
    } else {
      in_order(sums);
    }
  };
  const auto next_group = [&]() __attribute__((always_inline)) {
    int32x4_t sums[Pass][Rows];
    const uint8_t* from;
    unroll<Pass>([&](auto q) __attribute__((always_inline)) {
      from = starts;
      next_starts<Tile, Rows, 16 + 4 * q>(from, sums[q]);
    });
    starts = from;
    add_step<Tile, Each>(a, weights, sums);
    unroll<Pass>([&](auto q) __attribute__((always_inline)) {
      float32x4_t values[Rows], scale[Tile::kScales], min[Tile::kScales];
      pin_sums<Tile, (Pass == 1 || Rows < 4 ? Rows : 4), 16 + 4 * q>(sums[q]);
      next_scales<Tile, Affine, Pass, q>(scales, scale, min);
      to_float(sums[q], values);
      add_scaled(y[q], scale, values);
      settle(y[q]);
      if constexpr (Affine) {
        from = starts;
        next_float_sums<Tile, Rows, 16>(from, values);
        add_scaled(y[q], min, values);
        settle(y[q]);
      }
    });
    starts = from;
  };
  // Two blocks in a turn, which saves half of the loop's own instructions.
  if constexpr (Each == Step::block) {
    for (int64_t pairs = args.groups / 2; pairs != 0; --pairs) {
      next_group();
      next_group();
    }
    if (args.groups % 2 != 0) next_group();
  } else {
    for (int64_t fours = args.groups / 4; fours != 0; --fours) {
      unroll<4>([&](auto) __attribute__((always_inline)) { next_group(); });
    }
    for (int64_t rest = args.groups % 4; rest != 0; --rest) next_group();
  }
  unroll<Pass>([&](auto q) __attribute__((always_inline)) { store_rows(acc(q), y[q]); });
}

// Groups of several steps, or a part of one.
template <class Tile, Step Each, int Rows, bool Affine, int Pass>
[[gnu::always_inline]] inline void run_long(const TileArgs& args, int quarter) {
  constexpr int kRegisters = kStarts<Tile, Rows>;
  const uint8_t* a = args.a;
  const uint8_t* weights[2] = {args.weights + kHalfQuarterBytes * quarter,
                               args.weights + kHalfQuarterBytes * quarter + kHalvesBytes};
  if (Each == Step::half && args.odd) {  // begins in the second half of the first block
    const uint8_t* next = weights[0] + kHalfBytes;
    weights[0] = weights[1];
    weights[1] = next;
  }
  const uint8_t* scales = reinterpret_cast<const uint8_t*>(args.scales + (Affine ? 8 : 4) * quarter);
  const uint8_t* starts = reinterpret_cast<const uint8_t*>(args.starts);
  float* acc = args.acc + kQuarterFloats * quarter;
  int64_t groups = args.groups;
  do {
    int32x4_t sums[Pass][Rows];
    const uint8_t* from;
    unroll<Pass>([&](auto q) __attribute__((always_inline)) {
      from = starts;
      next_starts<Tile, Rows, 16 + 16 / Pass * q>(from, sums[q]);
    });
    starts = from;
    int64_t steps = args.group_steps;
    do {
      add_step<Tile, Each>(a, weights, sums);
    } while (--steps != 0);
    if (!args.begins || !args.ends) {
      unroll<Pass>([&](auto q) __attribute__((always_inline)) {
        int32_t* parts = args.parts + kQuarterFloats * (quarter + q);
        if (!args.begins) {
          unroll<Rows>([&](auto i) __attribute__((always_inline)) {
            sums[q][i] = vaddq_s32(sums[q][i], vld1q_s32(parts + 4 * i));
          });
        }
        if (!args.ends) store_rows(parts, sums[q]);
      });
      if (!args.ends) return;
    }
    float32x4_t values[Pass][Rows];
    if (args.shifted) {
      unroll<Pass>([&](auto q) __attribute__((always_inline)) { to_float(sums[q], values[q]); });
    } else {
      unroll<Pass>([&](auto q) __attribute__((always_inline)) {
        unroll<Rows>([&](auto i) __attribute__((always_inline)) { values[q][i] = vcvtq_f32_s32(sums[q][i]); });
      });
    }
    const uint8_t* old;
    unroll<Pass>([&](auto q) __attribute__((always_inline)) {
      float32x4_t scale[Tile::kScales], min[Tile::kScales];
      next_scales<Tile, Affine, Pass, q>(scales, scale, min);
      if constexpr (q == 0 || Rows != kTileRows) old = reinterpret_cast<uint8_t*>(acc + kQuarterFloats * q);
      unroll<(Rows + 3) / 4>([&](auto four) __attribute__((always_inline)) {
        constexpr int kFirst = 4 * four, kRows = Rows - kFirst < 4 ? Rows - kFirst : 4;
        float32x4_t y[kRows], value[kRows];
        next_rows<kRows, 4>(old, y);
        unroll<kRows>([&](auto i) __attribute__((always_inline)) { value[i] = values[q][kFirst + i]; });
        add_scaled(y, scale, value);
        if constexpr (Affine) {
          if constexpr (kStartsOnce<Tile, Rows>) {
            float32x4_t each[2];
            load_rows(starts + 32 * four, each);
            unroll<4>([&](auto i) __attribute__((always_inline)) { value[i] = each[i / 2]; });
          } else {
            load_rows(starts + 64 * four, value);
          }
          add_scaled(y, min, value);
        }
        store_rows<kQuarterFloats * 4 * q + 64 * four>(acc, y);
      });
    });
    if constexpr (Affine) starts += 16 * kRegisters;
  } while (--groups != 0);
}

template <class Tile, Step Each, int Rows, bool Affine, bool Short>
void run_tiles(const TileArgs& all) {
  TileArgs args = all;
  constexpr int kPass = Short ? Tile::template kPass<Rows> : Rows <= 4 ? 4 : 2;
  for (; args.tiles > 0; --args.tiles) {
    for (int quarter = 0; quarter < kQuarters; quarter += kPass) {
      if constexpr (Short) {
        run_short<Tile, Each, Rows, Affine, kPass>(args, quarter);
      } else {
        run_long<Tile, Each, Rows, Affine, kPass>(args, quarter);
      }
    }
    args.a += args.blocks * registers_of(Rows) * kBlockInputs;
    args.starts += args.groups * kStarts<Tile, Rows> * (Affine ? 8 : 4);
    args.acc += kTileFloats;
    args.parts += kTileFloats;
  }
}

}  // namespace
}  // namespace lowbit
