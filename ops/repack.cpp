#include <cstring>
#include <memory>

#include "../kernels/pack.h"
#include "../kernels/registry.h"
#include "aligned_memory.h"
#include "check.h"
#include "operators.h"
#include "vendor_rows.h"

namespace lowbit {

namespace {

Status target_layout(const Layout& source, const char* format, Layout* layout) {
  Layout panel16;
  if (Status s = make_layout(source.n, source.k, source.bits, source.group_size, source.mapping, source.has_bias,
                             &panel16, levels_of(source));
      !s.ok()) {
    return s;
  }
  panel16.rotation = source.rotation;
  panel16.two_planes = source.two_planes;
  if (format == nullptr) return Status::error("the name of the format is null; expected panel16 or a loaded format");
  if (std::strcmp(format, "panel16") == 0) {
    *layout = panel16;
    return {};
  }
  const size_t length = std::strlen(format);
  if (length < 1 || length > 4 || find_format(vendor_format(format)) == nullptr) {
    return Status::error("there is no format '%.32s'; expected panel16 or the format of a loaded kernel library",
                         format);
  }
  return make_vendor_layout(panel16, vendor_format(format), layout);
}

}  // namespace

Status repack_shape(const TensorView& packed, const char* format, Layout* layout) {
  Layout source;
  if (Status s = read_packed(packed, &source); !s.ok()) return s;
  return target_layout(source, format, layout);
}

Status repack(const TensorView& packed, const char* format, const TensorView& out, const Parallel& parallel) {
  Layout source, target;
  if (Status s = check_parallel(parallel); !s.ok()) return s;
  if (Status s = read_packed(packed, &source); !s.ok()) return s;
  // Uses the layout read above, because the header's memory may have changed. unpack() reads it again, and refuses another
  // shape.
  if (Status s = target_layout(source, format, &target); !s.ok()) return s;
  if (Status s = check_tensor("out", out, ElementType::u8, {1, {target.total_bytes}}); !s.ok()) return s;
  if (Status s = check_apart({{"out", &out}}, {{"packed_weight", &packed}}); !s.ok()) return s;

  const bool affine = has_mins(source.mapping);
  const int64_t groups = source.n * source.groups;
  const int64_t floats = groups + (affine ? groups : 0) + (source.has_bias ? source.n : 0);
  const int64_t float_bytes = floats * static_cast<int64_t>(sizeof(float));
  const std::unique_ptr<char, FreeAligned> memory(
      static_cast<char*>(allocate_aligned(float_bytes + source.n * source.k)));
  if (memory == nullptr) return Status::no_memory("no memory for %" PRId64 " unpacked weights", source.n * source.k);
  float* const values = reinterpret_cast<float*>(memory.get());
  uint8_t* const codes = reinterpret_cast<uint8_t*>(memory.get() + float_bytes);
  const auto view = [](void* data, ElementType type, Shape shape) {
    TensorView result;
    result.data = data;
    result.type = type;
    result.shape = shape;
    int64_t stride = 1;
    for (int d = shape.ndim - 1; d >= 0; stride *= shape.size[d--]) result.stride[d] = stride;
    return result;
  };
  const Shape per_group{2, {source.n, source.groups}};
  const TensorView codes_view = view(codes, ElementType::u8, {2, {source.n, source.k}});
  const TensorView scales = view(values, ElementType::f32, per_group);
  const TensorView mins = view(values + groups, ElementType::f32, affine ? per_group : Shape{2, {0, 0}});
  const TensorView bias = view(values + floats - (source.has_bias ? source.n : 0), ElementType::f32,
                               source.has_bias ? Shape{1, {source.n}} : Shape{1, {0}});
  if (Status s = unpack(packed, codes_view, scales, mins, bias, parallel); !s.ok()) return s;
  if (target.format == Format::panel16) {
    const TensorView levels = view(source.levels, ElementType::i8, {1, {int64_t{1} << source.bits}});
    const Status status =
        pack(codes_view, scales, affine ? &mins : nullptr, source.has_bias ? &bias : nullptr, source.bits, source.group_size,
             out, parallel, has_table(source.mapping) ? &levels : nullptr, source.rotated_inputs());
    return status.ok() ? set_activation_bits(out, source.activation_bits()) : status;
  }
  PackArgs args{};
  args.codes = codes;
  args.scales = static_cast<const float*>(scales.data);
  args.mins = affine ? static_cast<const float*>(mins.data) : nullptr;
  args.bias = source.has_bias ? static_cast<const float*>(bias.data) : nullptr;
  std::memset(out.data, 0, static_cast<size_t>(target.total_bytes));
  void* const bytes = static_cast<char*>(out.data) + kHeaderBytes;
  const PackedFormat& vendor_format = *find_format(target.format);
  FirstError error;
  vendor_rows(vendor_format, target, parallel, [&](int64_t begin, int64_t end) {
    if (const char* reason = vendor_format.pack(vendor_format.context, target, args, begin, end, bytes)) {
      error.report(begin, Status::error("format '%s' does not support this weight: %.200s", format, reason));
    }
  });
  if (!error.status().ok()) return error.status();
  seal_vendor_format(target, out.data);
  return {};
}

}  // namespace lowbit
