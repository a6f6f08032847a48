// What the AVX-512 kernels share: up to 8 rows of activations times 16 output rows, one register of int32 sums each.
//
//   line (64 bytes): row 0: 4 codes | row 1: 4 codes | ... | row 15: 4 codes       one zmm register
//   vpdpbusd sums, line, broadcast of 4 activations: 16 rows x 4 products, one int32 lane per row, no horizontal adds
//
// A block is unpacked once (bits/unpack_avx512.h) for all rows of a tile. For up to 4 rows fields stay at their bit
// position p; sums of different p have their own accumulators, joined by a shift once per group. Each of them holds at
// most 65536 * 128 * 255 < 2^31 (kMaxGroupInputs); the symmetric start value may wrap it, which the final sum undoes.
// More rows have no registers for that, and groups of half a block would join too often: there the fields are shifted
// down when they are unpacked, once for all rows.
// Several accumulators per row hide the latency of vpdpbusd (4 to 5 cycles, 1 to 2 per cycle).
// One row or two take one panel after the other, without software prefetch: one stream is what Zen 4 reads fastest from
// memory. More rows have more to multiply than to read, and prefetch (walk_x86.h).
// Intel's cores want several (docs/design.md, Memory): for them a row goes through panels in step.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "../bits/simd_avx512.h"
#include "../bits/unpack_avx512.h"
#include "../ukernel.h"
#include "tiles_of_rows.h"
#include "walk_x86.h"

namespace lowbit {
namespace {

// A table of levels, as bytes level + 128; vpshufb looks a register of codes up. Nothing for other weights.
template <int Bits>
struct Levels {
  [[gnu::always_inline]] void load(const Layout&) {}
};

template <int Bits>
  requires(is_by_table(Bits))
struct Levels<Bits> {
  __m512i bytes;

  [[gnu::always_inline]] void load(const Layout& layout) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(layout.levels));
    bytes = _mm512_xor_si512(_mm512_broadcast_i32x4(table), byte_mask(0x80));
  }
};

template <int Rows, bool Halves>
inline constexpr bool kShiftedDown = Rows > 4 || Halves;

// How the eight lines share accumulators: one chain per distinct shift, or several for few shifts and few sums: `Rows`
// rows of m, or as many panels in step.
template <int Bits, int Rows, bool Down>
struct Chains {
  int shift[8] = {};  // of each chain
  int of_line[8] = {};
  int count = 0;

  constexpr Chains() {
    constexpr int kFew = Bits == 8 || is_by_table(Bits) ? 4 : Bits >= 4 ? 2 : 1;
    constexpr int kSplit = Down ? 1 : Rows > 2 ? kFew == 4 ? 2 : 1 : kFew;
    int key[8] = {};
    for (int j = 0; j < 8; ++j) {
      const int line_shift = Down || is_by_table(Bits) ? 0 : Unpack<code_bits(Bits)>::shift[j];
      const int wanted = line_shift * 8 + j % kSplit;
      int found = count;
      for (int c = 0; c < count; ++c) {
        if (key[c] == wanted) found = c;
      }
      if (found == count) {
        key[count] = wanted;
        shift[count++] = line_shift;
      }
      of_line[j] = found;
    }
  }
};

[[gnu::always_inline]] inline __m512i broadcast4(const int8_t* a) {
  int32_t word;
  std::memcpy(&word, a, 4);
  return _mm512_set1_epi32(word);
}

// Integer sums. Not __m512i, whose lanes GCC takes to be 64 bits wide: a sum that a loop carries as that and adds to as
// 32-bit lanes is copied to another register and back in every turn (GCC 12).
using Int16 = int32_t __attribute__((vector_size(64)));

[[gnu::always_inline]] inline Int16 add_products(Int16 sums, __m512i codes, __m512i a4) {
  return reinterpret_cast<Int16>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), codes, a4));
}

[[gnu::always_inline]] inline Int16 broadcast(int32_t value) {
  return reinterpret_cast<Int16>(_mm512_set1_epi32(value));
}

template <int Bits, int Rows, bool Down, int Panels>
struct Sums {
  static constexpr Chains<Bits, Rows * Panels, Down> kChains{};
  Int16 chain[Rows][kChains.count];

  // Starts a group: the first chain carries -2^(bits-1) times the group's activation sum, or with `Started` what is given.
  template <bool Affine, bool Started>
  [[gnu::always_inline]] void start(const int32_t* group_sum, int64_t stride) {
    for (int i = 0; i < Rows; ++i) {
      for (int c = 0; c < kChains.count; ++c) chain[i][c] = Int16{};
      if constexpr (!Affine && level_factor(Bits) == 1) {
        static_assert(kChains.shift[0] == 0);
        chain[i][0] = broadcast((Started ? 1 : -level_offset(Bits)) * group_sum[i * stride]);
      }
    }
  }

  template <int FirstLine, int Lines>
  [[gnu::always_inline]] void add(const __m512i (&line)[8], const int8_t* a, int64_t stride) {
    for (int j = FirstLine; j < FirstLine + Lines; ++j) {
      for (int i = 0; i < Rows; ++i) {
        Int16& sum = chain[i][kChains.of_line[j]];
        sum = add_products(sum, line[j], broadcast4(a + i * stride + 4 * j));
      }
    }
  }

  template <bool Affine>
  [[gnu::always_inline]] __m512 join(int i, int32_t group_sum) const {
    __m512i total = reinterpret_cast<__m512i>(chain[i][0]);
    for (int c = 1; c < kChains.count; ++c) {
      const __m512i sum = reinterpret_cast<__m512i>(chain[i][c]);
      total = _mm512_add_epi32(total, _mm512_srai_epi32(sum, static_cast<unsigned>(kChains.shift[c])));
    }
    if constexpr (!Affine && level_factor(Bits) == 2) {
      total = _mm512_sub_epi32(_mm512_slli_epi32(total, 1), _mm512_set1_epi32(group_sum));
    }
    return _mm512_cvtepi32_ps(total);
  }
};

[[gnu::always_inline]] inline __m512 load_scales(const uint8_t* scales) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
}

// Lines of codes, at their bit positions or shifted down; or of levels + 128.
template <int Bits, bool ShiftedDown>
[[gnu::always_inline]] inline void unpack_block(const uint8_t* block, const Levels<Bits>& levels, __m512i (&line)[8]) {
  using Codes = Unpack<code_bits(Bits)>;
  __m512i packed[code_bits(Bits)];
  for (int i = 0; i < code_bits(Bits); ++i) packed[i] = _mm512_loadu_si512(block + i * kLineBytes);
  Codes::lines(packed, line);
  if constexpr (ShiftedDown || is_by_table(Bits)) {  // a field's lower bits are zero: nothing crosses to the byte below
    for (int j = 0; j < 8; ++j) line[j] = _mm512_srli_epi16(line[j], Codes::shift[j]);
  }
  if constexpr (is_by_table(Bits)) {
    for (int j = 0; j < 8; ++j) line[j] = _mm512_shuffle_epi8(levels.bytes, line[j]);
  }
}

// A panel's outputs: what its head adds to the sums of a row.
struct Outputs {
  __m512 row_scale, row_sum, bias;
  int64_t column;
  __mmask16 columns;

  [[gnu::always_inline]] Outputs(const LinearArgs& args, int64_t panel) {
    const uint8_t* head = args.panels + panel * args.layout.panel_bytes + args.layout.head_offset;
    row_scale = _mm512_loadu_ps(head);
    row_sum = _mm512_loadu_ps(head + 4 * kPanelRows);
    bias = _mm512_loadu_ps(head + 8 * kPanelRows);
    column = panel * kPanelRows;
    columns = first_lanes(args.layout.n - column);
  }

  [[gnu::always_inline]] void store(const LinearArgs& args, int64_t row, __m512 acc) const {
    const __m512 corrected = _mm512_fnmadd_ps(_mm512_set1_ps(args.zeros[row]), row_sum, acc);
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(args.scales[row]), row_scale);
    store16(args.out, args.out_dtype, row * args.out_stride + column, _mm512_fmadd_ps(scale, corrected, bias), columns);
  }
};

// What the integer sums of tiles of several rows start at, -2^(bits-1) times the group sums; affine: the group sums
// in float32, which are multiplied by mins. Made once for all panels of a call, so that a tile broadcasts it from
// memory. A tile has a group's starts beside each other: a pointer for each row has no register. In the call's
// scratch, which has room for some tiles at a time.
// Rows of 4096 inputs are a page apart, so 8 of them fill a set of the first-level cache (8 ways of a page). In
// groups of 32 the starts move through the sets as fast as the activations; half a page away they do not take their
// place.
template <int Bits, bool Affine>
class Starts {
 public:
  explicit Starts(const LinearArgs& args)
      : args_(args), groups_(args.layout.groups), most_rows_((kLinearScratchBytes - kPage) / 4 / groups_) {
    const uintptr_t wanted = reinterpret_cast<uintptr_t>(args.a) + kPage / 2;
    const uintptr_t gap = (wanted - reinterpret_cast<uintptr_t>(args.scratch)) % kPage / 4;
    starts_ = static_cast<int32_t*>(args.scratch) + gap;
  }

  bool have_room_for(int64_t rows) const { return rows <= most_rows_; }

  // Of a tile of so many rows, for each group. The tiles of a panel are asked for one after the other.
  const int32_t* of(int64_t row, int64_t rows) {
    if (row < begin_ || row >= end_) {
      if (row != end_ || row + rows - begin_ > most_rows_) begin_ = row;
      end_ = row + rows;
      const int32_t* const sums = args_.group_sums + row * groups_;
      int32_t* to = starts_ + (row - begin_) * groups_;
      for (int64_t group = 0; group < groups_; ++group) {
        for (int64_t i = 0; i < rows; ++i) *to++ = start(sums[i * groups_ + group]);
      }
    }
    return starts_ + (row - begin_) * groups_;
  }

 private:
  static constexpr int64_t kPage = 4096;

  static int32_t start(int32_t sum) {
    if constexpr (!Affine) return -level_offset(Bits) * sum;
    const float value = static_cast<float>(sum);
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
  }

  const LinearArgs& args_;
  int64_t groups_, most_rows_;
  int32_t* starts_;
  int64_t begin_ = 0, end_ = 0;  // of the rows that are there
};

// The sums of `Rows` rows of activations over one panel, for walk(); over one of `Panels` in step. `Started`:
// group_sums are from Starts.
template <int Bits, bool Affine, bool Halves, int Rows, int Panels = 1, bool Started = false>
struct Tile {
  static_assert(!Started || Affine || level_factor(Bits) == 1);
  static constexpr bool kDown = kShiftedDown<Rows, Halves>;
  static constexpr int64_t kBlockBytes = code_bits(Bits) * kLineBytes, kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  static constexpr int64_t kRunBlocks = 0;

  const int32_t* group_sums;
  int64_t groups, stride;  // from a row to the next: of group_sums, of the activations
  __m512 acc[Rows];
  Sums<Bits, Rows, kDown, Panels> sums;
  __m512i line[8];
  [[no_unique_address]] Levels<Bits> levels;

  [[gnu::always_inline]] void begin(const LinearArgs& args, int64_t row) {
    levels.load(args.layout);
    groups = args.layout.groups;
    stride = args.layout.blocks * kBlockInputs;
    group_sums = args.group_sums + row * groups;
    for (__m512& each : acc) each = _mm512_setzero_ps();
  }

  [[gnu::always_inline]] void start(int64_t group) {
    if constexpr (Started) {
      sums.template start<Affine, true>(group_sums + group * Rows, 1);
    } else {
      sums.template start<Affine, false>(group_sums + group, groups);
    }
  }
  [[gnu::always_inline]] void begin_block(const uint8_t* at) { unpack_block<Bits, kDown>(at, levels, line); }

  template <int First, int Lines>
  [[gnu::always_inline]] void add(const int8_t* a) {
    sums.template add<First, Lines>(line, a, stride);
  }

  [[gnu::always_inline]] void finish(int64_t group, const uint8_t* scales) {
    const __m512 scale = load_scales(scales);
    for (int i = 0; i < Rows; ++i) {
      const int32_t group_sum = Started ? group_sums[group * Rows + i] : group_sums[i * groups + group];
      acc[i] = _mm512_fmadd_ps(scale, sums.template join<Affine>(i, group_sum), acc[i]);
      if constexpr (Affine) {
        const __m512 min = load_scales(scales + 2 * kPanelRows);
        const __m512 a_sum = Started ? _mm512_castsi512_ps(_mm512_set1_epi32(group_sum))
                                     : _mm512_set1_ps(static_cast<float>(group_sum));
        acc[i] = _mm512_fmadd_ps(min, a_sum, acc[i]);
      }
    }
  }
};

// `Rows` rows of activations times one panel. With `Halves` groups may end in the middle of a block.
template <int Bits, bool Affine, bool Halves, int Rows, bool Started = false>
[[gnu::always_inline]] inline void tile(const LinearArgs& args, int64_t panel, int64_t row, int64_t number = 0,
                                        int64_t tiles = 1, const int32_t* starts = nullptr) {
  Tile<Bits, Affine, Halves, Rows, 1, Started> tile;
  tile.begin(args, row);
  if constexpr (Started) tile.group_sums = starts;
  walk_panel<Halves, (Rows > 2)>(args, panel, args.a + row * tile.stride, tile, number, tiles);
  const Outputs outputs(args, panel);
  for (int i = 0; i < Rows; ++i) outputs.store(args, row + i, tile.acc[i]);
}

// How one row goes through panels in step: how many, and how far ahead each is prefetched, 8 KiB in all. At 1 bit the
// sums of more than two have no registers.
template <int Bits>
inline constexpr int kPanelsInStep = Bits == 1 ? 2 : 4;
template <int Bits>
inline constexpr int64_t kPrefetchBytes = (8 << 10) / kPanelsInStep<Bits>;

template <int Bits, bool Affine, bool Halves>
[[gnu::always_inline]] inline void tile_in_step(const LinearArgs& args, int64_t panel, int64_t row) {
  constexpr int kPanels = kPanelsInStep<Bits>;
  const Layout& layout = args.layout;
  InStep<Tile<Bits, Affine, Halves, 1, kPanels>, kPanels, kPrefetchBytes<Bits>> tiles;
  tiles.panel_bytes = layout.panel_bytes;
  for (auto& tile : tiles.panel) tile.begin(args, row);
  walk<Halves>(layout, args.panels + panel * layout.panel_bytes, args.a + row * tiles.panel[0].stride, tiles);
  for (int p = 0; p < kPanels; ++p) Outputs(args, panel + p).store(args, row, tiles.panel[p].acc[0]);
}

template <int Bits, bool Affine, bool Halves>
void run_in_step(const LinearArgs& args) {
  constexpr int kPanels = kPanelsInStep<Bits>;
  for (int64_t row = 0; row < args.m; ++row) {
    int64_t panel = args.panel_begin;
    for (; args.panel_end - panel >= kPanels; panel += kPanels) tile_in_step<Bits, Affine, Halves>(args, panel, row);
    for (; panel < args.panel_end; ++panel) tile<Bits, Affine, Halves, 1>(args, panel, row);
  }
}

template <int Bits, bool Affine, bool Halves, int MostRows>
void run_panels(const LinearArgs& args) {
  constexpr bool kStarted = MostRows > 1 && (Affine || level_factor(Bits) == 1);
  Starts<Bits, Affine> starts(args);
  // More groups than any model has. Not run_panels<Bits, Affine, Halves, 1>: then GCC 12 compiles one row's own kernel to a
  // fifth more instructions (docs/x86_cost.json).
  if (kStarted && !starts.have_room_for(MostRows)) {
    for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel) {
      for (int64_t row = 0; row < args.m; ++row) tile<Bits, Affine, Halves, 1>(args, panel, row);
    }
    return;
  }
  for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel) {
    for_each_tile<MostRows>(args.m, [&](int64_t row, auto rows, int64_t number, int64_t tiles)
                                        __attribute__((always_inline)) {
      if constexpr (kStarted) {
        tile<Bits, Affine, Halves, rows(), true>(args, panel, row, number, tiles, starts.of(row, rows()));
      } else {
        tile<Bits, Affine, Halves, rows()>(args, panel, row, number, tiles);
      }
    });
  }
}

}  // namespace
}  // namespace lowbit
