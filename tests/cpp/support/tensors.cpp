#include "tensors.h"

#include <cmath>

#include "../../../kernels/registry.h"
#include "reference.h"
#include "scratch.h"

namespace lowbit::test {

std::vector<uint8_t> expected_linear(const TensorView& x, const uint8_t* packed, const Layout& layout) {
  const DType dtype = dtype_of(x.type);
  const int64_t rows = x.shape.numel() / layout.k;
  std::vector<uint8_t> row(static_cast<size_t>(layout.k * size_of(dtype)));
  std::vector<uint8_t> out(static_cast<size_t>(rows * layout.n * size_of(dtype)));
  std::vector<int8_t> a(static_cast<size_t>(layout.blocks * 32));
  std::vector<int32_t> sums(static_cast<size_t>(layout.segments));
  std::vector<float> scales(static_cast<size_t>(layout.segments)), group_sums(static_cast<size_t>(layout.groups));
  const QuantizeKernel& quantize = portable_quantize();
  const LinearKernel& kernel = portable_linear(layout.bits);
  void* const scratch = linear_scratch();
  const bool together = x.stride[x.shape.ndim - 1] == 1;  // whether the inputs of a row are adjacent
  const auto run = [&](const void* from, DType from_dtype, void* to, DType to_dtype) {
    quantize.run({.x = from,
                  .x_dtype = from_dtype,
                  .k = layout.k,
                  .k_padded = layout.blocks * 32,
                  .group_inputs = layout.group_inputs(),
                  .a = a.data(),
                  .scales = scales.data(),
                  .sums = sums.data(),
                  .group_sums = group_sums.data()});
    kernel.run({.panels = packed + layout.header_bytes,
                .layout = layout,
                .panel_begin = 0,
                .panel_end = layout.panels,
                .a = a.data(),
                .scales = scales.data(),
                .sums = sums.data(),
                .group_sums = group_sums.data(),
                .m = 1,
                .out = to,
                .out_dtype = to_dtype,
                .out_stride = layout.n,
                .scratch = scratch});
  };
  for (int64_t i = 0; i < rows; ++i) {
    if (together) std::memcpy(row.data(), element(x, i * layout.k), row.size());
    for (int64_t j = 0; j < layout.k && !together; ++j) {
      std::memcpy(row.data() + j * size_of(dtype), element(x, i * layout.k + j), static_cast<size_t>(size_of(dtype)));
    }
    std::vector<float> floats;
    for (int64_t j = 0; j < layout.k; ++j) floats.push_back(load_as_f32(row.data(), dtype, j));
    if (layout.rotation != 0) floats = contract_rotate(floats, layout.rotated_inputs());
    uint8_t* const to = out.data() + i * layout.n * size_of(dtype);
    if (!layout.two_planes) {
      const bool is_rotated = layout.rotation != 0;
      run(is_rotated ? static_cast<const void*>(floats.data()) : row.data(), is_rotated ? DType::f32 : dtype, to, dtype);
      continue;
    }
    std::vector<float> first(static_cast<size_t>(layout.n)), second(first);
    run(floats.data(), DType::f32, first.data(), DType::f32);
    const std::vector<Segment> segments = segments_of(layout.k, layout.group_inputs());
    for (size_t s = 0; s < segments.size(); ++s) {
      for (size_t j = static_cast<size_t>(segments[s].begin); j < static_cast<size_t>(segments[s].end); ++j) {
        floats[j] = std::fma(-scales[s], static_cast<float>(a[j]), floats[j]);
      }
    }
    run(floats.data(), DType::f32, second.data(), DType::f32);
    for (int64_t j = 0; j < layout.n; ++j) {
      float bias;  // the last of the head's three parts
      const uint8_t* const panel = packed + layout.header_bytes + j / 16 * layout.panel_bytes;
      std::memcpy(&bias, panel + layout.head_offset + 4 * (32 + j % 16), sizeof bias);
      const size_t at = static_cast<size_t>(j);
      store_from_f32(to, dtype, j, first[at] + (second[at] - bias));
    }
  }
  return out;
}

testing::AssertionResult refused(const Status& status, const char* says, Status::Kind kind) {
  if (status.ok()) return testing::AssertionFailure() << "accepted";
  if (status.kind() != kind) return testing::AssertionFailure() << "of another kind: '" << status.message() << "'";
  if (std::strstr(status.message(), says) != nullptr) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "the message is '" << status.message() << "', without '" << says << "'";
}

}  // namespace lowbit::test
