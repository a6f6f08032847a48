// linear_a8w<b>_8x16_amx: int8 activations times b-bit weights, up to 16 rows of m by 16 outputs in one tile register.
//
//   A  16 rows of m x 64 inputs         B  16 lines of 64 bytes: 64 inputs x 16 outputs       C  16 x 16 int32 sums
//   tdpbssd C, A, B                     16384 products; 32 or 16 inputs where a segment begins or ends there
//
//   up to 64 rows of m x up to 8 panels, their float sums in the call's scratch memory:
//     for each piece of k, 512 inputs (a segment and its group may have begun before it and may end behind it):
//       the rows' activations are copied, tile by tile, and what belongs to their segments
//                                                           once for all panels: rows of m may all lie in one cache set
//       for each panel: codes are unpacked to bytes         once for all rows
//                       tiles: exact int32 sums of a segment, by way of memory to float sums in registers
//   then the panels' heads
//
// The unpacked bytes are the levels (symmetric, signed) or the codes (affine, unsigned), so a sum needs no start value
// and no shift. All tiles of a call have the same number of rows: 17 rows are 9 and 8.
//
// Tile registers are set up for every call and released behind it: other libraries use them as well, and a thread
// that has none in use is cheaper to switch.

#include <cassert>
#include <cstring>

#include "../bits/widths.h"
#include "dispatch.h"
#include "linear_avx512.h"

namespace lowbit {
namespace {

constexpr int kTileRows = 16;
constexpr int kChunkTiles = 4;
constexpr int kChunkRows = kChunkTiles * kTileRows;
constexpr int kChunkPanels = 8;
// Along k everything is counted in half blocks of 16 inputs, 4 lines.
constexpr int kPieceHalves = 32;
constexpr int kStepHalves = 4;  // of a whole tile of activations
constexpr int kStepInputs = kStepHalves * kHalfInputs;
constexpr int kSegmentHalves = kSegmentInputs / kHalfInputs;
constexpr int kHalfBytes = kBlockLines / 2 * kLineBytes;
constexpr int64_t kTileBytes = kTileRows * 64;

// What each tile register holds: A and B of 64, 32 and 16 inputs.
constexpr int kC = 0, kA = 1, kB = 2, kA32 = 3, kB32 = 4, kA16 = 5, kB16 = 6;

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
  alignas(64) int8_t a[kChunkRows * kPieceHalves * kHalfInputs];  // tiles: steps of a tile of rows, rows, 64 inputs
  alignas(64) uint8_t lines[kPieceHalves * kHalfBytes];
  alignas(64) float scales[kPieceHalves][kPanelRows];             // of each group that ends in the piece
  alignas(64) float mins[kPieceHalves][kPanelRows];
  alignas(64) float acc[kChunkPanels][kChunkTiles][kTileRows][kPanelRows];
  alignas(64) float products[kChunkPanels][kChunkTiles][kTileRows][kPanelRows];  // of the segments of a group, so far
  alignas(64) int32_t parts[kChunkPanels][kChunkTiles][kTileRows][kPanelRows];   // of the segment at the piece's edge
  alignas(64) int32_t sums[kTileRows][kPanelRows];
  float segment_scales[kPieceHalves][kChunkRows];  // of each segment that ends in the piece
  float group_sums[kPieceHalves][kChunkRows];      // affine: of each group that ends in the piece
};
static_assert(sizeof(Scratch) <= kLinearScratchBytes);

// Some half blocks of k.
struct Piece {
  int64_t first, halves;
  bool last;                   // the end of k is the end of its last group
  int64_t group_halves;
  int64_t first_group;
  int64_t into_group;          // half blocks of the first group that lie before the piece
  int64_t first_segment;
};

// Rows of m, and how they are cut into tiles.
struct Rows {
  int64_t first, count;
  int tile_rows;

  int64_t tiles() const { return (count + tile_rows - 1) / tile_rows; }
};

template <int Bits, bool Affine>
[[gnu::always_inline]] inline void block_to_bytes(const uint8_t* block, const Levels<Bits>& levels, uint8_t* lines) {
  __m512i line[8];
  unpack_block<Bits, Affine, true>(block, levels, line);
  for (int j = 0; j < 8; ++j) {
    const __m512i byte = Affine ? line[j] : _mm512_sub_epi8(line[j], byte_mask(level_offset(Bits)));
    _mm512_store_si512(lines + j * kLineBytes, byte);
  }
}

// A panel's part of a piece to bytes, and the scales of the groups that end there to float32; returns where the next
// piece begins.
template <int Bits, bool Affine>
const uint8_t* unpack(const uint8_t* at, const Layout& layout, const Piece& piece, Scratch& scratch) {
  Levels<Bits> levels;
  levels.load(layout);
  uint8_t* lines = scratch.lines;
  int64_t left = piece.group_halves - piece.into_group;
  int group = 0;
  for (int64_t half = 0; half < piece.halves;) {
    block_to_bytes<Bits, Affine>(at, levels, lines);
    at += code_bits(Bits) * kLineBytes;
    lines += kBlockLines * kLineBytes;
    for (int i = 0; i < 2 && half < piece.halves; ++i) {
      const bool is_end = ++half == piece.halves && piece.last;
      if (--left > 0 && !is_end) continue;
      _mm512_store_ps(scratch.scales[group], load_scales(at));
      if constexpr (Affine) _mm512_store_ps(scratch.mins[group], load_scales(at + 2 * kPanelRows));
      at += (Affine ? 4 : 2) * kPanelRows;
      left = piece.group_halves;
      ++group;
    }
  }
  return at;
}

// The activations of a piece, as tiles read them. The last tile may have fewer rows than the others: what lies in its
// remaining rows is multiplied as well, and the products are not used.
void copy_activations(const LinearArgs& args, const Piece& piece, const Rows& rows, Scratch& scratch) {
  const int64_t stride = args.layout.blocks * kBlockInputs;
  const int64_t bytes = piece.halves * kHalfInputs, steps = (bytes + kStepInputs - 1) / kStepInputs;
  for (int64_t i = 0; i < rows.count; ++i) {
    const int8_t* from = args.a + (rows.first + i) * stride + piece.first * kHalfInputs;
    int8_t* to = scratch.a + i / rows.tile_rows * steps * kTileBytes + i % rows.tile_rows * kStepInputs;
    for (int64_t at = 0; at < bytes; at += kStepInputs, to += kTileBytes) {
      const int64_t count = bytes - at < kStepInputs ? bytes - at : kStepInputs;
      const __mmask64 inputs = ~__mmask64{0} >> (kStepInputs - count);
      _mm512_mask_storeu_epi8(to, inputs, _mm512_maskz_loadu_epi8(inputs, from + at));
    }
  }
}

// Scales of the segments, and sums of the groups, that may end in a piece: of each a value for every row.
template <bool Affine>
void copy_scales(const LinearArgs& args, const Piece& piece, const Rows& rows, Scratch& scratch) {
  const Layout& layout = args.layout;
  const auto copy = [&](const float* from, int64_t count, int64_t first, float(*to)[kChunkRows]) {
    const int64_t here = count - first < kPieceHalves ? count - first : kPieceHalves;
    for (int64_t i = 0; i < rows.count; ++i) {
      for (int64_t at = 0; at < here; ++at) to[at][i] = from[(rows.first + i) * count + first + at];
    }
  };
  copy(args.scales, layout.segments, piece.first_segment, scratch.segment_scales);
  if constexpr (Affine) copy(args.group_sums, layout.groups, piece.first_group, scratch.group_sums);
}

// The float part of a segment: from scratch.sums to `products`, or where it is the last of its group to `total`.
template <bool Affine, bool First, bool Last, int Vectors>
[[gnu::always_inline]] inline void end_segment(const Scratch& scratch, const float* segment_scales, int group,
                                               const float* group_sums, float (*products)[kPanelRows],
                                               __m512 (&total)[Vectors]) {
  const __m512 scale = _mm512_load_ps(scratch.scales[group]);
  for (int i = 0; i < Vectors; ++i) {
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(scratch.sums[i]));
    const __m512 t = _mm512_set1_ps(segment_scales[i]);
    const __m512 product = First ? _mm512_mul_ps(t, sum) : _mm512_fmadd_ps(t, sum, _mm512_load_ps(products[i]));
    if constexpr (!Last) {
      _mm512_store_ps(products[i], product);
      continue;
    }
    total[i] = _mm512_fmadd_ps(scale, product, total[i]);
    if constexpr (Affine) {
      total[i] = _mm512_fmadd_ps(_mm512_load_ps(scratch.mins[group]), _mm512_set1_ps(group_sums[i]), total[i]);
    }
  }
}

// Tile `number` of the rows times one panel, for a piece. `Vectors` is the number of a tile's rows or a bit more.
template <bool Affine, int Vectors>
void multiply_tile(const Piece& piece, const Rows& rows, int64_t number, int panel, Scratch& scratch) {
  const int64_t steps = (piece.halves + kStepHalves - 1) / kStepHalves;
  float(*const acc)[kPanelRows] = scratch.acc[panel][number];
  float(*const products)[kPanelRows] = scratch.products[panel][number];
  int32_t(*const parts)[kPanelRows] = scratch.parts[panel][number];
  __m512 total[Vectors];
  for (int i = 0; i < Vectors; ++i) total[i] = _mm512_load_ps(acc[i]);

  const int8_t* const tiles = scratch.a + number * steps * kTileBytes;
  const int64_t first_row = number * rows.tile_rows;
  int64_t half = 0, into = piece.into_group;
  int group = 0;
  for (int segment = 0; half < piece.halves; ++segment) {
    const int64_t group_left = piece.group_halves - into, segment_left = kSegmentHalves - into % kSegmentHalves;
    const int64_t left = segment_left < group_left ? segment_left : group_left;
    const bool ends = left <= piece.halves - half || piece.last;
    const int64_t end = left < piece.halves - half ? half + left : piece.halves;
    if (into % kSegmentHalves == 0) {
      zero_tile<kC>();
    } else {
      load_tile<kC>(parts, 64);
    }
    while (half < end) {
      const int64_t place = half % kStepHalves, count = end - half;
      const int8_t* const a = tiles + half / kStepHalves * kTileBytes + place * kHalfInputs;
      const uint8_t* const lines = scratch.lines + half * kHalfBytes;
      if (place == 0 && count >= 4) {
        load_tile<kA>(a, kStepInputs);
        load_tile<kB>(lines, kLineBytes);
        multiply<Affine, kA, kB>();
        half += 4;
      } else if (place % 2 == 0 && count >= 2) {
        load_tile<kA32>(a, kStepInputs);
        load_tile<kB32>(lines, kLineBytes);
        multiply<Affine, kA32, kB32>();
        half += 2;
      } else {
        load_tile<kA16>(a, kStepInputs);
        load_tile<kB16>(lines, kLineBytes);
        multiply<Affine, kA16, kB16>();
        half += 1;
      }
    }
    if (!ends) {
      store_tile<kC>(parts);
      break;
    }
    store_tile<kC>(scratch.sums);
    const float* const t = scratch.segment_scales[segment] + first_row;
    const float* const group_sums = scratch.group_sums[group] + first_row;
    const bool is_first = into < kSegmentHalves, is_last = left == group_left || (piece.last && half == piece.halves);
    if (is_last) {
      is_first ? end_segment<Affine, true, true>(scratch, t, group, group_sums, products, total)
               : end_segment<Affine, false, true>(scratch, t, group, group_sums, products, total);
      into = 0;
      ++group;
    } else {
      is_first ? end_segment<Affine, true, false>(scratch, t, group, group_sums, products, total)
               : end_segment<Affine, false, false>(scratch, t, group, group_sums, products, total);
      into += left;
    }
  }
  for (int i = 0; i < Vectors; ++i) _mm512_store_ps(acc[i], total[i]);
}

template <int Bits, bool Affine>
void chunk(const LinearArgs& args, const Rows& rows, int64_t first_panel, int panels, Scratch& scratch) {
  const Layout& layout = args.layout;
  const int64_t halves = (layout.k + kHalfInputs - 1) / kHalfInputs;
  const int64_t group_halves = layout.group_inputs() / kHalfInputs;
  const uint8_t* at[kChunkPanels];
  for (int p = 0; p < panels; ++p) at[p] = args.panels + (first_panel + p) * layout.panel_bytes;
  std::memset(scratch.acc, 0, static_cast<size_t>(panels) * sizeof scratch.acc[0]);

  for (int64_t first = 0; first < halves; first += kPieceHalves) {
    Piece piece{};
    piece.first = first;
    piece.halves = halves - first < kPieceHalves ? halves - first : kPieceHalves;
    piece.last = first + piece.halves == halves;
    piece.group_halves = group_halves;
    piece.first_group = first / group_halves;
    piece.into_group = first % group_halves;
    piece.first_segment = piece.first_group * layout.group_segments() + piece.into_group / kSegmentHalves;

    copy_activations(args, piece, rows, scratch);
    copy_scales<Affine>(args, piece, rows, scratch);
    for (int p = 0; p < panels; ++p) {
      at[p] = unpack<Bits, Affine>(at[p], layout, piece, scratch);
      for (int64_t number = 0; number < rows.tiles(); ++number) {
        switch ((rows.tile_rows + 3) / 4) {
          case 1: multiply_tile<Affine, 4>(piece, rows, number, p, scratch); break;
          case 2: multiply_tile<Affine, 8>(piece, rows, number, p, scratch); break;
          case 3: multiply_tile<Affine, 12>(piece, rows, number, p, scratch); break;
          default: multiply_tile<Affine, 16>(piece, rows, number, p, scratch);
        }
      }
    }
  }
  for (int p = 0; p < panels; ++p) {
    const Outputs outputs(args, first_panel + p);
    for (int64_t i = 0; i < rows.count; ++i) {
      outputs.store(args, rows.first + i, _mm512_load_ps(scratch.acc[p][i / rows.tile_rows][i % rows.tile_rows]));
    }
  }
}

template <int Bits, bool Affine>
void run_chunks(const LinearArgs& args) {
  assert(args.m >= 1);
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
  set(kA32, tile_rows, 32);
  set(kB32, 8, 64);
  set(kA16, tile_rows, 16);
  set(kB16, 4, 64);
  configure(config);

  Scratch& scratch = *static_cast<Scratch*>(args.scratch);
  std::memset(scratch.a, 0, sizeof scratch.a);  // what a tile lacks in rows is read, too
  std::memset(scratch.sums, 0, sizeof scratch.sums);
  std::memset(scratch.segment_scales, 0, sizeof scratch.segment_scales);
  std::memset(scratch.group_sums, 0, sizeof scratch.group_sums);
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
  dispatch<Bits>(args.layout, [&](auto bits, auto affine, auto) { run_chunks<bits(), affine()>(args); });
}

// From 8 rows on, an estimate: below that AVX-512 VNNI should need no more time for the products than the
// unpacking to memory takes here. No CPU with AMX was at hand to measure it.
#define ROW(bits) \
  with_levels<LinearKernel>({"linear_a8w" #bits "_8x16_amx", kAmx, Format::panel16, bits, 8, 16, run<bits>})
constexpr LinearKernel kRows[] = {LOWBIT_EACH_WIDTH(ROW)};
#undef ROW

}  // namespace

extern const Table<LinearKernel> kLinearAmx;
const Table<LinearKernel> kLinearAmx{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
