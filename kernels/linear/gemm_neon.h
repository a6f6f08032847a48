// Many rows of m on Arm: what the dot-product and the i8mm kernel share. A `Tile` (tile_neondot.h, i8mm.cpp) has the
// inner loop; this header feeds it.
//
//   up to 8 panels x up to 32 rows of m, their float sums in a scratch on the stack:
//     for each piece of k, at most 256 inputs (whole groups, or a part of a long group):
//       the rows' activations and group sums are copied in the order in which tiles read them     once for all panels
//       for each panel: codes are unpacked to bytes, scales to float32                            once for all rows
//                       tiles of 4 rows (fewer at the end): exact int32 sums, then one fma per group
//   then the panels' heads
//
// The unpacked bytes are the codes (8 bits: minus 128, as stored; 1 bit, symmetric: the level). A group's integer part is
// the sum of a * byte + factor * A (A the group's activation sum): sums start at the second term. For many rows a byte is
// cheaper than fields in place: resolving costs an instruction once, joining sums one for each row.
// Sums are int32 and may wrap on their way; what leaves a group is below 2^31 (kMaxGroupInputs).
// The scratch takes 48 KB of the stack, of which a panel and a piece use 15 KB at a time: they stay in a first-level
// cache. A group that is longer than a piece keeps its int32 sums there.
#pragma once

#include "panel_neon.h"

namespace lowbit {
namespace {

constexpr int kPieceBlocks = 8;
constexpr int kChunkRows = 32;
constexpr int kChunkPanels = 8;
constexpr int kTileRows = 4;

// 64 adjacent bytes by one instruction, which also moves the pointer on. The barrier keeps compilers from folding the
// steps into offsets, which this instruction does not have.
[[gnu::always_inline]] inline uint8x16x4_t next64(const uint8_t*& at) {
  const uint8x16x4_t loaded = vld1q_u8_x4(at);
  at += 64;
  __asm__("" : "+r"(at));
  return loaded;
}

// Keeps four vectors, and the next accesses through the pointer, in the order of the source. Compilers would load ahead
// or keep float sums in registers, of which there are too few, and miss pairs of loads and stores.
template <class Pointer, class Vector>
[[gnu::always_inline]] inline void in_order(Pointer& at, Vector* v) {
  __asm__ volatile("" : "+r"(at), "+w"(v[0]), "+w"(v[1]), "+w"(v[2]), "+w"(v[3]));
}

// Adds four vectors of products to float sums in memory, by `add(y, index)`.
template <class Add>
[[gnu::always_inline]] inline void add_to(float* at, Add add) {
  float32x4_t y[4];
  unroll<4>([&](auto v) __attribute__((always_inline)) { y[v] = vld1q_f32(at + 4 * v); });
  in_order(at, y);
  unroll<4>([&](auto v) __attribute__((always_inline)) { y[v] = add(y[v], v); });
  in_order(at, y);
  unroll<4>([&](auto v) __attribute__((always_inline)) { vst1q_f32(at + 4 * v, y[v]); });
}

// How the groups lie in a piece.
enum class Span { one_block, blocks, part };  // whole groups of one block or of several; a part of a group

// What tiles read and write: some rows of m, one panel, one piece of k. All but the weights and the scales is adjacent
// from one tile to the next.
struct TileArgs {
  int64_t tiles;              // of the same number of rows
  const uint8_t* weights;     // as Tile::store_block() leaves them
  int64_t weights_gap;        // bytes between the blocks of two groups
  const uint8_t* a;           // as Tile::copy_rows() leaves them
  const int32_t* group_sums;  // of each group: 4, of the tile's rows
  const float* scales;        // of each group: Tile::kScales scales, then as many mins
  float* acc;                 // the float sums, in the tile's order
  int32_t* sums;              // the int32 sums of a group that is longer than a piece
  int64_t groups, group_blocks, blocks;
  int32_t factor;             // of the group sum in the integer part
  bool begins, ends;          // whether the piece begins and ends its groups

  Span span() const { return !begins || !ends ? Span::part : group_blocks == 1 ? Span::one_block : Span::blocks; }
};

struct Scratch {
  alignas(64) uint8_t weights[kPieceBlocks * kBlockLines * kLineBytes];
  alignas(64) uint8_t a[kChunkRows * kPieceBlocks * kBlockInputs];
  alignas(64) int32_t group_sums[kChunkRows * kPieceBlocks];
  alignas(64) float scales[kPieceBlocks * 4 * kPanelRows];
  alignas(64) float acc[kChunkPanels][kChunkRows * kPanelRows];
  alignas(64) int32_t sums[kChunkPanels][kChunkRows * kPanelRows];
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

// Of each group: the sums of the rows of a tile.
[[gnu::always_inline]] inline void copy_group_sums(int32_t* to, const int32_t* from, int64_t stride, int64_t rows,
                                                   int64_t groups) {
  int64_t g = 0;
  if (rows == kTileRows) {
    for (; g + 4 <= groups; g += 4) {
      const int32x4x4_t sums{{vld1q_s32(from + g), vld1q_s32(from + stride + g), vld1q_s32(from + 2 * stride + g),
                              vld1q_s32(from + 3 * stride + g)}};
      vst4q_s32(to + kTileRows * g, sums);
    }
  }
  for (; g < groups; ++g) {
    int32x4_t sums = vdupq_n_s32(0);
    sums = vld1q_lane_s32(from + g, sums, 0);
    if (rows > 1) sums = vld1q_lane_s32(from + stride + g, sums, 1);
    if (rows > 2) sums = vld1q_lane_s32(from + 2 * stride + g, sums, 2);
    if (rows > 3) sums = vld1q_lane_s32(from + 3 * stride + g, sums, 3);
    vst1q_s32(to + kTileRows * g, sums);
  }
}

template <class Tile, int Bits, bool Affine>
struct Gemm {
  static constexpr int64_t kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  static constexpr int64_t kBlockBytes = Bits * kLineBytes;
  static constexpr bool kInPlace = Bits == 8 && Tile::kReadsLines;  // the packed lines are what a tile reads
  static constexpr int32_t kFactor = Bits == 1 ? 0 : stored_flip(Bits) - (Affine ? 0 : level_offset(Bits));

  const LinearArgs& args;
  Scratch scratch;

  explicit Gemm(const LinearArgs& linear_args) : args(linear_args) {}  // leaves the scratch as it is

  // Unpacks the codes and the scales of a piece.
  [[gnu::noinline]] void unpack(const uint8_t* block, const TileArgs& piece) {
    uint8_t* to = scratch.weights;
    float* scales = scratch.scales;
    int64_t left = piece.blocks;
    for (int64_t group = 0; group < piece.groups; ++group) {
      const int64_t count = left < piece.group_blocks ? left : piece.group_blocks;
      left -= count;
      if constexpr (kInPlace) {
        block += count * kBlockBytes;
      } else {
        for (int64_t b = 0; b < count; ++b, block += kBlockBytes, to += kBlockLines * kLineBytes) {
          for (int first = 0; first < kQuarters; first += 2) {
            Pair line[kBlockLines];
            Unpack<Bits>::lines(BytePairs<Bits, Affine>{block + 16 * first, line});
            Tile::store_block(to, first, line);
          }
        }
      }
      if (!piece.ends) return;
      Tile::store_scales(scales, load_scales(block));
      if constexpr (Affine) Tile::store_scales(scales + Tile::kScales, load_scales(block + 2 * kPanelRows));
      scales += 2 * Tile::kScales;
      block += kGroupBytes;
    }
  }

  // Copies the activations and the group sums of `rows` rows.
  [[gnu::noinline]] void copy_rows(int64_t row, int64_t rows, int64_t block, int64_t group, const TileArgs& piece) {
    const int64_t stride = args.layout.blocks * kBlockInputs;
    for (int64_t i = 0; i < rows; i += kTileRows) {
      const int64_t count = rows - i < kTileRows ? rows - i : kTileRows;
      const int8_t* a = args.a + (row + i) * stride + block * kBlockInputs;
      Tile::copy_rows(scratch.a + i * piece.blocks * kBlockInputs, a, stride, count, piece.blocks);
      copy_group_sums(scratch.group_sums + i * piece.groups, args.group_sums + (row + i) * args.layout.groups + group,
                      args.layout.groups, count, piece.groups);
    }
  }

  [[gnu::always_inline]] void run_tiles(TileArgs& piece, int64_t panel, int64_t first_row, int64_t tiles,
                                        int64_t rows) {
    piece.tiles = tiles;
    piece.a = scratch.a + first_row * piece.blocks * kBlockInputs;
    piece.group_sums = scratch.group_sums + first_row * piece.groups;
    piece.acc = scratch.acc[panel] + first_row * kPanelRows;
    piece.sums = scratch.sums[panel] + first_row * kPanelRows;
    if (tiles > 0) Tile::template run<Affine>(piece, rows);
  }

  [[gnu::always_inline]] void chunk(int64_t panel, int64_t panels, int64_t row, int64_t rows) {
    const Layout& layout = args.layout;
    const int64_t group_blocks = layout.group_inputs() / kBlockInputs;
    const bool long_groups = group_blocks > kPieceBlocks;
    const int64_t piece_blocks = long_groups ? kPieceBlocks : kPieceBlocks / group_blocks * group_blocks;
    TileArgs piece{};
    piece.factor = kFactor;
    piece.group_blocks = group_blocks;
    std::memset(scratch.acc, 0, static_cast<size_t>(panels) * sizeof scratch.acc[0]);

    for (int64_t block = 0; block < layout.blocks; block += piece.blocks) {
      const int64_t group = block / group_blocks;
      const int64_t in_group = block - group * group_blocks;
      const int64_t left = layout.blocks - block;
      piece.blocks = left < piece_blocks ? left : piece_blocks;
      if (long_groups && group_blocks - in_group < piece.blocks) piece.blocks = group_blocks - in_group;
      piece.groups = (piece.blocks + group_blocks - 1) / group_blocks;
      piece.begins = in_group == 0;
      piece.ends = !long_groups || in_group + piece.blocks == group_blocks || piece.blocks == left;
      copy_rows(row, rows, block, group, piece);

      for (int64_t p = 0; p < panels; ++p) {
        const uint8_t* at = args.panels + (panel + p) * layout.panel_bytes + layout.block_offset(block);
        unpack(at, piece);
        piece.weights = kInPlace ? at : scratch.weights;
        piece.weights_gap = kInPlace ? kGroupBytes : 0;
        piece.scales = scratch.scales;
        run_tiles(piece, p, 0, rows / kTileRows, kTileRows);
        if (rows % kTileRows != 0) run_tiles(piece, p, rows - rows % kTileRows, 1, rows % kTileRows);
      }
    }
    with_dtype(args.out_dtype, [&](auto dtype) __attribute__((always_inline)) {
      for (int64_t p = 0; p < panels; ++p) {
        const Heads heads = load_heads(args, panel + p);
        for (int64_t i = 0; i < rows; ++i) {
          float32x4_t y[kQuarters];
          Tile::load_row(scratch.acc[p], i, y);
          store_outputs<dtype()>(args, panel + p, row + i, heads, y);
        }
      }
    });
  }

  void run() {
    // Equal chunks of whole tiles: no chunk of a row or two that pays for all of the unpacking.
    const int64_t chunks = (args.m + kChunkRows - 1) / kChunkRows;
    const int64_t step = ((args.m + chunks - 1) / chunks + kTileRows - 1) / kTileRows * kTileRows;
    for (int64_t panel = args.panel_begin; panel < args.panel_end; panel += kChunkPanels) {
      const int64_t panels = args.panel_end - panel < kChunkPanels ? args.panel_end - panel : kChunkPanels;
      for (int64_t row = 0; row < args.m; row += step) {
        chunk(panel, panels, row, args.m - row < step ? args.m - row : step);
      }
    }
  }
};

// For groups of whole blocks.
template <class Tile, int Bits, bool Affine>
[[gnu::noinline]] void run_gemm(const LinearArgs& args) {
  Gemm<Tile, Bits, Affine> gemm(args);
  gemm.run();
}

}  // namespace
}  // namespace lowbit
