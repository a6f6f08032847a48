#include "try_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "../kernels/pack.h"
#include "../kernels/registry.h"
#include "check.h"
#include "rows.h"
#include "schedule.h"
#include "trial.h"

namespace lowbit {
namespace {

constexpr int64_t kGap = 3;  // between rows of activations and of outputs; must be neither read nor written

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
// Calls of a case run until their total number of products exceeds this, so that the trial is quick. The first call always
// runs, as do the calls at the edges of a tile if rows of weights are short.
constexpr int64_t kMostProducts = 1 << 18, kShortRow = 300;

// Sizes to try if a kernel or format supports no case of a kind: all small ones, layers of published models, and vocabularies.
constexpr int64_t kOtherSizes[] = {8960,   11008,  29568,  32000,  32064,  49152,  50257,  50280,  50304,  51865,
                                   51866,  65024,  92416,  100352, 128256, 129280, 151552, 151936, 152064, 200064,
                                   201088, 248320, 250880, 256000, 262144, 262208};
constexpr int64_t kMostRegularSize = 32768;
int64_t next_size(int64_t size) { return size + (size < 64 ? 1 : size < 1024 ? 16 : size < 8192 ? 128 : 512); }
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
WeightsText describe(const Layout& layout) {
  WeightsText result;
  std::snprintf(result.text, sizeof result.text, "%" PRId64 " x %" PRId64 " weights of %d bits, %s, group size %" PRId64,
                layout.n, layout.k, layout.bits, name_of(layout.mapping), layout.group_size);
  return result;
}

const char* rows_text(int64_t m) { return m == 1 ? "row of activations" : "rows of activations"; }

// The relative rounding error of an output in `type`, which is added to a format's bound.
float rounding_of(DType type) { return type == DType::f32 ? 0x1p-22f : type == DType::bf16 ? 0x1p-7f : 0x1p-10f; }

// Whether an output of a vendor's format is near enough. The bound applies to `expected`; infinity and NaN are never near.
bool is_near(float actual, float expected, float bound, DType type) {
  return std::fabs(actual - expected) <= bound + rounding_of(type) * std::fabs(expected);
}

class Trial {
 public:
  explicit Trial(const LoadedLibrary& library) : library_(library) {}

  Status linear(const LinearKernel& kernel) {
    Counts counts;  // in ascending order
    for (const int64_t m : kCounts) counts.m[counts.count++] = m;
    const int64_t least = kernel.m_least;
    for (const int64_t m : {least, least + 1, 2 * least + 1}) counts.m[counts.count++] = m;
    std::sort(counts.m, counts.m + counts.count);
    counts.count = static_cast<int>(std::unique(counts.m, counts.m + counts.count) - counts.m);
    return with_weights(
        kernel, std::max<int64_t>(kernel.n_step, kPanelRows), kernel.supports != nullptr,
        [&](const Layout& layout, bool all, Counts* taken) { return ask(kernel, counts, layout, all, taken); },
        [&](const Setup& setup, const Counts& counts) { return try_linear(kernel, setup, counts); });
  }

  Status embedding(const EmbeddingKernel& kernel) {
    return with_weights(
        kernel, kPanelRows, false,
        [](const Layout&, bool, Counts* counts) {
          counts->m[counts->count++] = 1;
          return Status();
        },
        [&](const Setup& setup, const Counts&) { return try_embedding(kernel, setup); });
  }

  Status quantize(const QuantizeKernel& kernel) {
    int number = 0;
    for (const int64_t k : {128, 100, 130, 70, 300, 1, 16, 17, 63, 65, 520, 1100, 4112}) {
      for (const int64_t group_size : {32, 64, 0, 16, 48, 128}) {
        Layout layout;
        const Mapping with_mins = mapping_with(true, false);  // so that group sums are computed
        if (Status s = make_layout(1, k, 4, group_size, with_mins, false, &layout); !s.ok()) return s;
        for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
          if (Status s = try_quantize(kernel, layout, type, number++); !s.ok()) return s;
        }
      }
    }
    return {};
  }

 private:
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

  // Shapes of a kind. A few supported shapes are enough, but long rows have more segments, and groups have many cases.
  struct Kind {
    int64_t n = 0, k = 0;  // 0 if none was found
    bool was_tried = false;
  };
  static int length_of(int64_t k) { return k < 512 ? 0 : k < 2048 ? 1 : k < 8192 ? 2 : 3; }

  // Calls try_kernel(setup, counts) for matrices of each kind that the kernel reads. `ask` returns the numbers of rows of
  // activations that the kernel supports with a layout: all candidates, or only whether there is one.
  template <class Kernel, class Ask, class Try>
  Status with_weights(const Kernel& kernel, int64_t columns, bool is_asked, const Ask& ask, const Try& try_kernel) {
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

  // The numbers in `asked` that a kernel supports with a layout; only the first one unless `all`. It may assume a CPU with
  // fewer ISA bits than this one, but with its own.
  static Status ask(const LinearKernel& kernel, const Counts& asked, const Layout& layout, bool all, Counts* taken) {
    for (int i = 0; i < asked.count && (all || taken->count == 0); ++i) {
      const int64_t m = asked.m[i];
      if (kernel.supports != nullptr) {
        const auto supports = [&](IsaBits isa) { return kernel.supports(kernel.context, layout, m, isa); };
        const bool takes = supports(active_isa());
        if (all && takes != supports(active_isa())) {
          return Status::error("kernel '%s' contradicts itself: supports() said %s, then %s to %s, %" PRId64 " %s", kernel.name,
                               takes ? "yes" : "no", takes ? "no" : "yes", describe(layout).text, m, rows_text(m));
        }
        if (!takes && !supports(kernel.isa)) continue;
      }
      taken->m[taken->count++] = m;
    }
    return {};
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

  // Rows of activations in float32 and int8. If groups are whole rows, the last row for panel16 has an infinity, so its outputs
  // are NaN. Extreme rows are all positive, all negative, or of mixed signs.
  Status make_activations(const Setup& setup, int64_t m, LinearArgs* args, float** x) {
    const Layout& layout = setup.layout;
    const int64_t padded = layout.blocks * kBlockInputs;
    int8_t* a;
    float *scales, *group_sums;
    int32_t* sums;
    if (Status s = x_.take(m * layout.k, x); !s.ok()) return s;
    if (Status s = a_.take(m * padded, &a); !s.ok()) return s;
    if (Status s = a_scales_.take(m * layout.segments, &scales); !s.ok()) return s;
    if (Status s = a_sums_.take(m * layout.segments, &sums); !s.ok()) return s;
    if (Status s = a_group_sums_.take(m * layout.groups, &group_sums); !s.ok()) return s;
    for (int64_t i = 0; i < m * layout.k; ++i) {
      const float value = random_.between(-2.0f, 2.0f);
      const int64_t row = i / layout.k;
      const float sign = row % 3 == 0 ? 1.0f : row % 3 == 1 ? -1.0f : value;
      (*x)[i] = setup.extreme ? std::copysign(2.0f, sign) : value;
    }
    if (setup.format == nullptr && layout.group_size == 0 && !setup.extreme) (*x)[m * layout.k - 1] = INFINITY;
    for (int64_t i = 0; i < m; ++i) {
      portable_quantize().run({*x + i * layout.k, DType::f32, layout.k, padded, layout.group_inputs(), a + i * padded,
                               scales + i * layout.segments, sums + i * layout.segments, group_sums + i * layout.groups});
    }
    args->a = a;
    args->scales = scales;
    args->sums = sums;
    args->group_sums = has_mins(layout.mapping) ? group_sums : nullptr;
    return {};
  }

  // The counts for a case: those at the edges of a tile, all if the case is small, or the first if there are no others.
  static Counts chosen(const LinearKernel& kernel, const Setup& setup, const Counts& taken) {
    Counts result;
    const int64_t products = std::min(setup.ranges.panels() * kPanelRows, setup.layout.n) * setup.layout.k;
    int64_t sum = 0;
    for (int i = 0; i < taken.count; ++i) {
      const int64_t m = taken.m[i], least = kernel.m_least;
      const bool is_edge = m <= 3 || m == least || m == least + 1 || m == 2 * least + 1;
      const bool is_wanted = is_edge || (m < 128 && (setup.number == 0 || (i + setup.number) % 5 == 0));
      const bool is_quick = (is_edge && setup.layout.k <= kShortRow) || (sum + m) * products <= kMostProducts;
      if (result.count > 0 && !(is_wanted && is_quick)) continue;
      sum += m;
      result.m[result.count++] = m;
    }
    return result;
  }

  Status try_linear(const LinearKernel& kernel, const Setup& setup, const Counts& taken) {
    const Layout& layout = setup.layout;
    const Counts counts = chosen(kernel, setup, taken);
    const int64_t most = counts.m[counts.count - 1], stride = layout.n + kGap, item = size_of(setup.type);
    LinearArgs args{};
    float* x;
    char *expected, *actual;
    if (Status s = make_activations(setup, most, &args, &x); !s.ok()) return s;
    if (Status s = expected_.take(most * stride * item, &expected); !s.ok()) return s;
    std::memset(expected, 0xff, static_cast<size_t>(most * stride * item));
    args.panels = setup.panel16;
    args.layout = layout;
    args.m = most;
    args.out = expected;
    args.out_dtype = setup.type;
    args.out_stride = stride;
    if (Status s = scratch_.take(kLinearScratchBytes, reinterpret_cast<char**>(&args.scratch)); !s.ok()) return s;
    for (const Range& range : setup.ranges) {
      args.panel_begin = range.begin;
      args.panel_end = range.end;
      portable_linear(layout.bits).run(args);
    }

    args.layout = setup.kernel_layout;
    args.context = kernel.context;
    args.panels = setup.panels;
    const uint64_t inputs = checksum_of_inputs();
    for (int i = 0; i < counts.count; ++i) {
      const int64_t m = counts.m[i];
      if (Status s = actual_.take(m * stride * item, &actual); !s.ok()) return s;
      std::memset(actual, 0xff, static_cast<size_t>(m * stride * item));
      args.m = m;
      args.out = actual;
      if (Status s = run(kernel, setup, args, x, i); !s.ok()) return s;
      const auto says = [&](const char* what, const char* of) {
        return Status::error("kernel '%s' %s its %s: %s, %" PRId64 " %s, %s outputs", kernel.name, what, of,
                             describe(layout).text, m, rows_text(m), name_of(setup.type));
      };
      for (const GuardedMemory* memory : {&actual_, &scratch_, &activations_}) {
        if (!memory->is_intact()) return says("writes outside of", memory->name());
      }
      if (checksum_of_inputs() != inputs) return says("changes", "inputs");
      for (int64_t row = 0; row < m; ++row) {
        for (int64_t column = 0; column < stride; ++column) {
          const float found = load_as_f32(actual, setup.type, row * stride + column);
          const float right = load_as_f32(expected, setup.type, row * stride + column);
          if (same(found, right)) continue;
          if (setup.format != nullptr && column < layout.n &&
              is_near(found, right, setup.format->tolerance * magnitude(layout, x + row * layout.k, column), setup.type)) {
            continue;
          }
          return Status::error("kernel '%s' differs from the portable kernel: %s, %" PRId64
                               " %s, %s outputs: [%" PRId64 ", %" PRId64 "] is %.9g; expected %.9g",
                               kernel.name, describe(layout).text, m, rows_text(m), name_of(setup.type), row, column,
                               static_cast<double>(found), static_cast<double>(right));
        }
      }
    }
    return {};
  }

  uint64_t checksum_of_inputs() const {
    uint64_t sum = 0;
    for (const GuardedMemory* memory : {&panel16_, &packed_, &a_, &a_scales_, &a_sums_, &a_group_sums_}) {
      sum = sum * 31 + memory->checksum();
    }
    return sum;
  }

  // Runs several calls, as threads would, in ascending or descending order of panels, so that writes to another call's panels
  // are detected.
  Status run(const LinearKernel& kernel, const Setup& setup, LinearArgs args, const float* x, int number) {
    int64_t scratch_bytes = kLinearScratchBytes;
    constexpr int kThreads[] = {1, 2, 64};
    if (Status s = add_scratch(kernel, args.layout, args.m, kThreads[number % 3], &scratch_bytes); !s.ok()) return s;
    char* scratch;
    if (Status s = scratch_.take(scratch_bytes, &scratch); !s.ok()) return s;
    args.scratch = scratch;
    if (kernel.prepare != nullptr) {
      if (Status s = prepare(kernel, setup, x, &args); !s.ok()) return s;
    }
    const Ranges& ranges = setup.ranges;
    for (int i = 0; i < ranges.count; ++i) {
      const Range& range = ranges.range[number % 2 == 0 ? i : ranges.count - 1 - i];
      args.panel_begin = range.begin;
      args.panel_end = range.end;
      // Fills the scratch memory with NaNs or numbers.
      std::memset(scratch, i % 2 == 0 ? 0xff : 0x5a, static_cast<size_t>(std::min<int64_t>(scratch_bytes, 1 << 20)));
      kernel.run(args);
    }
    return {};
  }

  // Prepares the last rows first, with space between rows.
  Status prepare(const LinearKernel& kernel, const Setup& setup, const float* x, LinearArgs* args) {
    const int64_t bytes = kernel.activation_bytes(kernel.context, args->layout, args->m);
    if (Status s = check_asked(kernel, "activations", bytes, 1); !s.ok()) return s;
    char *activations, *from;
    if (Status s = activations_.take(bytes, &activations); !s.ok()) return s;
    std::memset(activations, 0xff, static_cast<size_t>(bytes));
    // Of the 16-bit types, the type of the outputs, so that each type is tried.
    const DType type = (kernel.x_types & bit_of(setup.type)) != 0 ? setup.type : DType::f32;
    const int64_t k = args->layout.k, stride = k + kGap, values = args->m * stride * size_of(type);
    if (Status s = prepared_from_.take(values, &from); !s.ok()) return s;
    std::memset(from, 0xff, static_cast<size_t>(values));
    for (int64_t i = 0; i < args->m * k; ++i) store_from_f32(from, type, i / k * stride + i % k, x[i]);
    const uint64_t before = prepared_from_.checksum();
    const int64_t first = std::min<int64_t>(kernel.m_least, args->m);
    for (const Range& rows : {Range{first, args->m}, Range{0, first}}) {
      if (rows.begin == rows.end) continue;
      kernel.prepare({from, type, stride, args->layout, args->m, rows.begin, rows.end, activations, kernel.context});
    }
    if (prepared_from_.checksum() != before) {
      return Status::error("kernel '%s' changes the inputs that it prepares: %s, %" PRId64 " %s", kernel.name,
                           describe(setup.layout).text, args->m, rows_text(args->m));
    }
    args->activations = activations;
    args->a = nullptr;
    args->scales = args->group_sums = nullptr;
    args->sums = nullptr;
    return {};
  }

  Status try_embedding(const EmbeddingKernel& kernel, const Setup& setup) {
    const Layout& layout = setup.layout;
    const DType type = setup.type;
    const int64_t bytes = layout.k * size_of(type);
    char *expected, *actual;
    if (Status s = expected_.take(bytes, &expected); !s.ok()) return s;
    if (Status s = actual_.take(bytes, &actual); !s.ok()) return s;
    const uint64_t inputs = checksum_of_inputs();
    for (const Range& range : setup.ranges) {
      const int64_t end = std::min(range.end * kPanelRows, layout.n);
      for (int64_t row = range.begin * kPanelRows; row < end; ++row) {
        std::memset(actual, 0xff, static_cast<size_t>(bytes));
        portable_embedding(layout.bits).run({setup.panel16, layout, row, expected, type, nullptr});
        kernel.run({setup.panels, setup.kernel_layout, row, actual, type, kernel.context});
        if (!actual_.is_intact()) {
          return Status::error("kernel '%s' writes outside of its outputs: %s, %s outputs, row %" PRId64, kernel.name,
                               describe(layout).text, name_of(type), row);
        }
        float largest = 0.0f;
        for (int64_t i = 0; i < layout.k; ++i) largest = std::fmax(largest, std::fabs(load_as_f32(expected, type, i)));
        for (int64_t i = 0; i < layout.k; ++i) {
          const float found = load_as_f32(actual, type, i), right = load_as_f32(expected, type, i);
          if (same(found, right)) continue;
          if (setup.format != nullptr && is_near(found, right, setup.format->tolerance * largest, type)) continue;
          return Status::error("kernel '%s' differs from the portable kernel: %s, %s outputs: [%" PRId64 ", %"
                               PRId64 "] is %.9g; expected %.9g",
                               kernel.name, describe(layout).text, name_of(type), row, i, static_cast<double>(found),
                               static_cast<double>(right));
        }
      }
    }
    if (checksum_of_inputs() == inputs) return {};
    return Status::error("kernel '%s' changes its inputs: %s, %s outputs", kernel.name, describe(layout).text, name_of(type));
  }

  // The values include special cases of the contract, and the inputs start at an unaligned address.
  Status try_quantize(const QuantizeKernel& kernel, const Layout& layout, DType type, int number) {
    const int64_t padded = layout.blocks * kBlockInputs;
    constexpr float special[] = {1.0f, 0.0f, INFINITY, NAN, 1e-39f, 3e38f, 65504.0f, -1e-8f};
    struct Outputs {
      int8_t* a;
      float* scales;
      int32_t* sums;
      float* group_sums;
    } expected, actual;
    char* x;
    if (Status s = prepared_from_.take((layout.k + 1) * size_of(type), &x); !s.ok()) return s;
    std::memset(x, 0, static_cast<size_t>(size_of(type)));
    x += size_of(type);
    for (int64_t i = 0; i < layout.k; ++i) {
      const bool all = number % 8 == 1;  // whether all values are zero
      const float value = all ? 0.0f : random_.between(-2.0f, 2.0f) * (number % 5 == 4 ? 1e-20f : 1.0f);
      store_from_f32(x, type, i, i % 257 == 17 ? special[(number + i) % 8] : value);
    }
    GuardedMemory* const memories[2][4] = {{&codes_, &scales_, &checksums_, &mins_},
                                           {&a_, &a_scales_, &a_sums_, &a_group_sums_}};
    const auto take = [&](GuardedMemory* const (&memory)[4], Outputs* out) {
      if (Status s = memory[0]->take(padded, &out->a); !s.ok()) return s;
      if (Status s = memory[1]->take(layout.segments, &out->scales); !s.ok()) return s;
      if (Status s = memory[2]->take(layout.segments, &out->sums); !s.ok()) return s;
      if (Status s = memory[3]->take(layout.groups, &out->group_sums); !s.ok()) return s;
      std::memset(out->a, 0x80, static_cast<size_t>(padded));
      std::memset(out->scales, 0xff, sizeof(float) * static_cast<size_t>(layout.segments));
      std::memset(out->sums, 0x80, sizeof(int32_t) * static_cast<size_t>(layout.segments));
      std::memset(out->group_sums, 0xff, sizeof(float) * static_cast<size_t>(layout.groups));
      return Status();
    };
    if (Status s = take(memories[0], &expected); !s.ok()) return s;
    if (Status s = take(memories[1], &actual); !s.ok()) return s;
    const bool wants_group_sums = number % 4 != 3;
    const auto run = [&](const QuantizeKernel& by, const Outputs& to) {
      by.run({x, type, layout.k, padded, layout.group_inputs(), to.a, to.scales, to.sums,
              wants_group_sums ? to.group_sums : nullptr, by.context});
    };
    const uint64_t inputs = prepared_from_.checksum();
    run(portable_quantize(), expected);
    run(kernel, actual);
    const auto says = [&](const char* what) {
      return Status::error("kernel '%s' %s: %" PRId64 " %s values, group size %" PRId64, kernel.name, what, layout.k,
                           name_of(type), layout.group_size);
    };
    if (prepared_from_.checksum() != inputs) return says("changes its inputs");
    for (const GuardedMemory* memory : memories[1]) {
      if (!memory->is_intact()) return says("writes outside of its outputs");
    }
    const auto compare = [&](const char* what, const auto* right, const auto* found, int64_t count, bool as_bits) {
      for (int64_t i = 0; i < count; ++i) {
        const float r = static_cast<float>(right[i]), f = static_cast<float>(found[i]);
        if (as_bits ? bits_of_float(r) == bits_of_float(f) : same(r, f)) continue;
        return Status::error("kernel '%s' differs from the portable kernel: %" PRId64 " %s values, group size %"
                             PRId64 ": %s[%" PRId64 "] is %.9g; expected %.9g",
                             kernel.name, layout.k, name_of(type), layout.group_size, what, i, static_cast<double>(f),
                             static_cast<double>(r));
      }
      return Status();
    };
    if (Status s = compare("a", expected.a, actual.a, padded, true); !s.ok()) return s;
    if (Status s = compare("scales", expected.scales, actual.scales, layout.segments, true); !s.ok()) return s;
    if (Status s = compare("sums", expected.sums, actual.sums, layout.segments, true); !s.ok()) return s;
    return compare("group_sums", expected.group_sums, actual.group_sums, layout.groups, false);
  }

  const LoadedLibrary& library_;
  // Inputs of kernels.
  GuardedMemory panel16_{"weights"}, packed_{"weights"}, a_{"activations"}, a_scales_{"activations"}, a_sums_{"activations"},
      a_group_sums_{"activations"}, prepared_from_{"inputs"};
  // Outputs of kernels.
  GuardedMemory actual_{"outputs"}, scratch_{"scratch"}, activations_{"activations"};
  // Memory that only the trial uses.
  GuardedMemory codes_{"codes"}, scales_{"scales"}, mins_{"minimums"}, bias_{"biases"}, checksums_{"checksums"}, x_{"inputs"},
      expected_{"outputs"};
  PackArgs weights_{};
  Random random_;
};

}  // namespace

Status try_kernels(const LoadedLibrary& library) {
  if (Status status = sme_threads_status(); !status.ok()) return status;
  Trial trial(library);
  const WorkingThread thread(0);
  for (const QuantizeKernel& kernel : library.quantize) {
    if (!can_run(kernel.isa)) continue;
    if (Status status = trial.quantize(kernel); !status.ok()) return status;
  }
  for (const LinearKernel& kernel : library.linear) {
    if (!can_run(kernel.isa)) continue;
    if (Status status = trial.linear(kernel); !status.ok()) return status;
  }
  for (const EmbeddingKernel& kernel : library.embedding) {
    if (!can_run(kernel.isa)) continue;
    if (Status status = trial.embedding(kernel); !status.ok()) return status;
  }
  return try_attention(library);
}

}  // namespace lowbit
