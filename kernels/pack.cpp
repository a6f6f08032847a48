#include "pack.h"

#include <cinttypes>
#include <cmath>
#include <cstring>
#include <utility>

#include "numeric.h"

namespace lowbit {
namespace {

// The float16 value of a row's largest scale if the row scale is not a power of two. It is as large as possible, so that scales
// down to 2^-29 times the largest are normal numbers.
constexpr float kLargestScale = 0x1p15f;
constexpr float kSmallestRowScale = 0x1p-126f;  // a normal number, so that dividing by it is exact enough

bool exact_in_f16(float value) { return f32_from_f16(f16_from_f32(value)) == value; }

struct ScaleRange {
  float largest;
  const float* not_finite;
};

ScaleRange scan(const float* values, int64_t count) {
  ScaleRange range{0.0f, nullptr};
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) return {0.0f, values + i};
    range.largest = std::fmax(range.largest, std::fabs(values[i]));
  }
  return range;
}

float choose_row_scale(const float* scales, const float* mins, int64_t groups, float largest) {
  if (largest == 0.0f) return 1.0f;
  int exponent;
  std::frexp(largest, &exponent);  // largest = f * 2^exponent, f in [0.5, 1): scaled to at least 2^15
  const float power = std::fmax(std::ldexp(1.0f, exponent - 16), kSmallestRowScale);
  bool exact = true;
  for (int64_t g = 0; g < groups && exact; ++g) {
    exact = exact_in_f16(scales[g] / power) && (mins == nullptr || exact_in_f16(mins[g] / power));
  }
  return exact ? power : std::fmax(largest / kLargestScale, kSmallestRowScale);
}

template <int Bits>
void encode_block(const uint8_t (&lines)[kBlockLines][kLineBytes], uint8_t* packed) {
  // A local copy cannot alias the input, so the loop can be vectorized.
  uint8_t out[Bits * kLineBytes] = {};
  [&]<int... J>(std::integer_sequence<int, J...>) {
    for (int p = 0; p < kLineBytes; ++p) (write_code<Bits, J>(out + p, lines[J][p]), ...);
  }(std::make_integer_sequence<int, kBlockLines>());
  std::memcpy(packed, out, sizeof out);
}

template <int Bits>
void decode_block(const uint8_t* packed, uint8_t (&lines)[kBlockLines][kLineBytes]) {
  [&]<int... J>(std::integer_sequence<int, J...>) {
    for (int p = 0; p < kLineBytes; ++p) ((lines[J][p] = read_code<Bits, J>(packed + p)), ...);
  }(std::make_integer_sequence<int, kBlockLines>());
}

using Lines = uint8_t[kBlockLines][kLineBytes];
using Encode = void (*)(const Lines&, uint8_t*);
using Decode = void (*)(const uint8_t*, Lines&);
constexpr Encode kEncode[] = {encode_block<1>, encode_block<2>, encode_block<3>, encode_block<4>,
                              encode_block<5>, encode_block<6>, encode_block<7>, encode_block<8>};
constexpr Decode kDecode[] = {decode_block<1>, decode_block<2>, decode_block<3>, decode_block<4>,
                              decode_block<5>, decode_block<6>, decode_block<7>, decode_block<8>};

template <class T>
void put(uint8_t* base, int64_t index, T value) {
  std::memcpy(base + index * static_cast<int64_t>(sizeof value), &value, sizeof value);
}

// The codes of one panel; rows and inputs beyond n and k are zero.
Status pack_codes(const Layout& layout, const uint8_t* codes, int64_t panel, uint8_t* out) {
  const int64_t rows = rows_in_panel(layout, panel);
  const uint8_t* first = codes + panel * kPanelRows * layout.k;
  const unsigned limit = 1u << layout.bits;
  for (int64_t b = 0; b < layout.blocks; ++b) {
    Lines lines = {};
    const int64_t inputs = layout.k - b * kBlockInputs < kBlockInputs ? layout.k - b * kBlockInputs : kBlockInputs;
    uint8_t seen = 0;
    for (int64_t r = 0; r < rows; ++r) {
      uint8_t row[kBlockInputs] = {};
      const uint8_t* source = first + r * layout.k + b * kBlockInputs;
      if (inputs == kBlockInputs) {
        std::memcpy(row, source, kBlockInputs);
      } else {
        std::memcpy(row, source, static_cast<size_t>(inputs));
      }
      for (int i = 0; i < kBlockInputs; ++i) seen |= row[i];
      for (int j = 0; j < kBlockLines; ++j) std::memcpy(&lines[j][4 * r], row + 4 * j, 4);
    }
    if (seen >= limit) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = b * kBlockInputs; i < b * kBlockInputs + inputs; ++i) {
          const unsigned code = first[r * layout.k + i];
          if (code >= limit) {
            return Status::error("code [%" PRId64 ", %" PRId64 "] is %u; expected less than %u at %d bits",
                                 panel * kPanelRows + r, i, code, limit, layout.bits);
          }
        }
      }
    }
    kEncode[layout.bits - 1](lines, out + layout.block_offset(b));
  }
  return {};
}

Status pack_scales(const Layout& layout, const PackArgs& args, const float* row_scales, int64_t panel, uint8_t* out) {
  const int64_t groups = layout.groups;
  const int64_t group_inputs = layout.group_inputs();
  for (int64_t r = 0; r < rows_in_panel(layout, panel); ++r) {
    const int64_t row = panel * kPanelRows + r;
    const float* scales = args.scales + row * groups;
    const float* mins = args.mins == nullptr ? nullptr : args.mins + row * groups;
    const float bias = args.bias == nullptr ? 0.0f : args.bias[row];

    const ScaleRange range = scan(scales, groups);
    const ScaleRange min_range = mins == nullptr ? ScaleRange{} : scan(mins, groups);
    if (range.not_finite != nullptr) {
      return Status::error("scale [%" PRId64 ", %td] is %g; expected a finite value", row, range.not_finite - scales,
                           static_cast<double>(*range.not_finite));
    }
    if (min_range.not_finite != nullptr) {
      return Status::error("min [%" PRId64 ", %td] is %g; expected a finite value", row, min_range.not_finite - mins,
                           static_cast<double>(*min_range.not_finite));
    }
    if (!std::isfinite(bias)) {
      return Status::error("bias [%" PRId64 "] is %g; expected a finite value", row, static_cast<double>(bias));
    }

    const float given = row_scales == nullptr ? 0.0f : row_scales[row];
    if (!std::isfinite(given)) {
      return Status::error("row scale [%" PRId64 "] is %g; expected a finite value", row, static_cast<double>(given));
    }
    const float row_scale = row_scales != nullptr
                                ? given
                                : choose_row_scale(scales, mins, groups, std::fmax(range.largest, min_range.largest));
    const float unit = row_scales != nullptr ? 1.0f : row_scale;
    double row_sum = 0.0;
    const uint8_t* codes = args.codes + row * layout.k;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * group_inputs;
      const int64_t end = begin + group_inputs < layout.k ? begin + group_inputs : layout.k;
      int64_t sum = 0;
      if (has_table(layout.mapping)) {
        for (int64_t i = begin; i < end; ++i) sum += layout.levels[codes[i]];
      } else {
        for (int64_t i = begin; i < end; ++i) sum += codes[i];
        if (mins == nullptr) sum = level_factor(layout.bits) * sum - level_offset(layout.bits) * (end - begin);
      }

      uint8_t* group = out + layout.scales_offset(g);
      const uint16_t scale = f16_from_f32(scales[g] / unit);
      put(group, r, scale);
      row_sum += static_cast<double>(f32_from_f16(scale)) * static_cast<double>(sum);
      if (mins != nullptr) {
        const uint16_t min = f16_from_f32(mins[g] / unit);
        put(group, kPanelRows + r, min);
        row_sum += static_cast<double>(f32_from_f16(min)) * static_cast<double>(end - begin);
      }
    }
    uint8_t* head = out + layout.head_offset;
    put(head, r, row_scale);
    put(head, kPanelRows + r, static_cast<float>(row_sum));
    put(head, 2 * kPanelRows + r, bias);
  }
  return {};
}

}  // namespace

Status pack_panels(const Layout& layout, const PackArgs& args, int64_t begin, int64_t end, void* packed,
                   uint64_t* panel_checksums, const float* row_scales) {
  for (int64_t p = begin; p < end; ++p) {
    uint8_t* panel = static_cast<uint8_t*>(packed) + layout.header_bytes + p * layout.panel_bytes;
    std::memset(panel, 0, static_cast<size_t>(layout.panel_bytes));
    if (Status status = pack_codes(layout, args.codes, p, panel); !status.ok()) return status;
    if (Status status = pack_scales(layout, args, row_scales, p, panel); !status.ok()) return status;
    panel_checksums[p] = checksum(panel, layout.panel_bytes);
  }
  return {};
}

void round_to_stored(float* scales, float* mins, int64_t groups) {
  const float largest = std::fmax(scan(scales, groups).largest, mins == nullptr ? 0.0f : scan(mins, groups).largest);
  const float row_scale = choose_row_scale(scales, mins, groups, largest);
  for (int64_t g = 0; g < groups; ++g) {
    scales[g] = row_scale * f32_from_f16(f16_from_f32(scales[g] / row_scale));
    if (mins != nullptr) mins[g] = row_scale * f32_from_f16(f16_from_f32(mins[g] / row_scale));
  }
}

void seal(const Layout& layout, const uint64_t* panel_checksums, void* packed) {
  uint64_t folded = 0;
  for (int64_t p = 0; p < layout.panels; ++p) folded = fold_checksum(folded, panel_checksums[p]);
  write_header(layout, folded, packed);
}

void unpack_panels(const Layout& layout, const void* packed, int64_t begin, int64_t end, const UnpackArgs& args,
                   float* row_scales) {
  for (int64_t p = begin; p < end; ++p) {
    const uint8_t* panel = static_cast<const uint8_t*>(packed) + layout.header_bytes + p * layout.panel_bytes;
    const int64_t rows = rows_in_panel(layout, p);
    for (int64_t b = 0; b < layout.blocks; ++b) {
      Lines lines;
      kDecode[layout.bits - 1](panel + layout.block_offset(b), lines);
      const int64_t inputs = layout.k - b * kBlockInputs < kBlockInputs ? layout.k - b * kBlockInputs : kBlockInputs;
      for (int64_t r = 0; r < rows; ++r) {
        uint8_t row[kBlockInputs];
        for (int j = 0; j < kBlockLines; ++j) std::memcpy(row + 4 * j, &lines[j][4 * r], 4);
        std::memcpy(args.codes + (p * kPanelRows + r) * layout.k + b * kBlockInputs, row, static_cast<size_t>(inputs));
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = p * kPanelRows + r;
      const uint8_t* head = panel + layout.head_offset;
      const float row_scale = load_as_f32(head, DType::f32, r);
      const float unit = row_scales != nullptr ? 1.0f : row_scale;
      if (row_scales != nullptr) row_scales[row] = row_scale;
      for (int64_t g = 0; g < layout.groups; ++g) {
        const uint8_t* group = panel + layout.scales_offset(g);
        args.scales[row * layout.groups + g] = unit * load_as_f32(group, DType::f16, r);
        if (args.mins != nullptr) {
          args.mins[row * layout.groups + g] = unit * load_as_f32(group, DType::f16, kPanelRows + r);
        }
      }
      if (args.bias != nullptr) args.bias[row] = load_as_f32(head, DType::f32, 2 * kPanelRows + r);
    }
  }
}

}  // namespace lowbit
