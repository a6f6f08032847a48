// linear_a8w<b>_32x32_avx512vnni: many rows of int8 activations times b-bit weights. Two panels at a time are unpacked to bytes
// once for all tiles of a call.
//
//   unpacked panel  for each group its blocks, 8 lines of 16 rows x 4 bytes, then its scales and (affine) its mins,
//                   in float32
//   tile            5 or 6 rows of activations x 2 panels: 10 or 12 integer sums and as many float sums. A float sum is that of
//                   the row, or of the group if groups have several segments. A broadcast serves two products
//   stream          of each tile: the values of its segments and groups, a register with a value per row each
//
// Activations are read in place. Copies in the order of the broadcasts were as fast in long calls, but threads divide a matrix
// into calls of a few panels, and each would copy all activations. Reading 6 rows does not exceed a set of the first-level
// cache, of 8 lines or more, even if rows are a multiple of its ways apart.
//
// Integer sums start at the bits of c (ukernel.h), so a group's first segment costs one fma and no conversion.
//
// Measured on Zen 5, which multiplies two registers per cycle: 1.05 to 1.2 times as fast as tiles of 8 rows and one panel from
// 64 rows on, equally fast at 32. With more than kMostInputs the unpacked panels and the activations no longer fit the
// second-level cache, and it is slower (0.9). Pieces of k were slower in all cases, because sums then pass through memory.

#include "../bits/widths.h"
#include "tiles_avx512.h"

namespace lowbit {
namespace {

constexpr int kUnpackedRows = 6, kLeastUnpackedRows = 5, kUnpackedPanels = 2;
constexpr int kPlaces = 8;  // rows per register of a transposition; streams have as many
constexpr int64_t kMostInputs = 6144;
constexpr float kShift = 0x1.8p23f;
constexpr int32_t kShiftBits = 0x4b400000;

bool supports(const void*, const Layout& layout, int64_t, IsaBits) { return layout.k <= kMostInputs; }

constexpr int64_t unpacked_group_bytes(bool affine) { return (affine ? 2 : 1) * kPanelRows * int64_t{sizeof(float)}; }

constexpr int64_t unpacked_bytes(const Layout& layout) {
  return layout.blocks * kBlockLines * kLineBytes + layout.groups * unpacked_group_bytes(has_mins(layout.mapping));
}

// Number of rows per chunk: the chunk's activations stay in a second-level cache together with the unpacked panels, and the
// rows are enough to make unpacking cheap. Chunks are cut into tiles.
int64_t most_rows(const Layout& layout) {
  constexpr int64_t kBytes = 384 << 10, kLeast = 48;
  const int64_t fitting = kBytes / (layout.blocks * kBlockInputs);
  return fitting < kLeast ? kLeast : fitting;
}

constexpr int64_t tiles_of(int64_t rows) { return (rows + kUnpackedRows - 1) / kUnpackedRows; }

// The values that a tile reads for its segments and groups, in the order of use, one register with a value per row each.
// Segment: the start of its integer sums (symmetric), then t; the first of a group also -c * t, and the last of a group
// also S (affine).
constexpr int64_t stream_bytes(const Layout& layout) {
  const bool affine = has_mins(layout.mapping);
  return ((affine ? 1 : 2) * layout.segments + (affine ? 2 : 1) * layout.groups) * kPlaces * int64_t{sizeof(float)};
}

int64_t scratch_bytes(const void*, const Layout& layout, int64_t m, int) {
  const int64_t tiles = tiles_of(m < most_rows(layout) ? m : most_rows(layout));
  const int64_t bytes = kUnpackedPanels * unpacked_bytes(layout) + tiles * stream_bytes(layout);
  return bytes < kLinearScratchBytes ? kLinearScratchBytes : (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

// Transposes 8 x 8 words.
LOWBIT_INLINE inline void transpose(__m256i (&words)[kPlaces]) {
  __m256i pair[kPlaces], four[kPlaces];
  for (int i = 0; i < kPlaces; i += 2) {
    pair[i] = _mm256_unpacklo_epi32(words[i], words[i + 1]);
    pair[i + 1] = _mm256_unpackhi_epi32(words[i], words[i + 1]);
  }
  for (int i = 0; i < kPlaces; i += 4) {
    for (int h = 0; h < 2; ++h) {
      four[i + 2 * h] = _mm256_unpacklo_epi64(pair[i + h], pair[i + 2 + h]);
      four[i + 2 * h + 1] = _mm256_unpackhi_epi64(pair[i + h], pair[i + 2 + h]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    words[i] = _mm256_permute2x128_si256(four[i], four[4 + i], 0x20);
    words[4 + i] = _mm256_permute2x128_si256(four[i], four[4 + i], 0x31);
  }
}

void make_stream(const LinearArgs& args, int level_offset, int64_t row, int rows, float* to) {
  const Layout& layout = args.layout;
  const bool affine = has_mins(layout.mapping);
  // Reads values [at, at + 8) of each row, of which there are `count`, into a register for each number.
  const auto read = [&](const void* from, int64_t count, int64_t at, __m256i (&values)[kPlaces]) LOWBIT_INLINE {
    const __mmask8 wanted = static_cast<__mmask8>(count - at < kPlaces ? (1 << (count - at)) - 1 : 0xff);
    const int32_t* its = static_cast<const int32_t*>(from) + row * count + at;
    for (int i = 0; i < kPlaces; ++i, its += count) {
      values[i] = _mm256_maskz_loadu_epi32(i < rows ? wanted : __mmask8{0}, its);
    }
    transpose(values);
  };
  const auto put = [&](__m256 values) LOWBIT_INLINE {
    _mm256_store_ps(to, values);
    to += kPlaces;
  };
  __m256i sums[kPlaces], scales[kPlaces], group_sums[kPlaces];
  for (const GroupPart segment : GroupParts(layout)) {
    const int64_t place = segment.index % kPlaces, group_place = segment.group % kPlaces;
    if (place == 0) {
      if (!affine) read(args.sums, layout.segments, segment.index, sums);
      read(args.scales, layout.segments, segment.index, scales);
    }
    if (!affine) {
      const __m256i start = _mm256_mullo_epi32(sums[place], _mm256_set1_epi32(-level_offset));
      put(_mm256_castsi256_ps(_mm256_add_epi32(start, _mm256_set1_epi32(kShiftBits))));
    }
    const __m256 t = _mm256_castsi256_ps(scales[place]);
    put(t);
    if (segment.first) put(_mm256_mul_ps(t, _mm256_set1_ps(-kShift)));
    if (affine && segment.last) {
      if (group_place == 0) read(args.group_sums, layout.groups, segment.group, group_sums);
      put(_mm256_castsi256_ps(group_sums[group_place]));
    }
  }
}

template <int Bits, bool Affine>
void unpack_panel(const Layout& layout, const uint8_t* at, uint8_t* to) {
  Levels<Bits> levels;
  levels.load(layout);
  const int64_t group_halves = (layout.group_inputs() + kHalfInputs - 1) / kHalfInputs;
  int64_t end = group_halves;  // of the current group, in half blocks
  int64_t groups = layout.groups;
  const auto end_group = [&]() LOWBIT_INLINE {
    for (int part = 0; part < (Affine ? 2 : 1); ++part, at += 2 * kPanelRows, to += kPanelRows * sizeof(float)) {
      _mm512_store_ps(to, load_scales(at));
    }
    end += group_halves;
    --groups;
  };
  for (int64_t half = 2; half <= 2 * layout.blocks; half += 2) {
    __m512i line[8];
    unpack_block<Bits, Affine, true>(at, levels, line);
    at += code_bits(Bits) * kLineBytes;
    for (int j = 0; j < kBlockLines; ++j, to += kLineBytes) _mm512_store_si512(to, line[j]);
    while (end <= half && groups > 0) end_group();
  }
  if (groups > 0) end_group();  // k ends within the last group
}

// A tile on unpacked panels, for walk().
template <bool Affine, Groups Kind, int Rows, int Panels>
struct UnpackedTile {
  static constexpr int64_t kBlockBytes = kBlockLines * kLineBytes;
  static constexpr int kPanels = 0;
  static constexpr bool kLoops = false;

  const float* stream;
  int64_t stride;       // distance between rows of activations
  int64_t panel_bytes;  // from one unpacked panel to the next
  const uint8_t* block;
  __m512* acc;
  Int16 sums[Rows][Panels];
  __m512 products[Rows][Panels];
  bool first;  // whether the segment is the first of its group

  LOWBIT_INLINE void start(int64_t) {
    for (int i = 0; i < Rows; ++i) {
      const Int16 start = Affine ? broadcast(kShiftBits) : reinterpret_cast<Int16>(_mm512_set1_ps(stream[i]));
      for (int p = 0; p < Panels; ++p) sums[i][p] = start;
    }
    if constexpr (!Affine) stream += kPlaces;
  }

  static constexpr int64_t group_bytes() { return unpacked_group_bytes(Affine); }
  static constexpr bool has_mins() { return false; }  // finish() and finish_only() add them
  LOWBIT_INLINE void add_mins(int64_t, const uint8_t*) {}

  LOWBIT_INLINE void begin_block(const uint8_t* at) { block = at; }

  template <int First, int Lines>
  LOWBIT_INLINE void add(const int8_t* a) {
    // One pointer for two rows, and one for each panel, whose origins are hidden from the compiler. Otherwise it would keep an
    // offset per line, and run out of registers.
    int64_t step = stride;
    __asm__("" : "+r"(step));
    const int8_t* rows[(Rows + 1) / 2];
    const uint8_t* lines[Panels];
    for (int i = 0; i < (Rows + 1) / 2; ++i) {
      rows[i] = i == 0 ? a : rows[i - 1] + 2 * step;
      __asm__("" : "+r"(rows[i]));
    }
    for (int p = 0; p < Panels; ++p) {
      lines[p] = block + p * panel_bytes;
      __asm__("" : "+r"(lines[p]));
    }
    for (int j = First; j < First + Lines; ++j) {
      __m512i line[Panels];
      for (int p = 0; p < Panels; ++p) line[p] = _mm512_load_si512(lines[p] + j * kLineBytes);
      for (int i = 0; i < Rows; ++i) {
        for (int p = 0; p < Panels; ++p) sums[i][p] = add_products(sums[i][p], line[p], rows[i / 2] + i % 2 * step + 4 * j);
      }
    }
  }

  LOWBIT_INLINE void begin_group() { first = true; }

  LOWBIT_INLINE void end_segment(int64_t) {
    if (first) {
      for_each_sum([&](int i, int p) LOWBIT_INLINE { products[i][p] = first_product(i, p); });
      stream += 2 * kPlaces;
      first = false;
      return;
    }
    for_each_sum([&](int i, int p) LOWBIT_INLINE {
      const __m512 integer = _mm512_sub_ps(reinterpret_cast<__m512>(sums[i][p]), _mm512_set1_ps(kShift));
      products[i][p] = _mm512_fmadd_ps(_mm512_set1_ps(stream[i]), integer, products[i][p]);
    });
    stream += kPlaces;
  }

  LOWBIT_INLINE void finish(int64_t, const uint8_t* scales) {
    add_to_rows(scales, [&](int i, int p) LOWBIT_INLINE { return products[i][p]; });
  }

  LOWBIT_INLINE void finish_only(int64_t, const uint8_t* scales) {
    const float* const its = stream;
    stream += 2 * kPlaces;
    add_to_rows(scales, [&](int i, int p) LOWBIT_INLINE { return first_product(i, p, its); });
  }

  // The float sum of a row and panel.
  LOWBIT_INLINE __m512& row_sum(int i, int p) {
    if constexpr (Kind == Groups::one_segment) {
      return products[i][p];
    } else {
      return acc[i * Panels + p];
    }
  }

  template <class Body>
  LOWBIT_INLINE static void for_each_sum(Body body) {
    for (int i = 0; i < Rows; ++i) {
      for (int p = 0; p < Panels; ++p) body(i, p);
    }
  }

 private:
  LOWBIT_INLINE __m512 first_product(int i, int p, const float* its) const {
    return _mm512_fmadd_ps(_mm512_set1_ps(its[i]), reinterpret_cast<__m512>(sums[i][p]), _mm512_set1_ps(its[kPlaces + i]));
  }
  LOWBIT_INLINE __m512 first_product(int i, int p) const { return first_product(i, p, stream); }

  // Adds a group's products times its scales to the rows' sums; affine: also its mins times the sums of activations.
  template <class Products>
  LOWBIT_INLINE void add_to_rows(const uint8_t* scales, Products products_of) {
    __m512 scale[Panels], min[Panels];
    for (int p = 0; p < Panels; ++p) {
      scale[p] = _mm512_load_ps(scales + p * panel_bytes);
      min[p] = Affine ? _mm512_load_ps(scales + p * panel_bytes + kPanelRows * sizeof(float)) : scale[p];
    }
    for_each_sum([&](int i, int p) LOWBIT_INLINE {
      __m512 sum = _mm512_fmadd_ps(scale[p], products_of(i, p), row_sum(i, p));
      if constexpr (Affine) sum = _mm512_fmadd_ps(min[p], _mm512_set1_ps(stream[i]), sum);
      row_sum(i, p) = sum;
    });
    if constexpr (Affine) stream += kPlaces;
  }
};

using RunUnpackedTile = void (*)(const LinearArgs&, const uint8_t* unpacked, int64_t panel, int64_t row, const float* stream,
                                 PrefetchNext ahead);

// Multiplies a tile by unpacked panels, for every width.
template <bool Affine, Groups Kind, int Rows, int Panels>
void unpacked_tile(const LinearArgs& args, const uint8_t* unpacked, int64_t panel, int64_t row, const float* stream,
                   PrefetchNext ahead) {
  alignas(64) __m512 acc[Rows * Panels];
  UnpackedTile<Affine, Kind, Rows, Panels> tile;
  tile.stride = args.layout.blocks * kBlockInputs;
  tile.stream = stream;
  tile.panel_bytes = unpacked_bytes(args.layout);
  tile.acc = acc;
  __asm__("" : "+r"(tile.acc));  // otherwise the compiler would spill other sums
  tile.for_each_sum([&](int i, int p) LOWBIT_INLINE { tile.row_sum(i, p) = _mm512_setzero_ps(); });
  walk<Kind>(args.layout, unpacked, args.a + row * tile.stride, tile, ahead);
  for (int p = 0; p < Panels; ++p) {
    __m512 sums[Rows];
    for (int i = 0; i < Rows; ++i) sums[i] = tile.row_sum(i, p);
    store_rows(args, panel + p, row, Rows, sums);
  }
}

// Tiles of 6 and 5 rows, and of two panels and one.
struct Tiles {
  RunUnpackedTile six, five, six_of_one_panel, five_of_one_panel;
};

template <bool Affine>
Tiles tiles_for(const Layout& layout) {
  const auto with = [](auto kind) -> Tiles {
    return {unpacked_tile<Affine, kind(), 6, 2>, unpacked_tile<Affine, kind(), 5, 2>, unpacked_tile<Affine, kind(), 6, 1>,
            unpacked_tile<Affine, kind(), 5, 1>};
  };
  if (layout.group_inputs() % kBlockInputs != 0) return with(std::integral_constant<Groups, Groups::anywhere>());
  if (layout.group_inputs() > kSegmentInputs) return with(std::integral_constant<Groups, Groups::segments>());
  return with(std::integral_constant<Groups, Groups::one_segment>());
}

// Runs a call, for every width: the arguments contain all that depends on the width.
void run_unpacked(const LinearArgs& args, int level_offset, void (*unpack)(const Layout&, const uint8_t* at, uint8_t* to)) {
  const Layout& layout = args.layout;
  const Tiles run = has_mins(layout.mapping) ? tiles_for<true>(layout) : tiles_for<false>(layout);
  const int64_t chunks = (args.m + most_rows(layout) - 1) / most_rows(layout), chunk_rows = (args.m + chunks - 1) / chunks;
  uint8_t* const unpacked = static_cast<uint8_t*>(args.scratch);
  float* const streams = reinterpret_cast<float*>(unpacked + kUnpackedPanels * unpacked_bytes(layout));
  for (int64_t first = 0; first < args.m; first += chunk_rows) {
    const int64_t count = args.m - first < chunk_rows ? args.m - first : chunk_rows;
    const int64_t tiles = tiles_of(count);
    // Calls body(number, row, rows) for all tiles, whose numbers of rows differ by at most one. A tile of fewer than 5 rows
    // also computes rows of a tile beside it.
    const auto for_each = [&](auto body) LOWBIT_INLINE {
      for (int64_t number = 0, row = first; number < tiles; ++number) {
        const int rows = static_cast<int>(count / tiles + (number < count % tiles));
        const int64_t last = args.m - kLeastUnpackedRows;
        body(number, row < last ? row : last, rows < kLeastUnpackedRows ? kLeastUnpackedRows : rows);
        row += rows;
      }
    };
    const auto stream_of = [&](int64_t number) { return streams + number * stream_bytes(layout) / int64_t{sizeof(float)}; };
    for_each([&](int64_t number, int64_t row, int rows) {
      make_stream(args, level_offset, row, rows, stream_of(number));
    });
    for (int64_t panel = args.panel_begin; panel < args.panel_end;) {
      const bool two = args.panel_end - panel >= kUnpackedPanels;
      const int64_t next = panel + (two ? kUnpackedPanels : 1), more = args.panel_end - next;
      for (int64_t p = panel; p < next; ++p) {
        unpack(layout, args.panels + p * layout.panel_bytes, unpacked + (p - panel) * unpacked_bytes(layout));
      }
      const int64_t bytes = (more < kUnpackedPanels ? more : kUnpackedPanels) * layout.panel_bytes;
      const RunUnpackedTile six = two ? run.six : run.six_of_one_panel, five = two ? run.five : run.five_of_one_panel;
      for_each([&](int64_t number, int64_t row, int rows) {
        const PrefetchNext ahead(layout, args.panels + next * layout.panel_bytes, bytes, number, tiles);
        (rows == kUnpackedRows ? six : five)(args, unpacked, panel, row, stream_of(number), ahead);
      });
      panel = next;
    }
  }
}

template <int Bits>
void run(const LinearArgs& args) {
  if (args.m < kLeastUnpackedRows) return one_row<Bits>().run(args);
  with_mapping<Bits>(args.layout.mapping, [&](auto bits, auto affine) {
    run_unpacked(args, level_offset(bits()), unpack_panel<bits(), affine()>);
  });
}

#define KERNEL(bits)                                                                                                \
  with_levels<LinearKernel>({"linear_a8w" #bits "_32x32_avx512vnni", kAvx512Vnni, Format::panel16, bits, 32, 32, \
                             run<bits>, 3, 1, supports, scratch_bytes})
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearUnpackedAvx512Vnni;
const Table<LinearKernel> kLinearUnpackedAvx512Vnni{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
