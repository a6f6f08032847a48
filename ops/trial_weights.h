// The weights of a trial: matrices of each kind that a kernel reads, in panel16 and in the kernel's format.
#pragma once

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "../kernels/pack.h"
#include "../kernels/registry.h"
#include "check.h"
#include "trial.h"

namespace lowbit {

// A matrix with `steps` times the rows that a kernel computes at once, plus `more` rows.
struct Case {
  int64_t k, group_size, steps, more;
};
// Whole blocks and groups; groups that end in the middle of a block, are cut short, or have several segments; long rows, few
// outputs, several steps.
constexpr Case kCases[] = {{128, 32, 1, 5},  {128, 64, 1, 5},  {128, 0, 1, 5},    {100, 32, 1, 5},   {100, 16, 1, 5},
                           {130, 48, 1, 5},  {70, 0, 1, 5},    {300, 128, 1, 5},  {16, 16, 0, 1},    {33, 32, 0, 17},
                           {520, 96, 1, 0},  {768, 256, 2, 17}, {1100, 0, 1, 5},  {2080, 64, 1, 1},  {4112, 128, 0, 17},
                           {4096, 32, 0, 16}};
// Cases with rows of weights of at most this length also run with the largest sums.
constexpr int64_t kShortRow = 300;

// Sizes to try if a kernel or format supports no case of a kind: all small ones, layers of published models, and vocabularies.
constexpr int64_t kOtherSizes[] = {8960,   11008,  29568,  32000,  32064,  49152,  50257,  50280,  50304,  51865,
                                   51866,  65024,  92416,  100352, 128256, 129280, 151552, 151936, 152064, 200064,
                                   201088, 248320, 250880, 256000, 262144, 262208};
constexpr int64_t kMostRegularSize = 32768;
inline int64_t next_size(int64_t size) { return size + (size < 64 ? 1 : size < 1024 ? 16 : size < 8192 ? 128 : 512); }
constexpr int64_t kGroupSizes[] = {32, 64, 128, 0, 16, 48, 256};
// Numbers of rows of activations, in addition to those at the edges of a kernel's tile.
constexpr int64_t kCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 128, 256, 512, 1024};

struct Counts {
  int64_t m[std::size(kCounts) + 3];
  int count = 0;
};

// The panels that a call computes. Of a large matrix, only the first and the last ones.
struct Range {
  int64_t begin, end;
};
struct Ranges {
  Range range[3];
  int count = 0;

  Ranges(int64_t panels, int64_t step) {
    const int64_t first = std::min(step, panels), last = std::max(first, (panels - 1) / step * step);
    range[count++] = {0, first};
    if (first < last && last - first <= 4 * step) range[count++] = {first, last};
    if (last < panels) range[count++] = {last, panels};
  }
  const Range* begin() const { return range; }
  const Range* end() const { return range + count; }
  int64_t panels() const {
    int64_t sum = 0;
    for (const Range& r : *this) sum += r.end - r.begin;
    return sum;
  }
};

// The description of the weights in an error.
struct WeightsText {
  char text[160];
};
inline WeightsText describe(const Layout& layout) {
  WeightsText result;
  std::snprintf(result.text, sizeof result.text, "%" PRId64 " x %" PRId64 " weights of %d bits, %s, group size %" PRId64,
                layout.n, layout.k, layout.bits, name_of(layout.mapping), layout.group_size);
  return result;
}

inline const char* rows_text(int64_t m) { return m == 1 ? "row of activations" : "rows of activations"; }

class TrialWeights {
 public:
  // A matrix in panel16, and in the format that the kernel reads.
  struct Setup {
    Layout layout, kernel_layout;
    const PackedFormat* format;  // null for panel16
    const uint8_t *panel16, *panels;
    Ranges ranges;
    DType type;
    int number;
    bool extreme;  // the largest sums, with codes and activations at their limits
  };

  explicit TrialWeights(const LoadedLibrary& library) : library_(library) {}

  // Calls try_kernel(setup, counts) for matrices of each kind that the kernel reads. `ask` returns the numbers of rows of
  // activations that the kernel supports with a layout: all candidates, or only whether there is one.
  template <class Kernel, class Ask, class Try>
  Status for_each(const Kernel& kernel, int64_t columns, bool is_asked, const Ask& ask, const Try& try_kernel) {
    const PackedFormat* format = nullptr;
    if (kernel.format != Format::panel16) {
      format = find_format(kernel.format);
      for (const PackedFormat& known : library_.formats) format = known.format == kernel.format ? &known : format;
    }
    bool was_run = false;  // with any mapping
    for (const Mapping mapping : kMappings) {
      if ((kernel.mappings & bit_of(mapping)) == 0) continue;
      if (has_table(mapping) && (!can_have_levels(kernel.bits) || format != nullptr)) continue;
      Kind kinds[4][std::size(kGroupSizes)];
      int number = 0;
      // Tries n x k weights. `*tried`: whether a kernel ran with them.
      const auto try_shape = [&](int64_t n, int64_t k, int64_t group_size, bool extreme, bool* tried) {
        Counts counts;
        Setup setup{{}, {}, format, nullptr, nullptr, {1, 1}, static_cast<DType>(number % 3), number, extreme};
        *tried = false;
        if (Status s = make(n, k, kernel.bits, group_size, mapping, number++ % 2 == 0, &setup.layout); !s.ok()) return s;
        setup.kernel_layout = setup.layout;
        if (format != nullptr && !vendor_layout(setup.layout, *format, &setup.kernel_layout).ok()) return Status();
        if (Status s = ask(setup.kernel_layout, true, &counts); !s.ok()) return s;
        if (counts.count == 0) return Status();
        setup.ranges = Ranges(setup.layout.panels, columns / kPanelRows);
        if (Status s = make_weights(&setup); !s.ok() || setup.panels == nullptr) return s;
        *tried = was_run = true;
        return try_kernel(setup, counts);
      };
      for (const bool extreme : {false, true}) {
        for (const Case& c : kCases) {
          if (extreme && c.k > kShortRow) break;
          bool tried;
          if (Status s = try_shape(c.steps * columns + c.more, c.k, c.group_size, extreme, &tried); !s.ok()) return s;
          const auto* group = std::find(std::begin(kGroupSizes), std::end(kGroupSizes), c.group_size);
          if (tried && group != std::end(kGroupSizes)) kinds[length_of(c.k)][group - kGroupSizes].was_tried = true;
        }
      }
      if (!is_asked && was_run) continue;
      if (Status s = search(kernel, format, mapping, ask, kinds); !s.ok()) return s;
      for (auto& groups : kinds) {
        for (Kind& kind : groups) {
          if (kind.was_tried || kind.n == 0) continue;
          bool tried;
          const int64_t group_size = kGroupSizes[&kind - groups];
          if (Status s = try_shape(kind.n, kind.k, group_size, number % 2 == 1, &tried); !s.ok()) return s;
        }
      }
    }
    if (was_run) return {};
    return Status::error("kernel '%s' was never run: it supports no matrix of the trial at load, neither the small ones nor "
                         "any of up to %" PRId64 " outputs and %" PRId64 " inputs that layers of published models have%s; "
                         "expected one",
                         kernel.name, *std::rbegin(kOtherSizes), kMostRegularSize,
                         format != nullptr ? ", or its format does not support them" : "");
  }

  // The reference for a format's tolerance: the sum of the magnitudes of all products and the bias.
  float magnitude(const Layout& layout, const float* x, int64_t column) const {
    double sum = layout.has_bias ? std::fabs(weights_.bias[column]) : 0.0;
    for (int64_t j = 0; j < layout.k; ++j) {
      const int64_t group = column * layout.groups + j / layout.group_inputs();
      const int code = weights_.codes[column * layout.k + j];
      const float integer = static_cast<float>(
          has_mins(layout.mapping) ? code : level_factor(layout.bits) * code - level_offset(layout.bits));
      const float min = has_mins(layout.mapping) ? weights_.mins[group] : 0.0f;
      sum += std::fabs(x[j] * (weights_.scales[group] * integer + min));
    }
    return static_cast<float>(sum);
  }

  // The numbers of a trial: activations continue the sequence of weights.
  Random& random() { return random_; }

  uint64_t checksum() const { return panel16_.checksum() * 31 + packed_.checksum(); }

 private:
  // Shapes of a kind. A few supported shapes are enough, but long rows have more segments, and groups have many cases.
  struct Kind {
    int64_t n = 0, k = 0;  // 0 if none was found
    bool was_tried = false;
  };
  static int length_of(int64_t k) { return k < 512 ? 0 : k < 2048 ? 1 : k < 8192 ? 2 : 3; }

  static Status make(int64_t n, int64_t k, int bits, int64_t group_size, Mapping mapping, bool has_bias, Layout* layout) {
    int8_t levels[kMostLevels];
    for (int i = 0; i < kMostLevels; ++i) levels[i] = static_cast<int8_t>(i * 16 - 120);
    return make_layout(n, k, bits, group_size, mapping, has_bias, layout, has_table(mapping) ? levels : nullptr);
  }

  // Finds the smallest supported matrix of each kind that was not tried.
  template <class Kernel, class Ask>
  Status search(const Kernel& kernel, const PackedFormat* format, Mapping mapping, const Ask& ask,
                Kind (&kinds)[4][std::size(kGroupSizes)]) {
    const auto consider = [&](int64_t n, int64_t k) {
      for (size_t i = 0; i < std::size(kGroupSizes); ++i) {
        Kind& kind = kinds[length_of(k)][i];
        if (kind.was_tried || (kind.n != 0 && kind.n * kind.k <= n * k)) continue;
        Layout layout;
        if (Status s = make(n, k, kernel.bits, kGroupSizes[i], mapping, false, &layout); !s.ok()) return s;
        if (format != nullptr && !vendor_layout(layout, *format, &layout).ok()) continue;
        Counts counts;
        if (Status s = ask(layout, false, &counts); !s.ok()) return s;
        if (counts.count == 0) continue;
        kind.n = n;
        kind.k = k;
      }
      return Status();
    };
    const auto consider_all = [&](int64_t k) {
      Status s;
      for (int64_t n = 1; s.ok() && n <= kMostRegularSize; n = next_size(n)) s = consider(n, k);
      for (const int64_t n : kOtherSizes) s = s.ok() ? consider(n, k) : s;
      return s;
    };
    Status s;
    for (int64_t k = 1; s.ok() && k <= kMostRegularSize; k = next_size(k)) s = consider_all(k);
    for (const int64_t k : kOtherSizes) s = s.ok() && k < kMostRegularSize ? consider_all(k) : s;
    return s;
  }

  // Fills the rows of the setup's ranges, and packs them for panel16 and for the kernel. `panels` stays null if the format does
  // not support the weights.
  Status make_weights(Setup* setup) {
    const Layout& layout = setup->layout;
    uint8_t *packed, *codes;
    float *scales, *mins, *bias;
    uint64_t* checksums;
    if (Status s = panel16_.take(layout.total_bytes, &packed); !s.ok()) return s;
    if (Status s = codes_.take(layout.n * layout.k, &codes); !s.ok()) return s;
    if (Status s = scales_.take(layout.n * layout.groups, &scales); !s.ok()) return s;
    if (Status s = mins_.take(layout.n * layout.groups, &mins); !s.ok()) return s;
    if (Status s = bias_.take(layout.n, &bias); !s.ok()) return s;
    if (Status s = checksums_.take(layout.panels, &checksums); !s.ok()) return s;
    std::memset(packed, 0, static_cast<size_t>(layout.total_bytes));
    weights_ = {codes, scales, has_mins(layout.mapping) ? mins : nullptr, layout.has_bias ? bias : nullptr};
    if (setup->format != nullptr && setup->ranges.panels() < layout.panels) {  // a format is packed as a whole
      std::memset(codes, 0, static_cast<size_t>(layout.n * layout.k));
      std::fill_n(scales, layout.n * layout.groups, 0.0f);
      std::fill_n(mins, layout.n * layout.groups, 0.0f);
      std::fill_n(bias, layout.n, 0.0f);
    }
    for (const Range& range : setup->ranges) {
      const int64_t begin = range.begin * kPanelRows, end = std::min(range.end * kPanelRows, layout.n);
      for (int64_t i = begin * layout.k; i < end * layout.k; ++i) {
        const uint32_t largest = (1u << layout.bits) - 1;
        const uint32_t end_of_range = i / layout.k % 2 == 0 ? largest : 0;
        codes[i] = static_cast<uint8_t>(setup->extreme ? end_of_range : random_.next() >> (32 - layout.bits));
      }
      for (int64_t i = begin * layout.groups; i < end * layout.groups; ++i) {
        // Extreme weights are stored exactly, so that sums are exactly as large as `magnitude`.
        scales[i] = setup->extreme ? 0x1p-7f : random_.between(0.01f, 0.03f) * (random_.next() % 2 == 0 ? 1.0f : -1.0f);
        mins[i] = setup->extreme ? 0.25f : random_.between(-0.5f, 0.5f);
      }
      for (int64_t i = begin; i < end; ++i) bias[i] = random_.between(-1.0f, 1.0f);
      if (Status s = pack_panels(layout, weights_, range.begin, range.end, packed, checksums); !s.ok()) return s;
    }
    setup->panel16 = packed + layout.header_bytes;
    return setup->format == nullptr ? (setup->panels = setup->panel16, Status()) : pack(setup);
  }

  // Packs in two calls if the format allows it, as threads would, with the last rows first.
  Status pack(Setup* setup) {
    const PackedFormat& format = *setup->format;
    const int64_t rows = setup->layout.n, bytes = setup->kernel_layout.total_bytes;
    char* packed;
    if (Status s = packed_.take(bytes, &packed); !s.ok()) return s;
    std::memset(packed, 0, static_cast<size_t>(bytes));
    const int64_t first = format.rows_at_once > 0 && format.rows_at_once < rows ? format.rows_at_once : rows;
    const auto pack_rows = [&](int64_t begin, int64_t end) {
      return begin == end ||
             format.pack(format.context, setup->kernel_layout, weights_, begin, end, packed + kHeaderBytes) == nullptr;
    };
    if (pack_rows(first, rows) && pack_rows(0, first)) setup->panels = reinterpret_cast<const uint8_t*>(packed) + kHeaderBytes;
    if (packed_.is_intact()) return {};
    return Status::error("format '%s' writes outside of its %" PRId64 " bytes: %s", name_of(format.format).text,
                         bytes - kHeaderBytes, describe(setup->layout).text);
  }

  const LoadedLibrary& library_;
  GuardedMemory panel16_{"weights"}, packed_{"weights"};
  // Memory that only the trial uses.
  GuardedMemory codes_{"codes"}, scales_{"scales"}, mins_{"minimums"}, bias_{"biases"}, checksums_{"checksums"};
  PackArgs weights_{};
  Random random_;
};

}  // namespace lowbit
