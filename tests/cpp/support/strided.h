// Tensors with any strides for the operators of plan/numbers.h, and their elements one by one.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "random.h"
#include "tensors.h"

namespace lowbit::test {

inline constexpr auto kF32 = ElementType::f32, kBf16 = ElementType::bf16, kF16 = ElementType::f16, kI32 = ElementType::i32,
                      kI64 = ElementType::i64, kBool = ElementType::boolean, kU8 = ElementType::u8;
inline constexpr ElementType kFloats[] = {kF32, kBf16, kF16};
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

inline bool is_float(ElementType type) { return is_activation_type(type); }

inline double value(const TensorView& view, int64_t flat) {
  const uint8_t* const at = element(view, flat);
  if (is_float(view.type)) return load_as_f32(at, dtype_of(view.type), 0);
  if (view.type == kI64) return static_cast<double>(*reinterpret_cast<const int64_t*>(at));
  return view.type == kI32 ? *reinterpret_cast<const int32_t*>(at) : *at;
}

inline void set(const TensorView& view, int64_t flat, double value) {
  uint8_t* const at = const_cast<uint8_t*>(element(view, flat));
  if (is_float(view.type)) store_from_f32(at, dtype_of(view.type), 0, static_cast<float>(value));
  else if (view.type == kI64) *reinterpret_cast<int64_t*>(at) = static_cast<int64_t>(value);
  else if (view.type == kI32) *reinterpret_cast<int32_t*>(at) = static_cast<int32_t>(value);
  else *at = value != 0.0;
}

inline float rounded(double value, ElementType type) {
  uint8_t bytes[4];
  store_from_f32(bytes, dtype_of(type), 0, static_cast<float>(value));
  return load_as_f32(bytes, dtype_of(type), 0);
}

// Equal, or both NaN.
inline bool same(double a, double b) { return a == b || (a != a && b != b); }

enum class Form { contiguous, transposed, with_gaps, backwards };
inline constexpr Form kForms[] = {Form::contiguous, Form::transposed, Form::with_gaps, Form::backwards};

// A view of these sizes, in guarded memory that ends with it.
struct Strided {
  std::unique_ptr<Guarded> memory;
  TensorView view;

  Strided(ElementType type, const std::vector<int64_t>& sizes, Form form, std::vector<bool> repeats = {}) {
    repeats.resize(sizes.size());
    std::vector<int64_t> strides(sizes.size());
    const int64_t gap = form == Form::with_gaps ? 3 : 1;
    int64_t stride = gap, first = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const size_t d = form == Form::transposed ? i : sizes.size() - 1 - i;
      if (repeats[d]) continue;
      strides[d] = stride;
      stride *= std::max<int64_t>(sizes[d], 1) + (gap > 1 ? 1 : 0);
    }
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); ++d) last += std::max<int64_t>(sizes[d] - 1, 0) * strides[d];
    if (form == Form::backwards) {
      first = last;
      for (int64_t& each : strides) each = -each;
    }
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    const int64_t bytes = element_bytes(type);
    memory = std::make_unique<Guarded>(count == 0 ? 0 : (last + 1) * bytes);
    std::memset(memory->data(), 0x3c, static_cast<size_t>(memory->size()));
    view = view_of(memory->data() + (count == 0 ? 0 : first * bytes), type, sizes, strides);
  }

  Strided& fill(Random& random) {
    for (int64_t i = 0; i < view.shape.numel(); ++i) {
      const double odd[] = {0.0, -0.0, kInfinity, -kInfinity, kNaN, 1e-30, -3e4};
      const bool special = is_float(view.type) && random.below(8) == 0;
      const double usual = is_float(view.type) ? static_cast<double>(random.normal())
                                               : static_cast<double>(random.between(int64_t{-3}, int64_t{3}));
      set(view, i, special ? odd[random.below(7)] : usual);
    }
    return *this;
  }
};

// The bytes of a result's elements, in order.
inline std::vector<uint8_t> elements(const TensorView& view) {
  std::vector<uint8_t> result;
  for (int64_t i = 0; i < view.shape.numel(); ++i) {
    result.insert(result.end(), element(view, i), element(view, i) + element_bytes(view.type));
  }
  return result;
}

}  // namespace lowbit::test
