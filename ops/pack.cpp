#include "../kernels/pack.h"

#include <memory>
#include <new>

#include "../kernels/registry.h"
#include "check.h"
#include "operators.h"
#include "schedule.h"
#include "vendor_rows.h"

namespace lowbit {
namespace {

Shape shape_of(int64_t first) { return {1, {first}}; }
Shape shape_of(int64_t first, int64_t second) { return {2, {first, second}}; }

int64_t panels_per_claim(const Layout& layout) { return 1 + kPackedWeights / (layout.k * kPanelRows); }

}  // namespace

Status pack_shape(const TensorView& codes, int bits, int64_t group_size, bool affine, bool has_bias, Layout* layout,
                  const TensorView* levels, int64_t rotated_inputs) {
  return matrix_layout("codes have", codes, bits, group_size, affine, has_bias, layout, levels, rotated_inputs);
}

Status pack(const TensorView& codes, const TensorView& scales, const TensorView* mins, const TensorView* bias, int bits,
            int64_t group_size, const TensorView& out, const Parallel& parallel, const TensorView* levels,
            int64_t rotated_inputs) {
  Layout layout;
  if (Status s = check_parallel(parallel); !s.ok()) return s;
  if (Status s = pack_shape(codes, bits, group_size, mins != nullptr, bias != nullptr, &layout, levels, rotated_inputs);
      !s.ok()) {
    return s;
  }
  const Shape per_group = shape_of(layout.n, layout.groups);
  if (Status s = check_tensor("codes", codes, ElementType::u8, codes.shape); !s.ok()) return s;
  if (Status s = check_tensor("scales", scales, ElementType::f32, per_group); !s.ok()) return s;
  if (mins != nullptr) {
    if (Status s = check_tensor("mins", *mins, ElementType::f32, per_group); !s.ok()) return s;
  }
  if (bias != nullptr) {
    if (Status s = check_tensor("bias", *bias, ElementType::f32, shape_of(layout.n)); !s.ok()) return s;
  }
  if (Status s = check_tensor("out", out, ElementType::u8, shape_of(layout.total_bytes)); !s.ok()) return s;
  if (Status s = check_apart({{"out", &out}}, {{"codes", &codes}, {"scales", &scales}, {"mins", mins}, {"bias", bias},
                                               {"levels", levels}});
      !s.ok()) {
    return s;
  }

  PackArgs args{};
  args.codes = static_cast<const uint8_t*>(codes.data);
  args.scales = static_cast<const float*>(scales.data);
  args.mins = mins == nullptr ? nullptr : static_cast<const float*>(mins->data);
  args.bias = bias == nullptr ? nullptr : static_cast<const float*>(bias->data);

  const std::unique_ptr<uint64_t[]> checksums(new (std::nothrow) uint64_t[static_cast<size_t>(layout.panels)]);
  if (checksums == nullptr) return Status::no_memory("no memory for %" PRId64 " checksums", layout.panels);

  FirstError error;
  parallel_1d(parallel, layout.panels, panels_per_claim(layout), [&](int, int64_t begin, int64_t end) {
    error.report(begin, pack_panels(layout, args, begin, end, out.data, checksums.get()));
  });
  if (!error.status().ok()) return error.status();
  seal(layout, checksums.get(), out.data);
  return {};
}

Status set_activation_bits(const TensorView& packed, int64_t bits) {
  Layout layout;
  if (Status s = read_packed(packed, &layout); !s.ok()) return s;
  if (Status s = set_activation_bits(bits, &layout); !s.ok()) return s;
  write_header(layout, payload_checksum_of(packed.data), packed.data);
  return {};
}

Status unpack(const TensorView& packed, const TensorView& codes, const TensorView& scales, const TensorView& mins,
              const TensorView& bias, const Parallel& parallel) {
  Layout layout;
  if (Status s = check_parallel(parallel); !s.ok()) return s;
  if (Status s = read_packed(packed, &layout); !s.ok()) return s;
  if (Status s = verify_payload(packed.data, layout); !s.ok()) return s;
  const bool affine = has_mins(layout.mapping);
  const Shape per_group = shape_of(layout.n, layout.groups);
  if (Status s = check_tensor("codes", codes, ElementType::u8, shape_of(layout.n, layout.k)); !s.ok()) return s;
  if (Status s = check_tensor("scales", scales, ElementType::f32, per_group); !s.ok()) return s;
  if (Status s = check_tensor("mins", mins, ElementType::f32, affine ? per_group : shape_of(0, 0)); !s.ok()) return s;
  if (Status s = check_tensor("bias", bias, ElementType::f32, layout.has_bias ? shape_of(layout.n) : shape_of(0)); !s.ok()) {
    return s;
  }
  if (Status s = check_apart({{"codes", &codes}, {"scales", &scales}, {"mins", &mins}, {"bias", &bias}},
                             {{"packed_weight", &packed}});
      !s.ok()) {
    return s;
  }
  UnpackArgs args{};
  args.codes = static_cast<uint8_t*>(codes.data);
  args.scales = static_cast<float*>(scales.data);
  args.mins = affine ? static_cast<float*>(mins.data) : nullptr;
  args.bias = layout.has_bias ? static_cast<float*>(bias.data) : nullptr;
  if (layout.format != Format::panel16) {
    const PackedFormat& format = *find_format(layout.format);
    const auto refusal = [&](const char* reason) {
      return Status::error("a weight in format '%s' cannot be unpacked: %.200s", name_of(layout.format).text, reason);
    };
    if (format.unpack == nullptr) return refusal("its library has no function for it");
    FirstError error;
    vendor_rows(format, layout, parallel, [&](int64_t begin, int64_t end) {
      const uint8_t* const bytes = static_cast<const uint8_t*>(packed.data) + layout.header_bytes;
      const char* const reason = format.unpack(format.context, layout, bytes, begin, end, args);
      if (reason != nullptr) error.report(begin, refusal(reason));
    });
    return error.status();
  }
  parallel_1d(parallel, layout.panels, panels_per_claim(layout),
              [&](int, int64_t begin, int64_t end) { unpack_panels(layout, packed.data, begin, end, args); });
  return {};
}

}  // namespace lowbit
