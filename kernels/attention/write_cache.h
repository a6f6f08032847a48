// The `write` function of every attention kernel: stores one new position in the caches that attention_impl.h reads, with that
// file's V.
#pragma once

#include "../ukernel.h"
#include "attention_impl.h"
#include "codes.h"

namespace lowbit {
namespace {

// Copies `width` values with strides of `from_step` and `to_step` elements.
template <class Word>
void write_values(const void* from, int64_t from_step, char* to, int64_t to_step, int64_t width) {
  constexpr int64_t kItem = sizeof(Word);
  const char* const source = static_cast<const char*>(from);
  if (from_step == 1 && to_step == 1) {
    std::memcpy(to, source, static_cast<size_t>(width * kItem));
    return;
  }
  for (int64_t i = 0; i < width; ++i) std::memcpy(to + i * to_step * kItem, source + i * from_step * kItem, kItem);
}

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

// Stores keys or values whose type differs from the cache's: `at` is element 0, `scale` the position's scale, and `to_step` is
// 1 for values.
template <class V>
void convert_values(const void* from, DType dtype, int64_t from_step, CacheType cache, char* at, int64_t to_step,
                    void* scale, int64_t width) {
  alignas(64) float values[kAttentionWidth];
  if (from_step == 1) {
    for (int64_t i = 0; i < width; i += kLanes) {
      V::store(values + i, load_floats<V>(static_cast<const char*>(from) + i * size_of(dtype), dtype));
    }
  } else {
    for (int64_t i = 0; i < width; ++i) values[i] = load_as_f32(from, dtype, i * from_step);
  }
  if (cache == CacheType::i4) {
    uint8_t codes[kAttentionWidth], pairs[kAttentionWidth / 2];
    const float position_scale = quantize_rotated<V>(values, width, codes);
    std::memcpy(scale, &position_scale, sizeof position_scale);
    pair_codes(codes, width, to_step == 1 ? kLanes : 1, pairs);
    return write_values<uint8_t>(pairs, 1, at, to_step, width / 2);
  }
  if (cache == CacheType::i8) {
    int8_t codes[kAttentionWidth];
    const float position_scale = quantize_position(values, width, codes);
    std::memcpy(scale, &position_scale, sizeof position_scale);
    if (to_step == 1) return write_values<uint8_t>(codes, 1, at, to_step, width);
    for (int64_t i = 0; i < width; i += kQuad) std::memcpy(at + i * kKeyPositions, codes + i, kQuad);
    return;
  }
  if (cache == CacheType::f32) return write_values<uint32_t>(values, 1, at, to_step, width);
  alignas(64) uint16_t halves[kAttentionWidth];
  const DType half = cache == CacheType::bf16 ? DType::bf16 : DType::f16;
  for (int64_t i = 0; i < width; i += kLanes) store_floats(halves + i, half, V::load(values + i));
  write_values<uint16_t>(halves, 1, at, to_step, width);
}

template <class V>
void write_cache(const AttentionWriteArgs& args) {
  const CacheType keys = key_type(args.cache), values = value_type(args.cache);
  const int64_t item = keys == CacheType::i4 ? 1 : keys == CacheType::i8 ? kQuad : cache_bytes(keys, 1);
  const int64_t position = args.position;
  const int64_t panel = position / kKeyPositions * kKeyPositions, lane = position % kKeyPositions;
  char* const key = static_cast<char*>(args.keys) + cache_bytes(keys, panel * args.width) + lane * item;
  char* const value = static_cast<char*>(args.values) + cache_bytes(values, position * args.value_width);
  if (args.cache != cache_type_of(args.dtype)) {
    const bool scaled = has_scales(args.cache);
    char* const key_scale = scaled ? static_cast<char*>(args.key_scales) + position * 4 : nullptr;
    char* const value_scale = scaled ? static_cast<char*>(args.value_scales) + position * 4 : nullptr;
    convert_values<V>(args.k, args.dtype, args.k_step, keys, key, kKeyPositions, key_scale, args.width);
    return convert_values<V>(args.v, args.dtype, args.v_step, values, value, 1, value_scale, args.value_width);
  }
  if (keys == CacheType::f32) {
    write_values<uint32_t>(args.k, args.k_step, key, kKeyPositions, args.width);
    return write_values<uint32_t>(args.v, args.v_step, value, 1, args.value_width);
  }
  write_values<uint16_t>(args.k, args.k_step, key, kKeyPositions, args.width);
  write_values<uint16_t>(args.v, args.v_step, value, 1, args.value_width);
}

}  // namespace
}  // namespace lowbit
