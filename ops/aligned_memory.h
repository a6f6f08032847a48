// Memory aligned to cache lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#ifdef _WIN32
#include <malloc.h>
#endif

namespace lowbit {

inline constexpr size_t kAlignment = 128;  // the longest cache line: that of Apple's CPUs

// False for more bytes than a program can address; `most` is the largest size_t, which has 32 bits on some systems.
constexpr bool is_addressable(int64_t bytes, int64_t most = PTRDIFF_MAX) { return bytes >= 0 && bytes <= most; }

// Allocates `bytes` of uninitialized memory; null if there is not enough.
inline void* allocate_aligned(int64_t bytes) {
  if (!is_addressable(bytes)) return nullptr;
#ifdef _WIN32
  return _aligned_malloc(static_cast<size_t>(bytes), kAlignment);
#else
  // Not std::aligned_alloc, which Android lacks before version 9.
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

struct FreeAligned {
  void operator()(void* memory) const { free_aligned(memory); }
};

}  // namespace lowbit
