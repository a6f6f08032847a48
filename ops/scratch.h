// The working memory of operator calls.
#pragma once

#include <cstdint>

#include "../kernels/export.h"
#include "aligned_memory.h"

namespace lowbit {

// The process keeps up to this much between calls, for all threads together: enough for the activations of a call and the
// memory of 300 threads. Threads without a call keep nothing.
inline constexpr int64_t kKeptBytes = 64 << 20;

// A block of memory: its address, with the binary logarithm of its size in the lowest bits, or 0 there if the block is not kept
// after its call.
using Block = uintptr_t;

// Allocates at least `bytes` of uninitialized memory; 0 if there is not enough.
LOWBIT_API Block take_block(int64_t bytes);
LOWBIT_API void give_back(Block block);

// The number of bytes that are kept now, and a function that frees them.
LOWBIT_API int64_t kept_bytes();
LOWBIT_API void release_blocks();

// `bytes` of uninitialized memory, at least one, aligned to kAlignment. The process keeps it for the next call, because new
// memory costs a page fault per 4 KiB. More than kKeptBytes is freed after the call.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : block_(take_block(bytes)) {}
  ~Scratch() { give_back(block_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Null if there is not enough memory.
  char* data() const { return reinterpret_cast<char*>(block_ & ~Block{kAlignment - 1}); }

 private:
  const Block block_;
};

}  // namespace lowbit
