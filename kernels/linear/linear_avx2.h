// The 256-bit linear kernels except for their integer dot products: panels, groups and the float part (ukernel.h).
//
// 16 output rows are the int32 lanes of two registers, one for each half of a line. A kernel computes integer sums by a class:
//   kBits, kAffine, kHalves, kRows   width, mapping, whether groups may end in the middle of a block, rows at once
//   kStarts                          whether sums start at values prepared before
//   kOffsetLate                      whether the start of a segment's sums is added at the segment's end
//   kAsks                            whether the tile checks for mins at run time; kAffine is false then
//   begin(layout, memory)            called once; memory for 2 * kRows registers
//   start(row, value)                begins a segment. value: of one row its sum of activations, of several that of starts()
//   starts(affine)                   several rows: the start values of a segment's sums
//   Input, kInterleaved              activations: int8_t as in the call, or int16_t with the rows of a tile interleaved
//   add<First, Lines>(block, a)      adds the products of some lines of a block. a: the block's activations, of each row; with
//                                    kInterleaved the first of all rows
//   next_block()                     called between two blocks of a segment, without kHalves
//   end(totals)                      the segment's sums, for each row and half of a line
//
// A segment's t * I is added to the sum of the group's earlier segments, which is zero at the start of a group. So a group of
// one segment and the last segment of a longer group run the same code, and no register is needed during the products. With 4
// rows both the products and the float sums are in memory: instructions read them as operands, and only stores are extra.
#pragma once

#include <immintrin.h>

#include <utility>

#include "../bits/simd_avx2.h"
#include "../bits/unpack_avx2.h"
#include "../ukernel.h"
#include "dispatch.h"
#include "tiles_of_rows.h"
#include "walk_x86.h"

namespace lowbit {
namespace {

LOWBIT_INLINE inline __m256i broadcast4(const void* at) {
  int32_t word;
  std::memcpy(&word, at, 4);
  return _mm256_set1_epi32(word);
}

// The part of a segment's sums that comes from the offset of symmetric codes. `a_sum` points to the sum of activations.
template <int Bits>
LOWBIT_INLINE inline __m256i offset(const int32_t* a_sum) {
  constexpr int kShift = Bits == 1 ? 0 : is_by_table(Bits) ? 7 : Bits - 1;
  static_assert(1 << kShift == level_offset(Bits));
  return _mm256_slli_epi32(broadcast4(a_sum), kShift);
}

// Integer sums. GCC takes the lanes of __m256i to be 64 bits wide. If a loop keeps a sum as __m256i and adds to its 32-bit
// lanes, GCC 12 copies it to another register and back in every iteration.
using Sums32 = uint32_t __attribute__((vector_size(32)));
using Sums16 = uint16_t __attribute__((vector_size(32)));

// Hides the origin of a pointer from the compiler. Otherwise each address in a loop becomes an induction variable, and there
// are too few registers.
template <class T>
LOWBIT_INLINE inline void forget(T*& pointer) {
  __asm__("" : "+r"(pointer));
}

// Calls body(constant) for 0 to Count - 1. In loops that GCC 12 unrolls late, indexed arrays stay in memory.
template <int Count, class Body>
LOWBIT_INLINE inline void unrolled(Body body) {
  [&]<int... I>(std::integer_sequence<int, I...>) LOWBIT_INLINE {
    (body(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, Count>());
}

// Forces a sum to be computed here. Otherwise the compiler reorders additions, and keeps the addends in registers or memory.
template <class Vector>
LOWBIT_INLINE inline void settle(Vector& sum) {
  __asm__("" : "+x"(sum));
}

// Whether one template serves weights with and without mins: it checks for them at the end of each group, which is cheap with
// more than one row. Not at 1 bit, where the value of a symmetric code differs by a factor of two.
constexpr bool asks_for_mins(int bits, int rows) { return bits != 1 && !is_by_table(bits) && rows > 1; }

// The start of a segment's sums: a multiple of its sum of activations, as an int32, or as an int16 in the lower lane or in both
// lanes of a pair. Computed once for all panels of a call.
struct Starts {
  enum Lanes { word, lower, both };
  int32_t factor;
  Lanes lanes;

  int32_t of(int32_t a_sum) const {
    const uint32_t value = static_cast<uint32_t>(factor * a_sum), low = value & 0xffffu;
    return static_cast<int32_t>(lanes == word ? value : lanes == lower ? low : low | low << 16);
  }
};

// The sums of some rows of activations over one panel, for walk_segments().
template <class Sums>
struct Tile {
  static constexpr int kRows = Sums::kRows, kBits = Sums::kBits;
  static constexpr int64_t kBlockBytes = code_bits(kBits) * kLineBytes;
  static constexpr int64_t kStep = kBlockInputs * (Sums::kInterleaved ? kRows : 1);  // step of the activations between blocks
  static constexpr int64_t kUnpackedBytes = kBlockLines * kLineBytes;  // of a block
  using Input = typename Sums::Input;

  const float* a_scales;  // of the current segment, first row
  const int32_t* starts;  // one row: the sums of activations
  const float* group_sums;
  int64_t segments, groups, stride;  // distance between rows: of a_scales and starts, of group_sums, of the activations
  const uint8_t *block, *unpacked;
  Float16 (*acc)[kRows], (*products)[kRows];
  bool mins;
  Sums sums;

  LOWBIT_INLINE bool has_mins() const { return Sums::kAsks ? mins : Sums::kAffine; }
  LOWBIT_INLINE int64_t group_bytes() const { return lowbit::group_bytes(has_mins()); }

  LOWBIT_INLINE void begin(const LinearArgs& args, int64_t row, const int32_t* first_starts, Float16 (&floats)[2][kRows],
                           Sums32* memory) {
    segments = args.layout.segments;
    groups = args.layout.groups;
    stride = args.layout.blocks * kBlockInputs;
    mins = lowbit::has_mins(args.layout.mapping);
    a_scales = args.scales + row * segments;
    starts = first_starts;
    if (has_mins()) group_sums = args.group_sums + row * groups;
    sums.begin(args.layout, memory);
    if constexpr (Sums::kUnpacked) unpacked = static_cast<const uint8_t*>(args.scratch);
    acc = &floats[0];
    products = &floats[1];
    for (int i = 0; i < kRows; ++i) (*acc)[i].half[0] = (*acc)[i].half[1] = _mm256_setzero_ps();
    clear_products();
    in_memory();
  }

  // Forces the float sums into memory here. Otherwise the compiler moves them between registers and memory.
  LOWBIT_INLINE void in_memory() {
    if constexpr (kRows > 2) __asm__("" : "+m"(*acc), "+m"(*products));
  }

  LOWBIT_INLINE void clear_products() {
    for (int i = 0; i < kRows; ++i) (*products)[i].half[0] = (*products)[i].half[1] = _mm256_setzero_ps();
  }

  LOWBIT_INLINE void start() {
    forget(a_scales);
    forget(starts);
    for (int i = 0; i < kRows; ++i) sums.start(i, starts + i * segments);
  }

  LOWBIT_INLINE void begin_block(const uint8_t* at) {
    block = at;
    if constexpr (Sums::kUnpacked) {
      forget(unpacked);
      block = unpacked;
      unpacked += kUnpackedBytes;
    }
  }

  template <int First, int Lines>
  LOWBIT_INLINE void add(const Input* a) {
    if constexpr (Sums::kInterleaved) {
      sums.template add<First, Lines>(block, a);
    } else {
      const int8_t* rows[kRows];
      for (int i = 0; i < kRows; ++i) {
        rows[i] = i == 0 ? a : rows[i - 1] + stride;
        if constexpr (kRows > 1) forget(rows[i]);
      }
      sums.template add<First, Lines>(block, rows);
    }
  }

  LOWBIT_INLINE void next_block() { sums.next_block(); }

  // Ends a segment. sum: per row the sum of t * I over the group's segments so far.
  LOWBIT_INLINE void end(Float16 (&sum)[kRows]) {
    Sums32 totals[kRows][2];
    sums.end(totals);
    for (int i = 0; i < kRows; ++i) {
      const __m256 a_scale = _mm256_broadcast_ss(a_scales + i * segments);
      for (int h = 0; h < 2; ++h) {
        __m256i total = reinterpret_cast<__m256i>(totals[i][h]);
        if constexpr (Sums::kOffsetLate && kRows > 1) {
          total = _mm256_add_epi32(total, broadcast4(starts + i * segments));
        } else if constexpr (Sums::kOffsetLate && !Sums::kAffine) {
          total = _mm256_sub_epi32(total, offset<kBits>(starts));
        }
        sum[i].half[h] = _mm256_fmadd_ps(a_scale, _mm256_cvtepi32_ps(total), (*products)[i].half[h]);
      }
    }
    ++a_scales;
    ++starts;
  }

  // Ends a segment that is not the last of its group.
  LOWBIT_INLINE void end_segment() {
    Float16 sum[kRows];
    end(sum);
    for (int i = 0; i < kRows; ++i) (*products)[i] = sum[i];
    in_memory();
  }

  // Ends a group and its last segment.
  LOWBIT_INLINE void finish(const uint8_t* scales) { has_mins() ? finish_with<true>(scales) : finish_with<false>(scales); }

 private:
  template <bool Mins>
  LOWBIT_INLINE void finish_with(const uint8_t* scales) {
    const Float16 scale = load16<DType::f16>(scales);
    Float16 sum[kRows];
    end(sum);
    for (int i = 0; i < kRows; ++i) {
      for (int h = 0; h < 2; ++h) (*acc)[i].half[h] = _mm256_fmadd_ps(scale.half[h], sum[i].half[h], (*acc)[i].half[h]);
      if constexpr (Mins) {
        const Float16 min = load16<DType::f16>(scales + 2 * kPanelRows);
        const __m256 a_sum = _mm256_broadcast_ss(group_sums + i * groups);
        for (int h = 0; h < 2; ++h) (*acc)[i].half[h] = _mm256_fmadd_ps(min.half[h], a_sum, (*acc)[i].half[h]);
      }
    }
    if constexpr (Mins) ++group_sums;
    in_memory();
  }
};

// Walks the blocks of a panel, each group from its first to its last input, and calls ahead(block) before each block. walk() of
// walk_x86.h ends a group apart from its last segment, which would store the products once more here. With both ways in one
// function GCC 12 compiled some tiles to up to 6 % more instructions.
// Groups::one_segment is for one row, for which the work per group is short: the number of its blocks is a constant. Several
// rows use Groups::segments instead.
template <Groups Kind, class Tile, class Ahead>
LOWBIT_INLINE inline void walk_segments(const Layout& layout, const uint8_t* at, const typename Tile::Input* a, Tile& tile,
                                        Ahead ahead) {
  constexpr int64_t kHalfLines = kBlockLines / 2;
  const auto end_group = [&]() LOWBIT_INLINE {
    tile.finish(at);
    at += tile.group_bytes();
  };
  if constexpr (Kind == Groups::halves) {
    for (int64_t groups = layout.groups; groups > 0; groups -= 2, a += Tile::kStep) {
      ahead(at);
      tile.start();
      tile.begin_block(at);
      tile.template add<0, kHalfLines>(a);
      const uint8_t* scales = at + Tile::kBlockBytes;
      tile.finish(scales);
      scales += tile.group_bytes();
      if (groups > 1) {
        tile.start();
        tile.template add<kHalfLines, kHalfLines>(a);
        tile.finish(scales);
        scales += tile.group_bytes();
      }
      at = scales;
      forget(at);
      forget(a);
    }
  } else if constexpr (Kind != Groups::anywhere) {
    constexpr int64_t kSegmentBlocks = kSegmentInputs / kBlockInputs;
    const int64_t group_blocks = layout.group_inputs() / kBlockInputs;
    int64_t blocks = layout.blocks;
    const auto add_block = [&]() LOWBIT_INLINE {
      ahead(at);
      tile.begin_block(at);
      tile.template add<0, kBlockLines>(a);
      at += Tile::kBlockBytes;
      a += Tile::kStep;
      forget(at);
      forget(a);
    };
    if constexpr (Kind == Groups::one_segment) {
      static_assert(kSegmentBlocks == 2);
      if (group_blocks == 2) {
        for (; blocks >= 2; blocks -= 2) {
          tile.start();
          add_block();
          tile.next_block();
          add_block();
          end_group();
        }
      }
      for (; blocks > 0; --blocks) {
        tile.start();
        add_block();
        end_group();
      }
      return;
    }
    for (int64_t group = 0; group < layout.groups; ++group) {
      int64_t remaining = blocks < group_blocks ? blocks : group_blocks;
      const bool is_long = remaining > kSegmentBlocks;
      blocks -= remaining;
      while (true) {
        tile.start();
        int64_t count = remaining < kSegmentBlocks ? remaining : kSegmentBlocks;
        remaining -= count;
        while (true) {
          add_block();
          if (--count == 0) break;
          tile.next_block();
        }
        if (remaining == 0) break;
        tile.end_segment();
      }
      end_group();
      if (is_long) tile.clear_products();
    }
  } else {
    for (const GroupPart part : GroupParts(layout)) {
      tile.start();
      for (int64_t half = part.begin; half < part.end; ++half) {
        if (half % 2 == 0) {
          ahead(at);
          tile.begin_block(at);
          at += Tile::kBlockBytes;
          tile.template add<0, kHalfLines>(a);
        } else {
          tile.template add<kHalfLines, kHalfLines>(a);
          a += Tile::kStep;
        }
      }
      if (part.last) {
        end_group();
        tile.clear_products();
      } else {
        tile.end_segment();
      }
    }
  }
}

// The activations of row 0: those of the call, or those that the kernel converted.
template <class Sums>
LOWBIT_INLINE inline const typename Sums::Input* inputs_of(const LinearArgs& args) {
  if constexpr (Sums::kInterleaved) return static_cast<const typename Sums::Input*>(args.activations);
  else return args.a;
}

// Stores a tile's float sums to the call's outputs. Not inlined: it runs once per panel, and every tile would contain a copy.
__attribute__((noinline)) inline void store_rows(const LinearArgs& args, int64_t panel, int64_t row, int rows,
                                                 const Float16* sums) {
  const Layout& layout = args.layout;
  const uint8_t* head = args.panels + panel * layout.panel_bytes + layout.head_offset;
  const int64_t column = panel * kPanelRows;
  const Float16 row_scale = load16<DType::f32>(head);
  const Float16 bias = load16<DType::f32>(head + 8 * kPanelRows);
  for (int i = 0; i < rows; ++i) {
    Float16 y;
    for (int h = 0; h < 2; ++h) y.half[h] = _mm256_fmadd_ps(row_scale.half[h], sums[i].half[h], bias.half[h]);
    store_first(args.out, args.out_dtype, (row + i) * args.out_stride + column, y, layout.n - column);
  }
}

// Multiplies some rows of activations by one panel.
template <class Sums, Groups Kind>
__attribute__((noinline)) void run_tile(const LinearArgs& args, int64_t panel, int64_t row, int64_t number, int64_t tiles,
                                        const int32_t* starts) {
  const Layout& layout = args.layout;
  Float16 floats[2][Sums::kRows];
  Sums32 memory[2 * Sums::kRows];
  Tile<Sums> tile;
  tile.begin(args, row, starts, floats, memory);
  // Measured on Zen 4: two rows of 1 or 2 bits are faster without prefetch. Measured on Zen 3: with prefetch, one row from
  // memory takes 0.8 to 0.9 times as long.
  constexpr bool kAhead = Sums::kRows > 2 || (Sums::kRows == 2 && code_bits(Sums::kBits) > 2);
  const uint8_t* const at = args.panels + panel * layout.panel_bytes;
  const auto* const a = inputs_of<Sums>(args) + row * tile.stride;
  if constexpr (Sums::kRows == 1) {
    walk_segments<Kind>(layout, at, a, tile, [](const uint8_t* block) LOWBIT_INLINE {
      constexpr int64_t kBytes = 2 << 10;  // past the last panel too: a prefetch does not fault
      for (int line = 0; line < code_bits(Sums::kBits); ++line) {
        _mm_prefetch(reinterpret_cast<const char*>(block) + line * kLineBytes + kBytes, _MM_HINT_T0);
      }
    });
  } else if constexpr (kAhead) {
    Prefetch prefetch(layout, at, panel + 1 == args.panel_end, number, tiles);
    walk_segments<Kind>(layout, at, a, tile, [&](const uint8_t*) LOWBIT_INLINE { prefetch(); });
  } else {
    walk_segments<Kind>(layout, at, a, tile, [](const uint8_t*) LOWBIT_INLINE {});
  }
  store_rows(args, panel, row, Sums::kRows, floats[0]);
}

using RunTile = void (*)(const LinearArgs&, int64_t panel, int64_t row, int64_t number, int64_t tiles, const int32_t* starts);

// Multiplies one row at a time.
inline void run_single_rows(const LinearArgs& args, RunTile run_tile) {
  for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel) {
    for (int64_t row = 0; row < args.m; ++row) run_tile(args, panel, row, 0, 1, args.sums + row * args.layout.segments);
  }
}

template <template <int Bits, bool Affine, bool Halves, int Rows> class Sums, int Bits>
void run_one(const LinearArgs& args) {
  const int64_t group_inputs = args.layout.group_inputs();
  dispatch<Bits>(args.layout, [&](auto bits, auto affine, auto halves) LOWBIT_INLINE {
    using OneRow = Sums<bits(), affine(), halves(), 1>;
    if constexpr (halves()) {
      run_single_rows(args, group_inputs == kHalfInputs ? run_tile<OneRow, Groups::halves>
                                                        : run_tile<OneRow, Groups::anywhere>);
    } else {
      run_single_rows(args, group_inputs <= kSegmentInputs ? run_tile<OneRow, Groups::one_segment>
                                                           : run_tile<OneRow, Groups::segments>);
    }
  });
}

using RunRow = void (*)(const LinearArgs&);

constexpr int kMostRows = 4;  // rows of a tile

// Multiplies tiles of several rows, by run_tile[rows - 2]. The start values are stored after the first `used` bytes of the
// scratch memory, which has kLinearScratchBytes more. `unpack` is called for each panel unless it is null.
__attribute__((noinline)) inline void run_tiles(const LinearArgs& args, const RunTile (&run_tile)[kMostRows - 1],
                                                RunRow one_row, const Starts* starts, int64_t used = 0,
                                                void (*unpack)(const Layout&, const uint8_t* at, uint8_t* to) = nullptr) {
  const Layout& layout = args.layout;
  int32_t* const values = reinterpret_cast<int32_t*>(static_cast<char*>(args.scratch) + used);
  const int64_t fitting = kLinearScratchBytes / int64_t{sizeof(int32_t)} / layout.segments / kMostRows * kMostRows;
  const int64_t most = starts == nullptr ? args.m : fitting;
  if (most == 0) return one_row(args);  // more segments than any model has
  for (int64_t first = 0; first < args.m; first += most) {
    const int64_t count = args.m - first < most ? args.m - first : most;
    if (starts != nullptr) {
      const int32_t* const sums = args.sums + first * layout.segments;
      for (int64_t i = 0; i < count * layout.segments; ++i) values[i] = starts->of(sums[i]);
    }
    for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel) {
      const uint8_t* const at = args.panels + panel * layout.panel_bytes;
      if (unpack != nullptr) unpack(layout, at, static_cast<uint8_t*>(args.scratch));
      for_each_tile<kMostRows>(count, [&](int64_t row, int rows, int64_t number, int64_t tiles) {
        if (rows == 1) return one_row(one_row_of(args, first + row, panel, panel + 1));
        run_tile[rows - 2](args, panel, first + row, number, tiles, values + row * layout.segments);
      });
    }
  }
}

// Whether groups end in the middle of blocks and do not have 16 inputs, which no common format has. Such calls take one row
// at a time.
inline bool end_anywhere(const Layout& layout) {
  return layout.group_inputs() % kBlockInputs != 0 && layout.group_inputs() != kHalfInputs;
}

// `one_row`: the kernel for a single row.
template <template <int Bits, bool Affine, bool Halves, int Rows> class Sums, int Bits>
void run_many(const LinearArgs& args, RunRow one_row) {
  if (args.m == 1 || end_anywhere(args.layout)) return one_row(args);
  dispatch<Bits>(args.layout, [&](auto bits, auto affine, auto halves) LOWBIT_INLINE {
    constexpr bool kAffine = affine() && !Sums<bits(), false, halves(), 2>::kAsks;
    constexpr Groups kKind = halves() ? Groups::halves : Groups::segments;
    using Two = Sums<bits(), kAffine, halves(), 2>;
    using Three = Sums<bits(), kAffine, halves(), 3>;
    using Four = Sums<bits(), kAffine, halves(), 4>;
    static constexpr RunTile kTiles[] = {run_tile<Two, kKind>, run_tile<Three, kKind>, run_tile<Four, kKind>};
    static constexpr Starts kStarts = Two::starts(affine());
    run_tiles(args, kTiles, one_row, Two::kStarts ? &kStarts : nullptr);
  });
}

}  // namespace
}  // namespace lowbit
