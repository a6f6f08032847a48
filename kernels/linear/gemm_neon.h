// Many rows of m on Arm: what the dot-product and the i8mm kernel share. A `Tile` (tile_neondot.h, i8mm.cpp) has the
// instructions that multiply, and the order of rows that they need; this header has everything around them.
//
//   up to 32 rows of m x up to 8 panels, their float sums in a scratch on the stack:
//     for each piece of k, at most 512 inputs (whole groups, or a part of a long group):
//       the rows' activations and group sums are copied in the order in which tiles read them     once for all panels
//       for each panel: codes are unpacked to bytes, scales to float32                            once for all rows
//                       tiles of up to 8 rows: exact int32 sums, then one fma per group
//   then the panels' heads
//
// The unpacked bytes are the codes (8 bits: minus 128, as stored; 1 bit, symmetric: the level). A group's integer part
// is the sum of a * byte + factor * A (A the group's activation sum): sums start at the second term. For many rows a
// byte is cheaper than fields in place: resolving costs an instruction once, joining sums one for each row.
// Sums are int32 and may wrap on their way; what leaves a group is below 2^31 (kMaxGroupInputs).
//
// A tile is 8 rows times a quarter of a panel (4 outputs): 8 int32 and 8 float sums, 8 registers of activations (16
// inputs of every row) and 4 of weights. The float sums stay in registers for a whole piece. Fewer rows take 2 or 4
// quarters at once (Tile::kPass), so that enough sums do not depend on each other. Everything a tile reads lies in the
// order in which it is read, and ld1 takes 64 bytes and moves the pointer on. Starts are stored for every lane: four of
// them are one load then instead of four dup, which would take the pipes of the products.
// Instructions per 128 weights and row (a unit) of a tile of 8 rows, GCC 12; docs/arm_cost.md has what comes out:
//   the products (8 sdot or 4 smmla), 6/8 loads of weights and activations
//   per group: 2/8 loads of starts, 2 (convert, fma), 1/8 load of scales, 2/8 loop, with sdot 2/8 moves that GCC adds;
//   groups of several blocks: 2/8 loop per block instead of the moves
//   about 1/4 per piece of 16 groups, and once per call 1/2 for activations, heads and the driver
//   unpacking, divided by m: 17 at 4 bits, 10 at 8, 23 to 26 at the others
// 12 rows would save 0.2 of a unit, but most m are no multiple of that. 8 rows times two quarters, with the float sums
// in memory, should save about 0.3 where a group has 4 blocks or more, and cost 0.4 where it has one. 6 rows times two
// quarters, with all sums in registers, leave 8 for 6 of activations and 4 of weights. Convert and fma cannot go: the
// order of float operations is the contract. So 16 rows stay a little above 13 (sdot) and 9.5 (smmla) instructions at
// 4 bits and groups of 32, and above 10.5 and 6.5 at groups of 128.
//
// The scratch takes 74 KB of the stack, of which a tile, a panel and a piece use 18 KB at a time (weights 8,
// activations 4, starts 2 to 4, scales 1 to 2): they stay in a first-level cache. A group that is longer than a piece
// keeps its int32 sums there.
#pragma once

#include "panel_neon.h"

namespace lowbit {
namespace {

constexpr int kPieceBlocks = 16;
constexpr int kTileRows = 8;
constexpr int kChunkRows = 32;
constexpr int kChunkPanels = 8;
constexpr int kQuarterBytes = kBlockInputs * 4;  // of an unpacked block
constexpr int kUnpackedBytes = kQuarters * kQuarterBytes;
constexpr int kScalesGap = kPieceBlocks * 8;  // floats from the scales of a quarter to those of the next

// Four adjacent registers and 64 bytes, by one instruction that also moves the pointer on. The registers are named: of
// a choice of its own GCC makes copies, because it plans such neighbours apart from what they are computed from.
template <int First>
struct Four;

#define LOWBIT_FOUR(first, second, third, fourth)                                                      \
  template <>                                                                                          \
  struct Four<first> {                                                                                 \
    [[gnu::always_inline]] static void load(const uint8_t*& at, uint8x16_t* to) {                      \
      register uint8x16_t v0 __asm__("v" #first), v1 __asm__("v" #second);                             \
      register uint8x16_t v2 __asm__("v" #third), v3 __asm__("v" #fourth);                             \
      __asm__ volatile("ld1 {%0.16b, %1.16b, %2.16b, %3.16b}, [%4], #64"                               \
                       : "=w"(v0), "=w"(v1), "=w"(v2), "=w"(v3), "+r"(at) : : "memory");               \
      to[0] = v0, to[1] = v1, to[2] = v2, to[3] = v3;                                                  \
    }                                                                                                  \
    [[gnu::always_inline]] static void load(const uint8_t*& at, int64_t step, uint8x16_t* to) {        \
      register uint8x16_t v0 __asm__("v" #first), v1 __asm__("v" #second);                             \
      register uint8x16_t v2 __asm__("v" #third), v3 __asm__("v" #fourth);                             \
      __asm__ volatile("ld1 {%0.16b, %1.16b, %2.16b, %3.16b}, [%4], %5"                                \
                       : "=w"(v0), "=w"(v1), "=w"(v2), "=w"(v3), "+r"(at) : "r"(step) : "memory");     \
      to[0] = v0, to[1] = v1, to[2] = v2, to[3] = v3;                                                  \
    }                                                                                                  \
    [[gnu::always_inline]] static void store(uint8_t*& at, uint8x16_t a, uint8x16_t b, uint8x16_t c,   \
                                             uint8x16_t d) {                                           \
      register uint8x16_t v0 __asm__("v" #first) = a;                                                  \
      register uint8x16_t v1 __asm__("v" #second) = b;                                                 \
      register uint8x16_t v2 __asm__("v" #third) = c;                                                  \
      register uint8x16_t v3 __asm__("v" #fourth) = d;                                                 \
      __asm__ volatile("st1 {%1.16b, %2.16b, %3.16b, %4.16b}, [%0], #64"                               \
                       : "+r"(at) : "w"(v0), "w"(v1), "w"(v2), "w"(v3) : "memory");                    \
    }                                                                                                  \
  }
LOWBIT_FOUR(0, 1, 2, 3);
LOWBIT_FOUR(4, 5, 6, 7);
LOWBIT_FOUR(8, 9, 10, 11);
LOWBIT_FOUR(16, 17, 18, 19);
LOWBIT_FOUR(20, 21, 22, 23);
LOWBIT_FOUR(24, 25, 26, 27);
LOWBIT_FOUR(28, 29, 30, 31);
#undef LOWBIT_FOUR

// Adjacent registers, fours of them named from v<First> on.
template <int Count, int First>
[[gnu::always_inline]] inline void next(const uint8_t*& at, uint8x16_t* to) {
  if constexpr (Count >= 4) {
    Four<First>::load(at, to);
    if constexpr (Count > 4) next<Count - 4, First + 4>(at, to + 4);
  } else if constexpr (Count >= 2) {
    __asm__ volatile("ldp %q0, %q1, [%2], #32" : "=w"(to[0]), "=w"(to[1]), "+r"(at) : : "memory");
    if constexpr (Count > 2) next<Count - 2, First>(at, to + 2);
  } else {
    __asm__ volatile("ldr %q0, [%1], #16" : "=w"(to[0]), "+r"(at) : : "memory");
  }
}

template <int Count, int First>
[[gnu::always_inline]] inline void next(const uint8_t*& at, int32x4_t* to) {
  uint8x16_t bytes[Count];
  next<Count, First>(at, bytes);
  unroll<Count>([&](auto i) __attribute__((always_inline)) { to[i] = vreinterpretq_s32_u8(bytes[i]); });
}

// Two registers by one instruction: GCC 12 does not find pairs by itself.
template <class Vector>
[[gnu::always_inline]] inline void next_pair(const int8_t*& at, Vector& v0, Vector& v1) {
  __asm__ volatile("ldp %q0, %q1, [%2], #32" : "=w"(v0), "=w"(v1), "+r"(at) : : "memory");
}

template <bool Both = true, class Vector>
[[gnu::always_inline]] inline void store_pair(void* to, int bytes, Vector v0, Vector v1) {
  if constexpr (Both) {
    __asm__ volatile("stp %q0, %q1, [%2, %3]" : : "w"(v0), "w"(v1), "r"(to), "i"(bytes) : "memory");
  } else {
    __asm__ volatile("str %q0, [%1, %2]" : : "w"(v0), "r"(to), "i"(bytes) : "memory");
  }
}

// One value in all lanes.
[[gnu::always_inline]] inline int32x4_t next_dup(const int32_t*& at) {
  int32x4_t v;
  __asm__ volatile("ld1r {%0.4s}, [%1], #4" : "=w"(v), "+r"(at) : : "memory");
  return v;
}

// Nothing that is behind this is done before it. Compilers would load ahead and run out of registers.
template <int Count, class Vector>
[[gnu::always_inline]] inline void in_order(Vector (&v)[Count]) {
  unroll<Count>([&](auto i) __attribute__((always_inline)) {
    Vector& each = v[i];
    __asm__ volatile("" : "+w"(each));
  });
}

// What a tile's rows take in memory, in registers: padded to whole fours where that saves a load. What lies behind the
// rows is never written, nor used when it has been loaded.
constexpr int registers_of(int rows) { return rows == 3 ? 4 : rows == 6 || rows == 7 ? 8 : rows; }

// What tiles read and write: some rows of m, one panel, one piece of k.
struct TileArgs {
  int64_t tiles;           // of the same number of rows, adjacent but for acc and parts
  const uint8_t* weights;  // of each block: its quarters, as Tile::store_pairs() leaves them
  const uint8_t* a;        // of each block and half of it: registers_of(rows), as Tile::copy_block() leaves them
  const int32_t* starts;   // of each group: registers_of(rows); affine: then as many with float(A)
  const float* scales;     // of each quarter and group: 4 scales; affine: then 4 mins
  float* acc;              // the float sums: of each quarter: of each row: 4
  int32_t* parts;          // the int32 sums of a group that is longer than a piece; as acc
  int64_t rows;            // from one quarter to the next in acc and parts
  int64_t groups, group_blocks;
  bool begins, ends;       // whether the piece begins and ends its groups
};

struct Scratch {
  alignas(64) uint8_t weights[kPieceBlocks * kUnpackedBytes];
  alignas(64) uint8_t a[kChunkRows * kPieceBlocks * kBlockInputs];
  alignas(64) int32_t starts[kChunkRows * kPieceBlocks * 8];
  alignas(64) float scales[kQuarters * kScalesGap];
  alignas(64) float acc[kChunkPanels * kChunkRows * kPanelRows];
  alignas(64) int32_t parts[kChunkPanels * kChunkRows * kPanelRows + kTileRows * 4];  // registers_of() may read on
};

// Two quarters of a block, for Unpack::lines(): the eight lines as bytes.
template <int Bits, bool Affine>
struct BytePairs {
  const uint8_t* block;
  Pair (&line)[kBlockLines];

  // The barriers keep the order of Unpack: GCC would take the AND of a line after the sri that overwrites it.
  [[gnu::always_inline]] static Pair in_order(Pair pair) {
    __asm__ volatile("" : "+w"(pair.q0), "+w"(pair.q1));
    return pair;
  }

  [[gnu::always_inline]] Pair load(int i) const {
    return in_order({vld1q_u8(block + i * kLineBytes), vld1q_u8(block + i * kLineBytes + 16)});
  }

  template <int J>
  [[gnu::always_inline]] void use(Index<J>, const Pair& fields) const {
    const uint8x16_t one = vdupq_n_u8(1);
    Pair bytes = fields;
    if constexpr (Bits == 1 && Affine) bytes = {vandq_u8(fields.q0, one), vandq_u8(fields.q1, one)};
    if constexpr (Bits == 1 && !Affine) bytes = {vornq_u8(one, fields.q0), vornq_u8(one, fields.q1)};
    if constexpr (Unpack<Bits>::shift[J] != 0) bytes = shift_right<Unpack<Bits>::shift[J]>(fields);
    line[J] = in_order(bytes);
  }
};

// `Pass` quarters of a tile, from number `quarter` on. OneBlock: groups of one block.
template <class Tile, int Rows, bool Affine, bool OneBlock, int Pass>
[[gnu::always_inline]] inline void run_pass(const TileArgs& args, int quarter) {
  constexpr int kRegisters = registers_of(Rows);
  const uint8_t* a = args.a;
  const uint8_t *weights[Pass], *scales[Pass], *starts[Pass];
  float* acc[Pass];
  int32_t* parts[Pass];
  float32x4_t y[Pass][Rows];
  unroll<Pass>([&](auto q) __attribute__((always_inline)) {
    weights[q] = args.weights + kQuarterBytes * (quarter + q);
    scales[q] = reinterpret_cast<const uint8_t*>(args.scales + kScalesGap * (quarter + q));
    acc[q] = args.acc + 4 * args.rows * (quarter + q);
    parts[q] = args.parts + 4 * args.rows * (quarter + q);
    starts[q] = reinterpret_cast<const uint8_t*>(args.begins ? args.starts : parts[q]);
    __asm__("" : "+r"(weights[q]), "+r"(scales[q]), "+r"(starts[q]));
    Tile::template load<Rows>(acc[q], y[q]);
  });
  const int64_t next_block = kUnpackedBytes - kQuarterBytes / 2;
  const auto add_block = [&](int32x4_t (&sums)[Pass][Rows]) __attribute__((always_inline)) {
    unroll<2>([&](auto half) __attribute__((always_inline)) {
      uint8x16_t inputs[kRegisters];
      next<kRegisters, 4>(a, inputs);
      unroll<Pass>([&](auto q) __attribute__((always_inline)) {
        uint8x16_t lines[4];
        half == 0 ? Four<0>::load(weights[q], lines) : Four<0>::load(weights[q], next_block, lines);
        Tile::template add_half<Rows>(sums[q], lines, inputs);
#if defined(__clang__)
        in_order(sums[q]);  // it would mix the halves, and spill; GCC does not, and would copy sums here
#endif
      });
    });
  };

  int64_t groups = args.groups;
  do {
    int32x4_t sums[Pass][Rows];
    unroll<Pass>([&](auto q) __attribute__((always_inline)) {
      int32x4_t start[kRegisters];
      next<kRegisters, 16 + 4 * (q % 2)>(starts[q], start);
      unroll<Rows>([&](auto i) __attribute__((always_inline)) { sums[q][i] = start[i]; });
      if constexpr (Affine && !OneBlock) {
        if (!args.begins) starts[q] = reinterpret_cast<const uint8_t*>(args.starts + 4 * kRegisters);
      }
    });
    if constexpr (OneBlock) {
      add_block(sums);
    } else {
      int64_t count = args.group_blocks;
      do {
        add_block(sums);
      } while (--count != 0);
      if (!args.ends) {
        unroll<Pass>([&](auto q) __attribute__((always_inline)) {
          unroll<Rows>([&](auto i) __attribute__((always_inline)) { vst1q_s32(parts[q] + 4 * i, sums[q][i]); });
        });
        return;
      }
    }
    unroll<Pass>([&](auto q) __attribute__((always_inline)) {
      const typename Tile::QuarterScales scale = Tile::next_scales(scales[q]);
      unroll<Rows>([&](auto i) __attribute__((always_inline)) {
        y[q][i] = vfmaq_f32(y[q][i], scale.val[i % Tile::kScaleRegisters], vcvtq_f32_s32(sums[q][i]));
      });
      in_order(y[q]);
      if constexpr (Affine) {
        const typename Tile::QuarterScales min = Tile::next_scales(scales[q]);
        int32x4_t factor[kRegisters];
        next<kRegisters, 16>(starts[q], factor);
        unroll<Rows>([&](auto i) __attribute__((always_inline)) {
          y[q][i] = vfmaq_f32(y[q][i], min.val[i % Tile::kScaleRegisters], vreinterpretq_f32_s32(factor[i]));
        });
        in_order(y[q]);
      }
    });
  } while (--groups != 0);
  unroll<Pass>([&](auto q) __attribute__((always_inline)) { Tile::template store<Rows>(acc[q], y[q]); });
}

template <class Tile, int Rows, bool Affine, bool OneBlock>
void run_tiles(const TileArgs& all) {
  TileArgs args = all;
  constexpr int kPass = Tile::template kPass<Rows>;
  for (; args.tiles > 0; --args.tiles) {
    for (int quarter = 0; quarter < kQuarters; quarter += kPass) {
      run_pass<Tile, Rows, Affine, OneBlock, kPass>(args, quarter);
    }
    args.a += args.groups * args.group_blocks * registers_of(Rows) * kBlockInputs;
    args.starts += args.groups * registers_of(Rows) * (Affine ? 8 : 4);
    args.acc += 4 * Rows;
    args.parts += 4 * Rows;
  }
}

// Copies the activations and the group sums of a tile. `last`: its last row; rows behind it are copies of that, whose
// results nobody reads.
template <class Tile, int Rows, bool Affine>
[[gnu::noinline]] void copy_tile(const LinearArgs& args, const TileArgs& tile, int64_t first, int64_t last,
                                 int64_t block, int64_t group, int32_t factor, uint8_t* to, int32_t* starts) {
  const int8_t* from[Rows];
  const int32_t* sums[Rows];
  unroll<Rows>([&](auto i) __attribute__((always_inline)) {
    const int64_t row = first + i < last ? first + i : last;
    from[i] = args.a + (row * args.layout.blocks + block) * kBlockInputs;
    sums[i] = args.group_sums + row * args.layout.groups + group;
  });
  constexpr int kRegisters = registers_of(Rows);
  for (int64_t blocks = tile.groups * tile.group_blocks; blocks != 0; --blocks, to += kRegisters * kBlockInputs) {
    Tile::template copy_block<Rows>(to, from);
  }
  const int32x4_t factors = vdupq_n_s32(factor);
  for (int64_t groups = tile.groups; groups != 0; --groups, starts += kRegisters * (Affine ? 8 : 4)) {
    unroll<(Rows + 1) / 2>([&](auto p) __attribute__((always_inline)) {
      constexpr int kRow = 2 * p, kNext = kRow + 1 < Rows ? kRow + 1 : kRow;
      int32x4_t sum0 = next_dup(sums[kRow]), sum1 = sum0;
      if constexpr (kNext != kRow) sum1 = next_dup(sums[kNext]);
      Tile::arrange(sum0, sum1);
      constexpr bool kPair = kNext != kRow;
      store_pair<kPair>(starts, 16 * kRow, vmulq_s32(sum0, factors), vmulq_s32(sum1, factors));
      if constexpr (Affine) {
        store_pair<kPair>(starts, 16 * (kRegisters + kRow), vcvtq_f32_s32(sum0), vcvtq_f32_s32(sum1));
      }
    });
  }
}

// Unpacks the codes and the scales of a piece.
template <class Tile, int Bits, bool Affine>
[[gnu::noinline]] void unpack(const uint8_t* block, const TileArgs& piece, Scratch& scratch) {
  uint8_t* to = scratch.weights;
  float* scales = scratch.scales;
  const int64_t group_blocks = piece.group_blocks;
  const bool ends = piece.ends;
  for (int64_t groups = piece.groups; groups != 0; --groups) {
    int64_t blocks = group_blocks;
    do {
      unroll<2>([&](auto half) __attribute__((always_inline)) {
        Pair line[kBlockLines];
        Unpack<Bits>::lines(BytePairs<Bits, Affine>{block + 32 * half, line});
        Tile::store_pairs(to, line);  // moves on
      });
      block += Bits * kLineBytes;
    } while (--blocks != 0);
    if (!ends) return;
    const Scales scale = load_scales(block), min = Affine ? load_scales(block + 2 * kPanelRows) : scale;
    unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
      vst1q_f32(scales + kScalesGap * q, scale.q[q]);
      if constexpr (Affine) vst1q_f32(scales + kScalesGap * q + 4, min.q[q]);
    });
    scales += Affine ? 8 : 4;
    block += (Affine ? 4 : 2) * kPanelRows;
  }
}

// What depends on the width.
struct Width {
  void (*unpack)(const uint8_t* block, const TileArgs& piece, Scratch& scratch);
  int32_t factor;  // of a group's activation sum in its integer part
};

template <class Tile, bool Affine>
struct Gemm {
  static constexpr int kStartLanes = Affine ? 8 : 4;  // of a group and a row

  const LinearArgs& args;
  const Width width;
  Scratch scratch;

  Gemm(const LinearArgs& linear_args, Width w) : args(linear_args), width(w) {}  // leaves the scratch as it is

  // Calls with the number of rows of a tile as a constant.
  template <class Body>
  [[gnu::always_inline]] static void with_rows(int64_t rows, Body body) {
    constexpr int kStep = Tile::kRowStep;
    if constexpr (kStep == 1) {
      switch (rows) {
        case 1: return body(Index<1>{});
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

  [[gnu::always_inline]] static int64_t padded(int64_t rows) {
    return (rows + Tile::kRowStep - 1) / Tile::kRowStep * Tile::kRowStep;
  }

  // Adjacent tiles of the same number of rows.
  struct Band {
    int64_t first, at;  // its first row, and that row's place in registers
    int64_t tiles, height;
    void (*run)(const TileArgs&);
    TileArgs piece;
  };

  // Cuts rows into tiles: of 8, but a last one of 1 or 2 rows is two of 4 or 5, together with the 8 before it.
  static int cut(int64_t rows, Band (&bands)[3]) {
    int64_t full = padded(rows) / kTileRows, rest = padded(rows) % kTileRows;
    if (full > 0 && (rest == 1 || rest == 2)) {
      full -= 1;
      rest += kTileRows;
    }
    const int64_t half = rest > kTileRows ? padded((rest + 1) / 2) : rest;
    int64_t first = 0, at = 0;
    int count = 0;
    const auto add = [&](int64_t tiles, int64_t height) {
      if (tiles == 0 || height == 0) return;
      bands[count++] = {first, at, tiles, height, nullptr, {}};
      first += tiles * height;
      at += tiles * registers_of(static_cast<int>(height));
    };
    add(full, kTileRows);
    add(1, half);
    add(1, rest - half);
    return count;
  }

  // Copies the rows of a band, and prepares its tiles.
  void start(Band& band, int64_t row, int64_t rows, int64_t block, int64_t group, const TileArgs& piece) {
    const int64_t blocks = piece.groups * piece.group_blocks;
    uint8_t* a = scratch.a + band.at * blocks * kBlockInputs;
    int32_t* starts = scratch.starts + band.at * piece.groups * kStartLanes;
    band.piece = piece;
    band.piece.tiles = band.tiles;
    band.piece.a = a;
    band.piece.starts = starts;
    with_rows(band.height, [&](auto height) __attribute__((always_inline)) {
      for (int64_t tile = 0; tile < band.tiles; ++tile) {
        copy_tile<Tile, height, Affine>(args, piece, row + band.first + tile * height, row + rows - 1, block, group,
                                        width.factor, a, starts);
        a += registers_of(height) * blocks * kBlockInputs;
        starts += registers_of(height) * piece.groups * kStartLanes;
      }
      const bool one_block = piece.group_blocks == 1 && piece.begins && piece.ends;
      band.run = one_block ? run_tiles<Tile, height, Affine, true> : run_tiles<Tile, height, Affine, false>;
    });
  }

  void chunk(int64_t panel, int64_t panels, int64_t row, int64_t rows) {
    const Layout& layout = args.layout;
    const int64_t group_blocks = layout.group_inputs() / kBlockInputs;
    const int64_t panel_floats = padded(rows) * kPanelRows;
    std::memset(scratch.acc, 0, static_cast<size_t>(panels * panel_floats) * sizeof(float));
    Band bands[3];
    const int count = cut(rows, bands);

    TileArgs piece{};
    piece.weights = scratch.weights;
    piece.scales = scratch.scales;
    piece.rows = padded(rows);
    for (int64_t block = 0; block < layout.blocks; block += piece.groups * piece.group_blocks) {
      const int64_t group = block / group_blocks;
      const int64_t in_group = block - group * group_blocks;
      const int64_t left = layout.blocks - block;
      const int64_t group_left = group_blocks - in_group < left ? group_blocks - in_group : left;
      piece.begins = in_group == 0;
      piece.ends = group_left <= kPieceBlocks;
      piece.group_blocks = piece.ends ? group_left : kPieceBlocks;
      piece.groups = 1;
      if (group_left == group_blocks && piece.ends) {  // as many whole groups as fit
        piece.groups = (left < kPieceBlocks ? left : kPieceBlocks) / group_blocks;
      }
      for (int b = 0; b < count; ++b) start(bands[b], row, rows, block, group, piece);
      const uint8_t* packed = args.panels + panel * layout.panel_bytes + layout.block_offset(block);
      for (int64_t p = 0; p < panels; ++p, packed += layout.panel_bytes) {
        width.unpack(packed, piece, scratch);
        for (int b = 0; b < count; ++b) {
          bands[b].piece.acc = scratch.acc + p * panel_floats + 4 * bands[b].first;
          bands[b].piece.parts = scratch.parts + p * panel_floats + 4 * bands[b].first;
          bands[b].run(bands[b].piece);
        }
      }
    }
    with_dtype(args.out_dtype, [&](auto dtype) __attribute__((always_inline)) {
      for (int64_t p = 0; p < panels; ++p) {
        const Heads heads = load_heads(args, panel + p);
        const float* acc = scratch.acc + p * panel_floats;
        for (int64_t i = 0; i < rows; ++i, acc += 4) {
          float32x4_t y[kQuarters];
          unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
            y[q] = vld1q_f32(acc + q * (panel_floats / kQuarters));
          });
          store_outputs<dtype()>(args, panel + p, row + i, heads, y);
        }
      }
    });
  }

  void run() {
    // Chunks of about as many whole tiles: none of a row or two that pays for all of the unpacking.
    const int64_t tiles = (args.m + kTileRows - 1) / kTileRows;
    const int64_t chunks = (args.m + kChunkRows - 1) / kChunkRows;
    for (int64_t panel = args.panel_begin; panel < args.panel_end; panel += kChunkPanels) {
      const int64_t panels = args.panel_end - panel < kChunkPanels ? args.panel_end - panel : kChunkPanels;
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

// For groups of whole blocks.
template <class Tile, int Bits>
void run_gemm(const LinearArgs& args) {
  constexpr int32_t kFactor = Bits == 1 ? 0 : stored_flip(Bits);
  if (args.layout.mapping == Mapping::affine) return run_gemm<Tile, true>(args, {unpack<Tile, Bits, true>, kFactor});
  run_gemm<Tile, false>(args, {unpack<Tile, Bits, false>, Bits == 1 ? 0 : kFactor - level_offset(Bits)});
}

}  // namespace
}  // namespace lowbit
