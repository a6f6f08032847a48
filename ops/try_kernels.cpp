#include "try_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "check.h"
#include "rows.h"
#include "schedule.h"
#include "trial_weights.h"

namespace lowbit {
namespace {

constexpr int64_t kGap = 3;  // between rows of activations and of outputs; must be neither read nor written

// Calls of a case run until their total number of products exceeds this, so that the trial is quick. The first call always
// runs, as do the calls at the edges of a tile if rows of weights are short.
constexpr int64_t kMostProducts = 1 << 18;

// The relative rounding error of an output in `type`, which is added to a format's bound.
float rounding_of(DType type) { return type == DType::f32 ? 0x1p-22f : type == DType::bf16 ? 0x1p-7f : 0x1p-10f; }

// Whether an output of a vendor's format is near enough. The bound applies to `expected`; infinity and NaN are never near.
bool is_near(float actual, float expected, float bound, DType type) {
  return std::fabs(actual - expected) <= bound + rounding_of(type) * std::fabs(expected);
}

class Trial {
 public:
  explicit Trial(const LoadedLibrary& library) : weights_(library) {}

  Status linear(const LinearKernel& kernel) {
    Counts counts;  // in ascending order
    for (const int64_t m : kCounts) counts.m[counts.count++] = m;
    const int64_t least = kernel.m_least;
    for (const int64_t m : {least, least + 1, 2 * least + 1}) counts.m[counts.count++] = m;
    std::sort(counts.m, counts.m + counts.count);
    counts.count = static_cast<int>(std::unique(counts.m, counts.m + counts.count) - counts.m);
    return weights_.for_each(
        kernel, std::max<int64_t>(kernel.n_step, kPanelRows), kernel.supports != nullptr,
        [&](const Layout& layout, bool all, Counts* taken) { return ask(kernel, counts, layout, all, taken); },
        [&](const Setup& setup, const Counts& counts) { return try_linear(kernel, setup, counts); });
  }

  Status embedding(const EmbeddingKernel& kernel) {
    return weights_.for_each(
        kernel, kPanelRows, false,
        [](const Layout&, bool, Counts* counts) {
          counts->m[counts->count++] = 1;
          return Status();
        },
        [&](const Setup& setup, const Counts&) { return try_embedding(kernel, setup); });
  }

 private:
  using Setup = TrialWeights::Setup;

  // The numbers in `asked` that a kernel supports with a layout; only the first one unless `all`. supports() may answer for
  // this CPU or for one that has only the kernel's own ISA bits.
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
      const float value = weights_.random().between(-2.0f, 2.0f);
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
          if (setup.format != nullptr && column < layout.n) {
            const float magnitude = weights_.magnitude(layout, x + row * layout.k, column);
            if (is_near(found, right, setup.format->tolerance * magnitude, setup.type)) continue;
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
    uint64_t sum = weights_.checksum();
    for (const GuardedMemory* memory : {&a_, &a_scales_, &a_sums_, &a_group_sums_}) {
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
    // The type of the outputs if the kernel takes it, so that each type is tried.
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

  TrialWeights weights_;
  // Inputs of kernels.
  GuardedMemory a_{"activations"}, a_scales_{"activations"}, a_sums_{"activations"}, a_group_sums_{"activations"},
      prepared_from_{"inputs"};
  // Outputs of kernels.
  GuardedMemory actual_{"outputs"}, scratch_{"scratch"}, activations_{"activations"};
  // Memory that only the trial uses.
  GuardedMemory x_{"inputs"}, expected_{"outputs"};
};

}  // namespace

Status try_kernels(const LoadedLibrary& library) {
  if (Status status = sme_threads_status(); !status.ok()) return status;
  Trial trial(library);
  const WorkingThread thread(0);
  if (Status status = try_quantize(library); !status.ok()) return status;
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
