// The `write` function of every attention kernel: stores new positions in the caches that attention_impl.h reads, with that
// file's V. Keys are transposed: the inputs of a position are a column of its panel. Squares of 16 bytes are transposed in
// registers, because a store of 16 bytes costs as much as a store of one value.
#pragma once

#include "../ukernel.h"
#include "attention_impl.h"
#include "codes.h"

namespace lowbit {
namespace {

// Computes 4-bit codes and their scale; rotates x in place. The initial scale is replaced by the one with the least squared
// error for the codes.
template <class V>
float quantize_rotated(float* x, int64_t width, uint8_t* codes) {
  const float part = 1.0f / static_cast<float>(width & -width);  // exact; applied first, so that no sum exceeds the largest x
  for (int64_t i = 0; i < width; ++i) x[i] *= part;
  rotate<V>(x, width);
  const float scale = scale_of(x, width);
  if (!(scale > 0.0f)) {
    for (int64_t i = 0; i < width; ++i) codes[i] = 8;
    return scale;
  }
  const float inverse = 1.0f / scale;
  alignas(64) float levels[kAttentionWidth];
  for (int64_t i = 0; i < width; ++i) {
    x[i] *= inverse;
    int32_t code = 0;
    for (const float threshold : kCacheThresholds) code += x[i] > threshold ? 1 : 0;
    codes[i] = static_cast<uint8_t>(code);
  }
  int32_t squares = 0;
  for (int64_t i = 0; i < width; ++i) {
    const int32_t level = kCacheLevels[codes[i]];
    squares += level * level;
    levels[i] = static_cast<float>(level);
  }
  V products = V::broadcast(0.0f);
  for (int64_t i = 0; i < width; i += kLanes) products = V::fma(V::load(x + i), V::load(levels + i), products);
  return scale * (fold(products, V::add) / static_cast<float>(squares));
}

// Two codes per byte, which are `apart` inputs apart.
inline void pair_codes(const uint8_t* codes, int64_t width, int64_t apart, uint8_t* pairs) {
  for (int64_t i = 0; i < width; i += 2 * apart) {
    for (int64_t j = 0; j < apart; ++j) *pairs++ = static_cast<uint8_t>(codes[i + j] | codes[i + j + apart] << 4);
  }
}

// Returns the values of a position as contiguous bytes of a cache: where they are, or in `memory`. Stores the scale of codes.
// apart: inputs whose 4-bit codes share a byte.
template <class V>
const char* cached_bytes(const void* from, DType dtype, int64_t step, CacheType cache, int64_t apart, int64_t width,
                         void* scale, char* memory) {
  if (cache == cache_type_of(dtype)) {
    if (step == 1) return static_cast<const char*>(from);
    const size_t item = static_cast<size_t>(size_of(dtype));
    for (int64_t i = 0; i < width; ++i) std::memcpy(memory + i * size_of(dtype), element(from, dtype, i * step), item);
    return memory;
  }
  alignas(64) float values[kAttentionWidth];
  if (step == 1) {
    for (int64_t i = 0; i < width; i += kLanes) V::store(values + i, load_floats<V>(element(from, dtype, i), dtype));
  } else {
    for (int64_t i = 0; i < width; ++i) values[i] = load_as_f32(from, dtype, i * step);
  }
  if (has_scales(cache)) {
    float position_scale;
    if (cache == CacheType::i4) {
      uint8_t codes[kAttentionWidth];
      position_scale = quantize_rotated<V>(values, width, codes);
      pair_codes(codes, width, apart, reinterpret_cast<uint8_t*>(memory));
    } else {
      position_scale = quantize_position(values, width, reinterpret_cast<int8_t*>(memory));
    }
    std::memcpy(scale, &position_scale, sizeof position_scale);
  } else if (cache == CacheType::f32) {
    std::memcpy(memory, values, static_cast<size_t>(width) * sizeof(float));
  } else {
    const DType half = cache == CacheType::bf16 ? DType::bf16 : DType::f16;
    for (int64_t i = 0; i < width; i += kLanes) store_floats(memory + 2 * i, half, V::load(values + i));
  }
  return memory;
}

using Bytes16 = uint8_t __attribute__((vector_size(16)));

// The first or the last halves of a and b, with their words in turn.
template <int Word, bool Last>
LOWBIT_INLINE inline Bytes16 interleave(Bytes16 a, Bytes16 b) {
  constexpr auto from = [](int i) { return i / Word % 2 * 16 + (Last ? 8 : 0) + i / (2 * Word) * Word + i % Word; };
  return __builtin_shufflevector(a, b, from(0), from(1), from(2), from(3), from(4), from(5), from(6), from(7), from(8), from(9),
                                 from(10), from(11), from(12), from(13), from(14), from(15));
}

// Stores keys of one position, or of as many as there are words in 16 bytes. A word has the inputs of a position that are
// adjacent in a panel.
template <int Word>
void write_keys(const char* const* rows, int64_t count, char* to, int64_t bytes) {
  constexpr int kSquare = 16 / Word;
  if (count == 1) {
    for (int64_t i = 0; i < bytes; i += Word) std::memcpy(to + i * kKeyPositions, rows[0] + i, Word);
    return;
  }
  for (int64_t i = 0; i < bytes; i += 16) {
    Bytes16 square[kSquare], next[kSquare];
    for (int r = 0; r < kSquare; ++r) std::memcpy(&square[r], rows[r] + i, 16);
    for (int round = 1; round < kSquare; round *= 2) {
      for (int r = 0; r < kSquare / 2; ++r) {
        next[2 * r] = interleave<Word, false>(square[r], square[r + kSquare / 2]);
        next[2 * r + 1] = interleave<Word, true>(square[r], square[r + kSquare / 2]);
      }
      for (int r = 0; r < kSquare; ++r) square[r] = next[r];
    }
    for (int r = 0; r < kSquare; ++r) std::memcpy(to + i * kKeyPositions + r * kKeyPositions * Word, &square[r], 16);
  }
}

template <class V>
void write_cache(const AttentionWriteArgs& args) {
  const CacheType keys = key_type(args.cache), values = value_type(args.cache);
  const int64_t word = keys == CacheType::i4 ? 1 : keys == CacheType::i8 ? kQuad : cache_bytes(keys, 1);
  const int64_t square = 16 / word, count = args.positions > 1 ? args.positions : 1;
  const int64_t key_bytes = cache_bytes(keys, args.width), value_bytes = cache_bytes(values, args.value_width);
  alignas(64) char memory[16 * kAttentionWidth];  // the keys of a square
  const auto scale = [&](void* scales, int64_t i) {
    return scales == nullptr ? nullptr : static_cast<char*>(scales) + (args.position + i) * 4;
  };
  for (int64_t i = 0; i < count;) {
    const int64_t lane = (args.position + i) % kKeyPositions;
    const int64_t some = lane % square == 0 && count - i >= square ? square : 1;
    const char* rows[16];
    for (int64_t r = 0; r < some; ++r) {
      rows[r] = cached_bytes<V>(element(args.k, args.dtype, (i + r) * args.k_position_step), args.dtype, args.k_step, keys, 1,
                                args.width, scale(args.key_scales, i + r), memory + r * key_bytes);
    }
    char* const to = static_cast<char*>(args.keys) + (args.position + i - lane) * key_bytes + lane * word;
    if (word == 4) write_keys<4>(rows, some, to, key_bytes);
    else if (word == 2) write_keys<2>(rows, some, to, key_bytes);
    else write_keys<1>(rows, some, to, key_bytes);
    i += some;
  }
  for (int64_t i = 0; i < count; ++i) {
    const char* const row =
        cached_bytes<V>(element(args.v, args.dtype, i * args.v_position_step), args.dtype, args.v_step, values, kLanes,
                        args.value_width, scale(args.value_scales, i), memory);
    std::memcpy(static_cast<char*>(args.values) + (args.position + i) * value_bytes, row, static_cast<size_t>(value_bytes));
  }
}

}  // namespace
}  // namespace lowbit
