// The `write` of every attention row: one new position, into the caches that attention_impl.h reads.
#pragma once

#include "../ukernel.h"

namespace lowbit {
namespace {

// `width` values, `from_step` and `to_step` elements from one to the next.
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

template <class Word>
void write_cache_of(const AttentionWriteArgs& args) {
  constexpr int64_t kItem = sizeof(Word);
  const int64_t panel = args.position / kKeyPositions * args.width * kKeyPositions, lane = args.position % kKeyPositions;
  char* const key = static_cast<char*>(args.keys) + (panel + lane) * kItem;
  char* const value = static_cast<char*>(args.values) + args.position * args.value_width * kItem;
  write_values<Word>(args.k, args.k_step, key, kKeyPositions, args.width);
  write_values<Word>(args.v, args.v_step, value, 1, args.value_width);
}

void write_cache(const AttentionWriteArgs& args) {
  switch (args.dtype) {
    case DType::f32: return write_cache_of<uint32_t>(args);
    case DType::bf16:
    case DType::f16: return write_cache_of<uint16_t>(args);
  }
}

}  // namespace
}  // namespace lowbit
