// linear_a8w<b>_8x16_amx: int8 activations times b-bit weights, up to 16 rows of m by 16 outputs in one tile register.
//
//   A  16 rows of m x 64 inputs         B  16 lines of 64 bytes: 64 inputs x 16 outputs       C  16 x 16 int32 sums
//   tdpbssd C, A, B                     16384 products; 32 or 16 inputs if a segment begins or ends within the 64
//
//   up to 64 rows of m x up to 8 panels, their float sums in the call's scratch memory:
//     for each piece of k, 512 inputs (its first and last segment and group may be shared with the neighboring pieces):
//       the activations, segment scales and group sums of the rows are copied, tile by tile
//                                                           once for all panels: rows of m may all map to one cache set
//       for each panel: codes are unpacked to bytes         once for all rows
//                       tiles: exact int32 sums of a segment, stored, then added to float sums in registers
//   then the panels' heads
//
// The unpacked bytes are the levels (symmetric, signed) or the codes (affine, unsigned), so a sum needs no start value
// and no shift. All tiles of a call have the same number of rows: 17 rows are 9 and 8.
//
// Tile registers are configured for every call and released after it: other libraries use them as well, and a thread without
// tile registers in use is cheaper to switch.

#include <cassert>

#include "../bits/widths.h"
#include "../group_parts.h"
#include "linear_avx512.h"

namespace lowbit {
namespace {

constexpr int kTileRows = 16;
constexpr int kChunkTiles = 4;
constexpr int kChunkRows = kChunkTiles * kTileRows;
constexpr int kChunkPanels = 8;
// Positions along k are counted in half blocks of 16 inputs, 4 lines.
constexpr int kPieceHalves = 32;
constexpr int kStepHalves = 4;  // of one full tile register of activations
constexpr int kStepInputs = kStepHalves * kHalfInputs;
constexpr int kHalfBytes = kBlockLines / 2 * kLineBytes;
constexpr int64_t kTileBytes = kTileRows * 64;
constexpr int kBehind = 4;  // segments by which float arithmetic lags behind the products

// What each tile register holds: A and B of 64, 32 and 16 inputs.
constexpr int kC = 0, kA = 1, kB = 2, kA32 = 3, kB32 = 4, kA16 = 5, kB16 = 6;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Assembly, because GCC 12's intrinsics do not declare which memory they read, and the stores to that memory are dropped.
inline void configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }
inline void release() { __asm__ volatile("tilerelease"); }

template <int Tile>
LOWBIT_INLINE inline void load_tile(const void* at, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
LOWBIT_INLINE inline void store_tile(void* at) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(int64_t{64}), "i"(Tile) : "memory");
}

template <int Tile>
LOWBIT_INLINE inline void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// C += A * B: A signed, B signed (levels) or unsigned (codes).
template <bool Affine, int A, int B>
LOWBIT_INLINE inline void multiply(const int8_t* a, const uint8_t* lines) {
  load_tile<A>(a, kStepInputs);
  load_tile<B>(lines, kLineBytes);
  if constexpr (Affine) {
    __asm__ volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(kC));
  } else {
    __asm__ volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(kC));
  }
}

// The inputs of a segment that a piece contains.
struct Segment {
  int32_t a, lines;    // byte offsets of the first input: in a tile of rows, in a panel's lines
  uint8_t begin, end;  // half blocks from the start of the piece
  uint8_t product;     // half blocks, if one product takes them all; 0: several products, or the segment began before the piece
  uint8_t group;       // number among the groups that end in the piece
  bool begins;         // whether the segment begins in the piece
  bool first, last;    // whether the segment is the first, the last of its group
};

// How many of `count` half blocks from `half` on the next product takes.
constexpr int64_t product_halves(int64_t half, int64_t count) {
  return half % 4 == 0 && count >= 4 ? 4 : half % 2 == 0 && count >= 2 ? 2 : 1;
}

constexpr int32_t tile_offset(int64_t half) {
  return static_cast<int32_t>(half / kStepHalves * kTileBytes + half % kStepHalves * kHalfInputs);
}

// Some half blocks of k.
struct Piece {
  int64_t first, halves;
  bool last;  // whether the piece ends at the end of k, where the last group ends too
  int64_t group_halves;
  int64_t first_group;
  int64_t into_group;  // half blocks of the first group before the piece
  int64_t first_segment;
  int groups;    // number of groups that end in the piece
  int segments;  // number of segments that end in the piece
  bool cut;      // whether another segment begins in the piece and ends after it
  Segment segment[kPieceHalves];

  Piece(const Layout& layout, int64_t from, int64_t all_halves)
      : first(from),
        halves(all_halves - first < kPieceHalves ? all_halves - first : kPieceHalves),
        last(first + halves == all_halves),
        group_halves(layout.group_inputs() / kHalfInputs),
        first_group(first / group_halves),
        into_group(first % group_halves),
        first_segment(first_group * layout.group_segments() + into_group / kSegmentHalves) {
    groups = segments = 0;
    cut = false;
    const int64_t piece_end = first + halves;
    for (const GroupPart part : GroupParts(all_halves, group_halves, kSegmentHalves, first)) {
      if (part.begin >= piece_end) break;
      cut = part.end > piece_end;
      const bool begins = part.begin >= first;
      const int64_t half = begins ? part.begin - first : 0, end = (cut ? piece_end : part.end) - first;
      const int64_t product = product_halves(half, end - half);
      segment[segments] = {tile_offset(half),
                           static_cast<int32_t>(half * kHalfBytes),
                           static_cast<uint8_t>(half),
                           static_cast<uint8_t>(end),
                           static_cast<uint8_t>(begins && product == end - half ? product : 0),
                           static_cast<uint8_t>(groups),
                           begins,
                           part.first,
                           part.last};
      if (cut) break;
      ++segments;
      groups += part.last;
    }
  }
};

// Rows of m, and the number of rows per tile.
struct Rows {
  int64_t first, count;
  int tile_rows;

  int64_t tiles() const { return (count + tile_rows - 1) / tile_rows; }
};

using TileSums = int32_t[kTileRows][kPanelRows];
using TileFloats = float[kTileRows][kPanelRows];

struct Scratch {
  alignas(64) int8_t a[kChunkRows * kPieceHalves * kHalfInputs];  // of each tile and step of 64 inputs: its rows
  alignas(64) uint8_t lines[kPieceHalves * kHalfBytes];
  alignas(64) float scales[kPieceHalves][kPanelRows];             // of each group that ends in the piece
  alignas(64) float mins[kPieceHalves][kPanelRows];
  alignas(64) TileFloats acc[kChunkPanels][kChunkTiles];
  alignas(64) TileFloats products[kChunkPanels][kChunkTiles];  // sum over the segments of the current group so far
  alignas(64) TileSums parts[kChunkPanels][kChunkTiles];       // integer sums of the segment that the next piece continues
  alignas(64) TileSums sums[kBehind];
  // A value per row of each tile: for each segment, and (affine) for each group, that ends in the piece.
  alignas(64) float segment_scales[kPieceHalves][kChunkTiles][kTileRows];
  alignas(64) float group_sums[kPieceHalves][kChunkTiles][kTileRows];
};
static_assert(sizeof(Scratch) <= kLinearScratchBytes);

template <int Bits, bool Affine>
LOWBIT_INLINE inline void block_to_bytes(const uint8_t* block, const Levels<Bits>& levels, uint8_t* lines) {
  __m512i line[8];
  unpack_block<Bits, Affine, true>(block, levels, line);
  for (int j = 0; j < 8; ++j) {
    const __m512i byte = Affine ? line[j] : _mm512_sub_epi8(line[j], byte_mask(level_offset(Bits)));
    _mm512_store_si512(lines + j * kLineBytes, byte);
  }
}

// Unpacks a panel's part of a piece to bytes, and converts the scales of the groups that end there to float32. Returns where
// the next piece begins.
template <int Bits, bool Affine>
const uint8_t* unpack(const uint8_t* at, const Layout& layout, const Piece& piece, Scratch& scratch) {
  Levels<Bits> levels;
  levels.load(layout);
  uint8_t* lines = scratch.lines;
  int64_t end = piece.group_halves - piece.into_group;
  int group = 0;
  const auto end_group = [&]() LOWBIT_INLINE {
    _mm512_store_ps(scratch.scales[group], load_scales(at));
    if constexpr (Affine) _mm512_store_ps(scratch.mins[group], load_scales(at + 2 * kPanelRows));
    at += group_bytes(Affine);
    ++group;
    end += piece.group_halves;
  };
  for (int64_t half = 0; half < piece.halves;) {
    block_to_bytes<Bits, Affine>(at, levels, lines);
    at += code_bits(Bits) * kLineBytes;
    lines += kBlockLines * kLineBytes;
    half += 2;
    while (end <= half && group < piece.groups) end_group();
  }
  if (group < piece.groups) end_group();  // k ends within the last group
  return at;
}

// Copies the activations of a piece in the order in which tiles read them. The last tile may have fewer rows than the others:
// its remaining rows are multiplied whatever they contain, and those products are not used.
void copy_activations(const LinearArgs& args, const Piece& piece, const Rows& rows, Scratch& scratch) {
  const int64_t stride = args.layout.blocks * kBlockInputs;
  const int64_t bytes = piece.halves * kHalfInputs, whole = bytes / kStepInputs, rest = bytes % kStepInputs;
  const int64_t steps = whole + (rest > 0);
  const __mmask64 inputs = (__mmask64{1} << rest) - 1;
  const int8_t* from = args.a + rows.first * stride + piece.first * kHalfInputs;
  int8_t* tile = scratch.a;
  for (int64_t remaining = rows.count; remaining > 0; remaining -= rows.tile_rows, tile += steps * kTileBytes) {
    int8_t* to = tile;
    for (int64_t i = remaining < rows.tile_rows ? remaining : rows.tile_rows; i > 0; --i, from += stride, to += kStepInputs) {
      for (int64_t step = 0; step < whole; ++step) {
        _mm512_store_si512(to + step * kTileBytes, _mm512_loadu_si512(from + step * kStepInputs));
      }
      if (rest > 0) {
        _mm512_mask_storeu_epi8(to + whole * kTileBytes, inputs,
                                _mm512_maskz_loadu_epi8(inputs, from + whole * kStepInputs));
      }
    }
  }
}

// Copies values [0, count) of each row, whose values are `stride` apart in `from`, so that a tile's rows are adjacent. Missing
// rows of a tile repeat the last row, and their products are not used.
void copy_values(const float* from, int64_t stride, int count, const Rows& rows,
                 float (*to)[kChunkTiles][kTileRows]) {
  const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i last_row = _mm512_set1_epi32(static_cast<int>(rows.count - 1));
  from += rows.first * stride;
  for (int64_t tile = 0; tile < rows.tiles(); ++tile) {
    const __m512i first = _mm512_set1_epi32(static_cast<int>(tile * rows.tile_rows));
    const __m512i row = _mm512_min_epi32(_mm512_add_epi32(first, numbers), last_row);
    const __m512i at = _mm512_mullo_epi32(row, _mm512_set1_epi32(static_cast<int>(stride)));
    for (int i = 0; i < count; ++i) _mm512_store_ps(to[i][tile], _mm512_i32gather_ps(at, from + i, 4));
  }
}

// Calls run(i) for i = 0 to Count - 1, which are constants.
template <int Count, class Run>
LOWBIT_INLINE inline void for_each(Run run) {
  [&]<int... I>(std::integer_sequence<int, I...>) LOWBIT_INLINE {
    (run(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, Count>());
}

// One vector per row of a tile, in registers. All loops over it are unrolled: GCC 12 moves the array to memory if a loop
// indexes it, or if a lambda that outlives a branch refers to it.
template <int Vectors>
using Registers = __m512[Vectors];

template <int Vectors>
LOWBIT_INLINE inline void load(const float* from, Registers<Vectors>& to) {
  for_each<Vectors>([&](auto i) LOWBIT_INLINE { to[i] = _mm512_load_ps(from + i * kPanelRows); });
}

template <int Vectors>
LOWBIT_INLINE inline void store(const Registers<Vectors>& from, float* to) {
  for_each<Vectors>([&](auto i) LOWBIT_INLINE { _mm512_store_ps(to + i * kPanelRows, from[i]); });
}

// Stores a segment's integer sums to `to`. `parts`: the sums over its inputs before the piece.
template <bool Affine>
LOWBIT_INLINE inline void multiply_segment(const Segment& segment, const int8_t* tiles, const uint8_t* lines,
                                           const int32_t* parts, int32_t* to) {
  if (segment.product == 4) {
    zero_tile<kC>();
    multiply<Affine, kA, kB>(tiles + segment.a, lines + segment.lines);
  } else if (segment.product == 2) {
    zero_tile<kC>();
    multiply<Affine, kA32, kB32>(tiles + segment.a, lines + segment.lines);
  } else {
    if (segment.begins) {
      zero_tile<kC>();
    } else {
      load_tile<kC>(parts, kLineBytes);
    }
    for (int64_t half = segment.begin; half < segment.end;) {
      const int8_t* const a = tiles + tile_offset(half);
      const uint8_t* const b = lines + half * kHalfBytes;
      const int64_t count = product_halves(half, segment.end - half);
      switch (count) {
        case 4: multiply<Affine, kA, kB>(a, b); break;
        case 2: multiply<Affine, kA32, kB32>(a, b); break;
        default: multiply<Affine, kA16, kB16>(a, b);
      }
      half += count;
    }
  }
  store_tile<kC>(to);
}

// The float part of segment `index` of a piece, and of its group if the segment is its last. `sum` holds the sums of the rows.
// With `Several` it holds the sums of the group, and `acc` those of the rows.
template <bool Affine, bool Several, int Vectors>
LOWBIT_INLINE inline void end_segment(const Piece& piece, int index, int64_t number, const Scratch& scratch,
                                      float* acc, Registers<Vectors>& sum) {
  const Segment& segment = piece.segment[index];
  const int32_t* const sums = scratch.sums[index % kBehind][0];
  const float* const t = scratch.segment_scales[index][number];
  const float* const group_sums = scratch.group_sums[segment.group][number];
  const __m512 scale = _mm512_load_ps(scratch.scales[segment.group]);
  const __m512 min = Affine ? _mm512_load_ps(scratch.mins[segment.group]) : scale;
  const auto integer = [&](auto i) LOWBIT_INLINE {
    return _mm512_cvtepi32_ps(_mm512_load_si512(sums + i * kPanelRows));
  };
  if constexpr (!Several) {
    for_each<Vectors>([&](auto i) LOWBIT_INLINE {
      sum[i] = _mm512_fmadd_ps(scale, _mm512_mul_ps(_mm512_set1_ps(t[i]), integer(i)), sum[i]);
      if constexpr (Affine) sum[i] = _mm512_fmadd_ps(min, _mm512_set1_ps(group_sums[i]), sum[i]);
    });
    return;
  }
  if (segment.first) {
    for_each<Vectors>([&](auto i) LOWBIT_INLINE {
      sum[i] = _mm512_mul_ps(_mm512_set1_ps(t[i]), integer(i));
    });
  } else {
    for_each<Vectors>([&](auto i) LOWBIT_INLINE {
      sum[i] = _mm512_fmadd_ps(_mm512_set1_ps(t[i]), integer(i), sum[i]);
    });
  }
  if (segment.last) {
    for_each<Vectors>([&](auto i) LOWBIT_INLINE {
      sum[i] = _mm512_fmadd_ps(scale, sum[i], _mm512_load_ps(acc + i * kPanelRows));
      if constexpr (Affine) sum[i] = _mm512_fmadd_ps(min, _mm512_set1_ps(group_sums[i]), sum[i]);
    });
    store<Vectors>(sum, acc);  // the next group starts from zero
  }
}

// Multiplies tile `number` of the rows by one panel, for a piece. `Vectors` is at least the number of rows of a tile.
// `Several`: groups have several segments. Then the sums of a group are in registers, and those of the rows in memory.
// Otherwise the sums of the rows are in registers.
template <bool Affine, bool Several, int Vectors>
void multiply_tile(const Piece& piece, int64_t number, int panel, Scratch& scratch) {
  const int64_t steps = (piece.halves + kStepHalves - 1) / kStepHalves;
  const int8_t* const tiles = scratch.a + number * steps * kTileBytes;
  float* const acc = scratch.acc[panel][number][0];
  float* const kept = Several ? scratch.products[panel][number][0] : acc;
  int32_t* const parts = scratch.parts[panel][number][0];
  Registers<Vectors> sum;
  if (piece.first > 0) {
    load<Vectors>(kept, sum);
  } else {
    for_each<Vectors>([&](auto i) LOWBIT_INLINE { sum[i] = _mm512_setzero_ps(); });
    if constexpr (Several) store<Vectors>(sum, acc);
  }
  // The float part of a segment follows the products of later segments, so that it does not wait for its own products.
  for (int i = 0; i < piece.segments + kBehind; ++i) {
    if (i >= kBehind) end_segment<Affine, Several, Vectors>(piece, i - kBehind, number, scratch, acc, sum);
    if (i < piece.segments) {
      multiply_segment<Affine>(piece.segment[i], tiles, scratch.lines, parts, scratch.sums[i % kBehind][0]);
    }
  }
  if (piece.cut) multiply_segment<Affine>(piece.segment[piece.segments], tiles, scratch.lines, parts, parts);
  store<Vectors>(sum, kept);
}

using MultiplyTile = void (*)(const Piece&, int64_t, int, Scratch&);

template <bool Affine, bool Several>
MultiplyTile multiply_tiles_of(int rows) {
  return rows <= 4 ? multiply_tile<Affine, Several, 4> : rows <= 8 ? multiply_tile<Affine, Several, 8>
       : rows <= 12 ? multiply_tile<Affine, Several, 12> : multiply_tile<Affine, Several, 16>;
}

template <int Bits, bool Affine>
void chunk(const LinearArgs& args, const Rows& rows, int64_t first_panel, int panels, Scratch& scratch) {
  const Layout& layout = args.layout;
  const int64_t halves = (layout.k + kHalfInputs - 1) / kHalfInputs;
  const MultiplyTile multiply_tile = layout.group_inputs() > kSegmentInputs
                                         ? multiply_tiles_of<Affine, true>(rows.tile_rows)
                                         : multiply_tiles_of<Affine, false>(rows.tile_rows);
  const uint8_t* at[kChunkPanels];
  for (int p = 0; p < panels; ++p) at[p] = args.panels + (first_panel + p) * layout.panel_bytes;

  for (int64_t first = 0; first < halves; first += kPieceHalves) {
    const Piece piece(layout, first, halves);
    copy_activations(args, piece, rows, scratch);
    copy_values(args.scales + piece.first_segment, layout.segments, piece.segments, rows, scratch.segment_scales);
    if constexpr (Affine) {
      copy_values(args.group_sums + piece.first_group, layout.groups, piece.groups, rows, scratch.group_sums);
    }
    for (int p = 0; p < panels; ++p) {
      at[p] = unpack<Bits, Affine>(at[p], layout, piece, scratch);
      for (int64_t number = 0; number < rows.tiles(); ++number) multiply_tile(piece, number, p, scratch);
    }
  }
  for (int p = 0; p < panels; ++p) {
    const Outputs outputs(args, first_panel + p);
    for (int64_t number = 0, row = 0; row < rows.count; ++number) {
      for (int i = 0; i < rows.tile_rows && row < rows.count; ++i, ++row) {
        outputs.store(args, rows.first + row, _mm512_load_ps(scratch.acc[p][number][i]));
      }
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

// With segments of 16 inputs three quarters of a tile would be empty, so AVX-512 VNNI is faster
// (docs/internals/kernels.md).
bool supports(const void*, const Layout& layout, int64_t, IsaBits) { return layout.group_inputs() % kBlockInputs == 0; }

// From 8 rows on. This is an estimate: with fewer rows the products of AVX-512 VNNI should take no longer than unpacking to
// memory takes here. It has not been measured on a CPU with AMX.
#define KERNEL(bits)                  \
  with_levels<LinearKernel>({      \
      "linear_a8w" #bits "_8x16_amx", kAmx, Format::panel16, bits, 8, 16, run<bits>, 3, 1, supports})
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearAmx;
const Table<LinearKernel> kLinearAmx{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
