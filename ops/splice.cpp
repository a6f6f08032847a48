#include <cstring>
#include <memory>
#include <new>

#include "../kernels/pack.h"
#include "../kernels/registry.h"
#include "check.h"
#include "operators.h"
#include "schedule.h"
#include "vendor_rows.h"

namespace lowbit {
namespace {

constexpr int64_t kMostParts = 65536;

struct Part {
  Layout layout;
  const uint8_t* data;
  int64_t begin;  // its first row or input, counted over all parts

  int64_t size(int dim) const { return dim == 0 ? layout.n : layout.k; }
};

struct Parts {
  std::unique_ptr<Part[]> part;
  int64_t count = 0;
};

Status check_alike(const Layout& first, const Layout& other, int64_t number, int dim) {
  const int64_t expected = dim == 0 ? first.k : first.n, actual = dim == 0 ? other.k : other.n;
  if (actual != expected) {
    return Status::error("matrix %" PRId64 " has %" PRId64 " %s; expected %" PRId64 ", as matrix 0", number, actual,
                         dim == 0 ? "inputs" : "rows", expected);
  }
  if (other.bits != first.bits || other.mapping != first.mapping || other.group_size != first.group_size) {
    return Status::error("matrix %" PRId64 " has %d bits, mapping %s and groups of %" PRId64
                         "; expected %d, %s and %" PRId64 ", as matrix 0 (0: one group per row)",
                         number, other.bits, name_of(other.mapping), other.group_size, first.bits,
                         name_of(first.mapping), first.group_size);
  }
  if (other.rotation != first.rotation) {
    return Status::error("matrix %" PRId64 " has inputs in rotated blocks of %" PRId64 "; expected %" PRId64
                         ", as matrix 0 (0: not rotated)",
                         number, other.rotated_inputs(), first.rotated_inputs());
  }
  if (other.two_planes != first.two_planes) {
    return Status::error("matrix %" PRId64 " has activations of %d bits; expected %d, as matrix 0", number,
                         other.activation_bits(), first.activation_bits());
  }
  if (other.format != first.format) {
    return Status::error("matrix %" PRId64 " is in format '%s'; expected '%s', as matrix 0: repack it first", number,
                         name_of(other.format).text, name_of(first.format).text);
  }
  if (std::memcmp(first.levels, other.levels, sizeof first.levels) != 0) {
    return Status::error("matrix %" PRId64 " has another table of levels than matrix 0; expected the same", number);
  }
  return {};
}

Status read_parts(const TensorView* packed, int64_t count, int dim, Parts* parts, int64_t* total) {
  if (count < 1 || count > kMostParts) {
    return Status::error("there are %" PRId64 " matrices; expected 1 to %" PRId64, count, kMostParts);
  }
  if (dim != 0 && dim != 1) return Status::error("dim is %d; expected 0 (rows) or 1 (inputs)", dim);
  parts->part.reset(new (std::nothrow) Part[static_cast<size_t>(count)]);
  if (parts->part == nullptr) return Status::no_memory("no memory for %" PRId64 " headers", count);
  parts->count = count;
  *total = 0;
  for (int64_t i = 0; i < count; ++i) {
    Part& part = parts->part[i];
    if (Status s = read_packed(packed[i], &part.layout); !s.ok()) return s;
    if (Status s = check_alike(parts->part[0].layout, part.layout, i, dim); !s.ok()) return s;
    if (dim == 1 && i > 0) {
      const int64_t group = part.layout.group_size, before = parts->part[i - 1].layout.k;
      if (group != 0 && before % group != 0) {
        return Status::error("matrix %" PRId64 " has %" PRId64 " inputs, which end inside a group of %" PRId64
                             "; expected a multiple of it in all matrices but the last",
                             i - 1, before, group);
      }
      if (part.layout.has_bias) {
        return Status::error("matrix %" PRId64 " has a bias; expected one in the first only", i);
      }
    }
    part.data = static_cast<const uint8_t*>(packed[i].data);
    part.begin = *total;
    *total += part.size(dim);
  }
  return {};
}

Status result_layout(const Parts& parts, int dim, int64_t total, int64_t begin, int64_t end, Layout* layout) {
  const Layout& first = parts.part[0].layout;
  const char* const what = dim == 0 ? "rows" : "inputs";
  if (begin < 0 || end > total || begin >= end) {
    return Status::error("%s %" PRId64 " to %" PRId64 " were requested; expected 0 <= begin < end <= %" PRId64, what, begin,
                         end, total);
  }
  if (dim == 1 && first.group_size != 0) {
    if (begin % first.group_size != 0 || (end % first.group_size != 0 && end != total)) {
      return Status::error("inputs %" PRId64 " to %" PRId64 " cut a group of %" PRId64
                           "; expected multiples of it, or the end, %" PRId64,
                           begin, end, first.group_size, total);
    }
  }
  if (dim == 1 && first.rotation != 0 && (begin % first.rotated_inputs() != 0 || end % first.rotated_inputs() != 0)) {
    return Status::error("inputs %" PRId64 " to %" PRId64 " cut a rotated block of %" PRId64 "; expected multiples of it",
                         begin, end, first.rotated_inputs());
  }
  bool has_bias = dim == 1 && begin == 0 && first.has_bias;
  for (int64_t i = 0; dim == 0 && i < parts.count; ++i) {
    const Part& part = parts.part[i];
    has_bias |= part.layout.has_bias && part.begin < end && begin < part.begin + part.layout.n;
  }
  if (Status s = make_layout(dim == 0 ? end - begin : first.n, dim == 0 ? first.k : end - begin, first.bits, first.group_size,
                             first.mapping, has_bias, layout, levels_of(first));
      !s.ok()) {
    return s;
  }
  layout->two_planes = first.two_planes;
  if (Status s = set_rotation(first.rotated_inputs(), layout); !s.ok() || first.format == Format::panel16) return s;
  if (find_format(first.format)->unpack == nullptr) {
    return Status::error("a weight in format '%s' cannot be cut or joined: its library has no function unpack; expected "
                         "panel16: cut it before repacking",
                         name_of(first.format).text);
  }
  return make_vendor_layout(*layout, first.format, layout);
}

// 16 unpacked rows of a matrix. Scales and mins are in units of the row scales.
class Rows {
 public:
  Status make(const Layout& layout) {
    const size_t inputs = static_cast<size_t>(layout.k), groups = static_cast<size_t>(layout.groups);
    codes_.reset(new (std::nothrow) uint8_t[kPanelRows * inputs]);
    floats_.reset(new (std::nothrow) float[kPanelRows * (2 * groups + 2)]);
    if (codes_ == nullptr || floats_ == nullptr) {
      return Status::no_memory("no memory for 16 unpacked rows of %" PRId64 " inputs", layout.k);
    }
    codes = codes_.get();
    scales = floats_.get();
    mins = scales + kPanelRows * groups;
    bias = mins + kPanelRows * groups;
    row_scales = bias + kPanelRows;
    return {};
  }

  void unpack(const Layout& layout, const uint8_t* data, int64_t panel) {
    const Layout one = panel_of(layout, panel);
    std::memset(bias, 0, kPanelRows * sizeof(float));
    UnpackArgs args{codes, scales, has_mins(layout.mapping) ? mins : nullptr, layout.has_bias ? bias : nullptr};
    unpack_panels(one, data + panel * layout.panel_bytes, 0, 1, args, row_scales);
  }

  Status pack(const Layout& layout, uint8_t* data, int64_t panel, uint64_t* checksums) const {
    const Layout one = panel_of(layout, panel);
    const PackArgs args{codes, scales, has_mins(layout.mapping) ? mins : nullptr,
                        layout.has_bias ? bias : nullptr};
    const Status status = pack_panels(one, args, 0, 1, data + panel * layout.panel_bytes, checksums + panel, row_scales);
    if (status.ok()) return {};
    return Status::error("from row %" PRId64 " of the result on: %.300s", panel * kPanelRows, status.message());
  }

  // Copies `count` rows of `from`, a matrix with the same inputs.
  void copy_rows(const Layout& layout, int64_t row, const Rows& from, int64_t from_row, int64_t count) {
    const auto copy = [&](auto* to, const auto* source, int64_t per_row) {
      std::memcpy(to + row * per_row, source + from_row * per_row, static_cast<size_t>(count * per_row) * sizeof *to);
    };
    copy(codes, from.codes, layout.k);
    copy(scales, from.scales, layout.groups);
    if (has_mins(layout.mapping)) copy(mins, from.mins, layout.groups);
    copy(bias, from.bias, 1);
    copy(row_scales, from.row_scales, 1);
  }

  uint8_t* codes;
  float *scales, *mins, *bias, *row_scales;

 private:
  // The layout of a panel as a matrix of its own.
  static Layout panel_of(const Layout& layout, int64_t panel) {
    Layout one = layout;
    one.n = rows_in_panel(layout, panel);
    one.panels = 1;
    return one;
  }

  std::unique_ptr<uint8_t[]> codes_;
  std::unique_ptr<float[]> floats_;
};

// Fills panel `p` of the result with rows from `begin` on. `i` is the part that contains its first row, or an earlier part.
Status splice_rows(const Parts& parts, int64_t i, int64_t begin, const Layout& layout, int64_t p, Rows& to, Rows& from,
                   uint8_t* out, uint64_t* checksums) {
  const int64_t rows = rows_in_panel(layout, p);
  for (int64_t done = 0; done < rows;) {
    const int64_t row = begin + p * kPanelRows + done;
    while (row >= parts.part[i].begin + parts.part[i].layout.n) ++i;
    const Part& part = parts.part[i];
    const int64_t panel = (row - part.begin) / kPanelRows, at = (row - part.begin) % kPanelRows;
    // The rest of the source panel, and of the panel to fill.
    int64_t count = rows_in_panel(part.layout, panel) - at;
    if (rows - done < count) count = rows - done;
    if (count == kPanelRows) {  // a whole panel is copied
      uint8_t* const target = out + layout.header_bytes + p * layout.panel_bytes;
      std::memcpy(target, part.data + layout.header_bytes + panel * layout.panel_bytes,
                  static_cast<size_t>(layout.panel_bytes));
      checksums[p] = checksum(target, layout.panel_bytes);
      return {};
    }
    from.unpack(part.layout, part.data, panel);
    to.copy_rows(layout, done, from, at, count);
    done += count;
  }
  return to.pack(layout, out, p, checksums);
}

// Fills panel `p` of the result with inputs from `begin` on.
Status splice_inputs(const Parts& parts, int64_t begin, const Layout& layout, int64_t p, Rows& to, Rows& from,
                     uint8_t* out, uint64_t* checksums) {
  const int64_t end = begin + layout.k, group = layout.group_size;
  bool first = true;
  for (int64_t i = 0; i < parts.count; ++i) {
    const Part& part = parts.part[i];
    const int64_t part_end = part.begin + part.layout.k;
    const int64_t at = begin > part.begin ? begin : part.begin;
    const int64_t count = (end < part_end ? end : part_end) - at;
    if (count <= 0) continue;
    from.unpack(part.layout, part.data, p);
    const int64_t groups = group == 0 ? 1 : (count + group - 1) / group;
    const int64_t to_group = group == 0 ? 0 : (at - begin) / group, from_group = group == 0 ? 0 : (at - part.begin) / group;
    for (int64_t r = 0; r < rows_in_panel(layout, p); ++r) {
      float* const scales = to.scales + r * layout.groups + to_group;
      float* const mins = to.mins + r * layout.groups + to_group;
      const float* const from_scales = from.scales + r * part.layout.groups + from_group;
      const float* const from_mins = from.mins + r * part.layout.groups + from_group;
      const bool affine = has_mins(layout.mapping);
      const auto differ = [&](const char* what, float actual, float expected) {
        return Status::error("row %" PRId64 " has the %s %g in matrix %" PRId64 "; expected %g, as in the one before it: "
                             "matrices side by side are slices of one",
                             p * kPanelRows + r, what, static_cast<double>(actual), i, static_cast<double>(expected));
      };
      if (first) {
        to.row_scales[r] = from.row_scales[r];
        to.bias[r] = from.bias[r];
      } else if (from.row_scales[r] != to.row_scales[r]) {
        return differ("row scale", from.row_scales[r], to.row_scales[r]);
      } else if (group == 0 && *from_scales != *scales) {
        return differ("scale", *from_scales, *scales);
      } else if (group == 0 && affine && *from_mins != *mins) {
        return differ("min", *from_mins, *mins);
      }
      std::memcpy(scales, from_scales, static_cast<size_t>(groups) * sizeof(float));
      if (affine) std::memcpy(mins, from_mins, static_cast<size_t>(groups) * sizeof(float));
      std::memcpy(to.codes + r * layout.k + (at - begin), from.codes + r * part.layout.k + (at - part.begin),
                  static_cast<size_t>(count));
    }
    first = false;
  }
  return to.pack(layout, out, p, checksums);
}

// A whole unpacked matrix. Mins and bias are always allocated.
struct Unpacked {
  std::unique_ptr<uint8_t[]> codes;
  std::unique_ptr<float[]> floats;
  float *scales, *mins, *bias;

  Status make(const Layout& layout) {
    const size_t n = static_cast<size_t>(layout.n), groups = n * static_cast<size_t>(layout.groups);
    codes.reset(new (std::nothrow) uint8_t[n * static_cast<size_t>(layout.k)]);
    floats.reset(new (std::nothrow) float[2 * groups + n]());
    if (codes == nullptr || floats == nullptr) {
      return Status::no_memory("no memory for %" PRId64 " unpacked weights", layout.n * layout.k);
    }
    scales = floats.get();
    mins = scales + groups;
    bias = mins + groups;
    return {};
  }

  PackArgs pack_args(const Layout& layout) const {
    return {codes.get(), scales, has_mins(layout.mapping) ? mins : nullptr, layout.has_bias ? bias : nullptr};
  }
  UnpackArgs unpack_args(const Layout& layout) {
    return {codes.get(), scales, has_mins(layout.mapping) ? mins : nullptr, layout.has_bias ? bias : nullptr};
  }
};

// Copies a section of an unpacked part to its place: `count` rows or inputs, from `from_at` on to `to_at`.
Status place_part(int dim, const Layout& layout, const Unpacked& part, int64_t from_at, int64_t count, const Layout& whole,
                  int64_t to_at, Unpacked& to) {
  const int64_t rows = dim == 0 ? count : whole.n, inputs = dim == 0 ? layout.k : count;
  const int64_t first_row = dim == 0 ? from_at : 0, to_row = dim == 0 ? to_at : 0;
  const int64_t first_input = dim == 0 ? 0 : from_at, to_input = dim == 0 ? 0 : to_at;
  const int64_t group = layout.group_size == 0 ? layout.k + whole.k : layout.group_size;  // more than all inputs
  const int64_t groups = (inputs + group - 1) / group;
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(to.codes.get() + (to_row + r) * whole.k + to_input, part.codes.get() + (first_row + r) * layout.k + first_input,
                static_cast<size_t>(inputs));
    const int64_t at = (to_row + r) * whole.groups + to_input / group;
    const int64_t from = (first_row + r) * layout.groups + first_input / group;
    const bool again = dim == 1 && layout.group_size == 0 && to_at > 0;  // an earlier part has set the row's only scale
    if (again && (to.scales[at] != part.scales[from] || to.mins[at] != part.mins[from])) {
      return Status::error("row %" PRId64 " has the scale %g and the min %g in one matrix, and %g and %g in the one before it; "
                           "expected the same: matrices side by side are slices of one",
                           r, static_cast<double>(part.scales[from]), static_cast<double>(part.mins[from]),
                           static_cast<double>(to.scales[at]), static_cast<double>(to.mins[at]));
    }
    std::memcpy(to.scales + at, part.scales + from, static_cast<size_t>(groups) * sizeof(float));
    std::memcpy(to.mins + at, part.mins + from, static_cast<size_t>(groups) * sizeof(float));
    if (first_input == 0 && to_input == 0) to.bias[to_row + r] = part.bias[first_row + r];
  }
  return {};
}

// splice() of matrices in a vendor's format, which only its own functions can read: unpacks them, one matrix at a time.
Status splice_of_vendor(const Parts& parts, int dim, int64_t begin, int64_t end, const Layout& layout, uint8_t* out,
                        const Parallel& parallel) {
  const PackedFormat& format = *find_format(layout.format);
  const FormatName format_name = name_of(layout.format);
  const char* const name = format_name.text;
  Unpacked whole;
  if (Status s = whole.make(layout); !s.ok()) return s;
  FirstError error;
  for (int64_t i = 0; i < parts.count; ++i) {
    const Part& part = parts.part[i];
    const int64_t from = begin > part.begin ? begin : part.begin, part_end = part.begin + part.size(dim);
    const int64_t count = (end < part_end ? end : part_end) - from;
    if (count <= 0) continue;
    Unpacked unpacked;
    if (Status s = unpacked.make(part.layout); !s.ok()) return s;
    vendor_rows(format, part.layout, parallel, [&](int64_t first, int64_t last) {
      const char* const reason = format.unpack(format.context, part.layout, part.data + part.layout.header_bytes, first, last,
                                               unpacked.unpack_args(part.layout));
      if (reason != nullptr) {
        error.report(first, Status::error("a weight in format '%s' cannot be unpacked: %.200s", name, reason));
      }
    });
    if (!error.status().ok()) return error.status();
    if (Status s = place_part(dim, part.layout, unpacked, from - part.begin, count, layout, from - begin, whole); !s.ok()) {
      return s;
    }
  }
  std::memset(out, 0, static_cast<size_t>(layout.total_bytes));
  vendor_rows(format, layout, parallel, [&](int64_t first, int64_t last) {
    const char* const reason =
        format.pack(format.context, layout, whole.pack_args(layout), first, last, out + layout.header_bytes);
    if (reason != nullptr) error.report(first, Status::error("format '%s' does not support this weight: %.200s", name, reason));
  });
  if (!error.status().ok()) return error.status();
  seal_vendor_format(layout, out);
  return {};
}

// Approximate number of weights per claim.
constexpr int64_t kClaimWeights = 1 << 18;

}  // namespace

Status splice_shape(const TensorView* packed, int64_t count, int dim, int64_t begin, int64_t end, Layout* layout) {
  Parts parts;
  int64_t total = 0;
  if (Status s = read_parts(packed, count, dim, &parts, &total); !s.ok()) return s;
  return result_layout(parts, dim, total, begin, end, layout);
}

Status splice(const TensorView* packed, int64_t count, int dim, int64_t begin, int64_t end, const TensorView& out,
              const Parallel& parallel) {
  Parts parts;
  int64_t total = 0;
  Layout layout;
  if (Status s = check_parallel(parallel); !s.ok()) return s;
  if (Status s = read_parts(packed, count, dim, &parts, &total); !s.ok()) return s;
  if (Status s = result_layout(parts, dim, total, begin, end, &layout); !s.ok()) return s;
  if (Status s = check_tensor("out", out, ElementType::u8, {1, {layout.total_bytes}}); !s.ok()) return s;
  for (int64_t i = 0; i < count; ++i) {
    if (Status s = check_apart({{"out", &out}}, {{"packed_weight", &packed[i]}}); !s.ok()) return s;
  }
  // Verified first, because new checksums would hide a changed byte.
  for (int64_t i = 0; i < count; ++i) {
    if (Status s = verify_payload(parts.part[i].data, parts.part[i].layout); !s.ok()) return s;
  }
  uint8_t* const bytes = static_cast<uint8_t*>(out.data);
  if (layout.format != Format::panel16) return splice_of_vendor(parts, dim, begin, end, layout, bytes, parallel);
  const std::unique_ptr<uint64_t[]> checksums(new (std::nothrow) uint64_t[static_cast<size_t>(layout.panels)]);
  if (checksums == nullptr) return Status::no_memory("no memory for %" PRId64 " checksums", layout.panels);
  const Layout* widest = &layout;
  for (int64_t i = 0; i < count; ++i) {
    if (parts.part[i].layout.k > widest->k) widest = &parts.part[i].layout;
  }

  FirstError error;
  parallel_1d(parallel, layout.panels, 1 + kClaimWeights / (layout.k * kPanelRows), [&](int, int64_t first, int64_t last) {
    Rows to, from;
    Status status = to.make(layout);
    if (status.ok()) status = from.make(*widest);
    int64_t i = 0;
    for (int64_t p = first; p < last && status.ok(); ++p) {
      if (dim == 1) {
        status = splice_inputs(parts, begin, layout, p, to, from, bytes, checksums.get());
        continue;
      }
      while (parts.part[i].begin + parts.part[i].layout.n <= begin + p * kPanelRows) ++i;
      status = splice_rows(parts, i, begin, layout, p, to, from, bytes, checksums.get());
    }
    error.report(first, status);
  });
  if (!error.status().ok()) return error.status();
  seal(layout, checksums.get(), bytes);
  return {};
}

}  // namespace lowbit
