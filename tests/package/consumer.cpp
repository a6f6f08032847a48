// Packs a matrix and multiplies with it, using only the installed headers and library.
#include <lowbit/kernels/registry.h>
#include <lowbit/ops/operators.h>

#include <cstdio>
#include <vector>

namespace {

constexpr int64_t kRows = 3, kOutputs = 20, kInputs = 64;

lowbit::TensorView view(void* data, lowbit::ElementType type, int64_t rows, int64_t columns) {
  lowbit::TensorView tensor;
  tensor.data = data;
  tensor.type = type;
  tensor.shape.ndim = 2;
  tensor.shape.size[0] = rows;
  tensor.shape.size[1] = tensor.stride[0] = columns;
  tensor.stride[1] = 1;
  return tensor;
}

int fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  return 1;
}

}  // namespace

int main() {
  using lowbit::ElementType;
  // Integers that equal their codes: inputs from -127 to 127 with 127 in every row, and weights from -8 to 7 at scale 1.
  std::vector<uint8_t> codes(kOutputs * kInputs);
  std::vector<float> x(kRows * kInputs), scales(kOutputs, 1.0f), y(kRows * kOutputs);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 7 % 16);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i % kInputs == 0 ? 127 : static_cast<int>(i * 37 % 255) - 127);
  }

  lowbit::Layout layout;
  const auto codes_view = view(codes.data(), ElementType::u8, kOutputs, kInputs);
  lowbit::Status status = lowbit::pack_shape(codes_view, 4, 0, false, false, &layout);
  if (!status.ok()) return fail(status.message());
  std::vector<uint8_t> bytes(static_cast<size_t>(layout.total_bytes));
  lowbit::TensorView packed = view(bytes.data(), ElementType::u8, 1, layout.total_bytes);
  packed.shape.ndim = 1;
  packed.shape.size[0] = layout.total_bytes;
  packed.stride[0] = 1;
  const lowbit::Parallel alone;
  status = lowbit::pack(codes_view, view(scales.data(), ElementType::f32, kOutputs, 1), nullptr, nullptr, 4, 0, packed,
                        alone);
  if (!status.ok()) return fail(status.message());

  const auto x_view = view(x.data(), ElementType::f32, kRows, kInputs);
  const auto y_view = view(y.data(), ElementType::f32, kRows, kOutputs);
  status = lowbit::linear(x_view, packed, kOutputs, y_view, alone);
  if (!status.ok()) return fail(status.message());
  // The scale of each row's one segment (ukernel.h).
  const float scale = lowbit::float_from_bits(lowbit::bits_of_float(127.0f * (1.0f / 127.0f)) & ~3u);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t output = 0; output < kOutputs; ++output) {
      int32_t sum = 0;
      for (int64_t i = 0; i < kInputs; ++i) {
        sum += static_cast<int32_t>(x[static_cast<size_t>(row * kInputs + i)]) *
               (codes[static_cast<size_t>(output * kInputs + i)] - 8);
      }
      const float expected = scale * static_cast<float>(sum);
      if (y[static_cast<size_t>(row * kOutputs + output)] != expected) return fail("a product is wrong");
    }
  }

  bytes[0] ^= 1;
  if (lowbit::linear(x_view, packed, kOutputs, y_view, alone).ok()) return fail("altered bytes were accepted");
  std::printf("%s of %zu rows\n", lowbit::choose_linear(layout, kRows, lowbit::active_isa(), lowbit::streams()).name,
              lowbit::linear_kernel_count());
  return 0;
}
