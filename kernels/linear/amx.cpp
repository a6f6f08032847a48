// linear_a8w<b>_8x16_amx: int8 activations times b-bit weights, up to 16 rows of m by 16 outputs in one tile register.
//
//   A  16 rows of m x 64 inputs         B  16 lines of 64 bytes: 64 inputs x 16 outputs       C  16 x 16 int32 sums
//   tdpbssd C, A, B                     16384 products; 8 lines, one block, where a group has an odd number of them
//
//   up to 64 rows of m x up to 8 panels, their float sums in a scratch on the stack:
//     for each piece of k, at most 512 inputs (whole groups, or a part of a long one):
//       the rows' activations are copied, tile by tile      once for all panels: rows of m may all lie in one cache set
//       for each panel: codes are unpacked to bytes         once for all rows
//                       tiles: exact int32 sums, by way of memory to float sums in registers, one fma per group
//   then the panels' heads
//
// The unpacked bytes are the levels (symmetric, signed) or the codes (affine, unsigned), so a sum needs no start value
// and no shift. All tiles of a call have the same number of rows: 17 rows are 9 and 8.
//
// Tile registers are set up for every call and released behind it: other libraries use them as well, and a thread
// that has none in use is cheaper to switch. Groups that end in the middle of a block take the AVX-512 kernel.

#include <cstring>

#include "linear_avx512.h"

namespace lowbit {
namespace {

constexpr int kTileRows = 16;
constexpr int kChunkTiles = 4;
constexpr int kChunkRows = kChunkTiles * kTileRows;
constexpr int kChunkPanels = 8;
constexpr int kPieceBlocks = 16;
constexpr int kStepInputs = 2 * kBlockInputs;
constexpr int64_t kTileBytes = kTileRows * 64;

// What each tile register holds.
constexpr int kC = 0, kA = 1, kB = 2, kHalfA = 3, kHalfB = 4;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Assembly, not the intrinsics: GCC 12's do not say which memory they read, and it leaves out the stores to it.
inline void configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }
inline void release() { __asm__ volatile("tilerelease"); }

template <int Tile>
[[gnu::always_inline]] inline void load_tile(const void* at, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
[[gnu::always_inline]] inline void store_tile(void* at) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(int64_t{64}), "i"(Tile) : "memory");
}

template <int Tile>
[[gnu::always_inline]] inline void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// C += A * B: A signed, B signed (levels) or unsigned (codes).
template <bool Affine, int A, int B>
[[gnu::always_inline]] inline void multiply() {
  if constexpr (Affine) {
    __asm__ volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(kC));
  } else {
    __asm__ volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(kC));
  }
}

struct Scratch {
  alignas(64) int8_t a[kChunkRows * kPieceBlocks * kBlockInputs];    // tiles: steps of a tile of rows, rows, 64 inputs
  alignas(64) uint8_t lines[kPieceBlocks * kBlockLines * kLineBytes];
  alignas(64) float scales[kPieceBlocks][kPanelRows];                 // of each group of the piece
  alignas(64) float mins[kPieceBlocks][kPanelRows];
  alignas(64) float acc[kChunkPanels][kChunkTiles][kTileRows][kPanelRows];
  alignas(64) int32_t parts[kChunkPanels][kChunkTiles][kTileRows][kPanelRows];  // of a group begun in an earlier piece
  alignas(64) int32_t sums[kTileRows][kPanelRows];
};

// Some blocks of k: whole groups, or a part of one.
struct Piece {
  int64_t first_block, blocks;
  int64_t first_group, group_blocks;  // the last group of a matrix may have fewer
  bool begins, ends;                  // its (first) group, its (last) group
};

// Rows of m, and how they are cut into tiles.
struct Rows {
  int64_t first, count;
  int tile_rows;

  int64_t tiles() const { return (count + tile_rows - 1) / tile_rows; }
};

template <int Bits, bool Affine>
[[gnu::always_inline]] inline void block_to_bytes(const uint8_t* block, uint8_t* lines) {
  __m512i line[8];
  unpack_block<Bits, true>(block, line);
  for (int j = 0; j < 8; ++j) {
    __m512i byte = line[j];
    if constexpr (!Affine && level_factor(Bits) == 2) byte = _mm512_add_epi8(byte, byte);
    if constexpr (!Affine) byte = _mm512_sub_epi8(byte, byte_mask(level_offset(Bits)));
    _mm512_store_si512(lines + j * kLineBytes, byte);
  }
}

// A panel's part of a piece to bytes, and its groups' scales to float32; returns where the next piece begins.
template <int Bits, bool Affine>
const uint8_t* unpack(const uint8_t* at, const Piece& piece, Scratch& scratch) {
  uint8_t* lines = scratch.lines;
  int64_t left = piece.blocks;
  for (int group = 0; left > 0; ++group) {
    const int64_t count = left < piece.group_blocks ? left : piece.group_blocks;
    left -= count;
    for (int64_t b = 0; b < count; ++b, at += Bits * kLineBytes, lines += kBlockLines * kLineBytes) {
      block_to_bytes<Bits, Affine>(at, lines);
    }
    if (left == 0 && !piece.ends) break;
    _mm512_store_ps(scratch.scales[group], load_scales(at));
    if constexpr (Affine) _mm512_store_ps(scratch.mins[group], load_scales(at + 2 * kPanelRows));
    at += (Affine ? 4 : 2) * kPanelRows;
  }
  return at;
}

// The activations of a piece, as tiles read them. Rows that the last tile lacks are left as they are; nobody reads what
// comes of them.
void copy_activations(const LinearArgs& args, const Piece& piece, const Rows& rows, Scratch& scratch) {
  const int64_t stride = args.layout.blocks * kBlockInputs;
  const int64_t bytes = piece.blocks * kBlockInputs, steps = (bytes + kStepInputs - 1) / kStepInputs;
  for (int64_t i = 0; i < rows.count; ++i) {
    const int8_t* from = args.a + (rows.first + i) * stride + piece.first_block * kBlockInputs;
    int8_t* to = scratch.a + i / rows.tile_rows * steps * kTileBytes + i % rows.tile_rows * kStepInputs;
    for (int64_t at = 0; at < bytes; at += kStepInputs, to += kTileBytes) {
      const __mmask64 inputs = bytes - at < kStepInputs ? 0xffffffffu : ~__mmask64{0};
      _mm512_mask_storeu_epi8(to, inputs, _mm512_maskz_loadu_epi8(inputs, from + at));
    }
  }
}

// Tile `number` of the rows times one panel, for a piece. `Vectors` is the number of a tile's rows or a bit more.
template <bool Affine, int Vectors>
void multiply_tile(const LinearArgs& args, const Piece& piece, const Rows& rows, int64_t number, int panel,
                   Scratch& scratch) {
  const int64_t groups = args.layout.groups;
  const int64_t steps = (piece.blocks + 1) / 2;
  const int64_t first = number * rows.tile_rows, last = rows.count - 1 - first;
  float(*const acc)[kPanelRows] = scratch.acc[panel][number];
  int32_t(*const parts)[kPanelRows] = scratch.parts[panel][number];
  __m512 total[Vectors];
  for (int i = 0; i < Vectors; ++i) total[i] = _mm512_load_ps(acc[i]);

  const int8_t* a = scratch.a + number * steps * kTileBytes;
  const uint8_t* lines = scratch.lines;
  int64_t left = piece.blocks, block = 0;
  for (int group = 0; left > 0; ++group) {
    const int64_t count = left < piece.group_blocks ? left : piece.group_blocks;
    const bool begins = group > 0 || piece.begins, ends = count < left || piece.ends;
    left -= count;
    if (begins) {
      zero_tile<kC>();
    } else {
      load_tile<kC>(parts, 64);
    }
    // A block at an odd place of the piece is the second half of a step's tile of activations.
    const auto half = [&]() __attribute__((always_inline)) {
      load_tile<kHalfA>(a + block / 2 * kTileBytes + block % 2 * kBlockInputs, kStepInputs);
      load_tile<kHalfB>(lines + block * kBlockLines * kLineBytes, kLineBytes);
      multiply<Affine, kHalfA, kHalfB>();
      ++block;
    };
    const int64_t end = block + count;
    if (block % 2 != 0) half();
    for (; block + 2 <= end; block += 2) {
      load_tile<kA>(a + block / 2 * kTileBytes, kStepInputs);
      load_tile<kB>(lines + block * kBlockLines * kLineBytes, kLineBytes);
      multiply<Affine, kA, kB>();
    }
    if (block < end) half();
    if (!ends) {
      store_tile<kC>(parts);
      break;
    }
    store_tile<kC>(scratch.sums);
    const __m512 scale = _mm512_load_ps(scratch.scales[group]);
    const int32_t* group_sums = args.group_sums + (rows.first + first) * groups + piece.first_group + group;
    for (int i = 0; i < Vectors; ++i) {
      total[i] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(_mm512_load_si512(scratch.sums[i])), total[i]);
      if constexpr (Affine) {
        const int32_t group_sum = group_sums[(i < last ? i : last) * groups];
        total[i] = _mm512_fmadd_ps(_mm512_load_ps(scratch.mins[group]), _mm512_set1_ps(static_cast<float>(group_sum)),
                                   total[i]);
      }
    }
  }
  for (int i = 0; i < Vectors; ++i) _mm512_store_ps(acc[i], total[i]);
}

// What the heads add, and the outputs.
void finish(const LinearArgs& args, const Rows& rows, int64_t panel, const float (*acc)[kTileRows][kPanelRows]) {
  const uint8_t* head = args.panels + panel * args.layout.panel_bytes + args.layout.head_offset;
  const __m512 row_scale = _mm512_loadu_ps(head);
  const __m512 row_sum = _mm512_loadu_ps(head + 4 * kPanelRows);
  const __m512 bias = _mm512_loadu_ps(head + 8 * kPanelRows);
  const int64_t column = panel * kPanelRows;
  const __mmask16 columns = first_lanes(args.layout.n - column);
  for (int64_t i = 0; i < rows.count; ++i) {
    const int64_t row = rows.first + i;
    const __m512 total = _mm512_load_ps(acc[i / rows.tile_rows][i % rows.tile_rows]);
    const __m512 corrected = _mm512_fnmadd_ps(_mm512_set1_ps(args.zeros[row]), row_sum, total);
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(args.scales[row]), row_scale);
    store16(args.out, args.out_dtype, row * args.out_stride + column, _mm512_fmadd_ps(scale, corrected, bias), columns);
  }
}

template <int Bits, bool Affine>
void chunk(const LinearArgs& args, const Rows& rows, int64_t first_panel, int panels, Scratch& scratch) {
  const Layout& layout = args.layout;
  const int64_t group_blocks = layout.group_inputs() / kBlockInputs;
  const uint8_t* at[kChunkPanels];
  for (int p = 0; p < panels; ++p) at[p] = args.panels + (first_panel + p) * layout.panel_bytes;
  std::memset(scratch.acc, 0, static_cast<size_t>(panels) * sizeof scratch.acc[0]);

  for (int64_t block = 0; block < layout.blocks;) {
    Piece piece{};
    piece.first_block = block;
    piece.first_group = block / group_blocks;
    piece.group_blocks = group_blocks;
    const int64_t begin = piece.first_group * group_blocks, end = begin + group_blocks;
    const int64_t wanted = group_blocks <= kPieceBlocks ? kPieceBlocks / group_blocks * group_blocks
                           : end - block < kPieceBlocks ? end - block
                                                        : kPieceBlocks;
    piece.blocks = layout.blocks - block < wanted ? layout.blocks - block : wanted;
    block += piece.blocks;
    piece.begins = piece.first_block == begin;
    piece.ends = block == layout.blocks || group_blocks <= kPieceBlocks || block == end;

    copy_activations(args, piece, rows, scratch);
    for (int p = 0; p < panels; ++p) {
      at[p] = unpack<Bits, Affine>(at[p], piece, scratch);
      for (int64_t number = 0; number < rows.tiles(); ++number) {
        switch ((rows.tile_rows + 3) / 4) {
          case 1: multiply_tile<Affine, 4>(args, piece, rows, number, p, scratch); break;
          case 2: multiply_tile<Affine, 8>(args, piece, rows, number, p, scratch); break;
          case 3: multiply_tile<Affine, 12>(args, piece, rows, number, p, scratch); break;
          default: multiply_tile<Affine, 16>(args, piece, rows, number, p, scratch);
        }
      }
    }
  }
  for (int p = 0; p < panels; ++p) finish(args, rows, first_panel + p, scratch.acc[p]);
}

template <int Bits, bool Affine>
void run_chunks(const LinearArgs& args) {
  const int64_t chunks = (args.m + kChunkRows - 1) / kChunkRows;
  const int64_t chunk_rows = (args.m + chunks - 1) / chunks;
  const int64_t tiles = (chunk_rows + kTileRows - 1) / kTileRows;
  const int tile_rows = static_cast<int>((chunk_rows + tiles - 1) / tiles);

  TileConfig config;
  const auto set = [&](int tile, int rows, int row_bytes) {
    config.rows[tile] = static_cast<uint8_t>(rows);
    config.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
  };
  set(kC, tile_rows, 64);
  set(kA, tile_rows, 64);
  set(kB, 16, 64);
  set(kHalfA, tile_rows, 32);
  set(kHalfB, 8, 64);
  configure(config);

  Scratch scratch;
  std::memset(scratch.a, 0, sizeof scratch.a);  // what a tile lacks in rows is read, too
  std::memset(scratch.sums, 0, sizeof scratch.sums);
  for (int64_t panel = args.panel_begin; panel < args.panel_end; panel += kChunkPanels) {
    const int64_t panels = args.panel_end - panel < kChunkPanels ? args.panel_end - panel : kChunkPanels;
    for (int64_t row = 0; row < args.m; row += chunk_rows) {
      const int64_t count = args.m - row < chunk_rows ? args.m - row : chunk_rows;
      chunk<Bits, Affine>(args, {row, count, tile_rows}, panel, static_cast<int>(panels), scratch);
    }
  }
  release();
}

template <int Bits>
void run(const LinearArgs& args) {
  const bool affine = args.layout.mapping == Mapping::affine;
  if (args.layout.group_inputs() % kBlockInputs != 0) {
    return affine ? run_panels<Bits, true, true, 1>(args) : run_panels<Bits, false, true, 1>(args);
  }
  affine ? run_chunks<Bits, true>(args) : run_chunks<Bits, false>(args);
}

// From 8 rows on, an estimate: below that AVX-512 VNNI should need no more time for the products than the
// unpacking to memory takes here. No CPU with AMX was at hand to measure it.
#define ROW(bits) {"linear_a8w" #bits "_8x16_amx", kAmx, Format::panel16, bits, 8, 16, run<bits>}
constexpr LinearKernel kRows[] = {ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6), ROW(7), ROW(8)};
#undef ROW

}  // namespace

extern const Table<LinearKernel> kLinearAmx;
const Table<LinearKernel> kLinearAmx{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
