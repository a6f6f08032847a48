// Shared by the AVX-512 kernels: up to 8 rows of activations times 16 output rows, one register of int32 sums each.
//
//   line (64 bytes): row 0: 4 codes | row 1: 4 codes | ... | row 15: 4 codes       one zmm register
//   vpdpbusd sums, line, broadcast of 4 activations: 16 rows x 4 products, one int32 lane per row, no horizontal adds
//
// A block is unpacked once (bits/unpack_avx512.h) for all rows of a tile. For up to 4 rows, fields stay at their bit position
// p; sums of different p have separate accumulators, which are joined by a shift once per segment. More rows leave no registers
// for that, and groups of half a block would be joined too often: there the fields are shifted down when they are unpacked,
// once for all rows.
// Accumulators of several lines, rows and segments hide the latency of vpdpbusd (4 to 5 cycles, 1 to 2 per cycle).
// One row or two take one panel at a time: Zen 4 reads a single stream fastest from memory without software prefetch, Zen 5
// with prefetch far ahead. With more rows multiplying takes longer than reading, and tiles prefetch on all CPUs (walk_x86.h).
// Intel's cores read several streams faster (docs/internals/kernels.md, Memory): for them one row or two take several
// interleaved panels.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "../bits/simd_avx512.h"
#include "../bits/unpack_avx512.h"
#include "../bits/widths.h"
#include "../ukernel.h"
#include "dispatch.h"
#include "tiles_of_rows.h"
#include "walk_x86.h"

namespace lowbit {
namespace {

// A table of levels, as bytes level + 128. vpshufb looks up a register of codes. Empty for other weights.
template <int Bits>
struct Levels {
  LOWBIT_INLINE void load(const Layout&) {}
};

template <int Bits>
  requires(is_by_table(Bits))
struct Levels<Bits> {
  __m512i bytes;

  LOWBIT_INLINE void load(const Layout& layout) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(layout.levels));
    bytes = _mm512_xor_si512(_mm512_broadcast_i32x4(table), byte_mask(0x80));
  }
};

template <int Rows, bool Halves>
inline constexpr bool kShiftedDown = Rows > 4 || Halves;

// The shift of line j of an unpacked block: its bytes are 2^shift times the codes (affine) or times
// level(code) + level_offset(Bits). -1 at 1 bit symmetric, where that sum is twice the code.
template <int Bits, bool Affine>
constexpr int line_shift(int j) {
  return is_by_table(Bits) ? 0 : Unpack<code_bits(Bits)>::shift[j] - (Affine ? 0 : level_factor(Bits) - 1);
}

// How the eight lines share accumulators: one chain per distinct shift, or two if there are few shifts and few sums. `Rows`:
// rows of m, or number of interleaved panels. A sum lasts for a segment of two blocks. The products of several segments hide
// the latency, and joining more chains per segment costs more than they hide.
template <int Bits, bool Affine, int Rows, bool Down>
struct Chains {
  int shift[8] = {};  // of each chain
  int of_line[8] = {};
  int count = 0;
  int started = 0;  // the chain that holds the start value, which has no shift

  constexpr Chains() {
    constexpr bool kAlike = Bits == 8 || is_by_table(Bits);  // whether all lines have the same shift
    constexpr int kSplit = !Down && (kAlike || (Bits >= 6 && Rows <= 2)) ? 2 : 1;
    int key[8] = {};
    for (int j = 0; j < 8; ++j) {
      const int wanted_shift = Down ? 0 : line_shift<Bits, Affine>(j);
      const int wanted = wanted_shift * 8 + j % kSplit;
      int chain = count;
      for (int c = 0; c < count; ++c) {
        if (key[c] == wanted) chain = c;
      }
      if (chain == count) {
        key[count] = wanted;
        shift[count++] = wanted_shift;
      }
      of_line[j] = chain;
    }
    while (shift[started] != 0) ++started;
  }
};

// Integer sums. GCC takes the lanes of __m512i to be 64 bits wide. If a loop keeps a sum as __m512i and adds to its 32-bit
// lanes, GCC 12 copies it to another register and back in every iteration.
using Int16 = int32_t __attribute__((vector_size(64)));

// Adds the products of 16 rows of 4 codes and the 4 activations at `a`. Assembly with the broadcast as an operand of vpdpbusd
// would need fewer instructions, but is slower (Zen 5: 1.1 to 1.2 times as long).
LOWBIT_INLINE inline Int16 add_products(Int16 sums, __m512i codes, const int8_t* a) {
  int32_t word;
  std::memcpy(&word, a, 4);
  return reinterpret_cast<Int16>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), codes, _mm512_set1_epi32(word)));
}

LOWBIT_INLINE inline Int16 broadcast(int32_t value) {
  return reinterpret_cast<Int16>(_mm512_set1_epi32(value));
}

// v / 2^Shift
template <int Shift>
LOWBIT_INLINE inline __m512i divided(__m512i v) {
  if constexpr (Shift > 0) return _mm512_srai_epi32(v, Shift);
  if constexpr (Shift < 0) return _mm512_slli_epi32(v, -Shift);
  return v;
}

// A segment's integer sums.
template <int Bits, bool Affine, int Rows, bool Down, int Panels>
struct Sums {
  static constexpr Chains<Bits, Affine, Rows * Panels, Down> kChains{};
  Int16 chain[Rows][kChains.count];

  // Starts the sums of row i at `first`.
  LOWBIT_INLINE void start(int i, Int16 first) {
    for (int c = 0; c < kChains.count; ++c) chain[i][c] = c == kChains.started ? first : Int16{};
  }

  template <int FirstLine, int Lines>
  LOWBIT_INLINE void add(const __m512i (&line)[8], const int8_t* a, int64_t stride) {
    // One pointer for two rows, whose origin is hidden from the compiler. Otherwise it would keep and advance one pointer per
    // row, or one offset per word, and run out of registers.
    const int8_t* rows[(Rows + 1) / 2];
    rows[0] = a;
    if constexpr (Rows > 1) __asm__("" : "+r"(stride));
    for (int i = 1; i < (Rows + 1) / 2; ++i) {
      rows[i] = rows[i - 1] + 2 * stride;
      __asm__("" : "+r"(rows[i]));
    }
    [&]<int... J>(std::integer_sequence<int, J...>) LOWBIT_INLINE {
      (add_line<FirstLine + J>(line[FirstLine + J], rows, stride), ...);
    }(std::make_integer_sequence<int, Lines>());
  }

  template <int J>
  LOWBIT_INLINE void add_line(__m512i codes, const int8_t* const (&rows)[(Rows + 1) / 2], int64_t stride) {
    for (int i = 0; i < Rows; ++i) {
      Int16& sum = chain[i][kChains.of_line[J]];
      sum = add_products(sum, codes, rows[i / 2] + i % 2 * stride + 4 * J);
      if constexpr (Rows * Panels == 1) __asm__("" : "+v"(sum));  // otherwise GCC 12 copies it to another register and back
    }
  }

  LOWBIT_INLINE __m512 joined(int i) const {
    __m512i total = divided<kChains.shift[0]>(reinterpret_cast<__m512i>(chain[i][0]));
    [&]<int... C>(std::integer_sequence<int, C...>) LOWBIT_INLINE {
      ((total = _mm512_add_epi32(total, divided<kChains.shift[C + 1]>(reinterpret_cast<__m512i>(chain[i][C + 1])))), ...);
    }(std::make_integer_sequence<int, kChains.count - 1>());
    return _mm512_cvtepi32_ps(total);
  }
};

LOWBIT_INLINE inline __m512 load_scales(const uint8_t* scales) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
}

// Lines of codes, at their bit positions or shifted down, or lines of levels + 128.
template <int Bits, bool Affine, bool ShiftedDown>
LOWBIT_INLINE inline void unpack_block(const uint8_t* block, const Levels<Bits>& levels, __m512i (&line)[8]) {
  using Codes = Unpack<code_bits(Bits)>;
  __m512i packed[code_bits(Bits)];
  for (int i = 0; i < code_bits(Bits); ++i) packed[i] = _mm512_loadu_si512(block + i * kLineBytes);
  Codes::lines(packed, line);
  if constexpr (is_by_table(Bits)) {
    for (int j = 0; j < 8; ++j) {
      line[j] = _mm512_shuffle_epi8(levels.bytes, _mm512_srli_epi16(line[j], static_cast<unsigned>(Codes::shift[j])));
    }
  } else if constexpr (ShiftedDown) {  // the other bits of a byte are zero, so no bit crosses to the next byte
    [&]<int... J>(std::integer_sequence<int, J...>) LOWBIT_INLINE {
      ((line[J] = shift_right<line_shift<Bits, Affine>(J)>(line[J])), ...);
    }(std::make_integer_sequence<int, 8>());
  }
}

// Computes a panel's outputs from a row's sums and the panel's head.
struct Outputs {
  __m512 row_scale, bias;
  int64_t column;
  __mmask16 columns;

  LOWBIT_INLINE Outputs(const LinearArgs& args, int64_t panel) {
    const uint8_t* head = args.panels + panel * args.layout.panel_bytes + args.layout.head_offset;
    row_scale = _mm512_loadu_ps(head);
    bias = _mm512_loadu_ps(head + 8 * kPanelRows);
    column = panel * kPanelRows;
    columns = first_lanes(args.layout.n - column);
  }

  LOWBIT_INLINE void store(const LinearArgs& args, int64_t row, __m512 acc) const {
    store16(args.out, args.out_dtype, row * args.out_stride + column, _mm512_fmadd_ps(row_scale, acc, bias), columns);
  }
};

// Stores a tile's float sums to the call's outputs. Not inlined: it runs once per panel, and every tile would contain a copy.
__attribute__((noinline)) inline void store_rows(const LinearArgs& args, int64_t panel, int64_t row, int rows,
                                                 const __m512* sums) {
  const Outputs outputs(args, panel);
  for (int i = 0; i < rows; ++i) outputs.store(args, row + i, sums[i]);
}

// The values that a tile of several rows reads for its segments and groups, in the order of use. Segment: the start of its
// integer sums (-level_offset times A; affine: 0), then t. Affine group: S. Each has one value per row, which is broadcast from
// memory. One pointer is enough; one per row would need too many registers. Computed once for all panels of a call.
// Rows of 4096 inputs are a page apart, so 8 of them fill a set of the first-level cache (8 ways of a page). The streams are
// half a page away from the rows, in other sets.
class Streams {
 public:
  Streams(const LinearArgs& args, int level_offset)
      : args_(args),
        affine_(has_mins(args.layout.mapping)),
        offset_(affine_ ? 0 : level_offset),
        row_values_(2 * args.layout.segments + (affine_ ? args.layout.groups : 0)) {
    const uintptr_t wanted = reinterpret_cast<uintptr_t>(args.a) + kPage / 2;
    const uintptr_t gap = (wanted - reinterpret_cast<uintptr_t>(args.scratch)) % kPage / 4;
    values_ = static_cast<int32_t*>(args.scratch) + gap;
  }

  int64_t most_rows() const { return (kLinearScratchBytes - kPage) / 4 / row_values_; }

  // The stream of the tile whose first row is number `index`.
  const int32_t* of(int64_t index) const { return values_ + index * row_values_; }

  void make(int64_t row, int64_t index, int rows) const {
    const Layout& layout = args_.layout;
    const __mmask8 wanted = static_cast<__mmask8>((1 << rows) - 1);
    const __m256i numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i segments = _mm256_mullo_epi32(numbers, _mm256_set1_epi32(static_cast<int>(layout.segments)));
    const __m256i groups = _mm256_mullo_epi32(numbers, _mm256_set1_epi32(static_cast<int>(layout.groups)));
    const int32_t* const sums = args_.sums + row * layout.segments;
    const float* const scales = args_.scales + row * layout.segments;
    int32_t* to = values_ + index * row_values_;
    const auto gather = [&](const void* from, __m256i at) LOWBIT_INLINE {
      return _mm256_mmask_i32gather_epi32(at, wanted, at, from, 4);
    };
    const auto put = [&](__m256i values) LOWBIT_INLINE {
      _mm256_mask_storeu_epi32(to, wanted, values);
      to += rows;
    };
    for (const GroupPart segment : GroupParts(layout)) {
      put(_mm256_mullo_epi32(gather(sums + segment.index, segments), _mm256_set1_epi32(-offset_)));
      put(gather(scales + segment.index, segments));
      if (affine_ && segment.last) put(gather(args_.group_sums + row * layout.groups + segment.group, groups));
    }
  }

 private:
  static constexpr int64_t kPage = 4096;

  const LinearArgs& args_;
  bool affine_;
  int offset_;
  int64_t row_values_;
  int32_t* values_;
};

// Whether one template serves weights with and without mins: it checks for them at the end of each group, which is cheap with
// more than one row or panel. Not at 1 bit, where the value of a symmetric code differs by a factor of two.
constexpr bool asks_for_mins(int bits, int rows, int panels) { return bits != 1 && !is_by_table(bits) && rows * panels > 1; }

// For walk(): the sums of `Rows` rows of activations over one panel, or over one of `Panels` interleaved panels. One row reads
// the values of its segments from the arguments, several rows from Streams.
template <int Bits, bool Affine, Groups Kind, int Rows, int Panels = 1>
struct Tile {
  static constexpr bool kAsks = asks_for_mins(Bits, Rows, Panels);
  static_assert(!(kAsks && Affine));
  static constexpr bool kDown = kShiftedDown<Rows, (Kind >= Groups::halves)>;
  static constexpr int64_t kBlockBytes = code_bits(Bits) * kLineBytes;
  static constexpr int kPanels = Rows == 1 ? Panels : 0;
  static constexpr bool kLoops = Rows > 4 && Rows < 8;  // rarely used tiles, which would be a sixth of the code
  // Whether the tile itself prefetches. Measured on Zen 5: at 8 bits one row gains nothing by it, and loses a quarter in cache.
  static constexpr bool kPrefetches = Panels == 1 && (Rows == 2 || (Rows == 1 && code_bits(Bits) < 8));

  const int32_t* segment_sums;  // used by one row
  const float *segment_scales, *group_sums;
  const int32_t* stream;  // used by several rows
  int64_t stride;         // distance between rows of activations
  int64_t ahead;          // used with kPrefetches: how far. 0: the line that is read next, which costs nothing
  bool mins;              // used with kAsks
  int32_t start_factor;   // used by one row: factor of the sum of activations
  __m512 acc[Rows], products[Rows];
  Sums<Bits, Affine, Rows, kDown, Panels> sums;
  __m512i line[8];
  [[no_unique_address]] Levels<Bits> levels;

  LOWBIT_INLINE bool has_mins() const { return kAsks ? mins : Affine; }
  LOWBIT_INLINE int64_t group_bytes() const { return lowbit::group_bytes(has_mins()); }

  LOWBIT_INLINE void begin(const LinearArgs& args, int64_t row, const int32_t* its_stream) {
    levels.load(args.layout);
    mins = lowbit::has_mins(args.layout.mapping);
    segment_sums = args.sums + row * args.layout.segments;
    segment_scales = args.scales + row * args.layout.segments;
    start_factor = has_mins() ? 0 : -level_offset(Bits);
    if (has_mins()) group_sums = args.group_sums + row * args.layout.groups;
    stream = its_stream;
    stride = args.layout.blocks * kBlockInputs;
    for (__m512& sum : acc) sum = _mm512_setzero_ps();
  }

  LOWBIT_INLINE void start(int64_t segment) {
    for (int i = 0; i < Rows; ++i) {
      if constexpr (Rows > 1) {
        sums.start(i, broadcast(stream[i]));
      } else {
        sums.start(i, Affine ? Int16{} : broadcast(start_factor * segment_sums[segment]));
      }
    }
    stream += Rows;
  }

  LOWBIT_INLINE void begin_block(const uint8_t* at) {
    for (int64_t i = 0; i < kBlockBytes; i += kLineBytes) prefetch(at + i);
    unpack_block<Bits, Affine, kDown>(at, levels, line);
  }

  template <int First, int Lines>
  LOWBIT_INLINE void add(const int8_t* a) {
    sums.template add<First, Lines>(line, a, stride);
  }

  LOWBIT_INLINE void begin_group() {
    for (__m512& sum : products) sum = _mm512_setzero_ps();
  }

  LOWBIT_INLINE void end_segment(int64_t segment) {
    for (int i = 0; i < Rows; ++i) {
      products[i] = _mm512_fmadd_ps(next(i, segment_scales + segment), sums.joined(i), products[i]);
    }
    stream += Rows;
  }

  LOWBIT_INLINE void finish(int64_t, const uint8_t* scales) {
    prefetch(scales);
    const __m512 scale = load_scales(scales);
    for (int i = 0; i < Rows; ++i) acc[i] = _mm512_fmadd_ps(scale, products[i], acc[i]);
  }

  LOWBIT_INLINE void finish_only(int64_t group, const uint8_t* scales) {
    prefetch(scales);
    const __m512 scale = load_scales(scales);
    for (int i = 0; i < Rows; ++i) {
      acc[i] = _mm512_fmadd_ps(scale, _mm512_mul_ps(next(i, segment_scales + group), sums.joined(i)), acc[i]);
    }
    stream += Rows;
  }

  LOWBIT_INLINE void add_mins(int64_t group, const uint8_t* scales) {
    const __m512 min = load_scales(scales + 2 * kPanelRows);
    for (int i = 0; i < Rows; ++i) acc[i] = _mm512_fmadd_ps(min, next(i, group_sums + group), acc[i]);
    stream += Rows;
  }

 private:
  LOWBIT_INLINE void prefetch(const uint8_t* at) const {
    if constexpr (kPrefetches) _mm_prefetch(reinterpret_cast<const char*>(at) + ahead, _MM_HINT_T0);
  }

  // The next float of row i. One row reads it at `at`.
  LOWBIT_INLINE __m512 next(int i, const float* at) const {
    return _mm512_set1_ps(Rows == 1 ? *at : float_from_bits(static_cast<uint32_t>(stream[i])));
  }
};

inline bool reads_far_ahead() { return lowbit::streams() == lowbit::Streams::ahead; }

inline constexpr int64_t kFarAhead = 8 << 10;  // bytes

// How far one row prefetches on CPUs that do not read far ahead. At 1 bit, computing one row is hardly faster than reading it
// from memory, and long activations fill much of the first-level cache. Measured on Zen 4: at 2 bits, and with fewer inputs,
// prefetch costs more than it saves.
template <int Bits>
int64_t ahead_of_one_row(const Layout& layout) {
  constexpr int64_t kLongRow = 12288;  // inputs
  return Bits == 1 && layout.k >= kLongRow ? Prefetch::kAhead : 0;
}

// The distance for a panel. If all of it would be beyond the call's panels, which another thread may read: 0.
inline int64_t ahead_within(const LinearArgs& args, int64_t panel, int64_t ahead) {
  return (args.panel_end - panel) * args.layout.panel_bytes > ahead ? ahead : 0;
}

// Calls run() with dispatch()'s constants and with the kind of groups.
template <int Bits, class Run>
LOWBIT_INLINE inline void with_groups(const Layout& layout, Run run) {
  const bool several = layout.group_inputs() > kSegmentInputs;
  const bool sixteen = layout.group_inputs() == kHalfInputs;
  dispatch<Bits>(layout, [&](auto bits, auto affine, auto halves) LOWBIT_INLINE {
    const auto with = [&](auto kind) LOWBIT_INLINE { run(bits, affine, kind); };
    if constexpr (halves()) {
      sixteen ? with(std::integral_constant<Groups, Groups::halves>())
              : with(std::integral_constant<Groups, Groups::anywhere>());
    } else {
      several ? with(std::integral_constant<Groups, Groups::segments>())
              : with(std::integral_constant<Groups, Groups::one_segment>());
    }
  });
}

// Multiplies rows of activations by panels, one row at a time.
template <int Bits, bool Affine, Groups Kind>
__attribute__((noinline)) void run_single_rows(const LinearArgs& args) {
  const int64_t ahead = reads_far_ahead() ? kFarAhead : ahead_of_one_row<Bits>(args.layout);
  for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel) {
    for (int64_t row = 0; row < args.m; ++row) {
      Tile<Bits, Affine, Kind, 1> tile;
      tile.begin(args, row, nullptr);
      tile.ahead = ahead_within(args, panel, ahead);
      walk<Kind>(args.layout, args.panels + panel * args.layout.panel_bytes, args.a + row * tile.stride, tile);
      Outputs(args, panel).store(args, row, tile.acc[0]);
    }
  }
}

// Multiplies `Rows` rows of activations, from row `row` on, by `Panels` interleaved panels at a time, each prefetched by its
// share of 8 KiB ahead. Returns the first panel that is left.
template <int Bits, bool Affine, Groups Kind, int Rows, int Panels>
LOWBIT_INLINE inline int64_t interleave(const LinearArgs& args, int64_t row, const int32_t* stream) {
  const Layout& layout = args.layout;
  int64_t panel = args.panel_begin;
  for (; args.panel_end - panel >= Panels; panel += Panels) {
    Interleaved<Tile<Bits, Affine, Kind, Rows, Panels>, Panels, (8 << 10) / Panels> tiles;
    tiles.panel_bytes = layout.panel_bytes;
    tiles.for_each_tile([&](auto& tile) LOWBIT_INLINE { tile.begin(args, row, stream); });
    walk<Kind>(layout, args.panels + panel * layout.panel_bytes, args.a + row * tiles.panel[0].stride, tiles);
    int64_t stored = panel;
    tiles.for_each_tile([&](auto& tile) LOWBIT_INLINE {
      __m512 sums[Rows];
      for (int i = 0; i < Rows; ++i) sums[i] = tile.acc[i];
      store_rows(args, stored++, row, Rows, sums);
    });
  }
  return panel;
}

// How many panels one row interleaves.
#define PANELS(bits, neon, neondot, streams) streams / kPanelRows
inline constexpr int kInterleavedPanelsOf[] = {0, LOWBIT_EACH_SET_WIDTH(PANELS)};
#undef PANELS
template <int Bits>
inline constexpr int kInterleavedPanels = kInterleavedPanelsOf[code_bits(Bits)];

template <int Bits, bool Affine, Groups Kind>
__attribute__((noinline)) void run_interleaved(const LinearArgs& args, void (*single_rows)(const LinearArgs&)) {
  for (int64_t row = 0; row < args.m; ++row) {
    const int64_t panel = interleave<Bits, Affine, Kind, 1, kInterleavedPanels<Bits>>(args, row, nullptr);
    if (panel < args.panel_end) single_rows(one_row_of(args, row, panel, args.panel_end));
  }
}

// Multiplies `Rows` rows of activations by one panel, as tile `number` of `tiles`. `Kind`: where groups end. `far`: whether the
// call's only tile prefetches far ahead.
template <int Bits, bool Affine, Groups Kind, int Rows>
__attribute__((noinline)) void run_tile(const LinearArgs& args, int64_t panel, int64_t row, int64_t number, int64_t tiles,
                                        const int32_t* stream, bool far) {
  Tile<Bits, Affine, Kind, Rows> tile;
  tile.begin(args, row, stream);
  tile.ahead = far && tiles == 1 ? ahead_within(args, panel, kFarAhead) : 0;
  walk_panel<Kind, (Rows > 2)>(args, panel, args.a + row * tile.stride, tile, number, tiles,
                               far ? kFarAhead : Prefetch::kAhead);
  __m512 sums[Rows];
  for (int i = 0; i < Rows; ++i) sums[i] = tile.acc[i];
  store_rows(args, panel, row, Rows, sums);
}

using RunTile = void (*)(const LinearArgs&, int64_t panel, int64_t row, int64_t number, int64_t tiles, const int32_t* stream,
                         bool far);

// Multiplies tiles of several rows, by run_tile[rows - 2].
template <int MostRows>
__attribute__((noinline)) void run_tiles(const LinearArgs& args, int level_offset, const LinearKernel& one_row,
                                         const RunTile (&run_tile)[MostRows - 1]) {
  const Streams streams(args, level_offset);
  const bool far = reads_far_ahead();
  const int64_t most_rows = streams.most_rows() / MostRows * MostRows;
  if (most_rows == 0) return one_row.run(args);  // more segments than any model has
  for (int64_t first = 0; first < args.m; first += most_rows) {
    const int64_t count = args.m - first < most_rows ? args.m - first : most_rows;
    for_each_tile<MostRows>(count, [&](int64_t row, int rows, int64_t, int64_t) {
      if (rows > 1) streams.make(first + row, row, rows);
    });
    for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel) {
      for_each_tile<MostRows>(count, [&](int64_t row, int rows, int64_t number, int64_t tiles) {
        if (rows == 1) return one_row.run(one_row_of(args, first + row, panel, panel + 1));
        run_tile[rows - 2](args, panel, first + row, number, tiles, streams.of(row), far);
      });
    }
  }
}

}  // namespace
}  // namespace lowbit
