#include "try_kernels.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "../kernels/pack.h"
#include "../kernels/registry.h"
#include "aligned_memory.h"
#include "check.h"
#include "rows.h"
#include "schedule.h"
#include "trial.h"

namespace lowbit {
namespace {

constexpr int64_t kMostStep = 255, kMostM = 2 * kMostStep + 1;  // tiles have bytes for sizes
constexpr int64_t kMore = 5;                                    // columns beyond a step: a panel that is not full
constexpr int64_t kMostN = kMostStep + kMore, kMostPanels = (kMostN + kPanelRows - 1) / kPanelRows;
constexpr int64_t kGap = 3;                                     // between rows of outputs, not to be written

struct Inputs {
  int64_t k, group_size;
};
// Whole blocks and groups; then groups that end in the middle of a block, are cut short, have several segments.
constexpr Inputs kInputs[] = {{128, 32}, {128, 64}, {128, 0}, {100, 32}, {100, 16}, {130, 48}, {70, 0}, {300, 128}};
constexpr int64_t kMostK = 300, kMostPadded = 320, kMostGroups = 10, kMostPieces = 10;  // pieces: groups or segments
// Of a panel: 10 blocks of 8 lines, 10 groups, the head.
constexpr int64_t kMostPanelBytes = 10 * 8 * kLineBytes + kMostGroups * kLineBytes + kHeadBytes + kLineBytes;

// All that a trial works in, in one piece.
struct Memory {
  alignas(kAlignment) uint8_t packed[kLevelsHeaderBytes + kMostPanels * kMostPanelBytes];
  alignas(kAlignment) char scratch[kLinearScratchBytes];
  uint8_t codes[kMostN * kMostK];
  float scales[kMostN * kMostGroups], mins[kMostN * kMostGroups], bias[kMostN];
  float x[kMostM * kMostK];
  int8_t a[kMostM * kMostPadded];
  float a_scales[kMostM * kMostPieces];
  int32_t a_sums[kMostM * kMostPieces];
  float a_group_sums[kMostM * kMostGroups];
  float expected[kMostM * (kMostN + kGap)], actual[kMostM * (kMostN + kGap)];
  uint64_t checksums[kMostPanels];
};

// The part of an error that says what the weights were.
struct WeightsText {
  char text[160];
};
WeightsText describe(const Layout& layout) {
  WeightsText result;
  std::snprintf(result.text, sizeof result.text, "%" PRId64 " x %" PRId64 " weights of %d bits, %s, group size %" PRId64,
                layout.n, layout.k, layout.bits, name_of(layout.mapping), layout.group_size);
  return result;
}

// Memory of a size that a library asks for, which is kept from one trial to the next.
class Buffer {
 public:
  // `bytes` of it, of undefined content; null: there is not so much.
  char* take(int64_t bytes) {
    if (bytes > bytes_) {
      bytes_ = 0;
      memory_.reset();  // before there is other memory
      memory_.reset(static_cast<char*>(allocate_aligned(bytes)));
      if (memory_ != nullptr) bytes_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<char, FreeAligned> memory_;
  int64_t bytes_ = 0;
};

class Trial {
 public:
  Trial(const LoadedLibrary& library, Memory& memory) : library_(library), memory_(memory) {}

  Status linear(const LinearKernel& row) {
    return with_weights(row, row.n_step < kPanelRows ? kPanelRows : row.n_step,
                        [&](const Layout& layout, const PackedFormat* format, int number) {
                          return try_linear(row, layout, format, static_cast<DType>(number % 3));
                        });
  }

  Status embedding(const EmbeddingKernel& row) {
    return with_weights(row, kPanelRows, [&](const Layout& layout, const PackedFormat* format, int number) {
      return try_embedding(row, layout, format, static_cast<DType>(number % 3));
    });
  }

  Status quantize(const QuantizeKernel& row) {
    int number = 0;
    for (const Inputs& inputs : kInputs) {
      Layout layout;
      const Mapping with_mins = mapping_with(true, false);  // group sums are computed for them
      if (Status s = make_layout(1, inputs.k, 4, inputs.group_size, with_mins, false, &layout); !s.ok()) return s;
      for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
        if (Status s = try_quantize(row, layout, type, number++); !s.ok()) return s;
      }
    }
    return {};
  }

 private:
  // Calls try_row(layout of panel16, the row's format or null, a number) for matrices of each kind that the row reads: of
  // `columns` rows and some more, in memory_.
  template <class Row, class Try>
  Status with_weights(const Row& row, int64_t columns, const Try& try_row) {
    const PackedFormat* format = nullptr;
    if (row.format != Format::panel16) {
      format = find_format(row.format);
      for (const PackedFormat& known : library_.formats) format = known.format == row.format ? &known : format;
    }
    int number = 0;
    for (const Mapping mapping : kMappings) {
      if ((row.mappings & bit_of(mapping)) == 0) continue;
      if (has_table(mapping) && (!can_have_levels(row.bits) || format != nullptr)) continue;
      for (const Inputs& inputs : kInputs) {
        int8_t levels[kMostLevels];
        for (int i = 0; i < kMostLevels; ++i) levels[i] = static_cast<int8_t>(i * 16 - 120);
        Layout layout;
        const bool has_bias = number % 2 == 0;
        if (Status s = make_layout(columns + kMore, inputs.k, row.bits, inputs.group_size, mapping, has_bias, &layout,
                                   has_table(mapping) ? levels : nullptr);
            !s.ok()) {
          return s;
        }
        make_weights(layout);
        if (Status s = pack_panels(layout, pack_args(layout), 0, layout.panels, memory_.packed, memory_.checksums); !s.ok()) {
          return s;
        }
        if (Status s = try_row(layout, format, number++); !s.ok()) return s;
      }
    }
    return {};
  }

  void make_weights(const Layout& layout) {
    const int64_t groups = layout.n * layout.groups;
    for (int64_t i = 0; i < layout.n * layout.k; ++i) {
      memory_.codes[i] = static_cast<uint8_t>(random_.next() >> (32 - layout.bits));
    }
    for (int64_t i = 0; i < groups; ++i) {
      memory_.scales[i] = random_.between(0.01f, 0.03f) * (random_.next() % 2 == 0 ? 1.0f : -1.0f);
    }
    for (int64_t i = 0; i < groups; ++i) memory_.mins[i] = random_.between(-0.5f, 0.5f);
    for (int64_t i = 0; i < layout.n; ++i) memory_.bias[i] = random_.between(-1.0f, 1.0f);
  }

  PackArgs pack_args(const Layout& layout) const {
    PackArgs args{};
    args.codes = memory_.codes;
    args.scales = memory_.scales;
    if (has_mins(layout.mapping)) args.mins = memory_.mins;
    if (layout.has_bias) args.bias = memory_.bias;
    return args;
  }

  // The matrix as a row of `format` reads it; null: panel16. `*panels` is null where the format does not hold it.
  Status pack(const PackedFormat* format, const Layout& layout, Layout* row_layout, const uint8_t** panels) {
    *panels = memory_.packed + layout.header_bytes;
    *row_layout = layout;
    if (format == nullptr) return {};
    *panels = nullptr;
    if (!vendor_layout(layout, *format, row_layout).ok()) return {};
    char* const bytes = packed_.take(row_layout->total_bytes);
    if (bytes == nullptr) return Status::no_memory("no memory for %" PRId64 " bytes of a trial", row_layout->total_bytes);
    std::memset(bytes, 0, static_cast<size_t>(row_layout->total_bytes));
    // In two calls where the format allows it, as threads would.
    const int64_t rows = row_layout->n;
    const int64_t first = format->rows_at_once > 0 && format->rows_at_once < rows ? format->rows_at_once : rows;
    const PackArgs args = pack_args(layout);
    const auto pack_rows = [&](int64_t begin, int64_t end) {
      return begin == end || format->pack(format->context, *row_layout, args, begin, end, bytes + kHeaderBytes) == nullptr;
    };
    if (pack_rows(first, rows) && pack_rows(0, first)) {
      *panels = reinterpret_cast<const uint8_t*>(bytes) + kHeaderBytes;
    }
    return {};
  }

  // What a format's rounding is measured by: the sum of the magnitudes of all products, and the bias.
  float magnitude(const Layout& layout, int64_t row, int64_t column) const {
    double sum = layout.has_bias ? std::fabs(memory_.bias[column]) : 0.0;
    for (int64_t j = 0; j < layout.k; ++j) {
      const int64_t group = column * layout.groups + j / layout.group_inputs();
      const int code = memory_.codes[column * layout.k + j];
      const float integer = static_cast<float>(
          has_mins(layout.mapping) ? code : level_factor(layout.bits) * code - level_offset(layout.bits));
      const float min = has_mins(layout.mapping) ? memory_.mins[group] : 0.0f;
      sum += std::fabs(memory_.x[row * layout.k + j] * (memory_.scales[group] * integer + min));
    }
    return static_cast<float>(sum);
  }

  // Of rounding to outputs of a type, of which a format's rows may do another one than the portable kernels.
  static float rounding_of(DType type) { return type == DType::f32 ? 0x1p-22f : type == DType::bf16 ? 0x1p-7f : 0x1p-10f; }

  Status try_linear(const LinearKernel& row, const Layout& layout, const PackedFormat* format, DType type) {
    Layout row_layout;
    const uint8_t* panels;
    if (Status s = pack(format, layout, &row_layout, &panels); !s.ok() || panels == nullptr) return s;
    const int64_t counts[] = {1, 2, 3, row.m_least, row.m_least + 1, 2 * row.m_least + 1};
    int64_t most = 1;
    for (const int64_t m : counts) most = m > most ? m : most;
    make_activations(layout, most, format == nullptr);

    LinearArgs args{};
    args.panels = memory_.packed + layout.header_bytes;
    args.layout = layout;
    args.panel_end = layout.panels;
    args.a = memory_.a;
    args.scales = memory_.a_scales;
    args.sums = memory_.a_sums;
    if (has_mins(layout.mapping)) args.group_sums = memory_.a_group_sums;
    args.m = most;
    args.out = memory_.expected;
    args.out_dtype = type;
    args.out_stride = layout.n + kGap;
    args.scratch = memory_.scratch;
    std::memset(memory_.expected, 0xff, sizeof(float) * static_cast<size_t>(most * args.out_stride));
    portable_linear(layout.bits).run(args);

    args.layout = row_layout;
    args.out = memory_.actual;
    args.context = row.context;
    args.panels = panels;
    for (const int64_t m : counts) {
      if (row.supports != nullptr && !row.supports(row.context, row_layout, m, active_isa())) continue;
      args.m = m;
      std::memset(memory_.actual, 0xff, sizeof(float) * static_cast<size_t>(m * args.out_stride));
      if (Status s = run(row, args); !s.ok()) return s;
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t column = 0; column < args.out_stride; ++column) {
          const float actual = load_as_f32(memory_.actual, type, i * args.out_stride + column);
          const float expected = load_as_f32(memory_.expected, type, i * args.out_stride + column);
          if (same(actual, expected)) continue;
          if (format != nullptr && column < layout.n &&
              std::fabs(actual - expected) <= format->tolerance * magnitude(layout, i, column) +
                                                 rounding_of(type) * std::fabs(expected)) {
            continue;
          }
          return Status::error("row '%s' computes something else than the portable kernel: %s, %" PRId64
                               " rows of activations, %s outputs: [%" PRId64 ", %" PRId64 "] is %.9g; expected %.9g",
                               row.name, describe(layout).text, m, name_of(type), i, column, static_cast<double>(actual),
                               static_cast<double>(expected));
        }
      }
    }
    return {};
  }

  // In two calls, as threads would make them: what the row computes at once, and the rest.
  Status run(const LinearKernel& row, LinearArgs args) {
    int64_t scratch_bytes = kLinearScratchBytes;
    if (Status s = add_scratch(row, args.layout, args.m, 1, &scratch_bytes); !s.ok()) return s;
    if (scratch_bytes > kLinearScratchBytes) {
      args.scratch = scratch_.take(scratch_bytes);
      if (args.scratch == nullptr) return Status::no_memory("no memory for %" PRId64 " bytes of scratch", scratch_bytes);
    }
    if (row.prepare != nullptr) {
      const int64_t bytes = row.activation_bytes(row.context, args.layout, args.m);
      if (Status s = check_asked(row, "activations", bytes, 1); !s.ok()) return s;
      char* const activations = activations_.take(bytes);
      if (activations == nullptr) return Status::no_memory("no memory for %" PRId64 " bytes of activations", bytes);
      // Of 16-bit types the outputs' one, so that each is tried.
      const DType type = (row.x_types & bit_of(args.out_dtype)) != 0 ? args.out_dtype : DType::f32;
      char* const x = x_.take(args.m * args.layout.k * size_of(type));
      if (x == nullptr) return Status::no_memory("no memory for the activations of a trial");
      for (int64_t i = 0; i < args.m * args.layout.k; ++i) store_from_f32(x, type, i, memory_.x[i]);
      row.prepare({x, type, args.layout.k, args.layout, args.m, 0, args.m, activations, row.context});
      args.activations = activations;
      args.a = nullptr;
      args.scales = args.group_sums = nullptr;
      args.sums = nullptr;
    }
    args.panel_end = row.n_step < kPanelRows ? 1 : row.n_step / kPanelRows;
    row.run(args);
    args.panel_begin = args.panel_end;
    args.panel_end = args.layout.panels;
    row.run(args);
    return {};
  }

  // With `no_number` the last row has one that is none, if groups are whole rows: its outputs are NaN.
  void make_activations(const Layout& layout, int64_t m, bool no_number) {
    const int64_t padded = layout.blocks * kBlockInputs;
    for (int64_t i = 0; i < m * layout.k; ++i) memory_.x[i] = random_.between(-2.0f, 2.0f);
    if (no_number && layout.group_size == 0) memory_.x[m * layout.k - 1] = INFINITY;
    for (int64_t i = 0; i < m; ++i) {
      portable_quantize().run({memory_.x + i * layout.k, DType::f32, layout.k, padded, layout.group_inputs(),
                               memory_.a + i * padded, memory_.a_scales + i * layout.segments,
                               memory_.a_sums + i * layout.segments, memory_.a_group_sums + i * layout.groups});
    }
  }

  Status try_embedding(const EmbeddingKernel& row, const Layout& layout, const PackedFormat* format, DType type) {
    Layout row_layout;
    const uint8_t* panels;
    if (Status s = pack(format, layout, &row_layout, &panels); !s.ok() || panels == nullptr) return s;
    EmbeddingArgs args{};
    args.out_dtype = type;
    for (args.row = 0; args.row < layout.n; ++args.row) {
      args.panels = memory_.packed + layout.header_bytes;
      args.layout = layout;
      args.out = memory_.expected;
      std::memset(memory_.expected, 0xff, sizeof(float) * (kMostK + kGap));
      portable_embedding(layout.bits).run(args);
      args.panels = panels;
      args.layout = row_layout;
      args.out = memory_.actual;
      args.context = row.context;
      std::memset(memory_.actual, 0xff, sizeof(float) * (kMostK + kGap));
      row.run(args);
      float largest = 0.0f;
      for (int64_t i = 0; i < layout.k; ++i) largest = std::fmax(largest, std::fabs(load_as_f32(args.out, type, i)));
      for (int64_t i = 0; i < layout.k + kGap; ++i) {
        const float actual = load_as_f32(memory_.actual, type, i), expected = load_as_f32(memory_.expected, type, i);
        if (same(actual, expected)) continue;
        if (format != nullptr && i < layout.k &&
            std::fabs(actual - expected) <= format->tolerance * largest + rounding_of(type) * std::fabs(expected)) {
          continue;
        }
        return Status::error("row '%s' reads something else than the portable kernel: %s, %s outputs: [%" PRId64 ", %" PRId64
                             "] is %.9g; expected %.9g",
                             row.name, describe(layout).text, name_of(type), args.row, i, static_cast<double>(actual),
                             static_cast<double>(expected));
      }
    }
    return {};
  }

  // Among the values are those that the contract has cases for. What a row writes lies in other memory than what the
  // portable kernel does: behind it.
  Status try_quantize(const QuantizeKernel& row, const Layout& layout, DType type, int number) {
    const int64_t padded = layout.blocks * kBlockInputs;
    const float special[] = {1.0f, 0.0f, INFINITY, NAN, 1e-39f, 3e38f, 65504.0f, -1e-8f};
    for (int64_t i = 0; i < layout.k; ++i) {
      const bool all = number % 8 == 1;  // zeros
      const float value = all ? 0.0f : random_.between(-2.0f, 2.0f) * (number % 5 == 4 ? 1e-20f : 1.0f);
      store_from_f32(memory_.x, type, i, i == 17 ? special[number % 8] : value);
    }
    const auto at = [&](int64_t i) {  // the portable row's, the row's
      return QuantizeArgs{memory_.x, type, layout.k, padded, layout.group_inputs(), memory_.a + i * kMostPadded,
                          memory_.a_scales + i * kMostPieces, memory_.a_sums + i * kMostPieces,
                          memory_.a_group_sums + i * kMostGroups, i == 0 ? nullptr : row.context};
    };
    std::memset(memory_.a, 0x80, 2 * kMostPadded);
    std::memset(memory_.a_scales, 0xff, sizeof(float) * 2 * kMostPieces);
    std::memset(memory_.a_sums, 0x80, sizeof(int32_t) * 2 * kMostPieces);
    std::memset(memory_.a_group_sums, 0xff, sizeof(float) * 2 * kMostGroups);
    portable_quantize().run(at(0));
    row.run(at(1));
    const auto compare = [&](const char* what, const auto* values, int64_t count, int64_t offset, bool as_bits) {
      for (int64_t i = 0; i < count; ++i) {
        const float expected = static_cast<float>(values[i]), actual = static_cast<float>(values[offset + i]);
        if (as_bits ? bits_of_float(expected) == bits_of_float(actual) : same(expected, actual)) continue;
        return Status::error("row '%s' computes something else than the portable kernel: %" PRId64 " %s values, group size %"
                             PRId64 ": %s[%" PRId64 "] is %.9g; expected %.9g",
                             row.name, layout.k, name_of(type), layout.group_size, what, i, static_cast<double>(actual),
                             static_cast<double>(expected));
      }
      return Status();
    };
    if (Status s = compare("a", memory_.a, padded, kMostPadded, true); !s.ok()) return s;
    if (Status s = compare("scales", memory_.a_scales, layout.segments, kMostPieces, true); !s.ok()) return s;
    if (Status s = compare("sums", memory_.a_sums, layout.segments, kMostPieces, true); !s.ok()) return s;
    return compare("group_sums", memory_.a_group_sums, layout.groups, kMostGroups, false);
  }

  const LoadedLibrary& library_;
  Memory& memory_;
  Buffer packed_, activations_, scratch_, x_;
  Random random_;
};

}  // namespace

Status try_kernels(const LoadedLibrary& library) {
  if (Status status = sme_threads_status(); !status.ok()) return status;
  const std::unique_ptr<char, FreeAligned> memory(static_cast<char*>(allocate_aligned(sizeof(Memory))));
  if (memory == nullptr) return Status::no_memory("no memory for %zu bytes of a trial", sizeof(Memory));
  Trial trial(library, *new (memory.get()) Memory);
  const WorkingThread thread(0);
  for (const QuantizeKernel& row : library.quantize) {
    if (!can_run(row.isa)) continue;
    if (Status status = trial.quantize(row); !status.ok()) return status;
  }
  for (const LinearKernel& row : library.linear) {
    if (!can_run(row.isa)) continue;
    if (Status status = trial.linear(row); !status.ok()) return status;
  }
  for (const EmbeddingKernel& row : library.embedding) {
    if (!can_run(row.isa)) continue;
    if (Status status = trial.embedding(row); !status.ok()) return status;
  }
  return try_attention(library);
}

}  // namespace lowbit
