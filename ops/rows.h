// Rows of activations in the memory of an operator.
#pragma once

#include <cstdint>
#include <cstring>

#include "schedule.h"

namespace lowbit {

// Each piece of an operator's memory begins at a cache line: some belong to one thread each.
constexpr int64_t aligned(int64_t bytes) {
  constexpr int64_t line = kCacheLine;
  return (bytes + line - 1) / line * line;
}

// Puts `count` values of `item` bytes, `step` values apart, next to each other.
inline void gather(int64_t item, const void* from, int64_t step, void* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(static_cast<char*>(to) + i * item, static_cast<const char*>(from) + i * step * item,
                static_cast<size_t>(item));
  }
}

}  // namespace lowbit
