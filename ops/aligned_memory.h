// Memory that begins where cache lines do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#ifdef _WIN32
#include <malloc.h>
#endif

namespace lowbit {

inline constexpr size_t kAlignment = 128;  // the longest cache line: that of Apple's CPUs

// `bytes` of memory of undefined content; null: there is not so much.
inline void* allocate_aligned(int64_t bytes) {
#ifdef _WIN32
  return _aligned_malloc(static_cast<size_t>(bytes), kAlignment);
#else
  // Not std::aligned_alloc: Android has it since 9 only.
  void* memory = nullptr;
  return posix_memalign(&memory, kAlignment, static_cast<size_t>(bytes)) == 0 ? memory : nullptr;
#endif
}

inline void free_aligned(void* memory) {
#ifdef _WIN32
  _aligned_free(memory);
#else
  std::free(memory);
#endif
}

}  // namespace lowbit
